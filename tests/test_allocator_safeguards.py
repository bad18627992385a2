"""Further MUSTs of the layers and the safeguards: what is seen with the check, and that it is not without it.

As in ``test_allocator_rules.py`` a check that stands in the tables is taken out of the *table*: a guard, an effect, or
a row.  What the tables leave to the allocator (which tier takes what, who works on which thread, the gate) is taken
out of its code.
"""

import dataclasses
import re
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import msgspec
import pytest
from allocator_tools import GEOMETRY, TABLES, cold, idle, make, prompt
from conformance_mutants import MUTANTS
from decoder_witnesses import WITNESSES
from test_allocator_rules import CASES, TOKENS, Gate, refusal, verdict, warm, without
from test_faults import FAULTS

from hybridkv_ref.allocator import HeterogeneousAllocator, NotAdmitted, build, demand
from hybridkv_ref.allocator import allocator as allocator_module
from hybridkv_ref.allocator.abi import Descriptor, describe
from hybridkv_ref.allocator.arena import NULL_SLOT, Arena
from hybridkv_ref.allocator.eviction import Evictor
from hybridkv_ref.allocator.index import PrefixIndex
from hybridkv_ref.allocator.lockstep import UNIT, keep_all, small_model
from hybridkv_ref.allocator.media import HostMemory
from hybridkv_ref.allocator.objects import Objects
from hybridkv_ref.allocator.pipelines import Pipelines
from hybridkv_ref.allocator.records import StoredObject
from hybridkv_ref.allocator.tiers import Tiers
from hybridkv_ref.errors import InputError
from hybridkv_ref.fast_hit import Finder
from hybridkv_ref.io_unit import BUFFERED
from hybridkv_ref.rules import load_rules
from hybridkv_ref.tables import Tables

Edit = Callable[[], Tables]
Scenario = Callable[[HeterogeneousAllocator], object]


def lacking(rows: str, *effects: str) -> Tables:
    """The tables without these effects of some rows, in every kind that has them."""
    dropped = 0
    events = []
    for event in TABLES.events:
        kept = tuple(e for e in event.effects if event.row not in rows.split() or e.text not in effects)
        dropped += len(event.effects) - len(kept)
        events.append(dataclasses.replace(event, effects=kept))
    assert dropped, f"{rows} has no effect {effects}"
    return dataclasses.replace(TABLES, events=tuple(events))


def rowless(kind: str, row: str) -> Tables:
    """The tables in which one kind has not this row."""
    events = tuple(e for e in TABLES.events if e.row != row or kind not in e.kinds.values())
    assert len(events) < len(TABLES.events)
    return dataclasses.replace(TABLES, events=events)


# ---- L1 to L3 --------------------------------------------------------------------------------------------------------
def layer_is_skipped(allocator: HeterogeneousAllocator) -> object:
    lease = warm(allocator)
    allocator.ledger.step(lease.request.records, "check")
    return refusal(lambda: allocator.hits.each(lease.request, "pass_l2"))


def last_layer_is_skipped(allocator: HeterogeneousAllocator) -> object:
    request = warm(allocator).request
    allocator.ledger.step(request.records, "check")
    for row in ("pass_l1", "pass_l2"):
        allocator.hits.each(request, row)
    allocator.ledger.step(request.records, "join")
    return refusal(lambda: allocator.ledger.step(request.records, "validate"))


def joint_layer_comes_first(allocator: HeterogeneousAllocator) -> object:
    request = warm(allocator).request
    allocator.ledger.step(request.records, "check")
    return refusal(lambda: allocator.ledger.step(request.records, "join"))


def made_approximately(allocator: HeterogeneousAllocator) -> object:
    """What rests on an approximate recovery, for a reader who did not ask for that."""
    cold(allocator, TOKENS)
    for segment in allocator.segments():
        segment.entity.approx = True
    return verdict(allocator, allocator.pin(allocator.match(TOKENS)))


def whole_prompt_is_cached(allocator: HeterogeneousAllocator) -> object:
    """A match that claims every token of the prompt: the last one has to be computed."""
    cold(allocator, prompt("AB", 2 * UNIT))
    request = allocator.requests.new(2 * UNIT, allocator.keys(prompt("AB", 2 * UNIT), b""), 0, True, allocator.book.abi)
    inputs = {"s": 2 * UNIT, "f": 2 * UNIT, "bound": 2 * UNIT, "matched": 2 * UNIT}
    found = refusal(lambda: allocator.ledger.step(request.records, "match", lambda lane: inputs))
    allocator.ledger.step(request.records, "reject" if found else "recompute")
    allocator.requests.drain(request)
    return found


