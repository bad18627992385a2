"""Parametric induction: every row keeps every invariant and respects every step property, for any number of entities.

One *task* per event.  Its hypotheses are the event's guards and all invariants over a frame (see ``frames``); its
goals are
  * every invariant and step property that reads something the row changes, for actors and for bystanders of every kind,
  * every sum: the row moves a counter by exactly what the counted entities move,
  * generic rules: counters only grow, stages move along allowed edges, a row changes something,
  * separation: another kind's pool is as it was,
  * that the hypotheses can be met at all, for the row and for each bystander (nothing is proved for want of a case).
"""

import time
from collections.abc import Iterable, Iterator

import z3

from hybridkv_ref.expr import BOOL, COUNTER, TRUE, Expr, Ref, refs
from hybridkv_ref.model_checks.frames import (
    Assumptions,
    Binding,
    Cell,
    Frame,
    Inst,
    actors,
    bindings_within,
    contributors,
    owner_name,
    owners,
    placements,
)
from hybridkv_ref.model_checks.obligations import Change, Counterexample, Obligation, TaskResult
from hybridkv_ref.model_checks.smt import new_solver, term
from hybridkv_ref.tables import LINKS, Event, Property, Tables, Var


class Refuted(Exception):
    """Raised by a task in ``batch`` mode as soon as one obligation fails; its record is in ``out``."""


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
        self.frame = Frame(tables, self.acting)
        self.solver = new_solver()
        self.batch = batch
        self.waiting: list[tuple[str, z3.BoolRef, str, str, tuple[str, ...]]] = []

    # -- terms ------------------------------------------------------------------------------------------------------
    def post(self, expr: Expr, bound: Binding, two_state: bool) -> z3.ExprRef:
        """An expression after the step; in a two-state one only ``new(x)`` is."""

        def look(ref: Ref) -> z3.ExprRef:
            owner = owner_name(ref, bound)
            if ref.new or not two_state:
                changed = self.after.get((owner, ref.name))
                if changed is not None:
                    return changed
            return self.base.words.cell(owner, ref)

        return term(expr, look)

    # -- one query ----------------------------------------------------------------------------------------------------
    def prove(self, name: str, goal: z3.BoolRef, method: str, prop: str, rules: tuple[str, ...], text: str) -> None:
        """Sends one obligation to the solver and records the verdict."""
        if self.batch:
            self.waiting.append((name, goal, method, prop, rules))
            return
        begun = time.perf_counter()
        self.solver.push()
        self.solver.add(z3.Not(goal))
        verdict = self.solver.check()
        status = "proved" if verdict == z3.unsat else "failed" if verdict == z3.sat else "unknown"
        full = f"{self.event.id}/{name}"
        if status == "failed":
            self.out.counterexamples.append(self.counterexample(full, prop, rules, text))
        self.solver.pop()
        spent = (time.perf_counter() - begun) * 1000
        self.out.obligations.append(
            Obligation(full, self.event.file, self.event.row, prop, method, status, round(spent, 3), rules)
        )

    def flush(self) -> None:
        """In batch mode: one query for all goals that wait; a failure is recorded and ends the task."""
        goals, self.waiting = self.waiting, []
        if not goals:
            return
        self.solver.push()
        self.solver.add(z3.Not(z3.And([g[1] for g in goals])))
        verdict = self.solver.check()
        if verdict != z3.unsat:
            broken = goals[0]
            if verdict == z3.sat:
                model = self.solver.model()
                broken = next((g for g in goals if z3.is_false(model.eval(g[1], model_completion=True))), broken)
            status = "failed" if verdict == z3.sat else "unknown"
            name, _, method, prop, rules = broken
            self.out.obligations.append(
                Obligation(f"{self.event.id}/{name}", self.event.file, self.event.row, prop, method, status, 0.0, rules)
            )
            raise Refuted
        self.solver.pop()

    def satisfiable(self, name: str) -> None:
        """The hypotheses so far have a model."""
        if self.batch and "@" in name:
            return
        begun = time.perf_counter()
        verdict = self.solver.check()
        status = "proved" if verdict == z3.sat else "failed" if verdict == z3.unsat else "unknown"
        spent = (time.perf_counter() - begun) * 1000
        self.out.obligations.append(
            Obligation(
                f"{self.event.id}/{name}",
                self.event.file,
                self.event.row,
                "can_fire" if name.startswith("can_fire") else name,
                "vacuity" if name.startswith("can_fire") else "boundary",
                status,
                round(spent, 3),
            )
        )
        if self.batch and status != "proved":
            raise Refuted

    def counterexample(self, full: str, prop: str, rules: tuple[str, ...], text: str) -> Counterexample:
        """The model as changed fields."""
        model = self.solver.model()
        changes = []
        for (owner, name), after in self.after.items():
            target = next(
                e.target
                for e in self.event.effects
                if e.target.name == name and owner_name(e.target, self.acting) == owner
            )
            before = self._value(model, self.base.words.cell(owner, target), target)
            changes.append(Change(owner, name, before, self._value(model, after, target)))
        return Counterexample(full, self.event.id, prop, rules, text, tuple(c for c in changes if c.before != c.after))

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
        for prop in self.goals():
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
        for cls, kind, var in _summed(self.tables):
            for total in var.sums:
                for of, share in total.terms.items() if total.cls in LINKS else ():
                    name = f"share.{kind or cls}.{var.name}.{total.cls}<{of}>"
                    yield _Kept(name, total.cls, {"self": of} if of else {}, share)

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
        read = refs(prop.expr)
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
        self.id, self.scope, self.kinds, self.expr = name, scope, kinds, expr


Work = dict[tuple[Inst, ...], list[tuple[Property | _Kept, dict[str, Inst]]]]


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


__all__ = ["Task", "bindings_within", "prove_events"]
