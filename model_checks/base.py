"""The obligations that belong to no row.

The first state, shares that are never negative, step properties of a pause.
"""

from dataclasses import replace

import z3

from hybridkv_ref.expr import Expr, Ref, rewrite
from hybridkv_ref.model_checks.frames import Assumptions, Frame, Inst, owner_name, placements
from hybridkv_ref.model_checks.obligations import Obligation, TaskResult
from hybridkv_ref.model_checks.queries import holds
from hybridkv_ref.model_checks.smt import literal, new_solver, term
from hybridkv_ref.tables import CLASS_OF, Property, Tables, Var


class Base:
    """Collects these obligations for one set of tables."""

    def __init__(self, tables: Tables, base: Assumptions) -> None:
        self.tables, self.base = tables, base
        self.out = TaskResult()

    def run(self) -> TaskResult:
        """All three groups."""
        for prop in self.tables.forms("invariant"):
            self.initially(prop)
        for prop in self.tables.forms("step"):
            if not prop.on:
                self.pausing(prop)
        for cls, kind in [("segment", k) for k in self.tables.kinds] + [(c, "") for c in self.tables.classes]:
            for var in self.tables.vars_of(cls, kind).values():
                self.never_negative(kind or cls, var)
        for var in self.tables.globals.values():
            self.never_negative("global", var)
        return self.out

    def ask(
        self, name: str, file: str, prop: str, method: str, rules: tuple[str, ...], solver: z3.Solver, goal: z3.BoolRef
    ) -> None:
        """One query."""
        answer = holds(solver, goal)
        self.out.obligations.append(Obligation(name, file, "", prop, method, answer.status, answer.milliseconds, rules))

    def alone(self, scope: str, kinds: dict[str, str]) -> list[dict[str, Inst]]:
        """The entities of a scope, all of them bystanders of nothing."""
        return list(placements(self.tables, {}, scope, kinds))

    def frame(self, bound: dict[str, Inst]) -> Frame:
        """The frame of these entities and what they point at."""
        fresh = set(bound.values()) | {end for i in bound.values() for _, end in i.refs}
        return Frame(self.tables, {}, tuple(sorted(fresh, key=lambda i: i.name)))

    def initially(self, prop: Property) -> None:
        """The property holds when every variable has its first value; rigid ones and constants are arbitrary."""
        for bound in self.alone(prop.scope, dict(prop.kinds)):

            def look(ref: Ref, bound: dict[str, Inst] = bound) -> z3.ExprRef:
                owner = owner_name(ref, bound)
                if ref.role == "const":
                    return self.base.words.cell(owner, ref)
                inst = bound.get(ref.role)
                variables = self.tables.globals if inst is None else self.tables.vars_of(CLASS_OF[ref.role], inst.kind)
                var = variables[ref.name]
                return self.base.words.cell(owner, ref) if var.rigid else literal(var.init, var.type)

            solver = new_solver()
            solver.add(*self.base.constants())
            for inst in bound.values():
                solver.add(*self.base.types(inst))
            self.ask(f"init/{prop.id}", _file(prop), prop.id, "initial", prop.rules, solver, term(prop.expr, look))

    def pausing(self, prop: Property) -> None:
        """A step that changes nothing the property reads cannot break it."""
        for bound in self.alone(prop.scope, dict(prop.kinds)):
            solver = new_solver()
            solver.add(*self.base.constants(), *self.base.facts(self.frame(bound)))
            goal = self.base.words.pre(old(prop.expr), bound)
            label = "+".join(sorted(i.name for i in bound.values()))
            self.ask(f"pause/{prop.id}@{label}", _file(prop), prop.id, "step", prop.rules, solver, goal)

    def never_negative(self, owner: str, var: Var) -> None:
        """What a counter adds up is never negative, so neither is the rest of the sum that a proof does not look at."""
        for total, (kind, share) in ((t, item) for t in var.sums for item in t.terms.items()):
            for bound in self.alone(total.cls, {"self": kind} if kind else {}):
                solver = new_solver()
                solver.add(*self.base.constants(), *self.base.facts(self.frame(bound)))
                goal = self.base.words.pre(share, bound) >= 0
                name = (
                    f"share/{owner}.{var.name}.{total.cls}<{kind}>@{'+'.join(sorted(i.name for i in bound.values()))}"
                )
                self.ask(name, "", f"share.{var.name}", "sum", ("HKV-REF-003",), solver, goal)


def old(expr: Expr) -> Expr:
    """A two-state expression in which the next values are the old ones."""
    return rewrite(expr, lambda e: replace(e, new=False) if isinstance(e, Ref) and e.new else None)


def _file(prop: Property) -> str:
    return prop.place.partition(":")[0]


def prove_base(tables: Tables, base: Assumptions) -> TaskResult:
    """The obligations that belong to no row."""
    return Base(tables, base).run()
