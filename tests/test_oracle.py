"""The oracle, event by event: what is legal stays silent, what is not is named with row, guard, values and rules."""

import gc
import itertools
import random
import shutil
import weakref
from pathlib import Path

import pytest
from helpers import copy_oracle_spec

from hybridkv_ref.errors import InputError
from hybridkv_ref.events import (
    Abort,
    Accept,
    Admit,
    Agree,
    Allocate,
    Arrive,
    Capture,
    Complete,
    Decide,
    Dispatch,
    Draft,
    Drain,
    Epoch,
    Event,
    Evict,
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
    Position,
    Preempt,
    Reject,
    Replay,
    Reset,
    Span,
    TableWrite,
    TransferBegin,
    TransferCancel,
    TransferEnd,
    TransferPart,
    Unpin,
    Vote,
)
from hybridkv_ref.oracle import Illegal, Oracle
from hybridkv_ref.oracle_joint import Joint
from hybridkv_ref.oracle_records import Block, Refusal, Request
from hybridkv_ref.oracle_tiers import NEAR

FULL = GroupSpec("full", "compressed_kv", 16)
WIN = GroupSpec("win", "swa_window", 16, window=32)
REC = GroupSpec("rec", "recurrent_state", 16)
IDS = [1, 2, 3]


def header(*groups: GroupSpec, claims: tuple[str, ...] = (), null: int = 0, limits: Limits | None = None) -> Header:
    return Header(
        "hybridkv.events/1",
        unit=16,
        groups=groups or (FULL,),
        capabilities=claims,
        null=null,
        limits=limits or Limits(),
    )


def fill(req: str, ids: list[int], blocks: dict[str, list[int]], publish: bool = True) -> list[Event]:
    """A request computes its prompt and publishes it; it goes on holding its blocks."""
    hi = 16 * len(ids)
    events: list[Event] = [Arrive(req, hi, ids=ids)]
    events += [Allocate(req, g, numbers) for g, numbers in blocks.items()]
    events.append(Dispatch(f"s-{req}", req, writes=[Span(g, numbers, 0, hi) for g, numbers in blocks.items()]))
    events.append(Complete(f"s-{req}"))
    for g, numbers in blocks.items() if publish else ():
        events.append(KeyPublish(g, [f"{g}-{req}-{n}" for n in numbers], numbers))
    return events


def leave(req: str, blocks: dict[str, list[int]]) -> list[Event]:
    return [Finish(req), *(Free(req, g, numbers[::-1]) for g, numbers in blocks.items())]


def served(req: str, ids: list[int], blocks: dict[str, list[int]]) -> list[Event]:
    return [*fill(req, ids, blocks), *leave(req, blocks)]


def hit(req: str, used: int, blocks: dict[str, list[int]], length: int = 60) -> list[Event]:
    events: list[Event] = [Arrive(req, length, ids=IDS), Lookup(req, used, matched=used, blocks=blocks)]
    return [*events, *(Pin(req, g, [n for n in numbers if n]) for g, numbers in blocks.items())]


def refusals(head: Header, *events: Event) -> tuple[Refusal, ...]:
    return Oracle(head).feed_all(events)


def only(head: Header, *events: Event) -> Refusal:
    found = refusals(head, *events)
    assert len(found) == 1, [str(r) for r in found]
    assert found[0].index == len(events), str(found[0])
    return found[0]


# ---- legal, however odd ------------------------------------------------------------------------------------------


def test_a_b_a_shares_the_blocks_of_one_prefix() -> None:
    blocks = {"full": [1, 2, 3]}
    events = [*served("a", IDS, blocks)]
    for name in ("b", "c", "b"):
        events += [*hit(name, 48, blocks), Allocate(name, "full", [4]), Finish(name), Free(name, "full", [4, 3, 2, 1])]
    assert refusals(header(), *events, Drain()) == ()


def test_two_readers_at_once_hold_the_same_blocks() -> None:
    blocks = {"full": [1, 2, 3]}
    events = [*served("a", IDS, blocks), *hit("b", 48, blocks), *hit("c", 48, blocks)]
    events += [*leave("b", blocks), KeyRemove("full", [f"full-a-{n}" for n in blocks["full"]])]
    assert refusals(header(), *events, Evict("full", [3]))[0].guard == "pins == 0"
    assert refusals(header(), *events, *leave("c", blocks), Drain()) == ()


def test_an_equal_entry_that_goes_first_is_no_child_of_its_parent_any_more() -> None:
    """Two blocks of one key: each is a child until its own entry goes, not until the last of them has gone."""
    twice = [KeyPublish("full", ["k1", "k2"], [1, 2]), KeyPublish("full", ["k2"], [4], parent="k1")]
    events = [
        *fill("a", IDS[:2], {"full": [1, 2]}, publish=False),
        *fill("b", IDS[:2], {"full": [3, 4]}, publish=False),
    ]
    gone = [KeyRemove("full", ["k2"], [2]), KeyRemove("full", ["k2"], [4])]
    head, parent = header(claims=("tree",)), KeyRemove("full", ["k1"], [1])
    assert refusals(head, *events, *twice, *gone, parent) == ()
    assert only(head, *events, *twice, gone[0], parent).rules == ("HKV-CLOSED-001",)
    assert only(head, *events, *twice, gone[1], parent).rules == ("HKV-CLOSED-001",)


