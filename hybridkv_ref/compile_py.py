"""Expressions as Python source: the back end that runs."""

from collections.abc import Callable, Mapping

from hybridkv_ref.expr import BOOL, Expr, Lit, Member, Ref

_SYMBOL = {
    "==": "==",
    "!=": "!=",
    "<": "<",
    "<=": "<=",
    ">": ">",
    ">=": ">=",
    "+": "+",
    "-": "-",
    "and": "and",
    "or": "or",
}
Namer = Callable[[Ref], str]


def attribute(name: str) -> str:
    """The attribute that stores a variable: ``cov.compressed_kv`` becomes ``cov__compressed_kv``."""
    return name.replace(".", "__")


def python(expr: Expr, name: Namer) -> str:
    """Python source of an expression; ``name`` writes the variables."""
    match expr:
        case Lit(value=value, type=kind):
            return repr(bool(value)) if kind == BOOL else repr(value)
        case Ref():
            return name(expr)
        case Member(arg=arg, members=members):
            return f"({python(arg, name)} in {members!r})"
    args = [python(a, name) for a in expr.args]
    if expr.op in _SYMBOL:
        return "(" + f" {_SYMBOL[expr.op]} ".join(args) + ")"
    if expr.op == "not":
        return f"(not {args[0]})"
    if expr.op == "neg":
        return f"(-{args[0]})"
    if expr.op == "implies":
        return f"(not {args[0]} or {args[1]})"
    if expr.op == "ite":
        return f"({args[1]} if {args[0]} else {args[2]})"
    if expr.op == "floor_to":
        return f"({args[0]} - {args[0]} % {args[1]})"
    return f"{expr.op}({args[0]}, {args[1]})"


def role_name(role: str) -> str:
    """The Python name of a role's entity; ``self`` is the segment."""
    return "seg" if role == "self" else role


def namer(constants: Mapping[str, int]) -> Namer:
    """Writes variables as attributes of the roles, constants as their values."""

    def name(ref: Ref) -> str:
        if ref.role == "const":
            return repr(constants[ref.name])
        if ref.role == "input":
            return f"in_{ref.name}"
        return f"{'G' if ref.role == 'global' else role_name(ref.role)}.{attribute(ref.name)}"

    return name


def predicate_source(expr: Expr, function: str, roles: tuple[str, ...], constants: Mapping[str, int]) -> str:
    """A function of (G, roles...) that evaluates a one-state expression."""
    arguments = ", ".join(["G", *map(role_name, roles)])
    return f"def {function}({arguments}):\n    return {python(expr, namer(constants))}"
