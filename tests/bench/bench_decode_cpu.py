"""What the paged torch path costs on the CPU against dense tensors: `python tests/bench/bench_decode_cpu.py [threads]`.

One query of DeepSeek-V4-Flash's head sizes (64 heads of 512, index 64 heads of 128) at 4,096 tokens, in two shapes:
1. attention over 4,096 stored entries (584 bytes each, widened on the way) by segment_decode, against torch's
   scaled_dot_product_attention over the same entries as a dense fp32 tensor, the heads as queries of one shared head;
2. one CSA layer's whole step: rows, folds, index scores, top 512, window, merge with a sink; against the same
   arithmetic on dense tensors.
Both sides run in turn in one process; medians, and the ratio of each pair's turns.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels._lse import Lse
from hybridkv_ref.kernels.compress_pool_quant import compress_pool_quant
from hybridkv_ref.kernels.index_build import index_build
from hybridkv_ref.kernels.indexer_logits import indexer_logits
from hybridkv_ref.kernels.merge_lse import merge_lse
from hybridkv_ref.kernels.segment_decode import segment_decode
from hybridkv_ref.kernels.tail_append import tail_append
from hybridkv_ref.kernels.topk_select import topk_select
from hybridkv_ref.layouts import Page, load

TOKENS, WINDOW, RATIO, TOP_K = 4_096, 128, 4, 512
HEADS, DIM, INDEX_DIM, ROTARY = 64, 512, 128, 64
SCALE = DIM**-0.5
TURNS = 40
Run = Callable[[], Tensor]

source = torch.Generator().manual_seed(0)


def normal(*shape: int) -> Tensor:
    """fp32, normal."""
    return torch.randn(shape, generator=source)


class Stored:
    """Entries in shuffled pages, and what they read as."""

    def __init__(self, page: Page, count: int) -> None:
        blocks = -(-count // page.entries)
        self.page, self.cache = page, _pages.empty_arena(page, blocks)
        self.table = torch.randperm(blocks, generator=source).int()[None]
        self.slots = _pages.table_slots(self.table, 0, torch.arange(count), page)
        _pages.write(self.cache, self.slots, normal(count, 1, page.dim), page)
        self.dense = _pages.read(self.cache, self.slots, page)[:, 0].contiguous()


def number(value: int) -> Tensor:
    """int32 [1]."""
    return torch.tensor([value], dtype=torch.int32)


def attention() -> tuple[Run, Run]:
    """The first shape."""
    kept, q = Stored(load("fp8_ds_mla_584").page(64), TOKENS), normal(1, HEADS, DIM)
    out, lse = torch.empty(1, 1, HEADS, DIM), torch.empty(1, 1, HEADS)

    def paged() -> Tensor:
        segment_decode(
            q, number(0), None, number(0), number(TOKENS), kept.table, kept.cache, out, lse, kept.page, SCALE,
            Lse.FLASHMLA,
        )  # fmt: skip
        return out[0, 0]

    def dense() -> Tensor:
        kv = kept.dense[None, None]
        return scaled_dot_product_attention(q[:, None], kv, kv, scale=SCALE)[0, 0]

    return paged, dense


def layer() -> tuple[Run, Run]:
    """The second shape; the last token folds an entry."""
    entry, key = load("fp8_ds_mla_584").page(64), load("index_fp8_132").page(64)
    count = TOKENS // RATIO
    window, entries, keys = Stored(entry, WINDOW), Stored(entry, count), Stored(key, count)
    q, asked, weights, sink = normal(1, HEADS, DIM), normal(1, HEADS, INDEX_DIM), normal(1, HEADS), normal(HEADS)
    kv, last = normal(1, DIM), torch.tensor([TOKENS - 1])
    tails = []
    for target, dim in ((entries, DIM), (keys, INDEX_DIM)):
        page = load("state_fp32").page(8, dim=2 * dim)
        state = _pages.empty_arena(page, 1)
        rows, scores = normal(8, page.dim), normal(8, page.dim)
        tail_append(rows, scores, None, torch.arange(8), torch.arange(8), state, page)
        tails.append((target, dim, page, state, rows, scores, normal(RATIO, 2 * dim), normal(dim)))
    angles = normal(TOKENS, 1, ROTARY // 2)
    rotary = torch.cat((angles.cos(), angles.sin()), dim=1)
    pooled_rows, seventh, entry_at = torch.arange(8)[None], torch.tensor([7]), last - 3
    zero, every, in_window, in_list = number(0), number(count), number(WINDOW), number(TOP_K)
    parts, logs = torch.empty(2, 1, HEADS, DIM), torch.empty(2, 1, HEADS)
    out, lse = torch.empty(1, HEADS, DIM), torch.empty(1, HEADS)
    logits, chosen = torch.empty(1, count), torch.empty(1, TOP_K, dtype=torch.int32)

    def paged() -> Tensor:
        index_build(kv, window.slots[-1:], window.cache, entry)
        for target, _, page, state, rows, scores, bias, norm in tails:
            tail_append(rows[-1:], scores[-1:], bias, last, seventh, state, page)
            compress_pool_quant(
                state, pooled_rows, entry_at, norm, rotary, target.slots[-1:], target.cache, page, target.page, 4
            )
        indexer_logits(asked, weights, zero, every, keys.table, keys.cache, logits, key)
        topk_select(logits, every, chosen)
        for part, (kept, listed, first, seen) in enumerate(
            ((window, None, zero, in_window), (entries, chosen, None, in_list))
        ):
            segment_decode(
                q, zero, listed, first, seen, kept.table, kept.cache, parts[part : part + 1], logs[part : part + 1],
                entry, SCALE, Lse.FLASHMLA,
            )  # fmt: skip
        return merge_lse(parts, logs, sink, out, lse, Lse.FLASHMLA)[0][0]

    mask = torch.zeros(HEADS, WINDOW + TOP_K + 1)
    mask[:, -1] = sink

    def dense() -> Tensor:
        window.dense[-1] = kv[0]
        for target, dim, _, _, rows, scores, bias, norm in tails:
            scores = torch.cat((scores[:-1], scores[-1:] + bias[3]))
            pooled = torch.cat((rows[:4, :dim], rows[4:, dim:])), torch.cat((scores[:4, :dim], scores[4:, dim:]))
            folded = (pooled[0] * pooled[1].softmax(0)).sum(0)
            folded = folded * torch.rsqrt(folded.square().mean() + 1e-6) * norm
            cos, sin = rotary[TOKENS - 4]
            even, odd = folded[-ROTARY::2].clone(), folded[-ROTARY + 1 :: 2].clone()
            folded[-ROTARY::2], folded[-ROTARY + 1 :: 2] = even * cos - odd * sin, even * sin + odd * cos
            target.dense[-1] = folded
        scored = weights[0] @ (asked[0] @ keys.dense.T).relu_()
        best = scored.topk(TOP_K).indices
        seen = torch.cat((window.dense, entries.dense[best], torch.zeros(1, DIM)))[None, None]
        return scaled_dot_product_attention(q[:, None], seen, seen, attn_mask=mask, scale=SCALE)[0, 0]

    return paged, dense


def compare(name: str, paged: Run, dense: Run) -> None:
    """Both sides in turn."""
    difference = (paged() - dense()).abs().max().item()
    times: list[tuple[float, float]] = []
    for _ in range(TURNS):
        turn = []
        for run in (paged, dense):
            begin = time.perf_counter()
            run()
            turn.append((time.perf_counter() - begin) * 1e3)
        times.append((turn[0], turn[1]))
    ours, theirs = (statistics.median(side) for side in zip(*times, strict=True))
    ratio = statistics.median(a / b for a, b in times)
    print(
        f"{name}: paged {ours:.2f} ms, dense {theirs:.2f} ms, {ratio:.2f} times (median of {TURNS} turns; least "
        f"{min(a for a, _ in times):.2f} and {min(b for _, b in times):.2f}); outputs differ by {difference:.1e}"
    )


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    with torch.no_grad():
        compare("attention over 4,096 entries", *attention())
        compare("one CSA layer's step at 4,096 tokens", *layer())
