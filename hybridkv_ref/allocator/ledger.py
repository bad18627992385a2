"""The table state of an allocator, and the one lock: every change is a row, fired here.

A model's groups are dealt out to lanes (see ``lanes``); all lanes' machines work on one pool object, so that every cap
is that of the whole device.  A row is atomic under ``lock``; between two rows any other thread may fire one.  Nothing
here knows what a row means.
"""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.errors import InputError
from hybridkv_ref.lanes import Maker, deal
from hybridkv_ref.machine import Entity, Machine, World
from hybridkv_ref.tables import Tables


class Observer(Protocol):
    """Who watches the rows: a scheduler of threads, a shadow machine, a trace."""

    def before(self, event_id: str) -> None:
        """A thread is about to fire a row; called without the lock, so it may block the thread."""

    def after(self, event_id: str, lane: int, entities: Sequence[Entity], inputs: Mapping[str, int | str]) -> None:
        """A row has fired; called under the lock."""

    def limits(self, constants: Mapping[int, Mapping[str, int]]) -> None:
        """The lanes' constants are others from now on."""


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
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.fired, self.inside = 0, 0  # ``inside``: the thread that is in ``atomic``
        self.lanes: list[Lane] = []
        self.lane_of: dict[str, Lane] = {}
        self.made: list[Any] = []
        by_name = {g.name: g for g in groups}
        pool: Any = None
        for members, own in deal([g.group for g in groups]):
            world = World(machine_for(tables, tuple(sorted({**constants, **own}.items()))))
            pool = world.pool if pool is None else pool
            world.pool, world.entities = pool, self.made
            lane = Lane(len(self.lanes), world, frozenset(g.kind for g in members), world.machine.constants)
            self.lanes.append(lane)
            for group in members:
                self.lane_of[by_name[group.name].name] = lane
        self.pool = pool
        self.store = _only_store(tables)
        self.ids: dict[tuple[str, str], str] = {}
        for event in tables.events:
            kinds = set(event.kinds.values())
            mine = kinds - {self.store} or kinds
            if len(mine) <= 1:
                self.ids[next(iter(mine), event.id.partition(".")[0]), event.row] = event.id
            for kind in kinds:  # handoffs between kinds that are not the store: named by both
                self.ids.setdefault(
                    (f"{event.kinds.get('src', kind)}>{event.kinds.get('dst', kind)}", event.row), event.id
                )

    def change(self, constants: Mapping[str, int]) -> None:
        """Other values for some constants from now on; the caller has seen to it that the state fits them."""
        with self.lock:
            for lane in self.lanes:
                lane.constants = {**lane.constants, **constants}
                lane.world.machine = machine_for(self.tables, tuple(sorted(lane.constants.items())))
            if self.observer is not None:
                self.observer.limits({lane.index: lane.constants for lane in self.lanes})

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

    def fire(
        self,
        lane: Lane,
        event_id: str,
        *entities: Entity,
        settle: Callable[[], None] | None = None,
        **inputs: int | str,
    ) -> None:
        """Fires one row and, in the same atomic step, what keeps the books with it; Refused changes nothing."""
        if self.observer is not None and self.inside != threading.get_ident():
            self.observer.before(event_id)
        with self.lock:
            lane.world.fire(event_id, *entities, **inputs)
            self.fired += 1
            if settle is not None:
                settle()
            if self.observer is not None:
                self.observer.after(event_id, lane.index, entities, inputs)

    @contextmanager
    def atomic(self, event_id: str) -> Iterator[None]:
        """The lock, around a row and what belongs to it; whoever watches is told before it is taken."""
        if self.observer is not None and self.inside != threading.get_ident():
            self.observer.before(event_id)
        with self.lock:
            outer, self.inside = self.inside, threading.get_ident()
            try:
                yield
            finally:
                self.inside = outer

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


def _only_store(tables: Tables) -> str:
    stores = [k for k, kind in tables.kinds.items() if "store" in kind.capabilities]
    if len(stores) != 1:
        raise InputError(f"kinds: an allocator needs one kind with the capability 'store', found {len(stores)}")
    return stores[0]
