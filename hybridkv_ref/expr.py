"""The expression language of the tables: closed, typed, with Python's surface syntax.

Theory of operation.  A guard, an effect's right-hand side or an invariant is one short string.  ``parse`` turns it into
a tree of the node classes below and types it on the way, against a *scope* that says which names exist; nothing is
evaluated here.  Three back ends read the same tree: ``compile_py`` (what runs), ``model_checks.smt`` (what is proved)
and ``render`` (what a person reads).

The language: ``and or not``, comparisons, ``x in SET`` and ``x in {A, B}``, ``+ -``, ``a if c else b``,
``implies(a, b)``; in step properties ``new(x)``; in recovery entries also ``min``, ``max`` and ``floor_to(x, unit)``.
Types: int, counter (an int that only grows), bool and enums.  No calls, loops, products, quantifiers or strings.
"""

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from hybridkv_ref.errors import InputError


@dataclass(frozen=True, slots=True)
class Type:
    """A type: ``name`` is int, counter, bool or enum; ``members`` are an enum's names, in order.

    ``label`` keeps two enums with equal members apart (the stages of two kinds, say).
    """

    name: str
    members: tuple[str, ...] = ()
    label: str = ""

    @property
    def number(self) -> bool:
        """True for int and counter."""
        return self.name in ("int", "counter")

    def __str__(self) -> str:
        return self.name if self.name != "enum" else "enum{" + ", ".join(self.members) + "}"


INT, COUNTER, BOOL = Type("int"), Type("counter"), Type("bool")


def enum(members: tuple[str, ...], label: str = "") -> Type:
    """The enum type with these members, in this order."""
    return Type("enum", members, label)


@dataclass(frozen=True, slots=True)
class Lit:
    """A literal: an int, a bool, or an enum member's name."""

    value: int | str
    type: Type


@dataclass(frozen=True, slots=True)
class Ref:
    """A variable.

    ``role`` names the entity (self, lease, req, src, ... or global, const, input); ``new`` its next value.
    """

    role: str
    name: str
    type: Type
    new: bool = False


@dataclass(frozen=True, slots=True)
class Op:
    """An operator node. ``op`` is one of and or not implies == != < <= > >= + - neg ite min max floor_to."""

    op: str
    args: tuple["Expr", ...]
    type: Type


@dataclass(frozen=True, slots=True)
class Member:
    """``arg in {members}`` over an enum."""

    arg: "Expr"
    members: tuple[str, ...]
    type: Type = BOOL


Expr: TypeAlias = Lit | Ref | Op | Member
TRUE = Lit(1, BOOL)


@dataclass(frozen=True)
class Scope:
    """The names that an expression may use.

    ``names`` maps a surface name (``end``, ``lease.seen``) to its Ref; ``sets`` a set name to its members per enum type
    (each kind has its own ``READABLE``).  ``new`` allows ``new(x)``; ``arith`` allows the recovery functions.
    """

    names: Mapping[str, Ref]
    sets: Mapping[str, Mapping[Type, tuple[str, ...]]] = field(default_factory=dict)
    new: bool = False
    arith: bool = False

    def with_names(self, extra: Mapping[str, Ref]) -> "Scope":
        """This scope with more names."""
        return replace(self, names={**self.names, **extra})


_COMPARE: dict[type[ast.cmpop], str] = {
    ast.Eq: "==",
    ast.NotEq: "!=",
    ast.Lt: "<",
    ast.LtE: "<=",
    ast.Gt: ">",
    ast.GtE: ">=",
}


