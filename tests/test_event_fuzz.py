"""Any sequence of well-formed events is judged: refusals, never a crash, and what is judged twice is judged alike."""

import random
import typing
from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv_ref.event_map import load_event_map
from hybridkv_ref.events import Event, GroupSpec, Header, Limits, Part, Span
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_joint import Joint

FORMS: tuple[type, ...] = typing.get_args(Event)
GROUPS = (
    GroupSpec("full", "compressed_kv", 4, capacity=9),
    GroupSpec("win", "swa_window", 4, window=6, pool="p"),
    GroupSpec("rec", "recurrent_state", 4, pool="p"),
    GroupSpec("tail", "uncompressed_tail", 2, ratio=4, halo=4, reuse=False),
)
HEADER = Header(
    "hybridkv.events/1",
    unit=4,
    groups=GROUPS,
    limits=Limits(pipeline=2, preempts=2, tiers={"host": 3}),
    capabilities=tuple(load_event_map().capabilities),
)
DEEP = 20_000

POOLS: dict[str, Callable[[random.Random], object]] = {
    "req": lambda c: c.choice("ab"),
    "group": lambda c: c.choice([g.name for g in GROUPS]),
    "step": lambda c: c.choice("st"),
    "xfer": lambda c: c.choice("xy"),
    "graph": lambda c: "g",
    "tier": lambda c: c.choice(["device", "device", "host", "peer:1"]),
    "source": lambda c: c.choice(["device", "host", "peer:1"]),
    "target": lambda c: c.choice(["device", "device", "host"]),
    "what": lambda c: c.choice(["model", "topology", "adapter"]),
    "instance": lambda c: "",
}


def value(name: str, hint: object, chance: random.Random) -> object:
    """A small value of this type: names and numbers meet often."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return chance.choice(inner)
    if name in POOLS and hint is str:
        return POOLS[name](chance)
    if name in ("source", "target") and origin is list:
        return [chance.randint(0, 4) for _ in range(chance.randint(0, 3))]
    if hint is bool:
        return chance.random() < 0.5
    if hint is int:
        return chance.choice([-1, 0, 1, 2, 3, 4, 8, 9])
    if hint is str:
        return chance.choice("pqr")
    if origin is list:
        return [value("", inner[0], chance) for _ in range(chance.randint(0, 3))]
    if origin is dict:
        count = chance.randint(0, 2)
        return {g.name: value("", inner[1], chance) for g in chance.sample(GROUPS, count)}
    if hint in (Span, Part):
        return record(typing.cast(type, hint), chance)
    return None if chance.random() < 0.5 else (0, chance.choice([4, 8]))


def record(form: type, chance: random.Random) -> typing.Any:
    """A record of this form; what has a default is left out half of the time."""
    hints = typing.get_type_hints(form)
    chosen = {}
    for field in msgspec.structs.fields(form):
        if field.required or field.name == "group" or chance.random() < 0.5:
            chosen[field.name] = value(field.name, hints[field.name], chance)
    return form(**chosen)


def judged(chance: random.Random, count: int) -> None:
    events: list[Event] = [record(chance.choice(FORMS), chance) for _ in range(count)]
    lines = [msgspec.json.encode(event) for event in events]
    oracle, again, joint = Oracle(HEADER), Oracle(HEADER), Joint(HEADER)
    first = [str(r) for r in oracle.feed_all(events)]
    second = [str(r) for r in again.feed_all(msgspec.json.decode(line, type=Event) for line in lines)]
    assert first == second
    assert oracle.snapshot() == again.snapshot()
    assert oracle.coverage() == again.coverage()
    for event in events:
        joint.feed(event)


@settings(max_examples=80)
@given(st.randoms(use_true_random=False))
def test_any_events_are_judged_and_alike(chance: random.Random) -> None:
    judged(chance, 60)


@pytest.mark.deep
def test_many_more_events_are_judged_and_alike() -> None:
    for seed in range(DEEP):
        judged(random.Random(seed), 60)
