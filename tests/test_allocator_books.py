"""The allocator's books: records of ended requests, ranks of eviction, promises that outlive a process, whole steps."""

import dataclasses
import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from allocator_tools import GEOMETRY, TABLES, check, cold, hit, idle, make, prompt, run
from safetensors.torch import save
from test_allocator_faults import Faulty

from hybridkv_ref.allocator import CacheSegment, Geometry, HeterogeneousAllocator, build
from hybridkv_ref.allocator.admission import keeps_from
from hybridkv_ref.allocator.lockstep import UNIT, keep_all, small_model
from hybridkv_ref.allocator.media import Files, MediumError
from hybridkv_ref.allocator.pipelines import Pipelines
from hybridkv_ref.allocator.records import StoredObject
from hybridkv_ref.allocator.refinement import differences
from hybridkv_ref.errors import InputError
from hybridkv_ref.lanes import DEVICE, STORE, pressure
from hybridkv_ref.loader import load_tables
from hybridkv_ref.machine import Refused
from hybridkv_ref.paths import SPEC_DIR

TOKENS = prompt("ABC", 3 * UNIT + 1)


def one_of(allocator: HeterogeneousAllocator, group: str, end: int) -> CacheSegment:
    """The segment of a group that ends there."""
    (found,) = [s for s in allocator.segments() if s.group.name == group and s.token_range[1] == end]
    return found


def changed_spec(folder: Path, file: str, old: str, new: str) -> Path:
    """A copy of the tables in which one text stands for another."""
    spec = folder / "spec"
    shutil.copytree(SPEC_DIR, spec)
    path = spec / file
    text = path.read_text("utf-8")
    assert text.count(old) == 1
    path.write_text(text.replace(old, new), "utf-8")
    return spec


# ---- Records of requests ---------------------------------------------------------------------------------------------
def test_a_request_that_has_ended_is_ended_once() -> None:
    """Its records may be another request's by now: nobody may give them away, or end them, a second time."""
    allocator = make()
    ended = cold(allocator, TOKENS)
    allocator.abort(ended)
    one, other = (allocator.match(prompt(letter, 5)).request for letter in "XY")
    assert {id(record) for record in one.records}.isdisjoint(id(record) for record in other.records)
    stage = one.stage
    allocator.abort(ended)
    with pytest.raises(InputError, match=r"^finish:request: request \d+ has ended$"):
        allocator.finish(ended)
    assert (one.stage, other.stage) == (stage, stage)
    assert set(allocator.requests.running.values()) == {one, other}
    allocator.close()


def test_what_is_confirmed_is_read_from_the_record() -> None:
    allocator = make()
    request, _ = hit(allocator, prompt("A", 5))
    assert request.accepted == 5
    allocator.ledger.step(request.records, "confirm", lambda lane: {"to": 7})
    assert request.accepted == 7
    allocator.extend(request, UNIT)
    assert request.accepted == UNIT
    allocator.close()


def test_of_two_threads_that_end_a_request_one_waits() -> None:
    """At the last row of the first, the second would fire it and give the records away."""

    class Rival:
        def __init__(self) -> None:
            self.last, self.fired = "", ""
            self.thread: threading.Thread | None = None

        def before(self, event_id: str) -> None:
            if event_id == self.last and self.thread is None:
                self.thread = threading.Thread(target=allocator.abort, args=(request,))
                self.thread.start()
                self.thread.join(0.3)

        def after(self, event_id: str, *_: Any) -> None:
            self.fired = event_id

        def limits(self, *_: Any) -> None:
            pass

    rival = Rival()
    allocator = make(observer=rival)
    allocator.abort(hit(allocator, TOKENS)[0])
    rival.last = rival.fired
    request, _ = hit(allocator, TOKENS)
    allocator.abort(request)
    assert rival.thread is not None
    rival.thread.join(30)
    assert allocator.requests.running == {}
    assert allocator.requests.spare == [request.records]
    allocator.close()


