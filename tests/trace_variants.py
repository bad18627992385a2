"""Variants of a trace of events that mean the same: renamed, shifted, split, interleaved with another legal request."""

import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from hybridkv_ref.events import (
    Allocate,
    Arrive,
    Complete,
    Dispatch,
    Drain,
    Event,
    Evict,
    Finish,
    Free,
    GroupSpec,
    Header,
    KeyPublish,
    KeyRemove,
    Part,
    Pin,
    Span,
    Unpin,
)

Marked = list[tuple[int, Event]]
"""Events with the number of the original event that each comes from; 0 for one that was added."""

NAMED = ("req", "step", "xfer", "graph", "who", "on")
STAND_INS = {"compressed_kv": "indexer_state", "indexer_state": "compressed_kv"}
"""Kinds that need the same positions to resume."""


def rebuilt(event: Any, change: Callable[[str, Any], Any]) -> Any:
    """The event with ``change(field, value)`` applied to every field, also inside its parts and spans."""
    values = {}
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, list) and value and isinstance(value[0], Span | Part):
            values[name] = [rebuilt(v, change) for v in value]
        else:
            values[name] = change(name, value)
    return type(event)(**values)


def each(events: Marked, change: Callable[[str, Any], Any]) -> Marked:
    return [(n, rebuilt(e, change)) for n, e in events]


def rename(prefix: str) -> Callable[[str, Any], Any]:
    """Requests, steps, transfers, graphs and holders get another name."""

    def change(field: str, value: Any) -> Any:
        if field in NAMED and isinstance(value, str) and value:
            return prefix + value
        if field == "on" and isinstance(value, list):
            return [prefix + v for v in value]
        return value

    return change


def rekey(prefix: str) -> Callable[[str, Any], Any]:
    """Keys get another name."""

    def change(field: str, value: Any) -> Any:
        if field == "keys":
            return [prefix + v for v in value]
        return prefix + value if field == "parent" and value else value

    return change


def shift_blocks(by: int, null: int) -> Callable[[str, Any], Any]:
    """Every block but the null block gets another number."""

    def change(field: str, value: Any) -> Any:
        def moved(numbers: list[int]) -> list[int]:
            return [n if n == null else n + by for n in numbers]

        if field in ("blocks", "source", "target") and isinstance(value, list):
            return moved(value)
        return {g: moved(v) for g, v in value.items()} if field == "blocks" and isinstance(value, dict) else value

    return change


def shift_ids(by: int) -> Callable[[str, Any], Any]:
    """Other tokens, equal where they were equal."""
    return lambda field, value: [n * 31 + by for n in value] if field == "ids" else value


def regroup(names: dict[str, str]) -> Callable[[str, Any], Any]:
    """Groups get another name."""

    def change(field: str, value: Any) -> Any:
        if field == "group" and value:
            return names.get(value, value)
        if field == "limiting":
            return [names.get(v, v) for v in value]
        if field in ("blocks", "starts", "versions", "groups") and isinstance(value, dict):
            return {names.get(g, g): v for g, v in value.items()}
        return value

    return change


def split(events: Marked) -> Marked:
    """Events about several blocks become one event for each."""
    found: Marked = []
    for number, event in events:
        match event:
            case Pin() | Unpin() | Free() | Evict() if len(event.blocks) > 1:
                found += [(number, msgspec.structs.replace(event, blocks=[b])) for b in event.blocks]
            case Allocate() if len(event.blocks) > 1 and event.at < 0:
                found += [(number, msgspec.structs.replace(event, blocks=[b])) for b in event.blocks]
            case KeyPublish() if len(event.blocks) > 1 and not event.parent and event.tokens is None:
                found += [
                    (number, msgspec.structs.replace(event, keys=[k], blocks=[b], parent=p))
                    for p, k, b in zip(["", *event.keys], event.keys, event.blocks, strict=False)
                ]
            case KeyRemove() if len(event.keys) > 1 and not event.blocks:
                found += [(number, msgspec.structs.replace(event, keys=[k])) for k in event.keys]
            case _:
                found.append((number, event))
    return found


