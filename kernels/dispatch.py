"""The one dispatch: CUDA tensors run Triton, CPU tensors run torch. Also the checks of arguments that all share.

While `recorded_by` holds, a `Recorder` stands between dispatch and the chosen version and sees every launch.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import _triton
from hybridkv_ref.layouts import Page

P = ParamSpec("P")
R = TypeVar("R")


class Recorder(Protocol):
    """Sees launches, and makes them."""

    def launch(self, operation: str, version: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """One call of the version that dispatch chose: run it, and return what it returns."""


_recorder: ContextVar[Recorder | None] = ContextVar("hybridkv_recorder", default=None)


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Every launch of this thread goes through `recorder`."""
    token = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(token)


def choose(
    operation: str, torch_version: Callable[P, R], triton_version: Callable[P, R], *tensors: Tensor | None
) -> Callable[P, R]:
    """The version for the device of `tensors` (None entries do not count), through the recorder if there is one.

    InputError: tensors on two devices, a device that is neither CPU nor CUDA, CUDA without triton.
    """
    devices = {tensor.device for tensor in tensors if tensor is not None}
    if len(devices) != 1:
        raise InputError(f"{operation}:device: tensors on {sorted(map(str, devices))}, one device is needed")
    kind = devices.pop().type
    if kind not in ("cpu", "cuda"):
        raise InputError(f"{operation}:device: {kind} is neither cpu nor cuda")
    if kind == "cuda" and not _triton.AVAILABLE:
        raise InputError(f"{operation}:device: CUDA tensors need triton, which is not installed")
    version = torch_version if kind == "cpu" else triton_version
    recorder = _recorder.get()
    return version if recorder is None else partial(recorder.launch, operation, version)


def expect(
    operation: str, name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int | None, ...]
) -> None:
    """Check one argument: dtype, shape (None is any size) and contiguity. InputError names the argument."""
    fits = tensor.dim() == len(shape) and all(
        want in (None, got) for want, got in zip(shape, tensor.shape, strict=True)
    )
    if tensor.dtype not in dtypes or not fits:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        sizes = ", ".join("any" if size is None else str(size) for size in shape)
        got = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
        raise InputError(f"{operation}:{name}: needs {wanted} [{sizes}], got {got}")
    if not tensor.is_contiguous():
        raise InputError(f"{operation}:{name}: must be contiguous")


def expect_arena(operation: str, name: str, arena: Tensor, page: Page) -> None:
    """Check a byte arena: uint8 [blocks, page.stride], contiguous, base aligned as the layout demands."""
    expect(operation, name, arena, (torch.uint8,), (None, page.stride))
    if arena.data_ptr() % page.layout.base_align:
        raise InputError(f"{operation}:{name}: base address is not a multiple of {page.layout.base_align}")


def operands(q: Tensor, wide: torch.dtype) -> tuple[torch.dtype, ...]:
    """Dtypes that a query may have: tensor cores take bf16 (an fp32 product spills), torch on the CPU also `wide`."""
    return (torch.bfloat16,) if q.is_cuda else (wide, torch.bfloat16)


def expect_columns(operation: str, name: str, columns: int, block_table: Tensor, page: Page) -> None:
    """Check that a block table reaches all `columns` entries of a static size. InputError names the argument."""
    reach = block_table.shape[1] * page.entries
    if columns > reach:
        raise InputError(f"{operation}:{name}: {columns} entries, but the block table reaches {reach}")
