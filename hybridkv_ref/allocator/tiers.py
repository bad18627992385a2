"""Tiers: durable copies of segments, and the loads that bring them back, each step a row of the tables.

A spill writes an object of one or more neighbouring segments of one group; it counts once it is sealed.  A load waits
with a ticket for its turn, takes its I/O slot and the memory of all its targets at once, reads outside the lock, and
turns the targets readable only after every part arrived and the checksum held.  Whatever goes wrong ends in the rows
that fail: a load that failed is a miss.  Work that moves bytes runs on the io pipeline; at most ``most_waiting`` loads
are in the queue.
"""

import threading
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.eviction import Evictor
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.media import Description, Medium, MediumError, on_host
from hybridkv_ref.allocator.pipelines import Pipelines
from hybridkv_ref.allocator.records import CacheSegment, StoredObject
from hybridkv_ref.compile_py import attribute
from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import refs
from hybridkv_ref.lanes import DEVICE, pressure
from hybridkv_ref.machine import Refused


@dataclass(eq=False, slots=True)
class Load:
    """A durable copy on its way back; ``done`` gives whether its targets became readable."""

    stored: StoredObject
    done: "Future[bool]" = field(default_factory=Future)
    targets: list[tuple[CacheSegment, Any]] = field(default_factory=list)


