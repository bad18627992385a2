"""vLLM 0.33.0: the "full" report of a hit announces window blocks that are not cached, and cached ones once more.

``emit_cached_block_events`` takes a hit for "a contiguous prefix starting at block 0" in every group. A windowed
group's hit begins with null blocks: their hashes are announced all the same. Nothing removes these entries again, so a
consumer believes for ever that the blocks are there.
Exits 1 while a hash is announced that the index does not hold.
"""

import sys

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, make_block_hash_with_group_id
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

register_all_kvcache_specs(None)
init_none_hash(sha256)
BLOCK, head = 16, {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
specs = [FullAttentionSpec(block_size=BLOCK, **head), SlidingWindowSpec(block_size=BLOCK, sliding_window=32, **head)]
groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
config, sizes = KVCacheConfig(40, [], groups), {"scheduler_block_size": BLOCK, "hash_block_size": BLOCK}
manager = KVCacheManager(config, max_model_len=4096, enable_kv_cache_events=True, **sizes)
hasher = get_request_block_hasher(BLOCK, sha256)


def request(name: str) -> Request:
    full = SamplingParams(max_tokens=1, extra_args={"kv_cache_report_mode": "full"})
    return Request(name, list(range(8 * BLOCK + 1)), full, None, block_hasher=hasher)


first = request("first")
manager.get_computed_blocks(first)
manager.allocate_slots(first, first.num_tokens)
early = set(manager.get_block_ids("first")[1][:4])
manager.free(first)
manager.evict_blocks(early)  # the window's first blocks are gone; the hit does not need them
manager.take_events()
second = request("second")
hit = manager.get_computed_blocks(second)[1]
announced = {e.group_idx: len(e.block_hashes) for e in manager.take_events()}
index = manager.block_pool.cached_block_hash_to_block
keys = [make_block_hash_with_group_id(h, 1) for h in second.block_hashes[: hit // BLOCK]]
held = sum(index.get_one_block(key) is not None for key in keys)
print(f"hit of {hit} tokens; the window group announces {announced.get(1, 0)} blocks, its index holds {held}")
sys.exit(1 if announced.get(1, 0) > held else 0)
