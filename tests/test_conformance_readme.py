"""The README's adapter, as it stands there: 40 lines, and it passes; without what they say it fails."""

import re
import shutil
from pathlib import Path

import pytest
from conformance_tools import CHECKOUT, report, suite

TOY = CHECKOUT / "tests" / "data" / "conform" / "block_manager.py"


def adapter() -> str:
    section = (CHECKOUT / "README.md").read_text().split("## Conform your engine in 40 lines")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found.group(1)


def run(folder: Path, code: str) -> dict[str, str]:
    """The result of each rule."""
    shutil.copy(TOY, folder / "block_manager.py")
    options = ("--hybridkv-engine", "my_engine:MyEngine", "--hybridkv-profile", "ci", "--hybridkv-report", "out")
    done = suite(folder, *options, files={"my_engine.py": code})
    found = report(folder / "out")
    assert (done.returncode == 0) == (found["verdict"] == "pass"), done.stdout
    return {rule: verdict["result"] for rule, verdict in found["rules"].items()}


def test_the_adapter_has_as_many_lines_as_the_title_says() -> None:
    lines = [line for line in adapter().split("class MyEngine")[1].splitlines() if line.strip()]
    assert len(lines) == 40


def test_the_adapter_passes(tmp_path: Path) -> None:
    assert "fail" not in run(tmp_path, adapter()).values()


@pytest.mark.parametrize(
    ("line", "instead", "rule"),
    [
        ("return bool(r.tokens or r.steps)", "return bool(r.tokens)", "HKV-S3-016"),
        (', Pin(req, "kv", hit)', "", "HKV-REF-003"),
        ("r.salt)):", '"")):', "HKV-KEY-002"),
        ("enumerate(r.blocks[: done // SIZE], 1)", "enumerate(r.blocks, 1)", "HKV-L1-003"),
    ],
)
def test_a_line_that_is_wrong_is_found(line: str, instead: str, rule: str, tmp_path: Path) -> None:
    code = adapter()
    assert line in code
    assert run(tmp_path, code.replace(line, instead))[rule] == "fail"
