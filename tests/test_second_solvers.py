"""cvc5 and Spacer: they agree where they should, and say so where they do not."""

import dataclasses
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import z3

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, Lit, Op, Ref
from hybridkv_ref.loader import build, build_events
from hybridkv_ref.model_checks import cvc5_opinion, spacer
from hybridkv_ref.model_checks.cvc5_opinion import METHOD, beside_cvc5
from hybridkv_ref.model_checks.deep import run_deep
from hybridkv_ref.model_checks.frames import Assumptions
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.mutants import mutants
from hybridkv_ref.model_checks.obligations import Obligation, TaskResult
from hybridkv_ref.model_checks.smt import accompanied, new_solver
from hybridkv_ref.model_checks.spacer import Encoding, goals, opinion, slices
from hybridkv_ref.model_checks.tasks import proof_names
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_spec
from hybridkv_ref.tables import Property, Tables

SPEC = read_spec(SPEC_DIR)
TABLES = build(SPEC)
ROW, CLAIM = "row:swa_window.pin", "claim:eviction_ends<swa_window>"
HANDOFF = "row:restore_begin[on_disk_prefix>swa_window]"
CAPS = tuple(g.id for g in goals(TABLES) if g.scope == "global" and g.id.partition("<")[0].endswith("_cap"))
OF_ONE_SEGMENT = (
    "charged<swa_window>", "uncharged<swa_window>", "slot_in_load<on_disk_prefix>", "no_slot_at_rest<on_disk_prefix>",
    "reserved_in_load<on_disk_prefix>", "readable_phase<swa_window>", "remembers<indexer_state>",
    "durable_is_whole<on_disk_prefix>", "writes_into_writing<on_disk_prefix>", "held_is_source<compressed_kv>",
)  # fmt: skip


@pytest.fixture
def cvc5() -> None:
    """Skips, with the reason, where the extra is not installed."""
    pytest.importorskip("cvc5", reason="cvc5 is not installed: pip install hybridkv-ref[second-opinion]")


# -- cvc5 --------------------------------------------------------------------------------------------------------------
def asked(*names: str) -> list[Obligation]:
    """cvc5's word on these proofs."""
    base = Assumptions(TABLES)
    return [o for n in names for o in run_deep(f"cvc5:{n}", SPEC, TABLES, base, SPEC_DIR).obligations]


@pytest.mark.usefixtures("cvc5")
def test_cvc5_agrees_on_every_query_of_a_row_a_handoff_a_claim_the_recovery_entries_and_the_lemmas() -> None:
    found = asked(ROW, HANDOFF, CLAIM, "recovery", "lemmas")  # the recovery entries divide
    assert {o.status for o in found} == {"proved"}
    assert {o.method for o in found} == {METHOD}
    assert {o.property for o in found} == {ROW, HANDOFF, CLAIM, "recovery", "lemmas"}
    assert {o.id.rpartition(":")[2] for o in found if o.property == ROW} == {"sat", "unsat"}  # vacuity is asked too


@pytest.mark.deep
@pytest.mark.usefixtures("cvc5")
def test_cvc5_agrees_on_every_query() -> None:
    found = asked("lemmas", *proof_names(TABLES))
    assert Counter(o.status for o in found) == {"proved": len(found)}
    assert len({o.property for o in found}) == 1 + len(list(proof_names(TABLES)))


@pytest.mark.usefixtures("cvc5")
def test_cvc5_agrees_that_a_faulty_row_fails() -> None:
    bent = next(m for m in mutants(SPEC, TABLES) if (m.row, m.before, m.after) == ("free", "generation += 1", ""))
    event = next(e for e in build_events(bent.apply(SPEC)) if e.id == "swa_window.free")
    result = TaskResult()

    def task() -> TaskResult:
        result.obligations = Task(TABLES, event, Assumptions(TABLES)).run().obligations
        return result

    assert {o.status for o in beside_cvc5("faulty", task)} == {"proved"}
    assert any(o.status == "failed" for o in result.obligations)


@pytest.mark.usefixtures("cvc5")
@pytest.mark.parametrize(("operator", "wrong"), [(z3.Z3_OP_LE, "LT"), (z3.Z3_OP_ADD, "SUB"), (z3.Z3_OP_OR, "AND")])
def test_a_solver_that_understands_an_operator_wrongly_is_seen(
    monkeypatch: pytest.MonkeyPatch, operator: int, wrong: str
) -> None:
    translator = cvc5_opinion.Translator()
    translator.kinds[operator] = getattr(translator.cvc5.Kind, wrong)
    monkeypatch.setattr(cvc5_opinion, "_translator", lambda: translator)
    assert any(o.status == "failed" for o in asked(ROW))


@pytest.mark.usefixtures("cvc5")
def test_a_task_whose_queries_cannot_be_seen_is_refused() -> None:
    early = Task(TABLES, TABLES.event("swa_window.pin"), Assumptions(TABLES))
    with pytest.raises(ValueError, match="no query was seen"):
        beside_cvc5("early", early.run)