def test_a_late_completion_after_an_abort_is_silent() -> None:
    events: list[Event] = [Arrive("a", 32, ids=[1, 2]), Allocate("a", "full", [1, 2])]
    events += [Dispatch("s", "a", writes=[Span("full", [1, 2], 0, 32)]), Abort("a"), Complete("s"), Abort("a")]
    assert refusals(header(), *events, Free("a", "full", [1, 2]), Drain()) == ()
    early = only(header(), *events[:-2], Free("a", "full", [1]))
    assert early.guard == "steps == 0"
    assert "HKV-S3-016" in early.rules


def test_a_zero_hit_that_names_its_limit_is_silent() -> None:
    head = header(FULL, REC, claims=("limits",))
    events = [
        *served("a", IDS, {"full": [1, 2, 3], "rec": [4, 5, 6]}),
        KeyRemove("rec", ["rec-a-6", "rec-a-5", "rec-a-4"]),
    ]
    events.append(Arrive("b", 60, ids=IDS))
    assert refusals(head, *events, Lookup("b", 0, matched=48, limiting=["rec"])) == ()
    assert "HKV-MISS-001" in only(head, *events, Lookup("b", 0, matched=48)).rules
    assert only(head, *events, Lookup("b", 0, matched=48, limiting=["full"])).row == "system.limits_true"


def test_unaligned_buffered_io_is_silent() -> None:
    assert refusals(header(), Io(3, 5, 7, direct=False), Io(8192, 4096, 4096)) == ()
    assert [only(header(), io).guard for io in (Io(1), Io(0, 1), Io(0, 0, 1))] == [
        "not direct or buffer == 0",
        "not direct or offset == 0",
        "not direct or length == 0",
    ]
    assert refusals(header(), Io(1, refused=True)) == ()
    for io in (Io(8192, 4096, 4096, refused=True), Io(3, 5, 7, direct=False, refused=True)):
        assert only(header(), io).row == "system.io_not_refused"


def test_an_entry_leaves_while_another_block_holds_the_same_key() -> None:
    key = ["k"]
    events = [*fill("a", [1], {"full": [1]}, publish=False), *fill("b", [1], {"full": [2]}, publish=False)]
    events += [KeyPublish("full", key, [1]), KeyPublish("full", key, [2]), *leave("a", {"full": [1]})]
    events += [KeyRemove("full", key), Arrive("c", 20, ids=[1]), Lookup("c", 16, blocks={"full": [2]})]
    last = [*leave("b", {"full": [2]}), KeyRemove("full", key), Drain()]
    assert refusals(header(), *events, *last) == ()
    assert only(header(), *events, KeyRemove("full", [*key, *key])).row == "system.known_entry"


def test_which_of_several_idle_blocks_lost_its_key_is_left_open() -> None:
    events = [*fill("a", [1], {"full": [1]}, publish=False), *fill("b", [1], {"full": [2]}, publish=False)]
    events += [KeyPublish("full", ["k"], [1]), KeyPublish("full", ["k"], [2])]
    events += [*leave("a", {"full": [1]}), *leave("b", {"full": [2]}), KeyRemove("full", ["k"])]
    for taken in (1, 2):
        oracle = Oracle(header())
        kept = Lookup("d", 16, blocks={"full": [3 - taken]})
        taken_anew = served("c", [3], {"full": [taken]})
        assert oracle.feed_all([*events, *taken_anew, Arrive("d", 20, ids=[1]), kept, Drain()]) == ()
        assert (oracle.coverage().peak, oracle.coverage().skipped) == (2, 0)
    # Either may be gone, and not both: what one event settles the next is held to.
    for first, second in ((1, 2), (2, 1)):
        used: list[Event] = [Arrive("d", 20, ids=[1]), Lookup("d", 16, blocks={"full": [first]})]
        assert refusals(header(), *events, *used) == ()
        assert "HKV-L1-003" in only(header(), *events, *used, Lookup("d", 16, blocks={"full": [second]})).rules
        both: list[Event] = [Arrive("c", 32), Allocate("c", "full", [first]), Allocate("c", "full", [second])]
        assert only(header(), *events, *both).guard == "stage == FREE"
    gone = [*events, KeyRemove("full", ["k"]), Arrive("d", 20, ids=[1])]
    assert only(header(), *gone, Lookup("d", 16, blocks={"full": [1]})).row == "full.find"
    # A reset of one of them leaves it open how many are left.
    cleared = [*events, Reset("full", [2]), Arrive("d", 20, ids=[1]), Lookup("d", 16, blocks={"full": [1]})]
    assert refusals(header(), *cleared) == ()


def test_blocks_that_are_not_alike_are_forgotten_where_a_choice_is_hidden() -> None:
    events = [*fill("a", [1], {"full": [1]}, publish=False), *fill("b", [1], {"full": [2]})]
    events += [KeyPublish("full", ["k"], [1]), KeyPublish("full", ["k"], [2])]
    events += [
        *leave("a", {"full": [1]}),
        *leave("b", {"full": [2]}),
        KeyRemove("full", ["k"]),
        Arrive("c", 20, ids=[1]),
    ]
    for number in (1, 2):
        oracle = Oracle(header())
        assert oracle.feed_all([*events, Lookup("c", 16, blocks={"full": [number]})]) == ()
        assert oracle.coverage().skipped == 1