class _Parser:
    def __init__(self, text: str, scope: Scope, place: str) -> None:
        self.text, self.scope, self.place = text, scope, place

    def fail(self, node: ast.expr, reason: str) -> InputError:
        token = ast.get_source_segment(self.text, node) or self.text
        return InputError(f"{self.place}: column {node.col_offset + 1}, at '{token}': {reason}")

    def parse(self, want: Type) -> Expr:
        try:
            tree = ast.parse(self.text, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            column = getattr(error, "offset", None) or 1
            message = getattr(error, "msg", None) or "not an expression"
            raise InputError(f"{self.place}: column {column}, at '{self.text}': {message}") from None
        try:
            return self.typed(tree.body, want)
        except RecursionError:
            raise InputError(f"{self.place}: column 1: expression nested too deeply") from None

    def walk(self, node: ast.expr, want: Type | None) -> Expr:
        """Types one node; ``want`` is the enum expected here, so that a bare member name resolves."""
        match node:
            case ast.Constant(value=bool() as value):
                return Lit(int(value), BOOL)
            case ast.Constant(value=int() as value):
                return Lit(value, INT)
            case ast.Name() | ast.Attribute():
                return self.name(node, want)
            case ast.BoolOp(op=op, values=values):
                kids = tuple(self.typed(v, BOOL) for v in values)
                return Op("and" if isinstance(op, ast.And) else "or", kids, BOOL)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return Op("not", (self.typed(operand, BOOL),), BOOL)
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return Op("neg", (self.typed(operand, INT),), INT)
            case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as op, right=right):
                args = (self.typed(left, INT), self.typed(right, INT))
                return Op("+" if isinstance(op, ast.Add) else "-", args, INT)
            case ast.IfExp(test=test, body=body, orelse=orelse):
                return self.choice(node, test, body, orelse, want)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self.compare(node, left, op, right)
            case ast.Compare():
                raise self.fail(node, "write chained comparisons with 'and'")
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                return self.call(node, name, args)
        raise self.fail(node, "not part of the expression language")

    def typed(self, node: ast.expr, want: Type) -> Expr:
        got = self.walk(node, want)
        if not same(got.type, want):
            raise self.fail(node, f"is {got.type}, expected {want}")
        return got

    def name(self, node: ast.Name | ast.Attribute, want: Type | None) -> Expr:
        surface = dotted(node)
        if surface is None:
            raise self.fail(node, "not part of the expression language")
        if want is not None and want.name == "enum" and surface in want.members:
            return Lit(surface, want)
        ref = self.scope.names.get(surface)
        if ref is None:
            hint = f"not a member of {want}" if want is not None and want.name == "enum" else "unknown name"
            raise self.fail(node, hint)
        return ref

    def choice(self, node: ast.expr, test: ast.expr, body: ast.expr, other: ast.expr, want: Type | None) -> Expr:
        cond, left = self.typed(test, BOOL), self.walk(body, want)
        right = self.walk(other, left.type if left.type.name == "enum" else want)
        if not same(left.type, right.type):
            raise self.fail(node, f"branches are {left.type} and {right.type}")
        return Op("ite", (cond, left, right), INT if left.type.number else left.type)

    def compare(self, node: ast.expr, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Expr:
        if isinstance(op, (ast.In, ast.NotIn)):
            inside = self.inside(left, right)
            return inside if isinstance(op, ast.In) else Op("not", (inside,), BOOL)
        if type(op) not in _COMPARE:
            raise self.fail(node, "not part of the expression language")
        try:
            lhs = self.walk(left, None)
            rhs = self.walk(right, lhs.type)
        except InputError as first:
            # An enum member may stand on the left: type the right side first, then try again.
            try:
                rhs = self.walk(right, None)
                lhs = self.walk(left, rhs.type)
            except InputError:
                raise first from None
        if not same(lhs.type, rhs.type):
            raise self.fail(node, f"compares {lhs.type} with {rhs.type}")
        symbol = _COMPARE[type(op)]
        if symbol not in ("==", "!=") and not lhs.type.number:
            raise self.fail(node, f"'{symbol}' needs numbers, not {lhs.type}")
        return Op(symbol, (lhs, rhs), BOOL)

    def inside(self, left: ast.expr, right: ast.expr) -> Expr:
        arg = self.walk(left, None)
        if arg.type.name != "enum":
            raise self.fail(left, f"'in' needs an enum, not {arg.type}")
        if isinstance(right, ast.Set):
            names = []
            for item in right.elts:
                member = self.walk(item, arg.type)
                if not isinstance(member, Lit):
                    raise self.fail(item, f"not a member of {arg.type}")
                names.append(str(member.value))
            return Member(arg, tuple(names))
        surface = dotted(right)
        known = self.scope.sets.get(surface) if surface else None
        if known is None:
            raise self.fail(right, "unknown set")
        if arg.type not in known:
            raise self.fail(right, f"not a set of {arg.type}")
        return Member(arg, known[arg.type])

    def call(self, node: ast.expr, name: str, args: list[ast.expr]) -> Expr:
        if name == "implies" and len(args) == 2:
            return Op("implies", (self.typed(args[0], BOOL), self.typed(args[1], BOOL)), BOOL)
        if name == "new" and len(args) == 1 and self.scope.new:
            ref = self.walk(args[0], None)
            if not isinstance(ref, Ref) or ref.role in ("const", "input"):
                raise self.fail(args[0], "new(...) takes one variable")
            return replace(ref, new=True)
        if name in ("min", "max", "floor_to") and len(args) == 2 and self.scope.arith:
            return Op(name, (self.typed(args[0], INT), self.typed(args[1], INT)), INT)
        raise self.fail(node, "not part of the expression language")


def dotted(node: ast.expr) -> str | None:
    """``a`` or ``a.b`` as written, or None for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        return f"{node.value.id}.{node.attr}"
    return None


def same(left: Type, right: Type) -> bool:
    """Whether two types may meet: int and counter do, enums only with equal members."""
    return left == right or (left.number and right.number)


def parse(text: str, scope: Scope, place: str, want: Type = BOOL) -> Expr:
    """Parses and types one expression of type ``want``; InputError names place, column, token and reason."""
    if not isinstance(text, str):
        raise InputError(f"{place}: expected an expression in quotes, got {text!r}")
    return _Parser(text, scope, place).parse(want)


def children(expr: Expr) -> tuple[Expr, ...]:
    """The direct sub-expressions."""
    match expr:
        case Op(args=args):
            return args
        case Member(arg=arg):
            return (arg,)
    return ()


def refs(expr: Expr) -> frozenset[Ref]:
    """Every variable that the expression reads."""
    if isinstance(expr, Ref):
        return frozenset((expr,))
    found: frozenset[Ref] = frozenset()
    for kid in children(expr):
        found |= refs(kid)
    return found


def rewrite(expr: Expr, change: Callable[[Expr], Expr | None]) -> Expr:
    """The expression with every node for which ``change`` gives a result replaced by it, outermost first."""
    changed = change(expr)
    if changed is not None:
        return changed
    match expr:
        case Op(op=op, args=args, type=kind):
            return Op(op, tuple(rewrite(a, change) for a in args), kind)
        case Member(arg=arg, members=members):
            return Member(rewrite(arg, change), members)
    return expr


_INFIX = {"and", "or", "==", "!=", "<", "<=", ">", ">=", "+", "-"}


def render(expr: Expr, names: Callable[[Ref], str] | None = None) -> str:
    """The expression as text in the language itself; ``names`` overrides how a variable is written."""
    match expr:
        case Lit(value=value, type=kind):
            return ("True" if value else "False") if kind == BOOL else str(value)
        case Ref(role=role, name=name, new=new):
            text = names(expr) if names else name if role in ("self", "global", "const", "input") else f"{role}.{name}"
            return f"new({text})" if new else text
        case Member(arg=arg, members=members):
            return f"{_wrap(arg, names)} in {{{', '.join(members)}}}" if members else "False"
    op, args = expr.op, [_wrap(a, names) for a in expr.args]
    if op in _INFIX:
        return f" {op} ".join(args)
    if op == "not":
        return f"not {args[0]}"
    if op == "neg":
        return f"-{args[0]}"
    if op == "ite":
        return f"{args[1]} if {args[0]} else {args[2]}"
    return f"{op}({', '.join(render(a, names) for a in expr.args)})"


def _wrap(expr: Expr, names: Callable[[Ref], str] | None) -> str:
    text = render(expr, names)
    bare = isinstance(expr, (Lit, Ref)) or (isinstance(expr, Op) and expr.op not in (*_INFIX, "not", "neg", "ite"))
    return text if bare else f"({text})"
