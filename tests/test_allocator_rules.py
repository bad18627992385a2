"""Each MUST of the four layers and the safeguards: a scenario that its guard refuses, and that goes through without it.

The tables are the only place of the rules, so a guard is taken out of the *table*; the allocator's code stays as it is.
A scenario gives what refused it, or None.
"""

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from allocator_tools import GEOMETRY, TABLES, OffByEight, cold, direct, hit, idle, make, prompt, run

from hybridkv_ref.allocator import HeterogeneousAllocator, HitLease, NotAdmitted, build, demand, size_caps
from hybridkv_ref.allocator.abi import DECLARED, describe, unserved
from hybridkv_ref.allocator.admission import gate
from hybridkv_ref.allocator.arena import NULL_SLOT
from hybridkv_ref.allocator.lockstep import UNIT, keep_all, small_model
from hybridkv_ref.allocator.media import Files
from hybridkv_ref.allocator.refinement import differences
from hybridkv_ref.decoder_geometry import Descriptor
from hybridkv_ref.errors import InputError
from hybridkv_ref.io_unit import BUFFERED
from hybridkv_ref.layouts import load
from hybridkv_ref.machine import Refused
from hybridkv_ref.tables import Tables


def without(rows: str, *guards: str) -> Tables:
    """The tables without these guards of some rows, in every kind that has them."""
    dropped = 0
    events = []
    for event in TABLES.events:
        kept = tuple(g for g in event.guards if event.row not in rows.split() or g.text not in guards)
        dropped += len(event.guards) - len(kept)
        events.append(dataclasses.replace(event, guards=kept))
    assert dropped, f"{rows} has no guard {guards}"
    return dataclasses.replace(TABLES, events=tuple(events))


Scenario = Callable[[HeterogeneousAllocator], str | None]
TOKENS = prompt("AAA", 3 * UNIT + 3)


def warm(allocator: HeterogeneousAllocator) -> HitLease:
    """A pinned hit of two units."""
    cold(allocator, TOKENS)
    return allocator.pin(allocator.match(prompt("AAX", 3 * UNIT)))


def refusal(action: Callable[[], object]) -> str | None:
    try:
        action()
    except Refused as refused:
        return refused.guard.text
    return None


def verdict(allocator: HeterogeneousAllocator, lease: HitLease) -> str | None:
    """The guard of the first layer that refused."""
    found = [v for v in allocator.validate(lease) if not v.accepted]
    return f"{found[0].layer}: {found[0].guard}" if found else None


# ---- L1 --------------------------------------------------------------------------------------------------------------
def other_generation(allocator: HeterogeneousAllocator) -> str | None:
    """Evicted and written again with another prefix between match and pin, as the same record."""
    cold(allocator, prompt("A", UNIT + 1))
    found = allocator.match(prompt("AB", 2 * UNIT))
    assert found.tokens == UNIT
    idle(allocator)
    allocator.evictor.empty()
    cold(allocator, prompt("B", UNIT + 1))
    lease = allocator.pin(found)
    return verdict(allocator, lease)


def marked_after_pin(allocator: HeterogeneousAllocator) -> str | None:
    lease = warm(allocator)
    allocator.transition(lease.segments[0], "retire")
    return verdict(allocator, lease)


def evicted_too_soon(allocator: HeterogeneousAllocator) -> str | None:
    """The schedule gives a segment up before the request expects to end."""
    cold(allocator, TOKENS)
    for segment in allocator.segments():
        if segment.entity.keep_until:
            allocator.transition(segment, "reschedule", until=9)
    return verdict(allocator, allocator.pin(allocator.match(TOKENS, need_until=10)))


def other_weights(allocator: HeterogeneousAllocator) -> str | None:
    cold(allocator, TOKENS)
    allocator.system("new_model")
    return verdict(allocator, allocator.pin(allocator.match(TOKENS)))


def unknown_successor(allocator: HeterogeneousAllocator) -> str | None:
    """A group that looks ahead, and a search that forgot it."""
    cold(allocator, TOKENS)
    allocator.requests.ahead["window"] = 4
    return verdict(allocator, allocator.pin(allocator.match(TOKENS)))


def other_group(allocator: HeterogeneousAllocator) -> str | None:
    cold(allocator, TOKENS)
    found = allocator.match(TOKENS)
    found.request.records[0].group__swa_window = 77
    return verdict(allocator, allocator.pin(found))


