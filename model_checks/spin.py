"""Runs Spin on a Promela model and reads what it reports; Spin and a C compiler are looked for, never installed.

Every state is stored whole and no transition is left out (no partial-order reduction, no hashing tricks), so that the
number of stored states is exact.  Spin's own reductions of a model (dead variables, variables that are only written)
are switched off for the same reason.
"""

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

OPTIONS = ("-DSAFETY", "-DNOREDUCE", "-DNOFAIR", "-DNOCLAIM", "-DVECTORSZ=4096")
_STORED = re.compile(r"^\s*([\d.e+]+) states, stored", re.MULTILINE)
_TRANSITIONS = re.compile(r"^\s*([\d.e+]+) transitions", re.MULTILINE)
_BYTES = re.compile(r"State-vector (\d+) byte, depth reached (\d+), errors: (\d+)")
_CUT = ("max search depth too small", "MEMLIM bound", "out of memory", "Search not completed")
_ERROR = re.compile(r"^pan:\d+: (.*) \(at depth \d+\)", re.MULTILINE)


class SpinError(RuntimeError):
    """Spin, the compiler or the verifier ended without a verdict; the message holds the end of its output."""


@dataclass(frozen=True)
class SpinRun:
    """What Spin found: states stored, transitions, bytes per state, and the first error's text ('' if none).

    Seconds of wall time: ``generate`` for Spin's C text, ``compile`` for the C compiler, ``run`` for the search; and
    the search's seconds of ``processor`` time.
    """

    states: int
    transitions: int
    state_bytes: int
    error: str
    generate: float
    compile: float
    run: float
    processor: float


def missing() -> str:
    """Why Spin cannot run here; empty if it can."""
    absent = [tool for tool in ("spin", "cc") if shutil.which(tool) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def build(source: str, folder: Path, options: Sequence[str] = (), optimise: str = "-O2") -> tuple[Path, float, float]:
    """Compiles a model in a folder: the verifier, and the seconds that Spin and the compiler took."""
    reason = missing()
    if reason:
        raise SpinError(reason)
    (folder / "model.pml").write_text(source)
    begun = time.perf_counter()
    _call(["spin", "-o1", "-o2", "-a", "model.pml"], folder)
    between = time.perf_counter()
    _call(["cc", optimise, "-w", *OPTIONS, *options, "-o", "pan", "pan.c"], folder)
    return folder / "pan", between - begun, time.perf_counter() - between


def check(
    source: str, memory_mb: int = 4096, depth: int = 1_000_000, table_bits: int = 20, optimise: str = "-O2"
) -> SpinRun:
    """Searches a model to its end, or to the first error.

    ``memory_mb`` bounds the search and ``depth`` its stack, ``2**table_bits`` is the size of its hash table,
    ``optimise`` is for the compiler.  SpinError where a bound was too small: a search cut short gives no count.
    """
    with tempfile.TemporaryDirectory() as name:
        pan, generate, compiled = build(source, Path(name), [f"-DMEMLIM={memory_mb}"], optimise)
        begun, used = time.perf_counter(), _children()
        text = run_verifier(pan, "-E", f"-m{depth}", f"-w{table_bits}")
        seconds, processor = time.perf_counter() - begun, _children() - used
    sizes, stored, moved = _BYTES.search(text), _STORED.search(text), _TRANSITIONS.search(text)
    first = _ERROR.search(text)
    if sizes is None or stored is None or moved is None or (int(sizes[3]) > 0) != (first is not None):
        raise SpinError(f"no verdict: {_end(text)}")
    cut = [line for line in text.splitlines() if any(word in line for word in _CUT)]
    if first is None and cut:
        raise SpinError(f"the search was cut short: {'; '.join(cut)}")
    counts = [int(float(m[1])) for m in (stored, moved)]
    return SpinRun(
        counts[0], counts[1], int(sizes[1]), first[1] if first else "", generate, compiled, seconds, processor
    )


def run_verifier(pan: Path, *options: str) -> str:
    """Runs a verifier in its own folder and gives its report."""
    return _call([str(pan), "-n", *options], pan.parent)


def _call(command: Sequence[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SpinError(f"{command[0]}: {_end(done.stdout + done.stderr)}")
    return done.stdout


def _children() -> float:
    """Processor seconds of all processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system


def _end(text: str) -> str:
    return text.strip()[-800:]
