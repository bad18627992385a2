"""The tasks of `check --deep`, and the ledger: every assumption's violation fails, an idle one would be seen."""

import dataclasses
from pathlib import Path

import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build
from hybridkv_ref.model_checks import deep, spin
from hybridkv_ref.model_checks.deep import deep_names, run_deep
from hybridkv_ref.model_checks.explorers import EXPLORERS
from hybridkv_ref.model_checks.frames import Assumptions
from hybridkv_ref.model_checks.generator_probes import read_probes
from hybridkv_ref.model_checks.ledger import FILE, read_ledger, violated, without_fairness
from hybridkv_ref.model_checks.mutants import mutants
from hybridkv_ref.model_checks.spacer import goals
from hybridkv_ref.model_checks.tasks import proof_names
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_spec

SPEC = read_spec(SPEC_DIR)
TABLES = build(SPEC)


def test_every_violated_assumption_fails() -> None:
    found = list(violated(TABLES, SPEC_DIR))
    assert len(found) >= len(read_ledger(SPEC_DIR).assumption)
    assert [s.id for s in found if not s.passed] == []


def test_an_entry_that_violates_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('title = "x"\n[assumption.idle]\nstatement = "Nothing rests on it."\n')
    with pytest.raises(InputError, match=r"assumption\.idle: names no configuration"):
        read_ledger(tmp_path)


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(InputError, match="no row 'nowhere'"):
        without_fairness(SPEC, "nowhere")


def test_skipped_obligations_hold_too() -> None:
    found = run_deep("skipped:graph.replay", SPEC, TABLES, Assumptions(TABLES), SPEC_DIR).obligations
    assert len(found) > 100
    assert {o.status for o in found} == {"proved"}


def test_a_deep_run_covers_every_row_and_every_mutant() -> None:
    names = list(deep_names(SPEC, TABLES, SPEC_DIR))
    assert {f"deep:cvc5:{n}" for n in proof_names(TABLES)} <= set(names) or "deep:cvc5:" in names
    assert {f"deep:skipped:{e.id}" for e in TABLES.events} <= set(names)
    assert "deep:ledger" in names
    assert "deep:agreement" in names
    begins = range(0, len(list(mutants(SPEC, TABLES))), deep.MUTANTS_PER_TASK)
    assert [n for n in names if n.startswith("deep:mutants:")] == [f"deep:mutants:{n}" for n in begins]
    assert {n for n in names if n.startswith("deep:spacer:")} == {f"deep:spacer:{g.id}" for g in goals(TABLES)}
    assert {n for n in names if n.startswith("deep:planted:")} == {f"deep:planted:{n}" for n in read_probes(SPEC_DIR)}
    assert "deep:infer" in names
    assert any(n.startswith("deep:composed:") for n in names)


def test_without_cvc5_the_run_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deep, "cvc5_installed", lambda: False)
    assert [n for n in deep_names(SPEC, TABLES, SPEC_DIR) if n.startswith("deep:cvc5:")] == ["deep:cvc5:"]
    (found,) = run_deep("cvc5:", SPEC, TABLES, Assumptions(TABLES), SPEC_DIR).searches
    assert (found.status, found.passed) == ("not run", True)
    assert "second-opinion" in found.detail
    assert deep.second_solver() == "no cvc5"


def test_a_composed_instance_is_counted_by_every_explorer_there_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / deep.COMPOSED).write_text('title = "x"\n[instance.small]\ndoc = "Two graphs."\ngraphs = ["g", "h"]\n')
    found = run_deep("composed:small", SPEC, TABLES, Assumptions(TABLES), tmp_path).searches
    assert [s.passed for s in found] == [True, True]
    assert {s.status for s in found} <= {"holds", "not run"}
    monkeypatch.setattr(spin, "missing", lambda: "not installed: spin")
    found = run_deep("composed:small", SPEC, TABLES, Assumptions(TABLES), tmp_path).searches
    assert found[0].status == "not run"
    monkeypatch.undo()
    wrong = [dataclasses.replace(tool, wanted=lambda graph: (graph.states, 1)) for tool in EXPLORERS]
    monkeypatch.setattr(deep, "EXPLORERS", wrong)  # one transition is not the number of transitions
    found = run_deep("composed:small", SPEC, TABLES, Assumptions(TABLES), tmp_path).searches
    assert {(s.status, s.passed) for s in found} <= {("differs", False), ("not run", True)}


def test_an_unknown_task_is_refused() -> None:
    with pytest.raises(KeyError, match="nothing"):
        run_deep("nothing", SPEC, TABLES, Assumptions(TABLES), SPEC_DIR)
