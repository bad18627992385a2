"""Tiers, rebuilds and the check of refinement itself: what must be found is found."""

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from allocator_tools import GEOMETRY, check, cold, hit, idle, make, prompt

from hybridkv_ref.allocator import HeterogeneousAllocator, build
from hybridkv_ref.allocator.arena import POISON, Arena
from hybridkv_ref.allocator.lockstep import UNIT, keep_all, lockstep, small_model
from hybridkv_ref.allocator.media import Files, HostMemory, MediumError
from hybridkv_ref.allocator.refinement import Shadow, abstraction, differences, occupied
from hybridkv_ref.allocator.replay import tokens_of
from hybridkv_ref.cli import main
from hybridkv_ref.errors import InputError
from hybridkv_ref.layouts import load
from hybridkv_ref.machine import Refused
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.request_traces import Request

TOKENS = prompt("ABC", 3 * UNIT + 1)


# ---- The check finds what differs ---------------------------------------------------------------------------------
def lose_a_slot(allocator: HeterogeneousAllocator) -> None:
    arena = next(iter(allocator.book.arenas.values()))
    arena.bytes[arena.free[0]] = 1


def poison_what_is_held(allocator: HeterogeneousAllocator) -> None:
    segment = allocator.segments()[0]
    assert segment.slots is not None
    allocator.book.arena(segment.group).bytes[int(segment.slots[0, 0])] = POISON


def share_a_slot(allocator: HeterogeneousAllocator) -> None:
    one, other = [s for s in allocator.segments() if s.group.name == "window"][:2]
    assert one.slots is not None
    other.slots = one.slots.copy()


def change_a_count(allocator: HeterogeneousAllocator) -> None:
    allocator.segments()[0].entity.pins += 1


def change_the_pool(allocator: HeterogeneousAllocator) -> None:
    allocator.ledger.pool.gpu_used -= 1


def change_a_range(allocator: HeterogeneousAllocator) -> None:
    segment = next(s for s in allocator.segments() if s.group.name == "tail")
    segment.entity.start += 1


def delete_a_file(allocator: HeterogeneousAllocator) -> None:
    stored = next(iter(allocator.tiers.objects))
    allocator.tiers.media["DISK"].delete(stored.name)


def leave_a_file(allocator: HeterogeneousAllocator) -> None:
    files = allocator.tiers.media["DISK"]
    assert isinstance(files, Files)
    files.write("stray", [torch.zeros(3, dtype=torch.uint8)], {"kept.mem": 3})


def leave_a_torn_file(allocator: HeterogeneousAllocator) -> None:
    files = allocator.tiers.media["DISK"]
    assert isinstance(files, Files)
    Path(files.root, ".writing-x").write_bytes(b"half")


def forget_the_memory(allocator: HeterogeneousAllocator) -> None:
    allocator.segments()[0].slots = None


@pytest.mark.parametrize(
    "damage",
    [
        lose_a_slot, poison_what_is_held, share_a_slot, change_a_count, change_the_pool, change_a_range, delete_a_file,
        leave_a_file, leave_a_torn_file, forget_the_memory,
    ],
)  # fmt: skip
def test_what_differs_from_the_tables_is_found(
    damage: Callable[[HeterogeneousAllocator], None], tmp_path: Path
) -> None:
    allocator = make(tmp_path)
    cold(allocator, TOKENS)
    idle(allocator)
    assert differences(allocator) == []
    damage(allocator)
    assert differences(allocator)
    allocator.close()


def test_a_change_that_no_row_made_is_found() -> None:
    allocator = make(shadow=True)
    cold(allocator, TOKENS)
    segment = allocator.segments()[0]
    segment.entity.keep_until = 5
    allocator.transition(segment, "retire")
    observer = allocator.ledger.observer
    assert isinstance(observer, Shadow)
    assert any("keep_until is 5" in fault for fault in observer.faults)


def test_the_abstraction_reads_memory_and_files(tmp_path: Path) -> None:
    allocator = make(tmp_path)
    cold(allocator, TOKENS)
    idle(allocator)
    found = abstraction(allocator)
    assert found["arenas", "bytes"] == found["", "gpu_used"] == allocator.ledger.pool.gpu_used > 0
    assert found["files", "DISK"] == allocator.ledger.pool.disk_used > 0
    assert sum(map(len, occupied(allocator).values())) == sum(
        s.slots.size for s in allocator.segments() if s.slots is not None
    )
    allocator.close()


