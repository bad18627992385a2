"""Simulations: published figures, small traces worked out by hand, and every invariant of the tables on the way."""

import math
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.exact_start import layer_stack, zero_exact_hit
from hybridkv_ref.lanes import deal
from hybridkv_ref.machine import Refused
from hybridkv_ref.models import Group, Model, load_model, model_names
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.policy import Policy, load_policy
from hybridkv_ref.recovery import Contents, Hit, bounded_hit, cache_group, longest_hit
from hybridkv_ref.request_traces import Request, read_trace
from hybridkv_ref.sim_drain import NotDrainedError
from hybridkv_ref.sim_machine import GroupRows
from hybridkv_ref.sim_plan import Path as TreePath
from hybridkv_ref.sim_plan import Plan
from hybridkv_ref.sim_report import Report, report_table
from hybridkv_ref.sim_request import Lease
from hybridkv_ref.simulate import Simulation, device_kinds, simulate
from hybridkv_ref.workloads import generate

FOREVER = 1 << 60  # bytes: nothing is evicted
TRACE = "mooncake_conversation_trace.jsonl"


def group(name: str, kind: str, **fields: Any) -> Group:
    """A group of one layer with one byte per row."""
    size = {} if "state_bytes" in fields or "row_bytes" in fields else {"entry_bytes": {"bf16": 1}}
    block = {} if "state_bytes" in fields else {"block_tokens": 4}
    return Group(name=name, kind=kind, layers=1, **{**size, **block, **fields})


def model(*groups: Group) -> Model:
    return Model(name="tiny", source="made up", confidence="made up", note="", alignment=4, groups=groups)


FULL = group("full", "compressed_kv", ratio=1, layer_ids=(1,))
WINDOW = group("window", "swa_window", window=5, layer_ids=(0,))
STATE = group("state", "recurrent_state", state_bytes=3, layer_ids=(2,))
POOLED = group("pooled", "compressed_kv", ratio=4, layer_ids=(1,))
TAIL = group("tail", "uncompressed_tail", ratio=4, halo=4, feeds="pooled", row_bytes=1, ring_rows=8, layer_ids=(1,))
PLAIN, WINDOWED, RECURRENT = model(FULL), model(WINDOW, FULL), model(FULL, STATE)
V4_LIKE = model(WINDOW, POOLED, TAIL, msgspec.structs.replace(FULL, name="other"))


def prompt(at: float, *ids: int, tokens: int | None = None) -> Request:
    """A request of blocks of 4 tokens."""
    return Request(at, 4 * len(ids) if tokens is None else tokens, 0, 4, ids)


def policy(reserve: float = 0.0, **spill: bool) -> Policy:
    shipped = load_policy(device_kinds())
    kinds = {k: msgspec.structs.replace(own, spill=spill.get(k, own.spill)) for k, own in shipped.kinds.items()}
    return msgspec.structs.replace(shipped, reserve=reserve, kinds=kinds)


# ---- Published figures -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversation(shared_data: Path) -> list[Request]:
    path = shared_data / "traces" / TRACE
    if not path.is_file():
        pytest.skip(f"no trace at {path}")
    return list(read_trace(path))


@pytest.mark.parametrize(
    ("name", "alignment", "recovery", "saved_percent"),
    [
        ("deepseek-v4-flash", None, "full", 37.4),
        ("deepseek-v4-flash", 1024, "full", 34.0),
        ("deepseek-v4-flash", 4096, "full", 29.1),
        ("deepseek-v4-flash", 16384, "full", 16.7),
        ("deepseek-v4-flash", None, "bounded", 36.3),
        ("deepseek-v4-flash", None, "zero-exact", 21.5),
        ("deepseek-v4-pro", None, "zero-exact", 18.1),
    ],
)
def test_conversation_trace_without_eviction(
    conversation: list[Request], name: str, alignment: int | None, recovery: str, saved_percent: float
) -> None:
    report = simulate(conversation, load_model(name), FOREVER, alignment=alignment, recovery=recovery)
    assert report.requests == 12_031
    assert report.input_tokens == 144_793_823
    assert round(100 * report.saved_tokens / report.input_tokens, 1) == saved_percent
    assert math.isclose(report.composite, report.saved_tokens / report.input_tokens)
    assert math.isclose(report.composite, report.hit_rate * report.validation_pass_rate)
    assert report.limiting == {}
    assert not any(report.evictions.values())
    if alignment is None:
        assert round(100 * report.hit_rate, 1) == 37.4


