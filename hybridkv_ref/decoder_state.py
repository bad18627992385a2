"""One request's working state: where the rows of every layer lie, and how they are moved.

The decoder knows nothing of memory but ``RunningState``: ``rows(layer, group)`` gives an object's ``Rows``: a byte
arena, a page, a block table and, for rings, the phase rule.  ``decoder_segments`` has the state in the reference
allocator.
``PrivateState`` is the plain form: arenas of its own, every byte poisoned (all ones: NaN in every layout) until it is
written, so that whatever reads a row which nobody made or restored shows it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from hybridkv_ref.decoder_geometry import Sizes, Stored
from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels.compress_pool_quant import compress_pool_quant
from hybridkv_ref.kernels.copy_blocks import copy_blocks
from hybridkv_ref.kernels.index_build import index_build
from hybridkv_ref.kernels.tail_append import tail_append
from hybridkv_ref.layouts import Page

POISON = 0xFF
Operation = Literal["append", "fold_begin"]
"""Rows of the tables between which the decoder runs the operation that they name."""


@dataclass(frozen=True)
class Rows:
    """Rows of one object of one layer.

    arena  uint8 [blocks, page.stride]
    table  int32 [1, M]: block of rows [j * page.entries, (j + 1) * page.entries); -1 is not there
    ring   rows of the ring: row p lies at p mod ring; 0: row p lies at p
    """

    arena: Tensor
    page: Page
    table: Tensor
    ring: int = 0

    def index(self, rows: Tensor) -> Tensor:
        """Where rows (int64, -1 is none) lie in the table's order."""
        return torch.where(rows < 0, -1, rows % self.ring) if self.ring else rows

    def slots(self, rows: Tensor) -> Tensor:
        """int64 slots of ``rows`` (any shape); -1 for rows that are not there."""
        flat = _pages.table_slots(self.table, 0, self.index(rows).flatten(), self.page)
        return flat.view(rows.shape)


def copy_rows(source: Rows, source_rows: Sequence[int], target: Rows, target_rows: Sequence[int]) -> None:
    """Moves the bytes of rows, format untouched; rows that the source does not hold are skipped."""
    starts = source.slots(torch.tensor(source_rows, dtype=torch.int64)).tolist()
    ends = target.slots(torch.tensor(target_rows, dtype=torch.int64)).tolist()
    moves = [
        [
            start // source.page.entries if start >= 0 else -1,
            old.base + start % source.page.entries * old.entry_step,
            end // target.page.entries,
            new.base + end % target.page.entries * new.entry_step,
            old.count,
        ]
        for start, end in zip(starts, ends, strict=True)
        if end >= 0
        for old, new in zip(source.page.regions(), target.page.regions(), strict=True)
    ]
    if moves:
        copy_blocks(source.arena, target.arena, torch.tensor(moves), unit=8)


def row_bytes(rows: Rows, listed: Sequence[int]) -> Tensor:
    """uint8 [n * bytes of a row]: what is stored, region by region as in a block of n rows, format untouched."""
    sizes = [region.count for region in rows.page.regions()]
    page = rows.page.resized(len(listed) or 1)
    out = Rows(poisoned(page, 1), page, torch.zeros(1, 1, dtype=torch.int32))
    copy_rows(rows, listed, out, range(len(listed)))
    return out.arena[0, : len(listed) * sum(sizes)].clone()


def poisoned(page: Page, blocks: int) -> Tensor:
    """uint8 [blocks, page.stride], every byte poisoned."""
    return _pages.empty_arena(page, blocks).fill_(POISON)


class RunningState(Protocol):
    """The memory of one running request, as the decoder uses it."""

    def rows(self, layer: int, group: str) -> Rows:
        """The rows of ``group`` in ``layer``."""

    def writes_from(self, group: str) -> int:
        """The first position whose window row a step writes: earlier ones are there already."""

    def operation(self, row: Operation, group: str) -> Callable[..., Tensor]:
        """The operation of ``kernels/`` by which rows come into this group, or a tail's become entries."""

    def begins(self, layer: int) -> int:
        """The first position that a layer knows: a window has no row before it (a truncated window, where some query
        would see one), a recurrent layer computes nothing before it and finds its state there.
        """


class PrivateState:
    """Arenas of one request's own.  ``keep_all``: no ring, nothing slides away: the run from scratch."""

    def __init__(self, stored: Sequence[Stored], sizes: Sizes, keep_all: bool = False) -> None:
        self._sizes, self._keep_all = sizes, keep_all
        self._begins: dict[int, int] = {}
        self._windows = {(item.layer, item.group): item.need for item in stored if item.shape == "window"}
        self._tails = {item.group for item in stored if item.shape == "ring"}
        self._rows = {(item.layer, item.group): self._place(item) for item in stored}

    def _place(self, item: Stored) -> Rows:
        paged = self._keep_all or item.shape == "entries" or (item.shape == "window" and not self._sizes.ring_windows)
        ring = 0 if paged else item.keep + self._sizes.max_step
        blocks = -(-(ring or self._sizes.reach // item.ratio) // item.page.entries)
        table = torch.arange(blocks, dtype=torch.int32)[None]
        return Rows(poisoned(item.page, blocks), item.page, table, ring)

    def rows(self, layer: int, group: str) -> Rows:
        """The rows of ``group`` in ``layer``."""
        return self._rows[layer, group]

    def writes_from(self, group: str) -> int:
        """0: what was restored is a copy of its own."""
        return 0

    def operation(self, row: Operation, group: str) -> Callable[..., Tensor]:
        """``tail_append`` and ``compress_pool_quant`` of tails, ``index_build`` of windows and states."""
        if row == "append":
            return tail_append if group in self._tails else index_build
        return compress_pool_quant

    def begins(self, layer: int) -> int:
        """The first position that a layer knows."""
        return self._begins.get(layer, 0)

    def begin_at(self, layer: int, position: int) -> None:
        """A layer knows nothing before ``position``."""
        self._begins[layer] = position

    def slide(self, position: int) -> None:
        """Gives up the blocks of paged windows that no query at or after ``position`` sees: null slots from now on."""
        if self._keep_all:
            return
        for place, need in self._windows.items():
            rows = self._rows[place]
            if not rows.ring:
                gone = need(position, position)[0] // rows.page.entries
                rows.arena[:gone] = POISON
                rows.table[0, :gone] = -1
