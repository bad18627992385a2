"""What the reference allocator does, told as events: a reduction map from its rows and its index.

A group block is one segment record; the blocks of the host tier are durable copies.  Nothing is taken from what the
allocator should do: a row that does not fire is not told.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hybridkv_ref.allocator import CacheSegment, Geometry, HeterogeneousAllocator
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.records import StoredObject
from hybridkv_ref.conformance.engine import Recorder
from hybridkv_ref.conformance.gate import Gate
from hybridkv_ref.events import (
    Allocate,
    Complete,
    Dispatch,
    Event,
    Evict,
    Free,
    KeyPublish,
    KeyRemove,
    Part,
    Span,
    TransferBegin,
    TransferEnd,
    TransferFail,
)
from hybridkv_ref.tables import Tables

HOST = "host"


class AllocatorEvents(Recorder):
    """An observer of an allocator's rows.

    ``names`` are the suite's, by a request's records; ``pinned`` what was pinned since it was last cleared; ``wanted``
    the request that asks for loads; ``upto`` the position that is computed up to.
    """

    def __init__(self, geometry: Geometry, tables: Tables) -> None:
        super().__init__()
        self.geometry, self.tables = geometry, tables
        self.rows = {event.id: event.row for event in tables.events}
        self.allocator: HeterogeneousAllocator | None = None
        self.forget()

    def forget(self) -> None:
        """A new life."""
        self.events.clear()
        self.later: list[Event] = []
        self.names: dict[int, str] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.counts: dict[int, int] = {}
        self.pinned: list[CacheSegment] = []
        self.copies: dict[int, str] = {}
        self.wanted = ""
        self.upto = 0
        self.count = 0
        self.gate = Gate()

    def block(self, group: GroupGeometry) -> int:
        """Tokens of one block: the segment at a grid position; a state stands for the unit that it ends."""
        lo, hi = group.extent(self.geometry.unit)
        return self.geometry.unit if group.whole else hi - lo

    @property
    def cache(self) -> HeterogeneousAllocator:
        """The allocator of this life."""
        if self.allocator is None:
            raise RuntimeError("reset() comes first")
        return self.allocator

    def watch_index(self) -> None:
        """Each entry that comes or goes is an event, after that of the row that it belongs to."""
        index = self.cache.book.index
        put, drop, put_object, drop_object = index.put, index.drop, index.put_object, index.drop_object

        def found(segment: CacheSegment) -> bool:
            node = index.nodes.get(segment.key) if segment.key is not None else None
            return node is not None and node.segments[segment.group.index] is segment

        def watched_put(segment: CacheSegment) -> bool:
            before, done = found(segment), put(segment)
            if not before and found(segment) and segment.key is not None:
                self.later.append(KeyPublish(segment.group.name, [segment.key.hex()], [self.number(segment)]))
            return done

        def watched_drop(segment: CacheSegment) -> None:
            before, key = found(segment), segment.key
            drop(segment)
            if before and not found(segment) and key is not None:
                self.later.append(KeyRemove(segment.group.name, [key.hex()], [self.number(segment)]))

        def watched_object(stored: StoredObject) -> None:
            put_object(stored)
            numbers = [self.copy_number(stored.group, stored.entity)] * len(stored.keys)
            self.say(KeyPublish(stored.group.name, [k.hex() for k in stored.keys], numbers, tier=HOST))

        def watched_loss(stored: StoredObject) -> None:
            drop_object(stored)
            numbers = [self.copy_number(stored.group, stored.entity)] * len(stored.keys)
            self.say(KeyRemove(stored.group.name, [k.hex() for k in stored.keys], numbers, tier=HOST))

        hooks: dict[str, Callable[..., Any]] = {
            "put": watched_put, "drop": watched_drop, "put_object": watched_object, "drop_object": watched_loss,
        }  # fmt: skip
        for name, hook in hooks.items():
            setattr(index, name, hook)

    def say(self, *events: Event) -> None:
        """These events, and the index's that belong to them."""
        self.events += [*events, *self.later]
        self.later.clear()

    def number(self, segment: CacheSegment) -> int:
        """The block number of a segment's record."""
        return self.copy_number(segment.group, segment.entity)

    def copy_number(self, group: GroupGeometry, entity: Any) -> int:
        """The block number of a record of one group, on the device or below it."""
        key = (group.index, id(entity))
        if key not in self.numbers:
            self.counts[group.index] = self.numbers[key] = self.counts.get(group.index, 0) + 1
        return self.numbers[key]

    def before(self, event_id: str) -> None:
        """Nothing: only what has fired counts."""

    def limits(self, constants: Mapping[int, Mapping[str, int]]) -> None:
        """Nothing: events do not tell of caps."""

    def after(self, event_id: str, lane: int, entities: Sequence[Any], inputs: Mapping[str, int | str]) -> None:
        """One row: the events that tell of it."""
        row = self.rows[event_id]
        if entities and entities[-1].cls == "copy":
            self.copied(row, entities)
        elif len(entities) == 3 and entities[1].cls == "lease" and self.allocator is not None:
            segment = self.cache.book.by_entity.get(id(entities[0]))
            if segment is not None:
                self.leased(row, segment, self.names.get(id(entities[2]), ""), inputs)
        self.say()
        if row == "free" and (entities[0].pins or entities[0].steps or entities[0].holds):
            # A block that its last entry or holder left is free already; this one is not.
            segment = self.cache.book.by_entity[id(entities[0])]
            self.say(Evict(segment.group.name, [self.number(segment)]))

    def leased(self, row: str, segment: CacheSegment, req: str, inputs: Mapping[str, int | str]) -> None:
        """A row of a request's lease."""
        group, number = segment.group, self.number(segment)
        match row:
            case "admit":
                at = self.upto - self.block(group) if group.whole else int(inputs["at"])
                self.say(Allocate(req, group.name, [number], at=at))
            case "append":
                at, hi = int(inputs["at"]), int(inputs["at"]) + int(inputs["n"])
                self.count += 1
                span = Span(group.name, [number], hi - self.block(group) if group.whole else at, hi)
                self.say(Dispatch(f"w{self.count}", req, writes=[span]), Complete(f"w{self.count}"))
            case "pin":
                self.pinned.append(segment)
            case "release" if segment in self.pinned:
                self.pinned.remove(segment)
            case "release" | "let_go" | "abort":
                self.say(Free(req, group.name, [number]))

    def copied(self, row: str, entities: Sequence[Any]) -> None:
        """A row of a copy between device and host."""
        source, target, copy = entities[0], entities[1], entities[2]
        name, segments = self.copies.get(id(copy), ""), self.cache.book.by_entity
        match row:
            case "spill_begin" | "restore_begin":
                self.gate.begin()
                self.count += 1
                name = self.copies[id(copy)] = f"x{self.count}"
                down = row == "spill_begin"
                group = segments[id(source if down else target)].group
                keys = [] if down else self.keys_of(source)
                part = Part(group.name, [self.copy_number(group, source)], [self.copy_number(group, target)], keys)
                self.say(
                    TransferBegin(name, [part], target=HOST)
                    if down
                    else TransferBegin(name, [part], source=HOST, req=self.wanted)
                )
            case "spill_end" | "spill_fail" | "publish" | "discard":
                arrived = self.gate.fate()
                if arrived is None:
                    self.say(TransferFail(name, stopped=False))
                else:
                    self.say(TransferEnd(name) if arrived else TransferFail(name))
                if row == "publish" and segments[id(target)].key is None:
                    # Under its key another one is found by now: as of a block computed twice, nobody can find it.
                    self.say(Evict(segments[id(target)].group.name, [self.number(segments[id(target)])]))

    def keys_of(self, entity: Any) -> list[str]:
        """The keys that a durable copy is kept under."""
        return [key.hex() for stored in self.cache.tiers.objects if stored.entity is entity for key in stored.keys]
