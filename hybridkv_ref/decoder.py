"""A small decoder of DeepSeek-V4's shape that reads and writes nothing but cache rows: the proof of the recovery rules.

Window layers, CSA with overlap and indexer, HCA, and a gated delta layer, with random weights.  ``forward`` computes
tokens [start, start + n) of one request over its ``RunningState``.  What must be there is what ``recovery.toml`` says
and nothing else; given that, logits equal those of a run from position 0 - to the bit where ``Sizes.fixed_order`` is
set.
"""

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from hybridkv_ref.decoder_attention import AttentionLayer
from hybridkv_ref.decoder_geometry import Descriptor, Layouts, Sizes, Stored, exact_layouts, small_model, stored_objects
from hybridkv_ref.decoder_math import linear, plain_frequencies, rms_norm, rotary_table, silu, yarn_frequencies
from hybridkv_ref.decoder_plan import IndexEncoding, Step, layer_plans
from hybridkv_ref.decoder_recurrent import DeltaLayer
from hybridkv_ref.decoder_state import PrivateState, RunningState
from hybridkv_ref.decoder_weights import Delta, random_weights
from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import _pages

THETA, COMPRESSED_THETA = 1e4, 1.6e5
YARN_FACTOR, YARN_ORIGINAL = 16.0, 65536


class Decoder:
    """Weights from ``seed``, geometry from ``sizes``, byte formats from ``layouts``, index keys in ``encoding``."""

    def __init__(
        self, sizes: Sizes, seed: int = 0, layouts: Layouts | None = None, encoding: IndexEncoding | None = None
    ) -> None:
        self.sizes, self.seed, self.model = sizes, seed, small_model(sizes)
        self.layouts, self.encoding = layouts or exact_layouts(), encoding or IndexEncoding()
        self.stored = stored_objects(self.model, sizes, self.layouts)
        dtype = _pages.precision(self.layouts.tail.page(1, dim=2))
        self.plans = layer_plans(self.model)
        self.weights = random_weights(self.plans, sizes, seed, dtype)
        compressed = yarn_frequencies(sizes.rotary, COMPRESSED_THETA, YARN_FACTOR, YARN_ORIGINAL)
        main = rotary_table(plain_frequencies(sizes.rotary, THETA), sizes.reach).to(dtype)
        compressed = rotary_table(compressed, sizes.reach).to(dtype)
        self.mixers: list[AttentionLayer | DeltaLayer] = []
        for i, (plan, layer) in enumerate(zip(self.plans, self.weights.layers, strict=True)):
            if isinstance(layer.mixer, Delta):
                self.mixers.append(DeltaLayer(i, plan.state, layer.mixer, sizes))
            else:
                rotary = compressed if plan.entries else main
                self.mixers.append(AttentionLayer(i, plan, layer.mixer, sizes, rotary, self.encoding))

    @property
    def identity(self) -> str:
        """What the values depend on besides tokens: weights and sizes; part of every key."""
        return f"seed {self.seed}, {msgspec.json.encode(self.sizes).decode()}"

    def descriptor(self, item: Stored) -> Descriptor:
        """The kernel ABI of an object that this decoder writes and reads."""
        plan = self.plans[item.layer]
        folded = {part.entries: part for part in (plan.entries, plan.index) if part is not None}
        by_tail = {part.tail: part for part in folded.values()}
        layout = item.page.layout
        return Descriptor(
            layout=layout.id,
            dim=item.dim,
            tile=layout.tile,
            scale_rule=layout.scale_rule,
            ratio=item.ratio,
            halo=by_tail[item.group].halo if item.group in by_tail else 0,
            rope="none" if item.shape in ("ring", "state") else "compressed" if folded else "main",
            epoch=self.encoding.epoch if plan.index is not None and item.group == plan.index.entries else 0,
        )

    def state(self, keep_all: bool = False) -> PrivateState:
        """An empty state of one request."""
        return PrivateState(self.stored, self.sizes, keep_all)

    def from_scratch(self, tokens: Sequence[int]) -> tuple[Tensor, PrivateState]:
        """Logits [n, vocab] of ``tokens`` with nothing cached, and the state with every row that they made."""
        state, step = self.state(keep_all=True), self.sizes.max_step
        runs = [self.forward(tokens[at : at + step], at, 0, state) for at in range(0, len(tokens), step)]
        return torch.cat(runs), state

    def forward(
        self, tokens: Sequence[int], start: int, frontier: int, state: RunningState, padding: int = 0
    ) -> Tensor:
        """Logits [n, vocab] of tokens at [start, start + n); the state then holds their rows.

        Entries that end at or before ``frontier`` are read and not written.  ``padding`` rows are computed as well,
        as a graph of fixed shape would, and touch nothing.  InputError: more tokens than a step or a request may
        have.
        """
        sizes, n = self.sizes, len(tokens)
        if not 1 <= n + padding <= sizes.max_step:
            raise InputError(f"decoder:tokens: {n} and {padding} of padding, expected 1 to {sizes.max_step} together")
        if not 0 <= start <= start + n <= sizes.reach:
            raise InputError(f"decoder:start: tokens {start} to {start + n} of a request of at most {sizes.reach}")
        step = Step(start, start + n, frontier, padding)
        x = self.weights.embed[torch.tensor([*tokens, *[0] * padding])]
        for mixer, layer in zip(self.mixers, self.weights.layers, strict=True):
            x = x + mixer.forward(rms_norm(x, layer.norm), step, state)
            inner = rms_norm(x, layer.feed_norm)
            gate, up = (linear(inner, m, sizes.fixed_order) for m in (layer.feed_gate, layer.feed_up))
            x = x + linear(silu(gate) * up, layer.feed_down, sizes.fixed_order)
        return linear(rms_norm(x[:n], self.weights.norm), self.weights.head, sizes.fixed_order)
