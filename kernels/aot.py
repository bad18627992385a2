"""Ahead-of-time check of every Triton kernel: compile for GPUs that are not here and look at what came out.

    python -m hybridkv_ref.kernels.aot [--json FILE] [--arch 80 90 100] [--only NAME]

Per kernel and architecture: registers and spills (ptxas -v), shared memory against the block's limit, widths of global
loads (nvdisasm). A kernel fails on any spill, too much shared memory, or when it should load 128 bits at a time and
never does. No GPU is needed. It runs in a process of its own, because a process that imported the kernels for Triton's
interpreter cannot compile them. Exit status: 0 all passed, 1 some failed, 2 it could not run.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import OPERATIONS, _triton, operation
from hybridkv_ref.kernels._triton import AotCase

ARCHITECTURES = (80, 90, 100)
SHARED_LIMIT = {80: 166_912, 90: 232_448, 100: 232_448}
"""Bytes of shared memory that one block may have (CUDA programming guide, compute capabilities)."""
LOAD = re.compile(r"\bLDG(?:STS)?\.E((?:\.[A-Z0-9_]+)*)")
WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}


class Report(msgspec.Struct, frozen=True):
    """What the compiler made of one kernel. `loads` counts global load instructions by width in bits."""

    kernel: str
    arch: int
    registers: int
    spill_bytes: int
    shared_bytes: int
    shared_limit: int
    loads: dict[int, int]
    faults: tuple[str, ...]


def check(case: AotCase, arch: int) -> Report:
    """Compile `case` for sm_`arch` and judge it. A kernel that does not compile is a fault, not an exception."""
    try:
        compiled = _compile(case, arch)
    except Exception as error:  # Triton raises its own, LLVM's and ptxas's errors without a common base
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = f"does not compile: {lines[0]} {lines[-1]}" if len(lines) > 1 else f"does not compile: {lines[0]}"
        return Report(case.name, arch, 0, 0, 0, SHARED_LIMIT[arch], {}, (reason,))
    registers, spills = _resources(compiled.asm["ptx"], arch)
    loads = _load_widths(compiled.asm["cubin"])
    shared, limit = compiled.metadata.shared, SHARED_LIMIT[arch]
    faults = []
    if spills:
        faults.append(f"spills {spills} bytes")
    if shared > limit:
        faults.append(f"needs {shared} bytes of shared memory, the limit is {limit}")
    if case.wide and not any(width >= 128 for width in loads):
        faults.append("has no 128-bit global load")
    return Report(case.name, arch, registers, spills, shared, limit, loads, tuple(faults))


def _compile(case: AotCase, arch: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    order = case.kernel.arg_names
    signature = {name: case.arguments.get(name, "constexpr") for name in order}
    constants = {(order.index(name),): value for name, value in case.constants.items()}
    attributes = {(order.index(name),): [["tt.divisibility", 16]] for name in case.aligned}
    source = ASTSource(case.kernel, signature, constants, attributes)
    options = {"num_warps": case.warps, "num_stages": case.stages}
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def _resources(ptx: str, arch: int) -> tuple[int, int]:
    """Registers per thread and spilled bytes, from ptxas -v."""
    from triton.backends.nvidia.compiler import get_ptxas

    target = re.search(r"\.target\s+(\w+)", ptx)
    name = target.group(1) if target else f"sm_{arch}"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "kernel.ptx")
        source.write_text(ptx)
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={name}", str(source), "-o", str(source.with_suffix(".o"))]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers = max((int(n) for n in re.findall(r"Used (\d+) registers", log)), default=0)
    return registers, sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", log))


def _load_widths(cubin: bytes) -> dict[int, int]:
    """Number of global load instructions by width in bits, from the machine code."""
    import triton

    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(binary)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    widths: Counter[int] = Counter()
    for suffixes in LOAD.findall(code):
        widths[next((WIDTHS[s] for s in suffixes.split(".") if s in WIDTHS), 32)] += 1
    return dict(sorted(widths.items()))


def cases(only: str = "") -> list[AotCase]:
    """The cases of all operations whose name contains `only`."""
    return [case for name in OPERATIONS for case in operation(name).aot_cases() if only in case.name]


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: print one line per kernel and architecture, write JSON if asked, return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m hybridkv_ref.kernels.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the reports to FILE")
    parser.add_argument("--arch", type=int, nargs="+", choices=ARCHITECTURES, default=ARCHITECTURES)
    parser.add_argument("--only", default="", metavar="NAME", help="only kernels whose name contains NAME")
    options = parser.parse_args(arguments)
    try:
        if not _triton.AVAILABLE:
            raise InputError("aot:triton: is not installed")
        if _triton.INTERPRETED:
            raise InputError("aot:TRITON_INTERPRET: must not be set, the interpreter does not compile")
        chosen = cases(options.only)
        if not chosen:
            raise InputError(f"aot:--only: no kernel's name contains {options.only!r}")
        reports = []
        for case in chosen:
            for arch in sorted(set(options.arch) & set(case.architectures)):
                reports.append(check(case, arch))
                print(_line(reports[-1]), flush=True)
        if options.json is not None:
            _write(options.json, reports)
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    return int(any(report.faults for report in reports))


def _line(report: Report) -> str:
    loads = " ".join(f"{width}b:{count}" for width, count in report.loads.items())
    verdict = "FAIL: " + "; ".join(report.faults) if report.faults else "ok"
    return (
        f"{report.kernel:38} sm_{report.arch:<3} {report.registers:3} registers  {report.spill_bytes:4} spilled  "
        f"{report.shared_bytes:6} shared  loads {loads:24} {verdict}"
    )


def _write(path: Path, reports: list[Report]) -> None:
    """Write the reports as JSON, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(reports), indent=2) + b"\n")
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


if __name__ == "__main__":
    sys.exit(main())
