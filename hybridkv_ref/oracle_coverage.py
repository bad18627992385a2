"""What a trace has shown of each rule.

Passed with its premises, failed, not exercised, not observable, inconclusive.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from hybridkv_ref.event_map import LEVELS, load_event_map
from hybridkv_ref.events import Header
from hybridkv_ref.oracle_state import State
from hybridkv_ref.rules import load_rules

Result = Literal["pass", "fail", "not exercised", "not observable", "inconclusive"]
Outcome = Literal["pass", "partial", "fail"]


class RuleVerdict(msgspec.Struct, frozen=True):
    """One rule: ``premises`` is how often a row of it was fired, ``level`` what an observer must see ("" none can)."""

    result: Result
    premises: int
    level: str
    rows: tuple[str, ...]


class Coverage(msgspec.Struct, frozen=True):
    """All rules, and the verdict of the run.

    ``open`` are the rules that a claimed capability had to exercise and did not. ``hidden`` steps were implied and
    not reported; ``peak`` is the largest number of entries among which one event left the choice open; ``skipped``
    events were about what was lost after a refusal.
    """

    verdict: Outcome
    rules: dict[str, RuleVerdict]
    open: tuple[str, ...]
    rows_fired: int
    hidden: int
    peak: int
    skipped: int


def coverage(state: State) -> Coverage:
    """The coverage of what a state has seen."""
    rows_of: dict[str, set[str]] = {}
    premises_of: Counter[str] = Counter()
    levels, told = state.map.row_level(), LEVELS.index(state.header.level)
    fired = 0
    for row in state.rows:
        if row.name in levels:
            fired += row.count
            for rule in row.rules:
                rows_of.setdefault(rule, set()).add(row.name)
                premises_of[rule] += row.count
    failed = state.failed
    found: dict[str, RuleVerdict] = {}
    for rule in load_rules(state.spec):
        rows = tuple(sorted(rows_of.get(rule, ())))
        level = min((levels[row] for row in rows), default="")
        premises = premises_of[rule]
        result: Result = "pass"
        if rule in failed:
            result = "fail"
        elif not rows or LEVELS.index(level) > told:
            result = "not observable"
        elif not premises:
            result = "inconclusive" if state.skipped else "not exercised"
        found[rule] = RuleVerdict(result, premises, level, rows)
    return _judged(found, state.claims, state.spec, (fired, state.hidden, state.peak, state.skipped))


def merged(parts: Sequence[Coverage], header: Header, spec: Path) -> Coverage:
    """What several instances of one engine showed together."""
    best: tuple[Result, ...] = ("fail", "pass", "inconclusive", "not exercised", "not observable")
    found: dict[str, RuleVerdict] = {}
    for part in parts:
        for rule, new in part.rules.items():
            old = found.get(rule, new)
            result = min(old.result, new.result, key=best.index)
            found[rule] = RuleVerdict(
                result, new.premises + (old.premises if rule in found else 0), new.level, new.rows
            )
    sums = (sum(p.rows_fired for p in parts), sum(p.hidden for p in parts))
    rest = (max((p.peak for p in parts), default=1), sum(p.skipped for p in parts))
    return _judged(found, frozenset(header.capabilities), spec, (*sums, *rest))


def _judged(
    found: dict[str, RuleVerdict], claims: frozenset[str], spec: Path, counts: tuple[int, int, int, int]
) -> Coverage:
    capabilities = load_event_map(spec).capabilities
    claimed = {rule for claim in claims for rule in capabilities[claim].rules}
    missing = tuple(rule for rule in found if rule in claimed and found[rule].result not in ("pass", "fail"))
    failed = any(v.result == "fail" for v in found.values())
    verdict: Outcome = "fail" if failed else "partial" if missing else "pass"
    return Coverage(verdict, found, missing, *counts)