def test_drafts_are_refused_and_written_again() -> None:
    events = fill("a", IDS, {"full": [1, 2, 3]})
    events += [Allocate("a", "full", [4]), Draft("a", 3), Dispatch("t", "a", writes=[Span("full", [4], 48, 52)])]
    events += [Complete("t"), Accept("a", 49), Reject("a", 49, at=49)]
    again: list[Event] = [
        Dispatch("u", "a", writes=[Span("full", [4], 49, 64)]),
        Complete("u"),
        KeyPublish("full", ["k"], [4]),
    ]
    assert refusals(header(), *events, *again) == ()


def test_a_draft_is_not_published() -> None:
    events = fill("a", IDS, {"full": [1, 2, 3]})
    events += [Allocate("a", "full", [4]), Draft("a", 15), Dispatch("t", "a", writes=[Span("full", [4], 48, 64)])]
    refused = only(header(), *events, Complete("t"), KeyPublish("full", ["k"], [4]))
    assert (refused.row, refused.guard) == ("full.commit", "end <= committed")
    assert refused.values == {"committed": 49, "end": 64}
    assert refused.rules == ("HKV-POS-002",)


def test_a_cancelled_transfer_may_end_late_and_leaves_nothing() -> None:
    events = [*served("a", [1], {"full": [1]}), TransferBegin("x", [Part("full", [1], [7])], target="host")]
    events += [TransferCancel("x"), TransferPart("x", "full", [7]), TransferEnd("x")]
    assert refusals(header(), *events, Drain()) == ()
    assert "HKV-ERR-002" in only(header(), *events, KeyPublish("full", ["h"], [7], tier="host")).rules


def test_a_transfer_in_parts_is_unreadable_until_its_end() -> None:
    events = [*served("a", [1, 2], {"full": [1, 2]}), TransferBegin("x", [Part("full", [1, 2], [7, 8])], target="host")]
    events.append(TransferPart("x", "full", [7]))
    assert "HKV-S3-011" in only(header(), *events, KeyPublish("full", ["h"], [7], tier="host")).rules
    assert only(header(), *events, TransferPart("x", "full", [7])).row == "system.known_part"
    assert only(header(), *events, TransferPart("y", "full", [7])).row == "system.known_transfer"
    assert refusals(header(), *events, TransferEnd("x"), KeyPublish("full", ["h"], [7], tier="host")) == ()


def test_a_preempted_request_looks_its_prefix_up_again() -> None:
    blocks = {"full": [1, 2, 3]}
    events = [*fill("a", IDS, blocks), Preempt("a"), Free("a", "full", [3, 2, 1])]
    again: list[Event] = [Lookup("a", 32, matched=32, blocks={"full": [1, 2]}), Pin("a", "full", [1, 2])]
    again += [Allocate("a", "full", [5]), Finish("a"), Free("a", "full", [5, 2, 1])]
    assert refusals(header(), *events, *again) == ()
    limited = header(limits=Limits(preempts=1))
    twice = [*events, *again[:3], Preempt("a")]
    assert only(limited, *twice).guard == "req.preempts < MAX_PREEMPTS"


def test_a_prefix_that_a_peer_sent_is_used_like_any_other() -> None:
    events: list[Event] = [Arrive("a", 40, ids=[1, 2]), Allocate("a", "full", [1, 2])]
    events += [TransferBegin("x", [Part("full", [11, 12], [1, 2])], source="peer:p", req="a"), TransferEnd("x")]
    events += [KeyPublish("full", ["p", "q"], [1, 2]), *leave("a", {"full": [1, 2]}), Arrive("b", 40, ids=[1, 2])]
    assert refusals(header(), *events, Lookup("b", 32, blocks={"full": [1, 2]})) == ()
    other = [*events[:-1], Arrive("b", 40, ids=[1, 3])]
    assert "HKV-KEY-001" in only(header(), *other, Lookup("b", 32, blocks={"full": [1, 2]})).rules


def test_tokens_and_domains_that_differ_are_told_apart() -> None:
    blocks, ids = {"full": [1]}, (-2, -1, 0, 1, (1 << 61) - 3, 1 << 63)
    for asked in ids[1:]:
        events = [*served("a", [-2], blocks), Arrive("b", 20, ids=[asked]), Lookup("b", 16, blocks=blocks)]
        assert only(header(), *events).row == "full.same_tokens"
    chain = Request("a", 1, None, 64, 16)
    chain.extend([0, 1, 0, 1])
    ends = [chain.content(end) for end in (8, 16, 32, 48, 64)]
    assert len(set(ends)) == len(ends)
    orders = list(itertools.product((0, 1, 2, 3, (1 << 60) + 1, -1), repeat=4))
    contents = set[int]()
    for order in orders:
        chain = Request("a", 1, None, 64, 16)
        chain.extend(list(order))
        contents.add(chain.content(64))
    assert len(contents) == len(orders)


@pytest.mark.parametrize("seed", range(20))
def test_a_block_has_one_lease_of_each_request(seed: int) -> None:
    chance, block, expected = random.Random(seed), Block(1, None), dict[int, object]()
    for _ in range(200):
        uid = chance.randint(1, 4)
        if chance.random() < 0.5:
            expected[uid] = lease = object()
            block.hold(uid, lease)
        else:
            expected.pop(uid, None)
            block.let(uid)
        assert [block.lease_of(uid) for uid in range(5)] == [expected.get(uid) for uid in range(5)]
        assert dict(block.leases()) == expected
        assert (not block.uid and block.others is None) == (not expected)


