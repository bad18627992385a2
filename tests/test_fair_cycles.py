"""No claim has a fair cycle; without fairness, order or a way out each has one, and the lasso is a real run."""

import msgspec
import pytest

from hybridkv_ref.loader import build
from hybridkv_ref.model_checks.explore import Graph, explore
from hybridkv_ref.model_checks.fair_cycles import Lasso, fair_cycles, stuck
from hybridkv_ref.model_checks.instances import Instance, read_instances
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import Spec, read_spec
from hybridkv_ref.tables import Tables

SPEC = read_spec(SPEC_DIR)
TABLES = build(SPEC)
PATH = SPEC_DIR / "instances.toml"
COMMON, HIT, TRANSFER, GRAPH, DISK = (
    "common.toml",
    "protocols/prefix_hit.toml",
    "protocols/transfer.toml",
    "protocols/cuda_graph.toml",
    "kinds/on_disk_prefix.toml",
)


def changed(spec: Spec, label: str, row: str, **fields: object) -> Spec:
    table = spec.files[label]
    rows = {**table.rows, row: msgspec.structs.replace(table.rows[row], **fields)}
    return msgspec.structs.replace(spec, files={**spec.files, label: msgspec.structs.replace(table, rows=rows)})


def searched(tables: Tables, name: str) -> Graph:
    return explore(tables, next(i for i in read_instances(tables, PATH)[0] if i.name == name))


def lassos(tables: Tables, name: str) -> dict[str, Lasso]:
    return {lasso.claim: lasso for lasso in fair_cycles(searched(tables, name)).lassos}


@pytest.mark.parametrize(
    "name",
    [
        "reader<recurrent_state>",
        "spill<compressed_kv>",
        "fold<indexer_state>",
        "steps<swa_window>",
        "transfer<swa_window>",
        "ranks",
        "preempt",
        "graph",
    ],
)
def test_claims_hold_where_nothing_is_changed(name: str) -> None:
    graph = searched(TABLES, name)
    found = fair_cycles(graph)
    assert found.checked != ()
    assert found.lassos == ()
    ends = stuck(graph)
    assert ends.judged
    assert (ends.traps, ends.dead) == ((), ())


@pytest.mark.parametrize(
    ("label", "row", "name", "claim"),
    [
        (HIT, "drop", "reader<recurrent_state>", "lease_ends<recurrent_state>"),
        (HIT, "let_go", "reader<recurrent_state>", "lease_ends<recurrent_state>"),
        (HIT, "recompute", "reader<recurrent_state>", "request_ends"),
        (COMMON, "free", "reader<recurrent_state>", "eviction_ends<recurrent_state>"),
        (COMMON, "cancel", "reader<recurrent_state>", "lease_ends<recurrent_state>"),
        (HIT, "complete", "steps<swa_window>", "steps_of_the_gone_end<swa_window>"),
        (HIT, "resume_cold", "preempt", "request_ends"),
        (TRANSFER, "withdraw", "ranks", "votes_end"),
        (TRANSFER, "transfer_fail", "transfer<recurrent_state>", "transfer_ends"),
        (TRANSFER, "transfer_close", "transfer<recurrent_state>", "transfer_ends"),
        (GRAPH, "replayed", "graph", "replay_ends"),
        (DISK, "skip", "spill<compressed_kv>", "queue_moves<on_disk_prefix>"),
        (DISK, "load_fail", "spill<compressed_kv>", "copy_ends_restore<on_disk_prefix>compressed_kv>"),
        (DISK, "scrap", "media", "objects_drain<on_disk_prefix>"),
    ],
)
def test_a_row_that_is_no_longer_fair_leaves_a_lasso(label: str, row: str, name: str, claim: str) -> None:
    tables = build(changed(SPEC, label, row, fair=False))
    found = lassos(tables, name)
    assert claim in found
    assert found[claim].prefix != ()


