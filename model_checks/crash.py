"""The crash: from any state in which the invariants hold, everything volatile starts over and they hold again.

A crash is one step of all entities at once, so sums are treated as a whole: an entity's share after the crash is
shown to be no larger than before it, hence each global sum falls to some value between the shares in the frame and
what it was. Links (leases, copies, shipments, votes) start over everywhere, so every count of links is zero.  Since
drain claims hold from every state in which the invariants hold, they hold after a crash.
"""

import z3

from hybridkv_ref.expr import Expr, Ref
from hybridkv_ref.model_checks.frames import (
    Assumptions,
    Binding,
    Frame,
    Inst,
    contributors,
    owner_name,
    owners,
    placements,
)
from hybridkv_ref.model_checks.obligations import Obligation, TaskResult
from hybridkv_ref.model_checks.queries import Answer, holds, possible
from hybridkv_ref.model_checks.smt import in_range, literal, new_solver, term
from hybridkv_ref.tables import LINKS, Property, Tables, Var

TAG = "crash"


class Crash:
    """The obligations of the crash for one set of tables."""

    def __init__(self, tables: Tables, base: Assumptions) -> None:
        self.tables, self.base = tables, base
        self.out = TaskResult()
        self.solver = new_solver()
        self.gone: dict[str, bool] = {}

    def run(self) -> TaskResult:
        """Every invariant and every property of the crash itself, over every frame of bystanders."""
        work: dict[tuple[Inst, ...], list[tuple[Property, dict[str, Inst]]]] = {}
        for prop in self.tables.properties:
            if prop.form == "invariant" or (prop.form == "step" and prop.on == TAG):
                for bound in placements(self.tables, {}, prop.scope, prop.kinds):
                    fresh = set(bound.values()) | {end for i in bound.values() for _, end in i.refs}
                    work.setdefault(tuple(sorted(fresh, key=lambda i: i.name)), []).append((prop, bound))
        for entities, goals in work.items():
            self.frame(Frame(self.tables, {}, entities), goals)
        for var in self.tables.globals.values():
            for total in var.sums:
                for kind, share in total.terms.items():
                    if total.cls not in LINKS:
                        self.share(var, total.cls, kind, share)
        return self.out

    def frame(self, frame: Frame, goals: list[tuple[Property, dict[str, Inst]]]) -> None:
        """Every property of one frame after the crash."""
        self.solver = new_solver()
        self.solver.add(*self.base.constants(), *self.base.facts(frame), *self.sums(frame))
        label = "+".join(i.name for i in frame.fresh)
        self.record(f"can_happen.{label}", "can_happen", (), "vacuity", possible(self.solver))
        for prop, bound in goals:
            self.ask(f"{prop.id}@{label}", prop.id, prop.rules, self.claim(prop, bound))

    def claim(self, prop: Property, bound: dict[str, Inst]) -> z3.BoolRef:
        """What a property says of the state after the crash; of both, if it is a property of the step."""

        def look(ref: Ref) -> z3.ExprRef:
            if ref.new or prop.form == "invariant":
                return self.after(bound.get(ref.role), ref)
            return self.base.words.cell(owner_name(ref, bound), ref)

        return term(prop.expr, look)

    def share(self, var: Var, cls: str, kind: str, share: Expr) -> None:
        """An entity's share of a global sum does not grow, and is not negative."""
        for bound in placements(self.tables, {}, cls, {"self": kind} if kind else {}):
            frame = Frame(self.tables, {}, tuple(bound.values()))
            self.solver = new_solver()
            self.solver.add(*self.base.constants(), *self.base.facts(frame))
            later = self.later(share, bound)
            now = self.base.words.pre(share, bound)
            name = f"share.{var.name}<{kind}>"
            self.ask(name, name, ("HKV-ACC-001",), z3.And(later >= 0, later <= now))

    # -- the state after ---------------------------------------------------------------------------------------------
    def after(self, inst: Inst | None, ref: Ref) -> z3.ExprRef:
        """A variable after the crash."""
        if ref.role in ("const", "input"):
            return self.base.words.cell(ref.role, ref)
        if inst is None:
            var = self.tables.globals[ref.name]
            if var.durable:
                return self.base.words.cell("global", ref)
            return z3.Int(f"after.{ref.name}") if var.sums else literal(var.init, var.type)
        var = self.tables.vars_of(inst.cls, inst.kind)[ref.name]
        before = self.base.words.cell(inst.name, ref)
        if var.rigid:
            return before
        value = literal(var.init, var.type)
        for survivor in self.tables.survivors:
            if survivor.kind == inst.kind and inst.cls == "segment":
                kept = (
                    literal(survivor.to, var.type)
                    if var.name == "stage"
                    else before
                    if var.name in survivor.keep
                    else value
                )
                value = z3.If(self.survives(inst, survivor.stages, tuple(g.expr for g in survivor.guards)), kept, value)
        return value

    def later(self, expr: Expr, bound: Binding) -> z3.ExprRef:
        """An expression after the crash."""
        return term(expr, lambda ref: self.after(bound.get(ref.role), ref))

    def survives(self, inst: Inst, stages: tuple[str, ...], guards: tuple[Expr, ...]) -> z3.BoolRef:
        """Whether an entry describes this segment."""
        stage = self.tables.kinds[inst.kind].vars["stage"]
        now = self.base.words.cell(inst.name, Ref("self", "stage", stage.type))
        here = z3.Or([now == stage.type.members.index(s) for s in stages])
        return z3.And([here, *(self.base.words.pre(g, {"self": inst}) for g in guards)])

    def sums(self, frame: Frame) -> list[z3.BoolRef]:
        """Each global sum after the crash: the shares in the frame and a rest, no more than before."""
        found: list[z3.BoolRef] = []
        for owner, var in owners(frame):
            if owner is not None:
                continue
            now, later = self.base.words.cell("global", Ref("global", var.name, var.type)), z3.Int(f"after.{var.name}")
            rest = z3.Int(f"after.rest({var.name})")
            shares = [self.later(share, bound) for _, share, bound in contributors(frame, None, var)]
            found += [later == z3.Sum([*shares, rest]), rest >= 0, later <= now]
            found += in_range(later, var.type)
            if self.vanishes(var):
                found.append(later == 0)
        return found

    def vanishes(self, var: Var) -> bool:
        """Whether the solver shows that nobody has a share of this sum after the crash."""
        if var.name not in self.gone:
            self.gone[var.name] = all(
                self.is_zero(total.cls, kind, share) for total in var.sums for kind, share in total.terms.items()
            )
        return self.gone[var.name]

    def is_zero(self, cls: str, kind: str, share: Expr) -> bool:
        """Whether a share is zero after the crash for every entity of this class and kind."""
        for bound in placements(self.tables, {}, cls, {"self": kind} if kind else {}):
            fresh = set(bound.values()) | {end for i in bound.values() for _, end in i.refs}
            solver = new_solver()
            solver.add(*self.base.constants(), *self.base.facts(Frame(self.tables, {}, tuple(fresh))))
            solver.add(self.later(share, bound) != 0)
            if solver.check() != z3.unsat:
                return False
        return True

    # -- queries -------------------------------------------------------------------------------------------------------
    def ask(self, name: str, prop: str, rules: tuple[str, ...], goal: z3.BoolRef) -> None:
        """One query."""
        self.record(name, prop, rules, "crash", holds(self.solver, goal))

    def record(self, name: str, prop: str, rules: tuple[str, ...], method: str, answer: Answer) -> None:
        """Notes the answer on one obligation."""
        self.out.obligations.append(
            Obligation(f"crash/{name}", "", "crash", prop, method, answer.status, answer.milliseconds, rules)
        )
