"""Random cases of every operation: small sizes, every layout, gaps, ties, empty segments.

Tests draw them by Hypothesis, the GPU check by seed.
"""

import math
import random
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hybridkv_ref import layouts
from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels._lse import Lse
from hybridkv_ref.kernels.cases import Case, Draw, T, arena_of, randn, slots_with_gaps
from hybridkv_ref.kernels.judged import JUDGES
from hybridkv_ref.layouts import Page

ENTRY_LAYOUTS = ("fp8_ds_mla_584", "dsv32_656", "uniform_fp8_512", "bf16", "fp32", "index_fp8_132", "index_fp4_68")
INDEX_LAYOUTS = ("index_fp8_132", "index_fp4_68", "bf16")
DECODE_LAYOUTS = ("fp8_ds_mla_584", "bf16", "fp32", "bf16_nhd", "bf16_hnd", "uniform_fp8_512")
OPERANDS = (torch.float32, torch.bfloat16)


class Seeded:
    """Sizes and choices from a seed."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""
        return self._random.randint(low, high)

    def choice(self, options: Sequence[T]) -> T:
        """One of `options`."""
        return self._random.choice(options)


def entry_page(draw: Draw, names: tuple[str, ...], dim: int, entries: int = 5, least: int = 1) -> Page:
    """A page of one of these layouts."""
    layout = layouts.load(draw.choice(names))
    heads = 2 if layout.heads == "model" else None
    return layout.page(draw.integer(least, entries), heads=heads, dim=dim if layout.dim == "model" else None)


def filled(draw: Draw, page: Page, blocks: int, slots: Tensor) -> Tensor:
    """An arena with random entries at `slots` and NaN elsewhere."""
    cache = arena_of(page, blocks)
    for vector in dict.fromkeys(field.vector for field in page.layout.fields):
        values = randn(draw, len(slots), page.heads, page.vector(vector).dim)
        _pages.write(cache, slots, values * torch.exp2(randn(draw, len(slots), 1, 1)), page, vector)
    return cache


def paged(draw: Draw, page: Page, requests: int, width: int) -> tuple[Tensor, Tensor]:
    """A cache and a block table [requests, width] with one block missing; blocks outside the table are NaN."""
    blocks = requests * width + 1
    order = torch.Generator().manual_seed(draw.integer(0, 2**16))
    table = (torch.randperm(blocks, generator=order)[1:].view(requests, width)).to(torch.int32)
    slots = (table.long()[:, :, None] * page.entries + torch.arange(page.entries)).flatten()
    cache = filled(draw, page, blocks, slots)
    cache[int(table[-1, -1])] = 0xFF
    table[-1, -1] = -1
    return cache, table


def _index_build(draw: Draw) -> Case:
    page, blocks, n = entry_page(draw, ENTRY_LAYOUTS, 24), 4, draw.integer(1, 4)
    slots = slots_with_gaps(draw, n, blocks, page)
    keys = randn(draw, len(slots), page.dim) * torch.exp2(8 * randn(draw, len(slots), 1))
    return JUDGES["index_build"]({"keys": keys, "slots": slots, "cache": arena_of(page, blocks), "page": page})


def _gather_dequant(draw: Draw) -> Case:
    page, blocks = entry_page(draw, (*ENTRY_LAYOUTS, "bf16_nhd", "bf16_hnd"), 24), 4
    slots = slots_with_gaps(draw, draw.integer(1, 6), blocks, page)
    vector = draw.choice(("k", "v")) if "k" in page.places else "kv"
    out = torch.empty(len(slots), page.heads, page.vector(vector).dim, dtype=draw.choice(OPERANDS))
    cache = filled(draw, page, blocks, slots)
    return JUDGES["gather_dequant"]({"cache": cache, "slots": slots, "out": out, "page": page, "vector": vector})


def _tail_append(draw: Draw) -> Case:
    page, blocks, n = layouts.load("state_fp32").page(draw.integer(1, 8), dim=12), 3, draw.integer(1, 6)
    slots = slots_with_gaps(draw, n, blocks, page)
    kv, score = randn(draw, len(slots), page.dim), randn(draw, len(slots), page.dim)
    bias = draw.choice((None, randn(draw, 4, page.dim)))
    positions = torch.arange(len(slots)) + draw.integer(0, 9)
    arguments = {"kv": kv, "score": score, "bias": bias, "positions": positions, "slots": slots, "page": page}
    return JUDGES["tail_append"](arguments | {"state": arena_of(page, blocks)})


def _compress_pool_quant(draw: Draw) -> Case:
    ratio, overlap = draw.choice(((4, 4), (6, 0), (2, 2)))
    page, blocks, n = entry_page(draw, ("fp8_ds_mla_584", "bf16", "fp32", *INDEX_LAYOUTS[:2]), 32), 3, 3
    state_page = layouts.load("state_fp32").page(4, dim=page.dim * (2 if overlap else 1))
    rows = overlap + ratio
    row_slots = torch.arange(n * rows).view(n, rows)
    state = filled(draw, state_page, -(-n * rows // 4), row_slots.flatten())
    row_slots[0, : overlap or 1] = -1  # before the sequence's start
    weight = draw.choice((None, 1.0 + 0.1 * randn(draw, page.dim)))
    angles = randn(draw, 40, 1, 8)
    rotary = draw.choice((None, torch.cat((angles.cos(), angles.sin()), dim=1)))
    out_slots = slots_with_gaps(draw, n, blocks, page)
    n = len(out_slots)
    arguments = {
        "state": state, "row_slots": row_slots[:n].contiguous(), "positions": torch.arange(n) * ratio, "weight": weight,
        "rotary": rotary, "out_slots": out_slots, "cache": arena_of(page, blocks), "state_page": state_page,
        "page": page, "overlap": overlap,
    }  # fmt: skip
    return JUDGES["compress_pool_quant"](arguments)


def _copy_blocks(draw: Draw) -> Case:
    unit = draw.choice((8, 16))
    strides = [draw.integer(4, 20) * unit for _ in range(2)]
    source, target = (torch.randint(0, 256, (5, stride), dtype=torch.uint8) for stride in strides)
    moves = []
    for target_block in range(draw.integer(1, 5)):
        size = draw.integer(1, min(strides) // unit)
        start, goal = draw.integer(0, strides[0] // unit - size), draw.integer(0, strides[1] // unit - size)
        block = draw.integer(0, 4) if target_block != 1 else -1
        moves.append([block, start * unit, target_block, goal * unit, size * unit])
    arguments = {"source": source, "moves": torch.tensor(moves), "unit": unit}
    return JUDGES["copy_blocks"](arguments | {"target": target})


def _ring_gather(draw: Draw) -> Case:
    ring = entry_page(draw, ("fp8_ds_mla_584", "index_fp8_132", "bf16", "bf16_hnd", "bf16_nhd"), 6, entries=9)
    dim = ring.dim if ring.layout.dim == "model" else None
    page = ring.layout.page(draw.integer(1, 9), heads=ring.heads if ring.layout.heads == "model" else None, dim=dim)
    n, rings = 3, 4
    most = min(ring.entries, page.entries)
    arguments = {
        "rings": torch.randint(0, 256, (rings, ring.stride), dtype=torch.uint8),
        "ring_ids": torch.tensor([draw.integer(0, rings - 1), -1, draw.integer(0, rings - 1)]),
        "starts": torch.tensor([draw.integer(0, 40) for _ in range(n)]),
        "lengths": torch.tensor([draw.integer(1, most), most, draw.integer(0, most)]),
        "ring": ring, "page": page,
    }  # fmt: skip
    return JUDGES["ring_gather"](arguments | {"out": torch.zeros(n, page.stride, dtype=torch.uint8)})


def _indexer_logits(draw: Draw) -> Case:
    page = entry_page(draw, INDEX_LAYOUTS, 32, entries=6)
    cache, table = paged(draw, page, 2, 3)
    heads, columns = draw.integer(1, 5), draw.integer(1, 3 * page.entries)
    rows = torch.tensor([1, 0, -1, 1], dtype=torch.int32)
    seen = [columns, draw.integer(0, columns), columns, draw.integer(0, columns)]
    q = randn(draw, 4, heads, page.dim).to(draw.choice(OPERANDS))
    arguments = {
        "q": q, "weights": randn(draw, 4, heads), "rows": rows, "visible": torch.tensor(seen, dtype=torch.int32),
        "block_table": table, "cache": cache, "logits": torch.empty(4, columns), "page": page,
    }  # fmt: skip
    return JUDGES["indexer_logits"](arguments)


def _topk_select(draw: Draw) -> Case:
    queries, columns, k = draw.integer(1, 3), draw.integer(1, 40), draw.integer(1, 24)
    logits = randn(draw, queries, columns).relu()  # half of them tie at zero
    logits[:, ::3] = torch.round(logits[:, ::3])
    logits[:, ::5] *= -1.0  # -0.0 among them
    logits[:, 7::11] = -math.inf
    logits[:, 9::13] = math.nan
    visible = torch.tensor([draw.integer(0, columns) for _ in range(queries)], dtype=torch.int32)
    chosen = torch.empty(queries, k, dtype=torch.int32)
    return JUDGES["topk_select"]({"logits": logits, "visible": visible, "chosen": chosen})


def _segment_decode(draw: Draw) -> Case:
    page = entry_page(draw, DECODE_LAYOUTS, 16, entries=12, least=6)  # more entries than a program holds at a time
    cache, table = paged(draw, page, 2, 3)
    reach, heads, splits = 3 * page.entries, page.heads * draw.integer(1, 3), draw.integer(1, 3)
    entries = first = None
    if draw.choice((True, False)):
        entries = torch.stack([torch.randperm(reach) for _ in range(3)]).to(torch.int32)
        entries[:, 1::4] = -1
        count = torch.tensor([reach, draw.integer(0, reach), reach], dtype=torch.int32)
    else:
        first = torch.tensor([draw.integer(0, reach - 1) for _ in range(3)], dtype=torch.int32)
        count = torch.tensor([draw.integer(0, reach - int(start)) for start in first], dtype=torch.int32)
    q = randn(draw, 3, heads, page.dim).to(draw.choice(OPERANDS))
    arguments = {
        "q": q, "rows": torch.tensor([1, 0, -1], dtype=torch.int32), "entries": entries, "first": first, "count": count,
        "block_table": table, "cache": cache, "out": torch.empty(splits, 3, heads, page.dim),
        "lse": torch.empty(splits, 3, heads), "page": page, "scale": page.dim**-0.5,
        "convention": draw.choice(tuple(Lse)),
    }  # fmt: skip
    return JUDGES["segment_decode"](arguments)


def _merge_lse(draw: Draw) -> Case:
    parts, queries, heads, dim = (draw.integer(1, most) for most in (4, 3, 6, 24))
    convention = draw.choice(tuple(Lse))
    partials, natural = randn(draw, parts, queries, heads, dim), 10 * randn(draw, parts, queries, heads)
    empty = randn(draw, parts, queries, heads) > 0.7
    empty[:, 0, 0] = True  # nothing at all for one head
    natural[empty] = -math.inf
    partials[empty] = math.nan
    arguments = {
        "partials": partials, "partial_lse": convention.from_natural(natural),
        "sink": draw.choice((None, randn(draw, heads))),
        "out": torch.empty(queries, heads, dim, dtype=draw.choice(OPERANDS)),
        "lse": torch.empty(queries, heads), "convention": convention,
    }  # fmt: skip
    return JUDGES["merge_lse"](arguments)


BUILDERS: dict[str, Callable[[Draw], Case]] = {
    builder.__name__.removeprefix("_"): builder
    for builder in (
        _compress_pool_quant, _gather_dequant, _tail_append, _copy_blocks, _ring_gather, _index_build, _indexer_logits,
        _topk_select, _segment_decode, _merge_lse,
    )
}  # fmt: skip
"""By operation."""