def test_lock_step_runs_and_finds_a_row_that_forgets_a_pin(tmp_path: Path) -> None:
    run = lockstep(1.0)
    assert run.faults == []
    assert run.rows > 0
    assert run.requests > 0
    spec = tmp_path / "spec"
    shutil.copytree(SPEC_DIR, spec)
    path = spec / "protocols" / "prefix_hit.toml"
    text = path.read_text("utf-8")
    assert text.count('"pins += 1", "req.found -= 1"') == 1
    path.write_text(text.replace('"pins += 1", "req.found -= 1"', '"req.found -= 1"'), "utf-8")
    faulty = lockstep(20.0, spec=spec)
    assert any("pins" in fault for fault in faulty.faults)


# ---- Tiers --------------------------------------------------------------------------------------------------------
def test_host_memory_comes_first_and_disk_takes_what_it_cannot(tmp_path: Path) -> None:
    allocator = make(tmp_path, host_bytes=600)
    cold(allocator, TOKENS)
    idle(allocator)
    where = {stored.medium for stored in allocator.tiers.objects}
    assert where == {"HOST", "DISK"}
    pool = allocator.ledger.pool
    assert 0 < pool.host_used <= 600
    allocator.evictor.empty()
    assert all(load.result(30) for load in allocator.prefetch(TOKENS))
    request, lease = hit(allocator, TOKENS)
    assert lease.tokens == 3 * UNIT
    assert {segment.disk_location is not None for segment in lease.segments} == {True}
    allocator.finish(request)
    idle(allocator)
    check(allocator)
    allocator.close()
    again = make(tmp_path, host_bytes=600)  # what was in host memory is gone, what was on disk is not
    assert {stored.medium for stored in again.tiers.objects} == {"DISK"}
    again.close()


def test_an_object_store_by_url() -> None:
    allocator = make(store="memory://hybridkv-test", store_bytes=100_000)
    cold(allocator, TOKENS)
    idle(allocator)
    assert {stored.medium for stored in allocator.tiers.objects} == {"OBJECT"}
    allocator.evictor.empty()
    assert all(load.result(30) for load in allocator.prefetch(TOKENS))
    request, lease = hit(allocator, TOKENS)
    assert lease.tokens == 3 * UNIT
    allocator.finish(request)
    idle(allocator)
    check(allocator)
    allocator.close()


