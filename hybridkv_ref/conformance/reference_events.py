"""What the reference allocator does, told as events: a reduction map from its rows and its index.

A group block is one segment record; the blocks of the host tier are durable copies.  Nothing is taken from what the
allocator should do: a row that does not fire is not told.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
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
from hybridkv_ref.tables import Event as Row
from hybridkv_ref.tables import Tables

HOST = "host"


class AllocatorEvents(Recorder):
    """An observer of an allocator's rows.

    ``names`` are the suite's, by a request's records; ``pinned`` what was pinned since it was last cleared; ``wanted``
    the request that asks for loads.
    """

    def __init__(self, geometry: Geometry, tables: Tables) -> None:
        super().__init__()
        self.geometry, self.tables = geometry, tables
        self.rows = {event.id: event for event in tables.events}
        self.allocator: HeterogeneousAllocator | None = None
        self.forget()

    def forget(self) -> None:
        """A new life."""
        self.events.clear()
        self.found: list[tuple[CacheSegment, str]] = []  # entries of the index that came, and that went
        self.lost: list[tuple[CacheSegment, str]] = []
        self.names: dict[int, str] = {}
        self.numbers: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.pinned: list[CacheSegment] = []
        self.unwritten: set[CacheSegment] = set()
        self.copies: dict[int, str] = {}
        self.wanted = ""
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
            if done and not before and segment.key is not None:
                self.found.append((segment, segment.key.hex()))
            return done

        def watched_drop(segment: CacheSegment) -> None:
            before, key = found(segment), segment.key
            drop(segment)
            if before and key is not None:
                self.lost.append((segment, key.hex()))

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
        """These events, and the index's that belong to them; blocks given back one after the other in one event."""
        for event in (*events, *self.entries()):
            last = self.events[-1] if self.events else None
            if (
                isinstance(event, Free)
                and isinstance(last, Free)
                and (last.req, last.group) == (event.req, event.group)
            ):
                last.blocks += event.blocks
            else:
                self.events.append(event)

    def entries(self) -> list[Event]:
        """The entries of the index that came and went since this was last asked, those of a group together."""
        told: list[Event] = []
        for form, entries in ((KeyRemove, self.lost), (KeyPublish, self.found)):
            for group, some in groupby(entries, key=lambda entry: entry[0].group):
                named = list(some)
                told.append(form(group.name, [key for _, key in named], [self.number(s) for s, _ in named]))
            entries.clear()
        return told

    def number(self, segment: CacheSegment) -> int:
        """The block number of a segment's record."""
        return self.copy_number(segment.group, segment.entity)

    def copy_number(self, group: GroupGeometry, entity: Any) -> int:
        """The block number of a record of one group, on the device or below it."""
        known = self.numbers.get(id(entity))
        if known is None:
            known = self.counts[group.index] = self.numbers[id(entity)] = self.counts.get(group.index, 0) + 1
        return known

    def before(self, event_id: str) -> None:
        """Nothing: only what has fired counts."""

    def limits(self, constants: Mapping[int, Mapping[str, int]]) -> None:
        """Nothing: events do not tell of caps."""

    def after(self, event_id: str, lane: int, entities: Sequence[Any], inputs: Mapping[str, int | str]) -> None:
        """One row: the events that tell of it."""
        self.after_each(event_id, lane, [(*entities, *(inputs[name] for name in self.rows[event_id].inputs))])

    def after_each(self, event_id: str, lane: int, firings: Sequence[tuple[Any, ...]]) -> None:
        """One row of several entities: the events that tell of them, blocks of a call together."""
        if self.allocator is None:
            return
        event, by_entity = self.rows[event_id], self.cache.book.by_entity
        if event.scope == "lease":
            segments = [by_entity[id(firing[0])] for firing in firings]
            self.leased(event, segments, self.names.get(id(firings[0][2]), ""), firings)
        elif event.roles[-1:] == ("copy",):
            self.copied(event.row, firings[0])
        if self.found or self.lost:
            self.say()
        if event.row == "free" and (firings[0][0].pins or firings[0][0].steps or firings[0][0].holds):
            # A block that its last entry or holder left is free already; this one is not.
            segment = by_entity[id(firings[0][0])]
            self.say(Evict(segment.group.name, [self.number(segment)]))

    def leased(
        self, event: Row, segments: Sequence[CacheSegment], req: str, firings: Sequence[tuple[Any, ...]]
    ) -> None:
        """A row of a request's leases on segments of one group; a state's place is known once it is written."""
        group = segments[0].group
        match event.row:
            case "admit" if group.whole:
                self.unwritten.update(segments)
            case "admit":
                self.taken(req, group, [(self.number(s), s.entity.start) for s in segments])
            case "append":
                at, more = (len(event.roles) + list(event.inputs).index(name) for name in ("at", "n"))
                ends = [firing[at] + firing[more] for firing in firings]
                size = self.block(group)
                starts = [hi - size for hi in ends] if group.whole else [firing[at] for firing in firings]
                blocks = [(self.number(segment), lo) for segment, lo in zip(segments, starts, strict=True)]
                self.taken(req, group, [b for b, s in zip(blocks, segments, strict=True) if s in self.unwritten])
                self.unwritten.difference_update(segments)
                self.count += 1
                spans = [Span(group.name, [n], lo, hi) for (n, lo), hi in zip(blocks, ends, strict=True)]
                self.say(Dispatch(f"w{self.count}", req, writes=spans), Complete(f"w{self.count}"))
            case "pin":
                self.pinned += segments
            case "release" | "let_go" | "abort":
                # Of what was pinned and is not told, and what was never written, nothing was told.
                given = [s for s in segments if s not in self.pinned and s not in self.unwritten]
                self.pinned = [s for s in self.pinned if s not in segments]
                self.unwritten.difference_update(segments)
                if given:
                    self.say(Free(req, group.name, [self.number(s) for s in given]))

    def taken(self, req: str, group: GroupGeometry, blocks: Sequence[tuple[int, int]]) -> None:
        """New blocks (number, first token); those that continue one another in one event."""
        size, runs = self.block(group), list[Allocate]()
        for number, at in blocks:
            if runs and runs[-1].at + len(runs[-1].blocks) * size == at:
                runs[-1].blocks.append(number)
            else:
                runs.append(Allocate(req, group.name, [number], at=at))
        self.say(*runs)

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
