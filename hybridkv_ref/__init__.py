"""Transition tables for the KV cache of hybrid-attention models: proved, run, and used as a reference.

Importing this package is cheap: each public name loads its module when it is first used, and neither torch nor a solver
is imported by any of them.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hybridkv_ref.errors import InputError
    from hybridkv_ref.loader import load_tables
    from hybridkv_ref.machine import Machine, Refused, World
    from hybridkv_ref.models import Model, footprint, load_model, model_names
    from hybridkv_ref.oracle import Illegal, Oracle, Verdict
    from hybridkv_ref.recovery import Contents, Group, Hit, from_model, longest_hit
    from hybridkv_ref.rules import Rule, load_rules
    from hybridkv_ref.simulate import simulate
    from hybridkv_ref.tables import Tables

_HOME = {
    "errors": ("InputError",),
    "loader": ("load_tables",),
    "machine": ("Machine", "Refused", "World"),
    "models": ("Model", "footprint", "load_model", "model_names"),
    "oracle": ("Illegal", "Oracle", "Verdict"),
    "recovery": ("Contents", "Group", "Hit", "from_model", "longest_hit"),
    "rules": ("Rule", "load_rules"),
    "simulate": ("simulate",),
    "tables": ("Tables",),
}
_MODULE = {name: module for module, names in _HOME.items() for name in names}

__all__ = [
    "Contents",
    "Group",
    "Hit",
    "Illegal",
    "InputError",
    "Machine",
    "Model",
    "Oracle",
    "Refused",
    "Rule",
    "Tables",
    "Verdict",
    "World",
    "footprint",
    "from_model",
    "load_model",
    "load_rules",
    "load_tables",
    "longest_hit",
    "model_names",
    "simulate",
]

if os.environ.get("HYBRIDKV_NATIVE") == "1":
    from hybridkv_ref import native

    native.activate()


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULE[name]}"), name)
