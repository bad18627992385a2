"""Liveness by ranking: from ``start`` always eventually ``goal``, under weak fairness of the rows marked ``fair``.

For each claim, over frames as in ``frames`` and for any number of entities:
  * some helpful entry applies while the claim is pending, and its fair row is enabled and lowers the rank;
  * no row raises the rank, leaves the pending region for anything but the goal, or withdraws a helpful entry without
    lowering the rank, so that the helpful row stays enabled until it fires;
  * the rank is a tuple of numbers that are never negative, compared lexicographically, so it cannot fall for ever;
  * where progress is another entity's (``by``), such an entity exists, and its end lowers the rank.
"""

from collections.abc import Iterable, Iterator

import z3

from hybridkv_ref.expr import Expr, Ref, refs
from hybridkv_ref.model_checks.frames import Assumptions, Binding, Cell, Frame, Inst, actors, owner_name, placements
from hybridkv_ref.model_checks.obligations import Obligation, TaskResult
from hybridkv_ref.model_checks.queries import settle
from hybridkv_ref.model_checks.smt import new_solver, term
from hybridkv_ref.tables import Event, Helpful, Response, Tables, Var

ANOTHER = "another"
METHOD = {"response": "ranking", "bounded": "ranking", "queue": "ranking", "drain": "drain"}


