"""vLLM's real Scheduler under the oracle, with a runner that writes fingerprints where it is told to.

Clean when driven by chance, also two steps in flight, with drafts, and under a connector; planted faults are caught;
two faults of its own, under the priority policy and under a connector, are found.
"""

import random
from typing import Any

import numpy as np
import pytest
from engine_env import RunIn, lines

from hybridkv_ref.adapters.vllm_runner import Known, Runner, WrongBytes
from hybridkv_ref.events import GroupSpec, Header
from hybridkv_ref.recovery import group_of

MODELS = ("gpt-oss-20b", "gpt-oss-20b:32,48", "gemma-3-27b", "deepseek-v4-flash", "deepseek-v3.2")
STATES = "qwen3-next-80b-a3b"
PLAIN = ("scheduler", "asynchronous scheduler")
DRAFTS = ("scheduler, drafts", "asynchronous scheduler, drafts")
CONNECTOR = ("scheduler, connector", "asynchronous scheduler, connector")
MENDED = "state_and_its_next_block_counted_once"
"""The patch without which the engine stops where a connector loads a state."""

SCRIPT = "vllm_scheduler_runs.py"


@pytest.fixture(scope="module")
def driven(in_vllm: RunIn) -> dict[tuple[str, str], dict[str, Any]]:
    runs = lines(in_vllm(SCRIPT, "--steps", "400", "--how", *PLAIN, "--model", *MODELS, STATES))
    runs += lines(in_vllm(SCRIPT, "--steps", "400", "--how", *DRAFTS, *CONNECTOR, "--model", *MODELS))
    runs += lines(in_vllm(SCRIPT, "--steps", "400", "--how", *CONNECTOR, "--model", STATES, "--patch", MENDED))
    return {(one["model"], one["how"]): one for one in runs}


@pytest.mark.parametrize("how", [*PLAIN, *DRAFTS, *CONNECTOR])
@pytest.mark.parametrize("model", [*MODELS, STATES])
def test_driven_by_chance(driven: dict[tuple[str, str], dict[str, Any]], model: str, how: str) -> None:
    """Nothing is refused, nothing is left unjudged, and every step reads the bytes of its own request."""
    if model == STATES and how in DRAFTS:
        pytest.skip("a state cannot take a draft back: the engine keeps spare states in its runner, which is not here")
    one = driven[model, how]
    assert (one["refusals"], one["stopped"], one["skipped"]) == ([], "", 0)
    assert one["steps"] == 400
    assert one["preempted"] + one["aborted"] > 0
    assert one["hit_tokens"] > 0
    assert "longer" not in one
    assert one["bytes_read"] > one["bytes_written"] > 0
    assert (one["drafts_refused"] > 0, one["drafts_accepted"] > 0) == (how in DRAFTS, how in DRAFTS)
    assert (one.get("loads", 0) > 0) == (how in CONNECTOR)


@pytest.mark.deep
@pytest.mark.parametrize("how", [*PLAIN, *DRAFTS, *CONNECTOR])
def test_driven_for_long(in_vllm: RunIn, how: str) -> None:
    models = MODELS if how in DRAFTS else (*MODELS, STATES)
    mended = ("--patch", MENDED) if how in CONNECTOR else ()
    runs = lines(in_vllm(SCRIPT, "--steps", "4000", "--how", how, "--seed", *"12345", "--model", *models, *mended))
    assert [(one["refusals"], one["stopped"]) for one in runs] == [([], "")] * 5 * len(models)


def test_a_state_that_a_connector_loads_at_once(in_vllm: RunIn) -> None:
    """The engine admits it to a pool that is one block short (the finding of the same name as its patch)."""
    (found,) = lines(in_vllm(SCRIPT, "--model", STATES, "--how", "scheduler, connector", "--steps", "1500"))
    assert found["stopped"] == "ValueError: Cannot get 1 free blocks from the pool"


def test_planted_faults_are_caught(in_vllm: RunIn) -> None:
    """What the scheduler tells its runner is wrong: the oracle refuses it, or a step reads what it should not."""
    found = lines(in_vllm(SCRIPT, "--steps", "1000", "--faults", "--seed", *"12345"))
    assert len(found) >= 10
    assert [one for one in found if not (one["refusals"] or one["stopped"].startswith("WrongBytes"))] == []


