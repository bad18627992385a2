"""Fixes of public faults, undone one at a time in SGLang as installed: the suite finds each, and is clean without.

    python tests/engines/sglang_reverted.py [--markdown FILE] [NUMBER ...]

Runs in the engine's own environment; prints one line of JSON per fix: how the suite named the fault, or that it did
not. Numbers are of github.com/sgl-project/sglang. Where the code has changed since, what is undone is what the fix
stands for. A fix whose place this release does not have is left out.
"""

import argparse
import importlib
import importlib.util
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from vllm_planting import Change, changed

from hybridkv_ref.adapters.engine_suite import play
from hybridkv_ref.adapters.sglang_build import MEMORY, prepare
from hybridkv_ref.adapters.sglang_driver import Driver
from hybridkv_ref.adapters.sglang_scheduler import SchedulerDriver

Make = Callable[[str, int], Any]
SMALL = "gpt-oss-20b:9@1"
OLDER = partial(Driver, kind="SWARadixCache")

FIXES: dict[str, tuple[str, str, Make, str, str, Change]] = {}
"""number -> (what the fix does, model, driver, module:class or module:, attribute, old -> undone)."""


def undo(
    number: str, what: str, place: str, attribute: str, model: str = SMALL, make: Make = Driver
) -> Callable[[Change], Change]:
    def enter(change: Change) -> Change:
        FIXES[number] = (what, model, make, place, attribute, change)
        return change

    return enter


@undo("29352", "a node whose full attention is locked keeps its slots when its window comes back",
      f"{MEMORY}.swa_radix_cache:SWARadixCache", "_recover_tombstone_keeping_locked_full", make=OLDER)  # fmt: skip
def _(old: Any) -> Any:
    def recover(self: Any, node: Any, incoming: Any) -> None:
        self.token_to_kv_pool_allocator.free_full_segment(node.value, start_pos=0)
        node.value, node.swa_tombstone = incoming.clone(), False
        self.swa_lru_list.insert_mru(node)
        self.swa_evictable_size_ += len(node.value)

    return recover


@undo("31486", "what a request gave back while it decoded is not stored as there",
      f"{MEMORY}.swa_radix_cache:SWARadixCache", "insert", make=OLDER)  # fmt: skip
def _(old: Any) -> Any:
    def insert(self: Any, params: Any) -> Any:
        params.swa_evicted_seqlen = 0
        return old(self, params)

    return insert


undo("27586", "a slot whose window is gone has no entry beside it", f"{MEMORY}.allocator.swa:SWATokenToKVPoolAllocator",
     "clear_full_to_swa_mapping")(lambda old: lambda self, full_indices: None)  # fmt: skip


@undo("10317", "keys hold what sets a request apart", f"{MEMORY}.radix_cache:RadixKey", "__init__")
def _(old: Any) -> Any:
    def make(self: Any, token_ids: Any, extra_key: Any = None, *args: Any, **kwargs: Any) -> None:
        old(self, token_ids, None, *args, **kwargs)

    return make


@undo("36135", "what is freed in a group is what was the window's then, not at the group's end",
      f"{MEMORY}.allocator.swa:SWATokenToKVPoolAllocator", "_free_swa_pages", "gpt-oss-20b:9@1",
      partial(SchedulerDriver, overlap=True))  # fmt: skip
def _(old: Any) -> Any:
    def free(self: Any, free_index: Any, *, start_pos: int) -> None:
        if self.free_group is None:
            old(self, free_index, start_pos=start_pos)
        else:
            end = type(self).free_group_end
            late = vars(self).setdefault("late", [])
            late.append((free_index.clone(), start_pos))

            def ended() -> None:
                del self.free_group_end
                end(self)
                while late:
                    index, start = late.pop(0)
                    old(self, index, start_pos=start)

            self.free_group_end = ended

    return free


def place(at: str, attribute: str) -> Any:
    """The owner of what is changed, or nothing where this release has none."""
    module, _, owner = at.partition(":")
    try:
        if importlib.util.find_spec(module) is None:
            return None
    except ModuleNotFoundError:
        return None
    found: Any = importlib.import_module(module)
    found = getattr(found, owner, None) if owner else found
    return found if hasattr(found, attribute) else None


def hunt(number: str, steps: int = 600, seeds: int = 3) -> dict[str, Any] | None:
    """Drives the engine as it is and without this fix, until something is found; nothing where there is no such fix."""
    what, model, make, at, attribute, change = FIXES[number]
    owner = place(at, attribute)
    if owner is None:
        return None
    found: dict[str, Any] = {"fix": number, "what": what, "model": model, "driver": name(make), "steps": 0}
    with changed(owner, attribute, change):
        for seed in range(1, seeds + 1):
            played = play(make, model, "without the fix", seed, steps).played
            found["steps"] += played.steps
            if played.failed:
                break
    refused = played.refused
    told = f"{refused.message} ({', '.join(refused.rules)})" if refused else ""
    found |= {"found": played.failed, "refused": told, "raised": played.error}
    return found | {"clean": not play(make, model, "with the fix", played.seed, played.steps).played.failed}


def name(make: Make) -> str:
    """The driver in words."""
    options = make.keywords if isinstance(make, partial) else {}
    base = make.func if isinstance(make, partial) else make
    return " ".join([base.__name__, *(f"{key}={value}" for key, value in options.items())])


def row(one: dict[str, Any]) -> str:
    seen = one["refused"] or one["raised"] or "not found"
    number = f"[#{one['fix']}](https://github.com/sgl-project/sglang/pull/{one['fix']})"
    return (
        f"| {number} | {one['what']} | {one['model']}, {one['driver']} | {one['steps']:,} | {seen.replace('|', ' ')} |"
    )


def main() -> None:
    prepare()
    import sglang

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    found = []
    for number in args.numbers or FIXES:
        if (one := hunt(number)) is not None:
            found.append(one)
            print(json.dumps(one), flush=True)
    if args.markdown:
        caught = sum(one["found"] for one in found)
        lines = [
            f"# SGLang {sglang.__version__}: fixes of public faults undone, one at a time", "",
            "Written by `tests/engines/sglang_reverted.py`. Each driver is clean with the fix, and knows of no fault.",
            f"Found: {caught} of {len(found)}. Where the engine itself stopped, its error stands there.", "",
            "| fix | what it does | driven | steps | what the suite said first |", "|---|---|---|---|---|",
            *map(row, found),
        ]  # fmt: skip
        args.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
