"""The two forms of every recovery entry mean the same: what the prover reads, and what runs.

The prover's language has no division, so an aligned position is a request variable there (``boundary`` in
recovery.toml) that invariants hold between its neighbours.  Per kind and set of constant parameters, for all 0 <= s
<= F:
  * ``lo`` and ``hi`` are equal when the variable is the aligned position,
  * the conjuncts of the joint row hold exactly if something is held and the covered range contains [lo, hi), and ends
    at hi where it must,
  * the aligned position is the only multiple that meets what the invariants say of the variable.
``first_difference`` compares the generated Python functions pair by pair, as a second opinion without a solver.
"""

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import z3

from hybridkv_ref.expr import INT, Expr, Lit, Op, Ref, refs
from hybridkv_ref.model_checks.obligations import Obligation
from hybridkv_ref.model_checks.smt import new_solver, term
from hybridkv_ref.names import Declared, declare
from hybridkv_ref.need_functions import NeedFunction, compile_form, prover_form_at, runtime_form, stand_ins
from hybridkv_ref.needs import FILE, Need, RecoverySpec, prover_form, read_needs, resume_guards
from hybridkv_ref.spec_files import Spec
from hybridkv_ref.tables import Guard

VALUES: Mapping[str, tuple[int, ...]] = {"ratio": (1, 4, 128), "halo": (0, 4), "window": (1, 4, 128, 1024)}
"""What real models use, per parameter of recovery.toml: DeepSeek-V4's 4 and 128, plain attention's 1, common
windows.
"""

OTHER = (1, 4, 128)
"""For parameters of kinds that are not among them."""

LIMIT = 1024
"""``first_difference`` takes every 0 <= s <= F <= LIMIT."""


def parameter_sets(need: Need) -> Iterator[dict[str, int]]:
    """Every combination of VALUES for the parameters of an entry."""
    for values in itertools.product(*(VALUES.get(name, OTHER) for name in need.params)):
        yield dict(zip(need.params, values, strict=True))


def prove_equality(spec: Spec, running: Mapping[str, Need] | None = None) -> list[Obligation]:
    """One obligation per kind, parameter set and claim.  ``running`` replaces the entries of the form that runs."""
    recovery, needs = read_needs(spec.recovery)
    declared = declare(spec.files)
    guards = resume_guards(spec.recovery, declared)
    found: list[Obligation] = []
    for kind, need in needs.items():
        run = (running or needs)[kind]
        for params in parameter_sets(need):
            found += _Claims(recovery, need, declared, params).obligations(run, guards.get(kind, ()))
    return found


