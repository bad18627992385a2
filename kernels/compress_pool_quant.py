"""compress_pool_quant: fold state rows into compressed entries and store them.

Theory. Entry i of a compressor with ratio m pools the rows of m tokens: per column, a softmax over the rows' scores
weights their kv. With overlap (CSA, m = 4) it also pools the m tokens before, from their *previous* branch (columns
[0, dim)), while its own tokens give their *current* branch (columns [dim, 2 dim)): tokens [4i-4, 4i+3]. Without overlap
(HCA, m = 128) there is one branch: tokens [128j, 128j+127]. Then RMS norm, rotary embedding of the last columns at
position m*i, and narrowing into the page. Rows before the sequence's start do not exist: slot -1, weight zero.

The Triton kernel streams a few rows at a time through a running softmax: a tile of all 128 HCA rows spills.
"""

import torch
from torch import Tensor

from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import _pages, dispatch
from hybridkv_ref.kernels._triton import AotCase, jit, tl
from hybridkv_ref.layouts import Page, load

store_rows = _pages.store_rows
STREAMED = 4
"""State rows that a program holds at a time."""


def compress_pool_quant(
    state: Tensor, row_slots: Tensor, positions: Tensor, weight: Tensor | None, rotary: Tensor | None,
    out_slots: Tensor, cache: Tensor, state_page: Page, page: Page, overlap: int, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """Make one entry per row of `row_slots`, store it in `cache`, return `cache`.

    state      uint8 [blocks, state_page.stride] of state rows, as tail_append wrote them
    row_slots  int64 [n, overlap + ratio]: state slots of the pooled tokens in order, the `overlap` earlier ones first;
               -1 is a token before the start. With overlap the state has two branches: state_page.dim = 2 page.dim
    positions  int64 [n]: rotary position of each entry, a row of `rotary`
    weight     fp32 [dim] of the RMS norm (eps added to the mean square); None: no norm
    rotary     fp32 [positions, 2, r / 2]: cosines, then sines, of pairs (2k, 2k+1) of the last r columns; None: none
    out_slots  int64 [n]: block * page.entries + index, all different; -1 makes no entry
    cache      uint8 [blocks, page.stride], written in place; other entries stay

    With state_fp64, weight and rotary are float64. InputError: wrong dtype, shape, alignment or device.
    """
    name, wide, n = "compress_pool_quant", _pages.precision(state_page), len(out_slots)
    if state_page.dim != page.dim * (2 if overlap else 1):
        raise InputError(f"{name}:state_page: {state_page.dim} columns for entries of {page.dim}, overlap {overlap}")
    if not 0 <= overlap < row_slots.shape[-1]:
        raise InputError(f"{name}:overlap: {overlap} leaves no row of {row_slots.shape[-1]} to the entry itself")
    dispatch.expect_arena(name, "state", state, state_page)
    dispatch.expect(name, "row_slots", row_slots, (torch.int64,), (n, None))
    dispatch.expect(name, "positions", positions, (torch.int64,), (n,))
    if weight is not None:
        dispatch.expect(name, "weight", weight, (wide,), (page.dim,))
    if rotary is not None:
        dispatch.expect(name, "rotary", rotary, (wide,), (None, 2, None))
    dispatch.expect(name, "out_slots", out_slots, (torch.int64,), (n,))
    dispatch.expect_arena(name, "cache", cache, page)
    tensors = (state, row_slots, positions, weight, rotary, out_slots, cache)
    run = dispatch.choose(name, torch_version, triton_version, *tensors)
    return run(*tensors, state_page, page, overlap, eps)


def reference(
    state: Tensor, row_slots: Tensor, positions: Tensor, weight: Tensor | None, rotary: Tensor | None,
    out_slots: Tensor, cache: Tensor, state_page: Page, page: Page, overlap: int, eps: float = 1e-6,
) -> tuple[Tensor, ...]:  # fmt: skip
    """float64 [n, dim]: the entries before narrowing; zeros where out_slots is negative."""
    out = torch.zeros(len(out_slots), page.dim, dtype=torch.float64, device=state.device)
    for i, slots in enumerate(row_slots):
        if out_slots[i] < 0 or bool((slots < 0).all()):
            continue
        kv = _pages.read_exact(state, slots, state_page, "kv")[:, 0]
        score = _pages.read_exact(state, slots, state_page, "score")[:, 0]
        if overlap:
            kv = torch.cat((kv[:overlap, : page.dim], kv[overlap:, page.dim :]))
            score = torch.cat((score[:overlap, : page.dim], score[overlap:, page.dim :]))
        score[slots < 0] = -torch.inf
        entry = (kv * score.softmax(0)).sum(0)
        if weight is not None:
            entry = entry / torch.sqrt(entry.square().mean() + eps) * weight.double()
        if rotary is not None:
            cos, sin = rotary[positions[i]].double()
            pairs = torch.view_as_complex(entry[-2 * len(cos) :].reshape(-1, 2).contiguous())
            entry[-2 * len(cos) :] = torch.view_as_real(pairs * torch.complex(cos, sin)).flatten()
        out[i] = entry
    return (out,)


def torch_version(
    state: Tensor, row_slots: Tensor, positions: Tensor, weight: Tensor | None, rotary: Tensor | None,
    out_slots: Tensor, cache: Tensor, state_page: Page, page: Page, overlap: int, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """`compress_pool_quant` on any device that torch knows."""
    n, rows = row_slots.shape
    kv = _pages.read(state, row_slots.flatten(), state_page, "kv").view(n, rows, -1)
    score = _pages.read(state, row_slots.flatten(), state_page, "score").view(n, rows, -1)
    if overlap:
        kv = torch.cat((kv[:, :overlap, : page.dim], kv[:, overlap:, page.dim :]), dim=1)
        score = torch.cat((score[:, :overlap, : page.dim], score[:, overlap:, page.dim :]), dim=1)
    score = score.masked_fill((row_slots < 0)[..., None], -torch.inf)
    # written out: torch.softmax rounds differently where a thread's share ends, so an entry would depend on the batch
    share = (score - score.amax(1, keepdim=True).clamp(min=torch.finfo(score.dtype).min)).exp_()
    total = share.sum(1)
    entry = (kv * share).sum(1) / torch.where(total == 0, 1.0, total)
    if weight is not None:
        entry = entry * torch.rsqrt(entry.square().mean(-1, keepdim=True) + eps) * weight
    if rotary is not None:
        cos, sin = rotary[positions].unbind(1)
        turned = entry[:, -2 * cos.shape[1] :]
        even, odd = turned[:, 0::2], turned[:, 1::2]
        turned.copy_(torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(1))
    _pages.write(cache, out_slots, entry[:, None], page)
    return cache


@jit
def _kernel(
    state: tl.tensor, row_slots: tl.tensor, positions: tl.tensor, weight: tl.tensor, rotary: tl.tensor,
    out_slots: tl.tensor, cache: tl.tensor, eps: tl.tensor, K: tl.constexpr, S: tl.constexpr, C: tl.constexpr,
    ROWS: tl.constexpr, OVERLAP: tl.constexpr, NORM: tl.constexpr, ROTARY: tl.constexpr, STREAM: tl.constexpr,
) -> None:  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    out_slot = tl.load(out_slots + item)
    if out_slot < 0:
        return
    cols = tl.arange(0, C.width)
    inside = cols < C.dim
    top = tl.full((C.width,), float("-inf"), tl.float32)
    total = tl.full((C.width,), 0.0, tl.float32)
    pooled = tl.full((C.width,), 0.0, tl.float32)
    for first in range(0, ROWS, STREAM):
        rows = first + tl.arange(0, STREAM)
        slot = tl.load(row_slots + item * ROWS + rows, mask=rows < ROWS, other=-1)
        there = (slot >= 0)[:, None] & inside[None, :]
        branch = (rows >= OVERLAP).to(tl.int32) * (K.dim - C.dim)
        start = state + slot // K.entries * K.stride + slot % K.entries * K.p_entry
        kv_at = (start + K.p_base).to(tl.pointer_type(tl.float32), bitcast=True) + branch
        score_at = (start + S.p_base).to(tl.pointer_type(tl.float32), bitcast=True) + branch
        kv = tl.load(kv_at[:, None] + cols[None, :], mask=there, other=0.0)
        score = tl.load(score_at[:, None] + cols[None, :], mask=there, other=float("-inf"))
        higher = tl.maximum(top, tl.max(score, axis=0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp(score - finite[None, :])
        kept = tl.exp(top - finite)
        total = total * kept + tl.sum(share, axis=0)
        pooled = pooled * kept + tl.sum(share * kv, axis=0)
        top = higher
    entry = tl.where(total > 0.0, pooled / total, 0.0)
    if NORM:
        mean = tl.sum(entry * entry, axis=0) / C.dim
        entry = entry * (1.0 / tl.sqrt(mean + eps)) * tl.load(weight + cols, mask=inside, other=0.0)
    if ROTARY > 0:
        even, odd = tl.split(tl.reshape(entry, (C.width // 2, 2)))
        pair = tl.arange(0, C.width // 2) - (C.dim - ROTARY) // 2
        turned = (pair >= 0) & (pair < ROTARY // 2)
        at = rotary + tl.load(positions + item) * ROTARY + pair
        cos = tl.load(at, mask=turned, other=1.0)
        sin = tl.load(at + ROTARY // 2, mask=turned, other=0.0)
        entry = tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), (C.width,))
    slot = tl.full((1,), 0, tl.int64) + out_slot
    store_rows(cache, slot // C.entries, slot % C.entries, slot >= 0, tl.reshape(entry, (1, C.width)), C)


def grid(
    state: Tensor, row_slots: Tensor, positions: Tensor, weight: Tensor | None, rotary: Tensor | None,
    out_slots: Tensor, cache: Tensor, state_page: Page, page: Page, overlap: int, eps: float = 1e-6,
) -> tuple[int, ...]:  # fmt: skip
    """Programs: entries."""
    return (len(out_slots),)


def triton_version(
    state: Tensor, row_slots: Tensor, positions: Tensor, weight: Tensor | None, rotary: Tensor | None,
    out_slots: Tensor, cache: Tensor, state_page: Page, page: Page, overlap: int, eps: float = 1e-6,
) -> Tensor:  # fmt: skip
    """`compress_pool_quant` in Triton: one program per entry."""
    name, unused = "compress_pool_quant", state
    k, s = _pages.codec(name, state_page, "kv"), _pages.codec(name, state_page, "score")
    programs = grid(state, row_slots, positions, weight, rotary, out_slots, cache, state_page, page, overlap, eps)
    _kernel[programs](
        state, row_slots, positions, unused if weight is None else weight, unused if rotary is None else rotary,
        out_slots, cache, eps, k, s, _pages.codec(name, page), row_slots.shape[1], overlap,
        weight is not None, 0 if rotary is None else 2 * rotary.shape[2], STREAMED,
    )  # fmt: skip
    return cache


def aot_cases() -> tuple[AotCase, ...]:
    """V4's three compressors: CSA into entries, its indexer into keys of both formats, HCA into entries."""
    return tuple(
        aot_case(kind, layout, dim, ratio, overlap)
        for kind, layout, dim, ratio, overlap in (
            ("csa", "fp8_ds_mla_584", 512, 4, 4),
            ("indexer_fp8", "index_fp8_132", 128, 4, 4),
            ("indexer_fp4", "index_fp4_68", 128, 4, 4),
            ("hca", "fp8_ds_mla_584", 512, 128, 0),
        )
    )


def aot_case(kind: str, layout: str, dim: int, ratio: int, overlap: int, streamed: int = STREAMED) -> AotCase:
    """One compressor; `streamed` rows at a time."""
    name = "compress_pool_quant"
    state_page = load("state_fp32").page(8, dim=dim * (2 if overlap else 1))
    arguments = {
        "state": "*u8", "row_slots": "*i64", "positions": "*i64", "weight": "*fp32", "rotary": "*fp32",
        "out_slots": "*i64", "cache": "*u8", "eps": "fp32",
    }  # fmt: skip
    constants = {
        "K": _pages.codec(name, state_page, "kv"), "S": _pages.codec(name, state_page, "score"),
        "C": _pages.codec(name, load(layout).page(64)), "ROWS": overlap + ratio, "OVERLAP": overlap,
        "NORM": True, "ROTARY": 64, "STREAM": streamed,
    }  # fmt: skip
    aligned = ("state", "row_slots", "positions", "weight", "rotary", "out_slots", "cache")
    return AotCase(f"{name}[{kind}]", _kernel, arguments, constants, aligned)
