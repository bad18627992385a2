"""What changes a cached segment without a request: another place, another cut, a ring turned to its positions.

Nobody may hold the segment; the rows see to that.  Where bytes move, the operation that the row names moves them.
"""

import numpy as np
import torch

from hybridkv_ref.allocator.arena import Slots
from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.handoffs import Handoffs
from hybridkv_ref.allocator.records import CacheSegment
from hybridkv_ref.allocator.segment_bytes import row_moves, whole_blocks
from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels.copy_blocks import copy_blocks


class Reshape:
    """Rows that move, cut and turn segments, for one allocator."""

    def __init__(self, book: Book, handoffs: Handoffs) -> None:
        self.book, self.ledger, self.handoffs = book, book.ledger, handoffs

    def move(self, segment: CacheSegment) -> None:
        """The bytes move to other slots, the lowest that are free: one step, since nothing holds the source meanwhile.

        Refused where somebody reads it; MemoryError where there are no other slots.
        """
        event = self.ledger.event_id(segment.kind, "move")
        with self.ledger.atomic(event):
            old, arena = slots_of(segment), self.book.arena(segment.group)
            new = arena.lowest(old.size)
            try:
                self.book.fire(segment, "move", off=arena.slack(new))
            except BaseException:
                arena.give(new)
                raise
            moves = whole_blocks(old.reshape(-1).tolist(), new.tolist(), arena.page.stride)
            self.ledger.kernel(event)(arena.bytes, arena.bytes, moves.to(arena.bytes.device), unit=8)
            segment.slots = new.reshape(old.shape)
            arena.give(old)

    def realign(self, segment: CacheSegment) -> None:
        """Turns the rows of a window, which lie as in a ring that begins elsewhere, to their positions.

        Refused where nothing is misaligned or somebody holds it.
        """
        group, phase = segment.group, segment.entity.mark
        gather = self.ledger.kernel(self.ledger.event_id(segment.kind, "realign_begin"))
        self.book.fire(segment, "realign_begin")
        slots, (lo, hi) = slots_of(segment), segment.token_range
        page, count, arena = group.page, group.rows(lo, hi), self.book.arena(group).bytes
        ring = page.resized(count)
        held, turned = (torch.zeros(group.layers, ring.stride, dtype=torch.uint8, device=arena.device) for _ in "ab")
        places = [
            (block, row % page.entries, layer, row)
            for layer, blocks in enumerate(slots.tolist())
            for row, block in ((row, blocks[row // page.entries]) for row in range(count))
        ]
        copy_blocks(arena, held, row_moves(page, ring, places).to(arena.device), unit=8)
        layers = torch.arange(group.layers, device=arena.device)
        gather(held, layers, torch.full_like(layers, phase), torch.full_like(layers, count), turned, ring, ring)
        back = [(layer, row, block, entry) for block, entry, layer, row in places]
        copy_blocks(turned, arena, row_moves(ring, page, back).to(arena.device), unit=8)
        self.book.wait()
        self.book.fire(segment, "realign_end")

    def split(self, segment: CacheSegment, cut: int, key: bytes | None = None) -> CacheSegment:
        """The blocks from ``cut`` on become a segment of their own, which is found by what found the whole; no byte
        moves.  ``key``: what the rest is found by.

        Refused where somebody holds it; InputError where ``cut`` lies inside a block.
        """
        group, (lo, hi) = segment.group, segment.token_range
        if lo < cut < hi and group.blocks(lo, cut) * group.page.entries != group.rows(lo, cut):
            raise InputError(f"split:cut: {cut} lies inside a block of {segment!r}")
        taken = self.book.new_segment(group)
        kept = group.blocks(lo, cut)
        with self.ledger.atomic(self.handoffs.event("split", segment, taken)):
            slots = slots_of(segment)
            off = self.book.arena(group).slack(slots[:, kept:])
            size, whole = group.size(cut, hi), segment.key

            def cut_slots() -> None:
                self.book.index.drop(segment)
                segment.slots, taken.slots = slots[:, :kept].copy(), slots[:, kept:].copy()
                segment.key, taken.key = key, whole

            try:
                self.handoffs.fire("split", segment, taken, before=cut_slots, cut=cut, size=size, off=off)
            except BaseException:
                self.book.spare[group.index].append(taken)
                raise
        return taken

    def join(self, first: CacheSegment, second: CacheSegment) -> None:
        """The blocks of the second become the end of the first, which is found by what found the second; no byte moves.

        Refused where they are no neighbours of one description, or somebody holds one of them.
        """
        with self.ledger.atomic(self.handoffs.event("join", first, second)):
            slots, key = np.concatenate((slots_of(first), slots_of(second)), axis=1), second.key

            def join_slots() -> None:
                self.book.index.drop(first)
                self.book.index.drop(second)
                first.slots, second.slots = slots, slots[:, :0].copy()
                first.key, second.key = key, None

            self.handoffs.fire("join", first, second, before=join_slots)


def slots_of(segment: CacheSegment) -> Slots:
    """int64 [layers, blocks]; InputError for a segment that holds no memory."""
    if segment.slots is None:
        raise InputError(f"{segment!r}: holds no memory")
    return segment.slots