def test_a_request_that_gives_way_in_its_own_step(in_vllm: RunIn) -> None:
    """Its blocks are published and nobody computes them (the finding ``gives_way_after_it_is_cached``)."""
    run = ("--model", "gpt-oss-20b:32,48", "--how", "scheduler, by priority", "--steps", "1500")
    (found,) = lines(in_vllm(SCRIPT, *run))
    assert any("(key_publish)" in refusal and "HKV-L1-003" in refusal for refusal in found["refusals"])
    assert found["gave_way"] > 0


class TestRunner:
    """Without the engine: what is written is found again, and what is not is not taken for it."""

    @pytest.fixture
    def runner(self) -> Runner:
        groups = (GroupSpec("full", "compressed_kv", 4), GroupSpec("window", "swa_window", 4, window=4))
        header = Header("hybridkv.events/1", unit=4, groups=groups)
        return Runner(header, [group_of(g) for g in groups], [False, False], 16, 64, random.Random(1))

    def job(self, runner: Runner, lo: int, count: int) -> Any:
        return runner._job("a", lo, count, (), [])

    def test_reads_what_it_wrote(self, runner: Runner) -> None:
        runner.known["a"] = Known(list(range(10)), 0, [[3, 1, 2], [5, 6, 7]], 10, 10)
        first, second = self.job(runner, 0, 7), self.job(runner, 7, 3)
        assert (len(first.out), len(second.out)) == (0, 1)
        assert first.slots[0].tolist() == [12, 13, 14, 15, 4, 5, 6]
        assert second.reads[1][0].tolist() == [24, 25, 26]
        runner.run([first])
        runner.run([second])

    def test_another_requests_bytes(self, runner: Runner) -> None:
        runner.known["a"] = Known(list(range(10)), 0, [[3, 1, 2], [5, 6, 7]], 10, 10)
        first, second = self.job(runner, 0, 7), self.job(runner, 7, 3)
        runner.run([first])
        runner.shadow[1][25] = np.uint64(1)
        with pytest.raises(WrongBytes, match="window block 6 has other bytes at 5"):
            runner.run([second])

    def test_no_block(self, runner: Runner) -> None:
        runner.known["a"] = Known(list(range(10)), 0, [[3, 1, 2], [5, 6]], 10, 10)
        with pytest.raises(WrongBytes, match="window: a table of 2 blocks has none for 9"):
            self.job(runner, 0, 10)

    def test_drafts_that_only_the_device_knows(self, runner: Runner) -> None:
        """What a step refuses moves the next one back until the scheduler has heard of it."""
        known = runner.known["a"] = Known(list(range(10)), 0, [[3, 1, 2, 4], [5, 6, 7, 8]], 10, 10)
        jobs = [runner._job("a", 9, 5, (-1, -1, -1, -1), []) for _ in range(8)]
        assert {len(job.out) - 1 + job.refused for job in jobs} == {4}
        assert len({job.refused for job in jobs}) > 1
        assert known.refused == sum(job.refused for job in jobs)
        for job in jobs:
            runner.heard(job)
        assert known.refused == 0

    def test_bytes_that_a_connector_brings(self, runner: Runner) -> None:
        tables = [[3, 1, 2], [0, 6, 7]]
        runner.known["a"] = Known(list(range(10)), 0, tables, 10, 10)
        second = self.job(runner, 8, 2)
        runner.load(list(range(10)), 0, tables, (0, 8), whole=True)
        runner.run([second])
        assert not runner.shadow[1][:4].any()
        runner.load(list(range(10)), 0, tables, (0, 8), whole=False)
        with pytest.raises(WrongBytes, match="full block 3 has other bytes at 0"):
            runner.run([second])

    def test_another_salt_is_another_prefix(self, runner: Runner) -> None:
        a, b = Known([1, 2], 0, [], 2, 2), Known([1, 2], 1, [], 2, 2)
        assert a.after(2, 3) != b.after(2, 3)
