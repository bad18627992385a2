"""Parametric induction: every row keeps every invariant and respects every step property, for any number of entities.

One *task* per event.  Its hypotheses are the event's guards and all invariants over a frame (see ``frames``); its
goals are
  * every invariant and step property that reads something the row changes, for actors and for bystanders of every kind,
  * every sum: the row moves a counter by exactly what the counted entities move,
  * generic rules: counters only grow, stages move along allowed edges, a row changes something,
  * separation: another kind's pool is as it was,
  * that the hypotheses can be met at all, for the row and for each bystander (nothing is proved for want of a case).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import z3

from hybridkv_ref.expr import BOOL, COUNTER, TRUE, Expr, Ref, refs
from hybridkv_ref.model_checks.frames import (
    Assumptions,
    Binding,
    Cell,
    Frame,
    Inst,
    actors,
    contributors,
    owner_name,
    owners,
    placements,
)
from hybridkv_ref.model_checks.obligations import Change, Counterexample, Obligation, TaskResult
from hybridkv_ref.model_checks.queries import PROVED, Answer, possible, settle
from hybridkv_ref.model_checks.smt import new_solver, term
from hybridkv_ref.tables import LINKS, Event, Property, Tables, Var


class Refuted(Exception):
    """Raised by a task in ``batch`` mode as soon as one obligation fails; its record is in ``out``."""


@dataclass(frozen=True)
class Goal:
    """One obligation that waits for its query."""

    name: str
    claim: z3.BoolRef
    method: str
    prop: str
    rules: tuple[str, ...]
    text: str


class Task:
    """The obligations of one event.

    With ``batch`` the goals of a frame go to the solver as one conjunction and the first failure ends the task:
    enough to tell whether a mutant is killed, and by what.
    """

    def __init__(self, tables: Tables, event: Event, base: Assumptions, batch: bool = False) -> None:
        self.tables, self.event, self.base = tables, event, base
        self.acting = actors(event)
        self.out = TaskResult()
        self.after: dict[Cell, z3.ExprRef] = {}
        for effect in event.effects:
            cell = (owner_name(effect.target, self.acting), effect.target.name)
            self.after[cell] = base.words.pre(effect.expr, self.acting)
        self.changed = set(self.after)
        self.changes = [(base.words.cell(o, r), self.after[o, r.name]) for o, r in self.targets()]
        self.frame = Frame(tables, self.acting)
        self.solver = new_solver()
        self.batch = batch
        self.waiting: list[Goal] = []

    def targets(self) -> list[tuple[str, Ref]]:
        """(owner, variable) of every effect."""
        return [(owner_name(e.target, self.acting), e.target) for e in self.event.effects]

    # -- terms ------------------------------------------------------------------------------------------------------
    def post(self, expr: Expr, bound: Binding, two_state: bool) -> z3.ExprRef:
        """An expression after the step; in a two-state one only ``new(x)`` is."""

        if not two_state:
            return z3.substitute(self.base.words.pre(expr, bound), *self.changes)

        def look(ref: Ref) -> z3.ExprRef:
            owner = owner_name(ref, bound)
            changed = self.after.get((owner, ref.name)) if ref.new else None
            return changed if changed is not None else self.base.words.cell(owner, ref)

        return term(expr, look)

    # -- queries ------------------------------------------------------------------------------------------------------
    def prove(self, name: str, goal: z3.BoolRef, method: str, prop: str, rules: tuple[str, ...], text: str) -> None:
        """Puts one obligation to the next query."""
        self.waiting.append(Goal(name, goal, method, prop, rules, text))

    def flush(self) -> None:
        """Settles the goals that wait; in batch mode the first one that does not hold ends the task."""
        goals, self.waiting = self.waiting, []
        for index, answer in settle(self.solver, [g.claim for g in goals], first=self.batch):
            goal = goals[index]
            self.record(goal.name, goal.method, goal.prop, goal.rules, answer)
            if answer.model is not None:
                self.out.counterexamples.append(self.counterexample(goal, answer.model))
            if self.batch and answer.status != PROVED:
                raise Refuted

    def satisfiable(self, name: str) -> None:
        """The hypotheses so far have a model: a row can fire, with a bystander, or in a limit case."""
        if self.batch and "@" in name:
            return
        firing = name.startswith("can_fire")
        answer = possible(self.solver)
        self.record(name, "vacuity" if firing else "boundary", "can_fire" if firing else name, (), answer)
        if self.batch and answer.status != PROVED:
            raise Refuted

    def record(self, name: str, method: str, prop: str, rules: tuple[str, ...], answer: Answer) -> None:
        """Notes the answer on one obligation."""
        event, full = self.event, f"{self.event.id}/{name}"
        self.out.obligations.append(
            Obligation(full, event.file, event.row, prop, method, answer.status, answer.milliseconds, rules)
        )

    def counterexample(self, goal: Goal, model: z3.ModelRef) -> Counterexample:
        """The model as changed fields."""
        changes = []
        for owner, target in self.targets():
            before = self._value(model, self.base.words.cell(owner, target), target)
            after = self._value(model, self.after[owner, target.name], target)
            if before != after:
                changes.append(Change(owner, target.name, before, after))
        full = f"{self.event.id}/{goal.name}"
        return Counterexample(full, self.event.id, goal.prop, goal.rules, goal.text, tuple(changes))

    @staticmethod
    def _value(model: z3.ModelRef, expr: z3.ExprRef, ref: Ref) -> int | str | bool:
        found = model.eval(expr, model_completion=True)
        if ref.type == BOOL:
            return bool(z3.is_true(found))
        number = int(found.as_long()) if isinstance(found, z3.IntNumRef) else 0
        members = ref.type.members
        return members[number] if 0 <= number < len(members) else number

    # -- the goals ----------------------------------------------------------------------------------------------------
    def run(self) -> TaskResult:
        """Everything there is to show about this event."""
        words = self.base.words
        self.solver.add(*self.base.constants(), *self.base.facts(self.frame))
        self.solver.add(*[words.pre(g.expr, self.acting) for g in self.event.guards])
        self.satisfiable("can_fire")
        self.limits()
        self.generic()
        self.sums_of_actors()
        self.frames(self.work(touched=True))
        return self.out

    def run_skipped(self) -> TaskResult:
        """What ``run`` needs no query for, because the row changes nothing that it reads, proved all the same."""
        words = self.base.words
        self.solver.add(*self.base.constants(), *self.base.facts(self.frame))
        self.solver.add(*[words.pre(g.expr, self.acting) for g in self.event.guards])
        self.frames(self.work(touched=False))
        return self.out

    def frames(self, work: "Work") -> None:
        """The goals of every frame, the actors' own first."""
        for prop, bound in work.pop((), []):
            self.property(prop, bound, "")
        self.flush()
        for fresh, goals in work.items():
            wider = Frame(self.tables, self.acting, fresh)
            names = frozenset(i.name for i in fresh)
            label = "+".join(sorted(names))
            self.solver.push()
            self.solver.add(*self.base.facts(wider, names))
            self.satisfiable(f"can_fire@{label}")
            for prop, bound in goals:
                self.property(prop, bound, f"@{label}")
            self.flush()
            self.solver.pop()

    def property(self, prop: "Property | _Kept", bound: Binding, label: str) -> None:
        """One property over one binding; ``#role`` tells two actors of one kind apart."""
        if len(set(self.event.kinds.values())) < len(self.event.kinds):
            label = "".join(f"#{r}" for r in self.event.kinds if self.acting[r] in bound.values()) + label
        if isinstance(prop, _Kept):
            before, after = self.base.words.pre(prop.expr, bound), self.post(prop.expr, bound, False)
            self.prove(
                f"{prop.id}{label}",
                before == after,
                "sum",
                prop.id,
                ("HKV-ACC-001",),
                "a bystander's share is as it was",
            )
            return
        goal = self.post(prop.expr, bound, prop.form == "step")
        if prop.choose != TRUE:
            goal = z3.Implies(self.base.words.pre(prop.choose, bound), goal)
        self.prove(
            f"{prop.id}{label}",
            goal,
            "induction" if prop.form == "invariant" else "step",
            prop.id,
            prop.rules,
            prop.text,
        )

    def work(self, touched: bool) -> "Work":
        """The goals by the bystanders that they need: those that read something changed, or all others."""
        found: Work = {(): []}
        known = set(self.acting.values())
        names = {name for _, name in self.changed}
        for prop in self.goals():
            tagged = isinstance(prop, Property) and bool(prop.on)
            if touched and not tagged and not any(r.name in names for r in prop.reads):
                continue
            for bound in placements(self.tables, self.acting, prop.scope, prop.kinds):
                if self.touches(prop, bound) == touched and (touched or self.applies(prop, bound)):
                    fresh = tuple(sorted((i for i in self.entities(bound) if i not in known), key=lambda i: i.name))
                    found.setdefault(fresh, []).append((prop, bound))
        return found

    @staticmethod
    def entities(bound: Binding) -> set[Inst]:
        """A binding's entities with everything that they point at."""
        direct = set(bound.values())
        return direct | {end for inst in direct for _, end in inst.refs}

    def goals(self) -> Iterator["Property | _Kept"]:
        """Invariants, step properties (of every row, or of its tags), and counted terms that a bystander keeps."""
        for prop in self.tables.properties:
            if prop.form == "invariant" or (prop.form == "step" and (not prop.on or prop.on in self.event.tags)):
                yield prop
        yield from _kept(self.tables)

    def applies(self, prop: "Property | _Kept", bound: Binding) -> bool:
        """Whether the goal is one at all: not an actor's own share, not a property of a tag on other entities."""
        if isinstance(prop, _Kept):
            return not any(i in self.acting.values() for r, i in bound.items() if r in LINKS)
        return not prop.on

    def touches(self, prop: "Property | _Kept", bound: Binding) -> bool:
        """Whether the goal reads a cell that the row changes (for a step property: one written as ``new(x)``)."""
        if isinstance(prop, _Kept) and not self.applies(prop, bound):
            return False  # an actor's own share is part of the sum's obligation
        if isinstance(prop, Property) and prop.on:
            return all(self.acting.get(r) == i for r, i in bound.items())
        read = prop.reads
        if isinstance(prop, Property) and prop.form == "step":
            read = frozenset(r for r in read if r.new)
        return any((owner_name(r, bound), r.name) in self.changed for r in read)

    def limits(self) -> None:
        """The row is possible in each limit case that it names."""
        for case in self.event.can:
            self.solver.push()
            self.solver.add(self.post(case.expr, self.acting, True))
            self.satisfiable(f"can: {case.text}")
            self.solver.pop()

    def sums_of_actors(self) -> None:
        """Each counter moves by what the counted actors move."""
        words = self.base.words
        for owner, var in owners(self.frame):
            name = owner.name if owner else "global"
            cell = (name, var.name)
            moved = []
            for _, share, bound in contributors(self.frame, owner, var):
                if any((owner_name(r, bound), r.name) in self.changed for r in refs(share)):
                    moved.append(self.post(share, bound, False) - words.pre(share, bound))
            if cell in self.changed or moved:
                before = words.cell(name, Ref("", var.name, var.type))
                goal = self.after.get(cell, before) - before == z3.Sum([z3.IntVal(0), *moved])
                rules = ("HKV-ACC-001", "HKV-REF-006") if owner else ("HKV-ACC-001", "HKV-S1-001")
                self.prove(
                    f"sum.{name}.{var.name}",
                    goal,
                    "sum",
                    f"sum.{var.name}",
                    rules,
                    f"{var.name} is the sum of its shares",
                )

    def generic(self) -> None:
        """Counters grow, edges are allowed, something changes, other kinds' pools stay."""
        words = self.base.words
        moved = []
        for effect in self.event.effects:
            owner = owner_name(effect.target, self.acting)
            before, after = words.cell(owner, effect.target), self.after[owner, effect.target.name]
            moved.append(before != after)
            if effect.target.type == COUNTER:
                self.prove(
                    f"grows.{owner}.{effect.target.name}",
                    after >= before,
                    "step",
                    "counters_grow",
                    ("HKV-S3-003",),
                    "a counter only grows",
                )
        self.prove(
            "changes_something", z3.Or(moved), "step", "changes_something", ("HKV-S2-002",), "a row changes something"
        )
        for role, inst in self.acting.items():
            cell = (inst.name, "stage")
            if inst.cls == "segment" and cell in self.after:
                kind = self.tables.kinds[inst.kind]
                stage = kind.vars["stage"]
                before, order = words.cell(inst.name, Ref(role, "stage", stage.type)), kind.stages
                after = self.after[cell]
                legal = [z3.And(before == order.index(a), after == order.index(b)) for a, b in sorted(kind.edges)]
                legal.append(before == after)
                self.prove(
                    f"edges.{role}",
                    z3.Or(legal),
                    "step",
                    "allowed_edges",
                    ("HKV-S2-002",),
                    "stages move along allowed edges",
                )
        for other in self.tables.kinds:
            if other not in self.event.kinds.values():
                pool = [n for n in self.tables.globals if n.startswith(f"{other}.")]
                same = []
                for name in pool:
                    before = words.cell("global", Ref("global", name, self.tables.globals[name].type))
                    same.append(self.after.get(("global", name), before) == before)
                self.prove(
                    f"separate.{other}",
                    z3.And(same),
                    "separation",
                    f"separate.{other}",
                    ("HKV-S2-003", "HKV-S2-007"),
                    f"{other}'s pool is as it was",
                )


