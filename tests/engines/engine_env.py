"""Where an engine's environment is, and what its scripts print."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[1]
VARIABLE = "HYBRIDKV_VLLM_PYTHON"
"""The interpreter of an environment that holds vLLM and what hybridkv-ref needs."""

SGLANG_VARIABLE = "HYBRIDKV_SGLANG_PYTHON"
"""The same for SGLang: one interpreter, or several apart as folders of PATH are."""

RunIn = Callable[..., "subprocess.CompletedProcess[str]"]


def lines(done: "subprocess.CompletedProcess[str]") -> list[dict[str, Any]]:
    """The lines of JSON that a script printed."""
    assert done.stdout.strip(), done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
