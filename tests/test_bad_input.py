"""Bad input to the real command: exit 2, exactly one line on standard error, no traceback, no output file."""

import subprocess
import sys
from pathlib import Path

import pytest
from helpers import copy_spec, edit

MODEL = ("--model", "deepseek-v4-flash")
MEMORY = ("--gpu-memory", "80GiB")


def hybridkv(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hybridkv_ref.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120, check=False)


def refused(folder: Path, *arguments: str | Path) -> str:
    """The one line that the command refuses with; checks that it wrote nothing."""
    before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    done = hybridkv(*arguments, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("hybridkv: ")
    assert {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()} == before
    return lines[0]


TABLE_FAULTS = {
    "missing": None,
    "empty": b"",
    "binary": b"\x7fELF\x00\x01\xff\xfe",
    "malformed": b'title = "x"\n[rows.a\n',
    "latin": 'title = "Größe"\n'.encode("latin-1"),
}


@pytest.mark.parametrize(
    ("label", "fault"),
    [*(("common.toml", f) for f in TABLE_FAULTS), ("recovery.toml", "missing"), ("rules.toml", "binary")],
)
def test_a_table_that_cannot_be_read(tmp_path: Path, label: str, fault: str) -> None:
    spec, data = copy_spec(tmp_path), TABLE_FAULTS[fault]
    (spec / label).unlink()
    if data is not None:
        (spec / label).write_bytes(data)
    assert refused(tmp_path, "check", "--spec", spec, "--json", "out.json").startswith(f"hybridkv: {label}: ")


COMMANDS = {
    "check": ("check", "--json", "out.json", "--markdown", "out.md"),
    "export": ("export", "--out", "out.json"),
    "graph": ("graph", "swa_window", "--svg", "out.svg"),
    "mutate": ("mutate", "--json"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_ill_typed_expression_in_every_command_that_reads_tables(tmp_path: Path, command: str) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "common.toml", '"off >= 0"', '"off + 1"', "rows.move")
    line = refused(tmp_path, *COMMANDS[command], "--spec", spec)
    assert line == "hybridkv: common.toml: rows.move.when[0]: column 1, at 'off + 1': is int, expected bool"


@pytest.mark.parametrize("command", ["check", "graph"])
def test_a_folder_that_is_not_there(tmp_path: Path, command: str) -> None:
    assert refused(tmp_path, *COMMANDS[command], "--spec", "nowhere").startswith("hybridkv: nowhere: not a directory")


def test_an_assumption_that_cannot_hold(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "common.toml", 'assume = ["RATIO >= 1"]', 'assume = ["RATIO >= 1", "RATIO <= 0"]', "constants")
    line = refused(tmp_path, "check", "--spec", spec, "--json", "out.json")
    assert line.startswith("hybridkv: common.toml: constants.RATIO.assume[1]: 'RATIO <= 0' does not hold")


def test_a_rule_that_nobody_wrote(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "common.toml", '"HKV-S1-001"', '"HKV-S1-999"', "invariant.charged")
    assert "cites 'HKV-S1-999'" in refused(tmp_path, "check", "--spec", spec)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("check", "--kind", "nothing"), "--kind nothing: no such kind"),
        (("graph", "nothing"), "no kind 'nothing'"),
        (("graph", "swa_window", "--svg", "nowhere/out.svg"), "cannot be written"),
        (("mutate", "--row", "nothing at all"), "no mutant has this in its name"),
        (("export", "--out", "nowhere/out.json"), "nowhere/out.json: cannot be written"),
        (("check", "--kind", "swa_window", "--jobs", "-1"), "--jobs -1: expected 0 or more"),
        (("mutate", "--row", "rows.let_go", "--jobs", "-1"), "--jobs -1: expected 0 or more"),
        (("models", "nothing"), "no model named 'nothing'"),
        (("models", "../../etc/passwd"), "no model named"),
        (("models", "deepseek-v4-flash", "--tokens", "-5"), "expected at least 1, got -5"),
        (("models", "--spec", "nowhere"), "nowhere"),
        (("simulate", "--model", "nothing", *MEMORY), "no model named 'nothing'"),
        (("simulate", *MODEL, "--gpu-memory", "much"), "'much': not a size"),
        (("simulate", *MODEL, "--gpu-memory", "80 gallons"), "'80 gallons': not a size"),
        (("simulate", *MODEL, "--gpu-memory", "0"), "expected at least 1 byte"),
        (("simulate", *MODEL, *MEMORY, "--disk", "some"), "'some': not a size"),
        (("simulate", *MODEL, *MEMORY, "--io-bandwidth", "fast"), "'fast': not a size"),
        (("simulate", *MODEL, *MEMORY, "--alignment", "0"), "alignment"),
        (("simulate", *MODEL, *MEMORY, "--requests", "-1"), "requests"),
        (("simulate", "nowhere.jsonl", *MODEL, *MEMORY), "nowhere.jsonl:1: cannot be read"),
        (("simulate", *MODEL, *MEMORY, "--events", "no/where.jsonl"), "No such file"),
        (("simulate", *MODEL, *MEMORY, "--events", "e.jsonl", "--disk", "1GiB"), "simulate:events: told of full"),
        (
            ("simulate", "--model", "gpt-oss-20b", *MEMORY, "--events", "e.jsonl", "--alignment", "16"),
            "is no multiple of the",
        ),
    ],
)
def test_an_argument_that_means_nothing(tmp_path: Path, arguments: tuple[str, ...], reason: str) -> None:
    assert reason in refused(tmp_path, *arguments)


TRACES = {
    "negative": b'{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [0]}\n'
    b'{"timestamp": 0, "input_length": -5, "output_length": 1, "hash_ids": [0]}\n',
    "missing": b'{"timestamp": 0, "output_length": 1, "hash_ids": [0]}\n',
    "no number": b'{"timestamp": 0, "input_length": "many", "output_length": 1, "hash_ids": [0]}\n',
    "cut short": b'{"timestamp": 0, "input_len',
    "empty": b"",
    "binary": b"\x00\xff\xfe\x00",
}


@pytest.mark.parametrize("fault", TRACES)
def test_a_trace_that_cannot_be_read(tmp_path: Path, fault: str) -> None:
    (tmp_path / "trace.jsonl").write_bytes(TRACES[fault])
    line = refused(tmp_path, "simulate", "trace.jsonl", *MODEL, *MEMORY, "--json")
    assert line.startswith("hybridkv: trace.jsonl:2" if fault == "negative" else "hybridkv: trace.jsonl")


def test_a_good_call_is_not_refused(tmp_path: Path) -> None:
    """The checks above can fail: the same call with good input passes and writes its file."""
    done = hybridkv("export", "--spec", copy_spec(tmp_path), "--out", "out.json", cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "out.json").stat().st_size > 0
    with pytest.raises(AssertionError):
        refused(tmp_path, "export", "--out", "other.json")
