"""Second opinion: Spacer finds inductive invariants of its own for caps and for what one segment promises.

The induction in ``induction`` is given every helper invariant; here none is given.  The encoding, per goal:

* One unknown relation per kind, ``I_kind(constants, globals, variables of one segment)``, and ``I(constants, globals)``.
  It is to hold of every segment in every reachable state.  A row takes its acting segments out of their relations and
  puts them back changed; every other segment, of every kind, is put back unchanged with the changed globals.  So a
  solution holds for any number of segments (each is looked at alone: what links two of them is lost).
* Leases, requests, copies and graphs are not modelled: what a row reads of them has any value of its type, the same in
  all guards and effects of that one firing.  Segment variables that count them (pins, writers, holds, incoming, ...) are
  plain integers that the rows move; that they are sums is not used.
* Only a *slice* is kept: the variables of the goal, then those on which they depend through effects, then through
  guards.  A variable outside of the slice has any value of its type each time it is read.

Every step only adds behaviour, so what Spacer proves holds.  A goal for which even the largest slice has a
counterexample is *not expressible* here: it rests on what was given up (a count as a sum, or another entity's state).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import z3

from hybridkv_ref.expr import BOOL, INT, Expr, Ref, Type, refs
from hybridkv_ref.model_checks.frames import subset_lemmas
from hybridkv_ref.model_checks.smt import constant, in_range, literal, term
from hybridkv_ref.tables import CLASS_OF, Event, Property, Tables, Var

TIMEOUT_MS = 20_000
Key = tuple[str, str]  # (kind, variable); kind is 'global' or 'const' for those


def key(ref: Ref, kinds: dict[str, str]) -> Key | None:
    """The variable that a slice may keep; None for one of a lease, request, copy, graph or an input."""
    if ref.role in ("global", "const"):
        return (ref.role, ref.name)
    return (kinds[ref.role], ref.name) if CLASS_OF.get(ref.role) == "segment" else None


def _keys(expr: Expr, kinds: dict[str, str]) -> set[Key]:
    return {k for k in (key(r, kinds) for r in refs(expr)) if k is not None}


def goals(tables: Tables) -> tuple[Property, ...]:
    """The invariants about the globals or about one segment of a kind."""
    return tuple(p for p in tables.forms("invariant") if p.scope in ("global", "segment"))


def slices(tables: Tables, goal: Property) -> Iterator[frozenset[Key]]:
    """Growing sets of variables to keep: the goal's; with those of one guard conjunct more; all it depends on."""
    start = _through_effects(tables, _keys(goal.expr, dict(goal.kinds)))
    found = dict.fromkeys([frozenset(start)])
    wider = [frozenset(_through_effects(tables, start | some)) for some in _guards(tables, start)]
    found |= dict.fromkeys(sorted(wider, key=lambda kept: (len(kept), sorted(kept))))
    kept, before = set(start), set[Key]()
    while kept != before:
        before = kept
        kept = _through_effects(tables, kept.union(*_guards(tables, kept)))
    yield from found | {frozenset(kept): None}


def _guards(tables: Tables, kept: set[Key]) -> list[set[Key]]:
    """What each guard conjunct reads, of the rows that change something kept."""
    found = []
    for event in tables.events:
        kinds = dict(event.kinds)
        if any(key(e.target, kinds) in kept for e in event.effects):
            found += [_keys(g.expr, kinds) for g in event.guards]
    return found


def _through_effects(tables: Tables, kept: set[Key]) -> set[Key]:
    while True:
        wider = set(kept)
        for event in tables.events:
            kinds = dict(event.kinds)
            wider |= {k for e in event.effects if key(e.target, kinds) in kept for k in _keys(e.expr, kinds)}
        if wider == kept:
            return kept
        kept = wider


