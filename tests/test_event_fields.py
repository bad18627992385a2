"""Every optional field of the vocabulary matters: some trace is judged differently when the oracle does not see it."""

import typing
from functools import lru_cache
from typing import Any

import msgspec
import pytest
from test_faults import FAULTS
from test_oracle import FULL, IDS, WIN, header, hit, served
from test_oracle_rows import FULL3, SAMPLES

from hybridkv_ref.errors import InputError
from hybridkv_ref.events import (
    Accept,
    Allocate,
    Arrive,
    Capture,
    Complete,
    DeferFree,
    Dispatch,
    Event,
    Finish,
    Free,
    GroupSpec,
    Header,
    Io,
    KeyPublish,
    KeyRemove,
    Limits,
    Lookup,
    Measure,
    Part,
    Pin,
    Preempt,
    Reject,
    Replay,
    Span,
    TransferBegin,
    TransferFail,
)
from hybridkv_ref.oracle import Oracle

Trace = tuple[Header, list[Event]]

# What names the engine, the trace and the instance, and what only tells a reader whose an event is.
TOLD_ONLY = {
    ("Header", "engine"), ("Header", "table_sha256"), ("Header", "model"), ("Header", "title"), ("Header", "level"),
    ("Admit", "group"), ("Admit", "tier"), ("Finish", "reason"), ("Register", "side"),
    ("TransferBegin", "peer"), ("TransferBegin", "rank"),
}  # fmt: skip

STORED: list[Event] = [*served("a", IDS, FULL3), TransferBegin("x", [Part("full", [1], [7])], target="host")]
ROUGH: list[Event] = [
    *served("a", IDS[:1], {"full": [1]}),
    Arrive("b", 49, ids=IDS, grade="bounded"),
    Lookup("b", 16, blocks={"full": [1]}, grade="bounded"),
    Pin("b", "full", [1]),
    Allocate("b", "full", [2, 3]),
    Dispatch("t", "b", writes=[Span("full", [2, 3], 16, 48)]),
    Complete("t"),
    KeyPublish("full", ["x", "y"], [2, 3]),
]
GROWN: list[Event] = [
    Arrive("a", 16, ids=IDS[:1]),
    Allocate("a", "full", [1, 2]),
    Dispatch("s", "a", writes=[Span("full", [1, 2], 0, 32)]),
    Complete("s"),
    Accept("a", 32, ids=IDS[1:2]),
    KeyPublish("full", ["k1", "k2"], [1, 2]),
]
TWICE: list[Event] = [
    *served("a", IDS[:1], {"full": [1]}),
    *served("c", IDS[:1], {"full": [4]})[:-3],
    KeyPublish("full", ["full-a-1"], [4]),
    Finish("c"),
    Free("c", "full", [4]),
]

TAIL = GroupSpec("tail", "uncompressed_tail", 4, ratio=4, halo=4)
AHEAD = GroupSpec("full", "compressed_kv", 16, ahead=1)


def limited(**values: Any) -> Header:
    return msgspec.structs.replace(header(FULL, WIN), limits=Limits(**values))


