"""Runs Rumur on a Murphi model and reads what it reports; Rumur and a C compiler are looked for, never installed.

Rumur stores every state whole and fires every rule in every state: without a bound, without symmetry reduction, and in
one thread, so that its counts are exact and do not depend on the machine.  That no rule is enabled is no error here.
"""

import platform
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

from hybridkv_ref.model_checks import verifiers
from hybridkv_ref.model_checks.verifiers import Run, VerifierError

OPTIONS = (
    *("--bound", "0"),
    *("--symmetry-reduction", "off"),
    *("--deadlock-detection", "off"),
    *("--counterexample-trace", "off"),
    *("--threads", "1"),
    *("--value-type", "int32_t"),  # sums may leave a variable's range before they are compared
    *("--output-format", "machine-readable"),
)
# Rumur's table is made of words of two pointers, which x86-64 swaps only if asked to.
_WIDE_SWAP = ("-mcx16",) if platform.machine() in ("x86_64", "AMD64") else ()
_VERDICTS = (0, 1)  # no error, an error found


def missing() -> str:
    """Why Rumur cannot run here; empty if it can."""
    return verifiers.missing("rumur")


def check(source: str, memory_mb: int = 4096, optimise: str = "-O3") -> Run:
    """Searches a model to its end, or to the first error (a broken invariant, or a number that leaves its range).

    ``memory_mb`` bounds the address space of the search, ``optimise`` is for the compiler.  VerifierError where the
    memory was too small: a search cut short gives no count.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model.m").write_text(source)
        compiler = ["cc", "-std=c11", optimise, "-w", *_WIDE_SWAP, "-o", "model", "model.c", "-lpthread"]
        generate, compiled = verifiers.build(folder, ["rumur", *OPTIONS, "--output", "model.c", "model.m"], compiler)
        # The generated program knows no bound of its own.
        command = ["sh", "-c", f"ulimit -v {memory_mb * 1024} && exec ./model"]
        done, seconds, processor = verifiers.timed(command, folder, _VERDICTS)
    try:
        report = ElementTree.fromstring(done.stdout)
        found = {**report.find("information").attrib, **report.find("summary").attrib}  # type: ignore[union-attr]
        counts = [int(found[n]) for n in ("states", "rules_fired", "state_size_bytes", "errors")]
    except (ElementTree.ParseError, AttributeError, KeyError, ValueError):
        raise VerifierError(f"no verdict: {verifiers.end(done.stdout + done.stderr)}") from None
    error = report.findtext("error/message", "")
    if bool(error) != bool(counts[3]):
        raise VerifierError(f"no verdict: {verifiers.end(done.stdout + done.stderr)}")
    return Run(counts[0], counts[1], counts[2], error, generate, compiled, seconds, processor)
