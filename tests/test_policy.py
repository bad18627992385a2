"""The order in which device copies go and come back: read strictly, and followed under pressure."""

import shutil
from pathlib import Path

import msgspec
import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.models import Group, Model
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.policy import FILE, KindPolicy, Policy, check_policy, load_policy
from hybridkv_ref.request_traces import Request
from hybridkv_ref.simulate import Simulation, device_kinds, simulate

KINDS = device_kinds()
MODEL = Model(
    name="two-groups",
    source="made up",
    confidence="made up",
    note="One byte per token and group.",
    alignment=4,
    groups=(
        Group(
            name="full",
            kind="compressed_kv",
            layers=1,
            layer_ids=(1,),
            ratio=1,
            entry_bytes={"bf16": 1},
            block_tokens=4,
        ),
        Group(
            name="window",
            kind="swa_window",
            layers=1,
            layer_ids=(0,),
            window=5,
            entry_bytes={"bf16": 1},
            block_tokens=4,
        ),
    ),
)


def prompt(at: float, *ids: int) -> Request:
    return Request(at, 4 * len(ids), 0, 4, ids)


def ranked(**ranks: int) -> Policy:
    """The shipped policy with other ranks of eviction."""
    policy = load_policy(KINDS)
    changed = {k: msgspec.structs.replace(policy.kinds[k], evict=rank) for k, rank in ranks.items()}
    return msgspec.structs.replace(policy, kinds={**policy.kinds, **changed})


def copy_spec(tmp_path: Path, text: str) -> Path:
    (tmp_path / FILE).write_text(text)
    return tmp_path


def test_entries_without_a_durable_copy_go_last() -> None:
    kinds = load_policy(KINDS).kinds
    last = max(own.evict for own in kinds.values())
    assert kinds["compressed_kv"].evict == last
    assert all(own.evict_durable < last for own in kinds.values())
    assert max(own.evict_durable for own in kinds.values()) == kinds["compressed_kv"].evict_durable


def test_pressure_follows_the_policy() -> None:
    # Two prompts of 12 tokens: 12 bytes of entries and 12 of window rows each, where 36 bytes fit.
    requests = [prompt(0, 1, 2, 3), prompt(1, 4, 5, 6)]
    assert simulate(requests, MODEL, 36).evictions == {"compressed_kv": 0, "swa_window": 1}


def test_another_policy_evicts_others() -> None:
    requests = [prompt(0, 1, 2, 3), prompt(1, 4, 5, 6)]
    turned = ranked(compressed_kv=10, swa_window=80)
    assert simulate(requests, MODEL, 36, policy=turned).evictions == {"compressed_kv": 1, "swa_window": 0}


def test_kinds_of_one_rank_go_by_last_use() -> None:
    requests = [prompt(0, 1, 2, 3), prompt(1, 4, 5, 6), prompt(2, 7, 8, 9)]
    report = simulate(requests, MODEL, 24, policy=ranked(compressed_kv=10, swa_window=10))
    assert report.evictions == {"compressed_kv": 2, "swa_window": 2}


def test_nothing_makes_way_for_what_goes_before_it() -> None:
    # The second prompt's entries displace the first one's window rows; its own window rows then find no room.
    report = simulate([prompt(0, 1, 2, 3), prompt(1, 4, 5, 6)], MODEL, 24)
    assert report.evictions == {"compressed_kv": 0, "swa_window": 1}
    assert report.peak_bytes == {"compressed_kv": 24, "swa_window": 12}


def test_a_durable_copy_changes_the_rank() -> None:
    policy = load_policy(KINDS)
    simulation = Simulation(MODEL, 24, disk=100, io_bandwidth=1e9, policy=msgspec.structs.replace(policy, reserve=0.0))
    # The first prompt's entries are spilled for the third one's and come back for the fourth request, 1 s later.
    for request in (prompt(0, 1, 2, 3), prompt(1, 4, 5, 6), prompt(2, 7, 8, 9), prompt(1000, 1, 2, 3, 0)):
        simulation.arrive(request)
    while simulation.store.running:
        simulation.store.complete()
    own = policy.kinds["compressed_kv"]
    durable = [cell.node.keys for cell in simulation.cache.queues[own.evict_durable]]
    assert durable == [[1, 2, 3]]
    assert all(cell.objects == [None] for cell in simulation.cache.queues[own.evict])
    simulation.finish()


