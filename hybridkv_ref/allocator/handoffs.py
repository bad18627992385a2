"""Handoffs between two segments on the device: private copies, folds, and taking folds back.

A copy or a fold is two rows with a kernel between them: the one that the row which begins names.  A clone runs it here;
a fold's runs in the step of the model that pools the rows, between ``fold_begin`` and ``fold_end``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.eviction import Evictor
from hybridkv_ref.allocator.records import CacheSegment, Lease, Request
from hybridkv_ref.allocator.segment_bytes import row_moves, whole_blocks
from hybridkv_ref.errors import InputError
from hybridkv_ref.machine import Refused


@dataclass(frozen=True, eq=False, slots=True)
class Fold:
    """Rows of a tail that become one entry: between the row that begins and the one that ends."""

    tail: CacheSegment
    entries: CacheSegment
    copy: Any


class Handoffs:
    """Rows of two segments of one allocator."""

    def __init__(self, book: Book, evictor: Evictor) -> None:
        self.book, self.ledger, self.evictor = book, book.ledger, evictor

    def event(self, row: str, src: CacheSegment, dst: CacheSegment) -> str:
        """The event of a handoff between these segments."""
        return self.ledger.handoff_id(row, src.kind, dst.kind)

    def fire(
        self,
        row: str,
        src: CacheSegment,
        dst: CacheSegment,
        *copy: Any,
        before: Callable[[], None] | None = None,
        **inputs: int,
    ) -> None:
        """A handoff in the lane of its source, whose constants are those of both; ``before`` the books are settled."""

        def settle(source: CacheSegment) -> None:
            if before is not None:
                before()
            self.book.settle(source)
            self.book.settle(dst)

        lane, entities = self.ledger.lane_of[src.group.name], (src.entity, dst.entity, *copy)
        self.ledger.run(lane, self.event(row, src, dst), entities, inputs, settle, src)

    # -- clones --------------------------------------------------------------------------------------------------------
    def clone(self, source: CacheSegment, key: bytes | None = None) -> CacheSegment:
        """A complete copy of a segment that nobody holds; ``key``: that it is found by.

        Refused where a cap is reached and nothing can make way; then nothing has changed.
        """
        target, copy = self.copied(source, 0)
        target.key = key
        self.clone_end(source, target, copy)
        return target

    def resume(self, source: CacheSegment, request: Request, ring: int = 0) -> CacheSegment:
        """A copy of a segment that ``request`` writes on in; ``ring``: its rows lie in a ring of so many."""
        target, copy = self.copied(source, ring)
        with self.ledger.atomic(self.event("clone_end", source, target)):
            self.clone_end(source, target, copy)
            self.reopen(target, request)
        return target

    def copied(self, source: CacheSegment, ring: int) -> tuple[CacheSegment, Any]:
        """A copy whose bytes are there and that does not count yet, and the record of the copying."""
        target = self.book.new_segment(source.group)
        copy = self.book.new_copy(source.entity, target.entity)
        entities, span = (source.entity, target.entity, copy), (0, ring) if ring else source.token_range
        try:
            self.evictor.grant(target, span, "clone_begin", entities)
        except BaseException:
            with self.ledger.lock:
                self.book.spare[source.group.index].append(target)
                self.book.copies.append(copy)
            raise
        target.ring = ring
        try:
            arena = self.book.arena(source.group).bytes
            run = self.ledger.kernel(self.event("clone_begin", source, target))
            run(arena, arena, self.moves(source, target).to(arena.device), unit=8)
        except BaseException:
            self.fire("clone_fail", source, target, copy)
            raise
        return target, copy

    def clone_end(self, source: CacheSegment, target: CacheSegment, copy: Any) -> None:
        """The copy counts from now on."""
        with self.ledger.lock:
            self.book.tick(target)
        self.fire("clone_end", source, target, copy)
        with self.ledger.lock:
            self.book.copies.append(copy)

    def moves(self, source: CacheSegment, target: CacheSegment) -> Tensor:
        """What ``copy_blocks`` has to move, for every layer: whole states, or rows by their positions."""
        page, (lo, hi) = source.group.page, source.token_range
        if source.slots is None or target.slots is None:
            raise InputError(f"{source!r}:clone: a side of the copy holds no memory")
        if source.group.whole:
            return whole_blocks(source.slots[:, 0].tolist(), target.slots[:, 0].tolist(), page.stride)
        ends = [(place_of(source, position), place_of(target, position)) for position in range(lo, hi)]
        places = [
            (old[a // page.entries], a % page.entries, new[b // page.entries], b % page.entries)
            for old, new in zip(source.slots.tolist(), target.slots.tolist(), strict=True)
            for a, b in ends
        ]
        return row_moves(page, page, places)

    def reopen(self, segment: CacheSegment, request: Request) -> Lease:
        """A request writes on in a complete segment that nobody else holds."""
        lease = self.book.new_lease(segment, request)
        with self.ledger.atomic(self.ledger.event_id(segment.kind, "reopen")):
            try:
                self.book.fire_lease(lease, "reopen")
            except Refused:
                self.book.close_lease(lease)
                raise
            self.evictor.leave(segment)
            request.writing.append(lease)
        return lease

    # -- folds ---------------------------------------------------------------------------------------------------------
    def fold_begin(self, tail: CacheSegment, entries: CacheSegment) -> Fold:
        """The rows from the tail's boundary on may be pooled into the next entry; they are held until it exists."""
        fold = Fold(tail, entries, self.book.new_copy(tail.entity, entries.entity))
        try:
            self.fire("fold_begin", tail, entries, fold.copy)
        except Refused:
            with self.ledger.lock:
                self.book.copies.append(fold.copy)
            raise
        return fold

    def fold_end(self, fold: Fold, failed: bool = False) -> None:
        """The entry exists and the boundary has moved, in one step; ``failed``: nothing has."""
        self.fire("fold_fail" if failed else "fold_end", fold.tail, fold.entries, fold.copy)
        with self.ledger.lock:
            self.book.copies.append(fold.copy)

    def unfold(self, tail: CacheSegment, entries: CacheSegment) -> None:
        """The last entry was pooled from drafts that are refused: both sides go back by one."""
        self.fire("unfold", tail, entries)


def place_of(segment: CacheSegment, position: int) -> int:
    """Where the row of a position lies in the blocks of a segment that stores a row per position."""
    return position % segment.ring if segment.ring else position - segment.token_range[0]
