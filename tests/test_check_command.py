"""``hybridkv check``: exit codes, what the reports hold, and a cache that may speed up but never decide."""

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import add_row, copy_spec, drop
from test_induction import Tired

from hybridkv_ref import cli
from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build, load_tables
from hybridkv_ref.model_checks import check, induction
from hybridkv_ref.model_checks.cache import Cache, cache_folder, checker_hash
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_spec

KIND = "recurrent_state"  # the kind with the fewest rows
OTHER = "swa_window"
OBLIGATION = {"id", "table", "row", "property", "method", "status", "milliseconds", "cached"}
SUMMARY = {"obligations", "proved", "failed", "unknown", "witnesses", "witnesses_missing", "seconds"}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYBRIDKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only one row of the kind is proved: enough for what is said about files and caches."""
    every = check.task_names

    def first(tables: Any, kind: str = "") -> Iterator[str]:
        yield from [n for n in every(tables, kind) if n.startswith("row:")][:1]

    monkeypatch.setattr(check, "task_names", first)


def run(*arguments: str | Path) -> int:
    return cli.main(["check", "--kind", KIND, "--jobs", "1", *map(str, arguments)])


def read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


def verdicts(report: Any) -> dict[str, str]:
    return {o["id"]: o["status"] for o in report["obligations"]}


def test_proved_tables_end_with_0_and_both_reports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, summary_file = tmp_path / "out.json", tmp_path / "out.md"
    assert run("--json", out, "--markdown", summary_file) == 0
    report, tables = read(out), load_tables()
    assert {"schema", "package_version", "table_sha256", "solver", "summary", "obligations", "counterexamples"} <= set(
        report
    )
    assert report["schema"] == check.SCHEMA
    assert report["table_sha256"] == tables.sha256
    assert report["solver"].startswith("z3 ")
    summary = report["summary"]
    assert set(summary) >= SUMMARY
    assert all(set(o) >= OBLIGATION for o in report["obligations"])
    assert summary["obligations"] == len(report["obligations"]) == summary["proved"] > 0
    assert summary["failed"] == summary["unknown"] == summary["witnesses_missing"] == 0
    assert {o["status"] for o in report["obligations"]} == {"proved"}
    assert {o["cached"] for o in report["obligations"]} == {False}
    assert report["counterexamples"] == []
    rows = {e.row for e in tables.events if KIND in e.kinds.values()}
    assert rows <= {o["row"] for o in report["obligations"]}
    text = summary_file.read_text("utf-8")
    assert text.startswith("# hybridkv check\n")
    assert f"{summary['proved']:,} of {summary['obligations']:,}" in text
    assert "| induction |" in text
    shown = capsys.readouterr()
    assert "proved:" in " ".join(shown.out.split())
    assert shown.err == ""


def test_a_kind_leaves_the_other_kinds_rows_out(one_task: None, tmp_path: Path) -> None:
    names = list(check.task_names(load_tables(), KIND))
    assert names
    assert not [n for n in check.task_names(load_tables(), KIND) if n.startswith("search:")]
    assert all(KIND in load_tables().event(n.partition(":")[2]).kinds.values() for n in names)


def test_without_a_kind_every_row_claim_and_search_is_a_task() -> None:
    tables = load_tables()
    names = set(check.task_names(tables))
    assert names >= {f"row:{e.id}" for e in tables.events} | {f"claim:{c.id}" for c in tables.responses}
    assert {n for n in names if not n.startswith(("row:", "claim:"))} >= {
        "base",
        "recovery",
        "search:finite",
        "search:threads",
    }


def test_a_fault_ends_with_1_a_rule_and_a_counterexample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, out, summary_file = copy_spec(tmp_path), tmp_path / "out.json", tmp_path / "out.md"
    drop(spec / "common.toml", "rows.free", "pins == 0")
    assert run("--spec", spec, "--json", out, "--markdown", summary_file) == 1
    report = read(out)
    assert report["table_sha256"] == build(read_spec(spec)).sha256 != load_tables().sha256
    broken = [o for o in report["obligations"] if o["status"] == "failed"]
    assert report["summary"]["failed"] == len(broken) > 0
    assert {o["row"] for o in broken} == {"free"}
    assert any(rule.startswith("HKV-S3-") for o in broken for rule in o["rules"])
    assert len(report["counterexamples"]) == len(broken)
    assert all(c["changes"] and c["event"] == f"{KIND}.free" for c in report["counterexamples"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in (shown, " ".join(summary_file.read_text("utf-8").split())):
        assert "NOT proved" in text
        assert "pinned_bytes_stay" in text
        assert "HKV-S3-004" in text
        assert "generation" in text, "the changed fields are shown"


def test_what_is_unknown_ends_with_1(
    one_task: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(induction, "new_solver", Tired)  # workers are forked, so they have it too
    assert run("--no-cache", "--json", tmp_path / "out.json") == 1
    summary = read(tmp_path / "out.json")["summary"]
    assert summary["unknown"] == summary["obligations"] > 0
    assert "no verdict within the solver's limit" in " ".join(capsys.readouterr().out.split())


def test_unusable_tables_end_with_2_and_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec, out = copy_spec(tmp_path), tmp_path / "out.json"
    (spec / "common.toml").write_text("title = ")
    assert run("--spec", spec, "--json", out) == 2
    assert cli.main(["check", "--kind", "nothing", "--json", str(out)]) == 2
    errors = capsys.readouterr().err.splitlines()
    assert [e.partition(": ")[2].partition(":")[0] for e in errors] == ["common.toml", "--kind nothing"]
    assert not out.exists()


# -- the cache ---------------------------------------------------------------------------------------------------------
def test_a_second_run_takes_the_same_verdicts_from_the_cache(one_task: None, tmp_path: Path, own_cache: Path) -> None:
    first, second = tmp_path / "1.json", tmp_path / "2.json"
    assert run("--json", first) == run("--json", second) == 0
    assert verdicts(read(first)) == verdicts(read(second))
    assert {o["cached"] for o in read(second)["obligations"]} == {True}
    assert len(list(own_cache.glob("*.json"))) == 1


def test_a_failure_stays_a_failure_in_the_cache(
    one_task: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(check, "task_names", lambda *_: iter([f"row:{KIND}.free"]))
    spec, out = copy_spec(tmp_path), tmp_path / "out.json"
    drop(spec / "common.toml", "rows.free", "pins == 0")
    assert run("--spec", spec) == run("--spec", spec, "--json", out) == 1
    report = read(out)
    assert {o["cached"] for o in report["obligations"]} == {True}
    assert report["counterexamples"], "what was found is still shown"


def test_other_tables_share_no_verdict(one_task: None, tmp_path: Path, own_cache: Path) -> None:
    assert run() == 0
    spec, out = copy_spec(tmp_path), tmp_path / "out.json"
    text = (spec / "common.toml").read_text("utf-8")
    (spec / "common.toml").write_text(text.replace('"off >= 0"', '"off >= 0", "off >= -1"', 1), "utf-8")
    run("--spec", spec, "--json", out)
    assert {o["cached"] for o in read(out)["obligations"]} == {False}
    assert len(list(own_cache.glob("*.json"))) == 2


def test_no_cache_neither_reads_nor_stores(one_task: None, tmp_path: Path, own_cache: Path) -> None:
    assert run("--no-cache") == 0
    assert not own_cache.exists()
    assert run() == 0
    assert run("--no-cache", "--json", tmp_path / "out.json") == 0
    assert {o["cached"] for o in read(tmp_path / "out.json")["obligations"]} == {False}


@pytest.mark.parametrize("data", [b"\x00\xff", b'{"row:x": {"obligations": [{}]}}'])
def test_a_cache_file_that_cannot_be_read_counts_as_none(
    one_task: None, tmp_path: Path, own_cache: Path, data: bytes
) -> None:
    assert run() == 0
    file = next(own_cache.glob("*.json"))
    file.write_bytes(data)
    assert run("--json", tmp_path / "out.json") == 0
    assert {o["cached"] for o in read(tmp_path / "out.json")["obligations"]} == {False}
    assert json.loads(file.read_bytes()), "and is replaced by a whole one"


def test_a_cache_that_cannot_be_written_is_only_slower(one_task: None, own_cache: Path) -> None:
    own_cache.parent.mkdir(exist_ok=True)
    own_cache.write_text("a file where the folder should be")
    assert run() == 0
    assert own_cache.read_text() == "a file where the folder should be"


def test_the_key_of_the_cache_is_tables_checker_solver_and_options(tmp_path: Path) -> None:
    one = Cache("tables", "options", tmp_path).path
    assert Cache("tables", "options", tmp_path).path == one
    assert one not in (Cache("others", "options", tmp_path).path, Cache("tables", "others", tmp_path).path)
    assert len(checker_hash()) == 64


def test_the_cache_lies_outside_the_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("HYBRIDKV_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "hybridkv"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "hybridkv"


# -- nothing half-written ----------------------------------------------------------------------------------------------
def test_a_report_that_cannot_be_written_leaves_nothing(
    one_task: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--json", tmp_path / "nowhere" / "out.json") == 2
    assert run("--markdown", tmp_path) == 2, "a folder is no file"
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all("cannot be written" in line for line in lines)
    assert {p.name for p in tmp_path.iterdir()} == {"cache"}


def test_an_old_report_stays_whole_until_the_new_one_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    target.write_text("old")

    def full(self: Path, other: Path) -> Path:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(InputError, match="No space left"):
        cli.write_whole(target, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]
    assert target.read_text() == "old"


# -- the summary -------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("field", ["failed", "unknown", "witnesses_missing", "searches_failed"])
def test_any_shortfall_is_a_failed_run(field: str) -> None:
    good = check.Summary(1, 1, 0, 0, 1, 0, 1, 0, 0.0)
    assert good.passed
    setattr(good, field, 1)
    assert not good.passed


def test_a_row_that_never_fires_fails_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    label = f"kinds/{OTHER}.toml"
    spec = add_row(read_spec(SPEC_DIR), label, "made_up", when=["start > end"], then=["mark = 0", "generation += 1"])
    monkeypatch.setattr(check, "read_spec", lambda directory: spec)
    monkeypatch.setattr(check, "task_names", lambda *_: iter([f"row:{OTHER}.made_up"]))
    report = check.check(SPEC_DIR, OTHER, use_cache=False, jobs=1)
    assert not report.summary.passed
    assert {o.method for o in report.obligations if o.status == "failed"} == {"vacuity"}


@pytest.mark.deep
def test_the_whole_check_passes_with_its_witnesses() -> None:
    summary = check.check(SPEC_DIR, use_cache=False).summary
    assert summary.passed, summary
    assert summary.obligations >= 5000
    assert summary.witnesses >= 60


def test_the_allocator_is_driven_only_when_asked_for(one_task: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    assert "lock step" not in capsys.readouterr().out
    assert run("--lockstep", "0.5") == 0
    assert re.search(r"lock step: [1-9].* rows .* 0 differences", capsys.readouterr().out)
    assert run("--lockstep", "-1") == 2
    assert capsys.readouterr().err == "hybridkv: --lockstep -1: expected 0 or more seconds\n"


def test_a_difference_in_lock_step_ends_with_1(
    one_task: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = tmp_path / "spec"
    shutil.copytree(SPEC_DIR, spec)
    path = spec / "protocols" / "prefix_hit.toml"
    text = path.read_text("utf-8")
    assert text.count('"pins += 1", "req.found -= 1"') == 1
    path.write_text(text.replace('"pins += 1", "req.found -= 1"', '"req.found -= 1"'), "utf-8")
    assert run("--spec", spec, "--lockstep", "20") == 1
    assert "pins" in capsys.readouterr().out