@pytest.mark.parametrize(
    ("memory", "disk", "recovery"), [(80 << 30, 0, "full"), (80 << 30, 1 << 40, "bounded"), (2 << 30, 10 << 30, "full")]
)
def test_conversation_trace_under_pressure(conversation: list[Request], memory: int, disk: int, recovery: str) -> None:
    flash = load_model("deepseek-v4-flash")
    report = simulate(conversation[:3000], flash, memory, disk, recovery=recovery)
    ideal = simulate(conversation[:3000], flash, FOREVER, recovery=recovery)
    assert report.hit_tokens == ideal.hit_tokens
    assert report.saved_tokens <= ideal.saved_tokens
    assert sum(report.peak_bytes.values()) >= memory / 2
    assert max(report.peak_bytes.values()) <= memory
    assert any(report.evictions.values())


@pytest.mark.deep
@pytest.mark.parametrize("name", ["qwen3-next-80b-a3b", "gpt-oss-20b", "gemma-3-27b", "deepseek-v3.2"])
def test_whole_conversation_trace_under_pressure(conversation: list[Request], name: str) -> None:
    report = simulate(conversation, load_model(name), 80 << 30, 1 << 40)
    assert report.requests == 12_031
    assert any(report.evictions.values())


def test_azure_trace_has_lengths_only(shared_data: Path) -> None:
    path = shared_data / "traces" / "AzureLLMInferenceTrace_code.csv"
    if not path.is_file():
        pytest.skip(f"no trace at {path}")
    report = simulate(read_trace(path), load_model("deepseek-v4-flash"), FOREVER)
    assert (report.requests, report.hit_tokens, report.saved_tokens) == (8_819, 0, 0)


def test_coding_agent_conversation(shared_data: Path) -> None:
    folder = shared_data / "traces" / "kv_cache_tester"
    files = sorted(folder.glob("*.json"))
    if not files:
        pytest.skip(f"no trace in {folder}")
    report = simulate(read_trace(files[0]), load_model("deepseek-v4-flash"), FOREVER)
    assert report.hit_rate > 0.9
    assert report.saved_tokens <= report.hit_tokens


# ---- By hand ---------------------------------------------------------------------------------------------------------


def test_common_prefix_of_two_prompts() -> None:
    report = simulate([prompt(0, 1, 2, 3), prompt(1, 1, 2, 9)], PLAIN, FOREVER)
    assert (report.requests, report.input_tokens, report.hit_tokens, report.saved_tokens) == (2, 24, 8, 8)
    assert (report.hit_rate, report.validation_pass_rate) == (8 / 24, 1.0)
    assert report.peak_bytes == {"compressed_kv": 16}


def test_the_last_token_of_a_whole_prompt_is_computed() -> None:
    report = simulate([prompt(0, 1, 2, 3)] * 2, PLAIN, FOREVER)
    assert (report.hit_tokens, report.saved_tokens, report.recomputed_tokens) == (12, 8, 4)
    assert report.validation_pass_rate == 8 / 12
    assert report.limiting == {}


def test_a_partial_last_block_counts_down_to_the_alignment() -> None:
    requests = [Request(0, 30, 0, 16, (1, 2))] * 2
    report = simulate(requests, PLAIN, FOREVER)
    assert (report.hit_tokens, report.saved_tokens) == (28, 28)


def test_blocks_smaller_than_the_alignment() -> None:
    requests = [prompt(0, 1, 2, 3, 4, 5), prompt(1, 1, 2, 3, 9, 9)]
    report = simulate(requests, PLAIN, FOREVER, alignment=8)
    assert report.hit_tokens == 8
    assert report.peak_bytes == {"compressed_kv": 16 + 8}


def test_alignment_that_no_block_is_a_multiple_of() -> None:
    # Blocks end at 8, 16, 24 tokens; rounded down to 12: 0, 12, 24.
    requests = [Request(0, 24, 0, 8, (1, 2, 3)), Request(1, 25, 0, 8, (1, 2, 9))]
    assert simulate(requests, PLAIN, FOREVER, alignment=12).hit_tokens == 12


