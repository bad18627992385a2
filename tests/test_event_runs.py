"""Events that are judged together, those of one form that follow one another, are judged as one by one."""

import random
from itertools import pairwise

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_driver import Driver
from test_event_fuzz import FORMS, HEADER, record
from trace_variants import split

from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Agree, Allocate, Event, Finish, Header, KeyPublish, TransferBegin, Vote, tag
from hybridkv_ref.oracle import Illegal, Oracle
from hybridkv_ref.oracle_records import Refusal
from hybridkv_ref.validate import Run

Trace = tuple[Header, list[Event]]


def block_by_block(chance: random.Random, steps: int = 60) -> Trace:
    driver = Driver(chance, chance.random() < 0.5, chance.choice([14, 20, 40]))
    return driver.header, [event for _, event in split(list(enumerate(driver.run(steps), 1)))]


def spoiled(events: list[Event], chance: random.Random, faults: int) -> list[Event]:
    """Events are lost, told twice, told too late, or told with the numbers of another event of their form."""
    found = list(events)
    for _ in range(faults):
        place = chance.randrange(len(found))
        match chance.randrange(4):
            case 0:
                del found[place]
            case 1:
                found.insert(place, found[place])
            case 2:
                found.insert(min(place + chance.randint(1, 9), len(found) - 1), found.pop(place))
            case _:
                event = found[place]
                others = [e for e in found if type(e) is type(event)]
                field = chance.choice(event.__struct_fields__)
                found[place] = msgspec.structs.replace(event, **{field: getattr(chance.choice(others), field)})
    return found


def outcome(oracle: Oracle, refusals: list[Refusal], fault: str) -> tuple[object, ...]:
    return refusals, fault, oracle.seen, oracle.snapshot(), oracle.coverage()


def one_by_one(header: Header, events: list[Event]) -> tuple[object, ...]:
    oracle, refusals, fault = Oracle(header), list[Refusal](), ""
    for event in events:
        try:
            refusals += oracle.feed(event).refusals
        except InputError as error:
            fault = str(error)
            break
    return outcome(oracle, refusals, fault)


def together(header: Header, events: list[Event]) -> tuple[object, ...]:
    oracle, refusals, fault = Oracle(header), list[Refusal](), ""
    try:
        for refusal in oracle.judge(events):
            refusals.append(refusal)
    except InputError as error:
        fault = str(error)
    return outcome(oracle, refusals, fault)


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.sampled_from([0, 1, 3, 10]))
def test_runs_are_judged_as_their_events(chance: random.Random, faults: int) -> None:
    header, events = block_by_block(chance)
    events = spoiled(events, chance, faults)
    assert together(header, events) == one_by_one(header, events)


@settings(max_examples=60)
@given(st.randoms(use_true_random=False))
def test_runs_of_any_events_are_judged_as_their_events(chance: random.Random) -> None:
    events = sorted((record(chance.choice(FORMS), chance) for _ in range(60)), key=tag)
    assert together(HEADER, events) == one_by_one(HEADER, events)


def test_some_of_these_traces_are_refused_inside_a_run() -> None:
    inside = 0
    for seed in range(30):
        chance = random.Random(seed)
        header, events = block_by_block(chance)
        events = spoiled(events, chance, 3)
        for refusal in Oracle(header).judge(events):
            around = events[refusal.index - 2 : refusal.index + 1]
            inside += len({type(event) for event in around}) == 1
    assert inside > 10


@pytest.mark.parametrize("form", [Allocate, KeyPublish, Finish])
def test_what_cannot_be_fed_ends_the_run_at_its_place(form: type[Event]) -> None:
    header, events = block_by_block(random.Random(5))
    place = [i for i, event in enumerate(events) if isinstance(event, form)][-2]
    field, value = ("req", "r0") if form is Finish else ("group", "no such group")
    events[place] = msgspec.structs.replace(events[place], **{field: value})
    found = together(header, events)
    assert found == one_by_one(header, events)
    if form is not Finish:
        assert found[2] == place + 1
        assert f"event {place + 1} " in str(found[1])


def test_a_strict_oracle_stops_inside_a_run() -> None:
    chance = random.Random(8)
    header, events = block_by_block(chance)
    place = next(i for i, pair in enumerate(pairwise(events)) if all(isinstance(event, KeyPublish) for event in pair))
    events.insert(place, msgspec.structs.replace(events[place], blocks=[header.null]))
    strict, fed = Oracle(header, "strict"), Oracle(header)
    with pytest.raises(Illegal) as stopped:
        strict.feed_all(events)
    fed.feed_all(events[: place + 1])
    assert (stopped.value.refusal.index, strict.seen) == (place + 1, place + 1)
    assert strict.snapshot() == fed.snapshot()


# ---- several instances -------------------------------------------------------------------------------------------


def told_by(events: list[Event], instances: list[str], chance: random.Random) -> list[Event]:
    """Each instance tells the whole trace, in turns of a few events."""
    left = {name: list(events) for name in instances}
    found: list[Event] = []
    while any(left.values()):
        name = chance.choice([n for n, rest in left.items() if rest])
        for _ in range(min(chance.randint(1, 12), len(left[name]))):
            found.append(msgspec.structs.replace(left[name].pop(0), instance=name))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_batches_of_several_instances_are_judged_as_their_events(seed: int) -> None:
    chance = random.Random(seed)
    header, events = block_by_block(chance, 30)
    events = spoiled(events, chance, 3)
    events[5:5] = [Vote("q", 0, 8), Vote("q", 1, 4), Agree("q", 8), TransferBegin("x", [])]
    events = told_by(events, ["a", "b", ""] if seed % 2 else ["a"], chance)
    single, batch = Run(header), Run(header)
    faults = []
    for run, size in ((single, 1), (batch, 100)):
        try:
            for first in range(0, len(events), size):
                run.feed(first + 2, events[first : first + size], keep=True)
            faults.append("")
        except InputError as error:
            faults.append(str(error))
    assert faults[0] == faults[1]
    assert single.refused == batch.refused
    assert (single.count, single.total, single.last) == (batch.count, batch.total, batch.last)
    assert single.results() == batch.results()
