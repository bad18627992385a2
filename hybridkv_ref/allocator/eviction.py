"""Safeguard 2: which segments make way, in the order of ``policy.toml``; mark, test again, then free or un-mark.

Each rank has its own order of last use.  Nothing makes way for what the policy would evict before it.  Where the policy
asks for a durable copy first, it is written before the mark.
"""

import itertools
from collections import OrderedDict
from collections.abc import Callable, Container

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.records import CacheSegment
from hybridkv_ref.expr import refs
from hybridkv_ref.lanes import DEVICE
from hybridkv_ref.machine import Entity, Refused
from hybridkv_ref.policy import Policy


class Evictor:
    """The orders of eviction of one allocator."""

    def __init__(self, book: Book, policy: Policy) -> None:
        self.book, self.ledger, self.policy = book, book.ledger, policy
        self.own = [policy.kinds[g.kind] for g in book.geometry.groups]
        kinds = list(dict.fromkeys(g.kind for g in book.geometry.groups))
        self.ranks = sorted({rank for own in policy.kinds.values() for rank in (own.evict, own.evict_durable)})
        self.queues: dict[int, dict[str, OrderedDict[CacheSegment, None]]] = {
            rank: {kind: OrderedDict() for kind in kinds} for rank in self.ranks
        }
        self.place: dict[CacheSegment, int] = {}
        self.before: Callable[[CacheSegment], None] | None = None
        self.evicted: dict[str, int] = {g.kind: 0 for g in book.geometry.groups}
        self.idle = [self.idle_of(g) for g in book.geometry.groups]
        book.on_rest, book.on_empty = self.enter, self.leave

    def rank(self, segment: CacheSegment) -> int:
        """The policy's rank of a segment as it is now."""
        own = self.own[segment.group.index]
        return own.evict if segment.stored is None else own.evict_durable

    def idle_of(self, group: GroupGeometry) -> Callable[[CacheSegment], bool]:
        """Whether nobody holds a segment of this group: what the row that frees asks for besides the stage."""
        event = self.ledger.tables.event(self.ledger.event_id(group.kind, "free"))
        world = self.ledger.lane_of[group.name].world
        asked = [g.expr for g in event.guards if all(ref.name != "stage" for ref in refs(g.expr))]
        return lambda segment: all(world.machine.predicate(e, event.scope)(world.pool, segment.entity) for e in asked)

    def enter(self, segment: CacheSegment) -> None:
        """A segment may be evicted from now on, or its rank may have changed; called under the lock."""
        rank = self.rank(segment)
        if self.place.get(segment) == rank:
            return
        self.leave(segment)
        self.place[segment], queue = rank, self.queues[rank][segment.kind]
        if not queue or next(reversed(queue)).last_accessed <= segment.last_accessed:
            queue[segment] = None
            return
        later = list(itertools.takewhile(lambda s: s.last_accessed > segment.last_accessed, reversed(queue)))
        queue[segment] = None
        for other in reversed(later):
            queue.move_to_end(other)

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

    def grant(
        self,
        segment: CacheSegment,
        span: tuple[int, int],
        row: str,
        entities: tuple[Entity, ...],
        group: GroupGeometry | None = None,
        /,
        **inputs: int,
    ) -> None:
        """As ``Book.grant``, with room made while a cap refuses; ``group`` as in ``make_room``."""
        while True:
            try:
                return self.book.grant(segment, span, row, entities, **inputs)
            except Refused as refused:
                if not self.make_room(self.ledger.pressure(refused), group):
                    raise

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
        """The segment of a rank that was used least recently, of those that nobody holds."""
        queues = self.queues[rank]
        with self.ledger.lock:
            chosen = queues.values() if reason == DEVICE else (queues[reason],) if reason in queues else ()
            heads = (
                next((s for s in queue if self.idle[s.group.index](s) and s not in tried), None) for queue in chosen
            )
            return min((s for s in heads if s is not None), key=lambda s: s.last_accessed, default=None)

    def evict(self, segment: CacheSegment, durable: bool = True) -> bool:
        """Gives one segment's memory back; False, with nothing changed, if somebody holds it.

        ``durable``: with a durable copy first, where the policy asks for one.
        """
        if not self.idle[segment.group.index](segment) or not self.book.allows(segment, "retire"):
            return False  # not worth a mark or a durable copy: it is held, being written, moved or given up already
        if durable and self.before is not None and segment.stored is None and self.policy.kinds[segment.kind].spill:
            self.before(segment)
        try:
            self.book.fire(segment, "retire")
        except Refused:
            return False
        return self.finish(segment) is None

    def finish(self, segment: CacheSegment) -> Refused | None:
        """What is marked is freed, or un-marked where the tables let it be; why it was not freed.

        With neither, a step in flight may still read it: the sweep after that step comes back to it.
        """
        with self.ledger.atomic(self.ledger.event_id(segment.kind, "free")):
            try:
                self.book.fire(segment, "free")
            except Refused as refused:
                if self.book.allows(segment, "unmark"):
                    self.book.fire(segment, "unmark")
                return refused
            self.evicted[segment.kind] += 1
            return None

    def sweep(self) -> None:
        """Frees or un-marks what was marked and could not go at once."""
        with self.ledger.lock:
            marked = [s for s in self.place if self.book.allows(s, "free") or self.book.allows(s, "unmark")]
        for segment in marked:
            self.finish(segment)

    def empty(self) -> None:
        """Evicts everything that nobody holds, without durable copies."""
        with self.ledger.lock:
            every = list(self.place)
        for segment in every:
            self.evict(segment, durable=False)

    def held(self) -> bool:
        """Whether somebody holds a segment: a request, or a step in flight; called under the lock."""
        return any(not self.idle[segment.group.index](segment) for segment in self.place)