# ---- Order of eviction -----------------------------------------------------------------------------------------------
def ranked(durable: int) -> Geometry:
    """Without a durable copy every kind has rank 50, with one windows have another."""
    policy = keep_all()
    kinds = {
        kind: msgspec.structs.replace(one, evict=50, evict_durable=durable if kind == "swa_window" else 50, spill=False)
        for kind, one in policy.kinds.items()
    }
    return build(small_model(), policy=msgspec.structs.replace(policy, kinds=kinds))


def test_a_durable_copy_changes_the_order_of_eviction_at_once(tmp_path: Path) -> None:
    allocator = make(tmp_path, geometry=ranked(1))
    cold(allocator, TOKENS)
    window = one_of(allocator, "window", 3 * UNIT)  # not the one that was used least recently
    assert allocator.spill(window).result(30) is not None
    assert allocator.evictor.make_room(DEVICE, None)
    assert window.slots is None
    allocator.close()


def test_a_durable_copy_that_is_gone_changes_it_back(tmp_path: Path) -> None:
    allocator = make(tmp_path, geometry=ranked(99))
    cold(allocator, TOKENS)
    window = one_of(allocator, "window", UNIT)
    stored = allocator.spill(window).result(30)
    assert stored is not None
    oldest = min(allocator.segments(), key=lambda s: s.last_accessed)
    assert oldest.group.name == "window"
    assert allocator.evictor.oldest(50, "swa_window", ()) is not window
    assert allocator.tiers.erase(stored)
    assert allocator.evictor.oldest(50, "swa_window", ()) is window  # in its old place, before what was used later
    allocator.close()


def test_a_segment_under_a_step_is_not_marked() -> None:
    """It could not go now, and marked, no lookup would read it until the step completes."""
    allocator = make(shadow=True)
    cold(allocator, TOKENS)
    request, lease = hit(allocator, TOKENS)
    late = allocator.dispatch(lease)
    allocator.finish(request)
    segment = late[0].segment
    assert (segment.ref_count, segment.entity.steps) == (0, 1)
    stage = segment.stage
    assert not allocator.evictor.evict(segment)
    assert segment.stage == stage
    assert allocator.match(TOKENS).tokens == 3 * UNIT
    while allocator.evictor.make_room(DEVICE, None):
        pass
    assert segment.stage == stage
    with pytest.raises(Refused, match="steps == 0"):
        allocator.deallocate(segment)
    assert segment.stage in allocator.ledger.sets(segment.kind, "EVICTING")  # as its docstring says
    allocator.complete(late)
    assert segment.slots is None
    check(allocator)
    allocator.close()


# ---- Whole steps -----------------------------------------------------------------------------------------------------
def test_a_step_is_dispatched_on_every_segment_or_on_none() -> None:
    allocator = make()
    cold(allocator, TOKENS)
    request, lease = hit(allocator, TOKENS)
    attended = allocator.dispatch(lease)
    allocator.complete(attended)
    full = attended[-1]
    while allocator.book.lease_allows(full, "dispatch", upto=full.segment.token_range[1]):
        allocator.book.dispatch([full])
    with pytest.raises(Refused) as caught:
        allocator.dispatch(lease)
    assert "PIPELINE" in caught.value.guard.text
    assert [one.entity.in_flight for one in attended[:-1]] == [0] * (len(attended) - 1)
    while full.entity.in_flight:
        allocator.complete([full])
    allocator.finish(request)
    allocator.drain()
    assert allocator.ledger.pool.gpu_used == 0
    allocator.close()


def test_a_drain_waits_for_steps_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """They read their segments after their request has ended, so nothing of these can be freed before."""
    allocator = make(shadow=True)
    cold(allocator, TOKENS)
    _, lease = hit(allocator, TOKENS)
    late = allocator.dispatch(lease)
    steps: list[int] = []
    empty = allocator.evictor.empty

    def noted() -> None:
        steps.append(sum(one.entity.in_flight for one in late))
        empty()

    monkeypatch.setattr(allocator.evictor, "empty", noted)
    drain = threading.Thread(target=allocator.drain)
    drain.start()
    drain.join(0.3)
    allocator.complete(late)
    drain.join(30)
    assert steps == [0]
    assert allocator.ledger.pool.gpu_used == 0
    check(allocator)
    allocator.close()


