"""Engines run in interpreters of their own, named by environment variables; without one its tests are skipped."""

import os
import subprocess
from pathlib import Path

import pytest
from engine_env import CHECKOUT, HERE, VARIABLE, RunIn


@pytest.fixture(scope="session")
def vllm_python() -> str:
    """The interpreter of vLLM's environment; skips without it."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter with vLLM")
    if not Path(python).is_file():
        pytest.skip(f"{VARIABLE}: no file {python}")
    return python


@pytest.fixture(scope="session")
def in_vllm(vllm_python: str) -> RunIn:
    """Runs a script of this folder there; gives the finished process."""
    engine = {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    env = dict(os.environ, PYTHONPATH=str(CHECKOUT), **engine)

    def run(script: str, *args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [vllm_python, str(HERE / script), *args], env=env, capture_output=True, text=True, check=False
        )

    return run
