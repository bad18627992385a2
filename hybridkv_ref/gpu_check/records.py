"""What a run reports.  A figure is a number with the device that it was measured on, or says that it was not."""

from pathlib import Path
from tempfile import TemporaryFile
from typing import Literal

import msgspec

from hybridkv_ref.errors import InputError

SCHEMA = "hybridkv.gpu_check/1"
ALSO = ", also"
"""Ends the name of a figure that says the same run in another unit."""
NOT_MEASURED: Literal["not measured"] = "not measured"


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure.

    ``value`` in ``unit``, measured on ``device``; or "not measured", and ``why``.  ``share``: of ``limit``, the part
    of what the device can do that the figure reaches, 1 is all of it.
    """

    name: str
    unit: str
    value: float | Literal["not measured"] = NOT_MEASURED
    device: str = ""
    limit: str = ""
    share: float | None = None
    why: str = ""

    def __post_init__(self) -> None:
        """A number has a device, and no number has none."""
        measured = self.value != NOT_MEASURED
        if measured != bool(self.device) or measured == bool(self.why) or (self.share is not None and not measured):
            raise ValueError(
                f"{self.name}: {self.value} on {self.device or 'no device'}, why: {self.why or 'not said'}"
            )


class Check(msgspec.Struct, frozen=True, kw_only=True):
    """One check.  ``passed`` None: it was not reached, and ``detail`` says why."""

    name: str
    passed: bool | None
    detail: str = ""


class PartReport(msgspec.Struct, frozen=True, kw_only=True):
    """One part.  ``budget``: seconds that it may take; ``wall``: that it took."""

    name: str
    budget: float
    wall: float
    checks: tuple[Check, ...] = ()
    figures: tuple[Figure, ...] = ()


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A whole run.  ``device``: the GPU's name, or "cpu"; ``versions``: by component."""

    schema: str = SCHEMA
    device: str
    versions: dict[str, str]
    parts: tuple[PartReport, ...]

    @property
    def failed(self) -> tuple[Check, ...]:
        """The checks that failed."""
        return tuple(check for part in self.parts for check in part.checks if check.passed is False)

    def figures(self, part: str) -> tuple[Figure, ...]:
        """The figures of one part."""
        return next((p.figures for p in self.parts if p.name == part), ())


def make_folder(path: Path) -> None:
    """Makes the folder of a report, before anything takes time.  InputError: it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file whole or not at all.  InputError: it cannot be written."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error