def test_a_lease_that_is_let_go_of_while_its_step_ends_is_used_again_once() -> None:
    """The step may end between the row that releases and the books of it."""
    allocator = make()
    cold(allocator, TOKENS)
    request, lease = hit(allocator, TOKENS)
    late = allocator.dispatch(lease)
    allocator.ledger.step(request.records, "finish")
    for one in late:
        allocator.book.fire_lease(one, "release")
        allocator.book.complete(one)
        request.hits.remove(one)
        allocator.book.close_lease(one)
    allocator.abort(request)
    records = [id(record) for record in allocator.book.leases]
    assert len(records) == len(set(records))
    assert {id(one.entity) for one in late} <= set(records)
    allocator.close()


def test_nobody_cancels_a_copy_for_others(tmp_path: Path) -> None:
    disk = Slow(str(tmp_path))
    allocator = make(media={"DISK": disk}, store_bytes=100_000, geometry=ranked(50), io_slots=1)
    cold(allocator, TOKENS)
    windows = [one_of(allocator, "window", (at + 1) * UNIT) for at in range(3)]
    spills = [allocator.spill(window) for window in windows]  # two workers: the third waits
    assert disk.writing.wait(30)
    assert not any(spill.cancel() for spill in spills)
    disk.opened.set()
    assert all(spill.result(30) is not None for spill in spills)
    idle(allocator)
    allocator.evictor.empty()
    loads = allocator.prefetch(TOKENS)
    assert not any(load.cancel() for load in loads)
    assert all(load.result(30) for load in loads)
    allocator.drain()
    allocator.close()


def test_slots_that_are_missing_are_refused_before_the_row_fires() -> None:
    allocator = make()
    request, _ = hit(allocator, prompt("A", UNIT))
    arena = allocator.book.arena(GEOMETRY.group("window"))
    arena.free.clear()
    before = allocator.ledger.fired
    with pytest.raises(MemoryError, match="are free"):
        allocator.allocate((0, UNIT), "swa_window", request=request)
    assert (allocator.ledger.fired, allocator.ledger.pool.gpu_used) == (before, 0)
    assert request.writing == []
    allocator.close()


# ---- Caps ------------------------------------------------------------------------------------------------------------
def test_a_cap_that_breaks_an_invariant_of_the_pool_is_refused() -> None:
    allocator = make()
    cold(allocator, TOKENS)
    before = [lane.constants for lane in allocator.ledger.lanes]
    assert allocator.ledger.change({"swa_window.CAP": 1}) == "used <= CAP"
    assert [lane.constants for lane in allocator.ledger.lanes] == before
    assert allocator.ledger.change({"swa_window.CAP": allocator.ledger.pool.gpu_used}) == ""
    check(allocator)
    allocator.close()


def test_a_cap_of_the_device_evicts_until_it_fits() -> None:
    allocator = make()
    cold(allocator, TOKENS)
    request, lease = hit(allocator, TOKENS)
    held = sum(segment.nbytes for segment in lease.segments)
    with pytest.raises(InputError, match=r"limit:device_bytes: .* too little for 'gpu_used"):
        allocator.limit(held - 1)
    assert allocator.device_bytes == allocator.first_bytes
    allocator.limit(held)
    assert allocator.ledger.pool.gpu_used == held == allocator.device_bytes
    allocator.finish(request)
    allocator.close()


def test_every_medium_asks_for_room_by_what_its_sum_counts() -> None:
    asked = pressure(TABLES, TABLES.event("on_disk_prefix.open_object"))
    caps = [
        where
        for guard, where in zip(TABLES.event("on_disk_prefix.open_object").guards, asked, strict=True)
        if "CAP" in guard.text
    ]
    assert caps == [STORE] * 3
    assert sum(map(bool, asked)) == 3
    load = TABLES.event("on_disk_prefix.load_begin")
    assert {g.text: where for g, where in zip(load.guards, pressure(TABLES, load), strict=True) if where} == {
        "gpu_used + gpu_reserved + need <= GPU_CAP": DEVICE
    }
    admit = TABLES.event("swa_window.admit")
    assert [where for where in pressure(TABLES, admit) if where] == ["swa_window", DEVICE]


