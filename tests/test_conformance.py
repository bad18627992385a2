"""The conformance suite: engines that pass, engines that fail and how, wrong words, reports, processes, xdist."""

import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import jsonschema
import msgspec
import pytest
from conformance_tools import CHECKOUT, ENGINES, PLUGIN, environment, report, suite

from hybridkv_ref.conformance.capabilities import Profile, load_suite
from hybridkv_ref.conformance.engine import Abort, Begin, Complete, Evict, Finish, Pool, Schedule, Store
from hybridkv_ref.conformance.engines import aware, simple, speculative
from hybridkv_ref.conformance.loading import load_engine, load_gaps, load_profile
from hybridkv_ref.conformance.lockstep import ENOUGH, Lockstep, full_header, replay
from hybridkv_ref.conformance.machine import prompt, run_histories
from hybridkv_ref.conformance.process import EngineError, ProcessEngine
from hybridkv_ref.conformance.records import Report, schema
from hybridkv_ref.conformance.report import badge, markdown
from hybridkv_ref.conformance.run import conform
from hybridkv_ref.conformance.simple import GroupAwareEngine, SimpleBlockEngine
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Allocate, Event, Free, GroupSpec
from hybridkv_ref.rules import load_rules
from hybridkv_ref.validate import validate

SHORT = Profile("", examples=12, steps=20, minimise=3, derandomise=True)
GROUPS = [
    GroupSpec("full", "compressed_kv", 4, capacity=20),
    GroupSpec("window", "swa_window", 4, window=8, capacity=16),
]


@pytest.fixture(scope="module")
def failing() -> Report:
    # As much time as minimising wants: what is found must not depend on the machine.
    return conform(simple(), msgspec.structs.replace(SHORT, minimise=600), "short")


@pytest.fixture(scope="module")
def passing() -> Report:
    return conform(aware(), SHORT, "short")


# ---- verdicts --------------------------------------------------------------------------------------------------------


def test_an_engine_that_asks_every_group_passes_with_premises(passing: Report) -> None:
    assert passing.verdict == "pass"
    assert passing.open == []
    asked = [v for v in passing.rules.values() if v.asked_by]
    assert asked
    assert all(v.result == "pass" and v.premises > 0 for v in asked)
    assert passing.rules.keys() == load_rules().keys()


def test_drafts_are_taken_back_by_an_engine_without_states() -> None:
    found = conform(speculative(), SHORT, "short")
    assert found.verdict == "pass"
    assert found.rules["HKV-POS-003"].premises > 0
    assert found.rules["HKV-POS-003"].asked_by == ["drafts"]


def test_a_cache_that_treats_all_groups_alike_fails_for_what_it_is(failing: Report) -> None:
    broken = {rule for rule, v in failing.rules.items() if v.result == "fail"}
    assert failing.verdict == "fail"
    assert {"HKV-L3-001", "HKV-SWA-001"} <= broken
    assert not {"HKV-KEY-001", "HKV-REF-005", "HKV-S3-011"} & broken  # as a cache of one group it is right
    assert "every cache group of the model can resume" in markdown(failing)


def test_what_is_found_is_short_and_says_why(failing: Report) -> None:
    found = failing.rules["HKV-SWA-001"].found
    assert found is not None
    assert found.row == "system.covers_swa_window"
    assert 1 <= len(found.events) <= 20
    assert len(found.operations) <= 40
    assert set(found.values) == {"lo", "hi", "first", "last"}


def test_a_claimed_rule_that_nothing_shows_makes_the_run_partial() -> None:
    class Graphs(GroupAwareEngine):
        def __init__(self) -> None:
            super().__init__(GROUPS)
            self.capabilities = (*self.capabilities, "graphs")

    found = conform(Graphs(), SHORT, "short")
    assert found.verdict == "partial"
    assert set(found.open) == set(load_suite().asks["graphs"])
    assert badge(found)["color"] == "yellow"


def test_a_known_gap_does_not_fail_and_goes_stale_when_it_is_not_seen(failing: Report) -> None:
    gaps = tuple(rule for rule, v in failing.rules.items() if v.result == "fail")
    found = conform(simple(), SHORT, "short", gaps)
    assert found.verdict == "partial"
    assert found.stale == []
    assert conform(aware(), SHORT, "short", ("HKV-SWA-001",)).stale == ["HKV-SWA-001"]


def test_an_engine_that_raises_is_named_with_what_led_there() -> None:
    class Raises(GroupAwareEngine):
        def finish(self, req: str) -> bool:
            raise KeyError(req)

    found = conform(Raises(GROUPS), SHORT, "short")
    assert found.verdict == "fail"
    assert found.error.startswith("finish raised KeyError")
    assert found.error_operations[-1]["op"] == "finish"


