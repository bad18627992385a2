"""The decoder's arithmetic outside the kernels: projections, norms, rotary tables.

*Fixed order* (FACTS section 2): a matrix product rounds differently for every number of rows, so the same token gets
other bits in another chunk.  Here each output is one sum over a row of its own, whatever the chunk, and ``x / (1 +
exp(-x))`` stands for torch's silu and sigmoid, whose result depends on where a vector register ends.
"""

import math

import torch
from torch import Tensor


def linear(x: Tensor, weight: Tensor, fixed_order: bool) -> Tensor:
    """[..., out] of x [..., in] and weight [out, in]."""
    if fixed_order:
        return (x.unsqueeze(-2) * weight).sum(-1)
    return x @ weight.T


def rms_norm(x: Tensor, weight: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """x [..., dim] over its root mean square, times weight [dim]."""
    scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return scaled if weight is None else scaled * weight


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)), the same bits for the same value wherever it stands."""
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    """x / (1 + exp(-x))."""
    return x / (1.0 + torch.exp(-x))


def plain_frequencies(columns: int, theta: float) -> Tensor:
    """float64 [columns / 2]: angle per position of each pair of columns."""
    return theta ** (-torch.arange(0, columns, 2, dtype=torch.float64) / columns)


def yarn_frequencies(columns: int, theta: float, factor: float, original: int) -> Tensor:
    """float64 [columns / 2]: YaRN's frequencies: slow pairs stretched by ``factor``, fast ones left, a ramp between.

    ``original``: positions of the first training.  The ramp lies between 32 and 1 turns in them (YaRN's beta).
    """

    def column_of(turns: float) -> float:
        return columns * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(column_of(32)), 0), min(math.ceil(column_of(1)), columns - 1)
    pairs = torch.arange(columns // 2, dtype=torch.float64)
    stretched = ((pairs - low) / max(high - low, 0.001)).clamp(0, 1)
    plain = plain_frequencies(columns, theta)
    return plain / factor * stretched + plain * (1 - stretched)


def rotary_table(frequencies: Tensor, positions: int) -> Tensor:
    """float64 [positions, 2, columns / 2]: cosines, then sines, as compress_pool_quant reads them."""
    angles = torch.arange(positions, dtype=torch.float64)[:, None] * frequencies
    return torch.stack((angles.cos(), angles.sin()), dim=1)


def rotate(x: Tensor, turns: Tensor, back: bool = False) -> Tensor:
    """x [n, heads, dim] with its last columns turned by row i of ``turns`` [n, 2, pairs]; ``back``: the other way."""
    cos, sin = turns[:, None, 0], turns[:, None, 1]
    if back:
        sin = -sin
    out = x.clone()
    even, odd = x[..., -2 * cos.shape[-1] :: 2], x[..., -2 * cos.shape[-1] + 1 :: 2]
    out[..., -2 * cos.shape[-1] :] = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
    return out
