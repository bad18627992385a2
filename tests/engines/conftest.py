"""Engines run in an interpreter of their own, which an environment variable names; without it their tests are skipped."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
VARIABLE = "HYBRIDKV_VLLM_PYTHON"
"""The interpreter of an environment that holds vLLM and what hybridkv-ref needs."""

RunIn = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def in_vllm() -> RunIn:
    """Runs a script of this folder there; gives the finished process."""
    python = os.environ.get(VARIABLE)
    if not python:
        pytest.skip(f"{VARIABLE} names no interpreter with vLLM")
    if not Path(python).is_file():
        pytest.skip(f"{VARIABLE}: no file {python}")
    env = dict(os.environ, PYTHONPATH=str(CHECKOUT), HF_HUB_OFFLINE="1", VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR")

    def run(script: str, *args: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([python, str(HERE / script), *args], env=env, capture_output=True, text=True, check=False)

    return run


def lines(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    """The lines of JSON that a script printed."""
    assert done.stdout.strip(), done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