@pytest.mark.usefixtures("cvc5")
def test_no_answer_is_unknown_and_not_agreement(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = SimpleNamespace(isSat=lambda: False, isUnsat=lambda: False)

    class Silent(cvc5_opinion.Accompanied):
        def check(self) -> z3.CheckSatResult:
            self.cvc5 = SimpleNamespace(checkSat=lambda: silent, push=lambda: None, pop=lambda: None)
            return super().check()

        def add(self, *assertions: z3.BoolRef) -> None:
            self.z3.add(*assertions)

    monkeypatch.setattr(cvc5_opinion, "Accompanied", Silent)
    assert {o.status for o in asked(CLAIM)} == {"unknown"}


def test_without_cvc5_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cvc5", None)
    cvc5_opinion._translator.cache_clear()
    with pytest.raises(InputError, match=r"hybridkv-ref\[second-opinion\]"):
        asked(CLAIM)


def test_solvers_are_accompanied_only_inside() -> None:
    with accompanied(lambda solver: "two"):
        assert new_solver() == "two"
    assert isinstance(new_solver(), z3.Solver)


# -- Spacer ------------------------------------------------------------------------------------------------------------
def goal(name: str) -> Property:
    return next(g for g in goals(TABLES) if g.id == name)


def test_the_caps_are_all_there() -> None:
    names = {n.partition("<")[0] for n in CAPS}
    assert names >= {"total_cap", "kind_cap", "host_cap", "disk_cap", "object_cap", "io_cap"}
    assert len(OF_ONE_SEGMENT) >= 8


@pytest.mark.parametrize("name", [*CAPS, *OF_ONE_SEGMENT])
def test_spacer_proves_caps_and_segment_goals_by_invariants_of_its_own(name: str) -> None:
    assert opinion(TABLES, goal(name)).status == "holds"


def without(row: str, text: str) -> Tables:
    """The tables without one guard or effect of a row."""
    bent = next(m for m in mutants(SPEC, TABLES) if (m.row, m.before, m.after) == (row, text, ""))
    return dataclasses.replace(TABLES, events=build_events(bent.apply(SPEC)))


@pytest.mark.parametrize(
    ("row", "text", "name"),
    [
        ("admit", "gpu_used + gpu_reserved + size + RESERVE <= GPU_CAP", "total_cap"),
        ("in_begin", "used + size <= CAP", "kind_cap<swa_window>"),
        ("load_begin", "io_used + 1 <= IO_CAP", "io_cap"),
        ("free", "mem = 0", "uncharged<swa_window>"),
        ("settle", "io = 0", "no_slot_at_rest<on_disk_prefix>"),
    ],
)
def test_spacer_does_not_prove_it_for_a_faulty_row(row: str, text: str, name: str) -> None:
    bent, wanted = without(row, text), goal(name)
    assert all(Encoding(bent, wanted, kept, 1_000_000).solve() != "proved" for kept in list(slices(bent, wanted))[:3])


@pytest.mark.parametrize("kind", TABLES.kinds)
def test_every_stage_is_reached_in_the_encoding(kind: str) -> None:
    """Else its proofs would be about nothing."""
    stage = TABLES.kinds[kind].vars["stage"]
    known = next(g for g in goals(TABLES) if g.id == f"charged<{kind}>")
    for member in stage.type.members:
        never = Op("!=", (Ref("self", "stage", stage.type), Lit(member, stage.type)), BOOL)
        claim = dataclasses.replace(known, expr=never)
        assert Encoding(TABLES, claim, next(slices(TABLES, claim))).solve() == "refuted"


def test_what_rests_on_leases_is_not_expressible_and_says_why() -> None:
    found = opinion(TABLES, goal("only_writers_close<swa_window>"))
    assert (found.status, found.passed) == ("not expressible", True)
    assert "ties the segment to a lease" in found.detail


def test_no_answer_within_the_effort_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spacer, "LAST_EFFORT", 1)
    monkeypatch.setattr(spacer, "slices", lambda tables, goal: list(slices(tables, goal))[:1])
    found = opinion(TABLES, goal("total_cap"))
    assert (found.status, found.passed) == ("unknown", False)


def test_the_first_slice_is_the_smallest_and_the_last_is_the_goals_own_kind() -> None:
    every = list(slices(TABLES, goal("charged<swa_window>")))
    assert len(set(every)) == len(every)
    assert min(every, key=len) == every[0]
    assert {k for k, _ in every[-1]} == {"swa_window"}


@pytest.mark.deep
def test_spacer_has_an_answer_for_every_goal_and_proves_most() -> None:
    found = [opinion(TABLES, g) for g in goals(TABLES)]
    assert [s.id for s in found if not s.passed] == []
    assert sum(s.status == "holds" for s in found) > 0.8 * len(found)