def test_an_event_about_an_unknown_group_is_the_engines_error() -> None:
    class Wrong(GroupAwareEngine):
        def drain(self) -> list[Event]:
            return [*super().drain(), Free("r0", "nobody", [1])]

    assert "no group 'nobody'" in conform(Wrong(GROUPS), SHORT, "short").error


def test_counts_that_differ_from_the_events_are_found() -> None:
    class Leaks(SimpleBlockEngine):
        def release(self, req: str, group: str, blocks: list[int]) -> None:  # type: ignore[override]
            super().release(req, group, blocks)
            if self.free[group] and self.steps > 3:
                self.free[group].pop()

    found = conform(Leaks([GROUPS[0]]), SHORT, "short")
    assert found.rules["HKV-ACC-001"].result == "fail"


def test_a_block_that_is_given_twice_is_found() -> None:
    class Shares(GroupAwareEngine):
        def take(self, group: str, count: int) -> list[int]:
            taken = super().take(group, count)
            self.free[group][:0] = taken[:1]
            return taken

        def snapshot(self) -> dict[str, Pool]:
            return {}

    found = conform(Shares(GROUPS), SHORT, "short")
    assert found.rules["HKV-ALIAS-001"].result == "fail"


# ---- histories -------------------------------------------------------------------------------------------------------


def test_every_history_has_a_b_a_and_ends_at_rest() -> None:
    engine = aware()
    seen: list[Lockstep] = []
    run_histories(engine, full_header(engine), SHORT, seen.append)
    assert len(seen) >= SHORT.examples
    for history in seen:
        prompts = [o.tokens for o in history.history if isinstance(o, Begin)][:3]
        assert prompts[0] == prompts[2]
        assert type(history.events[-1]).__name__ == "Drain"
        assert all(client.stage == "gone" for client in history.clients.values())


def test_a_history_is_the_same_when_it_is_replayed() -> None:
    engine = aware()
    header = full_header(engine)
    seen: list[Lockstep] = []
    run_histories(engine, header, SHORT, seen.append)
    for history in seen:
        assert replay(engine, header, history.history).events == history.events


def test_an_engine_that_stores_without_end_is_left() -> None:
    class Endless(GroupAwareEngine):
        def __init__(self) -> None:
            super().__init__(GROUPS)
            self.capabilities = (*self.capabilities, "transfers")

        def store(self) -> bool:
            return True

        def load(self, req: str, tokens: tuple[int, ...], salt: str) -> bool:
            return True

        def transfer(self, ok: bool) -> bool:
            return True

    engine, seen = Endless(), []
    run_histories(engine, full_header(engine), Profile("", 1, 1, 0, True), seen.append)
    assert seen
    assert all(sum(isinstance(o, Store) for o in one.history) >= ENOUGH for one in seen)


def test_operations_that_make_no_sense_are_passed_over() -> None:
    engine = aware()
    run = Lockstep(engine, full_header(engine))
    tokens = prompt((0, 1), 2, run.chunk)
    assert not run.do(Schedule("nobody", 1))
    assert not run.do(Complete("nobody"))
    assert not run.do(Finish("nobody"))
    assert run.do(Begin("a", tokens))
    assert not run.do(Begin("a", tokens))
    assert not run.do(Schedule("a", len(tokens) + 1))
    assert run.do(Schedule("a", len(tokens)))
    assert not run.do(Finish("a"))  # a step runs
    assert run.do(Abort("a"))
    assert not run.do(Abort("a"))
    assert run.do(Complete("a"))
    assert run.do(Evict("", 99))
    assert run.refused == []


def test_what_follows_from_a_refusal_is_not_judged() -> None:
    class Twice(GroupAwareEngine):
        def drain(self) -> list[Event]:
            events = super().drain()
            return [e for e in events for _ in range(2 if isinstance(e, Allocate) else 1)]

    engine = Twice(GROUPS)
    run = Lockstep(engine, full_header(engine))
    run.serve(prompt((0, 1), 2, run.chunk))
    assert len({one.events for one in run.refused}) == 1
    assert run.over()


