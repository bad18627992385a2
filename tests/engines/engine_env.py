"""Where an engine's environment is, and what its scripts print."""

import json
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
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


def published(python: str, form: str, script: str, arguments: Sequence[str], groups: int) -> None:
    """A publisher of the engine's own in another process, read live: every event is judged, none refused."""
    env = dict(os.environ, PYTHONPATH=str(CHECKOUT), HF_HUB_OFFLINE="1", VLLM_TARGET_DEVICE="cpu")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    command = [python, str(HERE / script), address.replace("127.0.0.1", "*"), *arguments]
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, env=env, text=True, **pipe) as publisher:  # type: ignore[call-overload]
        assert publisher.stdout.readline() == "ready\n"
        reader = [python, "-m", "hybridkv_ref.cli", "events", address, "--format", form, "--idle", "8"]
        with subprocess.Popen(reader, env=env, text=True, stdout=subprocess.PIPE) as live:
            count = int(publisher.stdout.readline())
            printed = live.communicate()[0]
            publisher.stdin.write("\n")
            publisher.stdin.flush()
            assert live.returncode == 0, printed
    assert f"{count} events of {groups} groups, 0 refused" in printed
    assert "gaps" not in printed
