"""Recovery entries as expressions and Python functions of the two positions (s, F).

``runtime_form`` is an entry with its parameters filled in.  ``prover_form_at`` is what the prover reads, brought to the
same two positions: request variables become s and F, the boundary variable becomes the aligned position that it stands
for, constants become the same parameters.  ``compile_form`` turns either into a Python function, so that what runs and
what is proved can be compared term by term and value by value.
"""

from collections.abc import Callable, Mapping

from hybridkv_ref.compile_py import predicate_source, python
from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import INT, Expr, Lit, Ref, Scope, parse, refs, rewrite
from hybridkv_ref.names import Declared
from hybridkv_ref.needs import FILE, Need, RecoverySpec, prover_form
from hybridkv_ref.tables import Constant

Form = tuple[Expr, Expr]
"""``lo`` and ``hi`` over the inputs s and F only."""

NeedFunction = Callable[[int, int], tuple[int, int, bool]]
"""(s, F) -> (lo, hi, exact), in tokens: positions [lo, hi) must be cached; ``exact``: by a segment that ends at hi."""

POSITIONS = ("s", "F")


def runtime_form(need: Need, params: Mapping[str, int]) -> Form:
    """The entry with its parameters as values; InputError for a parameter too many or too few."""
    _same_names(need, params)
    return _fill(need.lo, params), _fill(need.hi, params)


def prover_form_at(spec: RecoverySpec, need: Need, declared: Declared, params: Mapping[str, int]) -> Form:
    """The prover's form of the entry over s and F, the boundary variable as the aligned position it stands for."""
    lo, hi = prover_form(spec, need, declared)
    values = stand_ins(spec, need, declared, params)

    def value(expr: Expr) -> Expr | None:
        return values.get(expr) if isinstance(expr, Ref) else None

    return rewrite(lo, value), rewrite(hi, value)


def stand_ins(spec: RecoverySpec, need: Need, declared: Declared, params: Mapping[str, int]) -> dict[Ref, Expr]:
    """What each variable of the prover's form is at run time: an expression over s and F, or a parameter's value."""
    _same_names(need, params)
    names = declared.scope("request", {"self": need.kind}).names
    values: dict[Ref, Expr] = {names[spec.positions[name]]: Ref("input", name, INT) for name in POSITIONS}
    for name, constant in spec.need[need.kind].params.items():
        values[names[constant]] = Lit(params[name], INT)
    every = {*POSITIONS, *(name for entry in spec.need.values() for name in entry.params)}
    scope = Scope({name: Ref("input", name, INT) for name in every}, arith=True)
    for text, target in spec.boundary.items():
        aligned = _fill(parse(text, scope, f"{FILE}: boundary", INT), params)
        if all(ref.name in POSITIONS for ref in refs(aligned)):  # else it is of parameters that this entry has not
            values[names[target]] = aligned
    return values


def compile_form(form: Form, exact: bool) -> NeedFunction:
    """The form as a Python function of (s, F)."""
    lo, hi = (python(part, lambda ref: ref.name) for part in form)
    source = f"def need(s, F):\n    return {lo}, {hi}, {exact}"
    space: dict[str, NeedFunction] = {}
    exec(compile(source, f"<{FILE}>", "exec"), {"min": min, "max": max}, space)
    return space["need"]


def check_params(spec: RecoverySpec, need: Need, params: Mapping[str, int], constants: Mapping[str, Constant]) -> None:
    """Refuses parameters for which the tables' constants, and so the proofs, do not stand: InputError names the
    reason.
    """
    _same_names(need, params)
    place = f"{FILE}: need.{need.kind}.params"
    values = {target: params[name] for name, target in spec.need[need.kind].params.items()}
    for name, target in spec.need[need.kind].params.items():
        if not isinstance(params[name], int) or isinstance(params[name], bool):
            raise InputError(f"{place}.{name}: expected an integer, got {params[name]!r}")
        for text, expr in constants[target].assume:
            if any(ref.name not in values for ref in refs(expr)):
                continue  # speaks of a constant that no parameter of this entry gives
            space: dict[str, Callable[[None], bool]] = {}
            exec(predicate_source(expr, "holds", (), values), {}, space)
            if not space["holds"](None):
                raise InputError(f"{place}.{name}: {params[name]} breaks '{text}'")


def _fill(expr: Expr, params: Mapping[str, int]) -> Expr:
    def value(node: Expr) -> Expr | None:
        return Lit(params[node.name], INT) if isinstance(node, Ref) and node.name in params else None

    return rewrite(expr, value)


def _same_names(need: Need, params: Mapping[str, int]) -> None:
    if set(params) != set(need.params):
        expected, got = ", ".join(need.params) or "none", ", ".join(params) or "none"
        raise InputError(f"{FILE}: need.{need.kind}.params: expected {expected}, got {got}")