def test_loads_are_asked_for_in_the_order_of_recovery() -> None:
    def first_load(policy: Policy) -> str:
        # One rank for all: both groups of the first prompt are spilled for the second one, and may displace others.
        spilling = {k: msgspec.structs.replace(own, spill=True, evict=80) for k, own in policy.kinds.items()}
        policy = msgspec.structs.replace(policy, kinds=spilling, reserve=0.0)
        simulation = Simulation(MODEL, 24, disk=100, io_bandwidth=1, policy=policy)
        for request in (prompt(0, 1, 2, 3), prompt(1, 4, 5, 6), prompt(2, 1, 2, 3, 0)):
            simulation.arrive(request)
        running = simulation.store.running
        assert running is not None
        kind = running.g.kind
        simulation.finish()
        return kind

    policy = load_policy(KINDS)
    turned = {"compressed_kv": msgspec.structs.replace(policy.kinds["compressed_kv"], recover=90)}
    assert first_load(policy) == "compressed_kv"
    assert first_load(msgspec.structs.replace(policy, kinds={**policy.kinds, **turned})) == "swa_window"


def test_a_kind_that_the_file_does_not_name_gets_the_default() -> None:
    policy = load_policy({**KINDS, "made_up": False, "made_up_exact": True})
    assert policy.kinds["made_up"] == policy.default
    assert policy.kinds["made_up_exact"] == msgspec.structs.replace(policy.default, snapshots="ends")
    assert load_policy(KINDS).kinds.keys() == KINDS.keys()


def test_a_kind_without_device_copies_has_none() -> None:
    policy = load_policy(KINDS)
    more = {**policy.kinds, "on_disk_prefix": KindPolicy(evict=1, evict_durable=1, recover=1, spill=False)}
    with pytest.raises(InputError, match=r"kinds\.on_disk_prefix: no such kind"):
        check_policy(msgspec.structs.replace(policy, kinds=more), KINDS, "there")


@pytest.mark.parametrize(
    ("kind", "snapshots", "reason"),
    [("recurrent_state", None, "missing in a kind"), ("compressed_kv", "ends", "no meaning in a kind")],
)
def test_snapshots_belong_to_exact_kinds(kind: str, snapshots: str | None, reason: str) -> None:
    policy = load_policy(KINDS)
    wrong = {**policy.kinds, kind: msgspec.structs.replace(policy.kinds[kind], snapshots=snapshots)}
    with pytest.raises(InputError, match=rf"kinds\.{kind}\.snapshots: .*{reason}"):
        check_policy(msgspec.structs.replace(policy, kinds=wrong), KINDS, "there")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("reserve = 0.02", "reserve = 1.5", "reserve: Expected `float` < 1"),
        ("reserve = 0.02", "reserve = 0.02\nshare = 1", "unknown field `share`"),
        ("spill = false", 'spill = "no"', "Expected `bool`"),
        ("evict = 10", "evict = -1", "Expected `int` >= 0"),
        ("recover = 40\n", "", "missing required field `recover`"),
        ('snapshots = "ends"', 'snapshots = "some"', "Invalid enum value"),
        ("[kinds.swa_window]", "[kinds.swa_window", "not TOML"),
    ],
)
def test_a_bad_file_is_one_line_with_its_place(tmp_path: Path, old: str, new: str, reason: str) -> None:
    text = (SPEC_DIR / FILE).read_text()
    assert old in text
    with pytest.raises(InputError) as caught:
        load_policy(KINDS, copy_spec(tmp_path, text.replace(old, new, 1)))
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / FILE}:")
    assert reason in message
    assert "\n" not in message


def test_a_missing_file_and_a_binary_one(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        load_policy(KINDS, tmp_path)
    (tmp_path / FILE).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not TOML"):
        load_policy(KINDS, tmp_path)


def test_the_shipped_file_is_read_from_any_folder(tmp_path: Path) -> None:
    shutil.copy(SPEC_DIR / FILE, tmp_path / FILE)
    assert load_policy(KINDS, tmp_path) == load_policy(KINDS)
