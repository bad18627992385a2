"""vLLM's real manager under the oracle: clean when driven by chance, planted faults named, findings as stated.

Engines run in an interpreter of their own, named by an environment variable; without it their tests are skipped.
"""

from typing import Any

import pytest
from engine_env import HERE, RunIn, lines, published

MODELS = (
    "gpt-oss-20b",
    "gpt-oss-20b:32,48",
    "gemma-3-27b",
    "deepseek-v4-flash",
    "deepseek-v3.2",
    "qwen3-next-80b-a3b",
)
PATCHED = (
    "announced_span_is_not_dense",
    "eagle_drop_not_verified_again",
    "failed_load_stays_cached",
    "gives_way_after_it_is_cached",
    "partial_tail_never_found",
    "reuse_report_announces_null_blocks",
    "state_and_its_next_block_counted_once",
)
FINDINGS = tuple(sorted(p.stem for p in (HERE / "findings").glob("*.py")))


@pytest.fixture(scope="module")
def driven(in_vllm: RunIn) -> dict[tuple[str, int], dict[str, Any]]:
    """Each model for some steps, with one and with two steps in flight."""
    found = [
        one
        for depth in (1, 2)
        for one in lines(in_vllm("vllm_runs.py", "--steps", "300", "--depth", str(depth), "--model", *MODELS))
    ]
    return {(one["model"], one["depth"]): one for one in found}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_driven_by_chance(driven: dict[tuple[str, int], dict[str, Any]], model: str, depth: int) -> None:
    """The oracle refuses nothing, has judged everything, and no hit is longer than what can be resumed."""
    one = driven[model, depth]
    assert one["refusals"] == []
    assert one["skipped"] == 0
    assert one["begun"] > 20
    assert "longer" not in one
    assert one["hit_tokens"] > 0
    assert (one.get("drafts_refused", 0) > 0) == (depth == 1 and model != "qwen3-next-80b-a3b")
    assert one["hit_tokens"] + one.get("lost_tokens", 0) == one["best_tokens"]
    if model != "deepseek-v4-flash":
        assert one.get("lost_tokens", 0) == 0
    assert one["missing"] == {}


@pytest.mark.deep
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("model", MODELS)
def test_driven_for_long(in_vllm: RunIn, model: str, depth: int) -> None:
    """20,000 steps per model: with drafts that are refused, and with two steps in flight."""
    done = in_vllm("vllm_runs.py", "--steps", "4000", "--depth", str(depth), "--seed", *"12345", "--model", model)
    assert [one["refusals"] for one in lines(done)] == [[]] * 5


def test_a_window_is_told_whole_when_its_table_has_changed(in_vllm: RunIn) -> None:
    """Else the oldest block that the step reads is told, which is the first that may go."""
    (found,) = lines(in_vllm("vllm_reads.py"))
    size, window, steps = found["block"], found["window"], found["steps"]
    assert (len(steps), {step["moved"] for step in steps}) == (64, {True, False})
    for step in steps:
        at, table, ((blocks, lo, hi),) = step["at"], step["table"], step["read"]
        first = (at + 1 - window) // size
        whole = table[first : -(-at // size)]
        assert 0 not in blocks
        assert (blocks, lo) == (whole if step["moved"] else whole[:1], first * size)
        assert hi == (at if step["moved"] else min(at, lo + size))


@pytest.fixture(scope="module")
def hunted(in_vllm: RunIn) -> list[dict[str, Any]]:
    return lines(in_vllm("vllm_faults.py"))


def test_planted_faults_are_named(hunted: list[dict[str, Any]]) -> None:
    """Each is caught, and by a rule that it breaks."""
    assert len(hunted) >= 15
    assert [one["fault"] for one in hunted if not one["named"]] == []


def test_undone_fixes_are_found(in_vllm: RunIn) -> None:
    """Public faults, each of which the engine has again: the suite finds it unaided, and is clean with the fix."""
    found = lines(in_vllm("vllm_reverted.py"))
    assert len(found) >= 10
    assert [one for one in found if not (one["found"] and one["clean"])] == []


@pytest.mark.parametrize("name", FINDINGS)
def test_finding_is_as_stated(in_vllm: RunIn, name: str) -> None:
    """The script imports the engine only, and sees what it says."""
    source = (HERE / "findings" / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 60
    assert "hybridkv" not in source
    done = in_vllm(f"findings/{name}.py")
    assert (done.returncode, done.stderr.count("Traceback")) == (1, 0), done.stdout + done.stderr[-2000:]


@pytest.mark.parametrize("name", PATCHED)
def test_finding_is_gone_with_a_patch(in_vllm: RunIn, name: str) -> None:
    """A minimal patch of the engine turns the script green."""
    done = in_vllm("vllm_patched.py", name, str(HERE / "findings" / f"{name}.py"))
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


def test_live_from_the_engines_own_publisher(vllm_python: str) -> None:
    published(vllm_python, "vllm", "vllm_publisher.py", ["gpt-oss-20b", "60"], groups=2)
