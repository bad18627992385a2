"""No false alarm: traces of engines that do everything right are accepted, and their premises are counted."""

import itertools
import random
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from engine_traces import events_of, header
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from reference_driver import Driver

from hybridkv_ref.cli import main
from hybridkv_ref.events import Event, Header, tag
from hybridkv_ref.models import load_model
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_coverage import Coverage
from hybridkv_ref.request_traces import read_trace
from hybridkv_ref.sim_events import Telling
from hybridkv_ref.validate import validate

DEEP = 10_000
# Rules of which a random trace of this driver shows something, whatever it does.
ALWAYS = {"HKV-S3-003", "HKV-S1-002", "HKV-REF-005", "HKV-LIVE-006"}
OFTEN = {
    *ALWAYS,
    *(
        "HKV-L3-001",
        "HKV-CKV-001",
        "HKV-SWA-001",
        "HKV-REC-001",
        "HKV-L1-006",
        "HKV-L1-002",
        "HKV-L3-002",
        "HKV-KEY-001",
    ),
    *(
        "HKV-S3-016",
        "HKV-POS-002",
        "HKV-POS-003",
        "HKV-SWA-003",
        "HKV-ERR-003",
        "HKV-S3-010",
        "HKV-REF-009",
        "HKV-LIVE-011",
    ),
    *("HKV-OBS-001", "HKV-S3-011", "HKV-MISS-001", "HKV-KEY-003"),
}


def accepted(head: Header, events: list[Event]) -> Coverage:
    oracle = Oracle(head)
    assert [str(refusal) for refusal in oracle.feed_all(events)] == []
    found = oracle.coverage()
    assert found.rows_fired > len(events) / 4
    assert all(v.premises > 0 for v in found.rules.values() if v.result == "pass")
    return found


@settings(max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.randoms(use_true_random=False), st.booleans(), st.sampled_from([14, 20, 40]), st.booleans())
def test_random_legal_traces_are_accepted(
    chance: random.Random, recurrent: bool, capacity: int, in_order: bool
) -> None:
    driver = Driver(chance, recurrent, capacity, in_order)
    accepted(driver.header, driver.run(60))


def test_a_hit_that_is_asked_for_late_is_that_of_one_who_asked_all_along() -> None:
    """What the blocks hold is counted from the first question on."""
    found = 0
    for seed in range(24):
        chance = random.Random(seed)
        driver = Driver(chance, seed % 2 == 1, (14, 20, 40)[seed % 3], in_order=seed % 5 == 0)
        events = driver.run(80)
        # No claim of the engine asks either.
        header, begin = msgspec.structs.replace(driver.header, capabilities=()), chance.randrange(len(events))
        early, late = Oracle(header), Oracle(header)
        for number, event in enumerate(events):
            for oracle in (early, late):
                oracle.feed(event)
            for name in early.state.requests:
                expected = early.expected_hit(name)
                found += expected.r > 0
                assert number < begin or late.expected_hit(name) == expected
    assert found > 100


def legal_runs(count: int) -> Counter[str]:
    shown: Counter[str] = Counter()
    for seed in range(count):
        driver = Driver(random.Random(seed), seed % 2 == 1, (14, 20, 40)[seed % 3], in_order=seed % 5 == 0)
        found = accepted(driver.header, driver.run(100))
        shown.update(rule for rule, v in found.rules.items() if v.premises)
    return shown


def test_what_the_driver_does_shows_the_rules_that_matter() -> None:
    shown = legal_runs(60)
    assert {rule for rule in ALWAYS if shown[rule] == 60} == ALWAYS
    assert {rule for rule in OFTEN if shown[rule]} == OFTEN


@pytest.mark.deep
def test_many_random_legal_traces_are_accepted() -> None:
    legal_runs(DEEP)


def test_the_driver_uses_the_vocabulary_of_serving() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        driver = Driver(random.Random(seed), capacity=20)
        seen.update(tag(event) for event in driver.run(120))
    for name in (
        *(
            "arrive",
            "lookup",
            "pin",
            "allocate",
            "dispatch",
            "complete",
            "draft",
            "accept",
            "reject",
            "preempt",
            "defer_free",
        ),
        *("free", "key_publish", "key_remove", "transfer_begin", "transfer_part", "transfer_end", "transfer_fail"),
        *("transfer_cancel", "abort", "finish", "drain"),
    ):
        assert seen[name], name


