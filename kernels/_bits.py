"""Number formats of cached elements: widening and narrowing, three times over.

* float64 from the definition (sign, exponent, mantissa): what the references use.
* torch's own casts and look-up: what the torch versions use.
* integer arithmetic on bits, for Triton: its interpreter truncates fp32 to bf16 and loses the carry of fp32 to e4m3,
  and sm_80 has no fp8 conversion at all. All of them round to nearest, ties to even, and saturate.

The scale of a tile is a power of two by the rule `2 ** ceil(log2(amax / max))`, read off the bits of amax: computed
with a logarithm in fp32 it misses boundary cases, and then writer and reader are of different ABIs.
"""

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv_ref.kernels._triton import jit, tl


class Element(NamedTuple):
    """A small float: `mantissa` bits, exponent `bias`, `top` the code of the largest finite value `maximum`."""

    bits: int
    mantissa: int
    bias: int
    top: int
    maximum: float
    nan: bool

    @property
    def top_exponent(self) -> int:
        """Exponent of `maximum`: maximum = 1.m * 2 ** top_exponent."""
        return (self.top >> self.mantissa) - self.bias

    @property
    def top_mantissa(self) -> int:
        """Mantissa of `maximum`, as the 23 bits of an fp32."""
        return (self.top & ((1 << self.mantissa) - 1)) << (23 - self.mantissa)


ELEMENTS = {"e4m3": Element(8, 3, 7, 0x7E, 448.0, True), "e2m1": Element(4, 1, 1, 0x7, 6.0, False)}


# float64, from the definition


@cache
def code_values(name: str) -> Tensor:
    """float64 [2 ** bits]: the value of every code."""
    element = ELEMENTS[name]
    values = []
    for code in range(1 << element.bits):
        magnitude = code & ((1 << (element.bits - 1)) - 1)
        exponent, mantissa = magnitude >> element.mantissa, magnitude & ((1 << element.mantissa) - 1)
        fraction = mantissa / (1 << element.mantissa) + (exponent > 0)
        value = fraction * 2.0 ** (max(exponent, 1) - element.bias)
        if element.nan and magnitude > element.top:
            value = float("nan")
        values.append(-value if code >> (element.bits - 1) else value)
    return torch.tensor(values, dtype=torch.float64)


def nearest(x: Tensor, name: str) -> Tensor:
    """float64: `x` rounded to the nearest value of the element, ties to even, saturating."""
    element = ELEMENTS[name]
    exponent = torch.frexp(x).exponent.to(torch.float64) - 1
    step = torch.exp2(exponent.clamp(min=1 - element.bias) - element.mantissa)
    return (torch.round(x / step) * step).clamp(-element.maximum, element.maximum)


def exact_scale(amax: Tensor, name: str, rule: str, min_exponent: int) -> Tensor:
    """float64 scale of tiles whose largest magnitudes are `amax`, by the layout's scale rule."""
    element = ELEMENTS[name]
    if rule == "amax_div":
        return (amax / element.maximum).float().double().clamp(min=2.0**min_exponent)
    fraction, exponent = torch.frexp(amax)  # amax = fraction * 2 ** exponent, fraction in [0.5, 1)
    top = element.maximum / 2.0 ** (element.top_exponent + 1)
    power = exponent - (element.top_exponent + 1) + (fraction > top)
    power = torch.where(amax == 0, torch.full_like(power, min_exponent), power.clamp(min=min_exponent))
    return torch.exp2(power.to(torch.float64))


# torch


@cache
def _values_on(name: str, device: torch.device) -> Tensor:
    return code_values(name).to(device, torch.float32)


def widen(codes: Tensor, name: str) -> Tensor:
    """fp32 values of `codes` (uint8, one code each), by look-up: on a CPU several times as fast as torch's own cast."""
    return _values_on(name, codes.device).index_select(0, codes.flatten().int()).view(codes.shape)


