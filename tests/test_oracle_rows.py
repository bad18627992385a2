"""Each row that the oracle adds can refuse: a public fault shows it, or a trace made for it."""

import pytest
from test_faults import FAULTS
from test_oracle import IDS, REC, WIN, header, served

from hybridkv_ref.event_map import load_event_map, row_name
from hybridkv_ref.events import (
    Admit,
    Allocate,
    Arrive,
    Complete,
    Dispatch,
    Drain,
    Epoch,
    Event,
    Finish,
    GroupSpec,
    Header,
    Io,
    KeyPublish,
    KeyRemove,
    Lookup,
    Measure,
    Part,
    Pin,
    Position,
    Span,
    TableWrite,
    TransferBegin,
    TransferPart,
    Vote,
)
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_joint import Joint
from hybridkv_ref.recovery import entries
from hybridkv_ref.rules import load_rules

FULL3 = {"full": [1, 2, 3]}
CACHED = [*served("a", IDS, FULL3), Arrive("b", 60, ids=IDS)]
STORED = [*CACHED, TransferBegin("x", [Part("full", [1], [7])], target="host")]
IDX = GroupSpec("idx", "indexer_state", 16)

SAMPLES: dict[str, tuple[Header, list[Event]]] = {
    "fits_empty": (header(), [Admit("a", False, need=4, usable=15, empty=True)]),
    "refused_first": (header(), [*served("a", [1], {"full": [1]})[:-1], Arrive("a", 16)]),
    "one_life": (header(), [Arrive("a", 16), Arrive("a", 16)]),
    "aligned": (header(), [*CACHED, Lookup("b", 40, blocks=FULL3)]),
    "covers": (header(IDX), [*served("a", IDS, {"idx": [1, 2, 3]}), Arrive("b", 60), Lookup("b", 48)]),
    "longest": (header(claims=("longest",)), [*CACHED, Lookup("b", 16, matched=48, blocks={"full": [1]})]),
    "limits_true": (header(claims=("limits",)), [*CACHED, Lookup("b", 0, matched=48, limiting=["full"])]),
    "graded": (header(), [*CACHED, Lookup("b", 48, blocks=FULL3, grade="bounded")]),
    "same_content": (header(), [*CACHED, *served("c", [9], {"full": [4]})[:-2], KeyPublish("full", ["full-a-1"], [4])]),
    "known_entry": (header(), [KeyRemove("full", ["k"])]),
    "parent_findable": (header(claims=("tree",)), [KeyPublish("full", ["b"], [], parent="a")]),
    "not_null": (header(), [KeyPublish("full", ["a"], [0])]),
    "balance": (header(), [Measure("pool", free=1, used=1, capacity=3)]),
    "applied_once": (header(REC), [Position("a", groups={"rec": 4}, next=5)]),
    "within_agreed": (header(), [*CACHED, Vote("b", 0, 32), Lookup("b", 48, blocks=FULL3)]),
    "look_again": (header(), [*CACHED, Lookup("b", 48, blocks=FULL3), Lookup("b", 60, blocks=FULL3)]),
    "from_the_start": (
        header(),
        [*CACHED, Lookup("b", 48, blocks=FULL3), Dispatch("s", "b", writes=[Span("full", [4], 48, 60)])],
    ),
    "apart": (
        header(*(GroupSpec(name, "compressed_kv", 16, pool="p") for name in "ab")),
        [Allocate("r", "a", [1]), Allocate("r", "b", [1])],
    ),
    "adopt": (
        header(),
        # Equal tokens, and the cached block is of newer weights than the request that would go on with it.
        [*served("a", IDS, {"full": [4, 5, 6]})[:-2], Epoch("model"), *served("c", IDS, FULL3), Pin("a", "full", [1])],
    ),
    "hold": (header(), [Pin("lock", "full", [1])]),
    "index_type": (header(), [*CACHED, Dispatch("s", "b", reads=[Span("full", [1], 0, 4, space="kernel")])]),
    "column_type": (header(), [TableWrite("a", "full", [1], space="kernel")]),
    "known_step": (header(), [Complete("s")]),
    "outside_is_null": (header(WIN), [TableWrite("a", "win", [5], index=0, at=80)]),
    "known_transfer": (header(), [TransferPart("x", "full", [1])]),
    "known_part": (header(), [*STORED, TransferPart("x", "full", [8])]),
    "length_unit": (header(), [*CACHED, Dispatch("s", "b", reads=[Span("full", [1], 0, 4, unit="slot")])]),
    "at_rest": (header(), [*STORED, Finish("b"), Drain()]),
    "direct_io": (header(), [Io(0, 1)]),
}
# Rows whose guards hold by how the books are kept; they count premises, and a broken book would show.
BOOKS = {"written", "unpublish"}


@pytest.mark.parametrize("row", sorted(SAMPLES))
def test_a_row_refuses_what_it_is_for(row: str) -> None:
    head, events = SAMPLES[row]
    oracle = Oracle(head)
    assert oracle.feed_all(events[:-1]) == ()
    assert row in {r.row.split(".")[1] for r in oracle.feed(events[-1]).refusals}


def test_every_row_of_the_oracle_is_seen_refusing() -> None:
    seen = set(SAMPLES) | BOOKS | load_event_map().books | {"left_behind", "pass_by"}
    for fault in FAULTS.values():
        head, events = fault.trace(fault.bad)
        seen |= {r.row.split(".")[-1] for r in Oracle(head).feed_all(events)}
    tables = Oracle(header()).state.tables
    added = [e for e in tables.events if e.file.startswith("oracle/") and e.guards and "rows" in e.guards[0].place]
    own = {row_name(e) for e in added}
    assert own - seen == set()


def test_both_ends_of_a_transfer_are_compared() -> None:
    joint = Joint(header())
    assert joint.feed(TransferBegin("x", [Part("full", [1], [1])], instance="p")).ok
    assert [r.row for r in joint.feed(TransferBegin("x", [], instance="d")).refusals] == ["system.paired"]


def test_rules_that_the_registry_gives_to_the_oracle_have_a_row() -> None:
    tables, mapped = Oracle(header()).state.tables, {r for rows in load_event_map().rows.values() for r in rows}
    judged = {rule for event in tables.events if row_name(event) in mapped for rule in event.rules}
    judged |= {rule for need in entries()[1].values() for rule in need.rules}
    given = {name for name, rule in load_rules().items() if "oracle" in rule.checked_by}
    # How a refusal reads is no row: test_oracle compares its parts.
    assert given - judged == {"HKV-ERR-004"}