def size(value: object, seen: set[int]) -> int:
    """How many records and numbers hang on the books of an oracle."""
    if id(value) in seen or isinstance(value, type | str | bytes | int | float | bool | None):
        return 0
    seen.add(id(value))
    if isinstance(value, dict):
        return len(value) + sum(size(v, seen) for v in value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return len(value) + sum(size(v, seen) for v in value)
    slots = [n for form in type(value).__mro__ for n in getattr(form, "__slots__", ())]
    return 1 + sum(size(getattr(value, n), seen) for n in slots if hasattr(value, n))


def test_the_books_grow_with_what_is_alive_and_not_with_the_trace(shared_data: Path) -> None:
    head = header(512, capacity=300)
    requests = itertools.islice(read_trace(shared_data / "traces" / "mooncake_conversation_trace.jsonl"), 900)
    oracle, sizes, left_out = Oracle(head), [], ("ended", "tables", "state")
    for count, event in enumerate(events_of(requests, head, 300)):
        oracle.feed(event)
        if count in (3000, 9000):
            parts = (oracle.state, oracle.hits, oracle.blocks, oracle.index, oracle.steps, oracle.transfers)
            # Names of ended requests are kept on purpose, up to a bound.
            books = [
                {n: getattr(part, n) for n in getattr(part, "__slots__", ()) or vars(part) if n not in left_out}
                for part in parts
            ]
            seen: set[int] = set()
            sizes.append(sum(size(book, seen) for book in books))
    assert len(sizes) == 2
    assert sizes[0] > 1000
    assert sizes[1] < sizes[0] * 1.2


# Model, device memory: with and without evictions, with states, tails and index keys.
SIMULATED = (
    ("deepseek-v4-flash", 200 << 20),
    ("deepseek-v4-flash", 1 << 30),
    ("qwen3-next-80b-a3b", 2 << 30),
    ("gemma-3-27b", 3 << 30),
    ("gpt-oss-20b", 1 << 30),
)


def simulated(shared_data: Path, model: str, memory: int, first: int, count: int) -> Coverage:
    simulation = Telling(load_model(model), memory, 512)
    requests = read_trace(shared_data / "traces" / "mooncake_conversation_trace.jsonl")
    for request in itertools.islice(requests, first, first + count):
        simulation.arrive(request)
    return accepted(simulation.header, simulation.events)


@pytest.mark.parametrize(("model", "memory"), SIMULATED)
def test_what_simulate_does_on_a_real_trace_is_accepted(shared_data: Path, model: str, memory: int) -> None:
    found = simulated(shared_data, model, memory, 0, 60)
    assert found.rules["HKV-L3-001"].premises > 0
    assert found.rules["HKV-S3-016"].premises > 0


@pytest.mark.parametrize("model", ["command-r7b", "deepseek-v3.2", "jamba-v0.1", "minimax-m3", "phi-4-mini-flash"])
def test_what_the_command_tells_of_a_generated_workload_is_accepted(tmp_path: Path, model: str) -> None:
    told = tmp_path / "trace.jsonl"
    arguments = ["simulate", "--model", model, "--gpu-memory", "1GiB", "--requests", "80", "--events", str(told)]
    assert main([*arguments, "--json"]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["trace.jsonl"]
    report = validate(str(told))
    assert (report.verdict, report.refusals) == ("pass", 0)
    assert report.coverage.rules["HKV-L3-001"].premises > 0


@pytest.mark.deep
def test_fifty_simulated_slices_of_a_real_trace_are_accepted(shared_data: Path) -> None:
    for (model, memory), part in itertools.product(SIMULATED, range(10)):
        simulated(shared_data, model, memory, 1100 * part, 100)


@pytest.mark.parametrize("part", range(5))
def test_slices_of_a_real_trace_are_accepted(shared_data: Path, part: int) -> None:
    requests = read_trace(shared_data / "traces" / "mooncake_conversation_trace.jsonl")
    chosen = itertools.islice(requests, 1000 * part, 1000 * part + 120)
    head = header(512, windows=(128, 4096), capacity=700)
    found = accepted(head, list(events_of(chosen, head, 700)))
    assert found.verdict == "pass"
    assert found.rules["HKV-KEY-001"].premises > 0


def test_a_conversation_trace_with_local_ids_is_accepted(shared_data: Path) -> None:
    path = sorted((shared_data / "traces" / "kv_cache_tester").glob("*.json"))[0]
    head = header(64, windows=(128,), capacity=3000)
    assert accepted(head, list(events_of(itertools.islice(read_trace(path), 40), head, 3000))).verdict != "fail"