@dataclass
class Encoding:
    """The Horn clauses of one goal over one slice."""

    tables: Tables
    goal: Property
    kept: frozenset[Key]
    counted: bool = False
    fixedpoint: z3.Fixedpoint = field(default_factory=z3.Fixedpoint)

    def __post_init__(self) -> None:
        self.fixedpoint.set(engine="spacer", timeout=TIMEOUT_MS)
        self.declared: dict[str, z3.ExprRef] = {}
        self.constants = [n for n in self.tables.constants if ("const", n) in self.kept]
        self.globals = [n for n in self.tables.globals if ("global", n) in self.kept]
        self.relations = {k: self.relation(k, self.variables(k)) for k in ("", *self.tables.kinds) if self.wanted(k)}

    def wanted(self, kind: str) -> bool:
        """Whether a relation is needed: the globals' own, the goal's, and those of kinds with something in the slice."""
        return kind in ("", self.goal.kinds.get("self")) or bool(self.variables(kind))

    def variables(self, kind: str) -> list[Var]:
        """The kept variables of a kind of segment."""
        return [v for v in self.tables.kinds[kind].vars.values() if (kind, v.name) in self.kept] if kind else []

    def relation(self, kind: str, variables: list[Var]) -> z3.FuncDeclRef:
        """The unknown relation of a kind ('' for the globals)."""
        shared = [*(z3.IntSort() for _ in self.constants), *(self.sort(self.tables.globals[n]) for n in self.globals)]
        sorts = [*shared, *(self.sort(v) for v in variables)]
        found = z3.Function(f"I_{kind}", *sorts, z3.BoolSort())
        self.fixedpoint.register_relation(found)
        return found

    @staticmethod
    def sort(var: Var) -> z3.SortRef:
        """The sort of a variable."""
        return z3.BoolSort() if var.type == BOOL else z3.IntSort()

    def cell(self, owner: str, name: str, kind: Type) -> z3.ExprRef:
        """The clause variable that stands for one variable of one entity."""
        full = f"{owner}.{name}"
        if full not in self.declared:
            self.declared[full] = constant(full, kind)
            self.fixedpoint.declare_var(self.declared[full])
        return self.declared[full]

    def look(self, ref: Ref) -> z3.ExprRef:
        """A variable before the step, kept or not: what is not kept occurs in no relation and so has any value."""
        return self.cell(ref.role, ref.name, ref.type)

    def holds(self, kind: str, owner: str, after: dict[tuple[str, str], z3.ExprRef]) -> z3.BoolRef:
        """The relation of a kind for the segment ``owner``, with the values of ``after`` where a step changed them."""
        shared = [self.cell("const", n, INT) for n in self.constants]
        world = [("global", n, self.tables.globals[n]) for n in self.globals]
        own = [(owner, v.name, v) for v in self.variables(kind)]
        values = [after.get((o, n), self.cell(o, n, v.type)) for o, n, v in (*world, *own)]
        return self.relations[kind](*shared, *values)

    # -- clauses ----------------------------------------------------------------------------------------------------
    def build(self) -> None:
        """All clauses: the first state, then every row."""
        self.first()
        for event in self.tables.events:
            self.row(event)

    def first(self) -> None:
        """Every variable has its first value; constants and rigid variables have any that their type allows."""
        start = {("global", n): literal(v.init, v.type) for n, v in self.tables.globals.items()}
        assumed = [term(e, self.look) for c in self.tables.constants.values() for _, e in c.assume]
        for kind in self.relations:
            after, free = dict(start), list(assumed)
            for var in self.variables(kind):
                if var.rigid:
                    free += self.typed("self", var)
                else:
                    after["self", var.name] = literal(var.init, var.type)
            self.fixedpoint.rule(self.holds(kind, "self", after), [z3.BoolVal(True), *free])

    def typed(self, owner: str, var: Var) -> list[z3.BoolRef]:
        """What a variable's type says of it."""
        value = self.cell(owner, var.name, var.type)
        return [*in_range(value, var.type), *([value >= var.at_least] if var.at_least is not None else [])]

    def row(self, event: Event) -> None:
        """A row's acting segments change; if globals change, every other segment sees it."""
        kinds = dict(event.kinds)
        after = {(e.target.role, e.target.name): term(e.expr, self.look) for e in event.effects if key(e.target, kinds) in self.kept}
        if not after:
            return
        body = [term(g.expr, self.look) for g in event.guards]
        for ref in {r for g in event.guards for r in refs(g.expr)} | {r for e in event.effects for r in refs(e.expr)}:
            body += in_range(self.look(ref), ref.type)
        body += [term(e, self.look) for c in self.tables.constants.values() for _, e in c.assume]
        acting = {role: kind for role, kind in kinds.items() if kind in self.relations and role in event.roles}
        body += [self.holds(kind, role, {}) for role, kind in acting.items()]
        if self.counted:
            body += [fact for role, kind in acting.items() for fact in self.counts(event, role, kind)]
        for role, kind in acting.items():
            self.fixedpoint.rule(self.holds(kind, role, after), body)
        if any(owner == "global" for owner, _ in after):
            for kind in self.relations:
                self.fixedpoint.rule(self.holds(kind, "other", after), [*body, self.holds(kind, "other", {})])

    def counts(self, event: Event, role: str, kind: str) -> Iterator[z3.BoolRef]:
        """An acting segment's counts, less the acting lease or copy, count the rest: never negative, subsets no larger."""
        rests: dict[str, z3.ArithRef] = {}
        for var in self.variables(kind):
            if var.sum is None:
                continue
            rests[var.name] = self.cell(role, var.name, var.type)
            if var.sum.cls in event.roles and var.sum.via == role and kind in (*var.sum.terms, ""):
                share = var.sum.terms.get(kind, var.sum.terms.get(""))
                if share is not None:
                    rests[var.name] = rests[var.name] - term(share, self.look)
        yield from (rest >= 0 for rest in rests.values())
        for cls, owner, small, large in subset_lemmas(self.tables):
            if (cls, owner) == ("segment", kind) and small in rests and large in rests:
                yield rests[small] <= rests[large]

    def solve(self) -> z3.CheckSatResult:
        """unsat: the goal holds in all states of the relation; sat: the abstraction has a counterexample."""
        self.build()
        kind = self.goal.kinds.get("self", "")
        return self.fixedpoint.query(z3.And(self.holds(kind, "self", {}), z3.Not(term(self.goal.expr, self.look))))

