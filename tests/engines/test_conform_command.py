"""``hybridkv conform ENGINE``: what it says of interpreters, of runs that go well, and of runs that do not."""

import re
import stat
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
from engine_env import CHECKOUT, HERE, SGLANG_PYTHONS, usable

from hybridkv_ref.adapters.engine_report import EngineReport, markdown, report, traces
from hybridkv_ref.adapters.engine_suite import play
from hybridkv_ref.cli import main
from hybridkv_ref.events import Allocate, Arrive, Engine, Event, GroupSpec, Header
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_records import Refusal
from hybridkv_ref.validate import validate

HEADER = Header(
    "hybridkv.events/1", Engine("toy", "1"), unit=16, groups=(GroupSpec("full", "compressed_kv", 16),),
    capabilities=("blocks",),
)  # fmt: skip


class Toy:
    """An engine of one request; it hands out block 1 again in step ``fault``, raises in step ``broken``."""

    def __init__(self, model: str, seed: int, fault: int = 0, broken: int = 0) -> None:
        self.header, self.oracle = HEADER, Oracle(HEADER)
        self.fault, self.broken, self.steps = fault, broken, 0
        self.trail: list[Event] = []
        self.refusals: list[Refusal] = []
        self.stats: Counter[str] = Counter(lookups=1, hit_tokens=16, best_tokens=48, shorter=1)
        self.lost: Counter[str] = Counter({"full": 32})
        self.missing: dict[str, list[str]] = {}
        self.tell(Arrive("a", 1600, list(range(100))))

    def tell(self, event: Event) -> None:
        self.trail.append(event)
        self.refusals += self.oracle.feed(event).refusals

    def step(self) -> None:
        self.steps += 1
        if self.steps == self.broken:
            raise RuntimeError("no more\nof this")
        self.tell(Allocate("a", "full", [1 if self.steps == self.fault else self.steps]))

    def end(self) -> None:
        pass


def told(**options: int) -> EngineReport:
    one = play(lambda model, seed: Toy(model, seed, **options), "toy", "alone", 1, 20)
    return report([one.played], [one.coverage])


def test_a_run_that_goes_well_is_partial_while_a_claim_is_open() -> None:
    found = told()
    assert (found.engine, found.version, found.verdict) == ("toy", "1", "partial")
    assert found.open
    assert found.rules["HKV-ALIAS-001"].result == "pass"
    assert "| toy | alone | 20 | 21 | 1 | 16 | 48 | yes | 32 by full |" in markdown(found)


def test_a_refusal_fails_and_comes_with_a_trace_that_is_refused_as_well(tmp_path: Path) -> None:
    found = told(fault=9)
    run = found.runs[0]
    assert (found.verdict, run.steps) == ("fail", 9)
    assert run.refused is not None
    assert len(run.refused.events) == 2
    ((name, data),) = traces(found)
    (tmp_path / name).write_bytes(data)
    again = validate(str(tmp_path / name))
    assert sorted(first.rule for first in again.first) == sorted(run.refused.rules)
    assert run.refused.message in markdown(found)


def test_an_engine_that_raises_fails_with_what_it_said() -> None:
    found = told(broken=3)
    assert (found.verdict, found.runs[0].error) == ("fail", "RuntimeError: no more")
    assert "`RuntimeError: no more`" in markdown(found)


def test_a_hit_that_is_too_long_fails() -> None:
    def make(model: str, seed: int) -> Toy:
        toy = Toy(model, seed)
        toy.stats["longer"] = 1
        return toy

    one = play(make, "toy", "alone", 1, 1)
    assert report([one.played], [one.coverage]).verdict == "fail"


