"""SGLang's real radix caches under the oracle: clean when driven by chance, planted faults named, findings as stated.

HYBRIDKV_SGLANG_PYTHON names interpreters, each of an environment with a release of the engine, apart from each other
as folders of PATH are; without it these tests are skipped.
"""

import os
import subprocess
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
FINDINGS = {
    "announced_without_its_window": ("SWARadixCache", "UnifiedRadixCache"),
    "early_release_drops_a_leaf": ("SWARadixCache",),
    "events_leave_out_the_adapter": ("SWARadixCache", "UnifiedRadixCache"),
    "evict_result_undercounts": ("SWARadixCache",),
}
"""Scripts, and the caches in which each was seen; it is gone from the other."""


@pytest.fixture(scope="module", params=SGLANG_PYTHONS)
def in_sglang(request: pytest.FixtureRequest) -> RunIn:
    """Runs a script of this folder in one release's environment; gives the finished process."""
    python = usable(request.param)
    env = dict(os.environ, PYTHONPATH=str(CHECKOUT), HF_HUB_OFFLINE="1")

    def run(script: str, *args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([python, str(HERE / script), *args], env=env, capture_output=True, text=True, check=False)

    return run


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


@pytest.mark.parametrize("name", FINDINGS)
def test_finding_is_as_stated(in_sglang: RunIn, name: str) -> None:
    """The script imports the engine only, and sees what it says where it was seen."""
    source = (HERE / "findings_sglang" / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 60
    assert "hybridkv" not in source
    done = in_sglang(f"findings_sglang/{name}.py")
    assert "Traceback" not in done.stderr, done.stderr[-2000:]
    cache = done.stdout.split(":")[0]
    assert cache in ("SWARadixCache", "UnifiedRadixCache")
    assert done.returncode == int(cache in FINDINGS[name]), done.stdout


def test_every_script_is_run() -> None:
    assert {p.stem for p in (HERE / "findings_sglang").glob("*.py")} == set(FINDINGS)


@pytest.mark.parametrize("python", SGLANG_PYTHONS)
def test_live_from_the_engines_own_publisher(python: str) -> None:
    published(usable(python), "sglang", "sglang_publisher.py", ["40"], groups=1)
