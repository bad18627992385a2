"""The proofs: what they cover, and that each planted fault fails the property and names the rule that it breaks."""

import dataclasses
import itertools
from collections import Counter
from pathlib import Path

import msgspec
import pytest
import z3
from helpers import add_invariant, add_row, copy_spec, drop, edit, example, failed, proofs_of_changed, prove

from hybridkv_ref.loader import build, load_tables
from hybridkv_ref.model_checks import base as base_module
from hybridkv_ref.model_checks import induction, smt
from hybridkv_ref.model_checks.base import Base, prove_base
from hybridkv_ref.model_checks.check import _report
from hybridkv_ref.model_checks.frames import Assumptions
from hybridkv_ref.model_checks.obligations import TaskResult
from hybridkv_ref.model_checks.report import counterexample_table
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.rules import load_rules
from hybridkv_ref.spec_files import read_spec

TABLES = load_tables()
BASE = Assumptions(TABLES)
SPEC = read_spec(SPEC_DIR)
COMMON, HIT, HANDOFFS, GRAPH = "common.toml", *(f"protocols/{n}.toml" for n in ("prefix_hit", "handoffs", "cuda_graph"))
TRANSFER = "protocols/transfer.toml"
SWA, CKV, TAIL, INDEX, DISK = (
    f"kinds/{n}.toml" for n in ("swa_window", "compressed_kv", "uncompressed_tail", "indexer_state", "on_disk_prefix")
)


@pytest.fixture(scope="session")
def proofs() -> TaskResult:
    """Every obligation of every row, once."""
    return prove(TABLES, TABLES.events)


# -- the whole set -----------------------------------------------------------------------------------------------------
def test_everything_is_proved(proofs: TaskResult) -> None:
    assert failed(proofs) == []
    assert proofs.counterexamples == []
    assert failed(prove_base(TABLES, Assumptions(TABLES))) == []


def test_at_least_5000_obligations_go_to_the_solver(proofs: TaskResult) -> None:
    assert len(proofs.obligations) >= 5000
    assert len({o.id for o in proofs.obligations}) == len(proofs.obligations)


def test_every_kind_is_a_bystander_of_every_acting_kind(proofs: TaskResult) -> None:
    pairs: Counter[tuple[str, str]] = Counter()
    for obligation in proofs.obligations:
        event, _, bystanders = obligation.id.partition("@")
        for actor in TABLES.event(event.partition("/")[0]).kinds.values():
            pairs.update((actor, kind) for kind in TABLES.kinds if f":{kind}" in bystanders)
    assert len(TABLES.kinds) == 6
    assert set(pairs) == {(a, b) for a in TABLES.kinds for b in TABLES.kinds}


def test_no_row_and_no_row_with_a_bystander_is_proved_for_want_of_a_case(proofs: TaskResult) -> None:
    ids = {o.id for o in proofs.obligations if o.method == "vacuity"}
    assert {f"{e.id}/can_fire" for e in TABLES.events} <= ids
    for obligation in proofs.obligations:
        event, _, bystanders = obligation.id.partition("@")
        if bystanders:
            assert f"{event.partition('/')[0]}/can_fire@{bystanders}" in ids


def test_the_methods_of_the_report_are_those_of_the_proofs(proofs: TaskResult) -> None:
    from hybridkv_ref.model_checks.report import MEANING

    assert {o.method for o in proofs.obligations} <= set(MEANING)


# -- deleting ``pins == 0`` --------------------------------------------------------------------------------------------
GUARDED = [
    (label, section, name)
    for label, file in SPEC.files.items()
    for section in ("rows", "extend", "handoffs")
    for name, row in getattr(file, section).items()
    if "pins == 0" in row.when
]


def test_the_rows_that_free_move_or_overwrite_ask_for_no_pins() -> None:
    assert {name for _, _, name in GUARDED} >= {
        "free",
        "move",
        "reopen",
        "split_out",
        "join_keep",
        "join_give",
        "slide",
    }


@pytest.mark.parametrize(("label", "section", "name"), GUARDED)
def test_no_row_may_lose_its_test_for_pins(tmp_path: Path, label: str, section: str, name: str) -> None:
    spec = copy_spec(tmp_path)
    drop(spec / label, f"{section}.{name}", "pins == 0")
    for event, result in proofs_of_changed(spec, TABLES, BASE):
        assert any(rule.startswith("HKV-S3-") for o in failed(result) for rule in o.rules), event.id


