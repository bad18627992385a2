"""Validates a trace of events: streams it through one oracle per engine instance, and shrinks what was refused."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Event, Header
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_coverage import Coverage, Outcome, merged
from hybridkv_ref.oracle_state import Refusal
from hybridkv_ref.oracle_tables import oracle_hash
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.trace_reader import STDIN, TraceReader, open_trace
from hybridkv_ref.trace_shrink import fails, related, shrink

SHRINK_SECONDS = 30.0
LAST = 1000
"""Events that are kept of standard input, which cannot be read again."""

Progress = Callable[[int, int], None]


class FirstRefusal(msgspec.Struct, frozen=True):
    """The first refusal that names a rule: line of the trace, and the shortest trace found that is still refused.

    ``events`` is empty where another entry of the report has the same row and guard.
    """

    rule: str
    line: int
    instance: str
    event: str
    row: str
    segment: str
    guard: str
    values: dict[str, int | str]
    message: str
    events: list[Any] = []


class ValidationReport(msgspec.Struct, frozen=True):
    """What a trace showed. ``fault`` is the line at which reading ended early, with the reason; "" for none."""

    file: str
    engine: str
    table_sha256: str
    verdict: Outcome
    events: int
    instances: int
    refusals: int
    first: list[FirstRefusal]
    coverage: Coverage
    warnings: list[str] = []
    fault: str = ""


@dataclass
class Run:
    """One pass: an oracle per instance, refusals with their lines, the last events of each instance."""

    header: Header
    spec: Path = SPEC_DIR
    oracles: dict[str, Oracle] = field(default_factory=dict)
    refused: list[tuple[int, str, Refusal, Event]] = field(default_factory=list)
    last: dict[str, deque[Event]] = field(default_factory=dict)
    count: int = 0
    total: int = 0

    def oracle(self, instance: str) -> Oracle:
        """The oracle of an engine instance."""
        if instance not in self.oracles:
            self.oracles[instance] = Oracle(self.header, spec=self.spec)
            self.last[instance] = deque(maxlen=LAST)
        return self.oracles[instance]

    def feed(self, first: int, events: list[Event], keep: bool) -> None:
        """Feeds a batch whose first event stands in line ``first``."""
        oracles, named = self.oracles, {r.row + r.guard for _, _, r, _ in self.refused}
        for offset, event in enumerate(events):
            oracle = oracles.get(event.instance) or self.oracle(event.instance)
            try:
                verdict = oracle.feed(event)
            except InputError as error:
                raise InputError(f"{first + offset}: {error}") from None
            if keep:
                self.last[event.instance].append(event)
            for refusal in verdict.refusals:
                self.total += 1
                # Of each row and guard the first says most; the state keeps none of them, so that memory stays bounded.
                if refusal.row + refusal.guard not in named:
                    named.add(refusal.row + refusal.guard)
                    self.refused.append((first + offset, event.instance, refusal, event))
        self.count += len(events)


def validate(
    path: str,
    model: str | None = None,
    strict_hash: bool = False,
    spec: Path = SPEC_DIR,
    progress: Progress | None = None,
    shrink_seconds: float = SHRINK_SECONDS,
) -> ValidationReport:
    """The report on a trace; ``path`` is a file (gzip and zstd by name) or ``-`` for standard input.

    InputError, with file, line and reason, for a trace without a usable header, one that fires no row at all and, with
    ``strict_hash``, one of other tables. A fault further on ends the reading and stands in the report.
    """
    with open_trace(path) as (stream, size):
        reader = TraceReader(stream, path)
        header, warnings = _header(reader.header, model, path, strict_hash, spec)
        run, fault = _run(path, header, spec), ""
        try:
            for first, events in reader.batches():
                run.feed(first, events, keep=path == STDIN)
                if progress:
                    progress(reader.read, size)
        except InputError as error:
            fault = str(error) if str(error).startswith(path) else f"{path}:{error}"
    if not run.count and not fault:
        raise InputError(f"{path}:2: no events")
    found = merged([o.coverage() for o in run.oracles.values()], header, spec)
    if not found.rows_fired and not fault:
        raise InputError(f"{path}:2: its {run.count} events fire no row")
    return ValidationReport(
        path,
        f"{header.engine.name} {header.engine.version}".strip(),
        oracle_hash(spec),
        found.verdict,
        run.count,
        len(run.oracles),
        run.total,
        _firsts(run, path, shrink_seconds),
        found,
        warnings,
        fault,
    )


def _run(path: str, header: Header, spec: Path) -> Run:
    run = Run(header, spec)
    try:
        run.oracle("")
    except InputError as error:
        raise InputError(f"{path}:1: {error}") from None
    run.oracles.clear()
    return run


def _header(header: Header, model: str | None, path: str, strict_hash: bool, spec: Path) -> tuple[Header, list[str]]:
    warnings = []
    if model is not None:
        header = msgspec.structs.replace(header, model=model, groups=())
    if header.table_sha256 not in (None, own := oracle_hash(spec)):
        message = f"is of other tables: table_sha256 {header.table_sha256}, not {own}"
        if strict_hash:
            raise InputError(f"{path}:1: {message}")
        warnings.append(message)
    return header, warnings


def _firsts(run: Run, path: str, seconds: float) -> list[FirstRefusal]:
    """The first refusal of each rule, each row and guard shrunk once, all within the time."""
    deadline, shortened, found = time.monotonic() + seconds, set[str](), dict[str, FirstRefusal]()
    for line, instance, refusal, event in run.refused:
        fresh = [rule for rule in refusal.rules if rule not in found] or ([""] if not refusal.rules else [])
        for rule in fresh:
            key, events = refusal.row + refusal.guard, list[Any]()
            if key not in shortened and time.monotonic() < deadline:
                shortened.add(key)
                events = [
                    msgspec.to_builtins(e) for e in _shortest(run, path, instance, line, refusal, event, deadline)
                ]
            found[rule] = FirstRefusal(
                rule, line, instance, refusal.event, refusal.row, refusal.segment, refusal.guard, dict(refusal.values),
                str(refusal), events,
            )  # fmt: skip
    return list(found.values())


def _shortest(
    run: Run, path: str, instance: str, line: int, refusal: Refusal, event: Event, deadline: float
) -> list[Event]:
    check = fails(run.header, refusal)
    if path == STDIN:
        part = list(run.last[instance])
    else:
        part = related(lambda: _again(path, instance, line), event)
    short = shrink(part, check, deadline)
    return short if check(short) else []


def _again(path: str, instance: str, until: int) -> Iterator[Event]:
    """The events of one instance up to a line, read again."""
    with open_trace(path) as (stream, _):
        for first, events in TraceReader(stream, path).batches():
            chosen: Iterable[Event] = events[: max(until - first + 1, 0)]
            yield from (e for e in chosen if e.instance == instance)
            if first + len(events) > until:
                return