@pytest.fixture
def liar(tmp_path: Path) -> str:
    """A program that says it is an old interpreter."""
    path = tmp_path / "python"
    path.write_text("#!/bin/sh\necho '[[3, 9], []]'\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.fixture
def quitter(tmp_path: Path) -> str:
    """A program that looks like a fit interpreter and ends with an error."""
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\n[ "$1" = -c ] && echo "[[3, 12], []]" && exit\necho one >&2; echo two >&2; exit 3\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command ends with."""
    assert main(["conform", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def test_what_cannot_be_used_is_said_in_one_line(capsys: pytest.CaptureFixture[str], tmp_path: Path, liar: str) -> None:
    here = sys.executable
    assert "no such engine (known: vllm, sglang)" in refused(capsys, "vlm", "--python", here)
    assert "no such file" in refused(capsys, "vllm", "--python", str(tmp_path / "none"))
    assert "no such file" in refused(capsys, "vllm", "--python", str(tmp_path))
    assert "not an interpreter" in refused(capsys, "vllm", "--python", __file__)
    assert "not an interpreter" in refused(capsys, "vllm", "--python", "/bin/echo")
    assert "Python 3.9 is older than 3.11" in refused(capsys, "vllm", "--python", liar)
    assert "no model named 'x'" in refused(capsys, "vllm", "--python", here, "--model", "x")
    assert "2 groups" in refused(capsys, "vllm", "--python", here, "--model", "gpt-oss-20b:1")
    assert "tokens above 0 after '@'" in refused(capsys, "sglang", "--python", here, "--model", "gpt-oss-20b:9@0")
    assert "tokens above 0 after ':'" in refused(capsys, "sglang", "--python", here, "--model", "gpt-oss-20b:x@1")
    assert "pages of 4 tokens" in refused(capsys, "sglang", "--python", here, "--model", "qwen3-next-80b-a3b@4")
    assert "no group of it has a window" in refused(
        capsys, "sglang", "--python", here, "--model", "qwen3-next-80b-a3b:9@1"
    )
    assert "one window or states" in refused(capsys, "sglang", "--python", here, "--model", "deepseek-v4-flash")
    assert "--steps 0" in refused(capsys, "vllm", "--python", here, "--steps", "0")
    assert "--out" in refused(capsys, "vllm", "--python", here, "--out", __file__)


@pytest.mark.skipif(find_spec("vllm") is not None, reason="this environment holds vLLM")
def test_an_environment_without_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert "its environment has no vllm" in refused(capsys, "vllm", "--python", sys.executable)


def test_a_process_that_ends_early(capsys: pytest.CaptureFixture[str], quitter: str) -> None:
    assert "ended with code 3: two" in refused(capsys, "vllm", "--python", quitter)


def test_the_readme_has_the_commands_of_the_script() -> None:
    """The script makes the environment that the README and the workflow speak of."""
    section = (CHECKOUT / "README.md").read_text().split("## Drive a real engine")[1]
    shown = re.search(r"```sh\n(.*?)```", section, re.DOTALL)
    assert shown is not None
    script = (HERE / "vllm_environment.sh").read_text().split("\n\n", 1)[1]
    assert shown[1] == script.replace('"$folder/bin/pip"', "vllm-env/bin/pip").replace('"$folder"', "vllm-env")


def driven(engine: str, python: str, models: list[str], folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The whole command: another environment, each way, every claim shown."""
    assert main(["conform", engine, "--python", python, "--model", *models, "--out", str(folder)]) == 0
    found = msgspec.json.decode((folder / "report.json").read_bytes(), type=EngineReport)
    assert found.verdict == "pass"
    assert sorted({run.model for run in found.runs}) == sorted(models)
    assert all(run.hit_tokens > 0 for run in found.runs)
    assert f"{engine} {found.version}: pass" in capsys.readouterr().out
    assert f"## {engine} {found.version}: pass" in (folder / "report.md").read_text()


def test_vllm_is_driven_from_outside(vllm_python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driven("vllm", vllm_python, ["gpt-oss-20b", "deepseek-v4-flash"], tmp_path, capsys)


@pytest.mark.parametrize("python", SGLANG_PYTHONS)
def test_sglang_is_driven_from_outside(python: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    driven("sglang", usable(python), ["gpt-oss-20b:9@4", "qwen3-next-80b-a3b@1"], tmp_path, capsys)
