"""Validates a trace of events: streams it through one oracle per engine instance, and shrinks what was refused."""

import multiprocessing
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from hybridkv_ref.collector import collector_paused
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Event, Header
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_coverage import Coverage, Outcome, merged
from hybridkv_ref.oracle_joint import TIES, Joint
from hybridkv_ref.oracle_records import Refusal
from hybridkv_ref.oracle_tables import oracle_hash
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.trace_reader import STDIN, TraceReader, open_trace
from hybridkv_ref.trace_shrink import fails, related, shrink

SHRINK_SECONDS = 30.0
LAST = 1000
"""Events that are kept of standard input, which cannot be read again."""

TOLD = 1 << 20
"""Bytes after which progress is told again."""

Progress = Callable[[int, int], None]
Check = Callable[[Sequence[Event]], bool]
_INSTANCE = attrgetter("instance")


def _ties(event: Event) -> bool:
    return isinstance(event, TIES)


class FirstRefusal(msgspec.Struct, frozen=True):
    """The first refusal that names a rule: line of the trace, and the shortest trace found that is still refused.

    ``events`` is empty where another entry of the report is of the same fault.
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
    """One pass: an oracle per instance, refusals with their lines, the last events of each instance.

    Of ``parts`` passes over one trace each takes the instances that fall to its number ``part``; the first also
    judges what ties instances together.
    """

    header: Header
    spec: Path = SPEC_DIR
    part: int = 0
    parts: int = 1
    joint: Joint | None = None
    oracles: dict[str, Oracle] = field(default_factory=dict)
    refused: list[tuple[int, str, Refusal, Event]] = field(default_factory=list)
    last: dict[str, deque[Event]] = field(default_factory=dict)
    named: set[tuple[str, str, tuple[str, ...]]] = field(default_factory=set)
    count: int = 0
    total: int = 0

    def oracle(self, instance: str) -> Oracle:
        """The oracle of an engine instance."""
        if instance not in self.oracles:
            self.oracles[instance] = Oracle(self.header, spec=self.spec)
            self.last[instance] = deque(maxlen=LAST)
        return self.oracles[instance]

    def mine(self, instance: str) -> bool:
        """Whether this pass judges an instance."""
        return self.parts == 1 or zlib.crc32(instance.encode()) % self.parts == self.part

    def feed(self, line: int, events: list[Event], keep: bool) -> None:
        """Feeds a batch whose first event stands in this line."""
        for instance, run in groupby(events, _INSTANCE):
            if not instance or self.part:
                line += self.judge(instance, line, list(run), keep)
                continue
            for ties, part in groupby(run, _ties):
                if not ties:
                    line += self.judge(instance, line, list(part), keep)
                    continue
                for event in part:
                    self.together(line, event)
                    line += self.judge(instance, line, [event], keep)

    def judge(self, instance: str, line: int, events: list[Event], keep: bool) -> int:
        """Feeds events of one instance, the first of which stands in this line; gives how many they are."""
        oracle, fed = self.oracles.get(instance), len(events)
        if oracle is None:
            if not self.mine(instance):
                return fed
            oracle = self.oracle(instance)
        before = oracle.seen + 1
        try:
            for refusal in oracle.judge(events):
                place = refusal.index - before
                self.note(line + place, events[place], refusal)
        except InputError as error:
            fed = oracle.seen - before
            raise InputError(f"{line + fed}: {error}") from None
        finally:
            self.count += fed
            if keep:
                self.last[instance].extend(events[:fed])
        return fed

    def together(self, line: int, event: Event) -> None:
        """Feeds an event of a named instance to the joint pass."""
        if self.joint is None:
            self.joint = Joint(self.header, self.spec)
        try:
            verdict = self.joint.feed(event)
        except InputError as error:
            raise InputError(f"{line}: {error}") from None
        for refusal in verdict.refusals:
            self.note(line, event, refusal)

    def note(self, line: int, event: Event, refusal: Refusal) -> None:
        """Keeps the first refusal of each fault, which says most, and counts all."""
        self.total += 1
        if refusal.fault not in self.named:
            self.named.add(refusal.fault)
            self.refused.append((line, event.instance, refusal, event))

    def results(self) -> list[Coverage]:
        """The coverage of each oracle."""
        found = [oracle.coverage() for oracle in self.oracles.values()]
        return [*found, self.joint.oracle.coverage()] if self.joint is not None else found


def validate(
    path: str,
    model: str | None = None,
    strict_hash: bool = False,
    spec: Path = SPEC_DIR,
    progress: Progress | None = None,
    shrink_seconds: float = SHRINK_SECONDS,
    jobs: int = 1,
) -> ValidationReport:
    """The report on a trace; ``path`` is a file (gzip and zstd by name) or ``-`` for standard input.

    InputError, with file, line and reason, for a trace without a usable header, one that fires no row at all and,
    with ``strict_hash``, one of other tables. A fault further on ends the reading and stands in the report. With more
    ``jobs`` each process reads the file and judges some of its engine instances.
    """
    jobs = 1 if path == STDIN else max(jobs, 1)
    how = (path, model, strict_hash, spec)
    if jobs == 1:
        passes = [_scan(*how, progress=progress)]
    else:
        with ProcessPoolExecutor(jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            passes = list(pool.map(_scan, *zip(*[how] * jobs, strict=True), range(jobs), [jobs] * jobs))
    first = passes[0]
    count, total = sum(p.count for p in passes), sum(p.total for p in passes)
    if not count and not first.fault:
        raise InputError(f"{path}:2: no events")
    found = merged([c for p in passes for c in p.coverage], first.header, spec)
    if not found.rows_fired and not first.fault:
        raise InputError(f"{path}:2: its {count} events fire no row")
    refused = sorted((r for p in passes for r in p.refused), key=lambda r: r[0])
    return ValidationReport(
        path,
        f"{first.header.engine.name} {first.header.engine.version}".strip(),
        oracle_hash(spec),
        found.verdict,
        count,
        sum(p.instances for p in passes),
        total,
        _firsts(refused, first, path, spec, shrink_seconds),
        found,
        first.warnings,
        next((p.fault for p in passes if p.fault), ""),
    )


@dataclass
class Scan:
    """What one pass brings home."""

    header: Header
    warnings: list[str]
    coverage: list[Coverage]
    refused: list[tuple[int, str, Refusal, Event]]
    last: dict[str, list[Event]]
    count: int
    total: int
    instances: int
    fault: str


def _scan(
    path: str,
    model: str | None,
    strict_hash: bool,
    spec: Path,
    part: int = 0,
    parts: int = 1,
    progress: Progress | None = None,
) -> Scan:
    # What the pass made is gone before the collector would look through it.
    with collector_paused():
        return _pass(path, model, strict_hash, spec, part, parts, progress)


def _pass(
    path: str, model: str | None, strict_hash: bool, spec: Path, part: int, parts: int, progress: Progress | None
) -> Scan:
    fault = ""
    with open_trace(path) as (stream, size):
        reader = TraceReader(stream, path)
        header, warnings = _header(reader.header, model, path, strict_hash, spec)
        try:
            Oracle(header, spec=spec)
        except InputError as error:
            raise InputError(f"{path}:1: {error}") from None
        run, due = Run(header, spec, part, parts), 0
        try:
            for first, events in reader.batches():
                run.feed(first, events, keep=path == STDIN)
                events.clear()  # not when the next are read, when they have left the processor's cache
                if progress and reader.read >= due:
                    progress(reader.read, size)
                    due = reader.read + TOLD
        except InputError as error:
            fault = str(error) if str(error).startswith(path) else f"{path}:{error}"
    last = {name: list(events) for name, events in run.last.items()}
    return Scan(
        header, warnings, run.results(), run.refused, last, run.count, run.total, len(run.oracles), fault
    )  # fmt: skip


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


def _firsts(
    refused: list[tuple[int, str, Refusal, Event]], scan: Scan, path: str, spec: Path, seconds: float
) -> list[FirstRefusal]:
    """The first refusal of each rule, each fault shrunk once, all within the time."""
    deadline, found = time.monotonic() + seconds, dict[str, FirstRefusal]()
    shortened: set[tuple[str, str, tuple[str, ...]]] = set()
    for line, instance, refusal, event in refused:
        fresh = [rule for rule in refusal.rules if rule not in found] or ([""] if not refusal.rules else [])
        for rule in fresh:
            events = list[Any]()
            if refusal.fault not in shortened and time.monotonic() < deadline:
                shortened.add(refusal.fault)
                check = fails(scan.header, refusal, spec)
                short = _shortest(scan, path, instance, line, event, check, deadline)
                events = [msgspec.to_builtins(e) for e in short]
            found[rule] = FirstRefusal(
                rule, line, instance, refusal.event, refusal.row, refusal.segment, refusal.guard, dict(refusal.values),
                str(refusal), events,
            )  # fmt: skip
    return list(found.values())


def _shortest(
    scan: Scan, path: str, instance: str, line: int, event: Event, check: Check, deadline: float
) -> list[Event]:
    again = partial(_again, path, instance, line)
    part = scan.last[instance] if path == STDIN else related(again, event, deadline)
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