def tier_without_a_way_back(allocator: HeterogeneousAllocator) -> object:
    """A spill of a kind that no row restores."""
    cold(allocator, TOKENS)
    segment = next(s for s in allocator.segments() if s.kind == "recurrent_state")
    return allocator.spill(segment).result() is None


def other_format(allocator: HeterogeneousAllocator) -> object:
    """A stored object in another layout than its reader expects comes back."""
    cold(allocator, TOKENS)
    idle(allocator)
    allocator.evictor.empty()
    for stored in allocator.tiers.objects:
        if stored.group.name == "csa":
            stored.entity.abi += 1
    assert all(load.result(30) for load in allocator.prefetch(TOKENS))
    return verdict(allocator, allocator.pin(allocator.match(TOKENS)))


def position_off_the_grid(allocator: HeterogeneousAllocator) -> object:
    """A model of one group, whose every token is cached: the hit ends on its grid all the same."""
    cold(allocator, prompt("AB", 2 * UNIT))
    return allocator.match(prompt("AB", 2 * UNIT)).tokens


def claimed_and_gone(allocator: HeterogeneousAllocator) -> object:
    """One window is evicted; the match plans without it."""
    cold(allocator, TOKENS)
    window = next(s for s in allocator.segments() if s.group.name == "window" and s.entity.end == 3 * UNIT)
    allocator.deallocate(window)
    try:
        return allocator.match(prompt("AAAX", 3 * UNIT + 3)).tokens
    except LookupError:
        return None


def only_on_disk(allocator: HeterogeneousAllocator) -> object:
    """Every group's data is durable, and none is on the device."""
    cold(allocator, TOKENS)
    idle(allocator)
    allocator.evictor.empty()
    try:
        return allocator.match(TOKENS).tokens
    except LookupError:
        return None


# ---- S1 --------------------------------------------------------------------------------------------------------------
def charge_after_all_is_freed(allocator: HeterogeneousAllocator) -> object:
    cold(allocator, TOKENS)
    idle(allocator)
    allocator.evictor.empty()
    pool = allocator.ledger.pool
    return [pool.gpu_used, *(getattr(pool, f"{g.kind}__used") for g in GEOMETRY.groups)] == [0] * 7


def full_medium(allocator: HeterogeneousAllocator) -> object:
    cold(allocator, TOKENS)
    return allocator.spill(next(s for s in allocator.segments() if s.group.name == "window")).result() is None


def slot_after_a_load(allocator: HeterogeneousAllocator) -> object:
    stored = spilled_and_gone(allocator)
    done = allocator.tiers.want(stored, 0)
    assert done is not None
    assert done.result(30)
    return allocator.ledger.pool.io_used


def spilled_and_gone(allocator: HeterogeneousAllocator) -> StoredObject:
    cold(allocator, TOKENS)
    segment = next(s for s in allocator.segments() if s.group.name == "state")
    stored = allocator.spill(segment).result()
    assert stored is not None
    idle(allocator)
    allocator.evictor.empty()
    return stored


def load_past_a_cap(allocator: HeterogeneousAllocator) -> object:
    """The targets of a load do not fit their kind's pool: what is left of it."""
    cold(allocator, TOKENS)
    states = [s for s in allocator.segments() if s.group.name == "state"]
    stored = allocator.spill(*states[:2]).result() if states[0].key and states[1].key else None
    stored = stored or allocator.spill(states[0]).result()
    assert stored is not None
    idle(allocator)
    allocator.evictor.empty()
    allocator.ledger.change({"recurrent_state.CAP": 1})
    done = allocator.tiers.want(stored, 0)
    assert done is not None
    try:
        ended = done.result(2)
    except TimeoutError:
        ended = None
    return ended, stored.entity.stage


def past_the_gate(allocator: HeterogeneousAllocator) -> object:
    try:
        request = allocator.match(prompt("ABCD", 4 * UNIT)).request
    except NotAdmitted as refused:
        return refused.rule
    allocator.abort(request)
    return None