def test_an_object_of_several_parts_comes_back_whole_or_not_at_all(tmp_path: Path) -> None:
    policy = keep_all()
    allocator = make(tmp_path)
    request, _ = hit(allocator, TOKENS)
    for upto in (UNIT, 2 * UNIT, 3 * UNIT):
        allocator.extend(request, upto)
    one, two, three = sorted((s for s in allocator.segments() if s.group.name == "csa"), key=lambda s: s.entity.start)
    stored = allocator.spill(one, two, three).result(30)
    assert stored is not None
    assert stored.spans == ((0, UNIT), (UNIT, 2 * UNIT), (2 * UNIT, 3 * UNIT))
    allocator.abort(request)
    allocator.evictor.before = None
    for segment in (one, two, three):
        assert allocator.evictor.evict(segment)
    load = allocator.tiers.want(stored, 0)
    assert load is not None
    assert load.result(30)
    assert sorted(s.entity.start for s in allocator.segments() if s.group.name == "csa") == [0, UNIT, 2 * UNIT]
    check(allocator)
    for segment in [s for s in allocator.segments() if s.group.name == "csa"]:
        allocator.evictor.evict(segment)
    path = next(tmp_path.glob("*-csa-*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])
    again = allocator.tiers.want(stored, 0)
    assert again is not None
    assert not again.result(30)
    assert [s for s in allocator.segments() if s.group.name == "csa"] == []
    assert policy.kinds["compressed_kv"].spill
    allocator.drain()
    allocator.close()


def test_segments_of_two_groups_are_no_object(tmp_path: Path) -> None:
    allocator = make(tmp_path)
    cold(allocator, TOKENS)
    idle(allocator)
    one = next(s for s in allocator.segments() if s.group.name == "csa")
    other = next(s for s in allocator.segments() if s.group.name == "hca")
    with pytest.raises(InputError, match="spill:segments"):
        allocator.spill(one, other)
    allocator.close()


def test_the_store_erases_what_was_wanted_least_recently(tmp_path: Path) -> None:
    allocator = make(tmp_path, store_bytes=1_500)
    for family in ("A", "B", "C", "D"):
        cold(allocator, prompt(family, UNIT + 1))
        idle(allocator)
        check(allocator)
    assert allocator.ledger.pool.disk_used <= 1_500
    assert 0 < len(allocator.tiers.objects) < 4 * len(GEOMETRY.groups)
    allocator.close()


def test_a_bad_store_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for url in (str(tmp_path / "file" / "below"), "nosuch://place"):
        with pytest.raises(InputError, match="store: cannot be opened") as caught:
            Files(url)
        assert "\n" not in str(caught.value)


def test_counters_of_something_else_are_refused(tmp_path: Path) -> None:
    (tmp_path / "counters.json").write_text("[1]")
    with pytest.raises(InputError, match=r"counters\.json: expected counters"):
        Files(str(tmp_path)).recall(["model_epoch"])
    (tmp_path / "counters.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        Files(str(tmp_path)).recall(["model_epoch"])


def test_host_memory_checks_what_it_gives_back() -> None:
    memory = HostMemory()
    part = torch.arange(10, dtype=torch.uint8)
    memory.write("a", [part], {})
    assert torch.equal(memory.read("a")[0], part)
    part[3] = 99
    with pytest.raises(MediumError, match="checksum differs"):
        memory.read("a")
    memory.delete("a")
    with pytest.raises(MediumError, match="not there"):
        memory.read("a")


# ---- Rebuild ------------------------------------------------------------------------------------------------------
def test_stale_keys_are_encoded_anew_on_the_cpu_pipeline() -> None:
    allocator = make()
    cold(allocator, TOKENS)
    group = GEOMETRY.group("index")
    segment = next(s for s in allocator.segments() if s.group is group)
    arena = allocator.book.arena(group)
    assert segment.slots is not None
    slot = int(segment.slots[0, 0])
    values = torch.tensor([[1.0, -2.0, 3.0, 0.5, 8.0, 0.25, -1.0, 4.0]] * 2, dtype=torch.bfloat16)
    arena.bytes[slot, : group.page.nbytes] = values.view(torch.uint8).reshape(-1)
    allocator.system("new_index")
    lease = allocator.pin(allocator.match(TOKENS))
    assert allocator.validate(lease)[0].guard == "mark == req.version"
    allocator.abort(lease.request)
    names: list[str] = []

    def negate(keys: torch.Tensor) -> torch.Tensor:
        names.append(threading.current_thread().name)
        return -keys

    for done in allocator.rebuild(negate):
        done.result(30)
    assert {name.rsplit("_", 1)[0] for name in names} == {"hybridkv-cpu"}
    assert len(names) == 3
    again = arena.bytes[slot, : group.page.nbytes].clone().view(torch.bfloat16).reshape(2, 8)
    assert torch.equal(again, -values)
    lease = allocator.pin(allocator.match(TOKENS))
    assert allocator.validate(lease)[-1].accepted
    assert allocator.rebuild(negate) == []
    allocator.abort(lease.request)
    check(allocator)
    allocator.close()


def test_a_rebuild_that_fails_leaves_the_keys_stale() -> None:
    allocator = make()
    cold(allocator, TOKENS)
    allocator.system("new_index")

    def broken(keys: torch.Tensor) -> torch.Tensor:
        raise ValueError("no encoder")

    for done in allocator.rebuild(broken):
        with pytest.raises(ValueError, match="no encoder"):
            done.result(30)
    segment = next(s for s in allocator.segments() if s.group.name == "index")
    with pytest.raises(Refused):
        allocator.transition(segment, "rebuild_end")
    assert allocator.ledger.pool.cpu_used == 0
    check(allocator)
    allocator.close()


# ---- Arenas and rows ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fp8_ds_mla_584", {}), ("dsv32_656", {}), ("uniform_fp8_512", {}), ("bf16", {"dim": 8}),
        ("index_fp8_132", {}), ("index_fp4_68", {}), ("state_fp32", {"dim": 4}), ("bf16_nhd", {"heads": 2, "dim": 4}),
        ("bf16_hnd", {"heads": 2, "dim": 4}),
    ],
)  # fmt: skip
def test_rows_come_back_as_they_were_stored_in_every_layout(name: str, options: dict[str, int]) -> None:
    page = load(name).page(4, **options)
    model = small_model()
    window = GEOMETRY.group("window").group
    geometry = build(model, pages={window.name: page}, policy=keep_all())
    allocator = HeterogeneousAllocator(geometry, 3_000_000)
    arena = allocator.book.arena(geometry.group(window.name))
    assert arena.base % page.layout.base_align == 0
    segment = allocator.book.new_segment(geometry.group(window.name))
    segment.slots = arena.take(4).reshape(2, 2)
    assert arena.slack(segment.slots) == 0
    width = sum(place.nbytes * page.heads for place in page.regions())
    rows = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (2, 8, width), dtype=np.uint8))
    allocator.book.write_rows(segment, 0, rows[:, :3])
    allocator.book.write_rows(segment, 3, rows[:, 3:])
    assert torch.equal(allocator.book.read_rows(segment, 0, 8), rows)
    assert torch.equal(allocator.book.read_rows(segment, 2, 4), rows[:, 2:6])
    allocator.close()


