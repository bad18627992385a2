"""Where an engine's environment is, and what its scripts print."""

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

SGLANG_VARIABLE = "HYBRIDKV_SGLANG_PYTHON"
"""The same for SGLang: one interpreter, or several apart as folders of PATH are."""

SGLANG_PYTHONS = [p for p in os.environ.get(SGLANG_VARIABLE, "").split(os.pathsep) if p] or [""]
"""These; an empty name where there is none."""

RunIn = Callable[..., "subprocess.CompletedProcess[str]"]


def usable(python: str) -> str:
    """One of SGLang's interpreters; skips where there is none of this name."""
    if not python:
        pytest.skip(f"{SGLANG_VARIABLE} names no interpreter with SGLang")
    if not Path(python).is_file():
        pytest.skip(f"{SGLANG_VARIABLE}: no file {python}")
    return python


def lines(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    """The lines of JSON that a script printed."""
    assert done.stdout.strip(), done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
