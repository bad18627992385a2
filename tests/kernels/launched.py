"""The Triton kernels exactly as a launch would call them, compiled without a GPU. Run as a program, in its own process.

    python tests/kernels/launched.py ARCH...

Each operation's `triton_version` is called with a kernel that notes how it was called and does nothing: with the
arguments of every variant of the GPU check, and with those of every launch of a captured decode step. What was noted is
compiled for sm_ARCH and judged as the ahead-of-time check judges: no spills, shared memory under the limit.
Prints a JSON object: the launch -> its faults.
"""

import inspect
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

from hybridkv_ref.batch_step import BatchStep, v4_decoder
from hybridkv_ref.gpu_check.inputs import VARIANTS, source
from hybridkv_ref.kernels import aot, operation
from hybridkv_ref.kernels._triton import AotCase
from hybridkv_ref.kernels.dispatch import recorded_by

P = ParamSpec("P")
R = TypeVar("R")

POINTERS = {
    torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64", torch.float32: "*fp32", torch.bfloat16: "*bf16",
}  # fmt: skip


class Noted:
    """Stands for a kernel, and notes its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.calls: list[dict[str, Any]] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **named: Any) -> None:
            given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
            self.calls.append(given)

        return launch


def case(name: str, kernel: Any, given: dict[str, Any]) -> AotCase:
    """What Triton would compile for this launch."""
    warps = given.pop("num_warps", 4)
    constants = {p.name for p in kernel.params if p.is_constexpr}
    types: dict[str, str] = {}
    aligned = []
    for key, value in given.items():
        if key in constants:
            continue
        if isinstance(value, torch.Tensor):
            types[key] = POINTERS[value.dtype]
            aligned.append(key)  # CUDA's allocations are
        else:
            types[key] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0:
                aligned.append(key)
    fixed = {key: value for key, value in given.items() if key in constants}
    return AotCase(name, kernel, types, fixed, tuple(aligned), warps, wide=False)


def noted(name: str, label: str, arguments: dict[str, Any]) -> Iterator[AotCase]:
    """The case of one call."""
    module: Any = operation(name)
    kernel, module._kernel = module._kernel, Noted(module._kernel)
    try:
        module.triton_version(**arguments)
        launches = module._kernel.calls
    finally:
        module._kernel = kernel
    for given in launches:
        yield case(f"{name}[{label}]", kernel, given)


def cases() -> Iterator[AotCase]:
    """All of them."""
    for variant in VARIANTS:
        arguments, _ = variant.build(source(torch.device("cpu")), variant.few)
        yield from noted(variant.operation, variant.name, arguments)
    for label, name, arguments in step_launches():
        yield from noted(name, label, arguments)


def step_launches(tokens: int = 1) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Label, operation and arguments of every kernel launch of a decode step, as they were before it.

    The step is the last of that many tokens of one request, with another at its first token and padding between.
    """
    found: list[tuple[str, tuple[Any, ...]]] = []

    class Recorder:
        def launch(self, name: str, version: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
            found.append((name, tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)))
            return version(*args, **kwargs)

    step = BatchStep(v4_decoder(), 4, narrow=True)
    with torch.no_grad():
        for position in range(tokens - 1):
            step.write({0: position % 29}, {0: position})
            step.run()
        step.write({0: 5, 3: 7}, {0: tokens - 1, 3: 0})
        with recorded_by(Recorder()):
            step.run()
    for number, (name, args) in enumerate(found):
        names = inspect.signature(operation(name).reference).parameters
        yield f"step, launch {number}", name, dict(zip(names, args, strict=False))


def main() -> None:
    """Compiles each different one once per architecture."""
    faults: dict[str, list[str]] = {}
    decode: Any = operation("segment_decode")
    for arch in map(int, sys.argv[1:]):
        decode._major = lambda q, arch=arch: arch // 10  # as if the queries were on such a GPU
        seen: dict[str, AotCase] = {}
        for found in cases():
            known = (found.name.split("[")[0], found.arguments, found.constants, found.aligned, found.warps)
            seen.setdefault(repr(known), found)
        faults |= {f"{one.name} sm_{arch}": list(aot.check(one, arch).faults) for one in seen.values()}
    print(json.dumps(faults))


if __name__ == "__main__":
    main()