def test_what_a_request_keeps_is_what_the_table_of_needs_says(tmp_path: Path) -> None:
    model = small_model()
    groups = tuple(msgspec.structs.replace(g, window=UNIT + 1) if g.name == "window" else g for g in model.groups)
    model = msgspec.structs.replace(model, groups=groups)
    assert keeps_from(build(model).group("window"), 2 * UNIT) == UNIT
    wider = changed_spec(tmp_path, "recovery.toml", 'lo = "max(0, s - (window - 1))"', 'lo = "max(0, s - window)"')
    assert keeps_from(build(model, spec=wider).group("window"), 2 * UNIT) == 0
    one = tuple(msgspec.structs.replace(g, window=1) if g.name == "window" else g for g in model.groups)
    alone = build(msgspec.structs.replace(model, groups=one)).group("window")
    assert keeps_from(alone, 2 * UNIT) == 2 * UNIT  # it sees nothing but itself


# ---- What outlives a process -----------------------------------------------------------------------------------------
def stored_window(allocator: HeterogeneousAllocator) -> StoredObject:
    """The durable copy of the first window."""
    cold(allocator, TOKENS)
    idle(allocator)
    (found,) = [s for s in allocator.tiers.objects if s.group.name == "window" and s.spans == ((0, UNIT),)]
    return found


def test_a_promise_of_life_survives_a_restart(tmp_path: Path) -> None:
    allocator = make(tmp_path, shadow=True)
    stored = stored_window(allocator)
    allocator.tiers.fire(stored.entity, "reschedule_object", until=9)
    check(allocator)
    allocator.close()
    again = make(tmp_path, shadow=True)
    (found,) = [s for s in again.tiers.objects if s.name == stored.name]
    assert found.entity.keep_until == 9
    assert not again.tiers.can(found.entity, "want", need_until=10)
    assert all(load.result(30) for load in again.prefetch(TOKENS, need_until=9))
    check(again)
    again.close()


def test_a_promise_that_cannot_be_written_down_is_not_made(tmp_path: Path) -> None:
    disk = Faulty()
    allocator = make(media={"DISK": Files(str(tmp_path), disk)}, store_bytes=100_000)
    stored = stored_window(allocator)
    before = stored.entity.keep_until
    disk.fault = "full disk"
    with pytest.raises(MediumError, match="cannot be written"):
        allocator.tiers.fire(stored.entity, "reschedule_object", until=9)
    disk.fault = ""
    assert stored.entity.keep_until == before
    check(allocator)
    (tmp_path / f"{stored.name}.safetensors").unlink()
    with pytest.raises(MediumError, match="cannot be read"):
        allocator.tiers.fire(stored.entity, "reschedule_object", until=9)
    assert stored.entity.keep_until == before
    allocator.close()


def test_changed_bytes_are_not_hidden_by_a_new_description(tmp_path: Path) -> None:
    allocator = make(tmp_path)
    stored = stored_window(allocator)
    path = tmp_path / f"{stored.name}.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    allocator.tiers.fire(stored.entity, "reschedule_object", until=9)
    with pytest.raises(MediumError, match="checksum differs"):
        allocator.tiers.media["DISK"].read(stored.name)
    allocator.close()


def test_a_file_says_what_the_rows_make_of_an_object(tmp_path: Path) -> None:
    """A table in which sealing does more: the file, written before the row fires, says so too."""
    spec = changed_spec(
        tmp_path, "kinds/on_disk_prefix.toml", 'then = ["intact = True"]', 'then = ["intact = True", "mark += 3"]'
    )
    allocator = make(tmp_path / "store", tables=load_tables(spec))
    stored = stored_window(allocator)
    assert stored.entity.mark == 3
    assert differences(allocator) == []
    allocator.close()


