"""Number formats and the scale rule, against their definitions."""

import math
import struct

import pytest

pytest.importorskip("torch", reason="the kernels compute with torch")

import kernel_cases
import torch

from hybridkv_ref import layouts
from hybridkv_ref.kernels import _bits, _pages, operation
from hybridkv_ref.kernels._bits import ELEMENTS


def test_e4m3_values_are_those_of_torch() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(
        _bits.code_values("e4m3").float().nan_to_num(), codes.view(torch.float8_e4m3fn).float().nan_to_num()
    )
    assert _bits.code_values("e4m3").isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]


def test_e2m1_values_are_those_of_the_format() -> None:
    assert _bits.code_values("e2m1")[:8].tolist() == [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


@pytest.mark.parametrize("name", ELEMENTS)
def test_largest_value(name: str) -> None:
    element = ELEMENTS[name]
    values = _bits.code_values(name)
    assert values[values.isfinite()].max() == element.maximum == values[element.top]
    assert element.maximum == 2.0**element.top_exponent * (1 + element.top_mantissa / 2**23)


@pytest.mark.parametrize("name", ELEMENTS)
def test_narrowing_is_to_nearest_even(name: str) -> None:
    """By search over all values of the format, for values, midpoints, their neighbours and beyond the largest."""
    grid = _bits.code_values(name)
    codes = grid.isfinite().nonzero().flatten()
    values = torch.tensor(sorted(set(grid[codes].tolist())), dtype=torch.float64)
    points = torch.cat((values, (values[1:] + values[:-1]) / 2)).float()
    points = torch.cat([points, points.nextafter(points - 1), points.nextafter(points + 1), 2 * points])
    for point in points.tolist():
        distance = (grid[codes] - point).abs()
        nearest = codes[distance == distance.min()]
        even = nearest[nearest % 2 == 0]
        expected = grid[even[0] if len(even) else nearest[0]].item()
        x = torch.tensor([point])
        assert _bits.widen(_bits.narrow(x, name), name).item() == expected
        assert _bits.nearest(x.double(), name).item() == expected


@pytest.mark.parametrize("name", ELEMENTS)
def test_scale_is_the_least_power_of_two_that_fits(name: str) -> None:
    """2 ** e with amax <= max * 2 ** e < 2 * amax: in integers, because a logarithm in fp32 misses boundary cases."""
    maximum = ELEMENTS[name].maximum
    for power in range(-100, 100, 7):
        for offset in (-1, 0, 1):
            bits = struct.unpack("<I", struct.pack("<f", maximum * 2.0**power))[0] + offset
            amax = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
            scale = _bits.scale_of(amax, name, "pow2_ceil", -126)
            assert scale.item() == _bits.exact_scale(amax.double(), name, "pow2_ceil", -126).item()
            assert amax.item() <= maximum * scale.item() < 2 * amax.item()
            assert math.frexp(scale.item())[0] == 0.5


def test_an_empty_tile_clamps_the_exponent() -> None:
    zero = torch.zeros(1)
    assert _bits.scale_of(zero, "e4m3", "pow2_ceil", -126).item() == 2.0**-126
    assert _bits.exact_scale(zero.double(), "e4m3", "pow2_ceil", -126).item() == 2.0**-126


@pytest.mark.parametrize("name", kernel_cases.ENTRY_LAYOUTS)
def test_edges_are_stored_exactly_as_defined(name: str) -> None:
    layout = layouts.load(name)
    page = layout.page(4, dim=64 if layout.dim == "model" else None)
    keys = kernel_cases.edges(page)
    slots = torch.arange(len(keys))
    cache = kernel_cases.arena_of(page, len(keys))
    operation("index_build").index_build(keys, slots, cache, page)
    expected = operation("index_build").reference(keys, slots, cache, page)[0]
    error = (_pages.read_exact(cache, slots, page)[:, 0] - expected).abs()
    allowed = 2 * kernel_cases.EPS * expected.abs() if layout.scale_rule == "amax_div" else torch.zeros_like(expected)
    assert bool((error <= allowed).all())
