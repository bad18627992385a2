"""What running Spin and Rumur has in common: the tool writes a C program, a compiler builds it, and that one searches.

The tools and the compiler are looked for, never installed.
"""

import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

Done = subprocess.CompletedProcess[str]


class VerifierError(RuntimeError):
    """A tool, the compiler or the verifier ended without a verdict; the message holds the end of its output."""


@dataclass(frozen=True)
class Run:
    """What a verifier found: states stored, transitions, bytes per state, and the first error's text ('' if none).

    Seconds of wall time: ``generate`` for the tool's C text, ``compile`` for the C compiler, ``run`` for the search;
    and the search's seconds of ``processor`` time.
    """

    states: int
    transitions: int
    state_bytes: int
    error: str
    generate: float
    compile: float
    run: float
    processor: float


def missing(tool: str) -> str:
    """Why a tool cannot run here; empty if it can."""
    absent = [name for name in (tool, "cc") if shutil.which(name) is None]
    return f"not installed: {', '.join(absent)}" if absent else ""


def build(folder: Path, generator: Sequence[str], compiler: Sequence[str]) -> tuple[float, float]:
    """Makes a verifier in a folder that holds the model: the seconds that the tool and the compiler took."""
    reason = missing(generator[0])
    if reason:
        raise VerifierError(reason)
    begun = time.perf_counter()
    call(generator, folder)
    between = time.perf_counter()
    call(compiler, folder)
    return between - begun, time.perf_counter() - between


def timed(command: Sequence[str], folder: Path, verdicts: Sequence[int] = (0,)) -> tuple[Done, float, float]:
    """A verifier's outputs, its seconds of wall time and of processor time."""
    begun, used = time.perf_counter(), _children()
    done = call(command, folder, verdicts)
    return done, time.perf_counter() - begun, _children() - used


def call(command: Sequence[str], folder: Path, verdicts: Sequence[int] = (0,)) -> Done:
    """The outputs of a command in a folder; VerifierError for an exit status that is not among ``verdicts``."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode not in verdicts:
        raise VerifierError(f"{command[0]}: {end(done.stdout + done.stderr) or f'exit status {done.returncode}'}")
    return done


def end(text: str) -> str:
    """The end of an output, as errors quote it."""
    return text.strip()[-800:]


def _children() -> float:
    """Processor seconds of all processes that this one has waited for."""
    times = os.times()
    return times.children_user + times.children_system
