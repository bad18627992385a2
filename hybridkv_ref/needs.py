"""Recovery entries: what must be present to resume, written once in ``recovery.toml``, read in two forms.

An entry says which token positions ``[lo, hi)`` of its kind must be cached to start computing at ``s`` with entries
cached up to the frontier ``F >= s``.  The *runtime form* is a Python function of (s, F, parameters); the *prover's
form* is a set of guard conjuncts over the request, in which ``floor_to(F, ratio)`` is a request variable (the
language of the proofs has no division).  That both forms mean the same is an obligation of ``hybridkv check``.
"""

from collections.abc import Mapping
from typing import Literal

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, INT, Expr, Lit, Op, Ref, Scope, parse, render, rewrite
from hybridkv_ref.names import Declared
from hybridkv_ref.spec_files import Record
from hybridkv_ref.tables import Guard

FILE = "recovery.toml"
POSITIONS = ("s", "F")


class NeedSpec(Record, frozen=True):
    """One entry: the needed positions, whether the last segment must end exactly at ``hi``, and what a miss costs.

    ``params`` maps the entry's own names (ratio, window, ...) to constants of the tables; ``rules`` are those that a
    resume without the needed positions breaks.
    """

    lo: str
    hi: str
    miss: Literal["replay", "prefill"]
    exact: bool = False
    params: dict[str, str] = {}
    rules: tuple[str, ...] = ()
    doc: str = ""


class RecoverySpec(Record, frozen=True):
    """The file: ``boundary`` names the aligned expression and the request variable that stands for it in proofs."""

    title: str
    positions: dict[str, str]
    boundary: dict[str, str]
    need: dict[str, NeedSpec]


class Need(msgspec.Struct, frozen=True):
    """An entry, parsed: ``lo``/``hi`` over the refs s, F and the parameters (role input)."""

    kind: str
    lo: Expr
    hi: Expr
    exact: bool
    params: dict[str, str]
    miss: str
    rules: tuple[str, ...]


def read_needs(raw: Mapping[str, object]) -> tuple[RecoverySpec, dict[str, Need]]:
    """Parses recovery.toml; one-line InputError for anything else than an entry."""
    try:
        spec = msgspec.convert(raw, RecoverySpec)
    except msgspec.ValidationError as error:
        raise InputError(f"{FILE}: {error}") from None
    if set(spec.positions) != set(POSITIONS):
        raise InputError(f"{FILE}: positions: expected s and F, got {', '.join(spec.positions) or 'none'}")
    needs = {}
    for kind, entry in spec.need.items():
        names = {n: Ref("input", n, INT) for n in ("s", "F", *entry.params)}
        scope = Scope(names, arith=True)
        place = f"{FILE}: need.{kind}"
        lo, hi = parse(entry.lo, scope, f"{place}.lo", INT), parse(entry.hi, scope, f"{place}.hi", INT)
        needs[kind] = Need(kind, lo, hi, entry.exact, entry.params, entry.miss, entry.rules)
    return spec, needs


def prover_form(spec: RecoverySpec, need: Need, declared: Declared) -> tuple[Expr, Expr]:
    """``lo`` and ``hi`` over request variables and constants; refuses what the proofs' language cannot say."""
    entry, place = spec.need[need.kind], f"{FILE}: need.{need.kind}"
    scope = declared.scope("request", {"self": need.kind})
    mapping = {**spec.positions, **entry.params}
    for name, target in mapping.items():
        if target not in scope.names:
            raise InputError(f"{place}.params.{name}: '{target}' is no constant or request variable")
    for text, target in spec.boundary.items():
        if target not in scope.names or not scope.names[target].type.number:
            raise InputError(f"{FILE}: boundary.{text}: '{target}' is no number of the request")

    def turn(expr: Expr) -> Expr | None:
        if isinstance(expr, Op) and expr.op == "floor_to":
            target = spec.boundary.get(render(expr), "")
            if target not in scope.names:
                raise InputError(f"{place}: '{render(expr)}' has no entry under 'boundary'")
            return scope.names[target]
        if isinstance(expr, Op) and expr.op in ("min", "max"):
            left, right = rewrite(expr.args[0], turn), rewrite(expr.args[1], turn)
            first = Op("<=" if expr.op == "min" else ">=", (left, right), BOOL)
            return Op("ite", (first, left, right), INT)
        if isinstance(expr, Ref) and expr.role == "input":
            return scope.names[mapping[expr.name]]
        return None

    return rewrite(need.lo, turn), rewrite(need.hi, turn)


def _read_by_the_joint_row(declared: Declared, kind: str, yes_or_no: str, *numbers: str) -> Mapping[str, Ref]:
    """What a request of this kind can read; InputError if one of these variables is not there, or of another type."""
    names = declared.scope("request", {"self": kind}).names
    for name in (yes_or_no, *numbers):
        if name not in names or names[name].type.number != (name in numbers):
            wanted = "number" if name in numbers else "yes or no"
            raise InputError(f"{FILE}: need.{kind}: the joint row reads '{name}': the tables have no such {wanted}")
    return names


def held_everywhere(raw: Mapping[str, object], declared: Declared, kind: str) -> Expr:
    """What the conjuncts are for: some lease holds the token PROBE, if it is one of the needed positions."""
    spec, needs = read_needs(raw)
    lo, hi = prover_form(spec, needs[kind], declared)
    names = _read_by_the_joint_row(declared, kind, "req.uses", "PROBE", "req.at_probe")
    probe = names["PROBE"]
    needed = Op("and", (names["req.uses"], Op("<=", (lo, probe), BOOL), Op("<", (probe, hi), BOOL)), BOOL)
    return Op("implies", (needed, Op(">", (names["req.at_probe"], Lit(0, INT)), BOOL)), BOOL)


def resume_guards(raw: Mapping[str, object], declared: Declared) -> dict[str, tuple[Guard, ...]]:
    """Per kind, the conjuncts that the joint row (L3) demands of a request that uses it."""
    spec, needs = read_needs(raw)
    guards: dict[str, tuple[Guard, ...]] = {}
    for kind in declared.kinds_with("cacheable"):
        if kind not in needs:
            raise InputError(f"{FILE}: need.{kind}: missing; a cacheable kind needs a recovery entry")
        lo, hi = prover_form(spec, needs[kind], declared)
        names = _read_by_the_joint_row(declared, kind, "req.uses", "req.hits", "req.cov_lo", "req.cov")
        cover_lo, cover = names["req.cov_lo"], names["req.cov"]
        idle = Op("or", (Op("not", (names["req.uses"],), BOOL), Op(">=", (lo, hi), BOOL)), BOOL)
        parts = [
            Op(">", (names["req.hits"], Lit(0, INT)), BOOL),
            Op("<=", (cover_lo, lo), BOOL),
            Op("==" if needs[kind].exact else ">=", (cover, hi), BOOL),
        ]
        place = f"{FILE}: need.{kind}"
        exprs = [Op("or", (*idle.args, part), BOOL) for part in parts]
        guards[kind] = tuple(Guard(render(e), e, f"{place}[{i}]") for i, e in enumerate(exprs))
    unknown = [k for k in needs if k not in declared.kind_files]
    if unknown:
        raise InputError(f"{FILE}: need.{unknown[0]}: no such kind")
    return guards
