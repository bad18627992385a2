"""The bytes of segments: arenas, one per page layout, and the rows and blocks that move in and out of them."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from hybridkv_ref.allocator.arena import Arena, Slots
from hybridkv_ref.allocator.geometry import Geometry, GroupGeometry
from hybridkv_ref.allocator.ledger import Kernel
from hybridkv_ref.allocator.records import CacheSegment
from hybridkv_ref.layouts import Page


class SegmentBytes:
    """The arenas of one allocator."""

    def __init__(self, geometry: Geometry, caps: Mapping[str, int], device: torch.device | str, poison: bool) -> None:
        self.arenas: dict[Page, Arena] = {}
        for group in geometry.groups:
            if group.page not in self.arenas:
                # As many slots as the caps of all kinds with groups on this page could fill.
                kinds = {g.kind for g in geometry.groups if g.page == group.page}
                slots = sum(caps[kind] for kind in kinds) // group.page.stride
                self.arenas[group.page] = Arena(group.page, slots, device, poison)

    def arena(self, group: GroupGeometry) -> Arena:
        """The pool of a group's layout."""
        return self.arenas[group.page]

    def write_rows(self, segment: CacheSegment, first: int, rows: Tensor) -> None:
        """Stores rows ``first``, ... of a segment; uint8 [layers, rows, bytes of one entry], fields in order."""
        move_rows(self.arena(segment.group), segment.slots, first, rows, store=True)

    def read_rows(self, segment: CacheSegment, first: int, count: int) -> Tensor:
        """uint8 [layers, count, bytes of one entry] of a segment's rows."""
        page = segment.group.page
        width = sum(place.nbytes * page.heads for place in page.regions())
        out = torch.empty((segment.group.layers, count, width), dtype=torch.uint8, device=self.device)
        move_rows(self.arena(segment.group), segment.slots, first, out, store=False)
        return out

    def read_blocks(self, segment: CacheSegment, copy: Kernel) -> Tensor:
        """uint8 [layers * blocks, used bytes of a block], on the host; ``copy`` is the operation that moves them."""
        arena, slots = self.arena(segment.group), _flat(segment)
        staged = self.staging(segment.group, len(slots))
        copy(arena.bytes, staged, whole_blocks(slots, range(len(slots)), arena.page.stride), unit=8)
        self.wait()
        return staged[:, : arena.page.nbytes].contiguous()

    def write_blocks(self, segment: CacheSegment, blocks: Tensor, copy: Kernel) -> None:
        """The inverse of ``read_blocks``."""
        arena, slots = self.arena(segment.group), _flat(segment)
        staged = self.staging(segment.group, len(slots))
        staged[:, : arena.page.nbytes] = blocks
        copy(staged, arena.bytes, whole_blocks(range(len(slots)), slots, arena.page.stride), unit=8)
        self.wait()

    def staging(self, group: GroupGeometry, blocks: int) -> Tensor:
        """uint8 [blocks, stride] on the host, zeros; pinned where a device copies from or to it by itself."""
        return torch.zeros(blocks, group.page.stride, dtype=torch.uint8, pin_memory=self.device.type == "cuda")

    def wait(self) -> None:
        """Until the device has done what it was given."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    @property
    def device(self) -> torch.device:
        """Where the arenas are."""
        return next(iter(self.arenas.values())).bytes.device


def _flat(segment: CacheSegment) -> list[int]:
    slots: list[int] = [] if segment.slots is None else segment.slots.reshape(-1).tolist()
    return slots


def whole_blocks(sources: Sequence[int], targets: Sequence[int], stride: int) -> Tensor:
    """int64 [n, 5]: moves of whole blocks, as ``copy_blocks`` takes them."""
    moves = [[source, 0, target, 0, stride] for source, target in zip(sources, targets, strict=True)]
    return torch.tensor(moves, dtype=torch.int64).view(-1, 5)


def row_moves(old: Page, new: Page, places: Iterable[tuple[int, int, int, int]]) -> Tensor:
    """int64 [n, 5]: moves of single rows: (block, entry) of one arena to (block, entry) of another."""
    moves = [
        [a, r.base + i * r.entry_step + h * r.head_step, b, s.base + j * s.entry_step + h * s.head_step, r.count]
        for a, i, b, j in places
        for r, s in zip(old.regions(), new.regions(), strict=True)
        for h in range(old.heads)
    ]
    return torch.tensor(moves, dtype=torch.int64).view(-1, 5)


def move_rows(arena: Arena, slots: Slots | None, first: int, rows: Tensor, store: bool) -> None:
    """Between packed rows and the regions of pages: row i is entry i mod entries of block i // entries."""
    page = arena.page
    if slots is None or not rows.shape[1]:
        return
    index = torch.arange(first, first + rows.shape[1])
    block = torch.from_numpy(slots)[:, index // page.entries]
    offset = 0
    for place in page.regions():
        for head in range(page.heads):
            column = place.base + (index % page.entries)[:, None] * place.entry_step + head * place.head_step
            column = column + torch.arange(place.nbytes)
            at = (block[:, :, None], column[None])
            if store:
                arena.bytes[at] = rows[:, :, offset : offset + place.nbytes].to(arena.bytes.device)
            else:
                rows[:, :, offset : offset + place.nbytes] = arena.bytes[at]
            offset += place.nbytes
