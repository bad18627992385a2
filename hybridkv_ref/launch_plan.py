"""The launch plan of a step: what a captured graph holds, written down, comparable, and runnable on any device.

Theory.  A graph freezes launches: each has the addresses, shapes, grid and scalars of the moment of capture, and what a
step decides in Python is decided for good.  ``record`` runs a step once and writes every launch down: those of
``kernels/`` as dispatch makes them, and torch's own operations between them.  What no graph can hold is refused where
it happens:

* a *host read*: the step looks at a value, or lets a value decide a shape;
* *foreign memory*: neither one of the step's declared buffers nor made by the step, so nobody keeps it in its place.

A pointer is written as buffer and offset, so two plans are equal where the same graph serves both.  ``Plan.replay``
makes the launches again on the same memory, all that the step made poisoned first: on the CPU it stands for a graph.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from hybridkv_ref.kernels import dispatch, operation

P = ParamSpec("P")
R = TypeVar("R")

POISON = 0xFF
"""Every byte of the plan's own memory before a replay: NaN in every float format."""

_HOST_READS = frozenset({"tolist", "numpy", "__array__", "cpu"})
"""Methods that read values without an operation that torch dispatches."""


class NotCapturable(Exception):
    """The step does what no graph can hold.  One line: launch, operation, reason."""


@dataclass(frozen=True)
class Pointer:
    """Memory of one launch: ``offset`` bytes into ``buffer``; "#3" is the third piece that the step made itself."""

    buffer: str
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Launch:
    """One launch.  ``grid``: programs of a kernel, () for torch's operations; pointers and scalars by argument."""

    operation: str
    grid: tuple[int, ...]
    pointers: tuple[tuple[str, Pointer], ...]
    scalars: tuple[tuple[str, object], ...]


@dataclass(frozen=True)
class Place:
    """Where a declared buffer was at capture, and its shape."""

    address: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


def place(buffer: Tensor) -> Place:
    """Where ``buffer`` is."""
    return Place(buffer.data_ptr(), tuple(buffer.shape), buffer.stride(), buffer.dtype, buffer.device)


@dataclass(frozen=True)
class Plan:
    """Launches in order.  Equal plans make the same launches: one captured graph serves the step of either."""

    launches: tuple[Launch, ...]
    _runs: tuple[Callable[[], object], ...] = field(compare=False, repr=False)
    _made: tuple[Tensor, ...] = field(compare=False, repr=False)

    def replay(self) -> None:
        """Makes every launch again, on the same memory; what the step made itself is poisoned first."""
        for memory in self._made:
            memory.fill_(POISON)
        with torch.no_grad():
            for run in self._runs:
                run()

    def differences(self, other: "Plan") -> list[str]:
        """How ``other`` would need another graph: launch, operation, and what differs.  Empty if it would not."""
        found: list[str] = []
        for number, (mine, theirs) in enumerate(zip(self.launches, other.launches, strict=False)):
            where = f"launch {number} {mine.operation}"
            if mine.operation != theirs.operation:
                return [*found, f"{where}: {theirs.operation} now"]
            if mine.grid != theirs.grid:
                found.append(f"{where}: grid {mine.grid}, {theirs.grid} now")
            for kind in ("pointers", "scalars"):
                old, new = dict(getattr(mine, kind)), dict(getattr(theirs, kind))
                changed = [name for name in old | new if old.get(name) != new.get(name)]
                found += [f"{where}: {name} {old.get(name)}, {new.get(name)} now" for name in changed]
        if len(self.launches) != len(other.launches):
            found.append(f"{len(self.launches)} launches, {len(other.launches)} now")
        return found


def record(step: Callable[[], None], buffers: Mapping[str, Tensor]) -> Plan:
    """The plan of ``step``, which runs once.  ``buffers``: all memory by name that it may use and did not make.

    NotCapturable: the step reads a value on the host, or uses foreign memory.
    """
    recorder = _Recorder(buffers)
    with torch.no_grad(), dispatch.recorded_by(recorder), _HostReads(recorder), recorder:
        step()
    return Plan(tuple(recorder.launches), tuple(recorder.runs), tuple(recorder.made_memory()))


