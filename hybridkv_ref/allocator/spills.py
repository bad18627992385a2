"""Spills: an object of one or more neighbouring segments of one group, written on the io pipeline.

It counts once it is sealed: every part copied, checksummed, synced and renamed. Whatever goes wrong before ends in the
rows that fail, and leaves no file and no object.
"""

import math
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.media import Medium, MediumError
from hybridkv_ref.allocator.objects import Objects
from hybridkv_ref.allocator.pipelines import Pipelines, Shared
from hybridkv_ref.allocator.records import CacheSegment, StoredObject
from hybridkv_ref.lanes import STORE
from hybridkv_ref.machine import Refused


class Spill(Shared["StoredObject | None"]):
    """A durable copy of these segments that is being written, or waits to be."""

    def __init__(self, segments: Sequence[CacheSegment]) -> None:
        super().__init__()
        self.segments = list(segments)


class Spills(Objects):
    """Objects, and how they are written."""

    def __init__(self, book: Book, media: Mapping[str, Medium], pipelines: Pipelines) -> None:
        super().__init__(book, media)
        self.pipelines = pipelines
        self.spills: dict[CacheSegment, Spill] = {}

    def spill(self, segments: Sequence[CacheSegment]) -> Spill:
        """Writes one durable copy of neighbouring segments of one group; None where it cannot be had.

        A copy that is there or being written already is not written twice.  A worker of the io pipeline writes it
        itself, even where it waits in the queue: so a worker only ever waits for a copy that another one is writing.
        """
        inside = self.pipelines.inside("io")
        with self.ledger.lock:
            spill = self.spills.get(segments[0])
            if spill is None:
                spill = self.spills[segments[0]] = Spill(segments)
                if not inside:
                    self.pipelines.submit("io", self.write, spill)
        if inside:
            self.write(spill)
        return spill

    def write_first(self, segment: CacheSegment) -> None:
        """A durable copy before the only copy is evicted."""
        self.spill([segment]).result()

    def write(self, spill: Spill) -> None:
        """The spill itself, by the first worker that comes to it."""
        with self.ledger.lock:
            if spill.running() or self.spills.get(spill.segments[0]) is not spill:
                return
            spill.set_running_or_notify_cancel()
        try:
            stored = self.write_object(spill.segments)
        except BaseException as error:
            self.written(spill)
            spill.set_exception(error)
        else:
            self.written(spill)
            spill.set_result(stored)

    def written(self, spill: Spill) -> None:
        """A spill runs no more."""
        with self.ledger.lock:
            self.spills.pop(spill.segments[0], None)
            self.ledger.changed.notify_all()

    def write_object(self, segments: list[CacheSegment]) -> StoredObject | None:
        """Opens an object, copies every part into it and seals it; what went wrong leaves nothing behind."""
        group = segments[0].group
        with self.ledger.lock:
            if (known := self.stored(segments[0])) is not None:
                return known
            keys = tuple(s.key for s in segments if s.key is not None)
            spans = tuple(s.token_range for s in segments)
            ready = all(self.stored(s) is None and s.slots is not None for s in segments) and len(keys) == len(segments)
        if not ready or not self.restores(group):
            return None
        opened = self.open(group, segments)
        if opened is None:
            return None
        entity, medium = opened
        copies: list[tuple[CacheSegment, Any]] = []
        try:
            for segment, key, span in zip(segments, keys, spans, strict=True):
                copy = self.book.new_copy(segment.entity, entity)
                self.hand(group, "spill_begin", segment.entity, entity, copy, segment)
                copies.append((segment, copy))
                # From here on the source is held; before, it may have been evicted and written anew.
                if segment.key != key or segment.token_range != span:
                    raise MediumError(f"{segment!r}: is of another prefix by now")
            parts = [self.book.read_blocks(segment, self.out[group.index]) for segment in segments]
            name = f"{keys[0].hex()}-{group.name}-{uuid.uuid4().hex[:12]}"
            ends = [
                (self.ledger.event_id(group.kind, "spill_end"), (segment.entity, entity, copy))
                for segment, copy in copies
            ]
            sealed = self.rehearse(group, entity, [*ends, (self.event_of("seal"), (entity,))])
            self.media[medium].write(name, parts, self.describe(sealed, group, keys, spans))
        except (Refused, MediumError) as error:
            for segment, copy in copies:
                self.hand(group, "spill_fail", segment.entity, entity, copy, segment)
                self.book.copies.append(copy)
            self.fire(entity, "scrap")
            self.rest(group, entity)
            self.note(f"spill failed: {type(error).__name__}")
            return None
        for segment, copy in copies:
            self.hand(group, "spill_end", segment.entity, entity, copy, segment)
            self.book.copies.append(copy)
        stored = StoredObject(group, entity, medium, name, self.media[medium].location(name), keys, spans)
        with self.ledger.atomic(self.ledger.event_id(self.ledger.store, "seal")):
            self.fire(entity, "seal")
            self.adopt_object(stored)
            for segment in segments:
                if segment.key in keys:
                    self.book.keep(segment, stored)
        self.note("spilled")
        return stored

    def open(self, group: GroupGeometry, segments: Sequence[CacheSegment]) -> tuple[Any, str] | None:
        """Space on the first medium that has some, after erasing what is wanted least; None where there is none."""
        first = segments[0].entity
        inputs = {
            "size": sum(s.nbytes for s in segments),
            "lo": first.start,
            "hi": segments[-1].entity.end,
            "meta": first.mark,
            "made_in": first.epoch,
            "layout": first.abi,
            "until": min(s.entity.keep_until for s in segments),
        }
        sizes = [math.prod(self.shape(group, s.token_range)) for s in segments]
        for last, medium in enumerate(self.media, 1):
            entity = self.new_object(group, medium, len(segments))
            moving = self.media[medium].outgoing(sizes)._asdict()
            while True:
                try:
                    self.fire(entity, "open_object", **inputs, **moving)
                except Refused as refused:
                    # The last medium makes room by erasing; the ones before it pass on.
                    short = self.ledger.pressure(refused) == STORE
                    if not short or last < len(self.media) or not self.erase_one(medium):
                        self.rest(group, entity)
                        if not short:
                            self.note(f"spill refused: {refused.guard.text}")
                        break
                else:
                    return entity, medium
        return None