# -- other planted faults: file, section, text, what stands there instead, the property that fails, its rule -----------
FAULTS = [
    (COMMON, "rows.admit", " + RESERVE <=", " <=", "admission_leaves_reserve", "HKV-S1-009"),
    (COMMON, "rows.admit", '  "used + size <= CAP",\n', "", "kind_cap", "HKV-S1-002"),
    (COMMON, "rows.in_begin", ', "used + size <= CAP"', "", "kind_cap", "HKV-S1-002"),
    (COMMON, "rows.admit", ', "generation += 1"', "", "life_moves_generation", "HKV-S3-003"),
    (COMMON, "rows.move", ', "generation += 1"', "", "write_moves_generation", "HKV-S3-003"),
    (COMMON, "rows.in_end", '"generation += 1", ', "", "completion_moves_generation", "HKV-S3-010"),
    (COMMON, "rows.append", ', "holds == 0"', "", "held_bytes_stay", "HKV-S3-009"),
    (COMMON, "rows.abort", '"holds == 0", ', "", "source_intact", "HKV-S3-014"),
    (COMMON, "rows.abort", '"used -= mem", ', "", "sum.*.used", "HKV-S1-001"),
    (COMMON, "rows.retire", 'when = ["holds == 0"]\n', "", "held_is_source", "HKV-S3-009"),
    (COMMON, "rows.retire", 'then = ["was = stage"]\n', "", "mark_remembers", "HKV-S3-007"),
    (COMMON, "rows.unmark", 'when = ["pins > 0"]\n', "", "unmark_has_pins", "HKV-S3-008"),
    (COMMON, "rows.reopen", '"epoch == req.epoch", ', "", "writer_describes", "HKV-KEY-002"),
    (COMMON, "rows.commit", '"lease.seen = generation", ', "", "intact_generation", "HKV-S3-006"),
    (COMMON, "rows.free", 'to = "EMPTY"', 'to = "INBOUND"', "allowed_edges", "HKV-S2-002"),
    (COMMON, "rows.out_begin", 'then = ["holds += 1"]', "then = []", "sum.holds", "HKV-REF-006"),
    (HIT, "rows.pass_l1", '"lease.seen == generation", ', "", "intact_generation", "HKV-S3-004"),
    (HIT, "rows.pass_l1", ', "req.need_until <= keep_until"', "", "checked_life", "HKV-L1-005"),
    (HIT, "rows.pass_l2", 'when = ["abi == req.abi"]\n', "", "checked_abi", "HKV-L2-001"),
    (HIT, "rows.pass_l4", ', "slack == 0"', "", "checked_alignment", "HKV-L4-001"),
    (HIT, "rows.pin", ', "req.hits == 0 or start == req.cov"', "", "hit_is_covered", "HKV-L1-007"),
    (HIT, "rows.find", 'segment_from = "READABLE"\n', "", "only_whole_segments_are_found", "HKV-S3-011"),
    (HIT, "rows.join", "resume = true\n", "", "joint", "HKV-L3-001"),
    (HIT, "rows.retry", '"f < req.f"', '"f <= req.f"', "retries_shrink", "HKV-LIVE-007"),
    (HIT, "rows.release", '"pins -= 1", ', "", "sum.pins", "HKV-REF-006"),
    (HIT, "rows.close", ', "req.keeping == 0"', "", "idle_is_empty", "HKV-REF-005"),
    (HIT, "rows.match", '"f < req.length", ', "", "resume_position", "HKV-L1-006"),
    (HIT, "rows.pass_l1", '"end + req.ahead <= req.matched", ', "", "successor_is_known", "HKV-KEY-004"),
    (HIT, "rows.dispatch", '"req.stage in RUNNING", ', "", "steps_are_the_running_ones", "HKV-REF-005"),
    (HIT, "rows.dispatch", '"upto <= end", ', "", "steps_see_their_bytes", "HKV-S3-016"),
    (HIT, "rows.dispatch", ', "lease.in_flight + 1 <= PIPELINE"', "", "pipeline_depth", "HKV-S3-016"),
    (HIT, "rows.complete", 'when = ["lease.in_flight > 0"]\n', "", "pipeline_depth", "HKV-REF-003"),
    (HIT, "rows.preempt", 'when = ["req.preempts < MAX_PREEMPTS"]\n', "", "preempted_at_most", "HKV-LIVE-011"),
    (HIT, "rows.resume_cold", '"req.writing == 0", ', "", "preempted_lets_all_go", "HKV-LIVE-011"),
    (COMMON, "rows.free", ', "steps == 0"', "", "freed_without_references", "HKV-REF-004"),
    (COMMON, "rows.commit", '"end <= committed", ', "", "published_is_committed", "HKV-POS-002"),
    (COMMON, "rows.accept_tokens", ', "to <= req.accepted"', "", "the_writer_accepts", "HKV-POS-002"),
    (COMMON, "rows.reject_drafts", '"req.accepted <= to", ', "", "the_writer_rejects", "HKV-POS-003"),
    (COMMON, "rows.reject_drafts", ', "placed += 1"', "", "overwriting_is_placing", "HKV-S3-016"),
    (TRANSFER, "rows.vote", ', "req.f <= hit"', "", "votes_cover_the_hit", "HKV-RANK-001"),
    (TRANSFER, "rows.deliver", 'when = ["xfer.arrived == xfer.parts"]\n', "", "delivery_is_whole", "HKV-L3-003"),
    (TRANSFER, "rows.transfer_close", 'when = ["xfer.shipped == 0"]\n', "", "idle_transfer", "HKV-REF-005"),
    (TRANSFER, "handoffs.ship_begin", '"src.stage in READABLE", ', "", "sender_intact", "HKV-REF-009"),
    (TRANSFER, "handoffs.ship_discard", 'when = ["xfer.stage == FAILING"]\n', "", "parts_begun", "HKV-L3-003"),
    (TRANSFER, "rows.vote", '"rank.index == req.votes", ', "", "each_rank_votes_once", "HKV-RANK-001"),
    (HIT, "rows.pass_l1", ', "req.bounded or not approx"', "", "grade_is_asked_for", "HKV-L3-008"),
    (HIT, "rows.replay_window", ', "req.writing == 0"', "", "writers_grade", "HKV-L3-008"),
    (HANDOFFS, "handoffs.spill_begin", ', "not src.approx"', "", "stored_is_exact", "HKV-L3-008"),
    (
        TAIL,
        "extend.append",
        ', "end + n - RING <= committed - RATIO - HALO + 1 or end + n - RING <= low"',
        "",
        "margin",
        "HKV-TAIL-009",
    ),
    (INDEX, "rows.rebuild_begin", '"keys", ', "", "rebuild_has_keys", "HKV-IDX-006"),
    (TAIL, "rows.fold_out_begin", '"mark + RATIO <= end", ', "", "folding_rows_exist", "HKV-TAIL-006"),
    (TAIL, "rows.fold_out_end", '"mark += RATIO",', '"mark += 1",', "fold_advances_by_ratio", "HKV-TAIL-004"),
    (DISK, "rows.verify", '"arrived == parts", ', "", "publishing_is_whole", "HKV-DISK-003"),
    (DISK, "rows.seal", '"written == parts", ', "", "durable_is_whole", "HKV-DISK-001"),
    (DISK, "rows.load_begin", '"ticket == serving", ', "", "load_in_turn", "HKV-LIVE-005"),
    (DISK, "rows.settle", 'when = ["holds == 0"]\n', "", "restore_is_loading", "HKV-DISK-008"),
    (GRAPH, "rows.replay", '"graph.captured == topology", ', "", "replay_is_current", "HKV-S4-002"),
    (GRAPH, "rows.rebase", 'when = ["replays == 0"]\n', "", "topology_is_fixed_in_replay", "HKV-S4-003"),
    (HANDOFFS, "handoffs.spill_begin", '"src.stage in READABLE", ', "", "spill_source", "HKV-S3-009"),
    (HANDOFFS, "handoffs.clone_begin", 'then = ["copy.seen = src.generation"]\n', "", "source_intact", "HKV-S3-014"),
]