# ---- must be refused ---------------------------------------------------------------------------------------------


def test_memory_has_its_cap_without_the_null_block() -> None:
    head = header(GroupSpec("full", "compressed_kv", 16, capacity=4))
    events: list[Event] = [Arrive("a", 90), Allocate("a", "full", [1, 2, 3])]
    assert refusals(head, *events) == ()
    refused = only(head, *events, Allocate("a", "full", [4]))
    assert refused.rules == ("HKV-S1-002",)
    assert refused.values == {"full.used": 3, "size": 1, "full.CAP": 3}


@pytest.mark.parametrize("number", [1, 9, NEAR - 1, NEAR, -7])
def test_one_event_cannot_name_a_block_twice(number: int) -> None:
    """Also where no block of such a number was known before."""
    first = Arrive("a", 64)
    twice = only(header(), first, Allocate("a", "full", [number, number]))
    assert (twice.row, twice.segment) == ("full.admit", f"full:{number}")
    events: list[Event] = [first, Allocate("a", "full", [2, number])]
    assert refusals(header(), *events) == ()
    assert only(header(), *events, Free("a", "full", [number, number])).segment == f"full:{number}"


@pytest.mark.parametrize("number", [1, NEAR - 1, NEAR, -7])
def test_groups_of_one_pool_do_not_share_a_block(number: int) -> None:
    shared = [GroupSpec("full", "compressed_kv", 16, pool="p"), GroupSpec("win", "swa_window", 16, window=32, pool="p")]
    both: list[Event] = [Arrive("a", 16, ids=[1]), Allocate("a", "full", [number]), Allocate("a", "win", [number])]
    assert refusals(header(FULL, WIN), *both) == ()
    assert refusals(header(*shared), *both[:2], Allocate("a", "win", [number + 1])) == ()
    refused = only(header(*shared), *both)
    assert (refused.row, refused.segment, refused.rules) == ("full.apart", f"full:{number}", ("HKV-ALIAS-001",))
    cached = [*served("a", [1], {"full": [number]}), Arrive("b", 16), Allocate("b", "win", [number])]
    assert only(header(*shared), *cached).row == "full.apart"
    assert refusals(header(*shared), *cached[:-1], KeyRemove("full", [f"full-a-{number}"]), cached[-1]) == ()
    load = TransferBegin("x", [Part("win", [11], [number])], source="peer:p")
    assert only(header(*shared), *both[:2], load).row == "full.apart"


def test_a_tier_has_its_cap() -> None:
    head = header(limits=Limits(tiers={"host": 1}))
    events = [*served("a", [1, 2], {"full": [1, 2]}), TransferBegin("x", [Part("full", [1], [7])], target="host")]
    assert only(head, *events, TransferBegin("y", [Part("full", [2], [8])], target="host")).rules == ("HKV-S1-002",)


def test_a_block_that_changed_between_lookup_and_pin_does_not_pass() -> None:
    blocks = {"full": [1, 2, 3]}
    events = [*served("a", IDS, blocks), Arrive("b", 60, ids=IDS), Lookup("b", 48, matched=48, blocks=blocks)]
    events += [
        KeyRemove("full", ["full-a-3"]),
        *served("c", [7, 8, 9], {"full": [5, 6, 3]}),
        Pin("b", "full", [1, 2, 3]),
    ]
    refused = only(header(), *events, Allocate("b", "full", [4]))
    assert refused.row == "full.pass_l1"
    assert refused.rules == ("HKV-L1-004", "HKV-S3-002")


def test_a_hit_is_read_from_the_blocks_that_are_pinned() -> None:
    blocks = {"full": [1, 2, 3]}
    found = [*served("a", IDS, blocks), Arrive("b", 60, ids=IDS), Lookup("b", 48, matched=48, blocks=blocks)]
    taken: list[Event] = [Allocate("b", "full", [4]), Dispatch("t", "b", writes=[Span("full", [4], 48, 60)])]
    assert refusals(header(), *found, Pin("b", "full", [1, 2, 3]), *taken) == ()
    part = only(header(), *found, Pin("b", "full", [1, 2]), taken[0])
    assert (part.row, part.values["hi"], part.values["last"]) == ("system.covers", 48, 32)
    # Nothing is pinned, so nothing of the hit is used: it computes from the start.
    assert refusals(header(), *found, taken[0], Dispatch("t", "b", writes=[Span("full", [4], 0, 16)])) == ()
    assert only(header(), *found, *taken).rules == ("HKV-L1-004", "HKV-S3-001")
    window = [*served("a", IDS, {"win": [1, 2, 3]}), Arrive("b", 60, ids=IDS)]
    window.append(Lookup("b", 48, matched=48, blocks={"win": [1, 2, 3]}))
    assert refusals(header(WIN), *window, Pin("b", "win", [2, 3]), Allocate("b", "win", [4])) == ()


