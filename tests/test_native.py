"""The compiled oracle says what the interpreted one says; it is built here, where a C compiler is."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from hybridkv_ref import native
from hybridkv_ref.cli import main
from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR

SCRIPT = Path(__file__).with_name("native_verdicts.py")
CHECKOUT = SCRIPT.parents[1]


def missing() -> str:
    """Why nothing can be compiled here."""
    if importlib.util.find_spec("mypyc") is None or importlib.util.find_spec("setuptools") is None:
        return "mypyc or setuptools is not installed"
    if shutil.which(os.environ.get("CC", "cc")) is None:
        return "there is no C compiler"
    return "" if (Path(sysconfig.get_path("include")) / "Python.h").exists() else "Python's headers are not installed"


def verdicts(cache: Path | None, traces: list[str], *more: str) -> tuple[str, list[str]]:
    """The file of the oracle's steps, and a line per trace; compiled where a cache is named."""
    environment = {n: v for n, v in os.environ.items() if n != native.VARIABLE}
    environment |= {"PYTHONPATH": os.pathsep.join([str(CHECKOUT), str(SCRIPT.parent)])}
    if cache is not None:
        environment |= {native.VARIABLE: "1", "XDG_CACHE_HOME": str(cache)}
    command = [sys.executable, str(SCRIPT), *traces, *more]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    first, *lines = done.stdout.splitlines()
    return first, lines


def built(patch: pytest.MonkeyPatch, cache: Path) -> Path:
    if why := missing():
        pytest.skip(why)
    patch.setenv("XDG_CACHE_HOME", str(cache))
    assert main(["native"]) == 0
    assert native.build().is_dir()
    return cache


def test_the_compiled_oracle_judges_alike(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = built(monkeypatch, tmp_path / "cache")
    traces = []
    for model in ("deepseek-v4-flash", "qwen3-next-80b-a3b"):
        traces.append(str(tmp_path / f"{model}.jsonl"))
        told = ["simulate", "--model", model, "--gpu-memory", "1GiB", "--requests", "60", "--events", traces[-1]]
        assert main([*told, "--json"]) == 0
    compiled, found = verdicts(cache, traces)
    interpreted, expected = verdicts(None, traces)
    assert compiled.startswith(str(cache))
    assert not compiled.endswith(".py")
    assert interpreted.endswith(".py")
    assert len(found) > 300
    assert sum(1 for line in found if json.loads(line)[1]) > 100
    assert found == expected
    # A row that was not compiled is judged as it is written; records that were not are refused.
    spec = tmp_path / "spec"
    shutil.copytree(SPEC_DIR, spec)
    path = spec / "oracle" / "block.toml"
    text = path.read_text()
    guard = 'when = ["pending > 0"]'
    assert text.count(guard) == 1
    path.write_text(text.replace(guard, 'when = ["pending > 1"]'))
    found, changed = verdicts(cache, [], "--spec", str(spec))[1], verdicts(None, [], "--spec", str(spec))[1]
    assert found == changed
    assert "pending > 1" in "".join(changed)
    path.write_text(text.replace("[segment]\n", '[segment]\nextra = { type = "int", doc = "of another engine" }\n'))
    refused = [json.loads(line)[1] for line in verdicts(cache, [], "--spec", str(spec))[1]]
    assert set(refused) == {"segment: the compiled oracle is of other tables; use the interpreted one"}


def test_what_cannot_be_built_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"mypyc is not installed: pip install 'hybridkv-ref\[native\]'"):
        native.build()
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "/no/such/compiler -O2")
    if importlib.util.find_spec("mypyc") is not None:
        with pytest.raises(InputError, match="native: there is no C compiler '/no/such/compiler'"):
            native.build()
    monkeypatch.delenv("CC")
    if not missing():
        occupied = tmp_path / "file"
        occupied.touch()
        monkeypatch.setenv("XDG_CACHE_HOME", str(occupied))
        with pytest.raises(InputError, match=r"native: .*/file/hybridkv_ref/native: Not a directory"):
            native.build()
        occupied.unlink()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        monkeypatch.setattr(native, "COMPILED", ("oracle_nowhere",))
        with pytest.raises(InputError, match=r"native: the build failed: .*oracle_nowhere"):
            native.build()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_compiler_that_cannot_link_as_one_will_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What is compiled is the same, a little slower."""
    if why := missing():
        pytest.skip(why)
    compiler, said = tmp_path / "compiler", tmp_path / "said"
    real = shutil.which(os.environ.get("CC", "cc"))
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *-flto*) echo refused >> "{said}"; exit 1;; esac\nexec "{real}" "$@"\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "COMPILED", ("paths",))
    assert list(native.build().rglob("paths.*.so"))
    assert said.read_text().startswith("refused")


def test_nothing_compiled_is_a_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.warns(UserWarning, match="nothing is compiled of these sources: run 'hybridkv native'"):
        native.activate()
