"""A Hypothesis state machine made from the tables: one rule per event, every property checked after every step.

Theory of operation.  Each example draws a small world: a few kinds, some segments of each, requests, graphs, and a lease
or copy wherever the tables let one stand between two of them.  A rule fires its event on one fitting tuple of entities.
Random values hardly ever satisfy ``at == end``, so inputs are *proposed*: where a guard compares an input, the values at
which the comparison turns (and one to either side); where an effect stores it, what the variable is compared with
elsewhere, read from one *donor* entity, so that several inputs can describe the same bytes.  Rows that fired least in the
example go first, which drives it through the stages; ``slack`` relaxes that.  There is no kind, stage or row by name.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from math import inf
from types import SimpleNamespace
from typing import Any, ClassVar, NoReturn

from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hybridkv_ref.compile_py import attribute, namer, python, role_name
from hybridkv_ref.expr import BOOL, INT, Expr, Lit, Op, Ref, Type, children, refs, rewrite
from hybridkv_ref.machine import Entity, Machine, Refused, Value
from hybridkv_ref.tables import CLASS_OF, ROLES, Effect, Event, Property, Tables, Var

ORDERED, EQUAL = {"<", "<=", ">", ">="}, {"==", "!="}
OWNERS = {cls: tuple(r for r in ROLES[cls] if CLASS_OF[r] != cls) for cls in set(CLASS_OF.values())}

SLACKS = (0, 1)
import os

GOALS, PATIENCE, PAUSE, TOLL = 8, 40, int(os.environ.get("PAU", "8")), 5
RANGE = (3, 4, 5, 6, 7, 8, 1, 0)
"""Steps after which a goal that was not reached is put off, and steps between two goals in which rows are merely varied."""
FIRED, REFUSED, TIE = 0.3, 1.0, 0.5
"""What an attempt adds to the cost of a row on its entities, and the difference in cost that does not count."""
PICK, ASTRAY = st.integers(0, 255), st.integers(0, 65535)
Function = Callable[..., Any]
Cell = tuple[str, str]
"""A variable wherever it stands: (kind of segment, or class, or '' for a global; name)."""


class RuleBrokenError(AssertionError):
    """A property is false after a step; the message lists every event of the example with the fields that it changed."""


@dataclass(frozen=True)
class Size:
    """A world: segments per kind, entities of each other class that nobody owns, and how many kinds it has at most."""

    segments: int = 2
    others: int = 2
    kinds: int = 2


@dataclass
class Coverage:
    """What a machine class has run so far; ``failed_in`` is the number of the example that first broke a property."""

    examples: int = 0
    steps: int = 0
    refused: int = 0
    fired: Counter[str] = field(default_factory=Counter)
    failed_in: int = 0


@dataclass(frozen=True)
class Place:
    """One entity that a world may have; ``owners`` are names by role."""

    name: str
    cls: str
    kind: str
    owners: Mapping[str, str]


@dataclass(frozen=True)
class Choice:
    """One input: ``gaps`` are the compared differences, ``accepts`` the guards decided once it is known, ``akin`` its donors."""

    name: str
    type: Type
    gaps: Function
    accepts: Function
    akin: frozenset[Cell]


@dataclass(frozen=True)
class Row:
    """An event: ``truth`` gives the value of each input-free guard; inputs stand in the order in which they are chosen."""

    event: Event
    guards: tuple[Expr, ...]
    truth: Function
    choices: tuple[Choice, ...]
    fits: tuple[tuple[str, ...], ...]
    steps: tuple[tuple[Property, Function], ...]


@dataclass(frozen=True)
class Group:
    """Properties of one form, scope and kinds as one conjunction, with every tuple of entities that they speak of."""

    properties: tuple[Property, ...]
    holds: Function
    fits: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Share:
    """What one entity adds to a counted variable of its owner ('' for the pool)."""

    term: Function
    fit: tuple[str, ...]
    owner: str
    variable: str


def _function(body: str, *arguments: str) -> Function:
    function: Function = eval(f"lambda {', '.join(arguments)}: {body}")  # only what compile_py wrote
    return function


def _atoms(expr: Expr) -> Iterator[Op]:
    """The comparisons of numbers in an expression."""
    if isinstance(expr, Op) and expr.op in ORDERED | EQUAL and all(a.type.number for a in expr.args):
        yield expr
    for kid in children(expr):
        yield from _atoms(kid)


def _inputs(expr: Expr) -> set[str]:
    return {r.name for r in refs(expr) if r.role == "input"}


def _cell(ref: Ref, kinds: Mapping[str, str]) -> Cell:
    return ("" if ref.role == "global" else kinds.get(ref.role) or CLASS_OF[ref.role]), ref.name


def _cells(expr: Expr, kinds: Mapping[str, str]) -> set[Cell]:
    return {_cell(r, kinds) for r in refs(expr) if r.role not in ("const", "input")}


def _way(guard: Expr, ref: Ref) -> int:
    """The direction in which a variable must go for a comparison to come true; 0 for any.  Counts fall to zero."""
    if not isinstance(guard, Op) or guard.op not in ORDERED | {"=="}:
        return 0
    left, right = guard.args
    if guard.op == "==":
        return -1 if right == Lit(0, INT) else 0
    rises = guard.op in (">", ">=")
    return 1 if (left == ref) == rises and ref in (left, right) else (-1 if ref in (left, right) else 0)


class Plan:
    """Tables compiled for testing: places, rows with all their entity tuples, properties and shares."""

    def __init__(self, tables: Tables, size: Size, constants: Mapping[str, int] | None = None) -> None:
        self.tables, self.size = tables, size
        self.machine = Machine(tables, constants)
        self.name = namer(self.machine.constants)
        self.places = tuple(self.lay_out())
        self.known: dict[object, tuple[tuple[str, ...], ...]] = {}
        self.akin: dict[Cell, set[Cell]] = defaultdict(set)
        self.ordered: set[Cell] = set()
        for e in tables.events:
            for atom in (a for guard in e.guards for a in _atoms(guard.expr)):
                left, right = (_cells(arg, e.kinds) for arg in atom.args)
                for a, b in product(left, right):
                    self.akin[a].add(b)
                    self.akin[b].add(a)
                self.ordered |= left | right if atom.op in ORDERED else set()
        self.rows = tuple(self.row(e) for e in tables.events)
        self.invariants, self.steps = self.groups("invariant"), self.groups("step")
        types = {**self.machine.types, ("", ""): self.machine.globals_type}
        self.names = {t: tuple(map(attribute, self.variables(*key))) for key, t in types.items()}
        self.read = {t: _function(f"({''.join(f'e.{n}, ' for n in names)})", "e") for t, names in self.names.items()}
        self.shares = tuple(self.share())

    def lay_out(self) -> Iterator[Place]:
        """Unowned entities, then one owned entity between each tuple of owners that some event allows."""
        free = [Place(f"{k}#{i}", "segment", k, {}) for k in self.tables.kinds for i in range(self.size.segments)]
        free += [
            Place(f"{c}#{i}", c, "", {}) for c in self.tables.classes if not OWNERS[c] for i in range(self.size.others)
        ]
        yield from free
        for cls in (c for c in self.tables.classes if OWNERS[c]):
            linked = {tuple(e.kinds.items()): e.kinds for e in self.tables.events if e.scope == cls and e.linked}
            for fit in dict.fromkeys(f for kinds in linked.values() for f in fitting(free, OWNERS[cls], kinds)):
                yield Place(f"{cls}({', '.join(fit)})", cls, "", dict(zip(OWNERS[cls], fit, strict=True)))

    def variables(self, cls: str, kind: str) -> Mapping[str, Var]:
        """The variables of a class of entities, or of the pool for ''."""
        return self.tables.vars_of(cls, kind) if cls else self.tables.globals

    def named(self, entity: Any, values: tuple[Value, ...]) -> dict[str, Value]:
        """Values as read from an entity, by attribute."""
        return dict(zip(self.names[type(entity)], values, strict=True))

    def fits(self, roles: tuple[str, ...], kinds: Mapping[str, str]) -> tuple[tuple[str, ...], ...]:
        """Every tuple of places for these roles, found once."""
        key = (roles, tuple(kinds.items()))
        if key not in self.known:
            self.known[key] = tuple(fitting(self.places, roles, kinds))
        return self.known[key]

    @staticmethod
    def all(exprs: Sequence[Expr], name: Callable[[Ref], str]) -> str:
        """Python source of a conjunction."""
        return python(Op("and", tuple(exprs), BOOL), name) if exprs else "True"

    def row(self, e: Event) -> Row:
        """One event; an input that an equation defines by others is chosen after them."""
        entities = ("G", *map(role_name, e.roles))
        atoms = [a for guard in e.guards for a in _atoms(guard.expr)]
        bare = [
            (a, side, other)
            for a in atoms
            if a.op == "=="
            for side, other in (a.args, a.args[::-1])
            if isinstance(side, Ref)
        ]
        late = {
            side.name for _, side, other in bare if isinstance(side, Ref) and side.role == "input" and _inputs(other)
        }
        order = sorted(e.inputs, key=lambda n: n in late)
        choices = []
        for index, name in enumerate(order):
            known = set(order[: index + 1])
            arguments = (*entities, *(f"in_{n}" for n in order[: index + 1]))
            now = [g.expr for g in e.guards if name in _inputs(g.expr) <= known]
            turns = [a for a in atoms if name in _inputs(a) <= known]
            gaps = "".join(f"{python(a.args[0], self.name)} - {python(a.args[1], self.name)}, " for a in turns)
            beside = {name}.union(*(_inputs(a) for a in atoms if name in _inputs(a)))
            stored = {_cell(f.target, e.kinds) for f in e.effects if beside & _inputs(f.expr)}
            akin = frozenset(cell for target in stored for cell in self.akin[target])
            choices.append(
                Choice(
                    name,
                    e.inputs[name],
                    _function(f"({gaps})", *arguments),
                    _function(self.all(now, self.name), *arguments),
                    akin,
                )
            )
        plain = [g.expr for g in e.guards if not _inputs(g.expr)]
        steps = tuple(
            (p, self.step([p.expr], ROLES[p.scope], tuple(f"in_{n}" for n in e.inputs)))
            for p in self.tables.forms("step")
            if p.on in e.tags and set(ROLES[p.scope]) <= set(e.roles) and p.kinds.items() <= e.kinds.items()
        )
        truth = "".join(f"{python(g, self.name)}, " for g in plain)
        return Row(
            e, tuple(plain), _function(f"({truth})", *entities), tuple(choices), self.fits(e.roles, e.kinds), steps
        )

    def step(self, exprs: Sequence[Expr], roles: tuple[str, ...], inputs: tuple[str, ...] = ()) -> Function:
        """A step property as a function of (old pool, new pool, old entities, new entities, inputs)."""

        def name(ref: Ref) -> str:
            return self.name(ref) if ref.new or ref.role in ("const", "input") else f"old_{self.name(ref)}"

        entities = tuple(map(role_name, roles))
        return _function(self.all(exprs, name), "old_G", "G", *(f"old_{r}" for r in entities), *entities, *inputs)

    def invariant(self, exprs: Sequence[Expr], roles: tuple[str, ...]) -> Function:
        """An invariant as a function of (pool, entities)."""
        return _function(self.all(exprs, self.name), "G", *map(role_name, roles))

    def groups(self, form: str) -> tuple[Group, ...]:
        """The properties of one form that are stated for all steps."""
        found: dict[object, list[Property]] = defaultdict(list)
        for p in self.tables.forms(form):
            if not p.on:
                found[p.scope, tuple(p.kinds.items())].append(p)
        make = self.invariant if form == "invariant" else self.step
        return tuple(
            Group(tuple(ps), make([p.expr for p in ps], ROLES[ps[0].scope]), self.fits(ROLES[ps[0].scope], ps[0].kinds))
            for ps in found.values()
        )

    def share(self) -> Iterator[Share]:
        """Every counted variable's terms, one per entity that is counted."""
        owned: list[tuple[str, str, Var]] = [("", "", v) for v in self.tables.globals.values()]
        owned += [("segment", k, v) for k, kind in self.tables.kinds.items() for v in kind.vars.values()]
        owned += [(cls, "", v) for cls, variables in self.tables.classes.items() for v in variables.values()]
        for cls, kind, var in owned:
            for of, expr in var.sum.terms.items() if var.sum else ():
                roles = ROLES[var.sum.cls] if var.sum else ()
                term = _function(python(expr, self.name), "G", *map(role_name, roles))
                by = {"self": of} if of else {}
                if var.sum and var.sum.via and kind:
                    by[var.sum.via] = kind
                for fit in self.fits(roles, by):
                    yield Share(term, fit, fit[roles.index(var.sum.via)] if var.sum and var.sum.via else "", var.name)

    def is_rigid(self, ref: Ref, by_role: Mapping[str, Any]) -> bool:
        """Whether a variable of one of these entities is rigid."""
        entity = by_role.get(ref.role)
        return entity is not None and self.tables.vars_of(entity.cls, entity.kind)[ref.name].rigid

    def begun(self, entity: Any) -> bool:
        """Whether an entity has left its first stage."""
        stages = self.tables.stages.get(entity.kind or entity.cls)
        return stages is None or entity.stage != stages[0]

    def aims(self) -> st.SearchStrategy[tuple[list[str], list[str]]]:
        """Some kinds, and the ids of some events of theirs to bring about in turn."""

        def with_goals(kinds: list[str]) -> st.SearchStrategy[tuple[list[str], list[str]]]:
            fit = [e.id for e in self.tables.events if set(e.kinds.values()) <= set(kinds)]
            return st.tuples(st.just(kinds), st.lists(st.sampled_from(fit), min_size=1, max_size=GOALS, unique=True))

        names = st.sampled_from(sorted(self.tables.kinds))
        return st.lists(names, min_size=1, max_size=self.size.kinds, unique=True).flatmap(with_goals)

    def rigid(self) -> dict[str, st.SearchStrategy[Value]]:
        """A small strategy per rigid variable of each place, by ``place.variable``."""
        found: dict[str, st.SearchStrategy[Value]] = {}
        for place in self.places:
            for var in self.tables.vars_of(place.cls, place.kind).values():
                if var.rigid:
                    found[f"{place.name}.{var.name}"] = self.values(var, (place.kind or place.cls, var.name))
        return found

    def values(self, var: Var, cell: Cell) -> st.SearchStrategy[Value]:
        """Members of an enum; mostly true; a count where there is a lower bound; two identifiers where only equality matters."""
        if not var.type.number:
            return st.sampled_from(var.type.members or (True,) * 7 + (False,))
        if var.at_least is not None:
            return st.integers(var.at_least, var.at_least + self.size.segments - 1)
        return st.sampled_from(RANGE) if cell in self.ordered else st.integers(0, 1)