def test_a_lost_window_costs_an_exact_replay() -> None:
    # 12 bytes of entries and 12 of window rows each; the second prompt's entries displace the first one's window rows.
    requests = [prompt(0, 1, 2, 3), prompt(1, 4, 5, 6), prompt(2, 1, 2, 3, 7)]
    report = simulate(requests, WINDOWED, 24)
    # One windowed layer of width 5 below: 4 tokens before the end of the 12 cached ones.
    assert (report.hit_tokens, report.saved_tokens) == (12, 8)
    assert report.limiting == {"window": 1}
    # The third prompt needs 4 more bytes of entries: the second one's go, being the least recently used.
    assert report.evictions == {"swa_window": 1, "compressed_kv": 1}
    assert report.peak_bytes == {"swa_window": 12, "compressed_kv": 24}


def test_a_bounded_replay_computes_one_window() -> None:
    report = simulate([prompt(0, 1, 2, 3, 4), prompt(1, 1, 2, 3, 4, 5)], WINDOWED, FOREVER, recovery="bounded")
    # 5 tokens before 16, rounded down to the alignment of 4.
    assert (report.hit_tokens, report.saved_tokens) == (16, 8)
    assert "swa_window" not in report.peak_bytes


def test_evicted_entries_limit_the_hit() -> None:
    # The first prompt is cut at 4 tokens by the second one; the third one needs 12 bytes, so 4 + 8 bytes go.
    requests = [prompt(0, 1, 2, 3), prompt(1, 1, 9), prompt(2, 5, 6, 7), prompt(3, 1, 2, 3, 4)]
    report = simulate(requests, PLAIN, 20)
    # What continues a prefix goes before it: blocks 2 and 3 went, then nothing more was needed.
    assert report.hit_tokens == 4 + 12
    assert report.saved_tokens == 4 + 4
    assert report.limiting == {"full": 1}


def test_snapshots_are_at_ends_and_grow_where_prompts_branch() -> None:
    requests = [prompt(0, 1, 2, 3), prompt(1, 1, 2, 4), prompt(2, 1, 2, 5), prompt(3, 1, 2, 3, 6)]
    report = simulate(requests, RECURRENT, FOREVER)
    # The second prompt finds no snapshot at 8, where it branches off, and leaves one for the third; the fourth finds
    # the first one's at 12.
    assert report.hit_tokens == 8 + 8 + 12
    assert report.saved_tokens == 0 + 8 + 12
    assert report.limiting == {"state": 1}
    # Snapshots at 12, 8, 12, 12 and 16.
    assert report.peak_bytes["recurrent_state"] == 5 * 3


def test_tail_rows_are_kept_at_every_position() -> None:
    report = simulate([prompt(0, 1, 2, 3), prompt(1, 1, 2, 4)], model(POOLED, TAIL), FOREVER)
    assert (report.hit_tokens, report.saved_tokens) == (8, 8)
    # 4 rows at each of 4, 8, 12 and the second 12; one byte per entry of 4 tokens.
    assert report.peak_bytes == {"uncompressed_tail": 16, "compressed_kv": 4}


def test_requests_without_ids_reuse_nothing() -> None:
    report = simulate([Request(0, 10, 1, 0, ())] * 3, PLAIN, 1)
    assert (report.input_tokens, report.hit_tokens, report.validation_pass_rate) == (30, 0, 1.0)


def test_a_prompt_larger_than_the_memory_is_not_kept() -> None:
    report = simulate([prompt(0, 1, 2, 3), prompt(1, 1, 2, 3, 4)], PLAIN, 11)
    assert (report.hit_tokens, report.saved_tokens, report.peak_bytes["compressed_kv"]) == (12, 0, 0)


# ---- Durable copies --------------------------------------------------------------------------------------------------

SPILLING = [prompt(0, 1, 2, 3), prompt(1, 4, 5, 6), prompt(2, 1, 2, 3, 7)]


def test_spill_and_reload() -> None:
    report = simulate(SPILLING, PLAIN, 12, disk=100, io_bandwidth=12, policy=policy())
    # Each prompt's 12 bytes are spilled for the next one; the first one's come back at 12 bytes per second.
    assert (report.spills, report.reloads, report.load_bytes) == (2, 1, 12)
    assert report.load_wait_ms == 1000
    assert (report.hit_tokens, report.saved_tokens, report.limiting) == (12, 12, {})