@pytest.mark.parametrize(("label", "header", "old", "new", "prop", "rule"), FAULTS)
def test_a_planted_fault_fails_its_property(
    tmp_path: Path, label: str, header: str, old: str, new: str, prop: str, rule: str
) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / label, old, new, header)
    begin, _, end = prop.partition("*")
    rules: dict[str, tuple[str, ...]] = {}
    for _, result in proofs_of_changed(spec, TABLES, BASE):
        rules |= {o.property.partition("<")[0]: o.rules for o in failed(result)}
        named = [r for name, found in rules.items() if name.startswith(begin) and name.endswith(end) for r in found]
        if rule in named:
            return
    pytest.fail(f"expected {prop} and {rule}, got {rules}")


def test_the_named_rules_exist() -> None:
    assert {rule for *_, rule in FAULTS} <= set(load_rules())


# -- counterexamples ---------------------------------------------------------------------------------------------------
def test_what_is_not_inductive_comes_with_the_step_that_breaks_it() -> None:
    spec = add_invariant(
        SPEC, COMMON, "made_up", scope="segment", has="cacheable", holds="pins <= 3", rules=["HKV-REF-002"]
    )
    tables = build(spec)
    pin = next(e for e in tables.events if e.row == "pin")
    found = example(prove(tables, [pin]), "made_up")
    pins = next(c for c in found.changes if c.field == "pins")
    assert (pins.before, pins.after) == (3, 4)
    assert all(change.before != change.after for change in found.changes)
    assert (found.event, found.rules, found.text) == (pin.id, ("HKV-REF-002",), "pins <= 3")
    assert not found.reachable, "a counterexample to induction need not be reachable"
    columns = counterexample_table(found).columns
    assert [c.header for c in columns] == ["entity", "field", "before", "after"]
    assert ("pins", "3", "4") in [row[1:] for row in zip(*(c.cells for c in columns), strict=True)]