def test_a_lasso_is_a_run_that_comes_back() -> None:
    """Along the cycle every change is undone, and each step starts where the last one ended."""
    tables = build(changed(SPEC, HIT, "recompute", fair=False))
    lasso = lassos(tables, "reader<recurrent_state>")["request_ends"]
    now: dict[str, int | str] = {}
    for step in (*lasso.prefix, *lasso.cycle):
        for field, (before, after) in step.changed.items():
            assert now.get(field, before) == before
            now[field] = after
    entered: dict[str, int | str] = {}
    for step in lasso.prefix:
        entered |= {field: after for field, (_, after) in step.changed.items()}
    touched = {field: before for step in reversed(lasso.cycle) for field, (before, _) in step.changed.items()}
    assert {field: now[field] for field in touched} == touched
    assert all(entered[field] == value for field, value in touched.items() if field in entered)


def test_a_stutter_is_a_cycle() -> None:
    """Nothing else need happen: a replay that may last for ever is an execution without a further step."""
    lasso = lassos(build(changed(SPEC, GRAPH, "replayed", fair=False)), "graph")["replay_ends"]
    assert lasso.prefix[-1].event == "graph.replay"
    assert {s.event for s in lasso.cycle} <= {e.id for e in TABLES.events}


def without_order() -> Tables:
    """Loads start fairly but in any order, and nobody gives a turn up."""
    spec = SPEC
    for row, fair in (("load_begin", True), ("skip", False)):
        when = [w for w in spec.files[DISK].rows[row].when if w != "ticket == serving"]
        assert len(when) < len(spec.files[DISK].rows[row].when)
        spec = changed(spec, DISK, row, when=when, fair=fair)
    return build(spec)


def test_without_order_one_object_starves_another() -> None:
    """Weak fairness of a load's start is not enough: the slot is taken whenever the other object looks."""
    found = lassos(without_order(), "queue")
    starved = found["queue_moves<on_disk_prefix>"]
    loads = [s.entities for s in starved.cycle if s.event == "on_disk_prefix.load_begin"]
    assert loads
    assert (*starved.entities,) not in loads
    assert "queue_moves<on_disk_prefix>" not in lassos(TABLES, "queue")


def test_a_guard_that_blocks_the_end_leaves_a_lasso() -> None:
    """A fair row that is never enabled helps nobody."""
    when = [*SPEC.files[HIT].rows["let_go"].when, "req.stage == DONE", "req.keeping == 0"]
    tables = build(changed(SPEC, HIT, "let_go", when=when))
    assert "lease_ends<recurrent_state>" in lassos(tables, "reader<recurrent_state>")


def test_a_stage_without_a_way_out_is_a_trap() -> None:
    tables = build(changed(SPEC, COMMON, "free", when=[*SPEC.files[COMMON].rows["free"].when, "pins > 0"]))
    ends = stuck(searched(tables, "reader<recurrent_state>"))
    assert ("a", "RETIRING") in {(entity, stage) for entity, stage, _ in ends.traps}


def test_a_state_without_a_step_is_dead() -> None:
    spec = changed(SPEC, GRAPH, "discard_graph", when=["graph.captured != graph.captured"])
    spec = changed(spec, GRAPH, "replay", when=["graph.captured != graph.captured"])
    spec = changed(spec, GRAPH, "set_contents", when=["padded != padded"])
    ends = stuck(searched(build(spec), "graph"))
    assert ends.dead
    assert all(trace for trace in ends.dead)


def test_nothing_is_said_about_a_search_that_ends_early() -> None:
    graph = searched(TABLES, "exact<compressed_kv>")
    assert fair_cycles(graph).checked == ()
    assert stuck(graph).judged == frozenset()


def test_a_switched_off_way_out_is_no_verdict() -> None:
    chosen = next(i for i in read_instances(TABLES, PATH)[0] if i.name == "graph")
    graph = explore(TABLES, Instance(**{**vars(chosen), "off": frozenset({"replayed"})}))
    assert fair_cycles(graph).checked == ()
    assert stuck(graph).judged == frozenset()
