"""vLLM's own manager tests pass as before with the oracle attached, and what it refuses is known."""

import os
from pathlib import Path

import pytest
from engine_env import RunIn, lines

SOURCES = "HYBRIDKV_VLLM_SOURCES"
"""The unpacked source distribution of the release; its tests are not in the wheel."""

EXPLAINED = {
    "test_block_stored_event_group_idx_out_of_bounds": "no group",  # the test enters an event of a group that is not
}


def test_the_engines_own_tests(in_vllm: RunIn) -> None:
    sources = os.environ.get(SOURCES)
    if not sources:
        pytest.skip(f"{SOURCES} names no unpacked source distribution of vLLM")
    if not (Path(sources) / "tests" / "v1" / "core").is_dir():
        pytest.skip(f"{SOURCES}: no tests/v1/core in {sources}")
    (told,) = lines(in_vllm("vllm_own_tests.py", sources))
    assert told["changed"] == []
    assert told["passed"] > 400
    assert told["ended"]["watched to the end"] > 50
    assert [test for test, why in told["refused"] if EXPLAINED.get(test, "none") not in why] == []
