"""Random cases of the operations as Hypothesis draws them, and values at the edges of rounding."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from hybridkv_ref.kernels import _bits
from hybridkv_ref.kernels.cases import EPS, Case, T, Wrong, arena_of, check, run
from hybridkv_ref.kernels.random_cases import BUILDERS, ENTRY_LAYOUTS
from hybridkv_ref.layouts import Page

__all__ = ["BUILDERS", "ENTRY_LAYOUTS", "EPS", "Wrong", "arena_of", "build", "check", "edges", "run"]


class Drawn:
    """Sizes and choices from Hypothesis."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def integer(self, low: int, high: int) -> int:
        return int(self._draw(st.integers(low, high)))

    def choice(self, options: Sequence[T]) -> T:
        chosen: T = self._draw(st.sampled_from(options))
        return chosen


def build(name: str, data: st.DataObject) -> Case:
    """A case of operation `name`."""
    return BUILDERS[name](Drawn(data.draw))


def edges(page: Page) -> Tensor:
    """fp32 [n, page.dim]: rows where rounding is decided by the last bit.

    Under a scale of 1, every value of the stored format, every midpoint between neighbours (ties to even) and the fp32
    next to each; then tiles whose amax is the largest value times a power of two, and the fp32 next to it: there the
    rule of the scale changes.
    """
    parts = page.vector("kv")
    if parts.quantised is None:
        around = torch.tensor([1.0, -3.0, 640.0])  # ties in bf16: half an ulp above an even and an odd mantissa
        points = torch.cat((around * (1 + 2.0**-8), around * (1 + 3 * 2.0**-8)))
        points = torch.stack([points.nextafter(toward) for toward in (points, points - 1, points + 1)]).flatten()
        return points.repeat(-(-page.dim // len(points)))[None, : page.dim]
    grid = _bits.code_values(parts.quantised.dtype).float()
    grid = grid[grid.isfinite()].sort().values
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2))
    points = torch.cat([points.nextafter(toward) for toward in (points, points - 1, points + 1)])
    points = points[points.abs() <= grid.max()]
    tile = page.layout.tile or parts.quantised.count
    per_tile = [points[start : start + tile - 1] for start in range(0, len(points), tile - 1)]
    rows = torch.zeros(len(per_tile) + 6, page.dim)
    for row, values in zip(rows, per_tile, strict=False):
        for start in range(0, parts.quantised.count, tile):
            row[start] = grid.max()  # holds the scale at 1
            row[start + 1 : start + 1 + len(values)] = values
    for row, power in zip(rows[-6:].view(2, 3, -1), (-3.0, 5.0), strict=True):
        largest = torch.tensor(float(grid.max()) * 2.0**power)
        for line, toward in zip(row, (largest, torch.tensor(0.0), torch.tensor(math.inf)), strict=True):
            line[:] = largest.nextafter(toward)
    return rows
