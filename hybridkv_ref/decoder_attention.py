"""One attention layer of the small decoder: window, compressed entries with or without an indexer, one merge.

What a query at t sees (FACTS section 2): the window rows [max(0, t - W + 1), t]; entry i of ratio m if t >= m i + m -
1, on indexed layers only the top k of these.  Entries are attended as stored, also by the step that makes them.  Every
operation on cached bytes is one of ``kernels/``; this module only says which rows, slots and positions they get.
"""

import torch
from torch import Tensor

from hybridkv_ref.decoder_geometry import Sizes
from hybridkv_ref.decoder_math import linear, rms_norm, rotate
from hybridkv_ref.decoder_plan import Folded, IndexEncoding, Plan, Step
from hybridkv_ref.decoder_state import Rows, RunningState
from hybridkv_ref.decoder_weights import Attention, Compressor, Indexer
from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels._lse import Lse
from hybridkv_ref.kernels.gather_dequant import gather_dequant
from hybridkv_ref.kernels.index_build import index_build
from hybridkv_ref.kernels.indexer_logits import indexer_logits
from hybridkv_ref.kernels.merge_lse import merge_lse
from hybridkv_ref.kernels.segment_decode import segment_decode
from hybridkv_ref.kernels.topk_select import topk_select

CONVENTION = Lse.FLASHMLA


def reencode(keys: Rows, listed: Tensor, old: IndexEncoding, new: IndexEncoding) -> None:
    """Rewrites the listed index keys (int64) from one epoch's encoding to another's, in place."""
    slots = keys.slots(listed)
    out = torch.empty(len(slots), 1, keys.page.dim, dtype=_pages.precision(keys.page))
    plain = old.decode(gather_dequant(keys.arena, slots, out, keys.page)[:, 0])
    index_build(new.encode(plain).contiguous(), slots, keys.arena, keys.page)