def malformed(allocator: HeterogeneousAllocator) -> object:
    try:
        request = allocator.match([[1, 2], [3, 4]]).request
    except NotAdmitted as refused:
        return refused.rule
    except AttributeError:
        return "crashed"
    allocator.abort(request)
    return None


# ---- S2 --------------------------------------------------------------------------------------------------------------
def rebuild_during_a_load(allocator: HeterogeneousAllocator) -> object:
    """An index rebuild comes to its end while a load still waits for the disk."""
    gate = allocator.tiers.media["DISK"]
    assert isinstance(gate, Gate)
    cold(allocator, prompt("A", UNIT + 1))
    idle(allocator)
    allocator.evictor.empty()
    cold(allocator, prompt("B", UNIT + 1))
    loads = allocator.prefetch(prompt("AX", UNIT + 2))
    assert gate.reading.wait(30)
    allocator.system("new_index")
    done = allocator.rebuild(lambda keys: keys)
    assert done
    try:
        for one in done:
            one.result(2)
        return not any(load.done() for load in loads)
    except TimeoutError:
        return False
    finally:
        gate.opened.set()


def validation_during_a_load(allocator: HeterogeneousAllocator) -> object:
    """A hit is validated while a load still waits for the disk."""
    gate = allocator.tiers.media["DISK"]
    assert isinstance(gate, Gate)
    cold(allocator, prompt("A", UNIT + 1))
    idle(allocator)
    allocator.evictor.empty()
    cold(allocator, prompt("B", UNIT + 1))
    idle(allocator)
    loads = allocator.prefetch(prompt("AX", UNIT + 2))
    assert gate.reading.wait(30)
    opener = threading.Timer(2, gate.opened.set)
    opener.start()
    lease = allocator.pin(allocator.match(prompt("BX", UNIT + 2)))
    accepted = allocator.validate(lease)[-1].accepted
    pending = not gate.opened.is_set()
    gate.opened.set()
    for load in loads:
        load.result(30)
    return accepted and pending


def others_of_a_prefix(allocator: HeterogeneousAllocator) -> object:
    """One window goes: the other kinds of its prefix stay."""
    cold(allocator, TOKENS)
    before = {id(s) for s in allocator.segments()}
    assert allocator.evictor.make_room("swa_window", None)
    return len(before - {id(s) for s in allocator.segments()})


# ---- S3 --------------------------------------------------------------------------------------------------------------
def generation_under_a_lease(allocator: HeterogeneousAllocator) -> object:
    """A validated lease, and an eviction of what it holds."""
    lease = warm(allocator)
    assert allocator.validate(lease)[-1].accepted
    held = lease.request.hits[0]
    refusal(lambda: allocator.deallocate(held.segment))
    return held.entity.seen == held.segment.generation


def stage_after_unmarking(allocator: HeterogeneousAllocator) -> object:
    lease = warm(allocator)
    segment = lease.segments[0]
    before = segment.stage
    allocator.transition(segment, "retire")
    allocator.transition(segment, "unmark")
    return segment.stage == before


def second_test_of_the_pins(allocator: HeterogeneousAllocator) -> object:
    lease = warm(allocator)
    segment = lease.segments[0]
    refusal(lambda: allocator.deallocate(segment))
    return segment.stage == "READY"


def target_before_the_end(allocator: HeterogeneousAllocator) -> object:
    """A load whose part has not arrived: whether its end would be taken."""
    stored = spilled_and_gone(allocator)
    tiers, group = allocator.tiers, stored.group
    tiers.fire(stored.entity, "want", need_until=0)
    tiers.fire(stored.entity, "load_begin", need=group.size(*stored.spans[0]), **BUFFERED._asdict())
    segment = allocator.book.new_segment(group)
    copy = allocator.book.new_copy(stored.entity, segment.entity)
    lo, hi = stored.spans[0]
    allocator.book.grant(segment, (lo, hi), "restore_begin", (stored.entity, segment.entity, copy), lo=lo, hi=hi)
    found = refusal(lambda: tiers.fire(stored.entity, "verify"))
    return found, segment.stage in allocator.book.readable[group.index]


def pointers_of_another_life(allocator: HeterogeneousAllocator) -> object:
    """Descriptors that name a generation which is gone."""
    lease = warm(allocator)
    assert allocator.validate(lease)[-1].accepted
    try:
        allocator.read(lease, [dataclasses.replace(p, generation=p.generation + 1) for p in lease.state_data_ptrs])
    except InputError as refused:
        return str(refused).split(":")[1]
    return None