class Claim:
    """The obligations of one liveness claim."""

    def __init__(self, tables: Tables, claim: Response, base: Assumptions) -> None:
        self.tables, self.claim, self.base = tables, claim, base
        self.out = TaskResult()
        whole = (claim.start, claim.goal, claim.given, *claim.rank, *(h.when for h in claim.helpful))
        self.read = {ref.name for expr in whole for ref in refs(expr)}

    def run(self) -> TaskResult:
        """All obligations of the claim."""
        bound = next(iter(placements(self.tables, {}, self.claim.scope, self.claim.kinds)))
        self.at_rest(bound)
        for event in self.tables.events:
            if event.row in self.claim.without or (event.intake and "intake" in self.claim.without):
                continue
            if not any(effect.target.name in self.read for effect in event.effects):
                continue
            for where in placements(self.tables, actors(event), self.claim.scope, self.claim.kinds):
                self.under(event, where)
        return self.out

    # -- terms ------------------------------------------------------------------------------------------------------
    def now(self, expr: Expr, bound: Binding) -> z3.ExprRef:
        """An expression before the step."""
        return self.base.words.pre(expr, bound)

    def pending(self, bound: Binding) -> list[z3.BoolRef]:
        """The claim is owed: start, not goal, and what it is given."""
        return [
            self.now(self.claim.start, bound),
            z3.Not(self.now(self.claim.goal, bound)),
            self.now(self.claim.given, bound),
        ]

    def helpful_row(self, helpful: Helpful, bound: Binding) -> tuple[Event, dict[str, Inst]] | None:
        """The event of a helpful row and the entities, out of the claim's, on which it fires."""
        for event in self.tables.events:
            if event.row != helpful.row:
                continue
            chosen: dict[str, Inst] = {}
            for role in event.roles:
                kind = event.kinds.get(role, "")
                found = bound.get(role) if role != "self" or "self" in bound else None
                candidates = [found] if found else [bound[r] for r in ("src", "dst") if r in bound and role == "self"]
                fitting = [c for c in candidates if c is not None and (not kind or c.kind == kind)]
                if fitting:
                    chosen[role] = fitting[0]
            if len(chosen) == len(event.roles):
                return event, chosen
        return None

    def ask(self, name: str, solver: z3.Solver, goal: z3.BoolRef, row: str = "") -> None:
        """One query."""
        self.ask_all(solver, [(name, goal)], row)

    def ask_all(self, solver: z3.Solver, goals: list[tuple[str, z3.BoolRef]], row: str) -> None:
        """Settles these goals; ``row`` is the event that they are about, if any."""
        file = self.tables.event(row).file if row else ""
        for index, answer in settle(solver, [goal for _, goal in goals]):
            full, method = f"{self.claim.id}/{goals[index][0]}", METHOD[self.claim.form]
            self.out.obligations.append(
                Obligation(full, file, row, self.claim.id, method, answer.status, answer.milliseconds, self.claim.rules)
            )

    # -- while nothing happens -----------------------------------------------------------------------------------------
    def at_rest(self, bound: dict[str, Inst]) -> None:
        """Ranks are not negative, some helpful entry applies, and each can do what it says."""
        fresh = {e for i in bound.values() for e in (i, *(x for _, x in i.refs))}
        frame = Frame(self.tables, {}, tuple(sorted(fresh, key=lambda i: i.name)))
        solver = new_solver()
        solver.add(*self.base.constants(), *self.base.facts(frame), *self.pending(bound))
        for index, part in enumerate(self.claim.rank):
            self.ask(f"rank[{index}]_not_negative", solver, self.now(part, bound) >= 0)
        self.ask("somebody_helps", solver, z3.Or([self.now(h.when, bound) for h in self.claim.helpful]))
        for index, helpful in enumerate(self.claim.helpful):
            solver.push()
            solver.add(self.now(helpful.when, bound))
            if helpful.by:
                solver.add(self.now(helpful.probe, bound))
                self.ask(f"helpful[{index}]_exists", solver, self.now(helpful.count, bound) > 0)
                self.covered(index, helpful, bound, solver)
            else:
                self.enabled(index, helpful, bound, solver)
            solver.pop()

    def enabled(self, index: int, helpful: Helpful, bound: Binding, solver: z3.Solver) -> None:
        """The helpful row is fair, takes no input and is enabled."""
        found = self.helpful_row(helpful, bound)
        fair = found is not None and not found[0].inputs and (found[0].fair or helpful.row in self.claim.also_fair)
        if found is None or not fair:
            self.ask(f"helpful[{index}]_is_a_fair_row", solver, z3.BoolVal(False))
            return
        event, chosen = found
        goal = z3.And([z3.BoolVal(True), *(self.now(g.expr, chosen) for g in event.guards)])
        self.ask(f"helpful[{index}]_{helpful.row}_enabled", solver, goal, event.id)

    def covered(self, index: int, helpful: Helpful, bound: dict[str, Inst], solver: z3.Solver) -> None:
        """What is counted ends by claims of its own; for another segment, by its fair row."""
        if helpful.by == ANOTHER:
            other = Inst(f"~other:{self.claim.kinds['self']}", "segment", self.claim.kinds["self"])
            solver.push()
            solver.add(*self.base.facts(Frame(self.tables, {}, (other,))), self.now(helpful.who, {"self": other}))
            self.enabled(index, helpful, {"self": other}, solver)
            solver.pop()
            return
        shares = [(r, total) for r in refs(helpful.count) for v in self.variables(r, bound) for total in v.sums]
        self.ask(f"helpful[{index}]_counts", solver, z3.BoolVal(bool(shares) and self.earlier(helpful.by)))
        for ref, total in shares:
            owner = bound[ref.role]
            for where in placements(self.tables, bound, total.cls, {}):
                link = where[total.cls]
                share = total.terms.get(where["self"].kind if "self" in where else "")
                if link in bound.values() or share is None or link.owner(total.via) != owner:
                    continue
                self.owed(index, helpful, total.cls, share, where, bound, solver)

    def variables(self, ref: Ref, bound: Binding) -> list[Var]:
        """The variable of a ref to one of the claim's entities."""
        inst = bound.get(ref.role)
        return [self.tables.vars_of(inst.cls, inst.kind)[ref.name]] if inst else []

    def earlier(self, by: str) -> bool:
        """The claims that this one rests on exist, hold without switching rows off, and do not rest on it in turn."""

        def rests_on(by: str, seen: frozenset[str]) -> bool:
            named = [c for c in self.tables.responses if c.id.startswith(by)]
            if not named or any(c.without or c.id in seen for c in named):
                return False
            later = {(h.by, c.id) for c in named for h in c.helpful if h.by and h.by != ANOTHER}
            return all(rests_on(name, seen | {owner}) for name, owner in later)

        return rests_on(by, frozenset((self.claim.id,)))

    def owed(
        self,
        index: int,
        helpful: Helpful,
        cls: str,
        share: Expr,
        where: dict[str, Inst],
        bound: Binding,
        solver: z3.Solver,
    ) -> None:
        """A counted entity is one to which some claim ``by...`` owes an end."""
        extra = {e for i in where.values() for e in (i, *(x for _, x in i.refs))} - set(bound.values())
        starts = [
            self.now(c.start, where)
            for c in self.tables.responses
            if c.scope == cls
            and c.id.startswith(helpful.by)
            and all(where[r].kind == k for r, k in c.kinds.items() if r in where)
        ]
        solver.push()
        known = tuple(dict.fromkeys([*bound.values(), *(x for i in bound.values() for _, x in i.refs)]))
        frame = Frame(self.tables, {i.name: i for i in known}, tuple(sorted(extra, key=lambda i: i.name)))
        solver.add(*self.base.facts(frame), self.now(share, where) > 0)
        label = "+".join(sorted(i.name for i in extra))
        self.ask(f"helpful[{index}]_{helpful.by}@{label}", solver, z3.Or([z3.BoolVal(False), *starts]))
        solver.pop()

    # -- under each row ------------------------------------------------------------------------------------------------
    def under(self, event: Event, bound: dict[str, Inst]) -> None:
        """What one row, anybody's, does to a pending claim."""
        acting = actors(event)
        after: dict[Cell, z3.ExprRef] = {}
        for effect in event.effects:
            after[owner_name(effect.target, acting), effect.target.name] = self.now(effect.expr, acting)
        whole = (
            self.claim.start,
            self.claim.goal,
            self.claim.given,
            *self.claim.rank,
            *(h.when for h in self.claim.helpful),
        )
        if not any((owner_name(r, bound), r.name) in after for e in whole for r in refs(e)):
            return

        def later(expr: Expr) -> z3.ExprRef:
            def look(ref: Ref) -> z3.ExprRef:
                cell = (owner_name(ref, bound), ref.name)
                return after[cell] if cell in after else self.base.words.cell(cell[0], ref)

            return term(expr, look)

        known = set(acting.values())
        extra = {e for i in bound.values() for e in (i, *(x for _, x in i.refs))} - known
        frame = Frame(self.tables, acting, tuple(sorted(extra, key=lambda i: i.name)))
        label = f"{event.id}" + (f"@{'+'.join(i.name for i in frame.fresh)}" if frame.fresh else "")
        solver = new_solver()
        solver.add(*self.base.constants(), *self.base.facts(frame), *self.pending(bound))
        solver.add(*(self.now(g.expr, acting) for g in event.guards))
        rank_now = [self.now(r, bound) for r in self.claim.rank]
        rank_later = [later(r) for r in self.claim.rank]
        arrived = later(self.claim.goal)
        owed = z3.And(later(self.claim.start), z3.Not(arrived), later(self.claim.given))
        falls, same = lexicographic(rank_later, rank_now)
        goals = [(f"{label}/rank_never_rises", z3.Or(arrived, z3.And(owed, z3.Or(falls, same))))]
        for index, helpful in enumerate(self.claim.helpful):
            still = z3.Implies(z3.And(self.now(helpful.when, bound), owed, same), later(helpful.when))
            goals.append((f"{label}/helpful[{index}]_stays", still))
            for what, premise in self.firing(helpful, event, bound, later):
                goal = z3.Implies(z3.And(self.now(helpful.when, bound), *premise), z3.Or(arrived, falls))
                goals.append((f"{label}/helpful[{index}]_{what}_lowers", goal))
        self.ask_all(solver, goals, event.id)

    def firing(
        self, helpful: Helpful, event: Event, bound: Binding, later: object
    ) -> Iterator[tuple[str, list[z3.BoolRef]]]:
        """When this event is the helpful one: what then lowers the rank, under which premise."""
        acting = actors(event)
        if helpful.by == ANOTHER:
            if event.row == helpful.row and bound["self"] not in acting.values():
                yield helpful.row, [self.now(helpful.who, acting)]
        elif helpful.by:
            counted = later(helpful.count) if callable(later) else helpful.count
            yield "end", [counted < self.now(helpful.count, bound)]
        else:
            found = self.helpful_row(helpful, bound)
            if found is not None and found[0] is event and all(found[1][r] == acting[r] for r in event.roles):
                yield helpful.row, []


def lexicographic(left: list[z3.ArithRef], right: list[z3.ArithRef]) -> tuple[z3.BoolRef, z3.BoolRef]:
    """``left < right`` and ``left == right`` for tuples."""
    below: z3.BoolRef = z3.BoolVal(False)
    for low, high in reversed(list(zip(left, right, strict=True))):
        below = z3.Or(low < high, z3.And(low == high, below))
    return below, z3.And([low == high for low, high in zip(left, right, strict=True)])


def prove_claims(tables: Tables, names: Iterable[str], base: Assumptions) -> TaskResult:
    """The obligations of these claims, in this process."""
    wanted, out = set(names), TaskResult()
    for claim in tables.responses:
        if claim.id in wanted:
            out.obligations += Claim(tables, claim, base).run().obligations
    return out
