"""Mutation: every mutant is killed by a property, or proved to be the same row, or the tables prove too little.

For each mutant the changed events go through induction, then the liveness claims that they touch; what survives is
compared with the original by the solver (``equivalent``: same guards and effects wherever the invariants hold), and
what is left is searched for witnesses that are no longer reached.  The killer is the first property that fails.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator

import msgspec
import z3

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import Ref
from hybridkv_ref.loader import build, build_events
from hybridkv_ref.model_checks.crash import Crash
from hybridkv_ref.model_checks.frames import (
    Assumptions,
    Binding,
    Frame,
    Inst,
    actors,
    contributors,
    owner_name,
    owners,
    placements,
)
from hybridkv_ref.model_checks.induction import Refuted, Task
from hybridkv_ref.model_checks.liveness import Claim
from hybridkv_ref.model_checks.mutants import CRASH, NEED, Mutant
from hybridkv_ref.model_checks.obligations import Obligation
from hybridkv_ref.model_checks.smt import new_solver
from hybridkv_ref.spec_files import Spec
from hybridkv_ref.tables import LINKS, Event, Tables, Var

Witness = Callable[[Tables, Iterable[str]], str]


class Verdict(msgspec.Struct, frozen=True):
    """What became of a mutant: ``status`` is killed, equivalent, lint or survived; ``killer`` names the property."""

    mutant: str
    status: str
    method: str = ""
    killer: str = ""
    rules: tuple[str, ...] = ()


class Killer:
    """Runs mutants against one spec; the terms of the unchanged properties are built once."""

    def __init__(self, spec: Spec, witness: Witness | None = None) -> None:
        self.spec, self.tables = spec, build(spec)
        self.base = Assumptions(self.tables)
        self.originals = {e.id: e for e in self.tables.events}
        self.witness = witness

    def run(self, mutant: Mutant) -> Verdict:
        """The verdict on one mutant."""
        if mutant.section == CRASH:
            return self.by_crash(mutant)
        try:
            events = self.events(mutant)
        except InputError as error:
            return Verdict(mutant.id, "lint", "loader", str(error))
        changed = [e for e in events if not same_row(e, self.originals[e.id])]
        if not changed:
            return Verdict(mutant.id, "equivalent", "identical")
        ids = {e.id: e for e in changed}
        tables = dataclasses.replace(self.tables, events=tuple(ids.get(e.id, e) for e in self.tables.events))
        found = self.by_induction(tables, changed) or self.by_claims(tables, changed)
        if found is not None:
            status = "killed" if found.status == "failed" else "survived"  # no verdict within the limit is no kill
            return Verdict(mutant.id, status, found.method, found.property, found.rules)
        if all(self.equivalent(e, self.originals[e.id]) for e in changed):
            return Verdict(mutant.id, "equivalent", "solver")
        lost = self.witness(tables, ids) if self.witness else ""
        return Verdict(mutant.id, "killed", "witness", lost) if lost else Verdict(mutant.id, "survived")

    def events(self, mutant: Mutant) -> tuple[Event, ...]:
        """The events with the mutant's change."""
        if mutant.section != NEED:
            return build_events(mutant.apply(self.spec))
        place = f"{mutant.file}: {mutant.key}"
        return tuple(
            dataclasses.replace(e, guards=tuple(g for g in e.guards if g.place != place)) for e in self.tables.events
        )

    def by_crash(self, mutant: Mutant) -> Verdict:
        """The verdict on a change of what survives a crash."""
        tables = dataclasses.replace(self.tables, survivors=build(mutant.apply(self.spec)).survivors)
        broken = next((o for o in Crash(tables, self.base).run().obligations if o.status != "proved"), None)
        if broken is None:
            return Verdict(mutant.id, "survived")
        status = "killed" if broken.status == "failed" else "survived"
        return Verdict(mutant.id, status, broken.method, broken.property, broken.rules)

    def by_induction(self, tables: Tables, changed: list[Event]) -> Obligation | None:
        """The first invariant, step property or sum that a changed row breaks."""
        for event in changed:
            task = Task(tables, event, self.base, batch=True)
            try:
                task.run()
            except Refuted:
                return task.out.obligations[-1]
        return None

    def by_claims(self, tables: Tables, changed: list[Event]) -> Obligation | None:
        """The first liveness claim that no longer holds."""
        names = {e.row for e in changed}
        for response in tables.responses:
            claim = Claim(tables, response, self.base)
            if any(h.row in names for h in response.helpful):
                claim.at_rest(next(iter(placements(tables, {}, response.scope, response.kinds))))
            for event in changed:
                if event.row in response.without or (event.intake and "intake" in response.without):
                    continue
                for where in placements(tables, actors(event), response.scope, response.kinds):
                    claim.under(event, where)
            broken = next((o for o in claim.out.obligations if o.status != "proved"), None)
            if broken is not None:
                return broken
        return None

    def equivalent(self, mutant: Event, original: Event) -> bool:
        """Both rows allow the same steps from every state in which the invariants hold."""
        acting, words = actors(original), self.base.words
        solver = new_solver()
        solver.add(*self.base.constants(), *self.base.facts(Frame(self.tables, acting)))

        def guard(event: Event) -> z3.BoolRef:
            return z3.And([z3.BoolVal(True), *(words.pre(g.expr, acting) for g in event.guards)])

        def after(event: Event) -> dict[tuple[str, str], z3.ExprRef]:
            return {(owner_name(e.target, acting), e.target.name): words.pre(e.expr, acting) for e in event.effects}

        left, right = after(mutant), after(original)
        same = [guard(mutant) == guard(original)]
        targets = {
            (owner_name(e.target, acting), e.target.name): e.target for ev in (mutant, original) for e in ev.effects
        }
        for cell, ref in targets.items():
            before = words.cell(cell[0], ref)
            same.append(z3.Implies(guard(original), left.get(cell, before) == right.get(cell, before)))
        solver.add(z3.Not(z3.And(same)))
        return bool(solver.check() == z3.unsat)


