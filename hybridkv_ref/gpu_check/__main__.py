"""Checks kernels, graphs and the decoder on a GPU, and measures them.

Writes gpu_check.json and gpu_check.svg into DIR.  Exit status: 0 every check that was reached passed, 1 one failed or
was not reached, 2 it could not run (one line on standard error): no CUDA device, no triton, DIR cannot be written.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import torch

from hybridkv_ref.errors import InputError
from hybridkv_ref.gpu_check import baselines, exactness, graph_part, offload, speed
from hybridkv_ref.gpu_check.bench import Bench
from hybridkv_ref.gpu_check.plot import svg
from hybridkv_ref.gpu_check.records import NOT_MEASURED, Check, Figure, PartReport, Report, make_folder, write_whole
from hybridkv_ref.kernels import _triton

WHOLE = 210.0
"""Seconds for all parts together: with imports, and what the last item takes beyond its time, it is four minutes."""

BUDGETS = {"ceilings": 10.0, "exactness": 55.0, "graphs": 30.0, "speed": 50.0, "offload": 20.0, "compare": 45.0}
"""Seconds for each part, in the order in which they run; the last ones give way where an earlier one was slow."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: runs all parts, prints them as they come, writes the report, returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m hybridkv_ref.gpu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the report")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="try the check itself: every part on the CPU at tiny sizes, nothing measured",
    )
    options = parser.parse_args(arguments)
    try:
        device = torch.device("cpu") if options.tiny else gpu()
        make_folder(options.out)
        report = run(device, options.tiny)
        write_whole(options.out / "gpu_check.json", msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
        write_whole(options.out / "gpu_check.svg", svg(report))
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    missed = [check for part in report.parts for check in part.checks if check.passed is not True]
    print(f"{sum(len(part.checks) for part in report.parts)} checks, {len(missed)} not passed; {options.out}")
    return int(bool(missed))


def gpu() -> torch.device:
    """The current CUDA device.  InputError: there is none, or no triton."""
    if not torch.cuda.is_available():
        raise InputError("gpu_check:device: no CUDA device (--tiny tries the check itself on the CPU)")
    if not _triton.AVAILABLE:
        raise InputError("gpu_check:triton: is not installed")
    return torch.device("cuda", torch.cuda.current_device())


def versions(device: torch.device) -> dict[str, str]:
    """What ran, by component."""
    found = {
        "hybridkv-ref": _installed("hybridkv-ref"),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "triton": _installed("triton") if _triton.AVAILABLE else "not usable",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "cuda": str(torch.version.cuda),
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": str(properties.multi_processor_count),
            "memory": f"{properties.total_memory / 2**30:.1f} GiB",
        }
    return found


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # on the path, and not installed
        return "not installed"


def run(device: torch.device, tiny: bool, whole: float = WHOLE) -> Report:
    """Runs all parts within ``whole`` seconds."""
    start = time.monotonic()
    top: list[speed.Ceilings | None] = [None]

    def ceilings(bench: Bench) -> None:
        speed.ceilings(bench)
        top[0] = speed.measured(bench)

    parts: dict[str, Callable[[Bench], None]] = {
        "ceilings": ceilings,
        "exactness": exactness.run,
        "graphs": graph_part.run,
        "speed": lambda bench: speed.kernels(bench, top[0]),
        "offload": offload.run,
        "compare": lambda bench: baselines.run(bench, top[0]),
    }
    reports = []
    for name, budget in BUDGETS.items():
        began = time.monotonic()
        bench = Bench(device, tiny, min(began + budget, start + whole))
        part = partial(parts[name], bench)
        try:
            part()
        except Exception as error:  # a part that breaks is one failed check, and the others still run
            bench.checks.append(Check(name=name, passed=False, detail=f"{type(error).__name__}: {error}"))
        wall = time.monotonic() - began
        reports.append(
            PartReport(name=name, budget=budget, wall=wall, checks=tuple(bench.checks), figures=tuple(bench.figures))
        )
        _show(reports[-1])
        if device.type == "cuda":
            torch.cuda.empty_cache()
    title = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    return Report(device=title, versions=versions(device), parts=tuple(reports))


def _show(part: PartReport) -> None:
    passed = sum(check.passed is True for check in part.checks)
    numbers = sum(figure.value != NOT_MEASURED for figure in part.figures)
    print(
        f"{part.name}: {passed} of {len(part.checks)} checks passed, {numbers} of {len(part.figures)} figures measured",
        flush=True,
    )
    for check in part.checks:
        if check.passed is not True:
            print(f"  {'FAIL' if check.passed is False else '----'} {check.name}: {check.detail}", flush=True)
    for figure in part.figures:
        _show_figure(figure)


def _show_figure(figure: Figure) -> None:
    if figure.value != NOT_MEASURED:
        share = f"  {figure.share:.0%} of the {figure.limit}" if figure.share is not None else ""
        print(f"  {figure.name}: {figure.value:.4g} {figure.unit}{share}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
