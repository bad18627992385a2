"""Inference: which invariants the rows have, found from templates without being told any.

Houdini: assume all candidates, drop those that the first state or a row breaks, until nothing is dropped.  What is left is
the largest inductive conjunction of candidates.  The frames, sums and bystanders are those of ``induction``; of the
tables' own invariants none is used.  Candidates (see ``candidates``) are ``premise implies claim``:

* premise: nothing; one stage of the entity; that and a count of it that is positive;
* claim: an int against 0 and 1, a bool or its opposite, an enum is not a member, two related ints ordered.

A set of stages or of members needs no template: it is a conjunction of these.  Two ints are *related* if rows compare
them or assign one from the other, directly or through others.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

import numpy as np
import z3

from hybridkv_ref.expr import BOOL, INT, TRUE, Expr, Lit, Op, Ref, children, refs
from hybridkv_ref.model_checks.base import Base
from hybridkv_ref.model_checks.frames import Assumptions, Frame, Inst, copy_pairs, placements
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.instances import Instance
from hybridkv_ref.model_checks.samples import Samples, Scope, sampled
from hybridkv_ref.model_checks.smt import new_solver
from hybridkv_ref.rows import STAGE_ROLE
from hybridkv_ref.tables import CLASS_OF, Property, Tables, Var

Progress = Callable[[int, int], None]
Premise = tuple[Expr, ...]
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
ROLES_OF: dict[str, tuple[str, ...]] = {"global": (), "segment": ("self",), "lease": ("lease", "self", "req"), "request": ("req",), "graph": ("graph",), "copy": ("copy", "src", "dst")}


@dataclass(frozen=True)
class Candidate:
    """One implication over the entities of a scope."""

    scope: Scope
    premise: Premise
    claim: Expr


@dataclass(frozen=True)
class InferResult:
    """``inferred`` is the inductive conjunction, grouped by premise; ``implied`` names the tables' invariants in it.

    ``sound`` tells whether the sums that the inference assumes were proved under it; ``dropped`` counts candidates.
    """

    inferred: tuple[Property, ...]
    implied: tuple[str, ...]
    missed: tuple[str, ...]
    candidates: int
    dropped: int
    rounds: int
    sound: bool


class Related:
    """Which ints the rows relate, as classes of (class of entity, variable)."""

    def __init__(self, tables: Tables) -> None:
        self.parent: dict[tuple[str, str], tuple[str, str]] = {}
        for event in tables.events:
            tag = f"input of {event.id}"
            for guard in event.guards:
                self.compared(guard.expr, tag)
            for effect in event.effects:
                self.compared(effect.expr, tag)
                self.join([effect.target, *values(effect.expr)], tag)

    def compared(self, expr: Expr, tag: str) -> None:
        """Joins both sides of every comparison."""
        if isinstance(expr, Op) and expr.op in COMPARISONS:
            self.join([r for side in expr.args for r in values(side)], tag)
        for kid in children(expr):
            self.compared(kid, tag)

    def join(self, found: list[Ref], tag: str) -> None:
        """Makes numbers one class."""
        roots = [self.root(self.key(r, tag)) for r in found if r.type.number]
        for root in roots[1:]:
            self.parent[self.root(root)] = self.root(roots[0])

    @staticmethod
    def key(ref: Ref, tag: str = "") -> tuple[str, str]:
        """A variable without its role; an input belongs to its event."""
        return (tag if ref.role == "input" else CLASS_OF.get(ref.role, ref.role), ref.name)

    def root(self, key: tuple[str, str]) -> tuple[str, str]:
        """The representative of a class."""
        while self.parent.get(key, key) != key:
            key = self.parent[key]
        return key

    def __call__(self, left: Ref, right: Ref) -> bool:
        """Whether two ints are in one class."""
        return self.root(self.key(left)) == self.root(self.key(right))


def values(expr: Expr) -> list[Ref]:
    """The variables that an expression may add up or choose from; what a condition reads is left out."""
    if isinstance(expr, Ref):
        return [expr]
    if isinstance(expr, Op) and expr.op in ("+", "-", "neg", "ite"):
        return [r for kid in (expr.args[1:] if expr.op == "ite" else expr.args) for r in values(kid)]
    return []


# -- candidates -----------------------------------------------------------------------------------------------------------
def scopes(tables: Tables) -> Iterator[Scope]:
    """Every scope with every choice of kinds for it."""
    yield "global", ()
    for cls in ("request", "graph"):
        yield cls, ()
    for kind, spec in tables.kinds.items():
        yield "segment", (("self", kind),)
        if "cacheable" in spec.capabilities:
            yield "lease", (("self", kind),)
    yield from (("copy", (("src", src), ("dst", dst))) for src, dst in sorted(copy_pairs(tables)))


def candidates(tables: Tables) -> Iterator[Candidate]:
    """All candidates of the templates."""
    related = Related(tables)
    for scope in scopes(tables):
        owned = variables(tables, scope)
        own = next(iter(owned))
        shared = constants(tables, scope)
        for premise, about in premises(tables, scope[0], owned):
            for role, refs_of in owned.items() if about is None else ():
                wanted = refs_of if role == own else [r for r in refs_of if premise and r.name == "stage"]
                yield from (Candidate(scope, premise, claim) for ref in wanted for claim in alone(ref))
            numbers = [r for role in owned for r in owned[role] if r.type.number]
            for left, right in permutations([*numbers, *shared], 2):
                if pairs_up(scope[0], left, right) and related(left, right) and fits(about, left, right):
                    orders = ("<=",) if scope[0] in ("lease", "copy", "global") else ("<=", "<")
                    yield from (Candidate(scope, premise, Op(order, (left, right), BOOL)) for order in orders)


def variables(tables: Tables, scope: Scope) -> dict[str, list[Ref]]:
    """The variables of a scope by role; of a request's per-kind ones those of the lease's kind."""
    kinds = dict(scope[1])
    if scope[0] == "global":
        return {"global": [Ref("global", n, v.type) for n, v in tables.globals.items()]}
    found: dict[str, list[Ref]] = {}
    for role in ROLES_OF[scope[0]]:
        owned: Iterable[Var] = tables.vars_of(CLASS_OF[role], kinds.get(role, "")).values()
        mine = "." + kinds.get("self", "")
        found[role] = [Ref(role, v.name, v.type) for v in owned if scope[0] != "lease" or "." not in v.name or v.name.endswith(mine)]
    return found


def constants(tables: Tables, scope: Scope) -> list[Ref]:
    """The constants and, for one segment, the globals that its ints may be compared with."""
    kinds = tuple(dict(scope[1]).values())
    found = [Ref("const", n, INT) for n in tables.constants if "." not in n or n.split(".")[0] in kinds or not kinds]
    if scope[0] == "segment":
        found += [Ref("global", n, v.type) for n, v in tables.globals.items() if "." not in n]
    return found if scope[0] in ("global", "segment") else []


def premises(tables: Tables, scope: str, owned: dict[str, list[Ref]]) -> Iterator[tuple[Premise, Ref | None]]:
    """The premises of a scope, with the count that one of them is about."""
    yield (), None
    role = STAGE_ROLE.get(scope)
    if role is None:
        return
    stage = next(r for r in owned[role] if r.name == "stage")
    counts = {n for n, v in tables.vars_of("request").items() if v.sum} if scope == "request" else set()
    for member in stage.type.members:
        here = Op("==", (stage, Lit(member, stage.type)), BOOL)
        yield (here,), None
        yield from (((here, Op(">", (r, Lit(0, INT)), BOOL)), r) for r in owned[role] if r.name in counts)


def alone(ref: Ref) -> Iterator[Expr]:
    """The claims about one variable."""
    if ref.type == BOOL:
        yield from (ref, Op("not", (ref,), BOOL))
    elif ref.type.number:
        for op, number in ((">=", 0), ("<=", 0), (">=", 1), ("<=", 1)):
            yield Op(op, (ref, Lit(number, INT)), BOOL)
    else:
        yield from (Op("!=", (ref, Lit(m, ref.type)), BOOL) for m in ref.type.members)


def pairs_up(scope: str, left: Ref, right: Ref) -> bool:
    """Pairs worth asking: across entities where the scope has several, of one kind where a request has one per kind."""
    if left.role == right.role:
        suffixes = {left.name.partition(".")[2], right.name.partition(".")[2]} - {""}
        return scope not in ("lease", "copy") and len(suffixes) < 2
    shared = {left.role, right.role} <= {"const", "global"}
    return scope == "global" if shared else True


def fits(about: Ref | None, left: Ref, right: Ref) -> bool:
    """A claim under a count is about variables of the count's kind."""
    suffix = about.name.partition(".")[2] if about else ""
    return about is None or (bool(suffix) and {left.name.partition(".")[2], right.name.partition(".")[2]} == {suffix})


