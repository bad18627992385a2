"""Runs of the conformance suite as its users run it: pytest in a process of its own."""

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[1]
ENGINES = "hybridkv_ref.conformance.engines"
PLUGIN = "hybridkv_ref.conformance.plugin"


def suite(folder: Path, *options: str, files: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """``pytest --pyargs hybridkv_ref.conformance`` in a folder with these files."""
    for name, text in (files or {}).items():
        (folder / name).write_text(text)
    installed = any(point.value == PLUGIN for point in entry_points(group="pytest11"))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(folder)]
    command += [] if installed else ["-p", PLUGIN]
    command += ["--pyargs", "hybridkv_ref.conformance", "-q", *options]
    return subprocess.run(command, cwd=folder, env=environment(), capture_output=True, text=True, check=False)


def environment() -> dict[str, str]:
    """This process's, with the checkout on the path, so that its package is the one that is tested."""
    return {**os.environ, "PYTHONPATH": str(CHECKOUT), "PYTEST_ADDOPTS": ""}


def report(folder: Path) -> dict[str, Any]:
    """The JSON report in a folder."""
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found