def completion_of_no_step(allocator: HeterogeneousAllocator) -> object:
    lease = warm(allocator)
    return refusal(lambda: allocator.book.fire_lease(lease.request.hits[0], "complete"))


def link_after_both_ends(allocator: HeterogeneousAllocator) -> object:
    """The two ends of a copy that is over hold nothing for each other."""
    cold(allocator, TOKENS)
    segment = next(s for s in allocator.segments() if s.group.name == "state")
    assert allocator.spill(segment).result() is not None
    return segment.entity.holds


# ---- S4 --------------------------------------------------------------------------------------------------------------
def replay_after_a_move(allocator: HeterogeneousAllocator) -> object:
    graph = allocator.graph()
    allocator.graph_row(graph, "capture")
    allocator.system("rebase")
    return refusal(lambda: allocator.graph_row(graph, "replay"))


def replay_of_an_invalid_graph(allocator: HeterogeneousAllocator) -> object:
    graph = allocator.graph()
    allocator.graph_row(graph, "capture")
    allocator.system("rebase")
    allocator.graph_row(graph, "invalidate")
    allocator.graph_row(graph, "recapture")
    return refusal(lambda: allocator.graph_row(graph, "replay"))


def contents_change(allocator: HeterogeneousAllocator) -> object:
    """Contents that leave the padding elsewhere: the graph stays valid, the replay is refused until they are mended."""
    graph = allocator.graph()
    allocator.graph_row(graph, "capture")
    allocator.graph_row(graph, "set_contents", padded=False)
    refused = refusal(lambda: allocator.graph_row(graph, "replay"))
    return refused, graph.stage


def null_after_a_write(allocator: HeterogeneousAllocator) -> object:
    arena = next(iter(allocator.book.arenas.values()))
    arena.bytes[NULL_SLOT] = 9
    arena.reset_null()
    return bool(arena.bytes[NULL_SLOT].any())


def null_in_use(allocator: HeterogeneousAllocator) -> object:
    cold(allocator, TOKENS)
    return any(NULL_SLOT in s.slots for s in allocator.segments() if s.slots is not None)


TABLE_CASES: list[tuple[str, Scenario, Tables, object, dict[str, Any]]] = [
    ("HKV-L1-001", layer_is_skipped, without("pass_l2", "lease.stage == L1"), "lease.stage == L1", {}),
    (
        "HKV-L1-001", last_layer_is_skipped, without("validate", "req.past_l4 == req.held"),
        "req.past_l4 == req.held", {},
    ),
    ("HKV-L1-001", joint_layer_comes_first, without("join", "req.past_l2 == req.held"), "req.past_l2 == req.held", {}),
    ("HKV-L1-006", whole_prompt_is_cached, without("match", "f < req.length"), "f < req.length", {}),
    (
        "HKV-L3-008", made_approximately, without("pass_l1", "req.bounded or not approx"),
        "L1: req.bounded or not approx", {},
    ),
    ("HKV-L2-004", other_format, without("pass_l2", "abi == req.abi"), "L2: abi == req.abi", {"store": True}),
    ("HKV-S1-001", charge_after_all_is_freed, lacking("free", "used -= mem"), True, {}),
    ("HKV-S1-004", full_medium, without("open_object", "implies(medium == HOST, host_used + size <= HOST_CAP)"), True,
     {"host_bytes": 10}),
    ("HKV-S1-006", full_medium, without("open_object", "implies(medium == OBJECT, object_used + size <= OBJECT_CAP)"),
     True, {"media": lambda: {"OBJECT": HostMemory()}, "store_bytes": 10}),
    ("HKV-S1-008", slot_after_a_load, lacking("settle", "io_used -= 1"), 0, {"store": True}),
    ("HKV-S3-006", generation_under_a_lease, without("free", "pins == 0"), True, {}),
    ("HKV-S3-007", stage_after_unmarking, lacking("retire", "was = stage"), True, {}),
    ("HKV-S3-008", second_test_of_the_pins, without("free", "pins == 0"), True, {}),
    ("HKV-S3-010", target_before_the_end, without("verify", "arrived == parts"), ("arrived == parts", False),
     {"store": True}),
    ("HKV-S3-014", completion_of_no_step, without("complete", "lease.in_flight > 0"), "lease.in_flight > 0", {}),
    ("HKV-S3-015", link_after_both_ends, lacking("spill_end", "holds -= 1"), 0, {"store": True}),
    ("HKV-S4-001", replay_after_a_move, lacking("rebase", "topology += 1"), "graph.captured == topology", {}),
    ("HKV-S4-004", replay_of_an_invalid_graph, lacking("recapture", "graph.captured = topology"), None, {}),
    ("HKV-S4-005", contents_change, lacking("set_contents", "graph.padded = padded"), ("graph.padded", "CAPTURED"), {}),
]  # fmt: skip