# -- the fixed point ---------------------------------------------------------------------------------------------------------
Group = tuple[Scope, Premise]


class Houdini:
    """The candidates that are left, and the search for what breaks them."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.settled: dict[Group, dict[Expr, None]] = {}
        self.left: dict[Group, dict[Expr, None]] = {}
        self.total = self.dropped = self.rounds = 0

    def properties(self) -> dict[str, tuple[Group, Property]]:
        """The candidates as invariants, one per premise: those that are settled, and those that are still tried."""
        found = {}
        for label, groups in (("settled", self.settled), ("tried", self.left)):
            for number, (group, claims) in enumerate(groups.items()):
                if claims:
                    (scope, kinds), premise = group
                    whole = implies(premise, conjunction(tuple(claims)))
                    name = f"{label}.{number}"
                    found[name] = (group, Property(name, "invariant", scope, dict(kinds), whole, "", "", "inferred"))
        return found

    def assuming(self, named: dict[str, tuple[Group, Property]]) -> Tables:
        """The tables with these invariants instead of their own."""
        return dataclasses.replace(self.tables, properties=tuple(p for _, p in named.values()))

    def drop(self, group: Group, broken: Iterable[Expr]) -> int:
        """Forgets claims; returns how many."""
        claims = [c for c in broken if c in self.left[group]]
        for claim in claims:
            del self.left[group][claim]
        self.dropped += len(claims)
        return len(claims)

    def run(self, tried: Iterable[Candidate], samples: Mapping[Scope, Samples], progress: Progress | None) -> None:
        """Tries candidates beside what is settled, to the fixed point; ``progress`` gets (dropped, all)."""
        for candidate in tried:
            self.left.setdefault((candidate.scope, candidate.premise), {})[candidate.claim] = None
        self.total += sum(map(len, self.left.values()))
        self.observed(samples)
        self.initially()
        changed = True
        while changed:
            self.rounds += 1
            changed = False
            named = self.properties()
            tables = self.assuming(named)
            base = Assumptions(tables)
            for event in tables.events:
                changed |= self.under(Task(tables, event, base), named) > 0
                if progress:
                    progress(self.dropped, self.total)
        for group, claims in self.left.items():
            self.settled.setdefault(group, {}).update(claims)
        self.left = {}

    def observed(self, samples: Mapping[Scope, Samples]) -> None:
        """Drops what a state breaks that a search reached."""
        for group, claims in self.left.items():
            scope, premise = group
            if scope in samples:
                seen = samples[scope]
                here = seen.holds(conjunction(premise))
                self.drop(group, [c for c in list(claims) if not np.all(seen.holds(c)[here])])

    def initially(self) -> None:
        """Drops what the first state breaks."""
        base = Assumptions(dataclasses.replace(self.tables, properties=()))
        first = Base(base.tables, base)
        for group in list(self.left):
            (scope, kinds), premise = group

            def at_first(claim: Expr, scope: str = scope, kinds: dict[str, str] = dict(kinds), premise: Premise = premise) -> bool:
                first.out.obligations.clear()
                first.initially(Property("", "invariant", scope, kinds, implies(premise, claim), "", ""))
                return all(o.status == "proved" for o in first.out.obligations)

            if not premise or not at_first(Lit(0, BOOL)):
                self.drop(group, [c for c in self.left[group] if not at_first(c)])

    def under(self, task: Task, named: dict[str, tuple[Group, Property]]) -> int:
        """Drops what one row breaks, for actors and bystanders."""
        base, dropped = task.base, 0
        work = task.work()
        task.solver.add(*base.constants(), *base.facts(task.frame), *(base.words.pre(g.expr, task.acting) for g in task.event.guards))
        for fresh, goals in work.items():
            task.solver.push()
            if fresh:
                names = frozenset(i.name for i in fresh)
                task.solver.add(*base.facts(Frame(task.tables, task.acting, fresh), names))
            dropped += self.broken(task, [(named[g.id][0], b) for g, b in goals if g.id.startswith("tried.")])
            task.solver.pop()
        return dropped

    def broken(self, task: Task, goals: list[tuple[Group, dict[str, Inst]]]) -> int:
        """Drops claims until the row keeps all that are left of these."""
        dropped = 0
        while True:
            open_ = [(g, b, {c: task.post(implies(g[1], c), b, False) for c in self.left[g]}) for g, b in goals if self.left[g]]
            every = [t for _, _, terms in open_ for t in terms.values()]
            task.solver.push()
            task.solver.add(z3.Not(z3.And([z3.BoolVal(True), *every])))
            verdict = task.solver.check()
            model = task.solver.model() if verdict == z3.sat else None
            task.solver.pop()
            if verdict == z3.unsat:
                return dropped
            for group, _, terms in open_:
                lost = [c for c, t in terms.items() if model is None or z3.is_false(model.eval(t, model_completion=True))]
                dropped += self.drop(group, lost)


def implies(premise: Premise, claim: Expr) -> Expr:
    """``premise implies claim``."""
    return Op("implies", (conjunction(premise), claim), BOOL) if premise else claim


def conjunction(parts: tuple[Expr, ...]) -> Expr:
    """All of these."""
    return TRUE if not parts else parts[0] if len(parts) == 1 else Op("and", parts, BOOL)


def infer(tables: Tables, instances: Iterable[Instance] = (), progress: Progress | None = None) -> InferResult:
    """The largest inductive conjunction of candidates, and which of the tables' invariants it implies.

    What the searches of ``instances`` refute is dropped at once, which saves most of the solver's work.
    """
    search = Houdini(tables)
    every = list(candidates(tables))
    samples = sampled(tables, instances, {s: ROLES_OF[s[0]] for s in scopes(tables)})
    for pairs in (False, True):
        search.run([c for c in every if is_pair(c.claim) == pairs], samples, progress)
    named = search.properties()
    found = search.assuming(named)
    base = Assumptions(found)
    implied = [p.id for p in tables.forms("invariant") if follows(found, base, p)]
    missed = [p.id for p in tables.forms("invariant") if p.id not in set(implied)]
    return InferResult(
        found.properties, tuple(implied), tuple(missed), search.total, search.dropped, search.rounds,
        sums_hold(found, base),
    )  # fmt: skip


def is_pair(claim: Expr) -> bool:
    """Whether a claim orders two variables; those are tried when everything else is settled."""
    return isinstance(claim, Op) and len(claim.args) == 2 and all(isinstance(a, Ref) for a in claim.args)


def follows(tables: Tables, base: Assumptions, prop: Property) -> bool:
    """Whether an invariant follows from the inferred ones for any entities of its scope."""
    for bound in placements(tables, {}, prop.scope, prop.kinds):
        fresh = {e for i in bound.values() for e in (i, *(x for _, x in i.refs))}
        solver = new_solver()
        solver.add(*base.constants(), *base.facts(Frame(tables, {}, tuple(sorted(fresh, key=lambda i: i.name)))))
        solver.add(z3.Not(base.words.pre(prop.expr, bound)))
        if solver.check() != z3.unsat:
            return False
    return True


def sums_hold(tables: Tables, base: Assumptions) -> bool:
    """What the frames assume of sums is itself proved under the inferred invariants."""
    shares = Base(tables, base)
    obligations = shares.run().obligations
    for event in tables.events:
        obligations += Task(tables, event, base).run().obligations
    return all(o.status == "proved" for o in obligations if o.method in ("sum", "initial", "induction"))


__all__ = ["Candidate", "Houdini", "InferResult", "candidates", "infer", "refs"]
