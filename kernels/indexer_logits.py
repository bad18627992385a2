"""indexer_logits: the lightning indexer's score of every visible entry.

Theory. score(t, i) = sum over heads h of weights[t, h] * relu(q[t, h] . key[i]). The scores only choose entries: a
wrong key gives no NaN, just another selection. ReLU makes exact zeros, so ties are real; topk_select has the rule.
Entries that a query may not see, or whose block is not there, score -inf.
"""

import math

import torch
from torch import Tensor

from hybridkv_ref.kernels import _pages, dispatch
from hybridkv_ref.kernels._triton import INTERPRETED, AotCase, cdiv, jit, power_of_two, tl
from hybridkv_ref.layouts import Page, load

load_rows = _pages.load_rows
TILE = 64
"""Entries that one program scores."""


def indexer_logits(
    q: Tensor, weights: Tensor, rows: Tensor, visible: Tensor, block_table: Tensor, cache: Tensor, logits: Tensor,
    page: Page,
) -> Tensor:  # fmt: skip
    """Write the scores of T queries to `logits` and return it.

    q            bf16 [T, H, dim], or on the CPU fp32 (float64 for fp64 layouts); rotated as the keys are
    weights      fp32 [T, H] (float64 likewise), softmax scale included
    rows         int32 [T]: row of `block_table` of each query; -1 is padding and sees nothing
    visible      int32 [T]: the query sees entries [0, visible)
    block_table  int32 [requests, M]: block of entries [j * page.entries, (j + 1) * page.entries); -1 is not there
    cache        uint8 [blocks, page.stride]
    logits       fp32 [T, N] (float64 likewise), N <= M * page.entries, overwritten; -inf where nothing is seen

    InputError: wrong dtype, shape, alignment or device.
    """
    name, wide = "indexer_logits", _pages.precision(page)
    t, h, d = q.shape if q.dim() == 3 else (None, None, None)
    dispatch.expect(name, "q", q, dispatch.operands(q, wide), (t, h, page.dim if d is not None else None))
    dispatch.expect(name, "weights", weights, (wide,), (t, h))
    for role, tensor in (("rows", rows), ("visible", visible)):
        dispatch.expect(name, role, tensor, (torch.int32,), (t,))
    dispatch.expect(name, "block_table", block_table, (torch.int32,), (None, None))
    dispatch.expect_arena(name, "cache", cache, page)
    dispatch.expect(name, "logits", logits, (wide,), (t, None))
    dispatch.expect_columns(name, "logits", logits.shape[1], block_table, page)
    tensors = (q, weights, rows, visible, block_table, cache, logits)
    return dispatch.choose(name, torch_version, triton_version, *tensors)(*tensors, page)


def reference(
    q: Tensor, weights: Tensor, rows: Tensor, visible: Tensor, block_table: Tensor, cache: Tensor, logits: Tensor,
    page: Page,
) -> tuple[Tensor, ...]:  # fmt: skip
    """float64 [T, N]."""
    out = torch.full(logits.shape, -math.inf, dtype=torch.float64, device=q.device)
    for t, (row, seen) in enumerate(zip(rows.tolist(), visible.tolist(), strict=True)):
        slots = _pages.table_slots(block_table, row, torch.arange(min(seen, out.shape[1])), page)
        keys = _pages.read_exact(cache, slots, page)[:, 0]
        scores = (q[t].double() @ keys.T).relu().T @ weights[t].double()
        out[t, : len(slots)] = scores.masked_fill(slots.to(q.device) < 0, -math.inf)
    return (out,)


def torch_version(
    q: Tensor, weights: Tensor, rows: Tensor, visible: Tensor, block_table: Tensor, cache: Tensor, logits: Tensor,
    page: Page,
) -> Tensor:  # fmt: skip
    """`indexer_logits` on any device that torch knows; each query by itself, so no result depends on the batch."""
    logits.fill_(-math.inf)
    for t, (row, seen) in enumerate(zip(rows.tolist(), visible.tolist(), strict=True)):
        index = torch.arange(min(seen, logits.shape[1]), device=q.device)
        slots = _pages.table_slots(block_table, row, index, page)
        keys = _pages.read(cache, slots, page)[:, 0]
        scores = weights[t] @ (q[t].to(keys.dtype) @ keys.T).relu_()
        logits[t, : len(slots)] = scores.masked_fill_(slots < 0, -math.inf)
    return logits