def gap(allocator: HeterogeneousAllocator) -> str | None:
    """A candidate in the middle of a range is forgotten."""
    cold(allocator, TOKENS)
    found = allocator.match(TOKENS)
    middle = next(
        one for one in found.request.found if one.segment.group.name == "csa" and one.segment.entity.start == UNIT
    )
    allocator.book.fire_lease(middle, "drop")
    found.request.found.remove(middle)
    lease = allocator.pin(found)
    return lease.refusals[0].split("'")[1] if lease.refusals else None


def other_tail(allocator: HeterogeneousAllocator) -> str | None:
    """The tail of an earlier position: splice and boundary do not meet."""
    cold(allocator, TOKENS)
    found = allocator.match(TOKENS)
    request = found.request
    wrong = next(s for s in allocator.segments() if s.group.name == "tail" and s.entity.end == UNIT)
    right = next(one for one in request.found if one.segment.group.name == "tail")
    allocator.book.fire_lease(right, "drop")
    request.found.remove(right)
    allocator.hits.find(request, [(wrong, wrong.key)])
    return verdict(allocator, allocator.pin(found))


# ---- L2 to L4 --------------------------------------------------------------------------------------------------------
def other_layout(allocator: HeterogeneousAllocator) -> str | None:
    """A reader whose descriptor differs in one field."""
    group = GEOMETRY.group("csa")
    other = describe(group, {"rope": "relative", "lse": "natural"}).identifier()
    assert other != allocator.book.abi[group.index]
    cold(allocator, TOKENS)
    found = allocator.match(TOKENS)
    found.request.records[allocator.ledger.lane_of["csa"].index].abi__compressed_kv = other
    return verdict(allocator, allocator.pin(found))


def group_is_missing(allocator: HeterogeneousAllocator) -> str | None:
    """One group holds nothing for the position that the others can serve."""
    cold(allocator, TOKENS)
    found = allocator.match(TOKENS)
    for lease in [one for one in found.request.found if one.segment.group.name == "window"]:
        allocator.book.fire_lease(lease, "drop")
        found.request.found.remove(lease)
    return verdict(allocator, allocator.pin(found))


def misaligned_base(allocator: HeterogeneousAllocator) -> str | None:
    """An arena whose base address misses the layout's alignment by 8 bytes."""
    arena = allocator.book.arena(GEOMETRY.group("window"))
    blocks, stride = arena.bytes.shape
    memory = torch.zeros(blocks * stride + 64, dtype=torch.uint8)
    start = -memory.data_ptr() % 16 + 8
    arena.bytes = memory[start : start + blocks * stride].view(blocks, stride)
    return verdict(allocator, warm(allocator))


# ---- S1 --------------------------------------------------------------------------------------------------------------
def fill_pool(allocator: HeterogeneousAllocator) -> str | None:
    """Requests that run until memory is spent: none of what they hold may go."""
    for letter in "ABCDEFGH":
        tokens = prompt(letter * 3, 3 * UNIT + 1)
        request, _ = hit(allocator, tokens)
        try:
            run(allocator, request, tokens)
        except Refused as refused:
            return refused.guard.text
        except MemoryError:
            return None
    return None


def load_without_memory(allocator: HeterogeneousAllocator) -> str | None:
    """A load whose targets do not fit beside what is held."""
    cold(allocator, TOKENS)
    (segment,) = [s for s in allocator.segments() if s.group.name == "state" and s.entity.end == UNIT]
    stored = allocator.spill(segment).result()
    assert stored is not None
    idle(allocator)
    allocator.evictor.empty()
    try:
        allocator.limit(1)
        allocator.tiers.fire(stored.entity, "want", need_until=0)
        need = segment.group.size(0, UNIT)
        return refusal(lambda: allocator.tiers.fire(stored.entity, "load_begin", need=need, **BUFFERED._asdict()))
    finally:
        allocator.limit(allocator.first_bytes)


def second_load(allocator: HeterogeneousAllocator) -> str | None:
    """Two loads at once where there is one slot."""
    cold(allocator, TOKENS)
    found = [allocator.spill(s).result() for s in allocator.segments() if s.group.name == "state"]
    one, other = (stored.entity for stored in found[:2] if stored is not None)
    idle(allocator)
    allocator.evictor.empty()
    for entity in (one, other):
        allocator.tiers.fire(entity, "want", need_until=0)
    allocator.tiers.fire(one, "load_begin", need=48, **BUFFERED._asdict())
    return refusal(lambda: allocator.tiers.fire(other, "load_begin", need=48, **BUFFERED._asdict()))


