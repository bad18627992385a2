"""Times the commands as whole processes: `hybridkv check` cold and cached, the import, and with --mutate all mutants.

Run on an otherwise idle machine: `python tests/bench/bench_check.py [--mutate]`.
"""

import os
import platform
import subprocess
import sys
import tempfile
import time


def seconds(*arguments: str, cache: str) -> tuple[float, str]:
    """Wall seconds of one process and the last line that it printed."""
    begun = time.perf_counter()
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "HYBRIDKV_CACHE": cache, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=True,
    )
    return time.perf_counter() - begun, (done.stdout.strip().splitlines() or [""])[-1]


def main() -> None:
    """Prints the machine, then one line per measurement."""
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}")
    command = ("-m", "hybridkv_ref.cli")
    with tempfile.TemporaryDirectory() as cache:
        for label in ("cold cache", "cached"):
            spent, last = seconds(*command, "check", cache=cache)
            print(f"check, {label}: {spent:.1f} s: {last}")
        best = min(seconds("-c", "import hybridkv_ref", cache=cache)[0] for _ in range(5))
        bare = min(seconds("-c", "pass", cache=cache)[0] for _ in range(5))
        print(f"import hybridkv_ref: {(best - bare) * 1000:.0f} ms beyond the interpreter's own start")
        if "--mutate" in sys.argv:
            spent, _ = seconds(*command, "mutate", cache=cache)
            print(f"all mutants: {spent:.0f} s")


if __name__ == "__main__":
    main()