class _HostReads(TorchFunctionMode):
    """Refuses reads of values that torch does not dispatch."""

    def __init__(self, recorder: "_Recorder") -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name in _HOST_READS and not self._recorder.in_kernel:
            raise self._recorder.refusal(name, "reads a value on the host")
        return func(*args, **(kwargs or {}))


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes down launches while a step runs."""

    def __init__(self, buffers: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._buffers = {name: (t.data_ptr(), t.data_ptr() + max(1, _extent(t))) for name, t in buffers.items()}
        self._made: dict[int, tuple[str, Tensor]] = {}  # by the address of the storage; a tensor keeps it alive
        self.launches: list[Launch] = []
        self.runs: list[Callable[[], object]] = []
        self.in_kernel = False

    def made_memory(self) -> Iterator[Tensor]:
        """uint8: every piece of memory that the step made."""
        for _, tensor in self._made.values():
            yield torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())

    def refusal(self, name: str, reason: str) -> NotCapturable:
        """What is wrong with the launch that would be next."""
        return NotCapturable(f"launch {len(self.launches)} {name}: {reason}")

    def launch(self, name: str, version: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """A kernel, as dispatch chose it: what it does inside is the device's business."""
        given = inspect.signature(operation(name).reference).bind(*args, **kwargs).arguments
        grid = operation(name).grid(*args, **kwargs)
        self._write_down(name, grid, given, self._pointers(name, given), partial(version, *args, **kwargs))
        self.in_kernel = True
        try:
            return version(*args, **kwargs)
        finally:
            self.in_kernel = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """One of torch's own operations: a launch, unless it only looks at memory in another shape or asks for some."""
        kwargs = kwargs or {}
        if self.in_kernel:
            return func(*args, **kwargs)
        name = str(func)
        given = {a.name: v for a, v in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
        if _decides_by_value(func, given):
            raise self.refusal(name, "reads a value on the host")
        pointers = self._pointers(name, given)
        result = func(*args, **kwargs)
        outs = [tensor for _, tensor in _tensors("", result)]
        devices = {t.device for t in (*(t for _, t in _tensors("", list(given.values()))), *outs) if t.dim()}
        if len(devices) > 1:
            raise self.refusal(name, f"moves data between {' and '.join(sorted(map(str, devices)))}")
        fresh = [tensor for tensor in outs if self._find(tensor) is None]
        for tensor in fresh:
            self._made.setdefault(_storage(tensor), (f"#{len(self._made)}", tensor))
        writes = fresh or func._schema.is_mutable
        if writes and not name.startswith(("aten.empty", "aten.new_empty")):
            pointers += self._pointers(name, {"out": fresh})
            self._write_down(name, (), given, pointers, partial(_again, func, args, kwargs, fresh))
        return result

    def _pointers(self, name: str, given: Mapping[str, Any]) -> list[tuple[str, Pointer]]:
        """The memory of all tensors among some arguments; refuses foreign memory."""
        pointers = []
        for argument, tensor in _tensors("", dict(given)):
            pointer = self._find(tensor)
            if pointer is None:
                reason = f"{argument} is memory that is no buffer of the step and that it did not make"
                raise self.refusal(name, reason)
            pointers.append((argument, pointer))
        return pointers

    def _write_down(
        self, name: str, grid: tuple[int, ...], given: Mapping[str, Any], pointers: Sequence[tuple[str, Pointer]],
        run: Callable[[], object],
    ) -> None:  # fmt: skip
        scalars = tuple((n, v) for n, v in given.items() if v is not None and not any(_tensors("", v)))
        self.launches.append(Launch(name, grid, tuple(pointers), scalars))
        self.runs.append(run)

    def _find(self, tensor: Tensor) -> Pointer | None:
        shape, stride = tuple(tensor.shape), tuple(tensor.stride())
        if not tensor.numel():
            return Pointer("", 0, shape, stride, tensor.dtype)
        address, made = tensor.data_ptr(), self._made.get(_storage(tensor))
        if made is not None:
            return Pointer(made[0], address - _storage(tensor), shape, stride, tensor.dtype)
        for name, (first, last) in self._buffers.items():
            if first <= address < last:
                return Pointer(name, address - first, shape, stride, tensor.dtype)
        return None


def _again(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], outs: Sequence[Tensor]) -> None:
    """Runs an operation anew, into the memory that it had made the first time; one that writes in place has none."""
    result = func(*args, **kwargs)
    if outs:
        for target, (_, value) in zip(outs, _tensors("", result), strict=True):
            target.copy_(value)


def _decides_by_value(func: Any, given: Mapping[str, Any]) -> bool:
    """Whether an operation gives a number, or a shape that depends on values."""
    if "indices" in given:  # a mask among them is counted first; integers are not
        return any(t.dtype in (torch.bool, torch.uint8) for _, t in _tensors("", given["indices"]))
    return torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    """Every tensor in a value, with its place in it."""
    inner: Iterable[tuple[str, Any]] = ()
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = ((f"{name}[{number}]", part) for number, part in enumerate(value))
    for key, part in inner:
        yield from _tensors(key, part)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to its last."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return (reach + 1) * tensor.element_size() if tensor.numel() else 0