def test_an_object_that_does_not_survive_leaves_no_charge(tmp_path: Path) -> None:
    """Files that stand for host memory: the tables say that nothing of it outlives the process."""

    def opened() -> HeterogeneousAllocator:
        return make(media={"HOST": Files(str(tmp_path))}, host_bytes=100_000)

    allocator = opened()
    stored_window(allocator)
    assert allocator.ledger.pool.host_used > 0
    allocator.close()
    again = opened()
    assert (again.tiers.objects, again.ledger.pool.host_used) == ({}, 0)
    store = [e for e in again.ledger.made if e.kind == again.ledger.store]
    assert store
    assert {(e.stage, e.mem) for e in store} == {("ABSENT", 0)}
    again.close()


@pytest.mark.parametrize(
    "found",
    [{"color": 1}, {"gpu_used": 7}, {"model_epoch": 1}, {"model_epoch": 1, "index_version": 0, "serving": 3},
     {"model_epoch": True, "index_version": 0}, {"model_epoch": -1, "index_version": 0}, {}],
)  # fmt: skip
def test_only_the_counters_of_the_tables_are_recalled(found: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "counters.json").write_text(json.dumps(found))
    with pytest.raises(InputError, match=r"counters\.json: expected counters index_version, model_epoch$"):
        make(tmp_path)


def test_a_counter_that_cannot_be_kept_does_not_move(tmp_path: Path) -> None:
    """Otherwise a new process would take objects of other weights for its own."""
    disk = Faulty()
    allocator = make(media={"DISK": Files(str(tmp_path), disk)}, store_bytes=1_000)
    disk.fault = "full disk"
    with pytest.raises(MediumError, match=r"counters\.json: cannot be written"):
        allocator.system("new_model")
    assert allocator.ledger.pool.model_epoch == 0
    disk.fault = ""
    allocator.system("new_model")
    assert allocator.ledger.pool.model_epoch == 1
    allocator.close()
    assert make(tmp_path).ledger.pool.model_epoch == 1


def test_of_two_media_the_larger_counter_counts(tmp_path: Path) -> None:
    """One of them missed the last change."""
    epochs = {"DISK": 5, "OBJECT": 3}
    for name, epoch in epochs.items():
        Files(str(tmp_path / name)).remember({"model_epoch": epoch, "index_version": 8 - epoch})
    media = {name: Files(str(tmp_path / name)) for name in epochs}
    allocator = make(media=media, store_bytes=1_000)
    assert (allocator.ledger.pool.model_epoch, allocator.ledger.pool.index_version) == (5, 5)
    allocator.close()