def out_of_turn(allocator: HeterogeneousAllocator) -> str | None:
    """The second in the queue begins first."""
    cold(allocator, TOKENS)
    found = [allocator.spill(s).result() for s in allocator.segments() if s.group.name == "state"]
    one, other = (stored.entity for stored in found[:2] if stored is not None)
    idle(allocator)
    allocator.evictor.empty()
    for entity in (one, other):
        allocator.tiers.fire(entity, "want", need_until=0)
    return refusal(lambda: allocator.tiers.fire(other, "load_begin", need=48, **BUFFERED._asdict()))


def full_store(allocator: HeterogeneousAllocator) -> str | None:
    """A copy larger than the store."""
    cold(allocator, TOKENS)
    segment = next(s for s in allocator.segments() if s.group.name == "window")
    stored = allocator.spill(segment).result()
    return None if stored is not None else "no room"


def wanted_too_long(allocator: HeterogeneousAllocator) -> str | None:
    """A durable copy that is about to be evicted."""
    cold(allocator, TOKENS)
    stored = allocator.spill(next(s for s in allocator.segments() if s.group.name == "window")).result()
    assert stored is not None
    allocator.tiers.fire(stored.entity, "reschedule_object", until=9)
    return refusal(lambda: allocator.tiers.fire(stored.entity, "want", need_until=10))


def unserved_request(allocator: HeterogeneousAllocator) -> str | None:
    """Layouts that no kernel serves together."""
    allocator.unserved = "made up"
    try:
        request = allocator.match(TOKENS).request
    except NotAdmitted as refused:
        return "req.kernel" if refused.rule == "HKV-L2-002" else refused.rule
    allocator.abort(request)
    return None


# ---- S3 --------------------------------------------------------------------------------------------------------------
def read_unchecked(allocator: HeterogeneousAllocator) -> str | None:
    lease = warm(allocator)
    return refusal(lambda: allocator.hits.each(lease.request, "read"))


def free_pinned(allocator: HeterogeneousAllocator) -> str | None:
    lease = warm(allocator)
    return refusal(lambda: allocator.deallocate(lease.segments[0]))


def pin_marked(allocator: HeterogeneousAllocator) -> str | None:
    cold(allocator, TOKENS)
    found = allocator.match(TOKENS)
    allocator.transition(found.request.found[0].segment, "retire")
    lease = allocator.pin(found)
    return lease.refusals[0].split("'")[1] if lease.refusals else None


def retire_held(allocator: HeterogeneousAllocator) -> str | None:
    """Evicted while a copy reads it."""
    cold(allocator, TOKENS)
    segment = next(s for s in allocator.segments() if s.group.name == "csa")
    tiers = allocator.tiers
    opened = tiers.open(segment.group, [segment])
    assert opened is not None
    copy = allocator.book.new_copy(segment.entity, opened[0])
    tiers.hand(segment.group, "spill_begin", segment.entity, opened[0], copy, segment)
    return refusal(lambda: allocator.deallocate(segment))


def free_in_flight(allocator: HeterogeneousAllocator) -> str | None:
    """The request is gone, its step is not."""
    cold(allocator, TOKENS)
    request, lease = hit(allocator, TOKENS)
    segment = lease.segments[0]
    allocator.dispatch(lease)
    allocator.finish(request)
    idle(allocator)  # a copy that still runs would hold it too
    return refusal(lambda: allocator.deallocate(segment))


def move_pinned(allocator: HeterogeneousAllocator) -> str | None:
    lease = warm(allocator)
    return refusal(lambda: allocator.transition(lease.segments[0], "move", off=16))


def shorten_life(allocator: HeterogeneousAllocator) -> str | None:
    lease = warm(allocator)
    return refusal(lambda: allocator.transition(lease.segments[0], "reschedule", until=3))


def draft_is_committed(allocator: HeterogeneousAllocator) -> str | None:
    request, _ = hit(allocator, prompt("A", UNIT))
    segment = allocator.allocate((0, UNIT), "swa_window", request=request)
    segment.entity.committed = 2
    allocator.append(segment, UNIT, request=request)
    return refusal(lambda: allocator.commit(segment, request=request))


def tokens_twice(allocator: HeterogeneousAllocator) -> str | None:
    """A token is applied to a state a second time."""
    request, _ = hit(allocator, prompt("A", UNIT))
    segment = allocator.allocate((0, UNIT), "recurrent_state", request=request)
    allocator.append(segment, 3, request=request)
    return refusal(lambda: allocator.transition(segment, "append", request=request, at=2, n=1))


# ---- S4 --------------------------------------------------------------------------------------------------------------
def replay_moved(allocator: HeterogeneousAllocator) -> str | None:
    graph = allocator.graph()
    allocator.graph_row(graph, "capture")
    allocator.system("rebase")
    return refusal(lambda: allocator.graph_row(graph, "replay"))


