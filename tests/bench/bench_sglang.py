"""What watching SGLang's radix cache costs: steps per second of CPU time bare, watched, and judged in lock step.

    HYBRIDKV_NATIVE=1 PYTHONPATH=CHECKOUT ENGINE_PYTHON tests/bench/bench_sglang.py [MODEL:WINDOW@PAGE ...]

Runs in the engine's own environment. The three forms take turns in one process, on the same requests: the driver of the
suite with its small pools, which does the same by the same seed whoever listens. That driver is part of what is timed,
the comparison of hits with the longest one is not. The table gives the median of the rounds and the ratio to the bare
rate of the same round, with rows fired per step; and says whether the oracle was compiled (``hybridkv native``).
"""

import argparse
import gc
import time
import warnings
from typing import Any
from unittest.mock import patch

from forms import FORMS, Round, compared
from rich.console import Console
from rich.table import Table

from hybridkv_ref import native
from hybridkv_ref.adapters import sglang_driver
from hybridkv_ref.adapters.sglang import Attached
from hybridkv_ref.events import Event

SEED, STEPS, ROUNDS = 1, 400, 5


class Unwatched:
    """Stands where the adapter would: nothing is told."""

    def __init__(self, *_: Any) -> None:
        self.missing: dict[str, list[str]] = {}

    def began(self, *_: Any) -> None:
        """A step's slots are there."""

    def ended(self, *_: Any) -> None:
        """A step is done."""

    def dropped(self, *_: Any) -> None:
        """A request that waited is given up."""

    def cleared(self) -> None:
        """Pools and tree are as new."""


class Timed(sglang_driver.Driver):
    """A driver whose oracle may be asked, or not."""

    form = "judged"

    def hear(self, event: Event) -> None:
        """Judges an event, if that is what is timed."""
        self.events += 1
        if self.form == "judged" and self.oracle.feed(event).refusals:
            raise SystemExit(f"{event}: refused")


def round_of(model: str, form: str) -> Round:
    """Steps per second, events and rows of one form, for the second half of its steps."""
    Timed.form = form
    with patch.object(sglang_driver, "Attached", Unwatched if form == "bare" else Attached):
        driver = Timed(model, SEED)
    for _ in range(STEPS):
        driver.step()
    gc.collect()
    gc.freeze()
    before = driver.events, sum(row.count for row in driver.oracle.state.rows)
    begun = time.process_time()
    for _ in range(STEPS):
        driver.step()
    rate = STEPS / (time.process_time() - begun)
    gc.unfreeze()
    return rate, driver.events - before[0], sum(row.count for row in driver.oracle.state.rows) - before[1]


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["gpt-oss-20b@16", "gemma-3-27b@64"])
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    table = Table(
        "model", "cache", "form", "steps/s", "of bare", "events/step", "rows/step", title=f"oracle {native.made()}"
    )
    for model in args.models:
        with patch.object(sglang_driver, "judge"):
            rounds = [[round_of(model, form) for form in FORMS] for _ in range(ROUNDS)]
        cache = type(Timed(model, SEED).cache).__name__
        for cells in compared(rounds, STEPS):
            table.add_row(model, cache, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
