"""A run: histories by profile, coverage of all of them, and the first refusal of each rule made short."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from hybridkv_ref.conformance.capabilities import Profile, load_suite
from hybridkv_ref.conformance.engine import AnyOperation, Engine
from hybridkv_ref.conformance.lockstep import Lockstep, full_header, replay
from hybridkv_ref.conformance.machine import run_histories
from hybridkv_ref.conformance.records import SCHEMA, Found, Outcome, Report, RuleResult
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Event, Header
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_coverage import Coverage, merged
from hybridkv_ref.oracle_records import Refusal
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.rules import load_rules
from hybridkv_ref.trace_shrink import shrink

MERGE = 50
"""Coverages that are kept before they are added up."""


@dataclass
class Seen:
    """The first refusal of a rule: history and events up to it."""

    refusal: Refusal
    example: int
    seconds: float
    operations: list[AnyOperation]
    events: list[Event]


@dataclass
class Run:
    """What the histories of one run show."""

    engine: Engine
    profile: Profile
    gaps: tuple[str, ...] = ()
    coverages: list[Coverage] = field(default_factory=list)
    seen: dict[str, Seen] = field(default_factory=dict)
    examples: int = 0
    operations: int = 0
    events: int = 0
    error: str = ""
    error_operations: list[AnyOperation] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.header: Header = full_header(self.engine)
        self.begun = time.monotonic()

    def ended(self, history: Lockstep) -> None:
        """Takes in one history."""
        self.examples += 1
        self.operations += len(history.history)
        self.events += len(history.events)
        self.coverages.append(history.oracle.coverage())
        if len(self.coverages) >= MERGE:
            self.coverages = [merged(self.coverages, self.header, SPEC_DIR)]
        if history.broken and not self.error:
            self.error, self.error_operations = history.broken, history.history
        for one in history.refused:
            for rule in one.refusal.rules:
                if rule not in self.seen:
                    operations, events = history.history[: one.operations], history.events[: one.events]
                    seconds = time.monotonic() - self.begun
                    self.seen[rule] = Seen(one.refusal, self.examples, seconds, operations, events)

    def go(self, name: str) -> Report:
        """Runs all histories and gives the report; ``name`` is the profile's."""
        run_histories(self.engine, self.header, self.profile, self.ended, self.gaps)
        taken = time.monotonic() - self.begun
        found = self.minimised()
        coverage = merged(self.coverages, self.header, SPEC_DIR)
        suite, claims = load_suite(), tuple(self.engine.capabilities)
        asked, offered = suite.claimed(claims), suite.claimed(suite.asks)
        rules: dict[str, RuleResult] = {}
        for rule, about in load_rules().items():
            verdict = coverage.rules[rule]
            rules[rule] = RuleResult(
                level=about.level,
                result="fail" if rule in found else "inconclusive" if verdict.result == "fail" else verdict.result,
                premises=verdict.premises,
                sees=verdict.level,
                asked_by=asked.get(rule, []),
                unclaimed=[c for c in offered.get(rule, []) if c not in claims],
                known_gap=rule in self.gaps,
                found=found.get(rule),
            )
        return Report(
            schema=SCHEMA,
            engine=self.engine.name,
            version=self.engine.version,
            capabilities=list(claims),
            profile=name,
            table_sha256=self.header.table_sha256 or "",
            verdict=self.verdict(rules),
            examples=self.examples,
            operations=self.operations,
            events=self.events,
            rows_fired=coverage.rows_fired,
            seconds=round(taken, 3),
            rules=rules,
            open=[r for r, v in rules.items() if is_open(v)],
            known_gaps=list(self.gaps),
            stale=[r for r in self.gaps if rules[r].result != "fail"],
            header=self.header,
            error=self.error,
            error_operations=[msgspec.to_builtins(o) for o in self.error_operations],
        )

    def verdict(self, rules: dict[str, RuleResult]) -> Outcome:
        """Of the whole run; a known gap does not fail it, but it does not pass either."""
        if self.error or any(v.result == "fail" and not v.known_gap for v in rules.values()):
            return "fail"
        return "partial" if any(v.known_gap or is_open(v) for v in rules.values()) else "pass"

    # -- the shortest way ----------------------------------------------------------------------------------------------

    def minimised(self) -> dict[str, Found]:
        """Each row and guard made short once, all within the profile's time; rules that share one share the trace."""
        deadline = time.monotonic() + self.profile.minimise
        short: dict[tuple[str, str], Seen] = {}
        found = {}
        for rule, seen in self.seen.items():
            refusal = seen.refusal
            key = (refusal.row, refusal.guard)
            if key not in short:
                share = max(deadline - time.monotonic(), 0.0) / max(len(self.seen) - len(short), 1)
                short[key] = self.shortest(seen, time.monotonic() + share)
            least = short[key]
            refusal = least.refusal
            found[rule] = Found(
                example=seen.example,
                seconds=round(seen.seconds, 3),
                row=refusal.row,
                guard=refusal.guard,
                segment=refusal.segment,
                values=dict(refusal.values),
                message=str(refusal),
                operations=[msgspec.to_builtins(o) for o in least.operations],
                events=[msgspec.to_builtins(e) for e in least.events],
            )
        return found

    def shortest(self, seen: Seen, deadline: float) -> Seen:
        """Fewer operations that still lead to the refusal, then fewer of the events that these lead to."""
        half = time.monotonic() + (deadline - time.monotonic()) / 2

        def again(operations: Sequence[AnyOperation]) -> list[Event]:
            history = replay(self.engine, self.header, operations, self.gaps)
            same = [o for o in history.refused if (o.refusal.row, o.refusal.guard) == (row, guard)]
            return history.events[: same[0].events] if same else []

        row, guard = seen.refusal.row, seen.refusal.guard

        def check(part: Sequence[Event]) -> bool:
            # Nothing else may be refused, or the trace would show another fault than the engine's.
            try:
                refused = Oracle(self.header).feed_all(part)
            except InputError:
                return False
            return bool(refused) and all((r.row, r.guard) == (row, guard) for r in refused)

        operations, events = seen.operations, seen.events
        if self.profile.minimise and (begun := again(operations)):
            operations = _shrunk(operations, lambda part: bool(again(part)), half)
            events = again(operations) or begun
        shorter = shrink(events, check, deadline)
        events = shorter if check(shorter) else events
        refused = Oracle(self.header).feed_all(events)
        refusal = next((r for r in refused if (r.row, r.guard) == (row, guard)), seen.refusal)
        return Seen(refusal, seen.example, seen.seconds, operations, events)


def is_open(verdict: RuleResult) -> bool:
    """A MUST of a claimed capability that was not shown."""
    return bool(verdict.asked_by) and verdict.level == "MUST" and verdict.result not in ("pass", "fail")


def _shrunk(
    operations: Sequence[AnyOperation], check: Callable[[Sequence[AnyOperation]], bool], deadline: float
) -> list[AnyOperation]:
    # The shrinker groups by ``req``, which operations have as events do.
    short: list[AnyOperation] = cast("Any", shrink)(operations, check, deadline)
    return short


def conform(engine: Engine, profile: Profile, name: str, gaps: tuple[str, ...] = ()) -> Report:
    """Runs the suite on an engine."""
    return Run(engine, profile, gaps).go(name)