def test_freed_slots_are_poisoned_and_taken_again_cleared() -> None:
    arena = Arena(load("bf16").page(2, dim=8), 3)
    slots = arena.take(2)
    assert slots.tolist() == [1, 2]
    arena.bytes[1:3] = 7
    arena.give(slots)
    assert bool((arena.bytes[1:3] == POISON).all())
    assert not arena.bytes[arena.take(1)].any()
    with pytest.raises(MemoryError, match="3 slots were granted, 2 are free"):
        arena.take(3)


def test_the_grid_has_to_fit_every_group() -> None:
    with pytest.raises(InputError, match="not a multiple of 8"):
        build(small_model(), 12)
    with pytest.raises(InputError, match="no group named 'nothing'"):
        build(small_model(), pages={"nothing": load("bf16").page(4, dim=8)})
    assert build(small_model(), 24).unit == 24


# ---- A trace on real memory ------------------------------------------------------------------------------------------
def test_a_trace_is_served_on_real_memory(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["simulate", "--memory", "real", "--model", "deepseek-v4-flash", "--gpu-memory", "1GB"]
    assert main([*arguments, "--workload", "conversation", "--requests", "4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 4
    assert 0 < report["saved_tokens"] < report["input_tokens"]
    assert report["rows"] > 0
    assert main([*arguments, "--recovery", "bounded"]) == 2
    assert "real memory recovers in full" in capsys.readouterr().err


def test_prompts_of_a_trace_share_what_it_says() -> None:
    one = tokens_of(Request(0.0, 20, 1, 8, (5, 6, 7)), 0)
    other = tokens_of(Request(0.0, 20, 1, 8, (5, 6, 9)), 1)
    assert (one[:16] == other[:16]).all()
    assert not set(one[16:]) & set(other[16:])
    lengths = [tokens_of(Request(0.0, 4, 1, 0, ()), number) for number in (0, 1)]
    assert not set(lengths[0]) & set(lengths[1])
    short = tokens_of(Request(0.0, 20, 1, 8, (5,)), 0)
    assert len(short) == 20
    assert (short[:8] == one[:8]).all()


# ---- Two positions ---------------------------------------------------------------------------------------------------
def test_a_replay_stands_in_for_a_missing_tail_and_writes_nothing_before_the_frontier() -> None:
    """Computing starts before the frontier: the next fold's halo is computed again, entries are read up to it."""
    model = small_model()
    model = msgspec.structs.replace(model, groups=tuple(g for g in model.groups if g.name != "state"))
    allocator = make(geometry=build(model, policy=keep_all()), replay=UNIT)
    cold(allocator, TOKENS)
    for segment in allocator.segments():
        if segment.group.name == "tail":
            assert allocator.evictor.evict(segment)
    request, lease = hit(allocator, TOKENS)
    assert (lease.plan.r, lease.plan.frontier) == (3 * UNIT - 4, 3 * UNIT)
    assert {segment.group.name for segment in lease.segments} == {"window", "csa", "index", "hca"}
    written = allocator.extend(request, 3 * UNIT + 1)
    assert all(segment.token_range[0] >= 3 * UNIT for segment in written)
    allocator.finish(request)
    check(allocator)
    allocator.close()
