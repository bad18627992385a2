"""Second opinion: Spacer finds inductive invariants of its own for caps and for what one segment promises.

The induction in ``induction`` is given every helper invariant; here none is given.  The encoding, per goal:

* One unknown relation per kind, ``I_kind(constants, globals, variables of one segment)``, and one of the globals
  alone.  Each is to hold of every segment in every reachable state.  A row takes its acting segments out of their
  relations and puts them back changed; every other segment, of every kind, is put back unchanged with the changed
  globals.  So a solution holds for any number of segments; what ties two of them together is lost.
* Leases, requests, copies and graphs are not modelled: what a row reads of them has any value of its type, the same in
  all guards and effects of that one firing.  Segment variables that count them (pins, holds, ...) are plain integers
  that the rows move; that they are sums is not used, nor is it used of the globals.
* Only a *slice* of the variables is kept (see ``slices``).  What is not kept has any value of its type each time.

Every one of these only adds behaviour, so what Spacer proves holds.  A goal that has a counterexample even with all
variables of its own kind, and is proved with no other slice, is *not expressible* here: no opinion. That is a failure
for a cap, and no confirmation of any other goal: the report says how many there are.
"""

import os
import time
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass, field

import z3

from hybridkv_ref.expr import BOOL, INT, Expr, Ref, Type, refs
from hybridkv_ref.model_checks.obligations import Search
from hybridkv_ref.model_checks.smt import constant, in_range, literal, term
from hybridkv_ref.tables import CLASS_OF, Event, Property, Tables, Var

SLICE_EFFORT = 2_000_000  # in the solver's own units, the same on every machine; one million takes about a second
LAST_EFFORT = 40_000_000
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
    """Sets of variables to keep; the last decides what is not expressible: all those of the goal's own kind.

    First what the goal reads, with what that depends on through effects; then also what one guard conjunct reads; then
    what all their guards read, and so on until nothing is added; then, of that, the globals and the goal's own kind.
    """
    start = frozenset(_through_effects(tables, _keys(goal.expr, dict(goal.kinds))))
    wider = {frozenset(_through_effects(tables, start | some)) for some in _guards(tables, start)}
    found: dict[frozenset[Key], None] = dict.fromkeys([start, *sorted(wider, key=lambda s: (len(s), sorted(s)))])
    kept, before = set(start), set[Key]()
    while kept != before:
        before = kept
        kept = set(_through_effects(tables, kept.union(*_guards(tables, kept))))
        found[frozenset(kept)] = None
    own = set(goal.kinds.values()) or {"global", "const"}
    found[frozenset(k for k in kept if k[0] in own | {"global", "const"})] = None
    last = frozenset(k for k in kept if k[0] in own)
    found.pop(last, None)
    yield from found
    yield last


def _guards(tables: Tables, kept: Set[Key]) -> list[set[Key]]:
    """What each guard conjunct reads, of the rows that change something kept."""
    found = []
    for event in tables.events:
        kinds = dict(event.kinds)
        if any(key(e.target, kinds) in kept for e in event.effects):
            found += [_keys(g.expr, kinds) for g in event.guards]
    return found