def move_under_replay(allocator: HeterogeneousAllocator) -> str | None:
    graph = allocator.graph()
    allocator.graph_row(graph, "capture")
    allocator.graph_row(graph, "replay")
    return refusal(lambda: allocator.system("rebase"))


def padding_elsewhere(allocator: HeterogeneousAllocator) -> str | None:
    graph = allocator.graph()
    allocator.graph_row(graph, "capture")
    allocator.graph_row(graph, "set_contents", padded=False)
    return refusal(lambda: allocator.graph_row(graph, "replay"))


def misalign(allocator: HeterogeneousAllocator) -> None:
    """From now on the disk is read and written by direct I/O, through buffers that are off its unit."""
    media = allocator.tiers.media
    assert isinstance(media, dict)
    disk = media["DISK"]
    assert isinstance(disk, Files)
    media["DISK"] = direct(Path(disk.root), OffByEight)


def told(allocator: HeterogeneousAllocator, how: str) -> str | None:
    """What the outcomes of one sort say."""
    return next((outcome.partition(": ")[2] for outcome in allocator.tiers.outcomes if outcome.startswith(how)), None)


def spill_of_a_misaligned_buffer(allocator: HeterogeneousAllocator) -> str | None:
    misalign(allocator)
    cold(allocator, TOKENS)
    idle(allocator)
    return told(allocator, "spill refused")


def load_into_a_misaligned_buffer(allocator: HeterogeneousAllocator) -> str | None:
    cold(allocator, TOKENS)
    idle(allocator)
    allocator.evictor.empty()
    before = len(allocator.tiers.objects)
    misalign(allocator)
    for done in allocator.prefetch(TOKENS):
        done.result(30)
    found = told(allocator, "load skipped")
    assert found is None or len(allocator.tiers.objects) == before  # what is refused is not lost
    return found


