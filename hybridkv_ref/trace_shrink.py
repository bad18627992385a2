"""The shortest part of a trace that is still refused: delta debugging by whole requests, then by single events."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Event, Header
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_records import Refusal
from hybridkv_ref.paths import SPEC_DIR

Item = TypeVar("Item")
_NAMES = ("req", "xfer", "step", "graph", "who", "parent")
KEPT = 200_000
"""Events that are kept in memory at most for one refusal."""


def names(event: Event) -> Iterator[tuple[str, object]]:
    """What an event is about: requests, blocks, keys, transfers, steps, graphs. Nothing: it is about everything."""
    for field in _NAMES:
        value = getattr(event, field, "")
        if value:
            yield field, value
    group = getattr(event, "group", "")
    blocks = getattr(event, "blocks", ())
    if isinstance(blocks, dict):
        yield from (("block", (g, b)) for g, numbers in blocks.items() for b in numbers)
    else:
        yield from (("block", (group, b)) for b in blocks)
    yield from (("key", (group, k)) for k in getattr(event, "keys", ()))
    for span in (*getattr(event, "reads", ()), *getattr(event, "writes", ())):
        yield from (("block", (span.group, b)) for b in span.blocks)
    for part in getattr(event, "parts", ()):
        yield from (("block", (part.group, b)) for b in (*part.source, *part.target))


def related(events: Callable[[], Iterable[Event]], target: Event, deadline: float, rounds: int = 2) -> list[Event]:
    """The events that share a name with the target, directly or through ``rounds`` others; ``events`` is read anew.

    None of them if that takes longer than ``deadline``, of time.monotonic().
    """
    known = set(names(target))
    for _ in range(rounds):
        wider = set(known)
        for count, event in enumerate(events()):
            own = set(names(event))
            if own & known:
                wider |= own
            if not count % 4096 and time.monotonic() > deadline:
                return []
        if wider == known:
            break
        known = wider
    kept = [event for event in events() if not (own := set(names(event))) or own & known]
    return kept[-KEPT:]


def fails(header: Header, refusal: Refusal, spec: Path = SPEC_DIR) -> Callable[[Sequence[Event]], bool]:
    """Whether events lead to a refusal of the same fault; those that cannot be fed at all do not."""

    def check(events: Sequence[Event]) -> bool:
        try:
            found = Oracle(header, spec=spec).feed_all(events)
        except InputError:
            return False
        return any(r.fault == refusal.fault for r in found)

    return check


def shrink(events: Sequence[Event], check: Callable[[Sequence[Event]], bool], deadline: float) -> list[Event]:
    """A part of the events, in order, of which ``check`` holds and of which nothing can be left out within the time.

    ``deadline`` is of time.monotonic(). The events come back as they are where ``check`` does not hold of them.
    """
    best = list(events)
    if not check(best):
        return best
    for unit in (lambda event: getattr(event, "req", ""), id):
        groups: dict[object, list[int]] = {}
        for place, event in enumerate(best):
            groups.setdefault(unit(event), []).append(place)
        kept = _ddmin(list(groups.values()), partial(_holds, check, best), deadline)
        best = _pick(best, kept)
    return best


def _holds(check: Callable[[Sequence[Event]], bool], events: Sequence[Event], chosen: list[list[int]]) -> bool:
    return check(_pick(events, chosen))


def _pick(events: Sequence[Event], groups: Iterable[list[int]]) -> list[Event]:
    return [events[place] for place in sorted(place for group in groups for place in group)]


def _ddmin(items: list[Item], check: Callable[[list[Item]], bool], deadline: float) -> list[Item]:
    size = max(len(items) // 2, 1)
    while items and time.monotonic() < deadline:
        start, shorter = 0, False
        while start < len(items) and time.monotonic() < deadline:
            rest = items[:start] + items[start + size :]
            if rest and check(rest):
                items, shorter = rest, True
            else:
                start += size
        if size == 1 and not shorter:
            break
        size = max(size // 2, 1)
    return items
