"""The README's adapter, as it stands there: 40 lines, and it passes; without what they say it fails."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from conformance_tools import CHECKOUT, report, suite

TOY = CHECKOUT / "tests" / "data" / "conform" / "block_manager.py"


def adapter() -> str:
    section = (CHECKOUT / "README.md").read_text().split("## Conform your engine in 40 lines")[1]
    found = re.search(r"```python\n(.*?)```", section, re.DOTALL)
    assert found is not None
    return found.group(1)


def run(folder: Path, code: str) -> dict[str, Any]:
    """The whole report; the run of pytest passed if it did."""
    shutil.copy(TOY, folder / "block_manager.py")
    options = ("--hybridkv-engine", "my_engine:MyEngine", "--hybridkv-profile", "ci", "--hybridkv-report", "out")
    done = suite(folder, *options, files={"my_engine.py": code})
    found = report(folder / "out")
    assert (done.returncode == 0) == (found["verdict"] == "pass"), done.stdout
    return found


def test_the_adapter_has_as_many_lines_as_the_title_says() -> None:
    lines = [line for line in adapter().split("class MyEngine")[1].splitlines() if line.strip()]
    assert len(lines) == 40


def test_the_adapter_passes(tmp_path: Path) -> None:
    assert run(tmp_path, adapter())["verdict"] == "pass"


def test_an_adapter_that_cannot_even_begin_does_not_pass(tmp_path: Path) -> None:
    found = run(tmp_path, adapter().replace("def reset(self):", "def reset(self):\n        raise OSError"))
    assert (found["verdict"], found["error"]) == ("fail", "reset raised OSError: ")


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
    assert run(tmp_path, code.replace(line, instead))["rules"][rule]["result"] == "fail"