class _Kept:
    """A counted share that a bystander must keep: like a Property with the claim ``share is as it was``."""

    def __init__(self, name: str, scope: str, kinds: dict[str, str], expr: Expr) -> None:
        self.id, self.scope, self.kinds, self.expr, self.reads = name, scope, kinds, expr, refs(expr)


Work = dict[tuple[Inst, ...], list[tuple[Property | _Kept, dict[str, Inst]]]]


@lru_cache(maxsize=4)
def _kept(tables: Tables) -> tuple["_Kept", ...]:
    """The share of every count of links, as something that a bystander keeps."""
    found = []
    for cls, kind, var in _summed(tables):
        for total in var.sums:
            for of, share in total.terms.items() if total.cls in LINKS else ():
                name = f"share.{kind or cls}.{var.name}.{total.cls}<{of}>"
                found.append(_Kept(name, total.cls, {"self": of} if of else {}, share))
    return tuple(found)


def _summed(tables: Tables) -> Iterator[tuple[str, str, Var]]:
    for kind, spec in tables.kinds.items():
        for var in spec.vars.values():
            yield "segment", kind, var
    for cls, variables in tables.classes.items():
        for var in variables.values():
            yield cls, "", var
    for var in tables.globals.values():
        yield "global", "", var


def prove_events(tables: Tables, names: Iterable[str]) -> TaskResult:
    """The obligations of these events, in this process."""
    base, out = Assumptions(tables), TaskResult()
    for name in names:
        done = Task(tables, tables.event(name), base).run()
        out.obligations += done.obligations
        out.counterexamples += done.counterexamples
    return out
