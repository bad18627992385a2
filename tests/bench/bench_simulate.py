"""Requests per second of `simulate`: the conversation trace with DeepSeek-V4-Flash's geometry, and without the trace.

Run as a script; the trace is looked for in $HYBRIDKV_DATA, or in shared/data beside the checkout. Prints one line per
case: requests per second of wall time and of processor time (reading the trace included, the tables loaded before),
rows of the tables fired, share of input tokens saved; then the machine and its load, without which wall time says
little.
"""

import os
import platform
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hybridkv_ref.loader import load_tables
from hybridkv_ref.models import load_model
from hybridkv_ref.request_traces import Request, read_trace
from hybridkv_ref.simulate import simulate
from hybridkv_ref.workloads import generate

CHECKOUT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("HYBRIDKV_DATA") or CHECKOUT.parent / "shared" / "data")
TRACE = DATA / "traces" / "mooncake_conversation_trace.jsonl"
MODEL = "deepseek-v4-flash"
CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("no eviction, full", {"gpu_memory": 1 << 60}),
    ("no eviction, bounded", {"gpu_memory": 1 << 60, "recovery": "bounded"}),
    ("80 GiB, full", {"gpu_memory": 80 << 30}),
    ("80 GiB and 1 TiB of disk, full", {"gpu_memory": 80 << 30, "disk": 1 << 40}),
)


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def main() -> None:
    """Runs every case once."""
    load_tables()
    model = load_model(MODEL)
    sources: list[tuple[str, Callable[[], Iterable[Request]]]] = [("mixed workload", lambda: generate("mixed", 5000))]
    if TRACE.is_file():
        sources.insert(0, (TRACE.stem, lambda: read_trace(TRACE)))
    else:
        print(f"no trace at {TRACE}: set HYBRIDKV_DATA")
    for source, requests in sources:
        for case, options in CASES:
            wall, cpu = time.perf_counter(), time.process_time()
            report = simulate(requests(), model, **options)
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            print(
                f"{source}, {MODEL}, {case}: {report.requests:,} requests in {wall:.2f} s ({cpu:.2f} s of processor): "
                f"{report.requests / wall:,.0f} requests/s ({report.requests / cpu:,.0f}), "
                f"{report.rows_fired:,} rows fired, {report.composite:.1%} saved"
            )
    load = os.getloadavg()[0]
    print(f"{cpu_name()}, {os.cpu_count()} cores, one used, load {load:.1f}; Python {platform.python_version()}")


if __name__ == "__main__":
    main()
