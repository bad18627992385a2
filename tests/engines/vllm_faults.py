"""Faults planted in vLLM at run time, one at a time, and the rules by which the oracle names each.

    python tests/engines/vllm_faults.py [NAME ...]

Runs in the engine's own environment; prints one line of JSON per fault: what was refused first, or that nothing was.
A fault that makes the engine itself stop before the oracle speaks counts as not caught.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core import block_pool as pool_module
from vllm.v1.core import kv_cache_coordinator as coordinator_module
from vllm.v1.core import kv_cache_utils as utils_module
from vllm.v1.core import single_type_kv_cache_manager as managers
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm_planting import changed, rewritten

from hybridkv_ref.adapters.vllm_driver import Driver

Pool, Hybrid = pool_module.BlockPool, coordinator_module.HybridKVCacheCoordinator
Full, Window, State, Base = (
    managers.FullAttentionManager, managers.SlidingWindowManager, managers.MambaManager,
    managers.SingleTypeKVCacheManager,
)  # fmt: skip

FAULTS: dict[str, tuple[str, int, set[str], tuple[Any, str, Callable[[Any], Any]]]] = {}
"""name -> (model, steps in flight, rules of which one must be named, patch: owner, attribute, old -> new)."""


def fault(
    name: str, owner: Any, attribute: str, rules: str, model: str = "gpt-oss-20b", depth: int = 1
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def enter(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        FAULTS[name] = (model, depth, set(rules.split()), (owner, attribute, change))
        return change

    return enter


@fault("hit blocks are not touched", Pool, "touch", "HKV-ACC-001 HKV-REF-004 HKV-S3-004 HKV-S3-003")
def _(old: Any) -> Any:
    return lambda self, blocks: None


@fault("hit blocks are touched twice", Pool, "touch", "HKV-ACC-001")
def _(old: Any) -> Any:
    return lambda self, blocks: (old(self, blocks), old(self, blocks))


@fault("a window block is freed one block early", Window, "get_num_skipped_tokens", "HKV-SWA-003 HKV-L1-004")
def _(old: Any) -> Any:
    return lambda self, n: old(self, n) + self.block_size if n > self.sliding_window else 0


@fault("steps in flight are forgotten when the window slides", Hybrid, "remove_skipped_blocks",
       "HKV-S3-016 HKV-SWA-002 HKV-ERR-003 HKV-SWA-003 HKV-L1-004", depth=3)  # fmt: skip
def _(old: Any) -> Any:
    def remove(self: Any, name: str, processed: int, *args: Any, **kwargs: Any) -> Any:
        return old(self, name, processed + 3 if processed > 64 else processed, *args, **kwargs)

    return remove


@fault("hits are not trimmed to the common unit", Hybrid, "_cache_hit_alignment_tokens",
       "HKV-L1-002", "gpt-oss-20b:32,48")  # fmt: skip
def _(old: Any) -> Any:
    return property(lambda self: 16)


@fault("a window hit needs one block fewer", Window, "_contiguous_blocks_for_hit", "HKV-SWA-001 HKV-L3-001")
def _(old: Any) -> Any:
    return classmethod(lambda cls, *args, **kwargs: max(old.__func__(cls, *args, **kwargs) - 1, 1))


@fault("the first group decides alone", Hybrid, "find_longest_cache_hit", "HKV-SWA-001 HKV-L3-001")
def _(old: Any) -> Any:
    def find(self: Any, hashes: Any, longest: int) -> Any:
        blocks, per = self.find_longest_cache_hit_per_group(hashes, longest)
        return blocks, per[0], 0

    return find


@fault("a state of an earlier position is taken", State, "find_longest_cache_hit",
       "HKV-POS-001 HKV-REC-001 HKV-KEY-001", "qwen3-next-80b-a3b")  # fmt: skip
def _(old: Any) -> Any:
    def find(cls: Any, /, **kwargs: Any) -> Any:
        blocks, length = old.__func__(cls, **kwargs)
        unit = kwargs["kv_cache_spec"].block_size
        return (
            (tuple([*b, b[-1]] for b in blocks), length + unit)
            if 0 < length < kwargs["max_length"] - unit
            else (blocks, length)
        )

    return classmethod(find)


@fault("evictions are not announced", Pool, "_emit_block_removed_events", "HKV-ALIAS-001 HKV-S3-003 HKV-S3-011")
def _(old: Any) -> Any:
    return lambda self, hashes: None


@fault("evictions are announced twice", Pool, "_emit_block_removed_events", "HKV-OBS-001")
def _(old: Any) -> Any:
    return lambda self, hashes: (old(self, hashes), old(self, hashes))


@fault("an evicted block stays in the index", Pool, "_maybe_evict_cached_block", "HKV-ALIAS-001 HKV-S3-003 HKV-S3-011")
def _(old: Any) -> Any:
    def evict(self: Any, block: Any) -> bool:
        block.reset_hash()
        return False

    return evict


@fault("keys leave out the salt", utils_module, "generate_block_hash_extra_keys", "HKV-KEY-002 HKV-KEY-001")
def _(old: Any) -> Any:
    return lambda request, start, end, index: (None, index)


@fault("keys leave out the parent", utils_module, "hash_block_tokens", "HKV-KEY-001")
def _(old: Any) -> Any:
    return lambda function, parent, *args, **kwargs: old(function, None, *args, **kwargs)


@fault(
    "keys leave out the group",
    pool_module,
    "make_block_hash_with_group_id",
    "HKV-KEY-001 HKV-L3-004 HKV-S3-011 HKV-OBS-001",
)
def _(old: Any) -> Any:
    return lambda key, group: old(key, 0)


@fault("a reference is given back twice", Pool, "free_blocks", "HKV-ACC-001 HKV-REF-004 HKV-S3-004 HKV-ALIAS-001")
def _(old: Any) -> Any:
    def free(self: Any, blocks: Any) -> None:
        blocks = list(blocks)
        old(self, blocks)
        shared = [b for b in blocks if b.ref_cnt == 1 and not b.is_null]
        if shared:
            old(self, shared[:1])

    return free


@fault("external blocks are cached before they have arrived", KVCacheManager, "allocate_slots",
       "HKV-S3-011 HKV-ERR-002 HKV-OBS-002")  # fmt: skip
def _(old: Any) -> Any:
    return lambda self, *args, **kwargs: old(self, *args, **{**kwargs, "delay_cache_blocks": False})


@fault("a group's blocks leak when a request ends", Full, "free", "HKV-ACC-001 HKV-REF-005")
def _(old: Any) -> Any:
    return lambda self, name: self.pop_blocks_for_free(name)


@fault("all blocks of a request that ended stay in its table", Hybrid, "free", "HKV-LIVE-011 HKV-S3-002")
def _(old: Any) -> Any:
    return lambda self, name: None


@fault("a lookup announces an entry", KVCacheManager, "get_computed_blocks", "HKV-S4-007")
def _(old: Any) -> Any:
    def look(self: Any, request: Any) -> Any:
        made = BlockStored([12345], None, [1] * 16, 16, None, "GPU", None, group_idx=0)
        self.block_pool.kv_event_queue.append(made)
        return old(self, request)

    return look


@fault("a reset is not announced", Pool, "reset_prefix_cache", "HKV-ALIAS-001 HKV-S3-003 HKV-S3-011", "deepseek-v3.2")
def _(old: Any) -> Any:
    def reset(self: Any) -> bool:
        done = bool(old(self))
        self.kv_event_queue = [e for e in self.kv_event_queue if type(e).__name__ != "AllBlocksCleared"]
        return done

    return reset


@fault("a block in use is handed out again", Pool, "get_new_blocks", "HKV-ALIAS-001 HKV-S3-003 HKV-ACC-001")
def _(old: Any) -> Any:
    def take(self: Any, count: int) -> Any:
        got = old(self, count)
        used = [b for b in self.blocks if b.ref_cnt > 0 and not b.is_null and b not in got and b.block_hash is None]
        self.calls = getattr(self, "calls", 0) + 1
        if count and used and self.calls % 20 == 0:
            got[-1].ref_cnt, used[0].ref_cnt = 0, 2
            self.free_block_queue.append(got[-1])
            got[-1] = used[0]
        return got

    return take


@fault(
    "blocks are cached before they are full", Hybrid, "cache_blocks", "HKV-S3-011 HKV-L1-003 HKV-ERR-002 HKV-OBS-002"
)
def _(old: Any) -> Any:
    return lambda self, request, n: old(self, request, n + self.scheduler_block_size - 1)


@fault("the last token may be hit", KVCacheManager, "get_computed_blocks", "HKV-L1-006 HKV-LIVE-011")
def _(old: Any) -> Any:
    return lambda self, request, longest=None: old(self, request, request.num_tokens)


@fault("blocks are announced that are not cached", Pool, "_build_block_stored_event", "HKV-S4-007")
def _(old: Any) -> Any:
    def make(self: Any, request: Any, block_hashes: Any, **kwargs: Any) -> Any:
        wrong = [*(block_hashes or ()), 12345]
        return old(self, request, block_hashes=wrong, **kwargs)

    return make


@fault("an eviction is announced for another group", Pool, "_emit_block_removed_events",
       "HKV-OBS-001 HKV-ALIAS-001 HKV-S3-003")  # fmt: skip
def _(old: Any) -> Any:
    return lambda self, hashes: old(self, [h[:-4] + (1).to_bytes(4, "big") for h in hashes])


@fault("tails are not asked for", Hybrid, "verify_and_split_kv_cache_groups",
       "HKV-TAIL-002 HKV-TAIL-001 HKV-L3-001", "deepseek-v4-flash")  # fmt: skip
def _(old: Any) -> Any:
    def split(self: Any) -> None:
        old(self)
        self.attention_groups = [g for g in self.attention_groups if g.spec.block_size != 4]

    return split


@fault("a running state is freed with its request still on it", State, "get_num_skipped_tokens",
       "HKV-SWA-003 HKV-L1-004", "qwen3-next-80b-a3b")  # fmt: skip
def _(old: Any) -> Any:
    return lambda self, n: n + 1 if n % self.block_size else n


@fault("only the first full group is trimmed to the hit (0.20.2)", Hybrid, "find_longest_cache_hit",
       "HKV-ALIAS-001 HKV-ALIAS-002", "deepseek-v4-flash")  # fmt: skip
def _(old: Any) -> Any:
    tail = "# to final hit_length.\n    for group in self.attention_groups"
    return rewritten((tail, f"{tail}[:1]"))(old)


def hunt(name: str, steps: int = 600, seeds: int = 3) -> dict[str, Any]:
    """Drives the engine with this fault until the oracle refuses something."""
    model, depth, rules, _ = FAULTS[name]
    stopped, total = "", 0
    with changed(*FAULTS[name][3]):
        for seed in range(1, seeds + 1):
            driver = Driver(model, seed, depth=depth)
            try:
                for _ in range(steps):
                    driver.step()
                    total += 1
                    if driver.refusals:
                        break
            except Exception as error:
                stopped = f"{type(error).__name__}: {error}"
            if driver.refusals:
                first = driver.refusals[0]
                named = sorted(rules & {r for f in driver.refusals if f.index == first.index for r in f.rules})
                return {"fault": name, "caught": True, "named": named, "first": str(first), "rules": first.rules,
                        "steps": total, "events": driver.events}  # fmt: skip
    return {"fault": name, "caught": False, "named": [], "steps": total, "stopped": stopped}


if __name__ == "__main__":
    for chosen in sys.argv[1:] or FAULTS:
        print(json.dumps(hunt(chosen)), flush=True)