@pytest.mark.parametrize(("outside", "needed"), [(0, [2, 3]), (16, [3]), (32, [])])
def test_tokens_from_elsewhere_move_what_is_held_of_a_hit(outside: int, needed: list[int]) -> None:
    """Window 32: of [0, 48) it needs [17, 48) to resume at 48, [33, 48) at 64 and nothing at 80."""
    events = [*served("a", IDS, {"win": [1, 2, 3]}), Arrive("b", 100, ids=IDS)]
    events.append(Lookup("b", 48, blocks={"win": [1, 2, 3]}, outside=outside))
    pins = [Pin("b", "win", needed)] if needed else []
    assert refusals(header(WIN), *events, *pins, Allocate("b", "win", [4], at=48 + outside)) == ()
    if needed:
        less = Pin("b", "win", needed[1:] or [1])
        part = only(header(WIN), *events, less, Allocate("b", "win", [4], at=48 + outside))
        assert (part.row, part.values["lo"]) == ("system.covers", 17 + outside)


def test_a_request_that_comes_again_is_voted_on_again() -> None:
    blocks = {"full": [1, 2, 3]}
    events = [*served("a", IDS, blocks), Arrive("b", 60, ids=IDS), Vote("b", 0, 16), Vote("b", 1, 48)]
    events += [Lookup("b", 16, blocks={"full": [1]}), Pin("b", "full", [1]), Allocate("b", "full", [4], at=16)]
    events += [Preempt("b"), Free("b", "full", [4, 1]), Vote("b", 1, 48), Lookup("b", 48, blocks=blocks)]
    assert refusals(header(), *events) == ()


def test_blocks_of_older_weights_do_not_pass() -> None:
    blocks = {"full": [1, 2, 3]}
    looked = hit("b", 48, blocks)
    events = [*served("a", IDS, blocks), Epoch("model"), *looked[:2]]
    assert only(header(), *events).rules == ("HKV-KEY-002",)
    # They were of the same weights when they were found.
    events = [*served("a", IDS, blocks), *looked, Epoch("model"), Allocate("b", "full", [4])]
    assert refusals(header(), *events) == ()


def test_a_group_with_look_ahead_needs_its_successor() -> None:
    ahead = header(GroupSpec("full", "compressed_kv", 16, ahead=1))
    blocks = {"full": [1, 2, 3]}
    events = [*served("a", IDS, blocks), Arrive("b", 60, ids=IDS)]
    whole: list[Event] = [
        Lookup("b", 48, matched=48, blocks=blocks),
        Pin("b", "full", [1, 2, 3]),
        Allocate("b", "full", [4]),
    ]
    assert only(ahead, *events, *whole).rules == ("HKV-KEY-004",)
    short: list[Event] = [
        Lookup("b", 32, matched=48, blocks={"full": [1, 2]}),
        Pin("b", "full", [1, 2]),
        Allocate("b", "full", [4]),
    ]
    assert refusals(ahead, *events, *short) == ()


def test_a_hit_has_whole_units_and_leaves_the_last_token() -> None:
    events = [*served("a", IDS, {"full": [1, 2, 3]}), Arrive("b", 48, ids=IDS)]
    assert "HKV-L1-006" in only(header(), *events, Lookup("b", 48, blocks={"full": [1, 2, 3]})).rules
    assert only(header(), *events, Lookup("b", 40, blocks={"full": [1, 2, 3]})).rules == ("HKV-L1-002",)


def test_a_request_that_no_kernel_serves_is_refused_before_it_computes() -> None:
    events = [*served("a", IDS, {"full": [1, 2, 3]}), Arrive("b", 60, ids=IDS, kernel=False)]
    assert only(header(), *events, Lookup("b", 48, blocks={"full": [1, 2, 3]})).rules == ("HKV-L2-002",)
    assert "HKV-L2-002" in only(header(), *events, Allocate("b", "full", [4])).rules
    assert refusals(header(), *events, Finish("b", "rejected")) == ()


def test_what_is_claimed_to_be_the_longest_hit_is() -> None:
    head = header(FULL, WIN, claims=("longest",))
    events = [*served("a", IDS, {"full": [1, 2, 3], "win": [4, 5, 6]}), Arrive("b", 60, ids=IDS)]
    short = Lookup("b", 16, matched=48, blocks={"full": [1], "win": [4]})
    assert only(head, *events, short).rules == ("HKV-L3-002",)
    oracle = Oracle(head)
    oracle.feed_all(events)
    assert oracle.expected_hit("b").r == 48
    oracle.feed(KeyRemove("win", ["win-a-6"]))
    assert (oracle.expected_hit("b").r, oracle.expected_hit("b").limiting) == (32, ("win",))
    assert refusals(header(FULL, WIN), *events, short) == ()


def test_an_index_group_has_its_keys() -> None:
    head = header(FULL, GroupSpec("idx", "indexer_state", 16))
    events = [*served("a", IDS, {"full": [1, 2, 3], "idx": [4, 5, 6]}), Arrive("b", 60, ids=IDS)]
    blocks = {"full": [1, 2, 3], "idx": [4, 5, 6]}
    assert refusals(head, *events, Lookup("b", 48, blocks=blocks)) == ()
    assert "HKV-IDX-001" in only(head, *events, Lookup("b", 48, blocks={"full": [1, 2, 3], "idx": [4, 5]})).rules


