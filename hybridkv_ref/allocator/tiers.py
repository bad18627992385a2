"""Tiers: spills, and the loads that bring durable copies back, each step a row of the tables.

A load waits with a ticket for its turn, takes its I/O slot and the memory of all its targets at once, reads outside the
lock, and turns the targets readable only after every part arrived and the checksum held. Whatever goes wrong ends in
the rows that fail: a load that failed is a miss. Loads run on the io pipeline; at most ``most_waiting`` are in the
queue.
"""

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.eviction import Evictor
from hybridkv_ref.allocator.media import Medium, MediumError
from hybridkv_ref.allocator.pipelines import Pipelines, Shared
from hybridkv_ref.allocator.records import CacheSegment, StoredObject
from hybridkv_ref.allocator.spills import Spills
from hybridkv_ref.lanes import DEVICE
from hybridkv_ref.machine import Refused


@dataclass(eq=False, slots=True)
class Load:
    """A durable copy on its way back; ``done`` gives whether its targets became readable."""

    stored: StoredObject
    done: Shared[bool] = field(default_factory=Shared)
    targets: list[tuple[CacheSegment, Any]] = field(default_factory=list)


class Tiers(Spills):
    """Objects, how they are written, and how they come back."""

    def __init__(
        self, book: Book, evictor: Evictor, pipelines: Pipelines, media: Mapping[str, Medium], most_waiting: int
    ) -> None:
        super().__init__(book, media, pipelines)
        self.evictor, self.most_waiting = evictor, most_waiting
        self.loads: dict[StoredObject, Load] = {}
        self.queue: deque[Load] = deque()
        self.turn = threading.Lock()

    def want(self, stored: StoredObject, need_until: int) -> "Future[bool] | None":
        """Queues a load, or joins the one that is queued; None where the tables refuse or the queue is full."""
        with self.ledger.atomic(self.ledger.event_id(self.ledger.store, "want")):
            running = self.loads.get(stored)
            if running is not None:
                return running.done
            # The record of an object that is gone may be another object's by now.
            if stored not in self.objects or len(self.loads) >= self.most_waiting:
                return None
            if not self.can(stored.entity, "want", need_until=need_until):
                return None
            self.fire(stored.entity, "want", need_until=need_until)
            load = self.loads[stored] = Load(stored)
            self.objects.move_to_end(stored)
            self.queue.append(load)
        self.pipelines.submit("io", self.pump)
        return load.done

    def pump(self) -> None:
        """Begins the loads whose turn it is, in the order of their tickets, and carries them out."""
        while True:
            with self.turn:
                with self.ledger.lock:
                    load = self.queue[0] if self.queue else None
                if load is None or not self.begin(load):
                    return
            if load.targets:
                self.carry_out(load)

    def begin(self, load: Load) -> bool:
        """Takes slot and memory for the load whose turn it is, or gives its turn up; False if it has to wait."""
        source, group = load.stored.entity, load.stored.group
        need = sum(group.size(*span) for span in load.stored.spans)
        moving = self.media[load.stored.medium].incoming(load.stored.name)._asdict()
        again = False
        while True:
            try:
                self.fire(source, "load_begin", need=need, **moving)
                break
            except Refused as refused:
                reason = self.ledger.pressure(refused)
                if reason == DEVICE:
                    if self.evictor.make_room(reason, group):
                        continue
                    self.leave_queue(load)
                    self.fire(source, "skip")
                    self.end(load, False, "load skipped: no memory")
                    return True
                with self.ledger.lock:
                    running = any(other not in self.queue for other in self.loads.values())
                if running:
                    return False  # another load has the slot; its end pumps again
                if not again:  # it may have ended between the refusal and the look
                    again = True
                    continue
                self.leave_queue(load)
                self.fire(source, "skip")
                self.end(load, False, f"load skipped: {refused.guard.text}")
                return True
        self.leave_queue(load)
        if not self.attach(load):
            self.fail(load, "load failed: no room in the kind's pool")
        return True

    def leave_queue(self, load: Load) -> None:
        """The load is not waiting any more."""
        with self.ledger.lock:
            self.queue.remove(load)

    def attach(self, load: Load) -> bool:
        """Every target takes its memory from the reservation; False if one cannot."""
        group, source = load.stored.group, load.stored.entity
        for key, span in zip(load.stored.keys, load.stored.spans, strict=True):
            segment = self.book.new_segment(group)
            copy = self.book.new_copy(source, segment.entity)
            ends = (source, segment.entity, copy)
            try:
                self.evictor.grant(segment, span, "restore_begin", ends, group, lo=span[0], hi=span[1])
            except Refused:
                with self.ledger.lock:
                    self.book.spare[group.index].append(segment)
                    self.book.copies.append(copy)
                return False
            segment.key = key
            load.targets.append((segment, copy))
        return True

    def carry_out(self, load: Load) -> None:
        """Reads, checks and publishes; the load may have been failed by its timer in the meantime."""
        stored, group, source = load.stored, load.stored.group, load.stored.entity
        try:
            parts = self.media[stored.medium].read(stored.name)
            self.check(stored, parts)
        except MediumError:
            with self.ledger.atomic(self.ledger.event_id(self.ledger.store, "rot")):
                if self.can(source, "rot"):
                    self.fire(source, "rot")
            self.fail(load, "load failed: MediumError")
            return
        for (segment, copy), part in zip(load.targets, parts, strict=True):
            self.book.write_blocks(segment, part, self.back[group.index])
            self.hand(group, "restore_part", source, segment.entity, copy, segment)
        try:
            self.fire(source, "verify")
        except Refused:
            self.fail(load, "load failed: timed out")
            return
        for segment, copy in load.targets:
            self.hand(group, "publish", source, segment.entity, copy, segment)
            with self.ledger.lock:
                self.book.keep(segment, stored if stored in self.objects else None)
                self.book.copies.append(copy)
            self.evictor.touch(segment)
        self.fire(source, "settle")
        self.end(load, True, "loaded")

    def check(self, stored: StoredObject, parts: Sequence[Tensor]) -> None:
        """The bytes are as many as the targets' blocks take; MediumError otherwise."""
        group = stored.group
        if [tuple(part.shape) for part in parts] != [self.shape(group, span) for span in stored.spans]:
            raise MediumError(f"{stored.location}: parts of another size")

    def fail(self, load: Load, outcome: str) -> None:
        """No target becomes readable; the object is tried again another time, or given up."""
        stored, source, group = load.stored, load.stored.entity, load.stored.group
        if self.can(source, "load_fail"):
            self.fire(source, "load_fail")
        for segment, copy in load.targets:
            segment.key = None
            self.hand(group, "discard", source, segment.entity, copy, segment)
            self.book.copies.append(copy)
        load.targets.clear()
        with self.ledger.lock:
            gone = not self.can(source, "settle_failed")
            if gone:
                self.forget(stored)
        if gone:
            self.media[stored.medium].delete(stored.name)
        self.fire(source, "give_up_object" if gone else "settle_failed")
        if gone:
            self.rest(group, source)
        self.end(load, False, outcome)

    def timer(self, stored: StoredObject) -> bool:
        """A load takes too long: no target of it will become readable, however late its bytes arrive."""
        try:
            with self.ledger.atomic(self.ledger.event_id(self.ledger.store, "load_fail")):
                if stored not in self.loads:
                    return False
                self.fire(stored.entity, "load_fail")
        except Refused:
            return False
        return True

    def end(self, load: Load, readable: bool, outcome: str) -> None:
        """Tells who waited, and lets the next load begin."""
        with self.ledger.lock:
            self.loads.pop(load.stored, None)
        self.note(outcome)
        load.done.set_result(readable)
        if self.queue:
            self.pipelines.submit("io", self.pump)