@jit
def _kernel(
    q: tl.tensor, weights: tl.tensor, rows: tl.tensor, visible: tl.tensor, block_table: tl.tensor, cache: tl.tensor,
    logits: tl.tensor, columns: tl.tensor, table_width: tl.tensor,
    C: tl.constexpr, HEADS: tl.constexpr, WIDE_HEADS: tl.constexpr, N: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    entry = tl.program_id(1) * N + tl.arange(0, N)
    row = tl.load(rows + query).to(tl.int64)
    seen = tl.where(row < 0, 0, tl.load(visible + query))
    ok = entry < tl.minimum(seen, columns)
    block = tl.load(block_table + row * table_width + entry // C.entries, mask=ok, other=-1).to(tl.int64)
    ok = ok & (block >= 0)
    keys = load_rows(cache, block, (entry % C.entries).to(tl.int64), 0, ok, C, not UPCAST)
    head = tl.arange(0, WIDE_HEADS)
    cols = tl.arange(0, C.width)
    at = q + (query * HEADS + head)[:, None] * C.dim + cols[None, :]
    asked = tl.load(at, mask=(head < HEADS)[:, None] & (cols < C.dim)[None, :], other=0.0)
    if UPCAST:
        asked = asked.to(tl.float32)
    scores = tl.dot(asked, tl.trans(keys), input_precision="ieee")
    weight = tl.load(weights + query * HEADS + head, mask=head < HEADS, other=0.0)
    score = tl.sum(tl.maximum(scores, 0.0) * weight[:, None], axis=0)
    tl.store(logits + query * columns + entry, tl.where(ok, score, float("-inf")), mask=entry < columns)


def grid(
    q: Tensor, weights: Tensor, rows: Tensor, visible: Tensor, block_table: Tensor, cache: Tensor, logits: Tensor,
    page: Page,
) -> tuple[int, ...]:  # fmt: skip
    """Programs: queries, tiles of entries."""
    return len(q), cdiv(logits.shape[1], TILE)


def triton_version(
    q: Tensor, weights: Tensor, rows: Tensor, visible: Tensor, block_table: Tensor, cache: Tensor, logits: Tensor,
    page: Page,
) -> Tensor:  # fmt: skip
    """`indexer_logits` in Triton: one program scores TILE entries for all heads of one query."""
    heads = q.shape[1]
    codec = _pages.codec("indexer_logits", page)
    _kernel[grid(q, weights, rows, visible, block_table, cache, logits, page)](
        q, weights, rows, visible, block_table, cache, logits, logits.shape[1], block_table.shape[1],
        codec, heads, max(16, power_of_two(heads)), TILE, INTERPRETED,
    )  # fmt: skip
    return logits


def aot_cases() -> tuple[AotCase, ...]:
    """V4's indexer, 64 heads of 128, with both key formats."""
    cases = []
    for layout in ("index_fp8_132", "index_fp4_68"):
        pointers = {
            "q": "*bf16", "weights": "*fp32", "rows": "*i32", "visible": "*i32", "block_table": "*i32",
            "cache": "*u8", "logits": "*fp32",
        }  # fmt: skip
        arguments = pointers | {"columns": "i32", "table_width": "i32"}
        codec = _pages.codec("indexer_logits", load(layout).page(64))
        constants = {"C": codec, "HEADS": 64, "WIDE_HEADS": 64, "N": TILE, "UPCAST": INTERPRETED}
        cases.append(AotCase(f"indexer_logits[{layout}]", _kernel, arguments, constants, tuple(pointers)))
    return tuple(cases)