def fitting(places: Sequence[Place], roles: tuple[str, ...], kinds: Mapping[str, str]) -> Iterator[tuple[str, ...]]:
    """The tuples of distinct places for these roles and kinds in which every owner is the place's own."""
    partial_fits: list[dict[str, Place]] = [{}]
    for role in sorted(roles, key=lambda r: not OWNERS[CLASS_OF[r]]):
        partial_fits = [
            {**chosen, role: p}
            for chosen in partial_fits
            for p in places
            if p.cls == CLASS_OF[role] and p.kind == kinds.get(role, p.kind) and p not in chosen.values()
            if all(other.owners.get(role, p.name) == p.name for other in chosen.values())
        ]
    yield from (tuple(chosen[r].name for r in roles) for chosen in partial_fits)


class Guide:
    """Which rows lead to a goal, by regression: a row whose guards are false wants a row that writes what they read.

    Nodes are bindings: a row on one tuple of entities.  The cost of an open one is 1 and a bit for each time it was tried; of
    another, 1 plus that of the cheapest writer for each false guard.  Only likely writers count: the value or the direction
    must fit.  Guards on inputs are not looked at, so a plan may fail; trying then makes it dearer.
    """

    def __init__(self, plan: Plan, pool: Any, bindings: list[tuple[Row, tuple[Any, ...]]]) -> None:
        self.plan, self.pool, self.bindings = plan, pool, bindings
        self.nodes = range(len(bindings))
        self.index = {(row.event.id, fit): i for i, (row, fit) in enumerate(bindings)}
        self.tries, self.row_tries = [0.0] * len(bindings), Counter[str]()
        self.turn(())
        self.truth: list[tuple[bool, ...]] = []
        self.known: dict[tuple[int, int], list[int]] = {}
        self.writers: dict[tuple[int, str], list[tuple[int, Effect]]] = defaultdict(list)
        for i, (row, fit) in enumerate(bindings):
            by_role = dict(zip(row.event.roles, fit, strict=True))
            for effect in row.event.effects:
                self.writers[id(by_role.get(effect.target.role, pool)), effect.target.name].append((i, effect))

    def row(self, node: int) -> str:
        """The event of a node."""
        return self.bindings[node][0].event.id

    def look(self) -> None:
        """Evaluates every input-free guard in the present state."""
        self.truth = [row.truth(self.pool, *fit) for row, fit in self.bindings]

    def tried(self, row: str, fit: tuple[Any, ...], fired: bool) -> None:
        """Counts an attempt; one that was refused makes the node dearer."""
        self.tries[self.index[row, fit]] += FIRED if fired else REFUSED
        self.row_tries[row] += 1
        self.since[row] += 1

    def turn(self, near: tuple[Any, ...]) -> None:
        """Looks at these entities for a while (at all for an empty tuple)."""
        self.near, self.since = {id(e) for e in near}, Counter()

    def least_tried(self, slack: int) -> list[int]:
        """The open nodes, near first, of the rows that were tried least, give or take ``slack``."""
        is_open = [i for i in self.nodes if all(self.truth[i])]
        near = [i for i in is_open if any(id(e) in self.near for e in self.bindings[i][1])]
        chosen, tries = (near, self.since) if near else (is_open, self.row_tries)
        most = min((tries[self.row(i)] for i in chosen), default=0) + slack
        return [i for i in chosen if tries[self.row(i)] <= most]

    def makers(self, node: int, number: int) -> list[int]:
        """The nodes that may make one guard of a node true."""
        if (node, number) not in self.known:
            row, fit = self.bindings[node]
            by_role, guard = dict(zip(row.event.roles, fit, strict=True)), row.guards[number]
            self.known[node, number] = sorted({
                i
                for ref in refs(guard) if ref.role != "const"
                for i, effect in self.writers[id(by_role.get(ref.role, self.pool)), ref.name]
                if i != node and self.helps(effect, guard, ref, by_role)
            })  # fmt: skip
        return self.known[node, number]

    def helps(self, effect: Effect, guard: Expr, ref: Ref, by_role: Mapping[str, Any]) -> bool:
        """Whether a write of ``ref`` may turn a false guard true: a literal must satisfy it, a step must go its way."""
        value, others = effect.expr, refs(guard) - {ref}
        if isinstance(value, Lit) and all(r.role == "const" or self.plan.is_rigid(r, by_role) for r in others):
            known = {
                r: Lit(getattr(by_role[r.role], attribute(r.name)), r.type) for r in others if r.role != "const"
            } | {ref: value}
            return bool(
                eval(python(rewrite(guard, lambda e: known.get(e) if isinstance(e, Ref) else None), self.plan.name))
            )
        if isinstance(value, Op) and value.op in ("+", "-") and value.args[0] == effect.target:
            return _way(guard, ref) != (-1 if value.op == "+" else 1)
        return True

    def towards(self, goals: list[int], slack: int) -> list[int]:
        """Where the cheapest plan for one of these nodes begins: what takes longest first.  Empty when there is no plan."""
        wants: dict[int, list[list[int]]] = {}
        waiting = list(goals)
        while waiting:
            node = waiting.pop()
            if node not in wants:
                wants[node] = [self.makers(node, n) for n, true in enumerate(self.truth[node]) if not true]
                waiting += [m for makers in wants[node] for m in makers if m not in wants]
        cost = {node: (1 + self.tries[node] if not needs else inf) for node, needs in wants.items()}
        order, changed = list(reversed(wants)), True
        while changed:
            changed = False
            for node in order:
                if wants[node]:
                    total = (
                        1
                        + self.tries[node]
                        + sum(min((cost[m] for m in makers), default=inf) for makers in wants[node])
                    )
                    if total < cost[node]:
                        cost[node], changed = total, True
        best = min(goals, key=lambda g: cost[g], default=None)
        if best is None or cost[best] == inf:
            return []
        chain: set[int] = set()
        waiting = [best]
        while waiting:
            node = waiting.pop()
            if node not in chain:
                chain.add(node)
                nearest = [min(cost[m] for m in makers) for makers in wants[node]]
                for least, makers in zip(nearest, wants[node], strict=True):
                    if least >= max(nearest) - slack:
                        waiting += [m for m in makers if cost[m] <= least + TIE and cost[m] < cost[node]]
        ready = sorted(node for node in chain if not wants[node])
        needed = set().union(*(self.reads(node) for node in chain if wants[node]))
        return [node for node in ready if not needed & self.writes(node)] or ready

    def cells(self, node: int, found: Iterable[Ref]) -> set[tuple[int, str]]:
        """Where those of these variables stand that are stages or other enums, given a node's entities."""
        row, fit = self.bindings[node]
        by_role = dict(zip(row.event.roles, fit, strict=True))
        return {(id(by_role.get(r.role, self.pool)), r.name) for r in found if r.type.members}

    def reads(self, node: int) -> set[tuple[int, str]]:
        """The stages on which those guards of a node depend that are true by now."""
        guards = self.bindings[node][0].guards
        return self.cells(
            node, {r for guard, true in zip(guards, self.truth[node], strict=True) if true for r in refs(guard)}
        )

    def writes(self, node: int) -> set[tuple[int, str]]:
        """The stages that a node writes."""
        return self.cells(node, (f.target for f in self.bindings[node][0].event.effects))


