"""The books that are kept with each row: memory of segments, their place in the index, spare records.

A row decides; what follows here is only what the new table state means for memory: a segment in an EMPTY stage holds
no slots, one that has shrunk gives slots back, one that is readable and has a key can be found.  It happens under the
lock, in the same atomic step as the row.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np
import torch

from hybridkv_ref.allocator.abi import describe
from hybridkv_ref.allocator.arena import Slots
from hybridkv_ref.allocator.geometry import Geometry, GroupGeometry
from hybridkv_ref.allocator.index import PrefixIndex
from hybridkv_ref.allocator.ledger import Lane, Ledger
from hybridkv_ref.allocator.records import CacheSegment, Lease, Request, StatePointer, StoredObject
from hybridkv_ref.allocator.segment_bytes import SegmentBytes
from hybridkv_ref.machine import Entity


class Book(SegmentBytes):
    """Arenas, index and records below one ledger."""

    def __init__(
        self, ledger: Ledger, geometry: Geometry, caps: Mapping[str, int], device: torch.device | str, poison: bool
    ) -> None:
        super().__init__(geometry, caps, device, poison)
        self.ledger, self.geometry = ledger, geometry
        self.readable = [ledger.sets(g.kind, "READABLE") for g in geometry.groups]
        self.empty = [ledger.sets(g.kind, "EMPTY") for g in geometry.groups]
        self.quiet = [ledger.sets(g.kind, "QUIET") for g in geometry.groups]
        self.index = PrefixIndex(geometry, self.readable)
        self.abi = [describe(g).identifier() for g in geometry.groups]
        self.make_segment = [
            ledger.maker(ledger.lane_of[g.name], "segment", g.kind, group=g.cache, **self._stored_keys(g))
            for g in geometry.groups
        ]
        self.spare: list[list[CacheSegment]] = [[] for _ in geometry.groups]
        self.segments: list[CacheSegment] = []
        self.by_entity: dict[int, CacheSegment] = {}
        self.make_lease = ledger.maker(ledger.lanes[0], "lease")
        self.make_copy = ledger.maker(ledger.lanes[0], "copy")
        self.leases: list[Any] = []
        self.copies: list[Any] = []
        self.bound: dict[tuple[int, str], tuple[Lane, str]] = {}
        self.clock = 0
        # The evictor's: a segment may be evicted, or its rank has changed; a segment is gone.
        self.on_rest: Callable[[CacheSegment], None] = lambda segment: None
        self.on_empty: Callable[[CacheSegment], None] = lambda segment: None

    def _stored_keys(self, group: GroupGeometry) -> dict[str, bool]:
        """The keys that a rebuild encodes anew are those that the segment stores."""
        return {"keys": True} if "rebuilds" in self.ledger.tables.kinds[group.kind].capabilities else {}

    # -- records -------------------------------------------------------------------------------------------------------
    def new_segment(self, group: GroupGeometry) -> CacheSegment:
        """A record of this group that holds nothing."""
        with self.ledger.lock:
            if self.spare[group.index]:
                return self.spare[group.index].pop()
            segment = CacheSegment(group, self.make_segment[group.index]())
            self.segments.append(segment)
            self.by_entity[id(segment.entity)] = segment
            return segment

    def new_lease(self, segment: CacheSegment, request: Request) -> Lease:
        """A lease of nothing yet, that of ``request`` on ``segment`` from now on."""
        with self.ledger.lock:
            entity = self.leases.pop() if self.leases else self.make_lease()
            record = request.records[self.ledger.lane_of[segment.group.name].index]
            entity.refs["self"], entity.refs["req"] = segment.entity, record
            return Lease(segment, request, entity)

    def close_lease(self, lease: Lease) -> None:
        """The lease is let go of: its record may be used again, once no step in flight reads through it."""
        with self.ledger.lock:
            lease.closed = True
            self.reuse(lease)

    def reuse(self, lease: Lease) -> None:
        """Gives a lease's record back if nobody needs it; called once where it was let go of and per step that ends."""
        if lease.closed and not lease.entity.in_flight:
            self.leases.append(lease.entity)

    def dispatch(self, leases: Sequence[Lease]) -> None:
        """A step that reads all of these leased segments is handed to the device; it completes later, in any case.

        Refused, with nothing dispatched, where one of them may not be read.
        """
        if not leases:
            return
        with self.ledger.atomic(self.ledger.event_id(leases[0].segment.kind, "dispatch")):
            told = [(lease, lease.segment.token_range[1]) for lease in leases]
            refused = [one for one in told if not self.lease_allows(one[0], "dispatch", upto=one[1])]
            for lease, upto in refused[:1] or told:
                self.fire_lease(lease, "dispatch", upto=upto)

    def complete(self, lease: Lease) -> None:
        """The step is done."""
        with self.ledger.atomic(self.ledger.event_id(lease.segment.kind, "complete")):
            self.fire_lease(lease, "complete")
            self.reuse(lease)
            self.ledger.changed.notify_all()

    def new_copy(self, src: Any, dst: Any) -> Any:
        """A copy between two entities that does not move yet."""
        with self.ledger.lock:
            copy = self.copies.pop() if self.copies else self.make_copy()
            copy.refs["src"], copy.refs["dst"] = src, dst
            return copy

    def tick(self, segment: CacheSegment) -> None:
        """The segment is used now."""
        self.clock += 1
        segment.last_accessed = self.clock

    # -- rows ----------------------------------------------------------------------------------------------------------
    def event(self, group: GroupGeometry, row: str) -> tuple[Lane, str]:
        """The lane of a group and the event of a row there; InputError where the tables have none."""
        found = self.bound.get((group.index, row))
        if found is None:
            found = self.ledger.lane_of[group.name], self.ledger.event_id(group.kind, row)
            self.bound[group.index, row] = found
        return found

    def fire(self, segment: CacheSegment, row: str, **inputs: int | str) -> None:
        """A row of one segment."""
        lane, event = self.event(segment.group, row)
        self.ledger.run(lane, event, (segment.entity,), inputs, self.settle, segment)

    def fire_lease(self, lease: Lease, row: str, **inputs: int | str) -> None:
        """A row of one lease."""
        segment = lease.segment
        lane, event = self.event(segment.group, row)
        entities = segment.entity, lease.entity, lease.request.records[lane.index]
        self.ledger.run(lane, event, entities, inputs, self.settle, segment)

    def fire_each(
        self, leases: Sequence[Lease], row: str, asking: bool = False, /, **inputs: Iterable[int | str]
    ) -> None:
        """A row of several leases of one request on segments of one group, in turn; per input a value for each.

        Refused, with those before it fired, at the first that may not; ``asking``: those fire that may.
        """
        if not leases:
            return
        lane, event = self.event(leases[0].segment.group, row)
        record, segments = leases[0].request.records[lane.index], [lease.segment for lease in leases]
        columns = [inputs[name] for name in lane.world.machine.events[event].event.inputs]
        entities = [segment.entity for segment in segments], [lease.entity for lease in leases], repeat(record)
        firings = list(zip(*entities, *columns, strict=False))
        self.ledger.run_each(lane, event, firings, self.settle, segments, asking)

    def entities_of(self, lease: Lease) -> tuple[Entity, ...]:
        """What takes part in a row of a lease: segment, lease and the request's record in the segment's lane."""
        lane = self.ledger.lane_of[lease.segment.group.name]
        return lease.segment.entity, lease.entity, lease.request.records[lane.index]

    def lease_allows(self, lease: Lease, row: str, **inputs: int | str) -> bool:
        """Whether a row of one lease could fire now."""
        lane, event = self.event(lease.segment.group, row)
        return self.ledger.allows(lane, event, *self.entities_of(lease), **inputs)

    def allows(self, segment: CacheSegment, row: str, **inputs: int | str) -> bool:
        """Whether a row of one segment could fire now."""
        lane, event = self.event(segment.group, row)
        return self.ledger.allows(lane, event, segment.entity, **inputs)

    # -- memory --------------------------------------------------------------------------------------------------------
    def grant(
        self, segment: CacheSegment, span: tuple[int, int], row: str, entities: tuple[Entity, ...], **inputs: int
    ) -> None:
        """Gives an empty record slots for a token range if the row fires, whose ``size`` and ``off`` are filled in.

        Refused, or MemoryError where the row would fire and there are no slots: then nothing has changed.
        """
        group = segment.group
        lane, event = self.event(group, row)
        with self.ledger.atomic(event):
            count, arena = group.layers * group.blocks(*span), self.arena(group)
            given = {**inputs, "size": group.size(*span), "off": 0}
            # A cap that refuses comes first: it lets something make way.
            if count > len(arena.free) and not self.ledger.allows(lane, event, *entities, **given):
                self.ledger.run(lane, event, entities, given)
            slots = arena.take(count)
            given["off"] = arena.slack(slots)
            segment.slots = slots.reshape(group.layers, -1)
            try:
                self.ledger.run(lane, event, entities, given, self.settle, segment)
            except BaseException:
                segment.slots = None
                arena.give(slots)
                raise

    def grant_each(
        self, leases: Sequence[Lease], spans: Sequence[tuple[int, int]], row: str, **inputs: Sequence[int]
    ) -> bool:
        """As ``grant`` for several empty records of one group, if the row says that they fit together; whether it did.

        Refused, with those before it granted, where one may not fire all the same.
        """
        group, layers = leases[0].segment.group, leases[0].segment.group.layers
        counts = [layers * group.blocks(*span) for span in spans]
        sizes, arena = [group.size(*span) for span in spans], self.arena(group)
        _, event = self.event(group, row)
        whole = {name: column[0] for name, column in inputs.items()} | {"size": sum(sizes), "off": 0}
        with self.ledger.atomic(event):
            if sum(counts) > len(arena.free) or not self.lease_allows(leases[0], row, **whole):
                return False
            taken = self.split(arena.take(sum(counts)), counts, layers)
            for lease, slots in zip(leases, taken, strict=True):
                lease.segment.slots = slots
            try:
                self.fire_each(leases, row, size=sizes, off=map(arena.slack, taken), **inputs)
            except BaseException:
                for lease, slots in zip(leases, taken, strict=True):
                    if lease.segment.stage in self.empty[group.index]:
                        lease.segment.slots = None
                        arena.give(slots)
                raise
            return True

    @staticmethod
    def split(slots: Slots, counts: Sequence[int], layers: int) -> Sequence[Slots]:
        """So many slots for each of several segments, as their block tables [layers, blocks]."""
        if min(counts) == max(counts):
            return list(slots.reshape(len(counts), layers, -1))
        return [part.reshape(layers, -1) for part in np.split(slots, np.cumsum(counts)[:-1])]

    def keep(self, segment: CacheSegment, stored: StoredObject | None) -> None:
        """The segment has this durable copy from now on, or none; called under the lock."""
        segment.stored = stored
        if segment.stage in self.quiet[segment.group.index]:
            self.on_rest(segment)

    def settle(self, segment: CacheSegment) -> None:
        """What the segment's new state means for its memory and for who may find it."""
        entity = segment.entity
        stage, mem = entity.stage, entity.mem
        if (stage, mem) == segment.settled:
            return
        segment.settled, at = (stage, mem), segment.group.index
        if stage in self.empty[at]:
            if segment.slots is not None:
                self.arena(segment.group).give(segment.slots)
                self.index.drop(segment)
                segment.slots = segment.key = segment.stored = None
                segment.ring = 0
                self.on_empty(segment)
                self.spare[at].append(segment)
                self.ledger.changed.notify_all()
            return
        if segment.slots is not None and mem < segment.slots.size * segment.group.page.stride:
            self.shrink(segment)
        if stage in self.readable[at] and segment.key is not None and not self.index.put(segment):
            segment.key = None
        if stage in self.quiet[at]:
            self.on_rest(segment)

    def shrink(self, segment: CacheSegment) -> None:
        """The segment has given up its first blocks."""
        slots = segment.slots
        if slots is None:
            return
        kept = segment.nbytes // segment.group.block_bytes
        gone = slots[:, : slots.shape[1] - kept].copy()
        segment.slots = slots[:, slots.shape[1] - kept :].copy()
        self.arena(segment.group).give(gone)

    def pointer(self, lease: Lease) -> StatePointer:
        """The descriptor of one leased segment."""
        segment = lease.segment
        arena = self.arena(segment.group)
        slots = segment.slots if segment.slots is not None else np.zeros((segment.group.layers, 0), dtype=np.int64)
        return StatePointer(segment.group.name, arena.base, arena.offsets(slots), arena.page.nbytes, lease.entity.seen)