TRACES: dict[str, Trace] = {
    "bounded": (header(), ROUGH),
    "bounded to bounded": (
        header(),
        [*ROUGH, Arrive("c", 60, ids=IDS, grade="bounded"), Lookup("c", 48, blocks=FULL3, grade="bounded")],
    ),
    "bounded to exact": (header(), [*ROUGH, Arrive("c", 60, ids=IDS), Lookup("c", 48, blocks=FULL3)]),
    "no kernel": (
        header(),
        [*served("a", IDS, FULL3), Arrive("b", 60, ids=IDS, kernel=False), Lookup("b", 48, blocks=FULL3)],
    ),
    "from outside": (
        header(FULL, WIN),
        [
            *served("a", IDS, {"full": [1, 2, 3], "win": [4, 5, 6]}),
            Arrive("b", 80, ids=[*IDS, 4, 5]),
            Lookup("b", 48, blocks={"full": [1, 2, 3], "win": [0, 5, 6]}, outside=32),
            *(Pin("b", "full", [1, 2, 3]), Allocate("b", "full", [7, 8])),
        ],
    ),
    "room": (header(), [Arrive("a", 16), Allocate("a", "full", [1]), Preempt("a", need=4, free=4)]),
    "failed step": (
        header(),
        [
            *served("a", IDS[:1], {"full": [1]})[:2],
            *(
                Dispatch("s", "a", writes=[Span("full", [1], 0, 16)]),
                Complete("s", ok=False),
                KeyPublish("full", ["k"], [1]),
            ),
        ],
    ),
    "grown": (header(), [*GROWN, Arrive("b", 60, ids=IDS), Lookup("b", 32, blocks={"full": [1, 2]})]),
    "rolled back": (header(), [*GROWN, Reject("a", 32, at=31)]),
    "ring": (header(FULL, WIN), [*GROWN[:-1], Reject("a", 32, group="win", low=30)]),
    "equal entries": (
        header(),
        [*TWICE, KeyRemove("full", ["full-a-1"], [4]), Arrive("b", 60, ids=IDS), Lookup("b", 16, blocks={"full": [4]})],
    ),
    "not stopped": (header(), [*STORED, TransferFail("x", stopped=False), KeyRemove("full", ["full-a-1"])]),
    "put off": (
        header(),
        [
            *(Arrive("a", 16, ids=IDS[:1]), Allocate("a", "full", [1]), Dispatch("s", "a"), Finish("a")),
            *(DeferFree("a", "full", [1], on="s"), Free("a", "full", [1])),
        ],
    ),
    "short": (header(), [Io(4096, length=5)]),
    "other unit": (header(), [Io(512, length=512, unit=512)]),
    "in a step": (header(), [Capture("g"), Replay("g", step="s"), Complete("s")]),
    "reserved": (header(), [Measure("pool", free=1, used=1, reserved=1, capacity=3)]),
    "ids of half a block": (
        msgspec.structs.replace(header(), unit=8),
        [
            *(Arrive("a", 16, ids=[1, 2]), Allocate("a", "full", [1])),
            *(Dispatch("s", "a", writes=[Span("full", [1], 0, 16)]), Complete("s"), KeyPublish("full", ["k"], [1])),
            *(Arrive("b", 60, ids=[1, 3]), Lookup("b", 16, blocks={"full": [1]})),
        ],
    ),
    "other null": (msgspec.structs.replace(header(), null=9), [KeyPublish("full", ["k"], [9])]),
    "halo": (header(FULL, TAIL), [*served("a", IDS, FULL3), Arrive("b", 60, ids=IDS), Lookup("b", 48, blocks=FULL3)]),
    "look-ahead": (
        msgspec.structs.replace(header(), groups=(AHEAD,)),
        [*served("a", IDS, FULL3), *hit("b", 48, FULL3), Allocate("b", "full", [4])],
    ),
    "capacity": (
        msgspec.structs.replace(header(), groups=(GroupSpec("full", "compressed_kv", 16, capacity=3),)),
        [Arrive("a", 60), Allocate("a", "full", [1, 2, 3])],
    ),
    "pipeline": (
        limited(pipeline=2),
        [*served("a", IDS, FULL3)[:-2], *(Dispatch(f"r{i}", "a", reads=[Span("full", [1], 0, 16)]) for i in range(3))],
    ),
    "steps in flight": (limited(in_flight=16), [Measure("rows", "win", value=64)]),
    "tiers": (
        limited(tiers={"host": 1}),
        [*served("a", IDS, FULL3), TransferBegin("x", [Part("full", [1, 2], [7, 8])], target="host")],
    ),
}


def filled(form: type[Any]) -> list[tuple[str, Any]]:
    """The optional fields of a record and their defaults."""
    found = []
    for field in msgspec.structs.fields(form):
        if field.default is not msgspec.NODEFAULT:
            found.append((field.name, field.default))
        elif field.default_factory is not msgspec.NODEFAULT:
            found.append((field.name, field.default_factory()))
    return found


FORMS = (*typing.get_args(Event), Span, Part, Header, GroupSpec, Limits)
FIELDS = [
    pytest.param(form, name, default, id=f"{form.__name__}.{name}")
    for form in FORMS
    for name, default in filled(form)
    if name != "instance" and (form.__name__, name) not in TOLD_ONLY
]


def without(record: Any, form: type[Any], name: str, default: Any) -> Any:
    """A record as one who does not know the field would read it."""
    if isinstance(record, form):
        record = msgspec.structs.replace(record, **{name: default})
    for inner in record.__struct_fields__:
        value = getattr(record, inner)
        if isinstance(value, list | tuple) and value and isinstance(value[0], msgspec.Struct):
            changed: Any = type(value)(without(one, form, name, default) for one in value)
        elif isinstance(value, msgspec.Struct):
            changed = without(value, form, name, default)
        else:
            continue
        record = msgspec.structs.replace(record, **{inner: changed})
    return record


def verdict(head: Header, events: list[Event]) -> object:
    """What is refused first, if anything, or that nothing can be judged."""
    try:
        found = Oracle(head).feed_all(events)
    except InputError as error:
        return str(error)
    return (found[0].index, found[0].row, found[0].rules) if found else None


@lru_cache
def judged() -> list[tuple[Header, list[Event], object]]:
    """Traces of rows, of fields and of public faults, with their verdicts."""
    faults = [fault.trace(ending) for fault in FAULTS.values() for ending in (fault.bad, fault.good)]
    return [(head, events, verdict(head, events)) for head, events in (*TRACES.values(), *SAMPLES.values(), *faults)]


@pytest.mark.parametrize(("form", "name", "default"), FIELDS)
def test_a_field_that_is_not_seen_changes_a_verdict(form: type[Any], name: str, default: Any) -> None:
    for head, events, before in judged():
        seen = without(head, form, name, default), [without(event, form, name, default) for event in events]
        if seen != (head, events) and verdict(*seen) != before:
            return
    pytest.fail(f"nothing depends on {form.__name__}.{name}")


@pytest.mark.parametrize("name", sorted(TRACES))
def test_a_trace_made_for_a_field_is_legal_or_refused_at_its_end(name: str) -> None:
    head, events = TRACES[name]
    assert Oracle(head).feed_all(events[:-1]) == ()
