"""Drives a real engine and tells what was seen: ``run_there`` from outside, ``main`` in the engine's own process.

That process is started with the interpreter of the engine's environment, with this package and nothing else of ours on
its path. It says one line of JSON on standard output for each run; what the engine prints goes to standard error.
"""

import argparse
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from hybridkv_ref.adapters.engine_report import Played, Refused
from hybridkv_ref.adapters.engines import ENGINES, Driver
from hybridkv_ref.errors import InputError
from hybridkv_ref.oracle_coverage import Coverage
from hybridkv_ref.oracle_records import Refusal
from hybridkv_ref.trace_shrink import fails, shrink

OLDEST = (3, 11)
SHORTEN = 20.0
"""Seconds that are spent at most to make the trace of one refusal short."""

LOOK = """
import importlib.util, json, sys
print(json.dumps([sys.version_info[:2], [m for m in sys.argv[1:] if importlib.util.find_spec(m) is None]]))
"""
"""Asks an interpreter for its version, and which of some packages it does not have; imports none of them."""


class Told(msgspec.Struct, frozen=True):
    """What the process says of one run."""

    played: Played
    coverage: Coverage


def run_there(
    engine: str, python: str, models: Sequence[str], steps: int, seed: int, tell: Callable[[Played], None]
) -> Iterator[Told]:
    """Drives an engine in another environment, each model by each driver; ``tell`` hears of each run when it is over.

    InputError, with the reason in one line, for an unknown engine, for an interpreter that cannot do it and for models
    that it cannot drive.
    """
    if engine not in ENGINES:
        raise InputError(f"conform {engine}: no such engine (known: {', '.join(ENGINES)})")
    kind = ENGINES[engine]()
    for model in models or kind.models:
        kind.check(model)
    look(python, kind.package)
    command = [python, "-m", __name__, engine, "--steps", str(steps), "--seed", str(seed), *(models or kind.models)]
    with _alone() as path, tempfile.TemporaryFile() as noise:
        env = dict(os.environ, PYTHONPATH=path, PYTHONHASHSEED="0", **kind.variables)
        with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=noise) as process:
            if process.stdout is None:
                raise RuntimeError("a pipe was asked for")
            for line in process.stdout:
                told = msgspec.json.decode(line, type=Told)
                tell(told.played)
                yield told
        if process.returncode:
            noise.seek(0)
            said = noise.read().decode(errors="replace").strip().splitlines() or ["it said nothing"]
            raise InputError(f"--python {python}: the run ended with code {process.returncode}: {said[-1]}")


def look(python: str, package: str) -> None:
    """InputError where an interpreter is none, is too old, or lacks what is needed."""
    place = f"--python {python}"
    if not Path(python).is_file():
        raise InputError(f"{place}: no such file")
    try:
        done = subprocess.run([python, "-c", LOOK, package, "msgspec"], capture_output=True, timeout=60, check=False)
        version, missing = msgspec.json.decode(done.stdout, type=tuple[tuple[int, int], list[str]])
    except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError):
        raise InputError(f"{place}: not an interpreter of Python") from None
    if version < OLDEST:
        raise InputError(f"{place}: Python {version[0]}.{version[1]} is older than {OLDEST[0]}.{OLDEST[1]}")
    if missing:
        raise InputError(f"{place}: its environment has no {' and no '.join(missing)}")


@contextmanager
def _alone() -> Iterator[str]:
    """A folder that holds this package only: its own folder may hold packages that would hide the engine's."""
    with tempfile.TemporaryDirectory(prefix="hybridkv-") as folder:
        (Path(folder) / "hybridkv_ref").symlink_to(Path(__file__).resolve().parents[1], target_is_directory=True)
        yield folder


# -- in the engine's process -------------------------------------------------------------------------------------------


def play(make: Callable[[str, int], Driver], model: str, how: str, seed: int, steps: int) -> Told:
    """One run until its end, or the first refusal."""
    begun, driver, done, error = time.monotonic(), make(model, seed), 0, ""
    try:
        while done < steps and not driver.refusals:
            done += 1
            driver.step()
        if not driver.refusals:
            driver.end()
    except Exception as raised:
        # An engine under test may raise anything; the report says what.
        error = f"{type(raised).__name__}: {raised}".partition("\n")[0]
    stats = driver.stats
    played = Played(
        model=model,
        how=how,
        seed=seed,
        steps=done,
        events=len(driver.trail),
        lookups=stats["lookups"],
        hit_tokens=stats["hit_tokens"],
        best_tokens=stats["best_tokens"],
        longer=stats["longer"],
        shorter=stats["shorter"],
        lost=dict(driver.lost.most_common()),
        stats=dict(stats),
        missing=dict(driver.missing),
        skipped=driver.oracle.state.skipped,
        seconds=round(time.monotonic() - begun, 2),
        header=driver.header,
        refused=shortened(driver, driver.refusals[0]) if driver.refusals else None,
        error=error,
    )
    return Told(played, driver.oracle.coverage())


def shortened(driver: Driver, refusal: Refusal) -> Refused:
    """A refusal with the least of the events that lead to it."""
    events = driver.trail[: refusal.index]
    least = shrink(events, fails(driver.header, refusal), time.monotonic() + SHORTEN)
    return Refused(rules=refusal.rules, message=str(refusal), events=[msgspec.to_builtins(e) for e in least])


def main() -> None:
    """Drives each model by each driver and says what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    args = parser.parse_args()
    with os.fdopen(os.dup(1), "wb") as told:
        os.dup2(2, 1)
        for model in args.models:
            for how, make in ENGINES[args.engine]().drivers.items():
                told.write(msgspec.json.encode(play(make, model, how, args.seed, args.steps)) + b"\n")
                told.flush()


if __name__ == "__main__":
    main()
