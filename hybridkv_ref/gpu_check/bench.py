"""How parts take time: deadlines, and the one way in which anything is measured."""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from hybridkv_ref.gpu_check.records import NOT_MEASURED, Check, Figure

WARM_UPS, LEAST, MOST, WANTED = 3, 5, 50, 0.15
"""Runs before a measurement, runs in one, and the seconds that one should take."""


@dataclass
class Bench:
    """One part's run on ``device`` until ``deadline`` (a reading of the monotonic clock).

    ``tiny``: small sizes; on the CPU nothing is measured.
    """

    device: torch.device
    tiny: bool
    deadline: float
    checks: list[Check] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)

    @property
    def device_name(self) -> str:
        """The GPU's name; "" on the CPU, where no figure is measured."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""

    def out_of_time(self) -> bool:
        """Whether the part's time is up."""
        return time.monotonic() >= self.deadline

    def check(self, name: str, run: Callable[[], str]) -> None:
        """Enters a check: it passes if ``run`` returns (its detail) and fails if it raises."""
        if self.out_of_time():
            self.checks.append(Check(name=name, passed=None, detail="not reached: out of time"))
            return
        try:
            self.checks.append(Check(name=name, passed=True, detail=run()))
        except Exception as error:  # whatever a kernel, a driver or a compiler raises is this check's failure
            self.checks.append(Check(name=name, passed=False, detail=first_line(error)))

    def seconds(self, run: Callable[[], object]) -> float | None:
        """Median seconds of one run on the GPU; None on the CPU, where it runs once."""
        if self.device.type != "cuda":
            run()
            return None
        for _ in range(WARM_UPS):
            run()
        once = next(self._timed(run, 1))
        count = min(MOST, max(LEAST, int(WANTED / max(once, 1e-6))))
        return statistics.median(self._timed(run, count))

    @staticmethod
    def _timed(run: Callable[[], object], count: int) -> Iterator[float]:
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        marks[0].record()
        for mark in marks[1:]:
            run()
            mark.record()
        torch.cuda.synchronize()
        for before, after in itertools.pairwise(marks):
            yield before.elapsed_time(after) / 1e3

    def measure(
        self, name: str, unit: str, amount: float, run: Callable[[], object], limit: str = "", best: float = 0.0
    ) -> float | None:
        """Enters ``amount`` per second of ``run`` as a figure; returns its seconds if they were measured.

        ``amount`` is in ``unit`` times a second.  ``best``: seconds that ``limit`` allows at least.
        """
        if self.out_of_time():
            self.figures.append(Figure(name=name, unit=unit, limit=limit, why="out of time"))
            return None
        try:
            seconds = self.seconds(run)
        except Exception as error:  # as in check: the figure says why there is none
            self.figures.append(Figure(name=name, unit=unit, limit=limit, why=first_line(error)))
            return None
        if seconds is None:
            self.figures.append(Figure(name=name, unit=unit, limit=limit, why="no CUDA device"))
            return None
        share = best / seconds if best else None
        figure = Figure(name=name, unit=unit, value=amount / seconds, device=self.device_name, limit=limit, share=share)
        self.figures.append(figure)
        return seconds

    def value(self, name: str) -> float | None:
        """A figure that was measured before in this part."""
        found = next((f.value for f in self.figures if f.name == name), NOT_MEASURED)
        return None if found == NOT_MEASURED else float(found)


def first_line(error: Exception) -> str:
    """An error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__
