"""The comparison of what a version wrote with the float64 reference, on poisoned memory.

What an operation only reads is filled with 0xFF (a NaN in every format) wherever it must not look; what it writes is
poisoned before every run, and bytes that are not its own must stay. Tolerances follow from the formats: EPS is the unit
roundoff of fp32, narrowing costs half a step of the narrow format.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from hybridkv_ref.kernels import _bits, _pages
from hybridkv_ref.layouts import Page

EPS = 2.0**-24
T = TypeVar("T")


class Draw(Protocol):
    """Where the sizes and choices of a random case come from."""

    def integer(self, low: int, high: int) -> int:
        """An integer in [low, high]."""

    def choice(self, options: Sequence[T]) -> T:
        """One of `options`."""


class Wrong(Exception):
    """A version wrote something else than the reference says. One line: what, how often, the first of it."""


class Case(NamedTuple):
    """Arguments of an operation; `observed` reads what it wrote, `allowed` bounds the error of each observation."""

    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    observed: Callable[[dict[str, Any]], tuple[Tensor, ...]]
    allowed: Callable[[tuple[Tensor, ...]], tuple[Tensor | float, ...]]
    owned: Mapping[str, Tensor] = MappingProxyType({})  # byte outputs: mask of the bytes that may change
    narrow: tuple[float, ...] = (0.0, 0.0)  # what operands narrowed to bf16 for tensor cores may add to each bound


def run(version: Callable[..., Any], case: Case, seed: int = 0) -> dict[str, Any]:
    """The arguments after `version` ran on poisoned outputs."""
    arguments = dict(case.arguments)
    generator = torch.Generator().manual_seed(seed)
    for name in case.outputs:
        poisoned = arguments[name].clone()
        if poisoned.dtype is torch.uint8:
            memory = torch.empty(poisoned.numel() + 512, dtype=torch.uint8)
            poisoned = memory[-memory.data_ptr() % 512 :][: poisoned.numel()].view(poisoned.shape)
            poisoned.random_(0, 256, generator=generator)
        else:
            poisoned.fill_(math.nan if poisoned.is_floating_point() else 0x5A5A5A5A)
        arguments[name] = poisoned
    before = {name: arguments[name].clone() for name in case.outputs}
    reads = {
        name: arguments[name].clone() for name in arguments if name not in case.outputs and _is_tensor(arguments[name])
    }
    version(**arguments)
    for name, mask in case.owned.items():
        changed = (arguments[name] != before[name]) & ~mask
        if changed.any():
            raise Wrong(f"{name}: {int(changed.sum())} bytes changed that are not the operation's")
    for name, value in reads.items():
        if not torch.equal(arguments[name].view(torch.uint8), value.view(torch.uint8)):
            raise Wrong(f"{name} was written")
    return arguments


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def check(module: Any, version: Callable[..., Any], case: Case, tensor_cores: bool = False) -> None:
    """Run `version` of `module` on `case` and compare every observation with the reference."""
    arguments = run(version, case)
    expected = module.reference(**arguments | {name: case.arguments[name] for name in case.outputs})
    observed = case.observed(arguments)
    for got, want, bound, extra in zip(
        observed, expected, case.allowed(expected), case.narrow[: len(observed)], strict=True
    ):
        finite = want.double().isfinite()
        if got.shape != want.shape or not torch.equal(got.double()[~finite], want.double()[~finite]):
            raise Wrong(f"shape {list(got.shape)} for {list(want.shape)}, or an infinity where none or another belongs")
        error = (got.double() - want.double()).abs()
        limit = (torch.as_tensor(bound, dtype=torch.float64) + (extra if tensor_cores else 0.0)).expand_as(error)
        wrong = finite & ~(error <= limit)  # a NaN is wrong
        if wrong.any():
            count, first = int(wrong.sum()), f"{got[wrong][0]} for {want[wrong][0]} +- {limit[wrong][0]}"
            raise Wrong(f"{count} of {wrong.numel()} wrong, first {first}")


def randn(draw: Draw, *shape: int) -> Tensor:
    """fp32, normal; with a drawn seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw.integer(0, 2**16)))


def slots_with_gaps(draw: Draw, n: int, blocks: int, page: Page) -> Tensor:
    """int64 [n] different slots, the second one -1 where there are two."""
    order = torch.Generator().manual_seed(draw.integer(0, 2**16))
    slots = torch.randperm(blocks * page.entries, generator=order)[:n]
    if len(slots) > 1:
        slots[1] = -1
    return slots


def arena_of(page: Page, blocks: int) -> Tensor:
    """A fresh arena, NaN in every format."""
    return _pages.empty_arena(page, blocks).fill_(0xFF)


def owned_bytes(page: Page, blocks: int, slots: Tensor) -> Tensor:
    """bool [blocks, stride]: the bytes of the entries `slots`."""
    mask = torch.zeros(blocks, page.stride, dtype=torch.uint8)
    kept = slots[slots >= 0]
    for place in page.places.values():
        _pages._field(mask, page, place)[kept // page.entries, kept % page.entries] = 1
    return mask.bool()


def narrowing(values: Tensor, page: Page, slack: Tensor | float = 0.0) -> Tensor:
    """Half a step of the stored format around float64 `values` [..., dim] that are themselves off by `slack`."""
    parts = page.vector("kv")
    split = parts.quantised.count if parts.quantised else 0
    low, high = values[..., :split].abs() + slack, values[..., split:].abs() + slack
    bounds = []
    if parts.quantised:
        element = _bits.ELEMENTS[parts.quantised.dtype]
        scale: Tensor | float = 1.0
        if parts.scale:
            tiles = low.reshape(*low.shape[:-1], parts.scale.count, -1)
            scale = (2 * tiles.amax(-1, keepdim=True) / element.maximum).expand_as(tiles).flatten(-2)
        bounds.append(
            torch.maximum(
                low * 2.0 ** -(element.mantissa + 1), scale * 2.0 ** -(element.bias + element.mantissa) + 0 * low
            )
        )
    if parts.plain:
        bounds.append(high * {"bf16": 2.0**-8, "fp32": EPS, "fp64": 0.0}[parts.plain.dtype])
    return torch.cat(bounds, dim=-1) + slack


def on_device(
    function: Callable[..., Any], device: torch.device | str, outputs: tuple[str, ...]
) -> Callable[..., None]:
    """`function` on copies of its arguments there; `outputs` come back."""

    def run_there(**arguments: Any) -> None:
        moved = {name: value.to(device) if _is_tensor(value) else value for name, value in arguments.items()}
        function(**moved)
        for name in outputs:
            arguments[name].copy_(moved[name])

    return run_there