def test_the_window_lets_go_of_what_it_has_passed_and_of_nothing_else() -> None:
    blocks = {"win": [1, 2, 3, 4]}
    events = [*served("a", [1, 2, 3, 4], blocks), Arrive("b", 80, ids=[1, 2, 3, 4])]
    events += [Lookup("b", 64, matched=64, blocks={"win": [0, 2, 3, 4]}), Pin("b", "win", [2, 3, 4])]
    events += [
        Allocate("b", "win", [5]),
        Dispatch("t", "b", reads=[Span("win", [2, 3, 4])], writes=[Span("win", [5], 64, 80)]),
    ]
    assert only(header(WIN), *events, Free("b", "win", [2])).rules == ("HKV-SWA-002", "HKV-S3-016")
    assert refusals(header(WIN), *events, Complete("t"), Free("b", "win", [2, 3])) == ()
    assert only(header(WIN), *events, Complete("t"), Free("b", "win", [4])).rules == ("HKV-SWA-003", "HKV-L1-004")


def test_an_anonymous_holder_gives_back_what_it_took() -> None:
    events = [*served("a", [1], {"full": [1]}), Pin("lock", "full", [1]), Pin("lock", "full", [1])]
    assert refusals(header(), *events, Unpin("lock", "full", [1]), Unpin("lock", "full", [1]), Drain()) == ()
    held = only(header(), *events, Unpin("lock", "full", [1]), Drain())
    assert held.guard == "pins == 0"
    assert "HKV-REF-003" in only(header(), *events, Unpin("other", "full", [1])).rules


def test_the_null_block_is_neither_published_nor_evicted() -> None:
    assert only(header(), KeyPublish("full", ["k"], [0])).rules == ("HKV-S4-007",)
    assert only(header(), Evict("full", [0])).rules == ("HKV-S4-007",)
    assert only(header(null=-1), KeyPublish("full", ["k"], [-1])).rules == ("HKV-S4-007",)


def test_a_graph_of_an_older_topology_is_captured_again() -> None:
    events: list[Event] = [Capture("g"), Replay("g", live=1), Epoch("topology")]
    assert only(header(), *events, Replay("g", live=1)).rules == ("HKV-S4-002",)
    assert refusals(header(), *events, Capture("g"), Replay("g", live=1), Capture("g"), Replay("g", live=1)) == ()
    running: list[Event] = [Arrive("a", 16), Capture("g"), Replay("g", step="s", live=1)]
    assert only(header(), *running, Epoch("topology")).guard == "replays == 0"
    assert refusals(header(), *running, Complete("s"), Epoch("topology")) == ()


def test_positions_and_counts_that_an_engine_reports() -> None:
    assert only(header(), Position("a", groups={"full": 8}, next=9)).row == "system.applied_once"
    assert refusals(header(), Position("a", groups={"full": 8}, next=8)) == ()
    assert only(header(), Measure("pool", free=3, used=4, reserved=1, capacity=9)).rules == ("HKV-ACC-001",)
    assert refusals(header(), Measure("pool", free=4, used=4, reserved=1, capacity=9)) == ()
    assert only(header(), Admit("a", False, need=4, usable=15, empty=True)).row == "system.fits_empty"
    outside = TableWrite("a", "win", [0, 6], index=0, at=80)
    assert only(header(WIN), outside).rules == ("HKV-SWA-004",)
    assert refusals(header(WIN), TableWrite("a", "win", [0, 0], index=0, at=80)) == ()


def test_ranks_use_what_all_can_serve() -> None:
    blocks = {"full": [1, 2, 3]}
    events = [*served("a", IDS, blocks), Arrive("b", 60, ids=IDS), Vote("b", 0, 48), Vote("b", 1, 32)]
    assert only(header(), *events, Lookup("b", 48, matched=48, blocks=blocks)).rules == ("HKV-RANK-001",)
    assert refusals(header(), *events, Agree("b", 32), Lookup("b", 32, matched=48, blocks={"full": [1, 2]})) == ()


def test_a_name_that_still_holds_blocks_has_no_new_life() -> None:
    events = [*fill("a", [1], {"full": [1]}), Finish("a"), Arrive("a", 16)]
    assert only(header(), *events).rules == ("HKV-S1-012", "HKV-ERR-001")


def test_a_reset_empties_the_cache_and_the_index() -> None:
    events = [*served("a", IDS, {"full": [1, 2, 3]}), Reset("full"), Drain(), Arrive("b", 60, ids=IDS)]
    assert refusals(header(), *events) == ()
    assert "HKV-S3-011" in only(header(), *events, Lookup("b", 48, blocks={"full": [1, 2, 3]})).rules


@pytest.mark.parametrize(("exact", "refused"), [("true", True), ("false", False)])
def test_a_kind_that_nobody_foresaw_is_judged_by_its_entry(tmp_path: Path, exact: str, refused: bool) -> None:
    spec = copy_oracle_spec(tmp_path)
    kind = "vision_embedding"
    shutil.copy(Path(__file__).parent / "data" / "seventh_kind" / f"{kind}.toml", spec / "kinds")
    entry = f'\n[need.{kind}]\nlo = "0"\nhi = "s"\nexact = {exact}\nmiss = "replay"\nrules = ["HKV-IDX-001"]\n'
    (spec / "recovery.toml").write_text((spec / "recovery.toml").read_text() + entry)
    blocks = {"img": [1, 2, 3]}
    events = [*served("a", IDS, blocks), Arrive("b", 60, ids=IDS), Lookup("b", 32, matched=48, blocks=blocks)]
    oracle = Oracle(header(GroupSpec("img", kind, 16)), spec=spec)
    found = oracle.feed_all(events)
    assert [(r.row, r.rules) for r in found] == [
        ("system.covers", ("HKV-L3-001", "HKV-L3-002", "HKV-IDX-001"))
    ] * refused
    assert oracle.coverage().rules["HKV-IDX-001"].result == ("fail" if refused else "pass")
    assert oracle.coverage().rules["HKV-SWA-001"].result == "not observable"


