"""Byte arenas: one pool of equal blocks per layout, with a null slot; freed blocks are poisoned.

A *slot* is the place of one layer's block.  Slot 0 is the null slot: it belongs to no segment, takes writes that
belong to no request, and reads as zeros after ``reset_null``.  Offsets are 64-bit: an arena may be larger than 4 GiB.
A pool reserves addresses for as many slots as the caps of the kinds that use it could fill; on the CPU, memory is
taken only where a slot is used.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hybridkv_ref.kernels._pages import empty_arena
from hybridkv_ref.layouts import Page

NULL_SLOT = 0
POISON = 0xFD
"""What every byte of a free slot is.  As e4m3 and bf16 it is a large negative number, so that a read of it shows."""

Slots = NDArray[np.int64]


class Arena:
    """uint8 [slots, page.stride] on ``device``; not thread-safe: the caller holds the ledger's lock."""

    def __init__(self, page: Page, slots: int, device: torch.device | str = "cpu", poison: bool = True) -> None:
        self.page, self.poison = page, poison
        self.bytes: Tensor = empty_arena(page, slots + 1, device)
        if poison:
            self.bytes.fill_(POISON)
        self.reset_null()
        self.free = list(range(slots, NULL_SLOT, -1))  # the last one is taken next, so slots are used from 1 on

    @property
    def base(self) -> int:
        """Address of slot 0."""
        return self.bytes.data_ptr()

    def reset_null(self) -> None:
        """Clears the null slot: what steps wrote there is not read as data."""
        self.bytes[NULL_SLOT].zero_()

    def take(self, count: int) -> Slots:
        """``count`` free slots, cleared; MemoryError where the caps of the tables promised more than there is."""
        if count > len(self.free):
            raise MemoryError(f"{self.page.layout.id}: {count} slots were granted, {len(self.free)} are free")
        cut = len(self.free) - count
        slots = np.array(self.free[cut:][::-1], dtype=np.int64)
        del self.free[cut:]
        if self.poison:
            self.bytes[torch.from_numpy(slots)] = 0
        return slots

    def lowest(self, count: int) -> Slots:
        """``count`` free slots with the least numbers, cleared; MemoryError where there are not so many."""
        self.free.sort(reverse=True)
        return self.take(count)

    def give(self, slots: Slots) -> None:
        """Takes slots back and poisons them."""
        flat = slots.reshape(-1)
        if self.poison and len(flat):
            self.bytes[torch.from_numpy(flat)] = POISON
        self.free.extend(flat[::-1].tolist())

    def offsets(self, slots: Slots) -> Slots:
        """int64, bytes from the base."""
        return slots * self.page.stride

    def slack(self, slots: Slots) -> int:
        """Bytes by which base plus offset of the worst of these slots miss the layout's alignment; 0 is right."""
        if not slots.size:
            return 0
        align = self.page.layout.base_align
        if self.page.stride % align == 0:  # then all slots miss it alike
            return self.base % align
        return int(((self.base + self.offsets(slots)) % align).max())
