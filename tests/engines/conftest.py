"""Engines run in an interpreter of their own, named by an environment variable; without it their tests are skipped."""

import os
import subprocess
from pathlib import Path

import pytest
from engine_env import CHECKOUT, HERE, VARIABLE, RunIn


@pytest.fixture(scope="session")
def in_vllm() -> RunIn:
    """Runs a script of this folder there; gives the finished process."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter with vLLM")
    if not Path(python).is_file():
        pytest.skip(f"{VARIABLE}: no file {python}")
    engine = {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    env = dict(os.environ, PYTHONPATH=str(CHECKOUT), **engine)

    def run(script: str, *args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([python, str(HERE / script), *args], env=env, capture_output=True, text=True, check=False)

    return run