class Tiers:
    """The durable copies of one allocator, on media in the order in which they are tried."""

    def __init__(
        self,
        book: Book,
        evictor: Evictor,
        pipelines: Pipelines,
        media: Mapping[str, Medium],
        parts: int,
        most_waiting: int,
    ) -> None:
        self.book, self.ledger, self.evictor, self.pipelines, self.media = book, book.ledger, evictor, pipelines, media
        self.most_waiting, self.parts = most_waiting, parts
        self.lane = self.ledger.lanes[0]
        self.objects: OrderedDict[StoredObject, None] = OrderedDict()  # the least recently wanted first
        self.loads: dict[StoredObject, Load] = {}
        self.queue: deque[Load] = deque()
        self.spills: dict[CacheSegment, Future[StoredObject | None]] = {}
        self.turn = threading.Lock()
        self.spare: dict[tuple[int, str, int], list[Any]] = {}
        event = self.ledger.event_id
        self.pressed_load = pressure(self.ledger.tables.event(event(self.ledger.store, "load_begin")))
        self.pressed = [
            pressure(self.ledger.tables.event(event(g.kind, "restore_begin"))) if self.restores(g) else []
            for g in book.geometry.groups
        ]
        self.outcomes: dict[str, int] = {}
        (self.survivor,) = [s for s in self.ledger.tables.survivors if s.kind == self.ledger.store]

    def restores(self, group: GroupGeometry) -> bool:
        """Whether a way back from a tier exists for a group: only then does a tier take it."""
        return self.ledger.has(group.kind, "spill_begin") and self.ledger.has(group.kind, "restore_begin")

    def note(self, outcome: str) -> None:
        """Counts how spills and loads ended."""
        with self.ledger.lock:
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1
            self.ledger.changed.notify_all()

    # -- rows of objects -----------------------------------------------------------------------------------------------
    def fire(self, entity: Any, row: str, **inputs: int) -> None:
        """A row of one object."""
        self.ledger.fire(self.lane, self.ledger.event_id(self.ledger.store, row), entity, settle=None, **inputs)

    def can(self, entity: Any, row: str, **inputs: int) -> bool:
        """Whether it could fire now."""
        return self.ledger.allows(self.lane, self.ledger.event_id(self.ledger.store, row), entity, **inputs)

    def hand(
        self, group: GroupGeometry, row: str, src: Any, dst: Any, copy: Any, segment: CacheSegment, **inputs: int
    ) -> None:
        """A handoff between an object and a segment, in the lane of the segment's group."""
        lane = self.ledger.lane_of[group.name]
        event = self.ledger.event_id(group.kind, row)
        self.ledger.fire(lane, event, src, dst, copy, settle=lambda: self.book.settle(segment), **inputs)

    def new_object(self, group: GroupGeometry, medium: str, parts: int) -> Any:
        """A record of an object that does not exist yet."""
        with self.ledger.lock:
            spare = self.spare.setdefault((group.index, medium, parts), [])
            if spare:
                return spare.pop()
            return self.ledger.maker(
                self.lane, "segment", self.ledger.store, medium=medium, parts=parts, group=group.index
            )()

    def rest(self, group: GroupGeometry, entity: Any) -> None:
        """An object's record may be used again."""
        with self.ledger.lock:
            self.spare.setdefault((group.index, entity.medium, entity.parts), []).append(entity)

    # -- spill ---------------------------------------------------------------------------------------------------------
    def spill(self, segments: Sequence[CacheSegment]) -> "Future[StoredObject | None]":
        """Writes one durable copy of neighbouring segments of one group; None where it cannot be had.

        A copy that is there or being written already is not written twice.
        """
        with self.ledger.lock:
            running = self.spills.get(segments[0])
            if running is None:
                running = self.spills[segments[0]] = self.pipelines.submit("io", self.write, list(segments))
            return running

    def write(self, segments: list[CacheSegment]) -> StoredObject | None:
        """The spill itself, on the io pipeline."""
        try:
            return self.write_object(segments)
        finally:
            with self.ledger.lock:
                self.spills.pop(segments[0], None)
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
            parts = [on_host(self.book.read_blocks(segment)) for segment in segments]
            name = f"{keys[0].hex()}-{group.name}-{uuid.uuid4().hex[:12]}"
            self.media[medium].write(name, parts, self.describe(entity, group, keys, spans, len(parts)))
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
        with self.ledger.lock:
            self.fire(entity, "seal")
            self.adopt_object(stored)
            for segment in segments:
                if segment.key in keys:
                    segment.stored = stored
        self.note("spilled")
        return stored

    def stored(self, segment: CacheSegment) -> StoredObject | None:
        """The durable copy of what a segment holds, if there is one."""
        node = self.book.index.nodes.get(segment.key) if segment.key is not None else None
        return None if node is None else node.objects[segment.group.index]

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
        for last, medium in enumerate(self.media, 1):
            entity = self.new_object(group, medium, len(segments))
            while True:
                try:
                    self.fire(entity, "open_object", **inputs)
                except Refused as refused:
                    room = any(ref.role == "global" for ref in refs(refused.guard.expr))
                    # The last medium makes room by erasing; the ones before it pass on.
                    if not room or last < len(self.media) or not self.erase_one(medium):
                        self.rest(group, entity)
                        break
                else:
                    return entity, medium
        return None

    def describe(
        self, entity: Any, group: GroupGeometry, keys: tuple[bytes, ...], spans: tuple[tuple[int, int], ...], parts: int
    ) -> Description:
        """What a new process must know of an object: what the tables say survives, as it will be once sealed."""
        kept = {name: getattr(entity, attribute(name)) for name in self.survivor.keep}
        kept |= {"written": parts, "intact": True}
        about: dict[str, int | str | bool] = {f"kept.{name}": value for name, value in kept.items()}
        about |= {"group": group.name, "kind": group.kind, "parts": parts, "medium": entity.medium}
        about |= {"keys": ",".join(key.hex() for key in keys), "spans": ",".join(f"{a}:{b}" for a, b in spans)}
        return about

    def adopt_object(self, stored: StoredObject) -> None:
        """An object is there from now on; called under the lock."""
        self.objects[stored] = None
        self.book.index.put_object(stored)

    def erase_one(self, medium: str) -> bool:
        """Gives the space of the object back that was wanted least recently; False if none may go."""
        with self.ledger.lock:
            candidates = [o for o in self.objects if o.medium == medium]
        return any(self.erase(stored) for stored in candidates)

    def erase(self, stored: StoredObject) -> bool:
        """Deletes one object, unless it is wanted."""
        try:
            self.fire(stored.entity, "retire")
        except Refused:
            return False
        with self.ledger.lock:
            self.forget(stored)
        self.media[stored.medium].delete(stored.name)
        self.fire(stored.entity, "erase")
        self.rest(stored.group, stored.entity)
        return True

    def forget(self, stored: StoredObject) -> None:
        """An object is found no more; called under the lock."""
        self.objects.pop(stored, None)
        self.book.index.drop_object(stored)
        for key in stored.keys:
            node = self.book.index.nodes.get(key)
            segment = None if node is None else node.segments[stored.group.index]
            if segment is not None and segment.stored is stored:
                segment.stored = None

    # -- load ----------------------------------------------------------------------------------------------------------
    def want(self, stored: StoredObject, need_until: int) -> "Future[bool] | None":
        """Queues a load, or joins the one that is queued; None where the tables refuse or the queue is full."""
        with self.ledger.lock:
            running = self.loads.get(stored)
            if running is not None:
                return running.done
            if len(self.loads) >= self.most_waiting or not self.can(stored.entity, "want", need_until=need_until):
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
        again = False
        while True:
            try:
                self.fire(source, "load_begin", need=need)
                break
            except Refused as refused:
                reason = self.pressed_load[refused.event.guards.index(refused.guard)]
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
        for key, (lo, hi) in zip(load.stored.keys, load.stored.spans, strict=True):
            segment = self.book.new_segment(group)
            copy = self.book.new_copy(source, segment.entity)

            def restore(
                size: int, slack: int, to: CacheSegment = segment, by: Any = copy, a: int = lo, b: int = hi
            ) -> None:
                self.hand(group, "restore_begin", source, to.entity, by, to, size=size, lo=a, hi=b, off=slack)

            while True:
                try:
                    self.book.grant(segment, lo, hi, "restore_begin", restore)
                except Refused as refused:
                    reason = self.pressed[group.index][refused.event.guards.index(refused.guard)]
                    if reason and self.evictor.make_room(reason, group):
                        continue
                    with self.ledger.lock:
                        self.book.spare[group.index].append(segment)
                        self.book.copies.append(copy)
                    return False
                break
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
            with self.ledger.lock:
                if self.can(source, "rot"):
                    self.fire(source, "rot")
            self.fail(load, "load failed: MediumError")
            return
        for (segment, copy), part in zip(load.targets, parts, strict=True):
            self.book.write_blocks(segment, part)
            self.hand(group, "restore_part", source, segment.entity, copy, segment)
        try:
            self.fire(source, "verify")
        except Refused:
            self.fail(load, "load failed: timed out")
            return
        for segment, copy in load.targets:
            self.hand(group, "publish", source, segment.entity, copy, segment)
            with self.ledger.lock:
                segment.stored = stored if stored in self.objects else None
                self.book.copies.append(copy)
            self.evictor.touch(segment)
        self.fire(source, "settle")
        self.end(load, True, "loaded")

    def check(self, stored: StoredObject, parts: Sequence[Tensor]) -> None:
        """The bytes are as many as the targets' blocks take; MediumError otherwise."""
        group = stored.group
        sizes = [[group.layers * group.blocks(*span), group.page.nbytes] for span in stored.spans]
        if [list(part.shape) for part in parts] != sizes:
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

    # -- a new process -------------------------------------------------------------------------------------------------
    def reopen(self, medium: str, group_of: Callable[[str], GroupGeometry]) -> int:
        """Finds what an earlier process sealed on a medium: the state that the tables' crash leaves.  Gives their
        count.

        Objects of another layout, model or schema are passed over.
        """
        found = 0
        for name, about in self.media[medium].objects():
            try:
                group = group_of(str(about["group"]))
                keys = tuple(bytes.fromhex(key) for key in str(about["keys"]).split(","))
                spans = tuple((int(a), int(b)) for a, b in (span.split(":") for span in str(about["spans"]).split(",")))
                kept = {name: about[f"kept.{name}"] for name in self.survivor.keep}
                fits = (
                    about["kind"] == group.kind
                    and about["medium"] == medium
                    and kept["abi"] == self.book.abi[group.index]
                )
            except (InputError, KeyError, ValueError):
                continue
            if not fits or len(keys) != len(spans) or about["parts"] != len(keys):
                continue
            with self.ledger.lock:
                entity = self.new_object(group, medium, len(keys))
                entity.stage = self.survivor.to
                for variable, value in kept.items():
                    setattr(entity, attribute(variable), value)
                guards = self.lane.world.machine.survivors[self.ledger.store][0][1]
                if all(guard(self.ledger.pool, entity) for guard in guards):
                    location = self.media[medium].location(name)
                    self.adopt_object(StoredObject(group, entity, medium, name, location, keys, spans))
                    found += 1
            self.recount()
        return found

    def recount(self) -> None:
        """The sums of the pool over what survived."""
        world = self.lane.world
        for name, var in self.ledger.tables.globals.items():
            if not var.durable and var.sums:
                setattr(world.pool, attribute(name), world.recount(var))