def other_request(groups: Sequence[GroupSpec], name: str, first: int) -> list[Event]:
    """A legal request of its own: it writes one block of each group, publishes it and lets it go."""
    size = max(g.block for g in groups)
    events: list[Event] = [Arrive(name, size, ids=[])]
    events += [Allocate(name, g.name, [first + i]) for i, g in enumerate(groups)]
    writes = [Span(g.name, [first + i], 0, g.block) for i, g in enumerate(groups)]
    events += [Dispatch(f"{name}-step", name, writes=writes), Complete(f"{name}-step")]
    events += [KeyPublish(g.name, [f"{name}-{g.name}"], [first + i]) for i, g in enumerate(groups)]
    events.append(Finish(name))
    return events + [Free(name, g.name, [first + i]) for i, g in enumerate(groups)]


def interleave(events: Marked, groups: Sequence[GroupSpec], seed: int, count: int = 1) -> Marked:
    """Other requests run between the events, whole before the engine is said to be at rest."""
    chance, found = random.Random(seed), list(events)
    for index in range(count):
        rest = next((p for p, (_, e) in enumerate(found) if isinstance(e, Drain)), len(found))
        added = other_request(groups, f"other{index}", 900_000 + 100 * index)
        places = sorted(chance.randint(0, rest) for _ in added)
        for offset, (place, event) in enumerate(zip(places, added, strict=True)):
            found.insert(place + offset, (0, event))
    return found


def variants(header: Header, events: Sequence[Event]) -> list[tuple[str, Header, Marked]]:
    """20 variants of a trace: (name, header, events)."""
    plain: Marked = list(enumerate(events, 1))
    groups, null = header.groups, header.null
    names = {g.name: f"layers.{i}-{g.name}" for i, g in enumerate(groups)}
    renamed = msgspec.structs.replace(
        header, groups=tuple(msgspec.structs.replace(g, name=names[g.name]) for g in groups)
    )
    other_kinds = msgspec.structs.replace(
        header, groups=tuple(msgspec.structs.replace(g, kind=STAND_INS.get(g.kind, g.kind)) for g in groups)
    )
    wider = msgspec.structs.replace(header, groups=(*groups, GroupSpec("extra", "compressed_kv", 1, reuse=False)))
    backwards = msgspec.structs.replace(header, groups=tuple(reversed(groups)))
    all_changes = each(each(each(plain, rename("z/")), shift_blocks(37, null)), shift_ids(5))
    found: list[tuple[str, Header, Marked]] = [
        ("requests renamed", header, each(plain, rename("x-"))),
        ("requests renamed, non-ASCII", header, each(plain, rename("\u00e9\u00df "))),
        ("keys renamed", header, each(plain, rekey("k/"))),
        ("blocks shifted", header, each(plain, shift_blocks(1000, null))),
        ("blocks shifted far", header, each(plain, shift_blocks(1 << 33, null))),
        ("other tokens", header, each(plain, shift_ids(77))),
        ("groups renamed", renamed, each(plain, regroup(names))),
        ("groups in another order", backwards, plain),
        ("a group more", wider, plain),
        ("other kinds", other_kinds, plain),
        ("split", header, split(plain)),
        ("split and renamed", header, split(all_changes)),
        ("all renamed", renamed, each(all_changes, regroup(names))),
        ("other kinds, interleaved", other_kinds, interleave(plain, groups, 4)),
        ("split and interleaved", header, interleave(split(plain), groups, 5)),
        ("two others", header, interleave(plain, groups, 6, 2)),
        ("three others, all renamed", renamed, interleave(each(all_changes, regroup(names)), renamed.groups, 7, 3)),
    ]
    found += [(f"interleaved {seed}", header, interleave(plain, groups, seed)) for seed in (1, 2, 3)]
    return found
