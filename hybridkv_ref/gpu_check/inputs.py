"""Arguments of every operation as DeepSeek-V4 calls it: real head sizes, 64-entry blocks, real strides.

``count`` says how many items a launch has (entries, rows, queries, blocks): few to compare with the float64 reference,
many to fill a chip.  Data is random, never zero.  ``Work`` is what the operation must move and compute at least.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels._lse import Lse
from hybridkv_ref.layouts import Page, load

V4_PAGE = 64
STRIDES = (37_440, 38_016, 39_168)
"""Bytes from block to block: the smallest, with 128-byte and with 256-byte alignment."""
HEADS, DIM, INDEX_DIM, ROTARY = 64, 512, 128, 64
FEW = 8
"""Queries, up to which they also see few entries."""
MOST = 1 << 31
"""Bytes of one cache: far more than a chip keeps close by."""
CHUNK = 65_536
"""Entries that are written at a time where inputs are made."""


class Work(NamedTuple):
    """Bytes read and written, and floating-point operations on tensor cores."""

    nbytes: int
    flops: int = 0


@dataclass(frozen=True)
class Source:
    """Random numbers on a device."""

    device: torch.device
    generator: torch.Generator

    def normal(self, *shape: int) -> Tensor:
        """fp32, normal."""
        return torch.randn(shape, generator=self.generator, device=self.device)

    def integers(self, low: int, high: int, *shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in [low, high)."""
        return torch.randint(low, high, shape, generator=self.generator, device=self.device, dtype=dtype)

    def different(self, n: int, high: int) -> Tensor:
        """int64 [n]: different integers in [0, high)."""
        return torch.randperm(high, generator=self.generator, device=self.device)[:n].contiguous()

    def arena(self, page: Page, blocks: int) -> Tensor:
        """An arena of random entries, written a chunk at a time."""
        arena = _pages.empty_arena(page, blocks, self.device).fill_(0xFF)
        total = blocks * page.entries
        for first in range(0, total, CHUNK):
            slots = torch.arange(first, min(first + CHUNK, total), device=self.device)
            _pages.write(arena, slots, self.normal(len(slots), page.heads, page.dim), page)
        return arena


def source(device: torch.device, seed: int = 0) -> Source:
    """Random numbers of a seed."""
    return Source(device, torch.Generator(device).manual_seed(seed))


def entry_page(stride: int = STRIDES[0]) -> Page:
    """A block of 64 V4 entries."""
    return load("fp8_ds_mla_584").page(V4_PAGE, stride=stride)


