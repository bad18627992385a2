"""Verdicts kept between runs, outside the checkout.

One file per (table hash, checker sources, solver version and options); in it one entry per task, that is per row,
claim or search.  A file that cannot be read is as good as none; it is replaced by renaming a complete new one over
it.
"""

import hashlib
import os
import tempfile
from importlib.metadata import version
from pathlib import Path

import msgspec

from hybridkv_ref.model_checks.obligations import TaskResult


def cache_folder() -> Path:
    """``$HYBRIDKV_CACHE``, else ``$XDG_CACHE_HOME/hybridkv``, else ``~/.cache/hybridkv``."""
    own = os.environ.get("HYBRIDKV_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hybridkv"


def checker_hash() -> str:
    """SHA-256 over the sources that decide a verdict: this package and the core below it."""
    digest = hashlib.sha256()
    here = Path(__file__).resolve().parent
    core = Path(__file__).absolute().parent.parent
    names = (
        "expr", "spec_files", "names", "needs", "need_functions", "rows", "statements", "ties", "loader", "tables",
        "compile_py", "machine",
    )  # fmt: skip
    package = core if (core / "expr.py").exists() else core / "hybridkv_ref"
    for path in [*sorted(here.glob("*.py")), *(package / f"{n}.py" for n in names)]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


class Cache:
    """Results by task name, for one combination of tables, checker and solver."""

    def __init__(self, table_sha256: str, options: str, folder: Path | None = None) -> None:
        self.solver = f"z3 {version('z3-solver')}"
        key = hashlib.sha256("\n".join([table_sha256, checker_hash(), self.solver, options]).encode()).hexdigest()
        self.path = (folder or cache_folder()) / f"{key}.json"
        self.entries: dict[str, TaskResult] = {}

    def read(self) -> None:
        """Loads what is there; anything unreadable counts as nothing."""
        try:
            self.entries = msgspec.json.decode(self.path.read_bytes(), type=dict[str, TaskResult])
        except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
            self.entries = {}

    def write(self) -> None:
        """Stores everything; a cache that cannot be written is no error, only slower."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.path.parent)
            with os.fdopen(handle, "wb") as file:
                file.write(msgspec.json.encode(self.entries))
            Path(name).replace(self.path)
        except OSError:
            return
