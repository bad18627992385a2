"""Engines with one planted fault leave traces that are refused by the rule that the fault breaks."""

import random
from collections.abc import Callable

import pytest
from reference_driver import Driver, Running

from hybridkv_ref.events import (
    Complete,
    Dispatch,
    Event,
    Free,
    KeyPublish,
    KeyRemove,
    Lookup,
    Pin,
    Reject,
    TransferEnd,
)
from hybridkv_ref.oracle import Oracle

SEEDS = 30


class Forgetful(Driver):
    """Leaves out or changes what it should say."""

    def __init__(self, seed: int, change: Callable[[Event], Event | None]) -> None:
        super().__init__(random.Random(seed), capacity=20)
        self.change = change

    def say(self, event: Event) -> None:
        changed = self.change(event)
        if changed is not None:
            super().say(changed)


def without(*forms: type) -> Callable[[Event], Event | None]:
    return lambda event: None if isinstance(event, forms) else event


def eager(event: Event) -> Event | None:
    """Publishes one key more than was computed."""
    if isinstance(event, KeyPublish) and event.tier == "device" and event.blocks:
        return KeyPublish(event.group, event.keys, [event.blocks[0] + 1])
    return event


def longer(event: Event) -> Event | None:
    """Takes one block more than the window has."""
    if isinstance(event, Lookup) and event.used and event.blocks["win"]:
        return Lookup(event.req, event.used, event.matched, {**event.blocks, "win": event.blocks["win"][:-1]})
    return event


def swapped(event: Event) -> Event | None:
    """Hits name the blocks of another place."""
    if isinstance(event, Lookup) and len(set(event.blocks.get("full", []))) > 1:
        return Lookup(event.req, event.used, event.matched, {**event.blocks, "full": event.blocks["full"][::-1]})
    return event


def twice(event: Event) -> Event | None:
    """Gives the first block of a free back twice."""
    return Free(event.req, event.group, [*event.blocks, event.blocks[0]]) if isinstance(event, Free) else event


def unsaid(event: Event) -> Event | None:
    """A refused draft stays where it is."""
    return None if isinstance(event, Reject) else event


def failed(event: Event) -> Event | None:
    """Steps fail, and nobody looks."""
    return Complete(event.step, ok=False) if isinstance(event, Complete) else event


def skipping(event: Event) -> Event | None:
    """A step skips a token."""
    if isinstance(event, Dispatch):
        for span in event.writes:
            span.lo += 1
    return event


CASES: dict[str, tuple[Callable[[Event], Event | None], str]] = {
    "entries stay when their blocks are used again": (without(KeyRemove), "HKV-ALIAS-001"),
    "hits are not pinned": (without(Pin), "HKV-L1-004"),
    "completions are lost": (without(Complete), "HKV-S3-011"),
    "the wrong block is published": (eager, "HKV-S3-011"),
    "the window is one block short": (longer, "HKV-SWA-001"),
    "blocks stand in the wrong order": (swapped, "HKV-KEY-001"),
    "a block is given back twice": (twice, "HKV-REF-003"),
    "refused drafts stay": (unsaid, "HKV-S3-003"),
    "failed steps count": (failed, "HKV-ERR-002"),
    "a token is skipped": (skipping, "HKV-S3-003"),
    "loads never end": (without(TransferEnd), "HKV-S3-011"),
    "nothing is given back": (without(Free), "HKV-ALIAS-001"),
}


@pytest.mark.parametrize("name", CASES)
def test_a_planted_fault_is_found_and_named(name: str) -> None:
    change, rule = CASES[name]
    found = set()
    for seed in range(SEEDS):
        driver = Forgetful(seed, change)
        events = driver.run(60)
        refused = Oracle(driver.header).feed_all(events)
        if refused:
            found |= set(refused[0].rules)
    assert rule in found


def test_the_driver_without_a_fault_is_accepted() -> None:
    for seed in range(5):
        driver = Forgetful(seed, lambda event: event)
        assert Oracle(driver.header).feed_all(driver.run(60)) == ()


def test_a_free_that_comes_before_its_step_is_done_is_refused() -> None:
    class Hasty(Driver):
        def leave(self, request: Running) -> None:
            steps, request.steps = request.steps, []
            super().leave(request)
            request.steps = steps

    found = set()
    for seed in range(SEEDS):
        driver = Hasty(random.Random(seed), capacity=20)
        refused = Oracle(driver.header).feed_all(driver.run(60))
        found |= {rule for r in refused[:1] for rule in r.rules}
    assert "HKV-S3-016" in found
