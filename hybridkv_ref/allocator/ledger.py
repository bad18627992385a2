"""The table state of an allocator, and the one lock: every change is a row, fired here.

A model's groups are dealt out to lanes (see ``lanes``); all lanes' machines work on one pool object, so that every cap
is that of the whole device.  A row is atomic under ``lock``; between two rows any other thread may fire one.  Nothing
here knows what a row means.
"""

import importlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.compile_py import attribute
from hybridkv_ref.errors import InputError
from hybridkv_ref.lanes import Maker, deal, only_store, pressure, worlds
from hybridkv_ref.machine import Entity, Machine, Refused, World
from hybridkv_ref.tables import Tables

Step = tuple[str, tuple[Entity, ...]]
"""A row without inputs and its entities."""


Kernel = Callable[..., Any]
"""An operation of ``kernels/``."""


class Observer(Protocol):
    """Who watches the rows: a scheduler of threads, a shadow machine, a trace."""

    def before(self, event_id: str) -> None:
        """A thread is about to fire a row; called without the lock, so it may block the thread."""

    def after(self, event_id: str, lane: int, entities: Sequence[Entity], inputs: Mapping[str, int | str]) -> None:
        """A row has fired; called under the lock."""

    def limits(self, constants: Mapping[int, Mapping[str, int]]) -> None:
        """The lanes' constants are others from now on."""


@runtime_checkable
class Gatherer(Observer, Protocol):
    """An observer that is told of several firings of a row at once."""

    def after_each(self, event_id: str, lane: int, firings: Sequence[tuple[Any, ...]]) -> None:
        """A row has fired on all of these (entities and inputs in its order); called under the lock, after the last."""


@dataclass(eq=False, slots=True)
class Lane:
    """The world of some groups no two of which are of one kind."""

    index: int
    world: World
    kinds: frozenset[str]
    constants: Mapping[str, int]


@lru_cache(maxsize=256)
def machine_for(tables: Tables, constants: tuple[tuple[str, int], ...]) -> Machine:
    """The machine of some constants, compiled once: machines hold no state."""
    return Machine(tables, dict(constants))


class Atomic:
    """The lock of a ledger while its thread is inside; entered again and again, so a class and no generator."""

    __slots__ = ("ledger", "outer")

    def __init__(self, ledger: "Ledger") -> None:
        self.ledger, self.outer = ledger, 0

    def __enter__(self) -> None:
        ledger = self.ledger
        ledger.lock.acquire()
        self.outer, ledger.inside = ledger.inside, threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self.ledger.inside = self.outer
        self.ledger.lock.release()


