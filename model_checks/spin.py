"""Runs Spin on a Promela model and reads what it reports; Spin and a C compiler are looked for, never installed.

Every state is stored whole and no transition is left out (no partial-order reduction, no hashing tricks), so that the
number of stored states is exact.  Spin's own reductions of a model (dead variables, variables that are only written)
are switched off for the same reason.
"""

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from hybridkv_ref.model_checks import verifiers
from hybridkv_ref.model_checks.verifiers import Run, VerifierError

OPTIONS = ("-DSAFETY", "-DNOREDUCE", "-DNOFAIR", "-DNOCLAIM", "-DVECTORSZ=4096")
_STORED = re.compile(r"^\s*([\d.e+]+) states, stored", re.MULTILINE)
_TRANSITIONS = re.compile(r"^\s*([\d.e+]+) transitions", re.MULTILINE)
_BYTES = re.compile(r"State-vector (\d+) byte, depth reached (\d+), errors: (\d+)")
_CUT = ("max search depth too small", "MEMLIM bound", "out of memory", "Search not completed")
_ERROR = re.compile(r"^pan:\d+: (.*) \(at depth \d+\)", re.MULTILINE)


def missing() -> str:
    """Why Spin cannot run here; empty if it can."""
    return verifiers.missing("spin")


def build(source: str, folder: Path, options: Sequence[str] = (), optimise: str = "-O2") -> tuple[Path, float, float]:
    """Compiles a model in a folder: the verifier, and the seconds that Spin and the compiler took."""
    (folder / "model.pml").write_text(source)
    compiler = ["cc", optimise, "-w", *OPTIONS, *options, "-o", "pan", "pan.c"]
    return folder / "pan", *verifiers.build(folder, ["spin", "-o1", "-o2", "-a", "model.pml"], compiler)


def check(
    source: str, memory_mb: int = 4096, depth: int = 1_000_000, table_bits: int = 20, optimise: str = "-O2"
) -> Run:
    """Searches a model to its end, or to the first error.

    ``memory_mb`` bounds the search and ``depth`` its stack, ``2**table_bits`` is the size of its hash table,
    ``optimise`` is for the compiler.  VerifierError where a bound was too small: a search cut short gives no count.
    """
    with tempfile.TemporaryDirectory() as name:
        pan, generate, compiled = build(source, Path(name), [f"-DMEMLIM={memory_mb}"], optimise)
        command = [str(pan), "-n", "-E", f"-m{depth}", f"-w{table_bits}"]
        done, seconds, processor = verifiers.timed(command, pan.parent)
    text = done.stdout
    sizes, stored, moved = _BYTES.search(text), _STORED.search(text), _TRANSITIONS.search(text)
    first = _ERROR.search(text)
    if sizes is None or stored is None or moved is None or (int(sizes[3]) > 0) != (first is not None):
        raise VerifierError(f"no verdict: {verifiers.end(text)}")
    cut = [line for line in text.splitlines() if any(word in line for word in _CUT)]
    if first is None and cut:
        raise VerifierError(f"the search was cut short: {'; '.join(cut)}")
    counts = [int(float(m[1])) for m in (stored, moved)]
    return Run(counts[0], counts[1], int(sizes[1]), first[1] if first else "", generate, compiled, seconds, processor)


def run_verifier(pan: Path, *options: str) -> str:
    """Runs a verifier in its own folder and gives its report."""
    return verifiers.call([str(pan), "-n", *options], pan.parent).stdout