class TableRules(RuleBasedStateMachine):
    """One example: a world, its history, and what may fire now.  ``machine_class`` adds the rules."""

    plan: ClassVar[Plan]
    coverage: ClassVar[Coverage]

    def begin(self, aims: tuple[list[str], list[str]], rigid: Mapping[str, Value], slack: int) -> None:
        """Makes a world of some kinds, with goals; rigid variables of kinds left out keep their first value."""
        self.coverage.examples += 1
        plan, self.slack, self.world = self.plan, slack, self.plan.machine.world()
        kinds, self.goals = aims
        self.entities: dict[str, Any] = {"": self.world.pool}
        absent = tuple(f".{k}" for k in plan.tables.kinds if k not in kinds)
        for place in plan.places:
            if (place.kind and place.kind not in kinds) or any(n not in self.entities for n in place.owners.values()):
                continue
            own = {n.removeprefix(f"{place.name}."): v for n, v in rigid.items() if n.startswith(f"{place.name}.")}
            owners = {r: self.entities[n] for r, n in place.owners.items()}
            fixed = {n: v for n, v in own.items() if not n.endswith(absent)}
            self.entities[place.name] = self.world.add(place.cls, place.kind, owners, **fixed)
            self.entities[place.name].name = place.name
        self.rows = {row.event.id: (row, fits) for row in plan.rows if (fits := self.present(row.fits))}
        self.guide = Guide(plan, self.world.pool, [(row, fit) for row, fits in self.rows.values() for fit in fits])
        self.invariants_here = [(g, self.present(g.fits)) for g in plan.invariants]
        self.steps_here = [(g, self.present(g.fits)) for g in plan.steps]
        self.shares = [(s, fit) for s in plan.shares for fit in self.present((s.fit,))]
        self.history: list[str] = []
        self.open: dict[str, list[tuple[Entity, ...]]] = {}
        self.patience = PATIENCE

    def present(self, fits: Sequence[tuple[str, ...]]) -> list[tuple[Any, ...]]:
        """The entities of those tuples that are all in this world."""
        return [tuple(self.entities[n] for n in fit) for fit in fits if all(n in self.entities for n in fit)]

    def may_fire(self, row: str) -> bool:
        """Whether the row leads to the goal or, with no goal in reach, is among the least tried of those that are open."""
        if not self.open:
            self.guide.look()
            resting = self.patience > PATIENCE
            where = [i for i in self.guide.nodes if self.guide.row(i) == self.goals[0] and not resting]
            chosen = self.guide.towards(where, self.slack) or self.guide.least_tried(self.slack)
            for index in chosen:
                self.open.setdefault(self.guide.row(index), []).append(self.guide.bindings[index][1])
        return row in self.open

    def fire(self, row: str, pick: tuple[int, ...], astray: int) -> None:
        """One step: the row on the picked entities with the picked inputs; then some other row out of turn."""
        self.may_fire(row)
        entities = self.open[row][pick[0] % len(self.open[row])]
        fired = self.attempt(self.rows[row][0], entities, self.propose(self.rows[row][0], entities, pick[1], pick[2:]))
        self.guide.tried(row, entities, fired)
        self.patience -= 1 if fired else TOLL
        reached = fired and row == self.goals[0] and self.patience < PATIENCE
        if reached or self.patience <= 0:
            self.goals, self.patience = [*self.goals[1:], self.goals[0]], PATIENCE + PAUSE
            self.guide.turn(entities if reached else ())
        self.open = {}
        other, others = self.guide.bindings[astray % len(self.guide.bindings)]
        if not all(other.truth(self.world.pool, *others)):
            self.attempt(other, others, {c.name: 0 for c in other.choices})

    def propose(self, row: Row, entities: tuple[Any, ...], donor: int, picks: Sequence[int]) -> dict[str, Value]:
        """Inputs that the guards are likely to accept; half of the time all those that can be lent come from one donor."""
        pool = self.world.pool
        owners = {owner for choice in row.choices for owner, _ in choice.akin}
        donors = [
            e for e in self.entities.values() if e is not pool and (e.kind or e.cls) in owners and self.plan.begun(e)
        ]
        place = donor % (2 * len(donors)) if donors else 0
        known: list[Value] = []
        for choice, number in zip(row.choices, picks, strict=True):
            accepts = partial(choice.accepts, pool, *entities, *known)
            lent = self.lent(choice, donors[place]) if place < len(donors) else []
            turns: list[Value] = self.lent(choice, pool)
            turns += (0, 1, 2) if choice.type.number else choice.type.members or (False, True)
            for low, high in zip(*(choice.gaps(pool, *entities, *known, n) for n in (0, 1)), strict=True):
                if abs(high - low) == 1:  # the comparison turns where the difference is zero
                    turn = -low * (high - low)
                    turns += [turn, turn + 1, turn - 1]
            good = (
                [v for v in dict.fromkeys(lent) if accepts(v)]
                or [v for v in dict.fromkeys(turns) if accepts(v)]
                or turns
            )
            known.append(good[number % len(good)])
        return dict(zip((c.name for c in row.choices), known, strict=True))

    def lent(self, choice: Choice, donor: Any) -> list[Value]:
        """The donor's values of the variables that the input's own variable is compared with."""
        owner = "" if donor is self.world.pool else donor.kind or donor.cls
        return [getattr(donor, attribute(name)) for kind, name in sorted(choice.akin) if kind == owner]

    def snapshot(self) -> dict[str, tuple[Value, ...]]:
        """Every value of the world, by entity."""
        return {name: self.plan.read[type(e)](e) for name, e in self.entities.items()}

    def attempt(self, row: Row, entities: tuple[Any, ...], inputs: Mapping[str, Value]) -> bool:
        """Fires (true) or is refused; a refusal changes nothing, a step keeps the step properties."""
        before, called = (
            self.snapshot(),
            ", ".join([*(e.name for e in entities), *(f"{n}={v}" for n, v in inputs.items())]),
        )
        try:
            self.world.fire(row.event.id, *entities, **inputs)
        except Refused as refusal:
            self.coverage.refused += 1
            if self.snapshot() != before:
                self.fail(f"{refusal}, and yet something changed")
            return False
        self.coverage.steps += 1
        self.coverage.fired[row.event.id] += 1
        after = self.snapshot()
        old = {
            id(self.entities[n]): SimpleNamespace(**self.plan.named(self.entities[n], v))
            for n, v in before.items()
            if v != after[n]
        }
        changed = [
            f"{n}{'.' if n else ''}{name} {was} -> {getattr(self.entities[n], name)}"
            for n in before
            if id(self.entities[n]) in old
            for name, was in self.plan.named(self.entities[n], before[n]).items()
            if was != getattr(self.entities[n], name)
        ]
        self.history.append(f"{row.event.id}({called}): {', '.join(changed) or 'nothing changed'}")
        pool = self.world.pool
        pools = old.get(id(pool), pool), pool
        for group, fits in self.steps_here:
            for fit in fits:
                was = tuple(old.get(id(e), e) for e in fit)
                if not group.holds(*pools, *was, *fit):
                    alone = (
                        p for p in group.properties if not self.plan.step([p.expr], ROLES[p.scope])(*pools, *was, *fit)
                    )
                    self.broken(next(alone), fit)
        for prop, holds in row.steps:
            fit = tuple(entities[row.event.roles.index(r)] for r in ROLES[prop.scope])
            if not holds(*pools, *(old.get(id(e), e) for e in fit), *fit, *(inputs[n] for n in row.event.inputs)):
                self.broken(prop, fit)
        return True

    @invariant()
    def invariants_hold(self) -> None:
        """Every invariant on every fitting tuple of entities."""
        pool = self.world.pool
        for group, fits in self.invariants_here:
            for fit in fits:
                if not group.holds(pool, *fit):
                    alone = (
                        p for p in group.properties if not self.plan.invariant([p.expr], ROLES[p.scope])(pool, *fit)
                    )
                    self.broken(next(alone), fit)

    @invariant()
    def counts_are_sums(self) -> None:
        """Every counted variable equals its sum, added up afresh."""
        totals: Counter[tuple[str, str]] = Counter()
        for share, fit in self.shares:
            totals[share.owner, share.variable] += share.term(self.world.pool, *fit)
        for (owner, variable), total in totals.items():
            stored = getattr(self.entities[owner], attribute(variable))
            if stored != total:
                self.fail(f"{owner}{'.' if owner else ''}{variable} is {stored}, its sum is {total}")

    def broken(self, prop: Property, entities: Sequence[Entity]) -> NoReturn:
        """Reports a false property."""
        self.fail(f"{prop.place}: false on {', '.join(e.name for e in entities) or 'the pool'}: {prop.text}")

    def fail(self, reason: str) -> NoReturn:
        """Ends the example with the list of its events."""
        self.coverage.failed_in = self.coverage.failed_in or self.coverage.examples
        raise RuleBrokenError("\n".join([reason, *(f"  {i}. {line}" for i, line in enumerate(self.history, 1))]))