def _blocks(entries: int) -> int:
    return -(-entries // V4_PAGE)


def _copy_blocks(s: Source, count: int, stride: int) -> tuple[dict[str, Any], Work]:
    page = entry_page(stride)
    moves = torch.zeros(count, 5, dtype=torch.int64, device=s.device)
    moves[:, 0], moves[:, 2], moves[:, 4] = s.different(count, count), s.different(count, count), page.nbytes
    target = _pages.empty_arena(page, count, s.device).fill_(0xFF)
    return {"source": s.arena(page, count), "target": target, "moves": moves, "unit": 16}, Work(2 * count * page.nbytes)


def _gather_dequant(s: Source, count: int, stride: int) -> tuple[dict[str, Any], Work]:
    page = entry_page(stride)
    slots = s.different(count, _blocks(count) * V4_PAGE)
    out = torch.empty(count, 1, DIM, dtype=torch.bfloat16, device=s.device)
    arguments = {"cache": s.arena(page, _blocks(count)), "slots": slots, "out": out, "page": page, "vector": "kv"}
    return arguments, Work(count * (page.nbytes // V4_PAGE + 2 * DIM))


def _compress(s: Source, count: int, ratio: int, overlap: int) -> tuple[dict[str, Any], Work]:
    page, dim = entry_page(), DIM * (2 if overlap else 1)
    state_page = load("state_fp32").page(8, dim=dim)
    tokens = overlap + count * ratio
    first = overlap + ratio * torch.arange(count, device=s.device)
    row_slots = first[:, None] + torch.arange(-overlap, ratio, device=s.device)
    state = _pages.empty_arena(state_page, -(-tokens // 8), s.device)
    state.view(torch.float32).normal_(generator=s.generator)
    angles = s.normal(4096, 1, ROTARY // 2)
    arguments = {
        "state": state, "row_slots": row_slots, "positions": first % 4096, "weight": 1.0 + 0.1 * s.normal(DIM),
        "rotary": torch.cat((angles.cos(), angles.sin()), dim=1), "out_slots": s.different(count, count),
        "cache": s.arena(page, _blocks(count)), "state_page": state_page, "page": page, "overlap": overlap,
    }  # fmt: skip
    return arguments, Work(count * (ratio * 8 * dim + page.nbytes // V4_PAGE))


def _tail_append(s: Source, count: int) -> tuple[dict[str, Any], Work]:
    page = load("state_fp32").page(8, dim=2 * DIM)
    positions = torch.arange(count, device=s.device)
    arguments = {
        "kv": s.normal(count, page.dim), "score": s.normal(count, page.dim), "bias": s.normal(4, page.dim),
        "positions": positions, "slots": s.different(count, -(-count // 8) * 8),
        "state": _pages.empty_arena(page, -(-count // 8), s.device).fill_(0xFF), "page": page,
    }  # fmt: skip
    return arguments, Work(count * 2 * 2 * 4 * page.dim)


def _index_build(s: Source, count: int, layout: str) -> tuple[dict[str, Any], Work]:
    page = load(layout).page(V4_PAGE)
    slots = s.different(count, _blocks(count) * V4_PAGE)
    cache = _pages.empty_arena(page, _blocks(count), s.device).fill_(0xFF)
    arguments = {"keys": s.normal(count, page.dim), "slots": slots, "cache": cache, "page": page}
    return arguments, Work(count * (4 * page.dim + page.nbytes // V4_PAGE))


def _ring_gather(s: Source, count: int) -> tuple[dict[str, Any], Work]:
    ring, page = load("fp8_ds_mla_584").page(192), load("fp8_ds_mla_584").page(128)
    arguments = {
        "rings": s.arena(ring, count), "ring_ids": s.different(count, count), "starts": s.integers(0, 4096, count),
        "lengths": torch.full((count,), 128, device=s.device),
        "out": _pages.empty_arena(page, count, s.device).fill_(0xFF), "ring": ring, "page": page,
    }  # fmt: skip
    return arguments, Work(2 * count * page.nbytes)


def _paged(s: Source, page: Page, queries: int, entries: int) -> tuple[dict[str, Any], int]:
    """Rows, block table and cache of as many requests as queries; blocks are shared if there would be too many."""
    width = -(-entries // page.entries)
    blocks = min(queries * width, MOST // page.stride) + 1
    table = s.integers(1, blocks, queries, width, dtype=torch.int32)
    rows = torch.arange(queries, dtype=torch.int32, device=s.device)
    return {"rows": rows, "block_table": table, "cache": s.arena(page, blocks), "page": page}, width * page.entries


def _indexer_logits(s: Source, count: int, few: int, many: int) -> tuple[dict[str, Any], Work]:
    page = load("index_fp8_132").page(V4_PAGE)
    arguments, columns = _paged(s, page, count, many if count > FEW else few)
    visible = torch.full((count,), columns, dtype=torch.int32, device=s.device)
    arguments |= {
        "q": s.normal(count, HEADS, INDEX_DIM).to(torch.bfloat16), "weights": s.normal(count, HEADS),
        "visible": visible, "logits": torch.empty(count, columns, device=s.device),
    }  # fmt: skip
    moved = count * (columns * (page.nbytes // V4_PAGE + 4) + HEADS * (2 * INDEX_DIM + 4))
    return arguments, Work(moved, 2 * count * columns * HEADS * INDEX_DIM)


def _topk_select(s: Source, count: int, few: int, many: int, k: int) -> tuple[dict[str, Any], Work]:
    entries = many if count > FEW else few
    arguments = {
        "logits": s.normal(count, entries).relu().mul(8).round(),  # ties, at the cut too
        "chosen": torch.empty(count, k, dtype=torch.int32, device=s.device),
        "visible": torch.full((count,), entries, dtype=torch.int32, device=s.device),
    }  # fmt: skip
    return arguments, Work(count * 4 * (entries + k))


def _segment_decode(
    s: Source, count: int, few: int, many: int, listed: bool, splits: int, stride: int
) -> tuple[dict[str, Any], Work]:
    entries = many if count > FEW else few
    page = entry_page(stride)
    context = 16 * entries if listed else entries
    arguments, columns = _paged(s, page, count, context)
    chosen = s.normal(count, columns).topk(entries, dim=1).indices.to(torch.int32) if listed else None
    arguments |= {
        "q": s.normal(count, HEADS, DIM).to(torch.bfloat16), "entries": chosen,
        "first": None if listed else torch.zeros(count, dtype=torch.int32, device=s.device),
        "count": torch.full((count,), entries, dtype=torch.int32, device=s.device),
        "out": torch.empty(splits, count, HEADS, DIM, device=s.device),
        "lse": torch.empty(splits, count, HEADS, device=s.device), "scale": DIM**-0.5, "convention": Lse.FLASHMLA,
    }  # fmt: skip
    moved = count * (entries * page.nbytes // V4_PAGE + HEADS * (2 * DIM + splits * 4 * (DIM + 1)))
    return arguments, Work(moved, 4 * count * entries * HEADS * DIM)


def _merge_lse(s: Source, count: int, parts: int) -> tuple[dict[str, Any], Work]:
    arguments = {
        "partials": s.normal(parts, count, HEADS, DIM), "partial_lse": 10 * s.normal(parts, count, HEADS),
        "sink": s.normal(HEADS), "out": torch.empty(count, HEADS, DIM, dtype=torch.bfloat16, device=s.device),
        "lse": torch.empty(count, HEADS, device=s.device), "convention": Lse.FLASHMLA,
    }  # fmt: skip
    return arguments, Work(count * HEADS * (parts * 4 * (DIM + 1) + 2 * DIM + 4))


class Variant(NamedTuple):
    """One way in which V4 calls an operation.  ``few`` items for the reference, ``many`` to fill the chip."""

    operation: str
    name: str
    few: int
    many: int
    build: Callable[[Source, int], tuple[dict[str, Any], Work]]


VARIANTS: tuple[Variant, ...] = (
    *(
        Variant("copy_blocks", f"stride {stride:,}", 3, 32_768, partial(_copy_blocks, stride=stride))
        for stride in STRIDES
    ),
    *(
        Variant("gather_dequant", f"stride {stride:,}", 70, 1 << 20, partial(_gather_dequant, stride=stride))
        for stride in STRIDES
    ),
    Variant("compress_pool_quant", "CSA", 6, 65_536, partial(_compress, ratio=4, overlap=4)),
    Variant("compress_pool_quant", "HCA", 2, 4_096, partial(_compress, ratio=128, overlap=0)),
    Variant("tail_append", "CSA", 9, 65_536, _tail_append),
    Variant("index_build", "entries", 9, 524_288, partial(_index_build, layout="fp8_ds_mla_584")),
    Variant("index_build", "fp8 keys", 9, 2_097_152, partial(_index_build, layout="index_fp8_132")),
    Variant("index_build", "fp4 keys", 9, 2_097_152, partial(_index_build, layout="index_fp4_68")),
    Variant("ring_gather", "window of 128", 2, 8_192, _ring_gather),
    Variant("indexer_logits", "64 heads", 2, 128, partial(_indexer_logits, few=200, many=65_536)),
    Variant("topk_select", "512 of many", 2, 1_024, partial(_topk_select, few=5_000, many=65_536, k=512)),
    *(
        Variant(
            "segment_decode", f"512 listed, stride {stride:,}", 1, 2_048,
            partial(_segment_decode, few=40, many=512, listed=True, splits=1, stride=stride),
        )
        for stride in STRIDES
    ),
    Variant(
        "segment_decode", "window of 128", 2, 4_096,
        partial(_segment_decode, few=128, many=128, listed=False, splits=1, stride=STRIDES[0]),
    ),
    Variant(
        "segment_decode", "HCA, 2,048 entries, 4 splits", 2, 512,
        partial(_segment_decode, few=200, many=2_048, listed=False, splits=4, stride=STRIDES[0]),
    ),
    Variant("merge_lse", "3 parts", 2, 2_048, partial(_merge_lse, parts=3)),
)  # fmt: skip