def test_without_a_disk_the_same_trace_saves_nothing() -> None:
    report = simulate(SPILLING, PLAIN, 12)
    assert (report.spills, report.saved_tokens, report.limiting) == (0, 0, {"full": 1})


def test_what_is_wanted_is_not_erased_for_a_spill() -> None:
    # The disk holds one object only, and that is on its way back: the second prompt's entries are dropped.
    report = simulate(SPILLING, PLAIN, 12, disk=12, io_bandwidth=12, policy=policy())
    assert (report.spills, report.reloads, report.saved_tokens) == (1, 1, 12)


@pytest.mark.parametrize(("again", "saved"), [((1, 2, 3, 0), 0), ((4, 5, 6, 0), 12)])
def test_the_least_recently_wanted_object_is_erased(again: tuple[int, ...], saved: int) -> None:
    # The second prompt's object takes the place of the first one's.
    requests = [prompt(0, 1, 2, 3), prompt(1, 4, 5, 6), prompt(2, 7, 8, 9), prompt(3, *again)]
    report = simulate(requests, PLAIN, 12, disk=12, io_bandwidth=1e9, policy=policy())
    assert (report.hit_tokens, report.saved_tokens) == (12, saved)


def test_loads_queue_for_the_channel_and_are_shared() -> None:
    requests = [
        prompt(0, 1, 2, 3),
        prompt(1, 4, 5, 6),
        prompt(2, 7, 8, 9),  # 24 bytes fit: the first prompt's are spilled
        prompt(3, 10, 11, 12),  # the second one's
        prompt(1000, 1, 2, 3, 0),  # waits 1 s for its 12 bytes
        prompt(1500, 4, 5, 6, 0),  # waits 0.5 s for its turn, then 1 s
        prompt(1700, 1, 2, 3, 13),  # waits for the first load: 0.3 s
    ]
    report = simulate(requests, PLAIN, 24, disk=1000, io_bandwidth=12, policy=policy())
    assert report.reloads == 2
    assert report.load_wait_ms == 1000 + 1500 + 300
    assert report.saved_tokens == 36


def test_later_requests_overtake_one_that_waits() -> None:
    order: list[int] = []

    class Watched(Simulation):
        def run(self, running: Any) -> None:
            order.append(running.keys[-1])
            super().run(running)

    simulation = Watched(PLAIN, 24, 1000, io_bandwidth=12, policy=policy())
    for request in (*SPILLING[:2], prompt(2, 7, 8, 9), prompt(3, 1, 2, 3, 20), prompt(4, 30, 31, 32)):
        simulation.arrive(request)
    simulation.finish()
    assert order == [3, 6, 9, 32, 20]


def test_an_object_comes_back_whole_after_its_range_was_cut() -> None:
    requests = [
        prompt(0, 1, 2, 3),
        prompt(1, 4, 5, 6),  # spills 1 2 3
        prompt(2, 1, 9),  # asks for 1: the object comes back, is cut after 1; 4 5 6 are spilled
        prompt(5000, 7, 8, 10),  # evicts both parts, which one object holds
        prompt(9000, 1, 2, 3, 11),
    ]
    report = simulate(requests, PLAIN, 12, disk=1000, io_bandwidth=12, policy=policy())
    assert report.hit_tokens == report.saved_tokens == 4 + 12
    assert (report.reloads, report.load_bytes) == (2, 24)


def test_a_load_without_memory_gives_its_turn_up() -> None:
    # The reserve takes what a load would need: nothing was ever admitted that could make way.
    simulation = Simulation(PLAIN, 12, 1000, io_bandwidth=12, policy=policy())
    for request in SPILLING[:2]:
        simulation.arrive(request)
    pool = simulation.machines.pool
    pool.gpu_reserved += 12
    simulation.cache.empty()
    simulation.arrive(SPILLING[2])
    pool.gpu_reserved -= 12
    report = simulation.finish()
    assert (report.reloads, report.saved_tokens, report.load_wait_ms) == (0, 0, 0)


def test_the_reserve_is_left_to_loads() -> None:
    report = simulate([prompt(0, 1, 2, 3)], PLAIN, 12, disk=100, policy=policy(reserve=0.1))
    assert report.peak_bytes == {"compressed_kv": 0}
    assert simulate([prompt(0, 1, 2, 3)], PLAIN, 12, policy=policy(reserve=0.1)).peak_bytes == {"compressed_kv": 12}