def _through_effects(tables: Tables, kept: Set[Key]) -> Set[Key]:
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
    effort: int = LAST_EFFORT
    guided: bool = False
    engine: str = "spacer"
    fixedpoint: z3.Fixedpoint = field(default_factory=z3.Fixedpoint)

    def __post_init__(self) -> None:
        self.fixedpoint.set(engine=self.engine, rlimit=self.effort, **{"spacer.global": self.guided})
        self.declared: dict[str, z3.ExprRef] = {}
        self.constants = [n for n in self.tables.constants if ("const", n) in self.kept]
        self.globals = [n for n in self.tables.globals if ("global", n) in self.kept]
        self.relations = {k: self.relation(k, self.variables(k)) for k in ("", *self.tables.kinds) if self.wanted(k)}

    def wanted(self, kind: str) -> bool:
        """Whether a relation is needed: the globals' own, the goal's, and those of kinds that the slice has."""
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
        kept = [e for e in event.effects if key(e.target, kinds) in self.kept]
        after = {(e.target.role, e.target.name): term(e.expr, self.look) for e in kept}
        if not after:
            return
        body = [term(g.expr, self.look) for g in event.guards]
        for ref in {r for g in event.guards for r in refs(g.expr)} | {r for e in event.effects for r in refs(e.expr)}:
            body += in_range(self.look(ref), ref.type)
        body += [term(e, self.look) for c in self.tables.constants.values() for _, e in c.assume]
        acting = {role: kind for role, kind in kinds.items() if kind in self.relations and role in event.roles}
        body += [self.holds(kind, role, {}) for role, kind in acting.items()]
        for role, kind in acting.items():
            self.fixedpoint.rule(self.holds(kind, role, after), body)
        if any(owner == "global" for owner, _ in after):
            for kind in self.relations:
                self.fixedpoint.rule(self.holds(kind, "other", after), [*body, self.holds(kind, "other", {})])

    def solve(self) -> str:
        """proved: the goal holds in all states of the relation; refuted: not in the abstraction; unknown: gave up."""
        self.build()
        kind = self.goal.kinds.get("self", "")
        bad = z3.And(self.holds(kind, "self", {}), z3.Not(term(self.goal.expr, self.look)))
        try:
            verdict = self.fixedpoint.query(bad)
        except z3.Z3Exception:  # how the engine reports that its effort is spent
            return "unknown"
        return "proved" if verdict == z3.unsat else "refuted" if verdict == z3.sat else "unknown"


def solve(tables: Tables, goal: Property, kept: frozenset[Key], effort: int) -> str:
    """The verdict over one slice.

    Where Spacer enumerates the values of counters without end, global guidance makes it generalise over their sums;
    where it does not, guidance costs more than it gives.  So both are tried.
    """
    plain = Encoding(tables, goal, kept, effort).solve()
    return plain if plain != "unknown" else Encoding(tables, goal, kept, effort, guided=True).solve()


@contextmanager
def _silent() -> Iterator[None]:
    """Without standard error: there the bounded engine says, each time and whatever its options, that it is slow."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def opinion(tables: Tables, goal: Property) -> Search:
    """Spacer's opinion on one goal: ``holds``; ``not expressible`` (no opinion, with the reason); else ``unknown``.

    A cap for which it has no opinion fails, as what is unknown does.
    """
    begun, every, verdict = time.perf_counter(), list(slices(tables, goal)), "unknown"
    for number, kept in enumerate(every):
        last = number == len(every) - 1
        # Bounded search proves nothing, but where there is a counterexample it finds it much sooner.
        with _silent():
            verdict = Encoding(tables, goal, kept, LAST_EFFORT, engine="bmc").solve() if last else "unknown"
        if verdict != "refuted":
            verdict = solve(tables, goal, kept, LAST_EFFORT if last else SLICE_EFFORT)
        if verdict == "proved":
            break
    status = {"proved": "holds", "refuted": "not expressible"}.get(verdict, "unknown")
    detail = f"{len(kept)} variables, slice {number + 1} of {len(every)}, {time.perf_counter() - begun:.1f} s"
    if status == "not expressible":
        detail += f"; {_reason(tables, goal)}"
    passed = status == "holds" or (status == "not expressible" and not is_cap(goal))
    return Search(
        f"spacer/{goal.id}", "spacer", status, passed, "any number of segments", detail=detail, rules=goal.rules
    )


def is_cap(goal: Property) -> bool:
    """Whether a goal bounds the globals by a constant: such a one has to be proved."""
    return goal.scope == "global" and any(r.role == "const" for r in refs(goal.expr))


def _reason(tables: Tables, goal: Property) -> str:
    variables = tables.kinds[goal.kinds["self"]].vars if goal.kinds else tables.globals
    counts = sorted(r.name for r in refs(goal.expr) if r.name in variables and variables[r.name].sums)
    lost = f"that {', '.join(counts)} count something" if counts else "what ties the segment to a lease, copy or other"
    return f"a counterexample with all variables of its own kind, no proof with more: not known is {lost}"