def options_of(options: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The options of one allocator; ``store`` stands for a disk tier in a folder of its own."""
    made = {name: value() if callable(value) else value for name, value in options.items()}
    if made.pop("store", False):
        made |= {"store": str(folder), "store_bytes": 100_000}
    return made


@pytest.mark.parametrize(
    ("scenario", "edited", "expected", "options"),
    [case[1:] for case in TABLE_CASES],
    ids=[f"{case[0]}-{case[1].__name__}" for case in TABLE_CASES],
)
def test_a_rule_shows_and_its_row_is_why(
    scenario: Scenario, edited: Tables, expected: object, options: dict[str, Any], tmp_path: Path
) -> None:
    for name, tables in (("whole", TABLES), ("edited", edited)):
        allocator = make(tables=tables, **options_of(options, tmp_path / name))
        found = scenario(allocator)
        allocator.close()
        assert (found == expected) is (name == "whole"), f"{name}: {found}"


# ---- What stands in the allocator's code -----------------------------------------------------------------------------
def every_job_on_the_io_pipeline() -> AbstractContextManager[object]:
    begin, submit = Pipelines.__init__, Pipelines.submit
    return patch.multiple(
        Pipelines,
        __init__=lambda self, io, cpu: begin(self, 1, cpu),
        submit=lambda self, name, *work: submit(self, "io", *work),
    )


def reads_under_the_lock() -> AbstractContextManager[object]:
    carry_out = Tiers.carry_out

    def locked(self: Tiers, load: Any) -> None:
        with self.ledger.lock:
            carry_out(self, load)

    return patch.object(Tiers, "carry_out", locked)


def evicts_the_whole_unit() -> AbstractContextManager[object]:
    finish = Evictor.finish

    def all_of_it(self: Evictor, segment: Any) -> Any:
        node = self.book.index.nodes.get(segment.key)
        others = [] if node is None else [s for s in node.segments if s is not None and s is not segment]
        for other in others:
            self.book.fire(other, "retire")
            finish(self, other)
        return finish(self, segment)

    return patch.object(Evictor, "finish", all_of_it)


def finds_any_position() -> AbstractContextManager[object]:
    search = Finder.longest_hit
    return patch.object(
        Finder, "longest_hit", lambda self, has, most, length, grid, *more: search(self, has, most, length, 1, *more)
    )


def a_filter_that_says_yes() -> AbstractContextManager[object]:
    """What a Bloom filter may say of a unit that it has seen once."""
    contents = PrefixIndex.contents

    def claims(self: PrefixIndex, path: Sequence[Any]) -> Any:
        every = range(len(path))
        return contents(self, path) | {g.name: self.as_contents(g.exact, every) for g in self.geometry.groups}

    return patch.object(PrefixIndex, "contents", claims)


def durable_counts_as_ready() -> AbstractContextManager[object]:
    return patch.object(PrefixIndex, "contents", PrefixIndex.stored)


ONE_GROUP = build(msgspec.structs.replace(small_model(), groups=small_model().groups[:1]), UNIT, policy=keep_all())
NEEDED = demand(GEOMETRY, 3 * UNIT)
GATED: dict[str, Any] = {"kind_bytes": NEEDED, "device_bytes": sum(NEEDED.values())}
SLOW_DISK: dict[str, Any] = {"media": None, "store_bytes": 100_000, "io_slots": 1}
CODE_CASES: list[tuple[str, Scenario, Callable[[], AbstractContextManager[object]], object, dict[str, Any]]] = [
    ("HKV-L1-002", position_off_the_grid, finds_any_position, UNIT, {"geometry": ONE_GROUP}),
    ("HKV-L3-004", only_on_disk, durable_counts_as_ready, 0, {"store": True}),
    ("HKV-L3-005", claimed_and_gone, a_filter_that_says_yes, 2 * UNIT, {}),
    ("HKV-S1-010", load_past_a_cap, lambda: patch.object(Tiers, "fail", lambda *a: None), (False, "DURABLE"),
     {"store": True}),
    ("HKV-S1-011", past_the_gate, lambda: patch.object(allocator_module, "gate", lambda *a: None), "HKV-S1-011", GATED),
    ("HKV-S1-012", malformed, lambda: patch.object(allocator_module, "as_tokens", lambda t, most: t), "HKV-S1-012", {}),
    ("HKV-S2-004", rebuild_during_a_load, every_job_on_the_io_pipeline, True, SLOW_DISK),
    ("HKV-S2-005", validation_during_a_load, reads_under_the_lock, True, SLOW_DISK),
    ("HKV-S2-007", others_of_a_prefix, evicts_the_whole_unit, 1, {}),
    ("HKV-S3-013", pointers_of_another_life, lambda: patch("hybridkv_ref.allocator.hits._identity", lambda p: 0),
     "state_data_ptrs", {}),
    ("HKV-S4-007", null_after_a_write, lambda: patch.object(Arena, "reset_null", lambda self: None), False, {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scenario", "removed", "expected", "options"),
    [case[1:] for case in CODE_CASES],
    ids=[f"{case[0]}-{case[1].__name__}" for case in CODE_CASES],
)
def test_a_rule_shows_and_the_code_is_why(
    scenario: Scenario,
    removed: Callable[[], AbstractContextManager[object]],
    expected: object,
    options: dict[str, Any],
    tmp_path: Path,
) -> None:
    for name in ("whole", "without"):
        folder = tmp_path / name
        given = options | ({"media": {"DISK": Gate(str(folder))}} if "media" in options else {})
        with removed() if name == "without" else nullcontext():
            allocator = make(**options_of(given, folder))
            found = scenario(allocator)
            allocator.close()
        assert (found == expected) is (name == "whole"), f"{name}: {found}"


def test_a_tier_takes_only_what_it_can_give_back(tmp_path: Path) -> None:
    """A kind whose rows know no way back is not spilled; a tier that does not ask keeps what nobody can read."""
    tables = rowless("recurrent_state", "restore_begin")
    for asks in (True, False):
        allocator = make(tmp_path / str(asks), tables=tables)
        group = GEOMETRY.group("state")
        assert group.index not in allocator.tiers.out
        allocator.tiers.out[group.index] = allocator.ledger.kernel(allocator.ledger.event_id(group.kind, "spill_begin"))
        with nullcontext() if asks else patch.object(Objects, "restores", lambda self, group: True):
            assert tier_without_a_way_back(allocator) is asks
        allocator.close()


@pytest.mark.parametrize("missing", ["rope", "lse"])
def test_a_layout_that_is_declared_in_part_equals_none(missing: str) -> None:
    group = GEOMETRY.group("csa")
    declared = {name: value for name, value in describe(group).declared.items() if name != missing}
    one, other = describe(group, declared), describe(group, declared)
    assert one.identifier() != other.identifier()
    with patch.object(Descriptor, "missing", lambda self: []):
        assert one.identifier() == other.identifier()


# ---- All of them -----------------------------------------------------------------------------------------------------
PROVED = {
    "HKV-S2-001": "test_planted_faults.py: a row that may change another kind is seen by the proofs of separation",
    "HKV-S2-002": "test_induction.py: a row that leads elsewhere breaks allowed_edges",
    "HKV-S2-003": "test_planted_faults.py: as HKV-S2-001",
}


def test_every_must_of_the_layers_and_safeguards_is_tried() -> None:
    """In the allocator, the decoder, an engine with a planted fault, or a trace with its correction next to it."""
    tried = {case[0] for cases in (CASES, TABLE_CASES, CODE_CASES) for case in cases}
    tried |= {rule for one in WITNESSES for rule in one.ids}
    tried |= {mutant.rule for mutant in MUTANTS.values()}
    tried |= {fault.rule for fault in FAULTS.values()}
    musts = {
        name for name, rule in load_rules().items()
        if rule.level == "MUST" and re.fullmatch(r"HKV-[LS][1-4]-\d+", name)
    }  # fmt: skip
    assert len(musts) > 60
    assert musts - tried == PROVED.keys(), sorted(musts - tried)
