"""Memory and contents of a batched decode step: an arena per object and layer, and the static buffers that steps read.

Requests stand in the rows of a batch.  For every step the host writes *contents* in place: tokens, positions, block
tables, slots.  Arenas and content buffers never move by themselves; block 0 of every arena is the null block.  A row
without a token is padding: its slots are -1, which kernels skip, and its row in the block tables is -1.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_geometry import Stored
from hybridkv_ref.decoder_state import POISON
from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels.copy_blocks import copy_blocks
from hybridkv_ref.layouts import Page

NULL_BLOCK, PADDING = 0, -1


@dataclass(frozen=True)
class Form:
    """How one group lies in memory.

    ``ratio``: tokens of one stored row; ``page``: one block; ``ring``: after so many rows their places come back, 0 is
    never; ``width``: blocks of one request.
    """

    shape: str
    ratio: int
    page: Page
    ring: int
    width: int

    def place(self, row: int) -> tuple[int, int]:
        """Block of the table and index in it of a row."""
        return divmod(row % self.ring if self.ring else row, self.page.entries)


@dataclass
class Batch:
    """Blocks of the requests: by group, a list per row of the batch; -1 is not there."""

    blocks: dict[str, list[list[int]]] = field(default_factory=dict)
    free: dict[str, list[int]] = field(default_factory=dict)


class BatchMemory:
    """Arenas and contents for ``rows`` requests of ``decoder`` on ``device``, with ``spare`` blocks more per group."""

    def __init__(self, decoder: Decoder, rows: int, device: torch.device | str = "cpu", spare: int = 2) -> None:
        self.sizes, self.rows, self.device = decoder.sizes, rows, torch.device(device)
        folds = [folded for plan in decoder.plans for folded in (plan.entries, plan.index) if folded is not None]
        self.tails = {folded.entries: folded for folded in folds}
        self.forms: dict[str, Form] = {item.group: self._form(item) for item in decoder.stored}
        self.arenas: dict[tuple[int, str], Tensor] = {}
        for item in decoder.stored:
            form = self.forms[item.group]
            arena = _pages.empty_arena(form.page, rows * form.width + spare + 1, self.device).fill_(POISON)
            arena[NULL_BLOCK] = 0
            self.arenas[item.layer, item.group] = arena
        self.batch = Batch()
        for group, form in self.forms.items():
            self.batch.blocks[group] = [[PADDING] * form.width for _ in range(rows)]
            self.batch.free[group] = list(range(rows * form.width + spare, NULL_BLOCK, -1))
        self.contents = self._contents()

    def _form(self, item: Stored) -> Form:
        rows, ring = item.page.entries, 0
        if item.shape in ("ring", "state"):
            rows = ring = item.keep + 1
        page = item.page.layout.page(rows, dim=None if isinstance(item.page.layout.dim, int) else item.dim)
        return Form(item.shape, item.ratio, page, ring, 1 if ring else -(-self.sizes.reach // (item.ratio * rows)))

    def _contents(self) -> dict[str, Tensor]:
        def full(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
            return torch.full(shape, PADDING, dtype=dtype, device=self.device)

        found = {
            "tokens": torch.zeros(self.rows, dtype=torch.int64, device=self.device),
            "positions": full(self.rows), "rows": full(self.rows, dtype=torch.int32),
        }  # fmt: skip
        for group, form in self.forms.items():
            found[f"table/{group}"] = full(self.rows, form.width, dtype=torch.int32)
            found[f"write/{group}"] = full(self.rows)
            if form.shape == "state":
                found[f"read/{group}"] = full(self.rows)
            if group in self.tails:
                found[f"pool/{group}"] = full(self.rows, self.tails[group].halo + self.tails[group].ratio)
        return found

    # ---- Contents ----

    def write(self, tokens: Mapping[int, int], positions: Mapping[int, int]) -> None:
        """Writes the contents of the next step: a token at a position for some rows, padding for the others.

        Blocks are taken as rows are reached, window blocks that no query sees any more are given back.
        """
        lines: dict[str, list[object]] = {name: [] for name in self.contents}
        for row in range(self.rows):
            position = positions.get(row, PADDING)
            lines["tokens"].append(tokens.get(row, 0))
            lines["positions"].append(position)
            lines["rows"].append(row if position >= 0 else PADDING)
            for group, form in self.forms.items():
                self._write(lines, row, group, form, position)
        for name, values in lines.items():
            self.contents[name].copy_(torch.tensor(values))

    def _write(self, lines: dict[str, list[object]], row: int, group: str, form: Form, position: int) -> None:
        made = position if form.ratio == 1 or form.shape == "ring" else self._entry(form, position)
        if form.shape == "window" and position >= 0:
            self._slide(group, row, max(0, position - self.sizes.window + 1) // form.page.entries)
        lines[f"write/{group}"].append(self.slot(group, row, made, take=True))
        if form.shape == "state":
            lines[f"read/{group}"].append(self.slot(group, row, position - 1) if position >= 0 else PADDING)
        if group in self.tails:
            folded = self.tails[group]
            first = made * folded.ratio
            pooled = range(first - folded.halo, first + folded.ratio)
            slots = [self.slot(folded.tail, row, at) if made >= 0 else PADDING for at in pooled]
            lines[f"pool/{group}"].append(slots)
        lines[f"table/{group}"].append(list(self.batch.blocks[group][row]))

    @staticmethod
    def _entry(form: Form, position: int) -> int:
        """The entry that ends with ``position``; none if none does."""
        return position // form.ratio if position >= 0 and (position + 1) % form.ratio == 0 else PADDING

    def slot(self, group: str, row: int, at: int, take: bool = False) -> int:
        """Slot of a request's row ``at`` (an entry, a token's row); -1 where it is not there, unless ``take``."""
        if at < 0:
            return PADDING
        form = self.forms[group]
        number, index = form.place(at)
        blocks = self.batch.blocks[group][row]
        if blocks[number] == PADDING:
            if not take:
                return PADDING
            blocks[number] = self._take(group)
        return blocks[number] * form.page.entries + index

    def padded(self) -> bool:
        """Whether every padding row addresses the null slot, and no slot of a request."""
        padding = self.contents["positions"] < 0
        if bool((self.contents["rows"][padding] >= 0).any()):
            return False
        for group, form in self.forms.items():
            slots = self.contents[f"write/{group}"][padding]
            if bool((slots >= form.page.entries * (NULL_BLOCK + 1)).any()):
                return False
        return True

    # ---- Blocks ----

    def _take(self, group: str) -> int:
        if not self.batch.free[group]:
            raise InputError(f"batch:{group}: no block is free")
        return self.batch.free[group].pop()

    def _give(self, group: str, block: int) -> None:
        """Takes a block back: it is given out last of all, and poisoned in every layer."""
        self.batch.free[group].insert(0, block)
        for (_, name), arena in self.arenas.items():
            if name == group:
                arena[block] = POISON

    def _slide(self, group: str, row: int, first: int) -> None:
        blocks = self.batch.blocks[group][row]
        for number in range(first):
            if blocks[number] != PADDING:
                self._give(group, blocks[number])
                blocks[number] = PADDING

    def release(self, row: int) -> None:
        """Gives all blocks of a row back."""
        for group, form in self.forms.items():
            for block in self.batch.blocks[group][row]:
                if block != PADDING:
                    self._give(group, block)
            self.batch.blocks[group][row] = [PADDING] * form.width

    def save(self, row: int) -> "Saved":
        """The bytes of all blocks of a row, in host memory (pinned beside a GPU)."""
        held = {group: list(blocks[row]) for group, blocks in self.batch.blocks.items()}
        kept: dict[tuple[int, str], Tensor] = {}
        for (layer, group), arena in self.arenas.items():
            blocks = [block for block in held[group] if block != PADDING]
            host = torch.empty(len(blocks), arena.shape[1], dtype=torch.uint8, pin_memory=arena.is_cuda)
            kept[layer, group] = _moved(arena, blocks, host, range(len(blocks)))
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return Saved(held, kept)

    def restore(self, row: int, saved: "Saved") -> None:
        """Brings saved bytes back to a row, in whatever blocks are free."""
        for group, held in saved.blocks.items():
            self.batch.blocks[group][row] = [PADDING if block == PADDING else self._take(group) for block in held]
        for (layer, group), host in saved.bytes.items():
            blocks = [block for block in self.batch.blocks[group][row] if block != PADDING]
            _moved(host, range(len(blocks)), self.arenas[layer, group], blocks)

    def move(self, layer: int, group: str) -> None:
        """An arena gets another base address, with the same bytes."""
        old = self.arenas[layer, group]
        self.arenas[layer, group] = _pages.empty_arena(self.forms[group].page, len(old), self.device).copy_(old)


@dataclass(frozen=True)
class Saved:
    """Blocks of one row by group, and their bytes by layer and group."""

    blocks: Mapping[str, Sequence[int]]
    bytes: Mapping[tuple[int, str], Tensor]


def _moved(source: Tensor, from_blocks: Sequence[int], target: Tensor, to_blocks: Sequence[int]) -> Tensor:
    moves = [[old, 0, new, 0, source.shape[1]] for old, new in zip(from_blocks, to_blocks, strict=True)]
    if moves:
        device = source.device if source.device == target.device else "cpu"
        copy_blocks(source, target, torch.tensor(moves, device=device), unit=8)
    return target
