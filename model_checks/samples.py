"""States met on random walks of the machine: cheap evidence against a claim, never for one.

A walk has a few entities of every class and kind.  Each attempt picks an event, entities that fit it and inputs out of
the values around; a refused one changes nothing.  After each step the acting entities are noted, now and then all.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any

import numpy as np

from hybridkv_ref.compile_py import attribute
from hybridkv_ref.expr import BOOL, INT, Ref, Type
from hybridkv_ref.machine import Entity, Machine
from hybridkv_ref.model_checks.frames import copy_pairs
from hybridkv_ref.model_checks.vector import code
from hybridkv_ref.tables import CLASS_OF, ROLES, Event, Tables

SMALL = (0, 1, 2, 3)
ALL_EVERY = 40
OWNERS = {"lease": ("self", "req"), "copy": ("src", "dst")}
Scope = tuple[str, tuple[tuple[str, str], ...]]  # a scope and the kinds of its segment roles


@dataclass
class Samples:
    """What was seen of one scope: per state one row of codes (see ``vector``), per variable one column."""

    columns: tuple[Ref, ...]
    rows: dict[tuple[int, ...], None]

    def arrays(self) -> dict[Ref, Any]:
        """The columns as arrays."""
        table = np.array(list(self.rows), dtype=np.int64).reshape(len(self.rows), len(self.columns))
        return {ref: table[:, i] for i, ref in enumerate(self.columns)}


class Walk:
    """One random walk; ``seen`` collects what its states look like, by scope."""

    def __init__(self, tables: Tables, random: Random, constants: Mapping[str, int] | None = None, each: int = 2) -> None:
        self.tables, self.random = tables, random
        self.machine = Machine(tables, constants)
        self.world = self.machine.world()
        self.seen: dict[Scope, Samples] = {}
        self.fired: dict[str, int] = {}
        self.populate(each)
        self.places = {e.id: list(self.fitting(e.roles, e.kinds)) for e in tables.events}

    def populate(self, each: int) -> None:
        """``each`` segments of every kind, as many requests and graphs, a lease or copy wherever one is possible."""
        segments = {k: [self.add("segment", k) for _ in range(each)] for k in self.tables.kinds}
        requests = [self.add("request") for _ in range(each)]
        if "graph" in self.tables.classes:
            self.add("graph")
        for kind, spec in self.tables.kinds.items():
            if "cacheable" in spec.capabilities:
                for segment, request in product(segments[kind], requests):
                    self.add("lease", refs={"self": segment, "req": request})
        for src, dst in sorted(copy_pairs(self.tables)):
            for left, right in product(segments[src], segments[dst]):
                if left is not right:
                    self.add("copy", refs={"src": left, "dst": right})

    def add(self, cls: str, kind: str = "", refs: Mapping[str, Entity] | None = None) -> Entity:
        """An entity whose rigid variables have random small values."""
        rigid = {v.name: self.small(v.type, v.at_least or 0) for v in self.tables.vars_of(cls, kind).values() if v.rigid}
        entity: Entity = self.world.add(cls, kind, refs, **rigid)
        return entity

    def small(self, kind: Type, least: int = 0) -> int | str:
        """A random value of a type."""
        if kind == BOOL:
            return self.random.random() < 0.8
        return self.random.choice(kind.members) if kind.members else least + self.random.choice(SMALL)

    def fitting(self, roles: Sequence[str], kinds: Mapping[str, str]) -> Iterator[tuple[Entity, ...]]:
        """Every choice of entities for these roles."""
        owner = next((r for r in roles if r in OWNERS), "")
        ends = [r for r in roles if r != owner and not (owner and r in OWNERS[owner])]
        fits = {
            r: [e for e in self.world.entities if e.cls == CLASS_OF[r] and kinds.get(r, "") in ("", e.kind)] for r in roles
        }
        for entity in fits[owner] if owner else [None]:
            known = {owner: entity, **entity.refs} if entity else {}
            if all(known[r] in fits[r] for r in roles if r in known):
                for others in product(*(fits[r] for r in ends)):
                    chosen = known | dict(zip(ends, others, strict=True))
                    if len(set(map(id, others))) == len(others):
                        yield tuple(chosen[r] for r in roles)

    def run(self, attempts: int) -> None:
        """This many attempts to fire something, the more often the less it has fired so far."""
        self.note_all()
        events = [e for e in self.tables.events if self.places[e.id]]
        steps = 0
        for attempt in range(attempts):
            if attempt % ALL_EVERY == 0:
                weights = [1.0 / (1 + self.fired.get(e.id, 0)) for e in events]
                drawn = iter(self.random.choices(events, weights, k=ALL_EVERY))
            event = next(drawn)
            chosen = self.random.choice(self.places[event.id])
            if self.machine.events[event.id].call(self.world.pool, *chosen, *self.inputs(event, chosen)) < 0:
                self.fired[event.id] = self.fired.get(event.id, 0) + 1
                steps += 1
                if steps % ALL_EVERY:
                    self.note_acting(event, chosen)
                else:
                    self.note_all()
        self.note_all()

    def inputs(self, event: Event, chosen: tuple[Entity, ...]) -> list[int | str]:
        """Random inputs, numbers mostly near those of the entities."""
        found: list[int | str] = []
        for kind in event.inputs.values():
            if not kind.number or not chosen or self.random.random() < 0.4:
                found.append(self.small(kind))
                continue
            entity = self.random.choice(chosen)
            numbers = [v.name for v in self.tables.vars_of(entity.cls, entity.kind).values() if v.type.number]
            found.append(getattr(entity, attribute(self.random.choice(numbers))) if numbers else 0)
        return found

    # -- what is noted ------------------------------------------------------------------------------------------------
    def note_acting(self, event: Event, chosen: tuple[Entity, ...]) -> None:
        """The globals and each acting entity with its owners."""
        self.note("global", {})
        for entity in chosen:
            self.note_entity(entity)

    def note_all(self) -> None:
        """Every entity."""
        self.note("global", {})
        for entity in self.world.entities:
            self.note_entity(entity)

    def note_entity(self, entity: Entity) -> None:
        """One entity, in the scope that is about its class."""
        role = next(r for r, c in CLASS_OF.items() if c == entity.cls)
        self.note(entity.cls, {role: entity, **entity.refs})

    def note(self, scope: str, by_role: dict[str, Entity]) -> None:
        """One row of a scope's samples."""
        kinds = tuple((r, by_role[r].kind) for r in ROLES[scope] if r in by_role and by_role[r].kind)
        if (scope, kinds) not in self.seen:
            self.seen[scope, kinds] = Samples(tuple(self.columns(by_role)), {})
        samples = self.seen[scope, kinds]
        samples.rows[tuple(code(self.value(r, by_role), r.type) for r in samples.columns)] = None

    def columns(self, by_role: dict[str, Entity]) -> Iterator[Ref]:
        """The variables that a scope sees."""
        yield from (Ref("const", n, INT) for n in self.tables.constants)
        yield from (Ref("global", n, v.type) for n, v in self.tables.globals.items())
        for role, entity in by_role.items():
            yield from (Ref(role, v.name, v.type) for v in self.tables.vars_of(entity.cls, entity.kind).values())

    def value(self, ref: Ref, by_role: Mapping[str, Entity]) -> int | str:
        """The value of a variable now."""
        if ref.role == "const":
            return self.machine.constants[ref.name]
        owner = self.world.pool if ref.role == "global" else by_role[ref.role]
        value: int | str = getattr(owner, attribute(ref.name))
        return value