# ---- words of the command line ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("nowhere", "expected module:factory"),
        ("no_such_module:make", "cannot be imported"),
        (f"{ENGINES}:no_such", "cannot be imported"),
        (f"{ENGINES}:SIZE", "not a function"),
        ("builtins:dict", "has no name"),
        ("exec:no-such-program-at-all", "cannot be started"),
        ("exec:echo hello", "no hello"),
    ],
)
def test_a_wrong_engine_is_one_line(path: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        load_engine(path)


def test_a_capability_needs_its_name_and_its_methods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "claims.py").write_text(
        "from hybridkv_ref.conformance.engines import aware\n"
        "def unknown():\n    e = aware(); e.capabilities = ('magic',); return e\n"
        "def lacking():\n    e = aware(); e.capabilities = ('transfers',); return e\n"
    )
    with pytest.raises(InputError, match="no capability 'magic'"):
        load_engine("claims:unknown")
    with pytest.raises(InputError, match="no method load"):
        load_engine("claims:lacking")


def test_gaps_and_profiles_are_checked(tmp_path: Path) -> None:
    listed = tmp_path / "gaps.txt"
    listed.write_text("HKV-SWA-001  # the window is kept elsewhere\n\nHKV-L3-001\nHKV-SWA-001\n")
    assert load_gaps(f"@{listed}") == ("HKV-SWA-001", "HKV-L3-001")
    assert load_gaps("") == ()
    with pytest.raises(InputError, match="no rule 'HKV-SWA-999'"):
        load_gaps("HKV-SWA-001,HKV-SWA-999")
    listed.write_text("ok\n")
    with pytest.raises(InputError, match=r"gaps\.txt:1: no rule 'ok'"):
        load_gaps(f"@{listed}")
    with pytest.raises(InputError, match="cannot be read"):
        load_gaps(f"@{tmp_path / 'none'}")
    with pytest.raises(InputError, match="no such profile"):
        load_profile("eternal")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('rules = ["HKV-LIVE-011"]', "no rule 'HKV-LIVE-999'"),
        ("examples = 25", "Expected `int`, got `str`"),
        ("steps = 25\n", "missing required field `steps`"),
    ],
)
def test_a_wrong_suite_file_is_one_line(text: str, reason: str, tmp_path: Path) -> None:
    spec = tmp_path / "spec"
    shutil.copytree(CHECKOUT / "spec", spec)
    file = spec / "conformance.toml"
    wrong = {"rules": text.replace("011", "999"), "examples": 'examples = "many"', "steps": ""}[text.split()[0]]
    file.write_text(file.read_text().replace(text, wrong, 1))
    with pytest.raises(InputError, match=re.escape(reason)):
        load_suite(spec)


@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--hybridkv-engine", "no_such_module:make"),
        ("--hybridkv-engine", f"{ENGINES}:aware", "--hybridkv-profile", "eternal"),
        ("--hybridkv-engine", f"{ENGINES}:aware", "--hybridkv-known-gaps", "HKV-NO-001"),
    ],
)
def test_wrong_words_are_usage_errors(options: tuple[str, ...], tmp_path: Path) -> None:
    done = suite(tmp_path, *options)
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "ERROR: " in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


# ---- pytest ----------------------------------------------------------------------------------------------------------


