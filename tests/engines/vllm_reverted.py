"""Fixes of public faults, undone one at a time in the engine of today: the suite finds each, and is clean without.

    python tests/engines/vllm_reverted.py [--markdown FILE] [NUMBER ...]

Runs in the engine's own environment; prints one line of JSON per fix: how the suite named the fault, or that it did
not. Numbers are of github.com/vllm-project/vllm. Where the code has changed since, what is undone is what the fix
stands for.
"""

import argparse
import json
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator, KVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm_planting import Change, changed, rewritten

from hybridkv_ref.adapters.engine_suite import play
from hybridkv_ref.adapters.vllm_driver import Driver
from hybridkv_ref.adapters.vllm_scheduler import WAYS, SchedulerDriver

Make = Callable[[str, int], Any]

FIXES: dict[str, tuple[str, str, Make, Any, str, Change]] = {}
"""number -> (what the fix does, model, driver, owner, attribute, old -> undone)."""


def undo(
    number: str, what: str, owner: Any, attribute: str, model: str = "gpt-oss-20b", make: Make = Driver
) -> Callable[[Change], Change]:
    def enter(change: Change) -> Change:
        FIXES[number] = (what, model, make, owner, attribute, change)
        return change

    return enter


@undo("44409", "hits of all groups are touched before any group takes blocks for a connector's tokens",
      KVCacheCoordinator, "allocate_new_computed_blocks", make=partial(Driver, blocks=40))  # fmt: skip
def _(old: Any) -> Any:
    def allocate(self: Any, request_id: str, new_computed_blocks: Any, **counts: int) -> None:
        if any(request_id in manager.num_cached_block for manager in self.single_type_managers):
            return
        local, outside = counts["num_local_computed_tokens"], counts["num_external_computed_tokens"]
        for manager, blocks in zip(self.single_type_managers, new_computed_blocks, strict=True):
            manager.add_local_computed_blocks(request_id, blocks, local, outside)
            if outside:
                manager.allocate_external_computed_blocks(request_id, local, outside)

    return allocate


undo("47728", "a window slides by what was processed, not by what was scheduled", KVCacheManager, "allocate_slots",
     make=partial(SchedulerDriver, asynchronous=True))(
    rewritten(("max(0, total_computed_tokens - request.num_in_flight_tokens)", "total_computed_tokens"))
)  # fmt: skip

undo("23713", "a request that is preempted in its own step leaves the step's output", Scheduler, "schedule",
     make=partial(SchedulerDriver, **WAYS["scheduler, by priority"]))(
    rewritten(("if preempted_req in scheduled_running_reqs:", "if False:"))
)  # fmt: skip


@undo("3263", "keys hold the adapter", kv_cache_utils, "_gen_lora_extra_hash_keys")
def _(old: Any) -> Any:
    return lambda request: []


@undo("42125", "keys hold what the adapter was loaded from, not its name alone", kv_cache_utils,
      "_gen_lora_extra_hash_keys")  # fmt: skip
def _(old: Any) -> Any:
    return lambda request: [key[:2] for key in old(request)]


@undo("44701", "an adapter's name and a salt are told apart in keys", kv_cache_utils,
      "generate_block_hash_extra_keys")  # fmt: skip
def _(old: Any) -> Any:
    def generate(*args: Any) -> Any:
        keys, index = old(*args)
        return keys and tuple(key[1] for key in keys), index

    return generate


@undo("11565", "hits are touched only once the request is sure to get its blocks", KVCacheManager, "allocate_slots")
def _(old: Any) -> Any:
    def allocate(self: Any, request: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        got = old(self, request, count, *args, **kwargs)
        hits = kwargs.get("new_computed_blocks")
        if got is None and hits is not None:
            for blocks in hits.blocks:
                self.block_pool.touch(blocks)
        return got

    return allocate


@undo("4761", "a block that is handed out anew leaves the index", BlockPool, "_maybe_evict_cached_block")
def _(old: Any) -> Any:
    def evict(self: Any, block: Any) -> bool:
        block.reset_hash()
        return False

    return evict


undo("31707", "groups are asked again until all agree on one hit", HybridKVCacheCoordinator, "find_longest_cache_hit",
     model="deepseek-v4-flash")(
    rewritten(("        if is_simple_hybrid:\n            break", "        if True:\n            break"))
)  # fmt: skip

undo("52828", "every full-attention group is trimmed to the hit", HybridKVCacheCoordinator, "find_longest_cache_hit",
     model="deepseek-v4-flash")(
    rewritten(("# to final hit_length.\n    for group in self.attention_groups",
               "# to final hit_length.\n    for group in self.attention_groups[:1]"))
)  # fmt: skip

undo("50630", "a recurrent state is not asked for one block more under EAGLE", HybridKVCacheCoordinator,
     "find_longest_cache_hit", model="qwen3-next-80b-a3b", make=partial(Driver, use_eagle=True))(
    rewritten(("if drop_eagle_block and not isinstance(spec, MambaSpec):", "if drop_eagle_block:"))
)  # fmt: skip


def hunt(number: str, steps: int = 2000, seeds: int = 3) -> dict[str, Any]:
    """Drives the engine as it is and without this fix, until something is found."""
    what, model, make, *change = FIXES[number]
    clean = play(make, model, "with the fix", 1, steps).played
    found: dict[str, Any] = {"fix": number, "what": what, "model": model, "driver": name(make), "steps": 0}
    found["clean"] = not clean.failed
    with ExitStack() as stack:
        stack.enter_context(changed(*change))
        for seed in range(1, seeds + 1):
            played = play(make, model, "without the fix", seed, steps).played
            found["steps"] += played.steps
            if played.failed:
                refused = played.refused
                told = f"{refused.message} ({', '.join(refused.rules)})" if refused else ""
                length = len(refused.events) if refused else 0
                return found | {"found": True, "refused": told, "raised": played.error, "shortest": length}
    return found | {"found": False}


def name(make: Make) -> str:
    """The driver in words."""
    options = make.keywords if isinstance(make, partial) else {}
    base = "Driver" if make is Driver or (isinstance(make, partial) and make.func is Driver) else "SchedulerDriver"
    return " ".join([base, *(f"{key}={value}" for key, value in options.items())])


def row(one: dict[str, Any]) -> str:
    seen = one.get("refused") or one.get("raised") or "not found"
    number = f"[#{one['fix']}](https://github.com/vllm-project/vllm/issues/{one['fix']})"
    return (
        f"| {number} | {one['what']} | {one['model']}, {one['driver']} | {one['steps']:,} | {seen.replace('|', ' ')} |"
    )


def main() -> None:
    import vllm

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*")
    parser.add_argument("--markdown", type=Path)
    args = parser.parse_args()
    found = []
    for number in args.numbers or FIXES:
        found.append(hunt(number))
        print(json.dumps(found[-1]), flush=True)
    if args.markdown:
        caught = sum(one["found"] for one in found)
        lines = [
            f"# vLLM {vllm.__version__}: fixes of public faults undone, one at a time", "",
            "Written by `tests/engines/vllm_reverted.py`. Each driver is clean with the fix, and knows of no fault.",
            f"Found: {caught} of {len(found)}. Where the engine itself stopped, its error stands there.", "",
            "| fix | what it does | driven | steps | what the suite said first |", "|---|---|---|---|---|",
            *map(row, found),
        ]  # fmt: skip
        args.markdown.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