def test_an_invariant_that_is_false_at_first_is_not_proved() -> None:
    spec = add_invariant(SPEC, COMMON, "made_up", scope="segment", holds="mem >= 1")
    tables = build(spec)
    base = Base(tables, Assumptions(tables))
    for prop in tables.forms("invariant"):
        if prop.id.startswith("made_up"):
            base.initially(prop)
    assert {o.id for o in failed(base.out)} == {f"init/made_up<{kind}>" for kind in tables.kinds}


# -- nothing is proved by accident -------------------------------------------------------------------------------------
def test_a_row_that_can_never_fire_is_reported() -> None:
    spec = add_row(SPEC, SWA, "made_up", when=["start > end"], then=["mark = 0", "generation += 1"])
    tables = build(spec)
    result = prove(tables, [tables.event("swa_window.made_up")])
    assert {(o.id, o.method) for o in failed(result)} >= {("swa_window.made_up/can_fire", "vacuity")}
    assert {o.method for o in failed(result)} == {"vacuity"}, "all else is proved, for want of a case"


def test_a_limit_that_can_never_be_reached_is_reported() -> None:
    spec = add_row(
        SPEC, SWA, "made_up", inputs={"n": "int"}, when=["n > 2", "mark != n"], then=["mark = n"], can=["n == 2"]
    )
    tables = build(spec)
    broken = failed(prove(tables, [tables.event("swa_window.made_up")]))
    assert ("swa_window.made_up/can: n == 2", "boundary") in {(o.id, o.method) for o in broken}


def test_a_row_that_changes_nothing_is_reported() -> None:
    tables = build(add_row(SPEC, SWA, "made_up", then=["mark = mark"]))
    assert "changes_something" in {o.property for o in failed(prove(tables, [tables.event("swa_window.made_up")]))}


def test_a_kinds_row_cannot_write_another_kinds_pool() -> None:
    """The loader keeps names apart; the proof does not rely on it."""
    event = TABLES.event("swa_window.move")
    effect = next(e for x in TABLES.events for e in x.effects if e.target.name == "compressed_kv.used")
    bent = dataclasses.replace(event, effects=(*event.effects, effect))
    tables = dataclasses.replace(TABLES, events=tuple(bent if e is event else e for e in TABLES.events))
    broken = {o.property for o in failed(prove(tables, [bent]))}
    assert "separate.compressed_kv" in broken


# -- unknown is a failure ----------------------------------------------------------------------------------------------
class Tired:
    """A solver that never has an answer."""

    def __init__(self) -> None:
        self.real = smt.new_solver()

    def check(self) -> z3.CheckSatResult:
        return z3.unknown

    def __getattr__(self, name: str) -> object:
        return getattr(self.real, name)


def test_what_the_solver_does_not_know_is_not_proved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(induction, "new_solver", Tired)
    monkeypatch.setattr(base_module, "new_solver", Tired)
    result = prove(TABLES, [TABLES.event("swa_window.move")], BASE)
    assert {o.status for o in result.obligations} == {"unknown"}
    base = Base(TABLES, BASE)
    base.initially(TABLES.forms("invariant")[0])
    base.pausing(next(p for p in TABLES.forms("step") if not p.on))
    assert {o.status for o in base.out.obligations} == {"unknown"}
    report = _report(TABLES, "", [result], 0.0)
    assert report.summary.unknown == len(result.obligations)
    assert not report.summary.passed


def test_every_solver_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that takes the solver far longer than a millisecond: with that limit it is unknown, not endless."""
    monkeypatch.setattr(smt, "TIMEOUT_MS", 1)
    solver, x = smt.new_solver(), z3.Ints(" ".join(f"x{i}" for i in range(60)))
    solver.add(*(z3.Or(a + b == 7 * i + 3, a - b == 5 * i + 1) for i, (a, b) in enumerate(itertools.pairwise(x))))
    solver.add(z3.Sum([a * (i + 3) for i, a in enumerate(x)]) == 10_007, *(z3.And(a > -90, a < 90) for a in x))
    assert solver.check() == z3.unknown


def test_a_failed_obligation_is_a_failed_run() -> None:
    result = prove(TABLES, [TABLES.event("swa_window.move")], BASE)
    assert _report(TABLES, "", [result], 0.0).summary.passed
    msgspec.structs.force_setattr(result.obligations[0], "status", "failed")
    assert not _report(TABLES, "", [result], 0.0).summary.passed
