"""topk_select: the k best entries of every query, with a rule for ties.

Theory. The rule is (score descending, index ascending): the choice depends on scores alone, not on padding, chunking
or the algorithm. The result lists the chosen entries by position, so attention adds them up in a fixed order. Vacuous
while a query sees no more than k entries. The Triton kernel selects by radix: four passes of 8 bits over
order-preserving integer keys find the k-th key, a fifth emits in index order what lies above it and the first of those
equal to it.
"""

import math

import torch
from torch import Tensor

from hybridkv_ref.kernels import dispatch
from hybridkv_ref.kernels._triton import AotCase, jit, tl

CHUNK = 2048
"""Scores that a program looks at in one go."""


def topk_select(logits: Tensor, visible: Tensor, chosen: Tensor) -> Tensor:
    """Write the best entries of T queries to `chosen` and return it.

    logits   fp32 [T, N] (float64 in torch only); -inf and NaN are never chosen, -0.0 equals 0.0
    visible  int32 [T]: only entries [0, visible) count, whatever lies beyond
    chosen   int32 [T, k], overwritten: indices ascending, then -1 if fewer than k can be chosen

    InputError: wrong dtype, shape or device.
    """
    name = "topk_select"
    wide = torch.float64 if logits.dtype is torch.float64 and logits.device.type == "cpu" else torch.float32
    dispatch.expect(name, "logits", logits, (wide,), (None, None))
    dispatch.expect(name, "visible", visible, (torch.int32,), (len(logits),))
    dispatch.expect(name, "chosen", chosen, (torch.int32,), (len(logits), None))
    run = dispatch.choose(name, torch_version, triton_version, logits, visible, chosen)
    return run(logits, visible, chosen)


def reference(logits: Tensor, visible: Tensor, chosen: Tensor) -> tuple[Tensor, ...]:
    """int32 [T, k], by sorting (score, index) pairs."""
    out = torch.full_like(chosen, -1)
    for t, row in enumerate(logits.tolist()):
        pairs = [(-score, i) for i, score in enumerate(row[: int(visible[t])]) if score > -math.inf]
        best = sorted(i for _, i in sorted(pairs)[: chosen.shape[1]])
        out[t, : len(best)] = torch.tensor(best, dtype=torch.int32)
    return (out,)


def torch_version(logits: Tensor, visible: Tensor, chosen: Tensor) -> Tensor:
    """`topk_select` on any device that torch knows. torch.topk gives the k-th score only: its ties are arbitrary."""
    n, k = logits.shape[1], min(chosen.shape[1], logits.shape[1])
    chosen.fill_(-1)
    if k == 0:
        return chosen
    index = torch.arange(n, device=logits.device)
    there = (index < visible[:, None]) & (logits > -math.inf)
    scores = torch.where(there, logits, torch.full_like(logits, -math.inf))
    last = scores.topk(k, dim=1).values[:, -1:]
    above, equal = scores > last, scores == last
    taken = (above | (equal & (equal.cumsum(1) <= k - above.sum(1, keepdim=True)))) & there
    query, entry = taken.nonzero(as_tuple=True)
    chosen[query, taken.cumsum(1)[query, entry] - 1] = entry.to(torch.int32)
    return chosen


@jit
def _keys(logits: tl.tensor, index: tl.tensor, seen: tl.tensor, columns: tl.tensor) -> tl.tuple:
    """uint32 keys that order as the scores do, and which of them can be chosen."""
    # masked by the static size: the compiler knows nothing of `seen`, and would load one score at a time
    score = tl.load(logits + index, mask=index < columns, other=float("-inf"))
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    keys = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits ^ 0x80000000)
    return keys, (index < seen) & (score > float("-inf"))


@jit
def _kernel(
    logits: tl.tensor, visible: tl.tensor, chosen: tl.tensor, columns: tl.tensor, K: tl.constexpr, N: tl.constexpr
) -> None:
    query = tl.program_id(0).to(tl.int64)
    logits += query * columns
    chosen += query * K
    seen = tl.minimum(tl.load(visible + query), columns)
    offsets = tl.arange(0, N)
    bins = tl.arange(0, 256)

    threshold = tl.full((), 0, tl.uint32)  # the k-th key, found 8 bits at a time
    settled = tl.full((), 0, tl.uint32)  # mask of the bits found so far
    wanted = tl.full((), K, tl.int32)  # how many of the keys that agree with the threshold so far are chosen
    for digit in tl.static_range(4):
        shift = 24 - 8 * digit
        counts = tl.full((256,), 0, tl.int32)
        for first in range(0, seen, N):
            keys, there = _keys(logits, first + offsets, seen, columns)
            there = there & ((keys & settled) == threshold)
            counts += tl.histogram(((keys >> shift) & 0xFF).to(tl.int32), 256, mask=there)
        total = tl.sum(counts)
        wanted = tl.minimum(wanted, total)
        reached = total - tl.cumsum(counts) + counts  # keys in this bin and above
        best = tl.max(tl.where(reached >= wanted, bins, 0))
        wanted -= tl.sum(tl.where(bins > best, counts, 0))
        threshold |= best.to(tl.uint32) << shift
        settled |= tl.full((), 0xFF, tl.uint32) << shift

    written = tl.full((), 0, tl.int32)
    ties = tl.full((), 0, tl.int32)
    for first in range(0, seen, N):
        keys, there = _keys(logits, first + offsets, seen, columns)
        equal = (there & (keys == threshold)).to(tl.int32)
        rank = ties + tl.cumsum(equal) - equal
        taken = (there & (keys > threshold)) | ((equal == 1) & (rank < wanted))
        place = written + tl.cumsum(taken.to(tl.int32)) - taken.to(tl.int32)
        tl.store(chosen + place, first + offsets, mask=taken)
        written += tl.sum(taken.to(tl.int32))
        ties += tl.sum(equal)
    for first in range(0, K, N):
        place = first + offsets
        tl.store(chosen + place, tl.full((N,), -1, tl.int32), mask=(place >= written) & (place < K))


def grid(logits: Tensor, visible: Tensor, chosen: Tensor) -> tuple[int, ...]:
    """Programs: queries."""
    return (len(logits),)


def triton_version(logits: Tensor, visible: Tensor, chosen: Tensor) -> Tensor:
    """`topk_select` in Triton: one program per query."""
    _kernel[grid(logits, visible, chosen)](logits, visible, chosen, logits.shape[1], chosen.shape[1], CHUNK)
    return chosen


def aot_cases() -> tuple[AotCase, ...]:
    """Top-k of 512 (V4-Flash) and 1024 (V4-Pro)."""
    pointers = {"logits": "*fp32", "visible": "*i32", "chosen": "*i32"}
    return tuple(
        AotCase(
            f"topk_select[{k}]", _kernel, pointers | {"columns": "i32"}, {"K": k, "N": CHUNK}, (*pointers, "columns")
        )
        for k in (512, 1024)
    )