SMALL_DISK: dict[str, Any] = {"store_bytes": 10}
ONE_SLOT: dict[str, Any] = {"io_slots": 1}
WINDOW_GUARDS = tuple(g.text for g in TABLES.event("request.join").guards if "swa_window" in g.text)
CASES: list[tuple[str, Scenario, str, tuple[str, ...], str, dict[str, Any]]] = [
    ("HKV-L1-004", other_generation, "pass_l1", ("lease.seen == generation",), "L1: lease.seen == generation", {}),
    ("HKV-S3-002", other_generation, "pass_l1", ("lease.seen == generation",), "L1: lease.seen == generation", {}),
    ("HKV-L1-004", marked_after_pin, "pass_l1", ("stage == READY",), "L1: stage == READY", {}),
    (
        "HKV-L1-005", evicted_too_soon, "pass_l1", ("req.need_until <= keep_until",),
        "L1: req.need_until <= keep_until", {},
    ),
    ("HKV-L1-005", wanted_too_long, "want", ("need_until <= keep_until",), "need_until <= keep_until", {}),
    (
        "HKV-L1-005", shorten_life, "reschedule", ("pins == 0 or until >= keep_until",),
        "pins == 0 or until >= keep_until", {},
    ),
    ("HKV-KEY-002", other_weights, "pass_l1", ("epoch == req.epoch",), "L1: epoch == req.epoch", {}),
    (
        "HKV-KEY-004", unknown_successor, "pass_l1", ("end + req.ahead <= req.matched",),
        "L1: end + req.ahead <= req.matched", {},
    ),
    ("HKV-L3-001", other_group, "pass_l1", ("group == req.group",), "L1: group == req.group", {}),
    ("HKV-L1-007", gap, "pin", ("req.hits == 0 or start == req.cov",), "req.hits == 0 or start == req.cov", {}),
    ("HKV-TAIL-001", other_tail, "pass_l1", ("mark == req.bound",), "L1: mark == req.bound", {}),
    ("HKV-L2-001", other_layout, "pass_l2", ("abi == req.abi",), "L2: abi == req.abi", {}),
    ("HKV-L2-002", unserved_request, "match start_cold", ("req.kernel",), "req.kernel", {}),
    ("HKV-L3-001", group_is_missing, "join", WINDOW_GUARDS, f"L3: {WINDOW_GUARDS[0]}", {}),
    ("HKV-L4-001", misaligned_base, "pass_l4", ("slack == 0",), "L4: slack == 0", {}),
    (
        "HKV-L4-002", spill_of_a_misaligned_buffer, "open_object", ("not direct or buffer == 0",),
        "not direct or buffer == 0", {},
    ),
    (
        "HKV-L4-002", load_into_a_misaligned_buffer, "load_begin", ("not direct or buffer == 0",),
        "not direct or buffer == 0", {},
    ),
    (
        "HKV-S1-002", fill_pool, "admit", ("used + size <= CAP",), "used + size <= CAP",
        {"kind_bytes": {"swa_window": 600}},
    ),
    (
        "HKV-S1-003", fill_pool, "admit", ("gpu_used + gpu_reserved + size + RESERVE <= GPU_CAP",),
        "gpu_used + gpu_reserved + size + RESERVE <= GPU_CAP", {"device_bytes": 3_000, "kind_bytes": dict.fromkeys(
            (g.kind for g in GEOMETRY.groups), 100_000)},
    ),
    (
        "HKV-S1-005", full_store, "open_object", ("implies(medium == DISK, disk_used + size <= DISK_CAP)",),
        "no room", SMALL_DISK,
    ),
    ("HKV-S1-007", second_load, "load_begin", ("io_used + 1 <= IO_CAP",), "io_used + 1 <= IO_CAP", ONE_SLOT),
    ("HKV-LIVE-005", out_of_turn, "load_begin", ("ticket == serving",), "ticket == serving", {}),
    (
        "HKV-S1-009", load_without_memory, "load_begin", ("gpu_used + gpu_reserved + need <= GPU_CAP",),
        "gpu_used + gpu_reserved + need <= GPU_CAP", {},
    ),
    ("HKV-S3-001", read_unchecked, "read", ("lease.stage == L4", "req.stage == VALIDATED"), "lease.stage == L4", {}),
    ("HKV-S3-004", free_pinned, "free", ("pins == 0",), "pins == 0", {}),
    ("HKV-S3-004", move_pinned, "move", ("pins == 0",), "pins == 0", {}),
    ("HKV-S3-005", pin_marked, "pin", ("stage in {READY, MISALIGNED}",), "stage in {READY, MISALIGNED}", {}),
    ("HKV-S3-009", retire_held, "retire", ("holds == 0",), "holds == 0", {}),
    ("HKV-S3-016", free_in_flight, "free", ("steps == 0",), "steps == 0", {}),
    ("HKV-S3-011", draft_is_committed, "commit", ("end <= committed",), "end <= committed", {}),
    ("HKV-REC-006", tokens_twice, "append", ("at == end",), "at == end", {}),
    ("HKV-S4-002", replay_moved, "replay", ("graph.captured == topology",), "graph.captured == topology", {}),
    ("HKV-S4-003", move_under_replay, "rebase", ("replays == 0",), "replays == 0", {}),
    ("HKV-S4-006", padding_elsewhere, "replay", ("graph.padded",), "graph.padded", {}),
]  # fmt: skip


@pytest.mark.parametrize(
    ("scenario", "row", "guards", "expected", "options"),
    [case[1:] for case in CASES],
    ids=[f"{case[0]}-{case[1].__name__}" for case in CASES],
)
def test_a_rule_refuses_and_its_guard_is_why(
    scenario: Scenario, row: str, guards: tuple[str, ...], expected: str, options: dict[str, Any], tmp_path: Path
) -> None:
    for name, tables, outcome in (("whole", TABLES, expected), ("without", without(row, *guards), None)):
        allocator = make(tmp_path / name, tables=tables, **options)
        found = scenario(allocator)
        allocator.close()
        assert (found == outcome) if outcome else (found != expected), f"{name}: {found}"


# ---- What is refused before anything is allocated --------------------------------------------------------------------
class Endless:
    """Says that it is long, and fails if anything looks at it."""

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, at: int) -> int:
        raise AssertionError("looked at")

    def __iter__(self) -> Any:
        raise AssertionError("looked at")


@pytest.mark.parametrize(
    "tokens",
    [Endless(), 7, None, [], "text", b"bytes", [1.5], [[1], [2]], [[1], [2, 3]], ["a"], [None], range(10_000_000)],
)
def test_a_malformed_or_long_prompt_is_refused_before_anything_is_done(tokens: Any) -> None:
    allocator = make(max_tokens=1000)
    with pytest.raises(NotAdmitted, match=r"\(HKV-S1-012\)$") as caught:
        allocator.match(tokens)
    assert "\n" not in str(caught.value)
    assert allocator.ledger.fired == 0
    assert allocator.requests.count == 0