class _Claims:
    """The claims about one entry at one set of parameters, over the terms s, F and the covered range."""

    def __init__(self, spec: RecoverySpec, need: Need, declared: Declared, params: Mapping[str, int]) -> None:
        self.spec, self.need, self.declared, self.params = spec, need, declared, params
        self.values = stand_ins(spec, need, declared, params)
        names = declared.scope("request", {"self": need.kind}).names
        self.held, self.cover_lo, self.cover = z3.Ints("hits cov_lo cov")
        self.terms: dict[Ref, z3.ExprRef] = {
            names["req.hits"]: self.held,
            names["req.cov_lo"]: self.cover_lo,
            names["req.cov"]: self.cover,
        }
        self.uses = names["req.uses"]
        used = refs(Op("+", prover_form(spec, need, declared), INT))
        self.boundaries = [names[target] for target in spec.boundary.values() if names[target] in used]
        s, frontier = z3.Int("s"), z3.Int("F")
        self.inputs = {"s": s, "F": frontier}
        self.domain = [s >= 0, s <= frontier]

    def look(self, ref: Ref) -> z3.ExprRef:
        """A variable as a term; the prover's variables as what stands for them at run time."""
        if ref.role == "input":
            return self.inputs[ref.name]
        if ref == self.uses:
            return z3.BoolVal(True)
        return term(self.values[ref], self.look) if ref in self.values else self.terms[ref]

    def obligations(self, run: Need, guards: Sequence[Guard]) -> Iterator[Obligation]:
        """Solves every claim."""
        lo, hi = (term(part, self.look) for part in runtime_form(run, self.params))
        proved_lo, proved_hi = (
            term(part, self.look) for part in prover_form_at(self.spec, self.need, self.declared, self.params)
        )
        yield self.solve("lo", lo == proved_lo)
        yield self.solve("hi", hi == proved_hi)
        if guards:
            inside = [self.held > 0, self.cover_lo <= lo, self.cover >= hi, *([self.cover == hi] if run.exact else [])]
            row = z3.And([term(guard.expr, self.look) for guard in guards])
            yield self.solve("joint row", row == z3.Or(lo >= hi, z3.And(inside)))
        for ref in self.boundaries:
            yield self.solve(f"boundary {ref.name}", self._only_multiple(self.values[ref]))

    def _only_multiple(self, aligned: Expr) -> z3.BoolRef:
        """The aligned position meets 0 <= b <= F < b + unit, and no other multiple of the unit does."""
        if not isinstance(aligned, Op) or not isinstance(aligned.args[1], Lit):
            return z3.BoolVal(False)
        unit, frontier, other = int(aligned.args[1].value), self.inputs["F"], z3.Int("other")
        value = term(aligned, self.look)

        def meets(bound: z3.ArithRef) -> z3.BoolRef:
            return z3.And(bound >= 0, bound <= frontier, frontier < bound + unit)

        return z3.And(meets(value), z3.Implies(z3.And(meets(other), other % unit == 0), other == value))

    def solve(self, claim: str, holds: z3.BoolRef) -> Obligation:
        """Asks for a counterexample."""
        begun = time.perf_counter()
        solver = new_solver()
        solver.add(*self.domain, z3.Not(holds))
        answer = solver.check()
        spent = (time.perf_counter() - begun) * 1000
        settled = None if answer == z3.unknown else answer == z3.unsat
        return _obligation(self.need, self.params, claim, "equality", settled, spent)


def both_functions(
    spec: Spec, kind: str, params: Mapping[str, int], running: Mapping[str, Need] | None = None
) -> tuple[NeedFunction, NeedFunction]:
    """The form that runs and the prover's form of one entry, as Python functions."""
    recovery, needs = read_needs(spec.recovery)
    need, run = needs[kind], (running or needs)[kind]
    proved = prover_form_at(recovery, need, declare(spec.files), params)
    return compile_form(runtime_form(run, params), run.exact), compile_form(proved, need.exact)


def first_difference(left: NeedFunction, right: NeedFunction, limit: int = LIMIT) -> tuple[int, int] | None:
    """The first (s, F) with 0 <= s <= F <= limit at which two forms differ, or None."""
    for frontier in range(limit + 1):
        mine, theirs = ([form(s, frontier) for s in range(frontier + 1)] for form in (left, right))
        if mine != theirs:
            return next(s for s in range(frontier + 1) if mine[s] != theirs[s]), frontier
    return None


def compare_exhaustively(spec: Spec, running: Mapping[str, Need] | None = None, limit: int = LIMIT) -> list[Obligation]:
    """``first_difference`` for every kind and parameter set, one obligation each."""
    found = []
    for kind, need in read_needs(spec.recovery)[1].items():
        for params in parameter_sets(need):
            begun = time.perf_counter()
            difference = first_difference(*both_functions(spec, kind, params, running), limit)
            spent = (time.perf_counter() - begun) * 1000
            found.append(_obligation(need, params, "all pairs", "exhaustive", difference is None, spent))
    return found


def _obligation(
    need: Need, params: Mapping[str, int], claim: str, method: str, holds: bool | None, milliseconds: float
) -> Obligation:
    status = "unknown" if holds is None else "proved" if holds else "failed"
    at = ",".join(f"{name}={value}" for name, value in params.items())
    name = f"recovery/{need.kind}[{at}]/{claim}"
    return Obligation(name, FILE, f"need.{need.kind}", claim, method, status, milliseconds)
