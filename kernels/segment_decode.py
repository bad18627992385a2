"""segment_decode: attention of queries over the entries of one kind of segment.

Theory. Windows, chosen compressed entries, all compressed entries and plain full attention differ only in which entries
a query sees, so there is one kernel, launched once per segment kind, and merge_lse puts the kinds together. What a
query sees is contents: a list of entries (top-k) or a range (window, all), reached through a block table; -1 anywhere
means "not there". Entries are widened from their stored bytes and attended directly. Layouts with one vector per entry
use it as key and value. The sink is not added here.

Work on one query can be divided into splits, which are partial outputs just as segments are: merge both together.
"""

import math
from typing import Any

import torch
from torch import Tensor

from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import _pages, dispatch
from hybridkv_ref.kernels._lse import LOG2_E, Lse
from hybridkv_ref.kernels._triton import INTERPRETED, AotCase, cdiv, jit, power_of_two, tl
from hybridkv_ref.layouts import Page, load

load_rows = _pages.load_rows
TILE = 16
"""Entries that a program holds at a time, and the unit in which splits share them out."""
STREAMED = 512
"""Entries that the torch version holds at a time."""
MOST_COLUMNS = 512
"""More columns do not fit shared memory and spill: V3.2's 576 run in torch only."""
_LOG2_E = tl.constexpr(LOG2_E)


def segment_decode(
    q: Tensor, rows: Tensor, entries: Tensor | None, first: Tensor | None, count: Tensor, block_table: Tensor,
    cache: Tensor, out: Tensor, lse: Tensor, page: Page, scale: float, convention: Lse,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attend T queries to their entries; write and return (out, lse).

    q            bf16 [T, H, D], or on the CPU fp32 (float64 for fp64 layouts); D = page.dim, on CUDA at most 512; H a
                 multiple of page.heads
    rows         int32 [T]: row of `block_table` of each query; -1 is padding and sees nothing
    entries      int32 [T, N]: the entries that a query sees, of which the first count[t] are read; -1 is not there.
                 None: it sees the range [first[t], first[t] + count[t]); exactly one of `entries` and `first` is given
    first        int32 [T], not negative
    count        int32 [T]: at most N, or within reach of the block table
    block_table  int32 [requests, M]: block of entries [j * page.entries, (j + 1) * page.entries); -1 is not there
    cache        uint8 [blocks, page.stride]
    out          fp32 [S, T, H, D] (or float64), overwritten: S splits, each over its share of the entries
    lse          dtype of out [S, T, H], overwritten, in `convention`: log of the sum of exp(scale * q . k)
    scale        softmax scale
    convention   Lse.FLASHINFER or Lse.FLASHMLA; an empty split has output 0 and that convention's empty value

    InputError: wrong dtype, shape, alignment or device.
    """
    name, wide = "segment_decode", _pages.precision(page)
    t, h, d = q.shape if q.dim() == 3 else (None, page.heads, None)
    if h % page.heads:
        raise InputError(f"{name}:q: {h} heads are not a multiple of the page's {page.heads}")
    dispatch.expect(name, "q", q, dispatch.operands(q, wide), (t, h, page.dim if d is not None else None))
    if (entries is None) == (first is None):
        raise InputError(f"{name}:entries: give either a list of entries or the first of a range")
    if entries is not None:
        dispatch.expect(name, "entries", entries, (torch.int32,), (t, None))
    if first is not None:
        dispatch.expect(name, "first", first, (torch.int32,), (t,))
    for role, tensor in (("rows", rows), ("count", count)):
        dispatch.expect(name, role, tensor, (torch.int32,), (t,))
    dispatch.expect(name, "block_table", block_table, (torch.int32,), (None, None))
    dispatch.expect_arena(name, "cache", cache, page)
    dispatch.expect(name, "out", out, (wide,), (None, t, h, page.dim))
    dispatch.expect(name, "lse", lse, (wide,), (out.shape[0], t, h))
    tensors = (q, rows, entries, first, count, block_table, cache, out, lse)
    return dispatch.choose(name, torch_version, triton_version, *tensors)(*tensors, page, scale, convention)


def vectors(page: Page) -> tuple[str, str]:
    """Names of the page's key vector and value vector; the same where one vector is both."""
    return ("k", "v") if "k" in page.places else ("kv", "kv")


def _seen(
    t: int, split: int, splits: int, rows: Tensor, entries: Tensor | None, first: Tensor | None, count: Tensor,
    block_table: Tensor, page: Page,
) -> Tensor:  # fmt: skip
    """int64 slots that query `t` reads in `split`, in the order given; those not there are left out."""
    n = int(count[t]) if rows[t] >= 0 else 0
    if entries is not None:
        n = min(n, entries.shape[1])
    share = cdiv(cdiv(n, TILE), splits) * TILE
    low, high = min(split * share, n), min((split + 1) * share, n)
    if entries is not None:
        listed = entries[t, low:high]
    else:
        listed = torch.arange(low, high, device=count.device) + (0 if first is None else first[t])
    slots = _pages.table_slots(block_table, int(rows[t]), listed, page)
    return slots if bool((slots >= 0).all()) else slots[slots >= 0]


def reference(
    q: Tensor, rows: Tensor, entries: Tensor | None, first: Tensor | None, count: Tensor, block_table: Tensor,
    cache: Tensor, out: Tensor, lse: Tensor, page: Page, scale: float, convention: Lse,
) -> tuple[Tensor, ...]:  # fmt: skip
    """float64 [S, T, H, D] and [S, T, H]."""
    result = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    logs = torch.full(lse.shape, -math.inf, dtype=torch.float64, device=out.device)
    group = q.shape[1] // page.heads
    key, value = vectors(page)
    for split, t in torch.cartesian_prod(torch.arange(len(out)), torch.arange(len(q))).tolist():
        slots = _seen(t, split, len(out), rows, entries, first, count, block_table, page)
        if len(slots):
            k = _pages.read_exact(cache, slots, page, key).repeat_interleave(group, dim=1)
            v = _pages.read_exact(cache, slots, page, value).repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[t].double(), k) * scale
            result[split, t] = torch.einsum("hn,nhd->hd", scores.softmax(1), v)
            logs[split, t] = scores.logsumexp(1)
    return result, convention.from_natural(logs)