class Ledger:
    """Lanes, the shared pool, the lock and the count of rows fired."""

    def __init__(
        self,
        tables: Tables,
        groups: Sequence[GroupGeometry],
        constants: Mapping[str, int],
        observer: Observer | None = None,
    ) -> None:
        self.tables, self.observer = tables, observer
        self.gatherer = observer if isinstance(observer, Gatherer) else None
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.fired, self.inside = 0, 0  # ``inside``: the thread that is in ``atomic``
        self.lanes: list[Lane] = []
        self.lane_of: dict[str, Lane] = {}
        self.made: list[Any] = []
        self.pressed: dict[str, list[str]] = {}
        by_name = {g.name: g for g in groups}
        dealt = deal([g.group for g in groups])
        made = worlds(machine_for(tables, tuple(sorted({**constants, **own}.items()))) for _, own in dealt)
        for world, (members, _) in zip(made, dealt, strict=True):
            world.entities = self.made
            lane = Lane(len(self.lanes), world, frozenset(g.kind for g in members), world.machine.constants)
            self.lanes.append(lane)
            for group in members:
                self.lane_of[by_name[group.name].name] = lane
        self.pool = made[0].pool
        self.store = only_store(tables)
        self.ids: dict[tuple[str, str], str] = {}
        self.handoffs = {(e.row, e.kinds["src"], e.kinds["dst"]): e.id for e in tables.events if "src" in e.kinds}
        for event in tables.events:
            kinds = set(event.kinds.values())
            mine = kinds - {self.store} or kinds
            if len(mine) <= 1:
                self.ids[next(iter(mine), event.id.partition(".")[0]), event.row] = event.id

    def change(self, constants: Mapping[str, int]) -> str:
        """Other values for some constants from now on; gives "", or the invariant of the pool that would break.

        Then nothing has changed.
        """
        with self.lock:
            machines = [
                machine_for(self.tables, tuple(sorted({**lane.constants, **constants}.items()))) for lane in self.lanes
            ]
            for machine in machines:
                for prop in self.tables.forms("invariant"):
                    if prop.scope == "global" and not machine.predicate(prop.expr, prop.scope)(self.pool):
                        return prop.text
            for lane, machine in zip(self.lanes, machines, strict=True):
                lane.constants, lane.world.machine = machine.constants, machine
            if self.observer is not None:
                self.observer.limits({lane.index: lane.constants for lane in self.lanes})
            return ""

    def pressure(self, refused: Refused) -> str:
        """Where a refusal asks for room, as in ``lanes.pressure``; "" for one that asks for something else."""
        event = refused.event
        if event.id not in self.pressed:
            self.pressed[event.id] = pressure(self.tables, event)
        return self.pressed[event.id][event.guards.index(refused.guard)]

    def rehearse(self, lane: Lane, steps: Sequence[Step], **inputs: int | str) -> tuple[Any, Mapping[int, Any]]:
        """The pool and, by identity, all that takes part as they would be after these rows, which fire on copies.

        ``inputs`` are those of the last row.  Refused where one would be; nothing has changed in any case.
        """
        with self.lock:
            world = lane.world.machine.world()
            for name in self.tables.globals:
                setattr(world.pool, attribute(name), getattr(self.pool, attribute(name)))
            twins: dict[int, Any] = {}
            every = [one for _, entities in steps for one in entities]
            for one in every:
                if id(one) not in twins:
                    twin = twins[id(one)] = world.add(one.cls, one.kind)
                    for name in self.tables.vars_of(one.cls, one.kind):
                        setattr(twin, attribute(name), getattr(one, attribute(name)))
            for one in every:
                twins[id(one)].refs = {role: twins.get(id(owner), owner) for role, owner in one.refs.items()}
            for index, (event_id, entities) in enumerate(steps, 1):
                last = inputs if index == len(steps) else {}
                world.fire(event_id, *(twins[id(one)] for one in entities), **last)
            return world.pool, twins

    def maker(self, lane: Lane, cls: str, kind: str = "", **rigid: int | str) -> Callable[[], Any]:
        """Makes entities of a class in their first stage, and remembers them."""
        make = Maker(lane.world.machine, cls, kind, **rigid).make

        def remembered() -> Any:
            entity = make()
            entity.name = f"{kind or cls}#{len(self.made)}"
            self.made.append(entity)
            return entity

        return remembered

    def sets(self, kind: str, name: str) -> frozenset[str]:
        """The stages of one of a kind's sets; of a class's, for a class."""
        if kind in self.tables.kinds:
            return frozenset(self.tables.kinds[kind].sets.get(name, ()))
        return frozenset(self.tables.sets[kind][name])

    def has(self, kind: str, row: str) -> bool:
        """Whether the tables have this row for this kind or class."""
        return (kind, row) in self.ids

    def event_id(self, kind: str, row: str) -> str:
        """The event of a row for a kind or class; InputError where the tables have none."""
        found = self.ids.get((kind, row))
        if found is None:
            raise InputError(f"{kind}:{row}: the tables have no such row, so it is illegal")
        return found

    def kernel(self, event_id: str) -> Kernel:
        """The operation of ``kernels/`` that a row names; InputError for a row that names none of them."""
        name = self.tables.event(event_id).kernel
        try:
            found: Kernel = getattr(importlib.import_module(f"hybridkv_ref.kernels.{name}"), name)
        except (ImportError, AttributeError):
            raise InputError(f"{event_id}:kernel: there is no operation {name!r}") from None
        return found

    def handoff_id(self, row: str, src: str, dst: str) -> str:
        """The event of a handoff from one kind to another; InputError where the tables have none."""
        found = self.handoffs.get((row, src, dst))
        if found is None:
            raise InputError(f"{src}>{dst}:{row}: the tables have no such row, so it is illegal")
        return found

    def fire(self, lane: Lane, event_id: str, *entities: Entity, **inputs: int | str) -> None:
        """Fires one row; Refused changes nothing."""
        self.run(lane, event_id, entities, inputs)

    def run(
        self,
        lane: Lane,
        event_id: str,
        entities: tuple[Entity, ...],
        inputs: Mapping[str, int | str],
        settle: Callable[[Any], None] | None = None,
        segment: Any = None,
    ) -> None:
        """Fires one row and, in the same atomic step, keeps the books of ``segment`` with it; Refused changes nothing.

        The entities are those of records, which fit each other.
        """
        if self.observer is not None and self.inside != threading.get_ident():
            self.observer.before(event_id)
        with self.lock:
            world = lane.world
            world.take(world.machine.events[event_id], entities, inputs)
            self.fired += 1
            if settle is not None:
                settle(segment)
            if self.observer is not None:
                self.observer.after(event_id, lane.index, entities, inputs)

    def run_each(
        self,
        lane: Lane,
        event_id: str,
        firings: Sequence[tuple[Any, ...]],
        settle: Callable[[Any], None],
        segments: Sequence[Any],
        asking: bool = False,
    ) -> None:
        """As ``run`` for several firings in turn: entities and inputs in the row's order, and the segment of each.

        Refused, with those before it fired, at the first that may not; ``asking``: those fire that may.
        """
        observer, world, fired = self.observer, lane.world, list[tuple[Any, ...]]()
        if observer is not None and self.inside != threading.get_ident():
            test = world.machine.events[event_id].test
            if asking and not any(test(world.pool, *arguments) < 0 for arguments in firings):
                return
            observer.before(event_id)
        with self.lock:
            if self.gatherer is not None:
                observer = None
            compiled = world.machine.events[event_id]
            call, pool, roles, names = compiled.call, world.pool, len(compiled.event.roles), compiled.event.inputs
            try:
                for arguments, segment in zip(firings, segments, strict=True):
                    if call(pool, *arguments) >= 0:
                        if asking:
                            continue
                        world.take(compiled, arguments[:roles], dict(zip(names, arguments[roles:], strict=True)))
                    fired.append(arguments)
                    settle(segment)
                    if observer is not None:
                        inputs = dict(zip(names, arguments[roles:], strict=True))
                        observer.after(event_id, lane.index, arguments[:roles], inputs)
            finally:
                self.fired += len(fired)
                if self.gatherer is not None and fired:
                    self.gatherer.after_each(event_id, lane.index, fired)

    def atomic(self, event_id: str) -> "Atomic":
        """The lock, around a row and what belongs to it; whoever watches is told before it is taken."""
        if self.observer is not None and self.inside != threading.get_ident():
            self.observer.before(event_id)
        return Atomic(self)

    def allows(self, lane: Lane, event_id: str, *entities: Entity, **inputs: int | str) -> bool:
        """Whether a row could fire now."""
        with self.lock:
            return lane.world.allows(event_id, *entities, **inputs)

    def step(
        self,
        records: Sequence[Any],
        row: str,
        inputs: Callable[[Lane], Mapping[str, int]] | None = None,
    ) -> None:
        """Fires a row of a request in every lane, in all of them or, with Refused, in none."""
        event_id = self.event_id("request", row)
        with self.atomic(event_id):
            given = [dict(inputs(lane)) if inputs else {} for lane in self.lanes]
            for lane, record, values in zip(self.lanes, records, given, strict=True):
                if not lane.world.allows(event_id, record, **values):
                    lane.world.fire(event_id, record, **values)
            for lane, record, values in zip(self.lanes, records, given, strict=True):
                lane.world.fire(event_id, record, **values)
                self.fired += 1
                if self.observer is not None:
                    self.observer.after(event_id, lane.index, (record,), values)

    def can_step(self, records: Sequence[Any], row: str) -> bool:
        """Whether a row of a request without inputs could fire in every lane."""
        event_id = self.event_id("request", row)
        with self.lock:
            return all(lane.world.allows(event_id, r) for lane, r in zip(self.lanes, records, strict=True))
