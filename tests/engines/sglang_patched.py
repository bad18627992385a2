"""Runs a script with one minimal patch of SGLang applied in memory: ``sglang_patched.py PATCH SCRIPT``.

A patch replaces lines of a function, in the module where this release has it. Exits with 3 where it has none of them.
"""

import importlib
import importlib.util
import inspect
import runpy
import sys
import textwrap
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

SRT = "sglang.srt"
Places = tuple[tuple[str, str, str, tuple[tuple[str, str], ...]], ...]
"""Module, class and function, and what is replaced by what."""

KEPT = (("len(self.origin_input_ids))", "max(len(self.origin_input_ids), self.kv.cache_protected_len))"),)
PATCHES: dict[str, Places] = {
    "a_caller_names_an_adapter": (
        (
            "managers.schedule_batch",
            "Req",
            "__init__",
            (
                (
                    "    self.extra_key = extra_key\n",
                    ("    mark = chr(lora_id is not None)\n    self.extra_key = extra_key and mark + extra_key\n"),
                ),
            ),
        ),
    ),
    "evict_result_undercounts": (
        (
            "mem_cache.swa_radix_cache",
            "SWARadixCache",
            "evict",
            (
                (
                    "                self._iteratively_delete_tombstone_leaf(x)\n",
                    "                full_num_evicted += self._iteratively_delete_tombstone_leaf(x)[1]\n",
                ),
            ),
        ),
    ),
    "frees_what_the_tree_holds": (
        ("managers.schedule_batch", "Req", "effective_kv_committed_len", KEPT),
        ("managers.schedule_batch", "Req", "owned_kv_len", KEPT),
    ),
    "mixed_chunk_overcommits_the_window": (
        (
            "managers.schedule_policy",
            "PrefillAdder",
            "__init__",
            (("self.rem_swa_token_offset = 0", "self.rem_swa_token_offset = num_mixed_decode_tokens"),),
        ),
        (
            "mem_cache.prefill_budget",
            "PrefillBudget",
            "__init__",
            (("self.swa_offset = 0", "self.swa_offset = num_mixed_decode_tokens"),),
        ),
    ),
}


def patch(name: str) -> bool:
    """Applies one patch; whether there was a place for it."""
    done = False
    for module, owner, function, changes in PATCHES[name]:
        if importlib.util.find_spec(f"{SRT}.{module}") is None:
            continue
        found = getattr(importlib.import_module(f"{SRT}.{module}"), owner)
        old = inspect.getattr_static(found, function, None)
        if old is None:
            continue
        source = textwrap.dedent(inspect.getsource(old))
        if any(source.count(before) != 1 for before, _ in changes):
            continue
        for before, after in changes:
            source = source.replace(before, after)
        made: dict[str, object] = {}
        exec("from __future__ import annotations\n" + source, vars(sys.modules[found.__module__]), made)
        setattr(found, function, made[function])
        done = True
    return done


if __name__ == "__main__":
    for part in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
        name = f"torchvision{part}"  # imported by the engine, not used here
        sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[], __version__="0.26")
    if not patch(sys.argv[1]):
        sys.exit(3)
    runpy.run_path(sys.argv[2], run_name="__main__")
