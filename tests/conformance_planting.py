"""How a fault is planted in the reference allocator, and how the suite hunts for it.

A fault is planted in code by a patch, or in a copy of the tables from which a guard or an effect is taken, so that the
allocator does what it may not.
"""

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from hybridkv_ref.conformance import gate
from hybridkv_ref.conformance.capabilities import Profile
from hybridkv_ref.conformance.lockstep import Lockstep, full_header
from hybridkv_ref.conformance.machine import run_histories
from hybridkv_ref.conformance.reference import ReferenceEngine
from hybridkv_ref.events import Event
from hybridkv_ref.loader import load_tables
from hybridkv_ref.tables import Tables

TABLES = load_tables()
PROFILE = Profile("", examples=25, steps=25, minimise=0, derandomise=True)
PARAMETERS: dict[str, dict[str, int]] = {
    "small": {"device_bytes": 9_000, "host_bytes": 20_000},
    "tight": {"device_bytes": 5_000, "host_bytes": 5_000},
    "roomy": {"device_bytes": 40_000, "host_bytes": 60_000},
}


class Found(BaseException):
    """Something was refused: the history so far is enough, and Hypothesis need not run it again."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault.  ``rule`` is one of those that the first refused event has to name.

    ``plant`` patches, ``tables`` are as they are then.  ``quiet``: the engine claims nothing of the length of its hits,
    so that the first refusal is about what they hold.
    """

    rule: str
    plant: Callable[[ExitStack], None] = lambda stack: None
    tables: Callable[[], Tables] = lambda: TABLES
    quiet: bool = False


def without(rows: str, *guards: str) -> Tables:
    """The tables without guards of these rows that contain one of the texts; all guards of them without a text."""
    events = []
    for event in TABLES.events:
        mine = event.row in rows.split()
        kept = tuple(g for g in event.guards if not mine or (guards and not any(text in g.text for text in guards)))
        events.append(dataclasses.replace(event, guards=kept))
    return dataclasses.replace(TABLES, events=tuple(events))


def without_effect(row: str, target: str) -> Tables:
    """The tables without the effects of a row on one variable."""
    events = []
    for event in TABLES.events:
        kept = tuple(e for e in event.effects if event.row != row or target not in str(e.target))
        events.append(dataclasses.replace(event, effects=kept))
    return dataclasses.replace(TABLES, events=tuple(events))


def swap(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[ExitStack], None]:
    """Plants ``make(original)`` in place of a method or function."""

    def plant(stack: ExitStack) -> None:
        stack.enter_context(patch.object(owner, name, make(getattr(owner, name))))

    return plant


def every(*plants: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
    """Several patches that make one fault."""

    def plant(stack: ExitStack) -> None:
        for one in plants:
            one(stack)

    return plant


def saying(change: Callable[[Event], Sequence[Event]]) -> Callable[[ExitStack], None]:
    """The engine says something else than what happened."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def say(self: ReferenceEngine, *events: Event) -> None:
            self.events += [one for event in (*events, *self.entries()) for one in change(event)]

        return say

    return swap(ReferenceEngine, "say", make)


@dataclasses.dataclass
class Outcome:
    """What found a fault: the rules of the first refusal (or what broke), histories, seconds."""

    rules: tuple[str, ...]
    message: str
    examples: int
    seconds: float


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The fault is there."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(gate, "PATIENCE", 2.0))
        mutant.plant(stack)
        yield


def hunt(mutant: Mutant, parameters: dict[str, int]) -> Outcome | None:
    """Runs the quick profile until something is refused; None if nothing is."""
    begun, count = time.monotonic(), 0
    found: list[Outcome] = []

    def ended(history: Lockstep) -> None:
        nonlocal count
        count += 1
        taken = time.monotonic() - begun
        if history.refused:
            rules = dict.fromkeys(rule for one in history.refused for rule in one.refusal.rules)
            found.append(Outcome(tuple(rules), str(history.refused[0].refusal), count, taken))
        elif history.broken:
            found.append(Outcome((), history.broken, count, taken))
        if found:
            raise Found

    with planted(mutant):
        engine = ReferenceEngine(**parameters, tables=mutant.tables())  # type: ignore[arg-type]
        if mutant.quiet:
            engine.capabilities = tuple(c for c in engine.capabilities if c not in ("longest", "limits", "announced"))
        try:
            run_histories(engine, full_header(engine), PROFILE, ended)
        except Found:
            pass
        finally:
            engine.close()
    return found[0] if found else None