def test_a_failing_engine_leaves_a_report_and_traces_that_replay(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    done = suite(
        tmp_path, "--hybridkv-engine", f"{ENGINES}:simple", "--hybridkv-profile", "ci",
        "--hybridkv-report", str(folder), "--junitxml", str(tmp_path / "junit.xml"),
    )  # fmt: skip
    assert done.returncode == pytest.ExitCode.TESTS_FAILED
    found = report(folder)
    jsonschema.validate(found, schema())
    broken = {rule: v["found"] for rule, v in found["rules"].items() if v["result"] == "fail"}
    assert "HKV-SWA-001" in broken
    for rule, one in broken.items():
        assert f"test_rule[{rule}]" in done.stdout
        assert one["replay"] in done.stdout
        again = validate(str(folder / one["trace"]))
        assert again.refusals >= 1
        assert {r.row for r in again.first} == {one["row"]}
        assert rule in {r.rule for r in again.first}
    command = broken["HKV-SWA-001"]["replay"].split()
    replayed = subprocess.run(
        [sys.executable, "-m", "hybridkv_ref.cli", *command[1:]], env=environment(), cwd=tmp_path, check=False
    )
    assert replayed.returncode == 1
    assert json.loads((folder / "badge.json").read_text())["message"].startswith("fail, ")
    assert "HKV-SWA-001" in (folder / "report.md").read_text()
    assert 'name="premises"' in (tmp_path / "junit.xml").read_text()


def test_undeclared_capabilities_are_skipped_with_the_reason(tmp_path: Path) -> None:
    done = suite(
        tmp_path, "--hybridkv-engine", f"{ENGINES}:aware", "-rs", "-k", "HKV-S4-002 or HKV-L4-002 or HKV-POS-003"
    )
    assert done.returncode == 0
    assert "HKV-S4-002: not exercised: the engine does not claim graphs" in done.stdout
    assert "the engine does not claim drafts" in done.stdout
    assert "HKV-L4-002: not observable: an observer needs level L3" in done.stdout


def test_known_gaps_are_expected_failures_and_stale_ones_fail(tmp_path: Path) -> None:
    engine = ("--hybridkv-engine", f"{ENGINES}:simple", "--hybridkv-profile", "ci")
    gaps = "HKV-L3-001,HKV-L3-002,HKV-SWA-001,HKV-REC-001,HKV-POS-001"
    done = suite(tmp_path, *engine, "--hybridkv-known-gaps", gaps, "-k", "HKV-SWA-001")
    assert done.returncode == 0
    assert "1 xfailed" in done.stdout
    stale = suite(tmp_path, *engine, "--hybridkv-known-gaps", f"{gaps},HKV-KEY-001", "-k", "HKV-KEY-001")
    assert stale.returncode == 1
    assert "a known gap that was not seen broken (pass)" in stale.stdout


def test_workers_share_one_run(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    counting = textwrap.dedent(
        """
        import os
        from hybridkv_ref.conformance.engines import aware
        def make():
            engine = aware()
            reset = engine.reset
            def counted():
                with open("resets", "a") as file:
                    file.write(f"{os.getpid()}\\n")
                reset()
            engine.reset = counted
            return engine
        """
    )
    done = suite(
        tmp_path, "-n", "2", "--hybridkv-engine", "counting:make", "--hybridkv-report", str(folder),
        files={"counting.py": counting},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hybridkv: GroupAwareEngine: pass" in done.stdout
    assert report(folder)["verdict"] == "pass"
    assert len(set((tmp_path / "resets").read_text().split())) == 1


# What an empty run of pytest imports because of the plugin.
IMPORTS = """
import sys
import pytest
before = set(sys.modules)
import hybridkv_ref.conformance.plugin
print(*sorted(set(sys.modules) - before))
"""


def test_the_plugin_imports_nothing_heavy() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS], env=environment(), capture_output=True, text=True, check=True, cwd=CHECKOUT
    )
    loaded = {name.split(".")[0] for name in done.stdout.split()}
    assert loaded <= {"hybridkv_ref", "fcntl"}
    ours = {name for name in done.stdout.split() if name.startswith("hybridkv_ref")}
    assert ours == {"hybridkv_ref", "hybridkv_ref.conformance", PLUGIN}


def test_the_suite_needs_neither_torch_nor_a_solver() -> None:
    code = (
        f"import sys; from hybridkv_ref.conformance.loading import load_engine; load_engine('{ENGINES}:aware'); "
        "import hybridkv_ref.conformance.run; print(*{'torch', 'z3', 'networkx'} & set(sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True, cwd=CHECKOUT
    )
    assert done.stdout.split() == []


# ---- a process -------------------------------------------------------------------------------------------------------

SERVED = (
    "from hybridkv_ref.conformance.engines import {0}; from hybridkv_ref.conformance.process import serve; serve({0}())"
)


def served(name: str) -> str:
    return f'{sys.executable} -c "{SERVED.format(name)}"'


@pytest.mark.parametrize(("name", "verdict"), [("speculative", "pass"), ("simple", "fail")])
def test_an_engine_in_a_process_gets_the_same_report(name: str, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    engine = ProcessEngine(served(name))
    try:
        outside = conform(engine, SHORT, "short")
    finally:
        engine.close()
    inside = conform({"speculative": speculative, "simple": simple}[name](), SHORT, "short")
    assert outside.verdict == inside.verdict == verdict
    assert (outside.events, outside.operations) == (inside.events, inside.operations)
    results = [{rule: v.result for rule, v in found.rules.items()} for found in (outside, inside)]
    assert results[0] == results[1]


def test_a_process_that_fails_or_ends_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(CHECKOUT))
    engine = ProcessEngine(served("aware"))
    with pytest.raises(EngineError, match="KeyError"):
        engine.finish("nobody")
    engine.process.kill()
    engine.process.wait()
    with pytest.raises(EngineError):
        engine.finish("nobody")
    engine.close()


def test_reports_read_back(failing: Report) -> None:
    data = msgspec.json.encode(failing)
    assert msgspec.json.encode(msgspec.json.decode(data, type=Report)) == data