# ---- The tables decide -----------------------------------------------------------------------------------------------


class Checked(Simulation):
    """Evaluates every invariant of the tables before a request lets go, and compares each plan with the definition."""

    checked = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.invariants: list[tuple[Any, str, str, str, Any]] = []
        for lane in self.machines.lanes:
            for item in self.machines.tables.forms("invariant"):
                if item.scope in ("segment", "lease", "request", "global"):
                    kind = item.kinds.get("self", "")
                    test = lane.world.machine.predicate(item.expr, item.scope)
                    self.invariants.append((lane, item.scope, kind, item.id, test))
        self.hits: list[Lease] = []
        begin, end, plan = self.protocol.begin, self.protocol.end, self.planner.plan

        def begun(length: int, matched: int, path: TreePath, plan: Plan) -> list[Lease]:
            self.hits = begin(length, matched, path, plan)
            return self.hits

        def ended(hits: list[Lease]) -> None:
            self.check()
            end(hits)

        def planned(path: TreePath, limit: int) -> Plan:
            found = plan(path, limit)
            self.compare(path, limit, found)
            return found

        self.protocol.begin, self.protocol.end = begun, ended  # type: ignore[method-assign]
        self.planner.plan = planned  # type: ignore[method-assign]

    def check(self) -> None:
        pool, leases = self.machines.pool, [*self.hits, *self.cache.kept]
        by_lane: dict[int, list[tuple[GroupRows, Any]]] = {}
        for g, segment in self.segments():
            by_lane.setdefault(id(g.lane), []).append((g, segment))
        for lane, scope, kind, name, test in self.invariants:
            records: list[tuple[Any, ...]] = [()]
            if scope == "request":
                records = [(lane.request,)]
            elif scope == "segment":
                records = [(s,) for g, s in by_lane.get(id(lane), []) if g.kind == kind]
            elif scope == "lease":
                records = [(s, v, lane.request) for g, s, v in leases if g.lane is lane and g.kind == kind]
            for record in records:
                assert test(pool, *record), f"{name} is broken by {record}"
                self.checked += 1
        # Counts are sums over leases by definition.
        for _, segment in self.segments():
            held = [v for _, s, v in leases if s is segment]
            assert segment.pins == len(held)

    def segments(self) -> Iterator[tuple[GroupRows, Any]]:
        nodes = [self.tree.root]
        while nodes:
            node = nodes.pop()
            nodes.extend(node.children.values())
            for cell in node.cells:
                yield from ((cell.rows, s) for s in cell.segments if s is not None)

    def compare(self, path: TreePath, limit: int, found: Plan) -> None:
        """The plan must be what recovery's own definition gives for the same contents."""
        groups, contents = [], {}
        known = {g.group.name: g for g in self.machines.groups}
        for part in self.model.groups:
            params = {"ratio": part.ratio or 1, "halo": part.halo or 0, "window": part.span or 1}
            own = {name: params[name] for name in PARAMS[part.kind]}
            groups.append(cache_group(part.name, part.kind, self.alignment, own))
            if part.name not in known:
                continue
            g, blocks, ends = known[part.name], 0, set()
            for node, _ in path:
                cell = node.cells[g.index]
                if g.ranged and cell.segments[0] is not None:
                    for start in range(node.start, node.cuts[-1], self.alignment):
                        blocks |= 1 << (start // self.alignment)
                elif not g.ranged:
                    ends |= {cut for cut, s in zip(node.cuts, cell.segments, strict=True) if s is not None}
            contents[part.name] = Contents(blocks, frozenset(ends))
        hit = self.definition(groups, contents, limit)
        assert found.s == hit.r // self.alignment * self.alignment

    def definition(self, groups: list[Any], contents: dict[str, Contents], limit: int) -> Hit:
        length = limit + 1
        if self.recovery == "bounded":
            window = max(g.span or 0 for g in self.model.groups)
            return bounded_hit(groups, contents, limit, length, window, self.alignment)
        exact = zero_exact_hit(layer_stack(self.model, groups), contents, limit, length, self.alignment)
        if exact.frontier < limit:  # what comes after the frontier is published here, so it has to be exact as well
            cut = exact.frontier
            exact = zero_exact_hit(layer_stack(self.model, groups), contents, cut, cut + 1, self.alignment)
        if self.recovery == "zero-exact":
            return exact
        plain = longest_hit(groups, contents, limit, length, self.alignment)
        return max(plain, exact, key=lambda hit: hit.r // self.alignment)


PARAMS = {
    "compressed_kv": ("ratio",),
    "swa_window": ("window",),
    "uncompressed_tail": ("ratio", "halo"),
    "recurrent_state": (),
}


def random_prompts(seed: int, count: int) -> Iterator[Request]:
    """Prompts that share, branch and end inside each other, in blocks of 4 tokens."""
    draw = random.Random(seed)
    seen: list[tuple[int, ...]] = [()]
    fresh = 0
    for number in range(count):
        base = draw.choice(seen)
        ids = list(base[: draw.randint(0, len(base))])
        for _ in range(draw.randint(0 if ids else 1, 3)):
            fresh += 1
            ids.append(fresh)
        seen.append(tuple(ids))
        yield prompt(number * draw.choice((0.1, 5.0)), *ids, tokens=4 * len(ids) - draw.choice((0, 0, 1)))


@pytest.mark.parametrize(
    ("geometry", "recovery"),
    [
        pytest.param(geometry, recovery, id=f"{name}-{recovery}")
        for name, geometry, ways in (
            ("windowed", WINDOWED, ("full", "bounded", "zero-exact")),
            ("v4-like", V4_LIKE, ("full", "bounded", "zero-exact")),
            ("recurrent", RECURRENT, ("full", "zero-exact")),
        )
        for recovery in ways
    ],
)
@pytest.mark.parametrize(("memory", "disk"), [(40, 0), (40, 100), (150, 30), (FOREVER, 0)])
def test_invariants_hold_and_plans_follow_recovery(geometry: Model, recovery: str, memory: int, disk: int) -> None:
    checked = 0
    for seed in range(4):
        own = policy(swa_window=True, uncompressed_tail=seed % 2 == 0)
        simulation = Checked(geometry, memory, disk, recovery=recovery, io_bandwidth=2000, policy=own)
        for request in sorted(random_prompts(seed, 60), key=lambda r: r.arrival_ms):
            simulation.arrive(request)
        report = simulation.finish()
        checked += simulation.checked
        assert report.saved_tokens <= report.hit_tokens <= report.input_tokens
    assert checked > 5_000


@pytest.mark.parametrize("name", model_names())
def test_every_model_runs(name: str) -> None:
    geometry = load_model(name)
    report = simulate(generate("mixed", 40), geometry, 4 << 30, 8 << 30)
    assert report.requests == 40
    assert report.rows_fired > 0


def test_groups_of_one_kind_are_in_different_lanes() -> None:
    for name in model_names():
        geometry = load_model(name)
        lanes = deal(geometry.groups)
        assert sorted(g.name for members, _ in lanes for g in members) == sorted(g.name for g in geometry.groups)
        for members, constants in lanes:
            assert len({g.kind for g in members}) == len(members)
            assert all(g.ratio in (None, constants["RATIO"]) and g.span in (None, constants["W"]) for g in members)


@pytest.mark.parametrize(
    ("file", "old", "new"),
    [
        ("common.toml", '"gpu_used -= mem", "generation += 1", "placed', '"generation += 1", "placed'),
        ("protocols/prefix_hit.toml", '"lease.in_flight -= 1", "steps -= 1"', '"lease.in_flight -= 1"'),
        ("common.toml", '"committed = known"', '"committed = known - 1"'),
        ("protocols/prefix_hit.toml", '"req.matched = matched"', '"req.matched = 0"'),
        ("protocols/prefix_hit.toml", '"pins -= 1", "req.keeping -= 1"', '"req.keeping -= 1"'),
        ("protocols/prefix_hit.toml", '"req.past_l4 += 1"', '"req.past_l4 += 0"'),
        ("protocols/prefix_hit.toml", '"req.cov = end"', '"req.cov = start"'),
        ("kinds/on_disk_prefix.toml", '"io = 0", "io_used -= 1", "tries = 0"', '"io = 0", "tries = 0"'),
    ],
)  # fmt: skip
def test_a_fault_in_the_tables_does_not_pass_unseen(tmp_path: Path, file: str, old: str, new: str) -> None:
    spec = tmp_path / "spec"
    shutil.copytree(SPEC_DIR, spec)
    text = (spec / file).read_text()
    assert old in text
    (spec / file).write_text(text.replace(old, new))
    requests = [*SPILLING, prompt(5000, 4, 5, 6, 8)]
    assert simulate(requests, PLAIN, 12, disk=100, io_bandwidth=12, policy=policy()).reloads == 2
    with pytest.raises((Refused, NotDrainedError)):
        simulate(requests, PLAIN, 12, disk=100, io_bandwidth=12, policy=policy(), spec=spec)


def test_memory_that_is_charged_and_not_held_is_an_error() -> None:
    simulation = Simulation(PLAIN, FOREVER)
    simulation.arrive(prompt(0, 1, 2, 3))
    simulation.machines.pool.gpu_used += 1
    with pytest.raises(NotDrainedError, match="gpu_used is 13, its segments add up to 12"):
        simulation.finish()


def test_a_lease_that_is_still_held_is_an_error() -> None:
    simulation = Simulation(PLAIN, FOREVER)
    simulation.arrive(prompt(0, 1, 2, 3))
    lease = next(e for e in simulation.cache.made if e.cls == "lease")
    lease.stage = "KEEPING"
    with pytest.raises(NotDrainedError, match="lease ended in stage KEEPING"):
        simulation.finish()


# ---- Arguments and report --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"gpu_memory": 0}, "gpu_memory: expected at least 1 byte, got 0"),
        ({"disk": -1}, "disk: expected at least 0 bytes, got -1"),
        ({"alignment": 6}, "alignment: expected a multiple of the 4 tokens of tiny, got 6"),
        ({"alignment": 0}, "alignment: expected a multiple"),
        ({"io_bandwidth": 0}, "io_bandwidth: expected more than 0"),
        ({"io_bandwidth": math.nan}, "io_bandwidth: expected more than 0"),
        ({"recovery": "half"}, "recovery: expected one of full, bounded, zero-exact, got 'half'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=f"^simulate:{reason}"):
        simulate([], PLAIN, **{"gpu_memory": 1, **options})


def test_an_exact_replay_needs_the_order_of_the_layers() -> None:
    unordered = model(msgspec.structs.replace(WINDOW, layer_ids=None), FULL)
    with pytest.raises(InputError, match="layer_ids"):
        simulate([], unordered, 1, recovery="zero-exact")
    requests = [prompt(0, 1, 2, 3), prompt(1, 4, 5, 6), prompt(2, 1, 2, 3, 7)]
    assert simulate(requests, unordered, 24).saved_tokens == 0


def test_an_empty_stream_reports_zeros() -> None:
    report = simulate([], PLAIN, 1)
    assert (report.requests, report.hit_rate, report.validation_pass_rate, report.composite) == (0, 0.0, 1.0, 0.0)


def test_a_fault_of_the_trace_is_passed_on(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [1]}\n')
    with pytest.raises(InputError, match=r"trace\.jsonl:1"):
        simulate(read_trace(path), PLAIN, 1)


def test_requests_are_read_once_and_one_at_a_time() -> None:
    alive = 0

    def stream() -> Iterator[Request]:
        nonlocal alive
        for number in range(50):
            alive = number
            yield prompt(number, number)

    assert simulate(stream(), PLAIN, FOREVER).requests == 50
    assert alive == 49


def test_the_same_trace_gives_the_same_report() -> None:
    first, second = (simulate(random_prompts(7, 80), V4_LIKE, 60, 60, policy=policy()) for _ in range(2))
    assert first == second


def test_report_as_json_and_as_table() -> None:
    report = simulate([prompt(0, 1, 2, 3), prompt(1, 1, 2, 9)], PLAIN, FOREVER)
    fields = msgspec.json.decode(msgspec.json.encode(report))
    wanted = {"requests", "input_tokens", "hit_tokens", "hit_rate", "validation_pass_rate", "composite"}
    assert wanted | {"recomputed_tokens"} <= fields.keys()
    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
    table = report_table(report)
    cells = dict(zip(*(column.cells for column in table.columns), strict=True))
    assert (cells["matched tokens"], cells["hit rate"], cells["peak of compressed_kv"]) == ("8", "33.3%", "16 B")
