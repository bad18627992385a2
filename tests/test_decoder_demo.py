"""The demonstration: reuse under pressure, restores from the host, and logits equal to a run without cache."""

import json
from pathlib import Path

import pytest
from helpers import copy_spec

from hybridkv_ref.cli import main


def test_requests_reuse_restore_and_stay_exact(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--requests", "12", "--json"]) == 0
    served = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(served) == 12
    assert all(one["equal"] and one["difference"] == 0 for one in served)
    hits = [one for one in served if one["start"]]
    assert hits
    assert all(one["verdicts"] == [f"L{layer}: accepted" for layer in (1, 2, 3, 4)] for one in hits)
    assert all(one["reads"] for one in hits)
    assert any(one["restored"] for one in served)


def test_the_text_says_hit_verdicts_plan_and_equality(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--requests", "2"]) == 0
    text = capsys.readouterr().out
    for part in ("request 2:", "reused", "L4: accepted", "plan      read window [", "equal, bit for bit"):
        assert part in text


def test_a_wrong_table_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the window in the table, the demo itself reports the difference and fails."""
    spec = copy_spec(tmp_path)
    path = spec / "recovery.toml"
    path.write_text(path.read_text().replace('lo = "max(0, s - (window - 1))"', 'lo = "s"'))
    assert main(["demo", "--requests", "3", "--spec", str(spec)]) == 1
    assert "DIFFER by" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--requests", "--capacity"])
def test_nothing_to_do_is_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", option, "0"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