def test_a_bad_time_or_salt_is_refused() -> None:
    allocator = make()
    wrong: list[dict[str, Any]] = [{"need_until": "soon"}, {"salt": "text"}]
    for options in wrong:
        with pytest.raises(NotAdmitted, match="HKV-S1-012"):
            allocator.match(TOKENS, **options)
    assert allocator.ledger.fired == 0


class Peaks:
    """The most bytes that one request holds of each kind, at any row."""

    def __init__(self) -> None:
        self.request: Any = None
        self.peaks: dict[str, int] = {}

    def limits(self, constants: Any) -> None:
        """Never."""

    def before(self, event_id: str) -> None:
        """Nothing."""

    def after(self, event_id: str, lane: int, entities: Any, inputs: Any) -> None:
        if self.request is not None:
            held: dict[str, int] = {}
            for one in (*self.request.kept, *self.request.writing, *self.request.hits):
                held[one.segment.kind] = held.get(one.segment.kind, 0) + one.segment.nbytes
            self.peaks = {k: max(held.get(k, 0), self.peaks.get(k, 0)) for k in held.keys() | self.peaks.keys()}


@pytest.mark.parametrize("length", [1, 5, UNIT, UNIT + 1, 3 * UNIT, 5 * UNIT - 1, 9 * UNIT + 2])
def test_sizing_and_gate_use_one_formula_and_it_is_exact(length: int) -> None:
    """A pool of the size that the formula gives runs the request; one block less, and it is refused at the gate."""
    needed = demand(GEOMETRY, length)
    tokens = prompt("ABCDEFGHIJ", length)
    watch = Peaks()
    allocator = make(kind_bytes=needed, device_bytes=sum(needed.values()), observer=watch)
    request, _ = hit(allocator, tokens)
    watch.request = request
    run(allocator, request, tokens)
    watch.after("", 0, (), {})
    assert watch.peaks == {kind: amount for kind, amount in needed.items() if amount}
    allocator.finish(request)
    for kind, amount in needed.items():
        block = min(g.block_bytes for g in GEOMETRY.groups if g.kind == kind)
        if not amount:
            continue
        with pytest.raises(NotAdmitted, match="HKV-S1-011"):
            gate(GEOMETRY, {**needed, kind: amount - block}, sum(needed.values()), length)
    with pytest.raises(NotAdmitted, match="HKV-S1-011"):
        gate(GEOMETRY, needed, sum(needed.values()) - 1, length)


def test_a_request_that_would_not_fit_an_empty_pool_leaves_no_trace() -> None:
    needed = demand(GEOMETRY, 3 * UNIT)
    allocator = make(kind_bytes=needed, device_bytes=sum(needed.values()))
    with pytest.raises(NotAdmitted, match=r"needs=.*cap=.*\(HKV-S1-011\)"):
        allocator.match(prompt("ABCD", 4 * UNIT))
    assert allocator.requests.running == {}
    assert allocator.segments() == []
    allocator.finish(hit(allocator, prompt("ABC", 3 * UNIT))[0])


@pytest.mark.parametrize("units", [1, 2, 3, 5])
def test_a_hit_is_counted_exactly(units: int) -> None:
    """A second request with a hit of so many units runs in the pool that the formula sizes for it."""
    length = 6 * UNIT
    caps = size_caps(GEOMETRY, length)
    allocator = make(kind_bytes=caps, device_bytes=sum(caps.values()))
    family = "ABCDEF"
    cold(allocator, prompt(family[:units], units * UNIT + 1))
    tokens = prompt(family[:units] + "XYZXYZ"[: 6 - units], length)
    request, lease = hit(allocator, tokens)
    assert lease.tokens == units * UNIT
    run(allocator, request, tokens)
    held = dict.fromkeys(caps, 0)
    for one in (*request.hits, *request.kept, *request.writing):
        held[one.segment.kind] += one.segment.nbytes
    assert all(held[kind] <= demand(GEOMETRY, length, units * UNIT, units * UNIT)[kind] <= caps[kind] for kind in caps)
    allocator.finish(request)


def test_a_unit_is_written_by_every_group_or_by_none() -> None:
    """Memory runs out in the middle of a unit: what was taken for it is given back."""
    allocator = make(device_bytes=2_200, kind_bytes=dict.fromkeys((g.kind for g in GEOMETRY.groups), 10_000))
    request, _ = hit(allocator, prompt("A", UNIT))
    other, _ = hit(allocator, prompt("B", UNIT))
    allocator.extend(request, UNIT)
    third, _ = hit(allocator, prompt("C", UNIT))
    allocator.extend(other, UNIT)
    before = allocator.ledger.pool.gpu_used

    def until_full() -> None:
        for family in "DEFGH":
            request, _ = hit(allocator, prompt(family, UNIT))
            started.append(request)
            allocator.extend(request, UNIT)

    started = [third]
    with pytest.raises(Refused, match="GPU_CAP"):
        until_full()
    assert allocator.ledger.pool.gpu_used >= before
    assert started[-1].writing == []