def test_a_file_of_something_else_is_no_object_of_parts(tmp_path: Path) -> None:
    files = Files(str(tmp_path))
    (tmp_path / "other.safetensors").write_bytes(save({"weights": torch.zeros(3)}))
    (tmp_path / "list.safetensors").write_bytes((2).to_bytes(8, "little") + b"[]")
    (tmp_path / "floats.safetensors").write_bytes(save({"p0": torch.zeros(3, dtype=torch.bfloat16)}))
    for name, text in {
        "number": '{"__metadata__": 5}',
        "empty": '{"x": {"data_offsets": []}, "__metadata__": {}}',
    }.items():
        (tmp_path / f"{name}.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())
    wrong = {"other": "no part 'p0'", "list": "torn", "floats": "no bytes", "number": "torn", "empty": "torn"}
    for name, reason in wrong.items():
        with pytest.raises(MediumError, match=reason):
            files.read(name)
    assert list(files.objects_now()) == []


def test_a_load_of_a_file_of_something_else_ends(tmp_path: Path) -> None:
    allocator = make(tmp_path, tries=1)
    stored = stored_window(allocator)
    allocator.evictor.empty()
    (tmp_path / f"{stored.name}.safetensors").write_bytes(save({"weights": torch.zeros(3)}))
    load = allocator.tiers.want(stored, 0)
    assert load is not None
    assert load.result(30) is False
    idle(allocator)
    check(allocator)
    allocator.close()


# ---- Pipelines -------------------------------------------------------------------------------------------------------
class Slow(Files):
    """Files whose writes wait until they are let through."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.writing, self.opened, self.count = threading.Event(), threading.Event(), 0

    def write(self, name: str, parts: Any, about: Any) -> None:
        self.count += 1
        self.writing.set()
        assert self.opened.wait(30)
        super().write(name, parts, about)


def test_a_worker_is_known_by_its_thread_not_by_its_name() -> None:
    pipelines = Pipelines(io=1, cpu=1)
    assert pipelines.submit("io", pipelines.inside, "io").result(30)
    assert not pipelines.submit("cpu", pipelines.inside, "io").result(30)
    found: list[bool] = []
    impostor = threading.Thread(target=lambda: found.append(pipelines.inside("io")), name="hybridkv-io_0")
    impostor.start()
    impostor.join(30)
    assert found == [False]
    pipelines.close()


def test_a_copy_before_eviction_is_written_once_whoever_asks(tmp_path: Path) -> None:
    """A worker of the io pipeline evicts, and so writes itself; who asks meanwhile joins that copy."""
    disk = Slow(str(tmp_path))
    allocator = make(media={"DISK": disk}, store_bytes=100_000, geometry=ranked(50))
    cold(allocator, TOKENS)
    window = one_of(allocator, "window", UNIT)
    done = allocator.pipelines.submit("io", allocator.tiers.write_first, window)
    assert disk.writing.wait(30)
    joined = allocator.spill(window)
    assert not joined.done()
    disk.opened.set()
    done.result(30)
    stored = joined.result(30)
    assert stored is not None
    assert stored is window.stored
    assert disk.count == 1
    allocator.close()


def test_a_worker_writes_what_waits_in_its_own_queue(tmp_path: Path) -> None:
    """With every worker busy, one that needs a queued copy does not wait for itself."""
    allocator = make(tmp_path, geometry=ranked(50), io_slots=1)
    cold(allocator, TOKENS)
    window = one_of(allocator, "window", UNIT)
    queued, held = threading.Event(), threading.Event()

    def busy(action: Callable[[], None]) -> None:
        held.set()
        assert queued.wait(30)
        action()

    one = allocator.pipelines.submit("io", busy, lambda: allocator.tiers.write_first(window))
    other = allocator.pipelines.submit("io", busy, lambda: allocator.tiers.write_first(window))
    assert held.wait(30)
    spill = allocator.spill(window)
    queued.set()
    assert spill.result(30) is window.stored
    one.result(30)
    other.result(30)
    assert len(allocator.tiers.objects) == 1
    allocator.close()


# ---- Prefetch --------------------------------------------------------------------------------------------------------
def test_a_prefetch_plans_with_the_replay_of_the_match(tmp_path: Path) -> None:
    """The stored tails are gone: a hit computes a few tokens again, and the rest has to come back for it."""
    model = small_model()
    model = msgspec.structs.replace(model, groups=tuple(g for g in model.groups if g.name != "state"))
    allocator = make(tmp_path, geometry=build(model, policy=keep_all()), replay=UNIT)
    cold(allocator, TOKENS)
    idle(allocator)
    allocator.evictor.empty()
    for stored in [s for s in allocator.tiers.objects if s.group.name == "tail"]:
        assert allocator.tiers.erase(stored)
    assert all(load.result(30) for load in allocator.prefetch(TOKENS))
    request, lease = hit(allocator, TOKENS)
    assert (lease.plan.r, lease.plan.frontier) == (3 * UNIT - 4, 3 * UNIT)
    run(allocator, request, TOKENS)
    allocator.finish(request)
    allocator.drain()
    allocator.close()


def test_what_the_index_knew_is_said_of_each_look() -> None:
    allocator = make()
    cold(allocator, TOKENS)
    found = allocator.match(prompt("ABX", 3 * UNIT))
    assert (found.tokens, found.matched) == (2 * UNIT, 2 * UNIT)
    lease = allocator.pin(dataclasses.replace(found))
    assert lease.matched == 2 * UNIT
    nothing = allocator.match(prompt("XYZ", 3 * UNIT))
    assert (nothing.tokens, nothing.matched) == (0, 0)
    allocator.close()
