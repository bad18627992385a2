"""Runs a script with one minimal patch of vLLM applied in memory: ``vllm_patched.py PATCH SCRIPT``.

A patch replaces lines of one function; it is refused where they are not found exactly once.
"""

import inspect
import runpy
import sys
import textwrap
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager, MambaManager

PATCHES: dict[str, tuple[Any, str, tuple[tuple[str, str], ...]]] = {
    "eagle_drop_not_verified_again": (
        HybridKVCacheCoordinator,
        "find_longest_cache_hit",
        (
            (
                "            if drop_eagle_block:\n                eagle_verified.add(idx)\n            elif _new",
                "            if _new",
            ),
            (
                "eagle_verified.clear()\n            curr_hit",
                (
                    "eagle_verified.clear()\n            if drop_eagle_block:\n"
                    "                eagle_verified.add(idx)\n            curr_hit"
                ),
            ),
        ),
    ),
    "gives_way_after_it_is_cached": (
        Scheduler,
        "schedule",
        (
            (
                "preempted_req_id = preempted_req.request_id\n",
                (
                    "preempted_req_id = preempted_req.request_id\n"
                    "                        manager = self.kv_cache_manager\n"
                    "                        for one in manager.coordinator.single_type_managers:\n"
                    "                            blocks = one.req_to_blocks[preempted_req_id]\n"
                    "                            computed = preempted_req.num_computed_tokens // one.block_size\n"
                    "                            manager.evict_blocks({b.block_id for b in blocks[computed:]})\n"
                ),
            ),
        ),
    ),
    "state_and_its_next_block_counted_once": (
        MambaManager,
        "get_num_blocks_to_allocate",
        (
            (
                "physical_block_cap = 1 + int(has_partial_hit) + checkpoint_block\n",
                (
                    "physical_block_cap = 1 + int(has_partial_hit) + checkpoint_block\n"
                    "            physical_block_cap += num_local_computed_tokens < total_computed_tokens < num_tokens\n"
                ),
            ),
        ),
    ),
    "failed_load_stays_cached": (
        Scheduler,
        "_handle_invalid_blocks",
        (("if sync_blocks_to_evict and not self.recompute_kv_load_failures:", "if sync_blocks_to_evict:"),),
    ),
    "partial_tail_never_found": (
        FullAttentionManager,
        "cache_blocks",
        (
            (
                "if self.block_size == hash_block_size:",
                "if hash_block_size in (self.block_size,) or self.cache_hit_alignment_tokens != hash_block_size:",
            ),
        ),
    ),
    "announced_span_is_not_dense": (
        BlockPool,
        "cache_full_blocks",
        (
            ("curr_mm_idx = 0\n", "curr_mm_idx = 0\n        announced = []\n"),
            (
                "extra_keys_list.append(extra_keys)\n",
                (
                    "extra_keys_list.append(extra_keys)\n"
                    "            announced += request.all_token_ids[block_start:block_end]\n"
                ),
            ),
            (
                "lookahead_token_ids=lookahead_token_ids,\n            )\n        )\n",
                (
                    "lookahead_token_ids=lookahead_token_ids,\n            )\n        )\n"
                    "        self.kv_event_queue[-1].token_ids = announced\n"
                ),
            ),
        ),
    ),
    "reuse_report_announces_null_blocks": (
        BlockPool,
        "emit_cached_block_events",
        (
            (
                "    block_start = i * block_size\n",
                (
                    "    if self.get_cached_block(block_hashes[i], [kv_cache_group_id]) is None:\n"
                    "            continue\n        block_start = i * block_size\n"
                ),
            ),
        ),
    ),
}


def patch(name: str) -> None:
    """Applies one patch."""
    owner, function, changes = PATCHES[name]
    old = inspect.getattr_static(owner, function)
    source = textwrap.dedent(inspect.getsource(old)).replace("super().", f"super({owner.__name__}, self).")
    for before, after in changes:
        if source.count(before) != 1:
            raise SystemExit(f"{name}: {source.count(before)} places for the patch: {before!r}")
        source = source.replace(before, after)
    space = vars(sys.modules[owner.__module__])
    made: dict[str, Any] = {}
    exec(source, space, made)
    setattr(owner, function, made[function])


if __name__ == "__main__":
    patch(sys.argv[1])
    runpy.run_path(sys.argv[2], run_name="__main__")