# ---- Layer 2 and 4 by themselves -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "change", ["entries", "heads", "dim", "stride", "layers", "ratio", "halo", "span", "layout", "declared"]
)
def test_two_descriptors_are_one_only_if_every_field_is(change: str) -> None:
    mine = describe(GEOMETRY.group("csa"))
    value: Any = getattr(mine, change)
    other = (
        load("fp32")
        if change == "layout"
        else {"rope": "x", "lse": "natural"}
        if change == "declared"
        else (value or 0) + 1
    )
    assert msgspec.structs.replace(mine, **{change: other}).identifier() != mine.identifier()
    assert describe(GEOMETRY.group("csa")).identifier() == mine.identifier()


def test_a_partly_declared_layout_equals_none() -> None:
    partial = describe(GEOMETRY.group("csa"), {"rope": "absolute"})
    assert partial.missing() == ["lse"]
    assert len({partial.identifier(), partial.identifier(), describe(GEOMETRY.group("csa")).identifier()}) == 3


def test_a_combination_that_no_kernel_serves_is_refused_at_admission() -> None:
    window = GEOMETRY.group("window")
    assert unserved(GEOMETRY.groups, "cpu") is None
    for layout, options, reason in (
        ("bf16_nhd", {"heads": 2, "dim": 4}, "no kernel reads layout bf16_nhd with the vectors k, v"),
        ("state_fp32", {"dim": 2}, "layout state_fp32 stores no window"),
        ("index_fp8_132", {}, "layout index_fp8_132 stores no window"),
    ):
        page = load(layout).page(window.page.entries, **options)
        why = unserved(build(small_model(), pages={"window": page}, policy=keep_all()).groups, "cpu")
        assert why is not None
        assert reason in why
    page = load("bf16_nhd").page(4, heads=2, dim=4)
    allocator = make(geometry=build(small_model(), pages={"window": page}, policy=keep_all()))
    with pytest.raises(NotAdmitted, match=r"bf16_nhd.*req\.kernel.*\(HKV-L2-002\)"):
        allocator.match(TOKENS)
    assert allocator.segments() == []
    assert allocator.ledger.pool.gpu_used == 0


def test_heads_of_two_sizes_in_one_layer_cannot_be_merged() -> None:
    model = small_model()
    groups = tuple(
        msgspec.structs.replace(g, layer_ids=(0, 1), entry_bytes={"bf16": 32} if g.name == "window" else g.entry_bytes)
        if g.name in ("window", "csa") else g
        for g in model.groups
    )  # fmt: skip
    groups = tuple(msgspec.structs.replace(g, layer_ids=(0, 1)) if g.name == "tail" else g for g in groups)
    why = unserved(build(msgspec.structs.replace(model, groups=groups)).groups, "cpu")
    assert why is not None
    assert "16 and 8 elements" in why


def test_what_is_declared_of_scores_is_what_the_decoder_stores() -> None:
    """Folding adds no bias, so a stored score has it."""
    folded = Descriptor(layout="state_fp32", dim=8, tile=8, scale_rule="", ratio=4)
    assert DECLARED["state"]["bias"] == ("included" if folded.bias_in_score else "excluded")


# ---- Pointers, null slot, order of eviction --------------------------------------------------------------------------
def test_pointers_lead_to_the_bytes_and_only_those_of_the_lease_are_accepted() -> None:
    allocator = make()
    cold(allocator, TOKENS)
    lease = allocator.pin(allocator.match(TOKENS))
    other = allocator.pin(allocator.match(prompt("AAX", 2 * UNIT + 1)))
    assert allocator.validate(lease)[-1].accepted
    for wrong in (
        other.state_data_ptrs,
        lease.state_data_ptrs[1:],
        [dataclasses.replace(p, generation=9) for p in lease.state_data_ptrs],
    ):
        with pytest.raises(InputError, match="not its own"):
            allocator.read(lease, wrong)
    for pointer, segment in zip(allocator.read(lease), lease.segments, strict=True):
        arena = allocator.book.arena(segment.group)
        for layer, offsets in enumerate(pointer.offset):
            for block, offset in enumerate(offsets.tolist()):
                start = (pointer.base + offset - arena.base) // segment.group.page.stride
                assert segment.slots is not None
                assert segment.slots[layer, block] == start != NULL_SLOT
    allocator.finish(lease.request)
    with pytest.raises(InputError, match="not its own"):
        allocator.read(lease)