def machine_class(tables: Tables, size: Size = Size(), constants: Mapping[str, int] | None = None) -> type[TableRules]:
    """A Hypothesis state machine with one rule per event of the tables; ``constants`` as for ``Machine``."""
    plan = Plan(tables, size, constants)
    space: dict[str, Any] = {
        "plan": plan,
        "coverage": Coverage(),
        "__module__": __name__,
        "__doc__": TableRules.__doc__,
    }
    start = initialize(aims=plan.aims(), rigid=st.fixed_dictionaries(plan.rigid()), slack=st.sampled_from(SLACKS))
    space["begin"] = start(TableRules.begin)
    for row in plan.rows:
        pick = st.tuples(*[PICK] * (2 + len(row.choices)))
        step = rule(row=st.just(row.event.id), pick=pick, astray=ASTRAY)(TableRules.fire)
        space[f"fire {row.event.id}"] = precondition(_opens(row.event.id))(step)
    return type("TableMachine", (TableRules,), space)


def _opens(row: str) -> Callable[[TableRules], bool]:
    def may_fire(machine: TableRules) -> bool:
        return machine.may_fire(row)

    return may_fire


def run_random(rules: type[TableRules], *, examples: int, steps: int, start: int = 0, shrink: bool = False) -> Coverage:
    """Runs a machine class on the examples that the seed ``start`` draws; raises RuleBrokenError with the first failure."""
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)
    how = settings(
        max_examples=examples, stateful_step_count=steps, phases=phases, database=None, deadline=None,
        report_multiple_bugs=False, suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    run_state_machine_as_test(seed(start)(rules), settings=how)
    return rules.coverage