# ---- what is no judgement ----------------------------------------------------------------------------------------


def test_what_is_compared_with_nothing_is_no_premise() -> None:
    oracle = Oracle(header(FULL, WIN))
    oracle.feed_all([Decide(0, 1, "evict a"), Capture("g"), Replay("g", live=1, versions={"full": 3})])
    oracle.feed_all([Arrive("a", 16), Dispatch("s", "a", starts={"full": 0}), Position("a", asked=8)])
    rules = oracle.coverage().rules
    for rule in ("HKV-RANK-002", "HKV-S4-009", "HKV-POS-003"):
        assert (rules[rule].result, rules[rule].premises) == ("not exercised", 0), rule
    assert oracle.feed(Decide(1, 1, "evict b")).rules == ("HKV-RANK-002",)
    assert oracle.feed(Dispatch("t", "a", starts={"full": 0, "win": 16})).refusals[0].row == "system.same_start"


def test_a_reference_of_nobody_is_no_premise_of_requests() -> None:
    oracle = Oracle(header())
    oracle.feed_all([*served("a", [1], {"full": [1]}), Pin("lock", "full", [1]), Unpin("lock", "full", [1])])
    fired = {row.name: row.count for row in oracle.state.rows if row.count}
    assert (fired["hold"], fired["unhold"]) == (1, 1)
    assert not fired.keys() & {"match", "find", "pin", "release"}


def test_tables_are_those_of_each_request() -> None:
    events: list[Event] = [Arrive("a", 16), Arrive("b", 16), Capture("g")]
    events += [
        TableWrite("a", "full", [1], version=1, copied=True),
        TableWrite("b", "full", [2], version=2, copied=True),
    ]
    for version in (1, 2):
        assert refusals(header(), *events, Replay("g", live=1, versions={"full": version})) == ()
    assert only(header(), *events, Replay("g", live=1, versions={"full": 0})).row == "system.tables_current"


def test_a_reset_does_not_clear_what_is_used() -> None:
    events = fill("a", [1], {"full": [1]})
    assert only(header(), *events, Reset("full", [1])).segment == "full:1"
    assert refusals(header(), *events, Reset("full"), *leave("a", {"full": [1]}), Drain()) == ()


def test_what_a_refused_end_of_a_transfer_was_about_is_not_judged() -> None:
    events: list[Event] = [Arrive("a", 40, ids=[1, 2]), Allocate("a", "full", [1])]
    events += [TransferBegin("x", [Part("full", [11], [1])], source="peer:p", req="a"), TransferEnd("x", life=5)]
    assert only(header(), *events).row == "system.completes_current"
    oracle = Oracle(header())
    oracle.feed_all(events)
    assert oracle.feed(KeyPublish("full", ["p"], [1])).ok
    assert oracle.coverage().skipped == 1


def test_a_load_asks_for_the_key_of_the_tier_that_it_loads_from() -> None:
    events = served("a", [1], {"full": [1]})
    for tier in ("host", "disk"):
        events += [TransferBegin(tier, [Part("full", [1], [7])], target=tier), TransferEnd(tier)]
        events.append(KeyPublish("full", [tier], [7], tier=tier))
    assert refusals(header(), *events, TransferBegin("x", [Part("full", [7], [2], keys=["host"])], source="host")) == ()
    other = TransferBegin("x", [Part("full", [7], [2], keys=["disk"])], source="host")
    assert only(header(), *events, other).rules == ("HKV-KEY-003",)


def test_a_lookup_that_is_repeated_forgets_no_preemption() -> None:
    blocks = {"full": [1, 2, 3]}
    events = [*fill("a", IDS, blocks), Preempt("a"), Free("a", "full", [3, 2, 1])]
    events += [Lookup("a", 32, matched=32, blocks={"full": [1, 2]}), Lookup("a", 16, matched=32, blocks={"full": [1]})]
    events += [Pin("a", "full", [1]), Allocate("a", "full", [5])]
    assert refusals(header(), *events) == ()
    assert only(header(limits=Limits(preempts=1)), *events, Preempt("a")).guard == "req.preempts < MAX_PREEMPTS"


# ---- how it says so ----------------------------------------------------------------------------------------------


def test_a_strict_oracle_raises_and_an_advisory_one_goes_on() -> None:
    events = [*served("a", [1], {"full": [1]}), Evict("full", [1])]
    strict = Oracle(header(), "strict")
    with pytest.raises(Illegal, match=r"full\.free refused by 'keys == 0' with keys=1"):
        strict.feed_all(events)
    advisory = Oracle(header())
    assert len(advisory.feed_all(events)) == 1
    # What was refused is lost: nothing about it is judged until it is taken anew.
    assert advisory.feed_all([Arrive("b", 20, ids=[1]), Lookup("b", 16, blocks={"full": [1]})]) == ()
    assert advisory.feed_all([Arrive("c", 20), Allocate("c", "full", [1])]) == ()
    assert advisory.coverage().skipped == 1