def test_the_null_slot_is_nobodys_and_is_reset() -> None:
    allocator = make()
    cold(allocator, TOKENS)
    for segment in allocator.segments():
        assert segment.slots is not None
        assert NULL_SLOT not in segment.slots
    arena = next(iter(allocator.book.arenas.values()))
    arena.bytes[NULL_SLOT] = 9
    arena.reset_null()
    assert not arena.bytes[NULL_SLOT].any()


def test_the_policy_says_who_goes_first() -> None:
    def gone_first(ranks: dict[str, int]) -> str:
        policy = keep_all()
        kinds = {
            k: msgspec.structs.replace(p, evict=ranks.get(k, 50), evict_durable=ranks.get(k, 50))
            for k, p in policy.kinds.items()
        }
        allocator = make(geometry=build(small_model(), policy=msgspec.structs.replace(policy, kinds=kinds)))
        cold(allocator, TOKENS)
        allocator.evictor.make_room("*", None)
        return next(kind for kind, count in allocator.evictor.evicted.items() if count)

    assert gone_first({"swa_window": 1}) == "swa_window"
    assert gone_first({"uncompressed_tail": 1}) == "uncompressed_tail"


def test_the_least_recently_used_goes_first() -> None:
    allocator = make()
    cold(allocator, prompt("A", UNIT + 1))
    cold(allocator, prompt("B", UNIT + 1))
    allocator.finish(hit(allocator, prompt("AX", UNIT + 2))[0])
    a, b = (
        next(s for s in allocator.segments() if s.group.name == "window" and s.last_accessed == at)
        for at in sorted(s.last_accessed for s in allocator.segments() if s.group.name == "window")
    )
    assert allocator.evictor.make_room("swa_window", None)
    assert (a.slots is None, b.slots is None) == (True, False)


# ---- Disk work blocks nobody -----------------------------------------------------------------------------------------
class Gate(Files):
    """Files whose reads wait until they are let through."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.opened, self.reading = threading.Event(), threading.Event()

    def read(self, name: str) -> Any:
        self.reading.set()
        assert self.opened.wait(30)
        return super().read(name)


def test_a_load_in_progress_blocks_no_validation(tmp_path: Path) -> None:
    gate = Gate(str(tmp_path))
    allocator = make(media={"DISK": gate}, store_bytes=100_000)
    cold(allocator, prompt("A", UNIT + 1))
    idle(allocator)
    allocator.evictor.empty()
    cold(allocator, prompt("B", UNIT + 1))
    loads = allocator.prefetch(prompt("AX", UNIT + 2))
    assert gate.reading.wait(30)
    request, lease = hit(allocator, prompt("BX", UNIT + 2))
    assert lease.tokens == UNIT
    assert not any(load.done() for load in loads)
    allocator.finish(request)
    gate.opened.set()
    assert all(load.result(30) for load in loads)
    request, lease = hit(allocator, prompt("AX", UNIT + 2))
    assert lease.tokens == UNIT
    allocator.finish(request)
    allocator.close()


def test_the_queue_of_loads_is_bounded(tmp_path: Path) -> None:
    gate = Gate(str(tmp_path))
    allocator = make(media={"DISK": gate}, store_bytes=100_000, most_waiting=2)
    cold(allocator, TOKENS)
    idle(allocator)
    allocator.evictor.empty()
    assert len(allocator.prefetch(TOKENS)) == 2
    gate.opened.set()
    allocator.drain()
    allocator.close()


def test_a_row_that_the_tables_do_not_have_is_illegal() -> None:
    allocator = make()
    cold(allocator, TOKENS)
    segment = allocator.segments()[0]
    with pytest.raises(InputError, match="no such row"):
        allocator.transition(segment, "vanish")
    with pytest.raises(Refused) as caught:
        allocator.transition(segment, "free")
    assert caught.value.values == {"stage": segment.stage}
    assert "HKV-" in str(caught.value)


def test_what_is_only_cached_never_keeps_a_request_from_running() -> None:
    """The pool is full of entries that the policy evicts last; windows, which it evicts first, still find room."""
    caps = size_caps(GEOMETRY, 3 * UNIT)
    allocator = make(device_bytes=sum(caps.values()))
    for family in ("AAA", "BBB", "CCC", "ABC", "CBA"):
        cold(allocator, prompt(family, 3 * UNIT))
    assert sum(allocator.evictor.evicted.values()) > 0
    assert differences(allocator) == []
