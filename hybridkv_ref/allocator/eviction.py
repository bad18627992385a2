"""Safeguard 2: which segments make way, in the order of ``policy.toml``; mark, test again, then free or un-mark.

Each rank has its own order of last use.  Nothing makes way for what the policy would evict before it.  Where the policy
asks for a durable copy first, it is written before the mark.
"""

from collections import OrderedDict
from collections.abc import Callable, Container

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.records import CacheSegment
from hybridkv_ref.lanes import DEVICE
from hybridkv_ref.machine import Refused
from hybridkv_ref.policy import Policy


class Evictor:
    """The orders of eviction of one allocator."""

    def __init__(self, book: Book, policy: Policy) -> None:
        self.book, self.ledger, self.policy = book, book.ledger, policy
        kinds = list(dict.fromkeys(g.kind for g in book.geometry.groups))
        self.ranks = sorted({rank for own in policy.kinds.values() for rank in (own.evict, own.evict_durable)})
        self.queues: dict[int, dict[str, OrderedDict[CacheSegment, None]]] = {
            rank: {kind: OrderedDict() for kind in kinds} for rank in self.ranks
        }
        self.place: dict[CacheSegment, int] = {}
        self.before: Callable[[CacheSegment], None] | None = None
        self.evicted: dict[str, int] = {g.kind: 0 for g in book.geometry.groups}
        book.on_rest, book.on_empty = self.enter, self.leave

    def rank(self, segment: CacheSegment) -> int:
        """The policy's rank of a segment as it is now."""
        own = self.policy.kinds[segment.kind]
        return own.evict if segment.stored is None else own.evict_durable

    def enter(self, segment: CacheSegment) -> None:
        """A segment may be evicted from now on; called under the lock."""
        if segment not in self.place:
            self.place[segment] = rank = self.rank(segment)
            self.queues[rank][segment.kind][segment] = None

    def leave(self, segment: CacheSegment) -> None:
        """It may not any more, or is gone."""
        rank = self.place.pop(segment, None)
        if rank is not None:
            del self.queues[rank][segment.kind][segment]

    def touch(self, segment: CacheSegment) -> None:
        """It was used now: to the end of the order that fits it."""
        with self.ledger.lock:
            self.book.tick(segment)
            if segment in self.place:
                self.leave(segment)
                self.enter(segment)

    def make_room(self, reason: str, group: GroupGeometry | None) -> bool:
        """Evicts one segment for one of this group, of the kind whose cap was reached or of any on the device.

        ``reason`` is as in ``lanes.pressure``; without a group, anything may go.  False where nothing is asked for or
        nothing may go.
        """
        if not reason:
            return False
        own = None if group is None else self.policy.kinds[group.kind].evict
        tried: set[CacheSegment] = set()
        for rank in self.ranks:
            if own is not None and rank > own:
                break
            while (segment := self.oldest(rank, reason, tried)) is not None:
                if self.evict(segment):
                    return True
                tried.add(segment)
        return False

    def oldest(self, rank: int, reason: str, tried: Container[CacheSegment]) -> CacheSegment | None:
        """The segment of a rank that was used least recently, of those that nobody pins."""
        queues = self.queues[rank]
        with self.ledger.lock:
            chosen = queues.values() if reason == DEVICE else (queues[reason],) if reason in queues else ()
            heads = (next((s for s in queue if not s.entity.pins and s not in tried), None) for queue in chosen)
            return min((s for s in heads if s is not None), key=lambda s: s.last_accessed, default=None)

    def evict(self, segment: CacheSegment) -> bool:
        """Gives one segment's memory back; False, with nothing changed, if somebody holds it."""
        if not self.book.allows(segment, "retire"):
            return False  # not worth a durable copy: it is being written, moved or given up already
        if self.before is not None and segment.stored is None and self.policy.kinds[segment.kind].spill:
            self.before(segment)
        try:
            self.book.fire(segment, "retire")
        except Refused:
            return False
        return self.finish(segment)

    def finish(self, segment: CacheSegment) -> bool:
        """The pins are tested again: freed, or un-marked."""
        while True:
            try:
                self.book.fire(segment, "free")
            except Refused:
                pass
            else:
                self.evicted[segment.kind] += 1
                return True
            try:
                self.book.fire(segment, "unmark")
            except Refused:
                if segment.stage not in self.ledger.sets(segment.kind, "EVICTING"):
                    return False
                if segment.entity.steps:  # a step in flight may still read it: it goes when that step completes
                    return False
            else:
                return False

    def sweep(self) -> None:
        """Frees or un-marks what was marked and could not go at once."""
        with self.ledger.lock:
            marked = [s for s in self.place if s.stage in self.ledger.sets(s.kind, "EVICTING")]
        for segment in marked:
            self.finish(segment)

    def empty(self) -> None:
        """Evicts everything that nobody holds, without durable copies."""
        with self.ledger.lock:
            every = list(self.place)
        before, self.before = self.before, None
        try:
            for segment in every:
                self.evict(segment)
        finally:
            self.before = before