def same_row(left: Event, right: Event) -> bool:
    """Whether two events have the same guards and effects, wherever they were written."""
    guards = [[g.expr for g in e.guards] for e in (left, right)]
    effects = [[(x.target, x.expr) for x in e.effects] for e in (left, right)]
    return guards[0] == guards[1] and effects[0] == effects[1]


def implied(tables: Tables, base: Assumptions, event: Event, index: int) -> bool:
    """Whether a guard conjunct follows from the other ones and the invariants (so it can never be the only false one).

    Where the event's own entities do not show it, the proof looks at one counted entity (a lease of the request, say)
    for each counter in turn: either it counts only the event's own entities, or such an entity exists.
    """
    acting = actors(event)
    others = [base.words.pre(g.expr, acting) for i, g in enumerate(event.guards) if i != index]
    wrong = z3.Not(base.words.pre(event.guards[index].expr, acting))

    def impossible(frame: Frame, *extra: z3.BoolRef) -> bool:
        solver = new_solver()
        solver.add(*base.constants(), *base.facts(frame), *others, wrong, *extra)
        return bool(solver.check() == z3.unsat)

    alone = Frame(tables, acting)
    if impossible(alone):
        return True
    for owner, var in owners(alone):
        if owner is None or not any(total.cls in LINKS for total in var.sums):
            continue
        count = base.words.cell(owner.name, Ref("", var.name, var.type))
        own = [base.words.pre(share, bound) for _, share, bound in contributors(alone, owner, var)]
        if impossible(alone, count == z3.Sum([z3.IntVal(0), *own])) and all(
            impossible(Frame(tables, acting, extra), share > 0)
            for extra, share in counted(tables, base, acting, owner, var)
        ):
            return True
    return False


def counted(
    tables: Tables, base: Assumptions, acting: Binding, owner: Inst, var: Var
) -> Iterator[tuple[tuple[Inst, ...], z3.ArithRef]]:
    """Every bystander that may count towards an actor's counter: its entities and its share."""
    for total, (kind, share) in ((t, item) for t in var.sums for item in t.terms.items()):
        for bound in placements(tables, acting, total.cls, {"self": kind} if kind else {}):
            link = bound[total.cls]
            if link not in acting.values() and link.owner(total.via) == owner:
                fresh = {e for i in bound.values() for e in (i, *(x for _, x in i.refs))} - set(acting.values())
                yield tuple(sorted(fresh, key=lambda i: i.name)), base.words.pre(share, bound)
