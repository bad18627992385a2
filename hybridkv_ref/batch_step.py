"""One decode step of a batch in static shapes: what a graph captures.

The small decoder's weights and layers once more, one token for each of a fixed number of requests, and nothing decided
in Python: a row that folds nothing, sees nothing or is nobody's takes part in every launch and is told so by the
contents of ``BatchMemory``.  Requests of any stage share one launch: first token, just folded, window slid, restored.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hybridkv_ref.batch_memory import BatchMemory
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_attention import CONVENTION, AttentionLayer
from hybridkv_ref.decoder_geometry import Layouts, Sizes
from hybridkv_ref.decoder_math import linear, rms_norm, rotate, sigmoid, silu
from hybridkv_ref.decoder_plan import Folded
from hybridkv_ref.decoder_weights import Attention, Compressor, Delta, Indexer, Weights
from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels.compress_pool_quant import compress_pool_quant
from hybridkv_ref.kernels.gather_dequant import gather_dequant
from hybridkv_ref.kernels.index_build import index_build
from hybridkv_ref.kernels.indexer_logits import indexer_logits
from hybridkv_ref.kernels.merge_lse import merge_lse
from hybridkv_ref.kernels.segment_decode import segment_decode
from hybridkv_ref.kernels.tail_append import tail_append
from hybridkv_ref.kernels.topk_select import topk_select
from hybridkv_ref.layouts import load

V4_SIZES = Sizes(
    window=8, window_block=4, csa_block=16, hca_block=16, top_k=3, hidden=32, heads=4, head_dim=512, rotary=64,
    query_rank=16, output_rank=8, index_heads=4, index_dim=128, delta_dim=4, feed=32, reach=64,
)  # fmt: skip
"""Head sizes of DeepSeek-V4, so that its byte formats and kernels are used; all else is small."""


class BatchStep:
    """A step of ``rows`` requests on ``device``.

    ``narrow``: attention queries in bf16, as tensor cores take them (always so on CUDA).  ``logits``: [rows, vocab],
    overwritten by every run; a padding row's mean nothing.
    """

    def __init__(
        self, decoder: Decoder, rows: int, device: torch.device | str = "cpu", narrow: bool = False, spare: int = 2
    ) -> None:
        if decoder.encoding.epoch or decoder.sizes.ring_windows:
            raise InputError("batch:decoder: index keys of epoch 0 and paged windows only")
        self.decoder, self.memory = decoder, BatchMemory(decoder, rows, device, spare)
        self.weights: Weights = _moved(decoder.weights, self.memory.device)
        self._dtype = decoder.weights.embed.dtype
        self._narrow = narrow or self.memory.device.type == "cuda"
        self._rotary = {
            mixer.layer: mixer.rotary.to(self.memory.device)
            for mixer in decoder.mixers
            if isinstance(mixer, AttentionLayer)
        }
        self.logits = torch.zeros(rows, decoder.sizes.vocab, dtype=self._dtype, device=self.memory.device)

    def buffers(self) -> Mapping[str, Tensor]:
        """All memory of the step by name."""
        arenas = {f"arena/{layer}/{group}": arena for (layer, group), arena in self.memory.arenas.items()}
        rotary = {f"rotary/{layer}": table for layer, table in self._rotary.items()}
        return dict(_named("weights", self.weights)) | rotary | arenas | self.memory.contents | {"logits": self.logits}

    def padded(self) -> bool:
        """Whether every padding row addresses the null slot, and no slot of a request."""
        return self.memory.padded()

    def write(self, tokens: Mapping[int, int], positions: Mapping[int, int]) -> None:
        """The next step's contents: a token at a position for some rows, padding for the others."""
        self.memory.write(tokens, positions)

    def run(self) -> None:
        """Launches the step over the contents of now."""
        fixed = self.decoder.sizes.fixed_order
        x = self.weights.embed[self.memory.contents["tokens"]]
        for number, layer in enumerate(self.weights.layers):
            inner = rms_norm(x, layer.norm)
            if isinstance(layer.mixer, Delta):
                x = x + self._recur(number, layer.mixer, inner)
            else:
                x = x + self._attention(number, layer.mixer, inner)
            inner = rms_norm(x, layer.feed_norm)
            gate, up = (linear(inner, m, fixed) for m in (layer.feed_gate, layer.feed_up))
            x = x + linear(silu(gate) * up, layer.feed_down, fixed)
        self.logits.copy_(linear(rms_norm(x, self.weights.norm), self.weights.head, fixed))

    # ---- Attention ----

    def _attention(self, layer: int, w: Attention, x: Tensor) -> Tensor:
        sizes, plan, n = self.decoder.sizes, self.decoder.plans[layer], len(x)
        positions = self.memory.contents["positions"]
        turns = self._rotary[layer][positions.clamp(min=0)]
        low = rms_norm(linear(x, w.q_down, sizes.fixed_order), w.q_norm)
        q = rms_norm(linear(low, w.q_up, sizes.fixed_order).view(n, sizes.heads, sizes.head_dim))
        q = self._operand(rotate(q, turns))
        kv = rotate(rms_norm(linear(x, w.kv, sizes.fixed_order), w.kv_norm)[:, None], turns)[:, 0].contiguous()
        index_build(kv, *self._target(layer, plan.window))
        first = (positions - (sizes.window - 1)).clamp(min=0)
        parts = [self._attend(layer, plan.window, q, None, first.int(), (positions + 1 - first).int())]
        if plan.entries is not None and w.compressor is not None:
            visible = ((positions + 1) // plan.entries.ratio).int()
            self._fold(layer, plan.entries, w.compressor, x)
            if plan.index is not None and w.indexer is not None:
                self._fold(layer, plan.index, w.indexer.compressor, x)
                chosen = self._choose(layer, plan.index, w.indexer, x, low, turns, visible)
                listed = torch.full_like(visible, sizes.top_k)
                parts.append(self._attend(layer, plan.entries.entries, q, chosen, None, listed))
            else:
                parts.append(self._attend(layer, plan.entries.entries, q, None, torch.zeros_like(visible), visible))
        out, lse = x.new_empty(q.shape), x.new_empty(n, sizes.heads)
        merge_lse(torch.cat([o for o, _ in parts]), torch.cat([s for _, s in parts]), w.sink, out, lse, CONVENTION)
        grouped = rotate(out, turns, back=True).reshape(n, sizes.output_groups, -1)
        down = w.out_down.view(sizes.output_groups, sizes.output_rank, -1)
        narrow = [linear(grouped[:, g], down[g], sizes.fixed_order) for g in range(sizes.output_groups)]
        return linear(torch.cat(narrow, dim=-1), w.out_up, sizes.fixed_order)

    def _operand(self, q: Tensor) -> Tensor:
        return (q.to(torch.bfloat16) if self._narrow else q).contiguous()

    def _target(self, layer: int, group: str) -> tuple[Tensor, Tensor, Any]:
        """Slots of this step's rows, arena and page."""
        return (
            self.memory.contents[f"write/{group}"], self.memory.arenas[layer, group], self.memory.forms[group].page
        )  # fmt: skip

    def _attend(
        self, layer: int, group: str, q: Tensor, entries: Tensor | None, first: Tensor | None, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        memory = self.memory
        out = torch.empty(1, *q.shape, dtype=self._dtype, device=q.device)
        return segment_decode(
            q, memory.contents["rows"], entries, first, count, memory.contents[f"table/{group}"],
            memory.arenas[layer, group], out, out.new_empty(out.shape[:3]), memory.forms[group].page,
            self.decoder.sizes.head_dim**-0.5, CONVENTION,
        )  # fmt: skip

    def _fold(self, layer: int, folded: Folded, w: Compressor, x: Tensor) -> None:
        """Appends the tail rows, and makes the entries of the rows that have a slot for one."""
        fixed, positions = self.decoder.sizes.fixed_order, self.memory.contents["positions"]
        kv, score = (linear(x, m, fixed).contiguous() for m in (w.kv, w.gate))
        slots, state, page = self._target(layer, folded.tail)
        tail_append(kv, score, w.bias, positions.clamp(min=0), slots, state, page)
        out_slots, arena, target = self._target(layer, folded.entries)
        compress_pool_quant(
            state, self.memory.contents[f"pool/{folded.entries}"], (positions - (folded.ratio - 1)).clamp(min=0),
            w.norm, self._rotary[layer], out_slots, arena, page, target, folded.halo,
        )  # fmt: skip

    def _choose(
        self, layer: int, folded: Folded, w: Indexer, x: Tensor, low: Tensor, turns: Tensor, visible: Tensor
    ) -> Tensor:
        """int32 [rows, k]: the entries that the indexer chooses."""
        sizes, n, memory = self.decoder.sizes, len(x), self.memory
        table, arena = memory.contents[f"table/{folded.entries}"], memory.arenas[layer, folded.entries]
        page = memory.forms[folded.entries].page
        q = linear(low, w.q, sizes.fixed_order).view(n, sizes.index_heads, sizes.index_dim)
        scale = float(sizes.index_dim * sizes.index_heads) ** -0.5
        weights = (linear(x, w.head, sizes.fixed_order) * scale).contiguous()
        logits = x.new_empty(n, table.shape[1] * page.entries)
        rows = memory.contents["rows"]
        indexer_logits(self._operand(rotate(q, turns)), weights, rows, visible, table, arena, logits, page)
        return topk_select(logits, visible, torch.empty(n, sizes.top_k, dtype=torch.int32, device=x.device))

    # ---- Recurrence ----

    def _recur(self, layer: int, w: Delta, x: Tensor) -> Tensor:
        """The gated delta rule for one token of every row, from the state before it to the state after it."""
        sizes, group, n = self.decoder.sizes, self.decoder.plans[layer].state, len(x)
        heads, dim = sizes.delta_heads, sizes.delta_dim
        slots, arena, page = self._target(layer, group)
        before = gather_dequant(arena, self.memory.contents[f"read/{group}"], x.new_empty(n, 1, page.dim), page)[:, 0]
        split = heads * dim**2
        mixed = linear(x, w.mixed, sizes.fixed_order)
        inputs = torch.cat((before[:, split:].view(n, sizes.conv - 1, -1), mixed[:, None]), dim=1)
        mix = silu((inputs * w.conv).sum(1)).view(n, 3, heads, dim)
        q, k = (rms_norm(mix[:, part]) * dim**-0.5 for part in (0, 1))
        decay = sigmoid(linear(x, w.decay, sizes.fixed_order) + 2.0)
        rate = sigmoid(linear(x, w.rate, sizes.fixed_order))
        memory = before[:, :split].view(n, heads, dim, dim) * decay[:, :, None, None]
        error = mix[:, 2] - (memory * k[..., None]).sum(2)
        memory = memory + rate[:, :, None, None] * k[..., None] * error[:, :, None]
        made = torch.cat((memory.flatten(1), inputs[:, 1:].flatten(1)), dim=1)
        index_build(made, slots, arena, page)
        out = rms_norm((memory * q[..., None]).sum(2)).flatten(1)
        return linear(out, w.out, sizes.fixed_order)


def v4_decoder(seed: int = 0) -> Decoder:
    """A decoder in the formats that V4 stores: fp8 entries and index keys, fp32 tails; recurrent state in fp32."""
    formats = Layouts(load("fp8_ds_mla_584"), load("index_fp8_132"), load("state_fp32"), load("fp32"))
    return Decoder(V4_SIZES, seed, formats)


def feed(
    step: BatchStep, run: Callable[[], object], texts: Mapping[int, Sequence[int]], start: int, end: int
) -> Tensor:
    """Logits [end - start, rows, vocab]: tokens [start, end) of every row's text, one a step; ``run`` makes each."""
    found = []
    for position in range(start, end):
        step.write({row: text[position] for row, text in texts.items()}, dict.fromkeys(texts, position))
        run()
        found.append(step.logits.clone())
    return torch.stack(found)


def _moved(value: Any, device: torch.device) -> Any:
    """A tree of dataclasses and tuples with its tensors on ``device``."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {f.name: _moved(getattr(value, f.name), device) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **parts)
    return value


def _named(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors of such a tree by their path."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, tuple):
        for number, part in enumerate(value):
            yield from _named(f"{name}/{number}", part)
    elif dataclasses.is_dataclass(value):
        for part in dataclasses.fields(value):
            yield from _named(f"{name}/{part.name}", getattr(value, part.name))