class AttentionLayer:
    """A layer's attention over a request's state."""

    def __init__(
        self, layer: int, plan: Plan, weights: Attention, sizes: Sizes, rotary: Tensor, encoding: IndexEncoding
    ) -> None:
        self.layer, self.plan, self.weights, self.sizes = layer, plan, weights, sizes
        self.rotary, self.encoding = rotary, encoding

    def forward(self, x: Tensor, step: Step, state: RunningState) -> Tensor:
        """[T, hidden] of x [T, hidden]; writes the rows and entries that the step makes."""
        w, sizes, n = self.weights, self.sizes, len(x)
        turns = self.rotary[step.positions.clamp(min=0)]
        low = rms_norm(linear(x, w.q_down, sizes.fixed_order), w.q_norm)
        q = rms_norm(linear(low, w.q_up, sizes.fixed_order).view(n, sizes.heads, sizes.head_dim))
        q = rotate(q, turns).contiguous()
        kv = rotate(rms_norm(linear(x, w.kv, sizes.fixed_order), w.kv_norm)[:, None], turns)[:, 0].contiguous()
        window = state.rows(self.layer, self.plan.window)
        written = step.positions >= state.writes_from(self.plan.window)
        store = state.operation("append", self.plan.window)
        store(kv, step.slots(window).where(written, -1), window.arena, window.page)
        parts = [self._attend(q, window, self._window_rows(window, step, state.begins(self.layer)), step)]
        if self.plan.entries is not None and w.compressor is not None:
            entries = self._fold(x, w.compressor, self.plan.entries, step, state)
            if self.plan.index is not None and w.indexer is not None:
                keys = self._fold(x, w.indexer.compressor, self.plan.index, step, state, self.encoding)
                listed = self._choose(x, low, turns, w.indexer, keys, step.visible(self.plan.index.ratio))
            else:
                listed = self._all(step.visible(self.plan.entries.ratio))
            parts.append(self._attend(q, entries, listed, step))
        out, lse = torch.empty_like(q), q.new_empty(n, sizes.heads)
        merge_lse(torch.cat([o for o, _ in parts]), torch.cat([s for _, s in parts]), w.sink, out, lse, CONVENTION)
        grouped = rotate(out, turns, back=True).reshape(n, sizes.output_groups, -1)
        down = w.out_down.view(sizes.output_groups, sizes.output_rank, -1)
        narrow = [linear(grouped[:, g], down[g], sizes.fixed_order) for g in range(sizes.output_groups)]
        return linear(torch.cat(narrow, dim=-1), w.out_up, sizes.fixed_order)

    def _window_rows(self, window: Rows, step: Step, begins: int) -> Tensor:
        """int32 [T, W]: the rows that each query sees, in the order of positions; none before ``begins``."""
        span = torch.arange(1 - self.sizes.window, 1)
        rows = step.positions[:, None] + span
        return window.index(rows.where((rows >= begins) & (step.positions >= 0)[:, None], -1)).int()

    @staticmethod
    def _all(visible: Tensor) -> Tensor:
        """int32 [T, most]: every visible entry."""
        rows = torch.arange(int(visible.max()))
        return rows.where(rows < visible[:, None], -1).int()

    def _choose(self, x: Tensor, low: Tensor, turns: Tensor, indexer: Indexer, keys: Rows, visible: Tensor) -> Tensor:
        """int32 [T, k]: the entries that the indexer chooses among the visible ones."""
        sizes, n = self.sizes, len(x)
        q = linear(low, indexer.q, sizes.fixed_order).view(n, sizes.index_heads, sizes.index_dim)
        q = self.encoding.encode(rotate(q, turns)).contiguous()
        scale = float(sizes.index_dim * sizes.index_heads) ** -0.5
        weights = (linear(x, indexer.head, sizes.fixed_order) * scale).contiguous()
        logits = x.new_empty(n, keys.table.shape[1] * keys.page.entries)
        rows = torch.zeros(n, dtype=torch.int32)
        indexer_logits(q, weights, rows, visible, keys.table, keys.arena, logits, keys.page)
        return topk_select(logits, visible, torch.empty(n, sizes.top_k, dtype=torch.int32))

    def _fold(
        self, x: Tensor, weights: Compressor, folded: Folded, step: Step, state: RunningState,
        encoding: IndexEncoding | None = None,
    ) -> Rows:  # fmt: skip
        """Appends the step's tail rows and makes the entries that end in the step and after the frontier."""
        tail, target = state.rows(self.layer, folded.tail), state.rows(self.layer, folded.entries)
        kv, score = (linear(x, m, self.sizes.fixed_order).contiguous() for m in (weights.kv, weights.gate))
        append, pool = state.operation("append", folded.tail), state.operation("fold_begin", folded.tail)
        append(kv, score, weights.bias, step.positions.clamp(min=0), step.slots(tail), tail.arena, tail.page)
        last = step.end // folded.ratio
        made = torch.arange(min(max(step.start, step.frontier) // folded.ratio, last), last)
        if len(made):
            first = made * folded.ratio
            pooled = first[:, None] + torch.arange(-folded.halo, folded.ratio)
            pool(
                tail.arena, tail.slots(pooled.clamp(min=-1)), first, weights.norm,
                self.rotary, target.slots(made), target.arena, tail.page, target.page, folded.halo,
            )  # fmt: skip
            if encoding is not None and encoding.epoch:
                reencode(target, made, IndexEncoding(), encoding)
        return target

    def _attend(self, q: Tensor, rows: Rows, listed: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Output [1, T, H, D] and log-sum-exp over the listed rows (int32 [T, N], -1 is none)."""
        out, lse = q.new_empty(1, *q.shape), q.new_empty(1, *q.shape[:2])
        count = torch.full((len(q),), listed.shape[1], dtype=torch.int32)
        scale = self.sizes.head_dim**-0.5
        return segment_decode(
            q, step.request_rows, listed.contiguous(), None, count, rows.table, rows.arena, out, lse, rows.page,
            scale, CONVENTION,
        )  # fmt: skip
