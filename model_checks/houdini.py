"""Inference: which invariants the rows have, found from templates without being told any.

Houdini: assume all candidates of ``houdini_templates``, drop those that the first state or a row breaks, until nothing
is dropped.  What is left is inductive, and holds.  The frames, sums and bystanders are those of ``induction``; of the
tables' own invariants none is used.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import z3

from hybridkv_ref.expr import BOOL, Expr, Lit, refs
from hybridkv_ref.model_checks.base import Base
from hybridkv_ref.model_checks.frames import Assumptions, Frame, Inst, Vocabulary, owner_name, placements
from hybridkv_ref.model_checks.houdini_templates import (
    Candidate,
    Premise,
    candidates,
    conjunction,
    implies,
    is_pair,
    roles_of,
    scopes,
)
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.instances import Instance
from hybridkv_ref.model_checks.samples import Samples, Scope, sampled
from hybridkv_ref.model_checks.smt import new_solver
from hybridkv_ref.tables import Property, Tables

Group = tuple[Scope, Premise]
Plan = dict[tuple[Inst, ...], list[tuple[Group, dict[Expr, z3.BoolRef]]]]


@dataclass(frozen=True)
class InferResult:
    """``implied`` names the tables' invariants that follow from the inductive conjunction.

    ``sound`` tells whether the sums that the inference assumes were proved under it; ``dropped`` counts candidates.
    """

    implied: tuple[str, ...]
    missed: tuple[str, ...]
    candidates: int
    dropped: int
    rounds: int
    sound: bool


class Houdini:
    """The candidates that are left, and the search for what breaks them."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.settled: dict[Group, dict[Expr, None]] = {}
        self.left: dict[Group, dict[Expr, None]] = {}
        self.total = self.dropped = self.rounds = 0
        self.words = Vocabulary(tables)
        self.made: dict[tuple[str, Group], Property] = {}
        self.plans: dict[str, Plan] = {}

    def properties(self) -> dict[str, tuple[Group, Property]]:
        """The candidates as invariants, one per premise: those that are settled, and those that are still tried."""
        found = {}
        for label, groups in (("settled", self.settled), ("tried", self.left)):
            for number, (group, claims) in enumerate(groups.items()):
                if claims:
                    name = f"{label}.{number}"
                    found[name] = (group, self.property(name, group, tuple(claims)))
        return found

    def property(self, name: str, group: Group, claims: tuple[Expr, ...]) -> Property:
        """One premise with its claims; the same object while they are the same, so that its terms are built once."""
        (scope, kinds), premise = group
        whole = implies(premise, conjunction(claims))
        old = self.made.get((name, group))
        if old is None or old.expr != whole:
            self.made[name, group] = Property(name, "invariant", scope, dict(kinds), whole, "", "", "inferred")
        return self.made[name, group]

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

    def run(self, tried: Iterable[Candidate], samples: Mapping[Scope, Samples]) -> None:
        """Tries candidates beside what is settled, to the fixed point."""
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
            base.words = self.words
            for event in tables.events:
                changed |= self.under(Task(tables, event, base), named) > 0
        for group, claims in self.left.items():
            self.settled.setdefault(group, {}).update(claims)
        self.left, self.plans = {}, {}

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
            if not group[1] or not self.at_first(first, group, Lit(0, BOOL)):
                self.drop(group, [c for c in self.left[group] if not self.at_first(first, group, c)])

    @staticmethod
    def at_first(first: Base, group: Group, claim: Expr) -> bool:
        """Whether one claim holds in the first state."""
        (scope, kinds), premise = group
        first.out.obligations.clear()
        first.initially(Property("", "invariant", scope, dict(kinds), implies(premise, claim), "", ""))
        return all(o.status == "proved" for o in first.out.obligations)

    def plan(self, task: Task, named: dict[str, tuple[Group, Property]]) -> Plan:
        """Per bystanders, what the row could break, after the step; built once, since claims only get fewer."""
        if task.event.id not in self.plans:
            found = self.plans[task.event.id] = {}
            for fresh, goals in task.work(touched=True).items():
                found[fresh] = []
                for goal, bound in goals:
                    if isinstance(goal, Property) and goal.id.startswith("tried."):
                        group = named[goal.id][0]
                        found[fresh].append((group, self.after(task, group, bound)))
        return self.plans[task.event.id]

    def after(self, task: Task, group: Group, bound: dict[str, Inst]) -> dict[Expr, z3.BoolRef]:
        """The claims of a group after the step, those that read what it changes (all, if the premise does)."""

        def read(expr: Expr) -> bool:
            return any((owner_name(r, bound), r.name) in task.changed for r in refs(expr))

        every = any(map(read, group[1]))
        premise = task.post(conjunction(group[1]), bound, False)
        return {c: z3.Implies(premise, task.post(c, bound, False)) for c in self.left[group] if every or read(c)}

    def under(self, task: Task, named: dict[str, tuple[Group, Property]]) -> int:
        """Drops what one row breaks, for actors and bystanders."""
        base, dropped = task.base, 0
        guards = [base.words.pre(g.expr, task.acting) for g in task.event.guards]
        task.solver.add(*base.constants(), *base.facts(task.frame), *guards)
        for fresh, goals in self.plan(task, named).items():
            task.solver.push()
            if fresh:
                names = frozenset(i.name for i in fresh)
                task.solver.add(*base.facts(Frame(task.tables, task.acting, fresh), names))
            dropped += self.broken(task.solver, goals)
            task.solver.pop()
        return dropped

    def broken(self, solver: z3.Solver, goals: list[tuple[Group, dict[Expr, z3.BoolRef]]]) -> int:
        """Drops claims until the row keeps all that are left of these."""
        dropped = 0
        while True:
            waiting = [(g, c, t) for g, terms in goals for c, t in terms.items() if c in self.left[g]]
            solver.push()
            solver.add(z3.Not(z3.And([z3.BoolVal(True), *(t for _, _, t in waiting)])))
            verdict = solver.check()
            model = solver.model() if verdict == z3.sat else None
            solver.pop()
            if verdict == z3.unsat:
                return dropped
            for group, claim, after in waiting:
                if model is None or z3.is_false(model.eval(after, model_completion=True)):
                    dropped += self.drop(group, [claim])


def infer(tables: Tables, instances: Iterable[Instance] = ()) -> InferResult:
    """An inductive conjunction of candidates, and which of the tables' invariants it implies.

    What the searches of ``instances`` refute is dropped at once, which saves most of the solver's work; with a claim
    that only their merged states refute, or about which the solver says nothing, more may be lost than need be.
    """
    search = Houdini(tables)
    every = list(candidates(tables))
    samples = sampled(tables, instances, {s: roles_of(s[0]) for s in scopes(tables)})
    for pairs in (False, True):
        search.run([c for c in every if is_pair(c.claim) == pairs], samples)
    named = search.properties()
    found = search.assuming(named)
    base = Assumptions(found)
    base.words = search.words
    implied = [p.id for p in tables.forms("invariant") if follows(found, base, p)]
    missed = [p.id for p in tables.forms("invariant") if p.id not in set(implied)]
    return InferResult(
        tuple(implied), tuple(missed), search.total, search.dropped, search.rounds,
        sums_hold(found, base),
    )  # fmt: skip


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
