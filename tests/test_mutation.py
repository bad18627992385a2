"""Mutation: every small change of a row is noticed by a property that has a name, or changes nothing."""

import ast
import json
from collections import Counter
from pathlib import Path

import msgspec
import pytest
from test_induction import Tired

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import load_tables
from hybridkv_ref.model_checks import induction, liveness
from hybridkv_ref.model_checks.mutants import NEED, Mutant, effect_flips, flips, mutants
from hybridkv_ref.model_checks.mutation import Killer
from hybridkv_ref.model_checks.mutation_run import MutationReport, MutationSummary, mutate, mutation_table
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_spec

SPEC = read_spec(SPEC_DIR)
ALL = list(mutants(SPEC, load_tables()))
SAMPLE = ALL[:: max(1, len(ALL) // 30)]
PINNED = Path(__file__).parent / "data" / "mutation_totals.json"


@pytest.fixture(scope="module")
def killer() -> Killer:
    return Killer(SPEC)


def of_row(name: str) -> list[Mutant]:
    return [m for m in ALL if m.row == name and m.section != NEED]


# -- which mutants there are -------------------------------------------------------------------------------------------
def test_every_conjunct_effect_and_column_of_every_row_has_its_mutants() -> None:
    dropped = {(m.file, m.section, m.row, m.key) for m in ALL if m.operator.startswith("drop")}
    for label, file in SPEC.files.items():
        for section in ("rows", "extend", "handoffs"):
            for name, row in getattr(file, section).items():
                for index in range(len(row.when)):
                    assert (label, section, name, f"when[{index}]") in dropped
                for index in range(len(row.then)):
                    assert (label, section, name, f"then[{index}]") in dropped
                if section != "extend" and row.from_:
                    assert (label, section, name, "from") in dropped


def test_every_demand_of_every_recovery_entry_is_dropped_once() -> None:
    demands = {g.place for e in load_tables().events for g in e.guards if g.place.startswith("recovery.toml: ")}
    assert {f"recovery.toml: {m.key}" for m in ALL if m.section == NEED} == demands
    assert demands


def test_no_two_mutants_have_one_name() -> None:
    assert [name for name, count in Counter(m.id for m in ALL).items() if count > 1] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a + 1 <= b", ["a + 1 < b", "a - 1 <= b"]),
        ("a == b and c != d", ["a != b and c != d", "a == b and c == d"]),
        ("a < b or c >= 0", ["a <= b or c >= 0", "a < b or c > 0"]),
        ("stage in READABLE", []),
        ("not closing", []),
    ],
)
def test_flips_bend_one_sign_or_comparison(text: str, expected: list[str]) -> None:
    assert sorted(flips(text)) == sorted(expected)
    assert all(ast.parse(found, mode="eval") for found in flips(text))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("used += size", ["used -= size"]),
        ("used -= size", ["used += size"]),
        ("mark = a + b", ["mark = a - b"]),
        ("mark = 0", []),
        ("x += 1 if a <= b else 0", ["x -= 1 if a <= b else 0", "x += 1 if a < b else 0"]),
    ],
)
def test_effect_flips_keep_the_target(text: str, expected: list[str]) -> None:
    assert list(effect_flips(text)) == expected


def test_a_mutant_changes_one_row_and_nothing_else() -> None:
    mutant = next(m for m in of_row("free") if m.key.startswith("when"))
    changed = mutant.apply(SPEC)
    assert changed.files[mutant.file].rows["free"].when == SPEC.files[mutant.file].rows["free"].when[1:]
    restored = msgspec.structs.replace(
        changed.files[mutant.file],
        rows={**changed.files[mutant.file].rows, "free": SPEC.files[mutant.file].rows["free"]},
    )
    assert {**changed.files, mutant.file: restored} == SPEC.files


# -- what kills them ---------------------------------------------------------------------------------------------------
def test_every_mutant_of_one_row_is_killed_by_a_named_property(killer: Killer) -> None:
    verdicts = [killer.run(m) for m in of_row("free")]
    assert len(verdicts) >= 8
    assert {v.status for v in verdicts} == {"killed"}
    assert all(v.killer for v in verdicts)
    by_id = {v.mutant: v for v in verdicts}
    pins = by_id["common.toml: rows.free.when[0]: drop guard 'pins == 0'"]
    assert any(rule.startswith("HKV-S3-") for rule in pins.rules)


