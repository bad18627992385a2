"""One gated delta layer: a causal convolution, then a matrix per head that every token decays and corrects.

The state after a token is the heads' matrices and the convolution's last inputs; it sums up all tokens before, so it
is of use at one position only.  A step writes the state after each of its tokens to a row of its own: drafts that are
rejected leave the accepted one as it was, and nothing is ever rewound.
"""

import torch
from torch import Tensor

from hybridkv_ref.decoder_geometry import Sizes
from hybridkv_ref.decoder_math import linear, rms_norm, sigmoid, silu
from hybridkv_ref.decoder_plan import Step
from hybridkv_ref.decoder_state import RunningState
from hybridkv_ref.decoder_weights import Delta
from hybridkv_ref.kernels.gather_dequant import gather_dequant
from hybridkv_ref.layouts import Page


class DeltaLayer:
    """A layer's recurrence over a request's state; ``group`` holds its rows."""

    def __init__(self, layer: int, group: str, weights: Delta, sizes: Sizes) -> None:
        self.layer, self.group, self.weights, self.sizes = layer, group, weights, sizes

    def forward(self, x: Tensor, step: Step, state: RunningState) -> Tensor:
        """[T, hidden] of x [T, hidden], token by token; zeros for tokens before the layer begins, and for padding."""
        w, sizes = self.weights, self.sizes
        rows = state.rows(self.layer, self.group)
        mixed, out = linear(x, w.mixed, sizes.fixed_order), x.new_zeros(len(x), w.out.shape[1])
        decay = sigmoid(linear(x, w.decay, sizes.fixed_order) + 2.0)
        rate = sigmoid(linear(x, w.rate, sizes.fixed_order))
        first = max(step.start, state.begins(self.layer))
        if first >= step.end:
            return linear(out, w.out, sizes.fixed_order)
        memory, inputs = self._load(rows.slots(torch.tensor([first - 1])), rows.arena, rows.page, x)
        made = []
        for i in range(first - step.start, step.end - step.start):
            inputs = torch.cat((inputs, mixed[i : i + 1]))
            mix = silu((inputs * w.conv).sum(0)).view(3, sizes.delta_heads, sizes.delta_dim)
            q, k, v = rms_norm(mix[0]) * sizes.delta_dim**-0.5, rms_norm(mix[1]) * sizes.delta_dim**-0.5, mix[2]
            memory = memory * decay[i, :, None, None]
            error = v - (memory * k[:, :, None]).sum(1)
            memory = memory + rate[i, :, None, None] * k[:, :, None] * error[:, None, :]
            out[i] = rms_norm((memory * q[:, :, None]).sum(1)).flatten()
            inputs = inputs[1:]
            made.append(torch.cat((memory.flatten(), inputs.flatten())))
        slots = rows.slots(torch.arange(first, step.end))
        state.operation("append", self.group)(torch.stack(made), slots, rows.arena, rows.page)
        return linear(out, w.out, sizes.fixed_order)

    def _load(self, slots: Tensor, arena: Tensor, page: Page, x: Tensor) -> tuple[Tensor, Tensor]:
        """The heads' matrices [heads, dim, dim] and the convolution's last inputs [taps - 1, columns]."""
        sizes = self.sizes
        row = gather_dequant(arena, slots, x.new_empty(1, 1, page.dim), page)[0, 0]
        split = sizes.delta_heads * sizes.delta_dim**2
        memory = row[:split].view(sizes.delta_heads, sizes.delta_dim, sizes.delta_dim)
        return memory, row[split:].view(sizes.conv - 1, -1)