def torch_version(
    q: Tensor, rows: Tensor, entries: Tensor | None, first: Tensor | None, count: Tensor, block_table: Tensor,
    cache: Tensor, out: Tensor, lse: Tensor, page: Page, scale: float, convention: Lse,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`segment_decode` on any device that torch knows; each query by itself, so no result depends on the batch."""
    out.zero_()
    lse.fill_(convention.empty)
    wide = _pages.precision(page)
    for split in range(len(out)):
        for t in range(len(q)):
            slots = _seen(t, split, len(out), rows, entries, first, count, block_table, page)
            if len(slots):
                asked = q[t].to(wide).view(page.heads, -1, q.shape[2]) * scale
                result, log = _streamed(asked, slots, cache, page)
                out[split, t] = result.view(q.shape[1:])
                lse[split, t] = convention.from_natural(log.flatten())
    return out, lse


def _streamed(asked: Tensor, slots: Tensor, cache: Tensor, page: Page) -> tuple[Tensor, Tensor]:
    """[page heads, group, D] and natural [page heads, group, 1] of scaled queries over entries that are all there.

    STREAMED entries at a time through a running softmax: widened entries stay in the CPU's cache between the products.
    """
    key, value = vectors(page)
    result = total = top = asked.new_zeros(())
    for low in range(0, len(slots), STREAMED):
        part = slots[low : low + STREAMED]
        k = _pages.read_there(cache, part, page, key).transpose(0, 1)  # [page heads, n, D]
        v = k if value == key else _pages.read_there(cache, part, page, value).transpose(0, 1)
        scores = asked @ k.transpose(1, 2)
        highest = scores.amax(-1, keepdim=True)
        if low:
            highest = torch.maximum(highest, top)
            kept = (top - highest).exp_()
            result, total = result.mul_(kept), total.mul_(kept)
        share = (scores - highest).exp_()
        result = result.baddbmm_(share, v) if low else share @ v
        total = total + share.sum(-1, keepdim=True)
        top = highest
    return result / total, top + total.log()


@jit
def _kernel(
    q: tl.tensor, rows: tl.tensor, entries: tl.tensor, first: tl.tensor, count: tl.tensor, block_table: tl.tensor,
    cache: tl.tensor, out: tl.tensor, lse: tl.tensor, scale: tl.tensor, listed: tl.tensor, table_width: tl.tensor,
    K: tl.constexpr, V: tl.constexpr, SHARED: tl.constexpr, LISTED: tl.constexpr, H: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, HEADS: tl.constexpr, N: tl.constexpr, BASE2: tl.constexpr,
    EMPTY: tl.constexpr, UPCAST: tl.constexpr,
) -> None:  # fmt: skip
    query = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // PARTS
    member = tl.program_id(1) % PARTS * HEADS + tl.arange(0, HEADS)
    split = tl.program_id(2)
    head = kv_head * GROUP + member
    cols = tl.arange(0, K.width)
    inside = (member < GROUP)[:, None] & (cols < K.dim)[None, :]
    asked = tl.load(q + (query * H + head)[:, None] * K.dim + cols[None, :], mask=inside, other=0.0)
    if UPCAST:
        asked = asked.to(tl.float32)
    row = tl.load(rows + query).to(tl.int64)
    n = tl.where(row < 0, 0, tl.load(count + query))
    if LISTED:
        n = tl.minimum(n, listed)
    share = tl.cdiv(tl.cdiv(n, N), tl.num_programs(2)) * N
    high = tl.minimum((split + 1) * share, n)

    top = tl.full((HEADS,), float("-inf"), tl.float32)
    total = tl.full((HEADS,), 0.0, tl.float32)
    result = tl.full((HEADS, V.width), 0.0, tl.float32)
    for low in range(split * share, high, N):
        item = low + tl.arange(0, N)
        ok = item < high
        listed_at = entries + query * listed + item
        entry = tl.load(listed_at, mask=ok, other=-1) if LISTED else tl.load(first + query) + item
        ok = ok & (entry >= 0)
        block = tl.load(block_table + row * table_width + entry // K.entries, mask=ok, other=-1).to(tl.int64)
        ok = ok & (block >= 0)
        index = (entry % K.entries).to(tl.int64)
        k = load_rows(cache, block, index, kv_head, ok, K, not UPCAST)
        v = k if SHARED else load_rows(cache, block, index, kv_head, ok, V, not UPCAST)
        scores = tl.dot(asked, tl.trans(k), input_precision="ieee")
        scores = tl.where(ok[None, :], scores * (scale * _LOG2_E), float("-inf"))
        higher = tl.maximum(top, tl.max(scores, axis=1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - finite[:, None])
        kept = tl.exp2(top - finite)
        total = total * kept + tl.sum(weight, axis=1)
        result = result * kept[:, None]
        result = tl.dot(weight if UPCAST else weight.to(tl.bfloat16), v, result, input_precision="ieee")
        top = higher

    some = total > 0.0
    whole = tl.where(some, total, 1.0)
    log = top + tl.log2(whole)
    at = (split.to(tl.int64) * tl.num_programs(0) + query) * H + head
    tl.store(lse + at, tl.where(some, log if BASE2 else log / _LOG2_E, EMPTY), mask=member < GROUP)
    wide = tl.arange(0, V.width)
    inside = (member < GROUP)[:, None] & (wide < V.dim)[None, :]
    tl.store(out + at[:, None] * V.dim + wide[None, :], result / whole[:, None], mask=inside)


def grid(
    q: Tensor, rows: Tensor, entries: Tensor | None, first: Tensor | None, count: Tensor, block_table: Tensor,
    cache: Tensor, out: Tensor, lse: Tensor, page: Page, scale: float, convention: Lse,
) -> tuple[int, ...]:  # fmt: skip
    """Programs: queries, blocks of heads of one page head, splits."""
    group = q.shape[1] // page.heads
    return len(q), page.heads * cdiv(group, _heads(group, _major(q))), len(out)


def triton_version(
    q: Tensor, rows: Tensor, entries: Tensor | None, first: Tensor | None, count: Tensor, block_table: Tensor,
    cache: Tensor, out: Tensor, lse: Tensor, page: Page, scale: float, convention: Lse,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`segment_decode` in Triton: one program per query, split, and block of heads of one page head."""
    major = _major(q)
    constants = _constants(page, q.shape[1], convention, entries is not None, major)
    _kernel[grid(q, rows, entries, first, count, block_table, cache, out, lse, page, scale, convention)](
        q, rows, count if entries is None else entries, count if first is None else first, count, block_table, cache,
        out, lse, scale, 0 if entries is None else entries.shape[1], block_table.shape[1],
        **constants, num_warps=_warps(major),
    )  # fmt: skip
    return out, lse


def _major(q: Tensor) -> int:
    """Major compute capability of the query's GPU; without one, that of the H200."""
    return torch.cuda.get_device_capability(q.device)[0] if q.is_cuda else 9


def _heads(group: int, major: int) -> int:
    """Heads of a program: from sm_90 on the tensor cores want 64 rows at once; on sm_80 so many heads spill."""
    return min(64 if major >= 9 else 16, max(16, power_of_two(group)))


def _warps(major: int) -> int:
    return 8 if major >= 9 else 4


def _constants(page: Page, heads: int, convention: Lse, listed: bool, major: int) -> dict[str, Any]:
    """Compile-time constants."""
    key, value = vectors(page)
    if page.dim > MOST_COLUMNS:
        raise InputError(f"segment_decode:page: {page.dim} columns, the Triton kernel holds {MOST_COLUMNS} at most")
    group = heads // page.heads
    block = _heads(group, major)
    return {
        "K": _pages.codec("segment_decode", page, key), "V": _pages.codec("segment_decode", page, value),
        "SHARED": key == value, "LISTED": listed, "H": heads, "GROUP": group, "PARTS": cdiv(group, block),
        "HEADS": block, "N": TILE, "BASE2": convention.base2, "EMPTY": convention.empty, "UPCAST": INTERPRETED,
    }  # fmt: skip


def aot_cases() -> tuple[AotCase, ...]:
    """V4's window or HCA (range) and CSA (list) in fp8, bf16 latents, and grouped heads in NHD and HND."""
    mla, plain = load("fp8_ds_mla_584").page(64), load("bf16").page(64, dim=512)
    nhd, hnd = (load(name).page(16, heads=8, dim=128) for name in ("bf16_nhd", "bf16_hnd"))
    return tuple(
        aot_case(kind, page, 64, listed, major)
        for kind, page, listed in (
            ("range", mla, False), ("list", mla, True), ("bf16", plain, True), ("nhd", nhd, False), ("hnd", hnd, False),
        )
        for major in (8, 9)
    )  # fmt: skip


def aot_case(kind: str, page: Page, heads: int, listed: bool, major: int, tile: int = TILE) -> AotCase:
    """Decode of `heads` heads as launched on GPUs of that major version; `tile` entries at a time."""
    pointers = dict.fromkeys(("rows", "entries", "first", "count", "block_table"), "*i32") | {
        "q": "*bf16", "cache": "*u8", "out": "*fp32", "lse": "*fp32",
    }  # fmt: skip
    arguments = pointers | {"scale": "fp32", "listed": "i32", "table_width": "i32"}
    constants = _constants(page, heads, Lse.FLASHMLA, listed, major) | {"N": tile}
    return AotCase(
        f"segment_decode[{kind}]", _kernel, arguments, constants, tuple(pointers), _warps(major),
        architectures=(80,) if major == 8 else (90, 100),
    )  # fmt: skip