def test_a_refusal_explains_itself() -> None:
    oracle = Oracle(header())
    verdict = [oracle.feed(e) for e in (*served("a", [1], {"full": [1]}), Evict("full", [1]))][-1]
    assert not verdict.ok
    assert verdict.rules == ("HKV-S3-011",)
    text = oracle.explain(verdict.refusals[0])
    assert "event 8 (evict) full:1: full.free refused by 'keys == 0' with keys=1" in text
    assert "in common.toml" in text
    assert "HKV-S3-011: A segment becomes findable only after" in text


def test_a_snapshot_shows_what_is_alive() -> None:
    oracle = Oracle(header())
    oracle.feed_all(fill("a", [1], {"full": [1]}))
    found = oracle.snapshot()
    assert found["requests"]["a"]["stage"] == "RECOMPUTE"
    assert found["tiers"]["device"]["full"][1] | {"generation": 0} == {
        "stage": "READY", "start": 0, "end": 16, "pins": 1, "writers": 0, "steps": 0, "holds": 0, "keys": 1,
        "generation": 0,
    }  # fmt: skip
    oracle.feed_all([*leave("a", {"full": [1]}), KeyRemove("full", ["full-a-1"])])
    assert oracle.snapshot()["requests"] == {}
    assert oracle.snapshot()["tiers"]["device"]["full"] == {}


def test_an_event_of_an_unknown_group_is_no_event_of_this_trace() -> None:
    with pytest.raises(InputError, match=r"event 1 \(free\): no group 'nope' in the header \(known: full\)"):
        refusals(header(), Free("a", "nope", [1]))


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (Header("hybridkv.events/1"), "neither groups nor a model"),
        (header(GroupSpec("full", "compressed_kv", 0)), "groups.full.block: expected at least 1 token, got 0"),
        (header(GroupSpec("full", "nothing", 16)), "need.nothing: no such entry"),
        (header(GroupSpec("win", "swa_window", 16)), "window"),
        (header(claims=("magic",)), "no capability 'magic'"),
        (Header("hybridkv.events/1", model="gpt-1"), "no model named 'gpt-1'"),
    ],
)
def test_a_header_that_cannot_be_used_is_one_clear_line(head: Header, reason: str) -> None:
    with pytest.raises(InputError) as caught:
        Oracle(head)
    assert reason in str(caught.value)


def test_a_model_stands_for_its_groups() -> None:
    oracle = Oracle(Header("hybridkv.events/1", model="deepseek-v4-flash"))
    assert [g.spec.name for g in oracle.state.groups][:2] == ["window", "csa"]
    assert oracle.state.alignment == 256


def test_an_oracle_is_gone_with_its_last_use() -> None:
    oracle = Oracle(header())
    oracle.feed_all([*served("a", IDS, {"full": [1, 2, 3]}), *fill("b", [1], {"full": [5]}), Reset("full")])
    seen = weakref.ref(oracle.blocks)
    gc.disable()
    try:
        del oracle
        assert seen() is None
    finally:
        gc.enable()


# ---- coverage ----------------------------------------------------------------------------------------------------


def test_coverage_counts_premises_and_names_what_was_claimed_and_not_shown() -> None:
    oracle = Oracle(header(claims=("blocks", "reuse")))
    oracle.feed_all(fill("a", [1], {"full": [1]}))
    found = oracle.coverage()
    assert found.verdict == "partial"
    assert set(found.open) == {"HKV-L3-001", "HKV-L1-002", "HKV-L1-006", "HKV-KEY-001"}
    assert found.rules["HKV-L3-001"].result == "not exercised"
    assert found.rules["HKV-L4-002"].result == "not observable"
    assert found.rules["HKV-IDX-008"].result == "not observable"
    assert found.rules["HKV-S1-002"].result == "pass"
    assert found.rules["HKV-S1-002"].premises == 1
    oracle.feed_all([*leave("a", {"full": [1]}), Arrive("b", 20, ids=[1]), Lookup("b", 16, blocks={"full": [1]})])
    assert oracle.coverage().verdict == "pass"


def test_coverage_fails_by_the_rules_that_were_broken_only() -> None:
    oracle = Oracle(header())
    oracle.feed_all([*served("a", [1], {"full": [1]}), Evict("full", [1])])
    found = oracle.coverage()
    assert found.verdict == "fail"
    assert [rule for rule, v in found.rules.items() if v.result == "fail"] == ["HKV-S3-011"]


def test_a_level_hides_what_it_cannot_see() -> None:
    low = Header("hybridkv.events/1", level="L0", unit=16, groups=(FULL,))
    oracle = Oracle(low)
    oracle.feed_all([KeyPublish("full", ["a"]), KeyRemove("full", ["a"])])
    found = oracle.coverage().rules
    assert found["HKV-OBS-001"].result == "pass"
    assert found["HKV-L3-001"].result == "not observable"


# ---- several instances -------------------------------------------------------------------------------------------


def test_what_ties_instances_together_is_judged_over_all_of_them() -> None:
    joint = Joint(header())
    assert joint.feed(Decide(0, 1, "evict a", instance="r0")).ok
    assert joint.feed(Decide(1, 1, "evict b", instance="r1")).rules == ("HKV-RANK-002",)
    one = TransferBegin("x", [Part("full", [1, 2], [3, 4])], target="peer:d", instance="p")
    assert joint.feed(one).ok
    two = TransferBegin("x", [Part("full", [3], [3])], source="peer:p", instance="d")
    assert joint.feed(two).rules == ("HKV-L3-003",)
    assert joint.feed(Finish("a", instance="p")).ok