def narrow(x: Tensor, name: str) -> Tensor:
    """uint8 codes of fp32 `x`, one per element."""
    if name == "e4m3":
        return x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
    grid = code_values(name)[: ELEMENTS[name].top + 1].float()
    middles = (grid[1:] + grid[:-1]) / 2
    size = x.abs()
    code = torch.zeros_like(x, dtype=torch.uint8)
    for lower, middle in enumerate(middles.tolist()):  # a tie goes to the even code
        code += (size >= middle) if lower % 2 else (size > middle)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def scale_of(amax: Tensor, name: str, rule: str, min_exponent: int) -> Tensor:
    """fp32 scale of tiles whose largest magnitudes are `amax` (fp32), by the layout's scale rule."""
    element = ELEMENTS[name]
    if rule == "amax_div":
        return (amax / element.maximum).clamp(min=2.0**min_exponent)
    bits = amax.view(torch.int32)
    power = (bits >> 23) - (127 + element.top_exponent) + ((bits & 0x7FFFFF) > element.top_mantissa).int()
    return ((power.clamp(min=min_exponent) + 127) << 23).view(torch.float32)


# Triton


@jit
def widen_e4m3(code: tl.tensor) -> tl.tensor:
    """fp32 of e4m3 codes: as fp16 bits the value is 2 ** -8 of the true one, subnormals included."""
    wide = code.to(tl.int16)
    half = (((wide & 0x7F) << 7) | ((wide & 0x80) << 8)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@jit
def widen_e2m1(code: tl.tensor) -> tl.tensor:
    """fp32 of e2m1 codes (0..15), by the same way through fp16: 1 exponent bias against 15."""
    wide = code.to(tl.int16)
    half = (((wide & 0x7) << 9) | ((wide & 0x8) << 12)).to(tl.float16, bitcast=True)
    return half.to(tl.float32) * 16384.0


@jit
def widen_bf16(bits: tl.tensor) -> tl.tensor:
    """fp32 of bf16 bits (int16)."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@jit
def narrow_bf16(x: tl.tensor) -> tl.tensor:
    """bf16 bits (int16) of fp32, to nearest even; a NaN stays one."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where((bits & 0x7FFFFFFF) > 0x7F800000, (bits >> 16) | 0x40, rounded).to(tl.int16)


@jit
def narrow_small(
    x: tl.tensor, MANTISSA: tl.constexpr, BIAS: tl.constexpr, TOP: tl.constexpr, NAN: tl.constexpr
) -> tl.tensor:
    """Magnitude code (int32, sign not included) of fp32 `x` in an element of the given shape."""
    drop: tl.constexpr = 23 - MANTISSA
    least: tl.constexpr = 128 - BIAS  # fp32 exponent field of the element's smallest normal value
    size = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    exponent = size >> 23
    normal = ((size + ((1 << (drop - 1)) - 1) + ((size >> drop) & 1)) >> drop) - ((least - 1) << MANTISSA)
    shift = tl.minimum(tl.maximum(drop + least - exponent, drop), 25)  # 25: everything is rounded off
    whole = (size & 0x7FFFFF) | 0x800000
    subnormal = (whole + ((1 << (shift - 1)) - 1) + ((whole >> shift) & 1)) >> shift
    code = tl.minimum(tl.where(exponent >= least, normal, subnormal), TOP)
    if NAN:
        code = tl.where(size > 0x7F800000, TOP + 1, code)
    return code


@jit
def sign_bit(x: tl.tensor) -> tl.tensor:
    """1 where fp32 `x` has its sign bit set, else 0 (int32)."""
    return (x.to(tl.int32, bitcast=True) >> 31) & 1


@jit
def scale_power(
    amax: tl.tensor, TOP_EXPONENT: tl.constexpr, TOP_MANTISSA: tl.constexpr, LEAST: tl.constexpr
) -> tl.tensor:
    """int32 exponent of the power-of-two scale of tiles whose largest magnitudes are `amax`."""
    bits = amax.to(tl.int32, bitcast=True)
    power = (bits >> 23) - (127 + TOP_EXPONENT) + ((bits & 0x7FFFFF) > TOP_MANTISSA).to(tl.int32)
    return tl.maximum(power, LEAST)


@jit
def power_of_two(power: tl.tensor) -> tl.tensor:
    """fp32 2 ** power for power in [-126, 127]."""
    return ((power + 127) << 23).to(tl.float32, bitcast=True)
