"""From the words of the command line to an engine, a profile and known gaps; InputError for what is wrong."""

import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hybridkv_ref.conformance.capabilities import Profile, load_suite
from hybridkv_ref.conformance.engine import Engine
from hybridkv_ref.conformance.process import ProcessEngine
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Header
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.rules import load_rules

EXEC = "exec:"
OPTION = "--hybridkv-engine"
METHODS = ("reset", "begin", "schedule", "complete", "finish", "abort", "evict", "drain", "snapshot")
OF_CLAIMS = {"preempt", "store", "load", "transfer"}
"""Methods that only an engine with the capability of that operation needs."""


def load_engine(path: str) -> Engine:
    """The engine of ``module:factory``, or of ``exec:command line``; checked as far as it can be before it runs."""
    if path.startswith(EXEC):
        engine: Any = ProcessEngine(path.removeprefix(EXEC))
    else:
        engine = _made(path)
    for name in ("name", "version", "capabilities", "header"):
        if not hasattr(engine, name):
            raise InputError(f"{OPTION}:{path}: its engine has no {name}")
    suite, claims = load_suite(), tuple(engine.capabilities)
    for claim in claims:
        if claim not in suite.asks:
            raise InputError(f"{OPTION}:{path}: no capability '{claim}' (known: {', '.join(sorted(suite.asks))})")
    wanted = [*METHODS, *sorted(m for m in OF_CLAIMS if suite.allowed(m, claims))]
    for method in wanted:
        if not callable(getattr(engine, method, None)):
            raise InputError(f"{OPTION}:{path}: its engine has no method {method}, which its capabilities ask for")
    if not isinstance(engine.header, Header):
        raise InputError(f"{OPTION}:{path}: header is a {type(engine.header).__name__}, not an events.Header")
    Oracle(engine.header)
    checked: Engine = engine
    return checked


def _made(path: str) -> Any:
    module, colon, factory = path.partition(":")
    if not (module and colon and factory):
        raise InputError(f"{OPTION}:{path}: expected module:factory or exec:command")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as error:
        raise InputError(f"{OPTION}:{path}: cannot be imported: {error}") from None
    if not callable(make):
        raise InputError(f"{OPTION}:{path}: {factory} is a {type(make).__name__}, not a function that makes an engine")
    return make()


def load_profile(name: str) -> Profile:
    """The profile of this name."""
    profiles: Mapping[str, Profile] = load_suite().profiles
    if name not in profiles:
        raise InputError(f"--hybridkv-profile:{name}: no such profile (known: {', '.join(profiles)})")
    return profiles[name]


def load_gaps(text: str) -> tuple[str, ...]:
    """Rule IDs from ``ID,ID`` or from ``@FILE`` with one a line, ``#`` before a reason."""
    words, place = [(text, w) for w in text.split(",")], "--hybridkv-known-gaps"
    if text.startswith("@"):
        try:
            lines = Path(text[1:]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{place}:{text[1:]}: cannot be read: {error}") from None
        words = [(f"{text[1:]}:{at}", line.split("#")[0]) for at, line in enumerate(lines, 1)]
    found, rules = [], load_rules()
    for where, word in words:
        if rule := word.strip():
            if rule not in rules:
                raise InputError(f"{place}:{where}: no rule '{rule}'")
            found.append(rule)
    return tuple(dict.fromkeys(found))
