"""SGLang's real radix caches under the oracle: clean when driven by chance, planted faults named, findings as stated.

HYBRIDKV_SGLANG_PYTHON names interpreters, each of an environment with a release of the engine, apart from each other
as folders of PATH are; without it these tests are skipped.
"""

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
from engine_env import CHECKOUT, HERE, SGLANG_PYTHONS, RunIn, lines, published, usable

MODELS = (
    "gpt-oss-20b:9@1",
    "gpt-oss-20b:9@4",
    "gpt-oss-20b:4@2",
    "gpt-oss-20b@16",
    "gemma-3-27b@64",
    "qwen3-next-80b-a3b@1",
)
BOTH = ("0.5.20", "0.5.23")
FINDINGS = {
    "a_caller_names_an_adapter": BOTH,
    "announced_without_its_window": BOTH,
    "early_release_drops_a_leaf": ("0.5.20",),
    "events_leave_out_the_adapter": BOTH,
    "evict_result_undercounts": ("0.5.20",),
    "frees_what_the_tree_holds": BOTH,
    "mixed_chunk_overcommits_the_window": BOTH,
}
"""Scripts, and the releases in which each was seen; it is gone from the others."""

PATCHED = (
    "a_caller_names_an_adapter",
    "evict_result_undercounts",
    "frees_what_the_tree_holds",
    "mixed_chunk_overcommits_the_window",
)
"""Faults that a minimal patch of the engine mends."""

NO_PLACE = 3
"""Exit status of ``sglang_patched.py`` where a release does not have what the patch changes."""


@pytest.fixture(scope="module", params=SGLANG_PYTHONS)
def in_sglang(request: pytest.FixtureRequest) -> RunIn:
    """Runs a script of this folder in one release's environment; gives the finished process."""
    python = usable(request.param)
    built = Path(python).parents[1] / "torch_extensions"
    env = dict(os.environ, PYTHONPATH=str(CHECKOUT), HF_HUB_OFFLINE="1", TORCH_EXTENSIONS_DIR=str(built))

    def run(script: str, *args: str) -> "subprocess.CompletedProcess[str]":
        what = script if script == "-c" else str(HERE / script)
        return subprocess.run([python, what, *args], env=env, capture_output=True, text=True, check=False)

    return run


@pytest.fixture(scope="module")
def release(in_sglang: RunIn) -> str:
    """The engine's version."""
    code = "from importlib.metadata import version; print(version('sglang'))"
    return in_sglang("-c", code).stdout.strip()


@pytest.fixture(scope="module")
def driven(in_sglang: RunIn) -> dict[str, dict[str, Any]]:
    """Each model for some steps."""
    found = lines(in_sglang("sglang_driver.py", "--steps", "300", "--model", *MODELS))
    return {one["model"]: one for one in found}


@pytest.mark.parametrize("model", MODELS)
def test_driven_by_chance(driven: dict[str, dict[str, Any]], model: str) -> None:
    """The oracle refuses nothing, has judged everything, and no hit is longer or shorter than what can be resumed."""
    one = driven[model]
    assert one["refusals"] == []
    assert one["skipped"] == 0
    assert one["begun"] > 20
    assert one["evictions"] > 20
    assert one["hit_tokens"] == one["best_tokens"] > 0
    assert one["retracted"] > 0
    assert one["missing"] == {}


@pytest.mark.deep
@pytest.mark.parametrize("model", MODELS)
def test_driven_for_long(in_sglang: RunIn, model: str) -> None:
    """20,000 steps per model."""
    done = in_sglang("sglang_driver.py", "--steps", "4000", "--seed", *"12345", "--model", model)
    assert [one["refusals"] for one in lines(done)] == [[]] * 5


def test_planted_faults_are_named(in_sglang: RunIn) -> None:
    """Each is caught, and by a rule that it breaks."""
    hunted = lines(in_sglang("sglang_faults.py"))
    assert len(hunted) >= 8
    assert [one["fault"] for one in hunted if not one["named"]] == []


def test_reuse_given_up_is_named(in_sglang: RunIn) -> None:
    """Where hits are made too short, the group that ends them is told."""
    [one] = lines(in_sglang("sglang_faults.py", "--shorter"))
    assert list(one["lost"]) == ["window"]
    assert one["lost"]["window"] > 0


@pytest.fixture(scope="module")
def scheduled(in_sglang: RunIn) -> list[dict[str, Any]]:
    """The real Scheduler in each way, for two models."""
    models = ("gpt-oss-20b:9@4", "qwen3-next-80b-a3b@1")
    return lines(in_sglang("sglang_scheduler_runs.py", "--steps", "200", "--model", *models))


def test_scheduler_driven_by_chance(scheduled: list[dict[str, Any]]) -> None:
    """No refusal, no wrong byte, nothing unjudged, no hit longer or shorter than what can be resumed."""
    assert len(scheduled) == 9
    for one in scheduled:
        known = one["how"] == "scheduler, mixed chunks" and "ut of memory" in one["raised"]  # a finding
        assert (one["refusals"], one["raised"] == "" or known, one["skipped"]) == ([], True, 0), one
        assert one["hit_tokens"] == one["best_tokens"]
        assert one["launched"] > 20
        assert one["bytes_read"] > 0
    assert sum(one["hit_tokens"] for one in scheduled) > 0


def test_faults_planted_in_the_scheduler_are_found(in_sglang: RunIn) -> None:
    found = lines(in_sglang("sglang_scheduler_runs.py", "--faults"))
    assert len(found) >= 3
    assert [one["fault"] for one in found if not one["found"]] == []


def test_undone_fixes_are_found(in_sglang: RunIn, release: str) -> None:
    """Public faults, each of which the engine has again: the suite finds it unaided, and is clean with the fix."""
    found = lines(in_sglang("sglang_reverted.py"))
    assert len(found) >= (5 if release == "0.5.20" else 3)
    assert [one for one in found if not (one["found"] and one["clean"])] == []


@pytest.mark.parametrize("name", FINDINGS)
def test_finding_is_as_stated(in_sglang: RunIn, release: str, name: str) -> None:
    """The script imports the engine only, and sees what it says where it was seen."""
    source = (HERE / "findings_sglang" / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 60
    assert "hybridkv" not in source
    done = in_sglang(f"findings_sglang/{name}.py")
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    assert done.stdout.split(":")[0] in ("SWARadixCache", "UnifiedRadixCache")
    assert done.returncode == int(release in FINDINGS[name]), done.stdout


@pytest.mark.parametrize("name", PATCHED)
def test_finding_is_gone_with_a_patch(in_sglang: RunIn, release: str, name: str) -> None:
    """A minimal patch of the engine turns the script green; a release without the fault may have no place for it."""
    done = in_sglang("sglang_patched.py", name, str(HERE / "findings_sglang" / f"{name}.py"))
    expected = 0 if release in FINDINGS[name] else NO_PLACE
    assert done.returncode == expected, done.stdout + done.stderr[-2000:]


def test_every_script_is_run() -> None:
    assert {p.stem for p in (HERE / "findings_sglang").glob("*.py")} == set(FINDINGS)


@pytest.mark.parametrize("python", SGLANG_PYTHONS)
def test_live_from_the_engines_own_publisher(python: str) -> None:
    published(usable(python), "sglang", "sglang_publisher.py", ["40"], groups=1)
