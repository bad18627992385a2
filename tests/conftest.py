"""What all tests share: where the recorded traces and model lists lie, and how Hypothesis draws its examples."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

CHECKOUT = Path(__file__).resolve().parents[1]

# One process per core runs the tests: threads of torch's own on top of that only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# `ci` draws the same examples on every run, so that a failure is the fault of the change under test. `search` draws new
# ones: pytest --hypothesis-profile=search. Neither has a deadline: no test measures time.
settings.register_profile("ci", derandomize=True, database=None, deadline=None, print_blob=True)
settings.register_profile("search", max_examples=1000, deadline=None, print_blob=True)
settings.load_profile("ci")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of public data (models.json, traces/): $HYBRIDKV_DATA, or shared/data beside the checkout."""
    folder = Path(os.environ.get("HYBRIDKV_DATA") or CHECKOUT.parent / "shared" / "data")
    if not folder.is_dir():
        pytest.skip(f"no data folder at {folder}: set HYBRIDKV_DATA to it")
    return folder


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of vLLM's environment, which an environment variable names; skips without one."""
    from engine_env import VARIABLE

    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter with vLLM")
    if not Path(python).is_file():
        pytest.skip(f"{VARIABLE}: no file {python}")
    return python


@pytest.fixture(scope="session")
def in_vllm(vllm_python: str) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs a script of tests/engines there; gives the finished process."""
    engine = {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    env = dict(os.environ, PYTHONPATH=str(CHECKOUT), **engine)

    def run(script: str, *args: str) -> "subprocess.CompletedProcess[str]":
        command = [vllm_python, str(CHECKOUT / "tests" / "engines" / script), *args]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    return run