def test_a_spread_of_mutants_over_all_files_is_killed_or_equivalent(killer: Killer) -> None:
    verdicts = {m.id: killer.run(m).status for m in SAMPLE}
    assert len({m.file for m in SAMPLE}) >= 6
    assert "killed" in verdicts.values()
    # Without the searches (test_witnesses) a mutant that only forbids steps may be left; here are none but those.
    assert set(verdicts.values()) <= {"killed", "equivalent", "lint"}, verdicts


def test_without_its_property_a_mutant_survives() -> None:
    """What kills a mutant is the property, not an accident of the checker."""
    mutant = next(m for m in of_row("retry") if m.before == "f < req.f" and m.after == "f <= req.f")
    killed = Killer(SPEC).run(mutant)
    assert (killed.status, killed.killer) == ("killed", "retries_shrink")
    file = SPEC.files[mutant.file]
    fewer = msgspec.structs.replace(
        file,
        step={n: p for n, p in file.step.items() if n != "retries_shrink"},
        response={n: p for n, p in file.response.items() if n != "request_ends"},
        rows={**file.rows, "retry": msgspec.structs.replace(file.rows["retry"], can=[])},
    )
    spec = msgspec.structs.replace(SPEC, files={**SPEC.files, mutant.file: fewer})
    assert Killer(spec).run(mutant).status == "survived"


def test_a_change_that_means_the_same_is_equivalent(killer: Killer) -> None:
    same = Mutant("common.toml", "rows", "free", "flip", "when[0]", "pins == 0", "pins <= 0")
    assert killer.run(same).status == "equivalent"
    assert (
        killer.run(Mutant("common.toml", "rows", "free", "flip", "when[0]", "pins == 0", "pins == 0")).method
        == "identical"
    )


def test_what_the_loader_refuses_is_no_kill(killer: Killer) -> None:
    refused = killer.run(Mutant("common.toml", "rows", "free", "flip", "when[0]", "pins == 0", "pins == nothing"))
    assert (refused.status, refused.method) == ("lint", "loader")
    assert "unknown name" in refused.killer


def test_a_lost_witness_kills_and_is_named() -> None:
    mutant = next(m for m in of_row("retry") if m.before == "f < req.f" and m.after == "f <= req.f")
    file = SPEC.files[mutant.file]
    bare = msgspec.structs.replace(file, step={}, response={}, rows={**file.rows})
    bare = msgspec.structs.replace(
        bare, rows={**file.rows, "retry": msgspec.structs.replace(file.rows["retry"], can=[])}
    )
    spec = msgspec.structs.replace(SPEC, files={**SPEC.files, mutant.file: bare})
    verdict = Killer(spec, lambda tables, events: "the hill" if set(events) == {"request.retry"} else "").run(mutant)
    assert (verdict.status, verdict.method, verdict.killer) == ("killed", "witness", "the hill")


def test_no_verdict_is_no_kill(monkeypatch: pytest.MonkeyPatch) -> None:
    killer = Killer(SPEC)
    monkeypatch.setattr(induction, "new_solver", Tired)
    monkeypatch.setattr(liveness, "new_solver", Tired)
    assert killer.run(of_row("free")[1]).status == "survived"


# -- the run -----------------------------------------------------------------------------------------------------------
def test_a_run_counts_and_shows_its_verdicts() -> None:
    report = mutate(SPEC_DIR, only="rows.let_go.then", jobs=1)
    summary = report.summary
    assert summary.mutants == len([m for m in ALL if "rows.let_go.then" in m.id])
    assert summary.mutants == summary.killed + summary.equivalent + summary.lint + summary.survived
    assert summary.passed
    assert report.table_sha256 == load_tables().sha256
    assert str(summary.mutants) in str(mutation_table(report).title)


def test_a_survivor_is_a_failed_run_and_is_shown() -> None:
    from hybridkv_ref.model_checks.mutation import Verdict

    report = MutationReport("", "", MutationSummary(1, 0, 0, 0, 1, 0.0), [Verdict("the one", "survived")])
    assert not report.summary.passed
    assert "the one" in [cell for column in mutation_table(report).columns for cell in column.cells]


def test_a_name_that_fits_no_mutant_is_refused() -> None:
    with pytest.raises(InputError, match="--row nothing: no mutant"):
        mutate(SPEC_DIR, only="nothing")


@pytest.mark.deep
def test_all_mutants_and_their_pinned_totals() -> None:
    summary = mutate(SPEC_DIR).summary
    assert summary.survived == 0
    found = {name: getattr(summary, name) for name in ("killed", "equivalent", "lint", "survived")}
    assert found == json.loads(PINNED.read_text("utf-8"))
