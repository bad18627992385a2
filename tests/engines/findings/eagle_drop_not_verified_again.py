"""vLLM 0.33.0: after one EAGLE group shortens a hit, another one is not asked for its successor block again.

``find_longest_cache_hit`` keeps ``eagle_verified``, "attention-group indices whose EAGLE drop is verified at the
current curr_hit_length". When a group that drops shortens the hit, the set is not cleared (the clearing is the
``elif`` of the drop), so a group that was verified at the longer position counts as verified at the shorter one.
Exits 1 while the hit ends in a block whose successor the group ``A`` does not hold.
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
specs = {
    "full": FullAttentionSpec(block_size=BLOCK, **head),
    "A": SlidingWindowSpec(block_size=BLOCK, sliding_window=32, **head),
    "B": SlidingWindowSpec(block_size=BLOCK, sliding_window=64, **head),
}
groups = [KVCacheGroupSpec([name], spec, is_eagle_group=name != "full") for name, spec in specs.items()]
manager = KVCacheManager(
    KVCacheConfig(200, [], groups),
    max_model_len=4096,
    scheduler_block_size=BLOCK,
    hash_block_size=BLOCK,
    use_eagle=True,
)
hasher = get_request_block_hasher(BLOCK, sha256)


def request(name: str) -> Request:
    return Request(name, list(range(16 * BLOCK + 1)), SamplingParams(max_tokens=1), None, block_hasher=hasher)


first = request("first")
manager.get_computed_blocks(first)
manager.allocate_slots(first, first.num_tokens)
tables = manager.get_block_ids("first")
# The blocks that hold token 192 of B and token 176 of A are evicted; A holds everything else.
victims = {tables[2][12], tables[1][11]}
first.num_computed_tokens = first.num_tokens
manager.free(first)
manager.evict_blocks(victims)

second = request("second")
hit = manager.get_computed_blocks(second)[1]
key = make_block_hash_with_group_id(second.block_hashes[hit // BLOCK], 1) if hit else None
held = hit == 0 or manager.block_pool.cached_block_hash_to_block.get_one_block(key) is not None
print(f"hit of {hit} tokens; group A holds the block after it: {held}")
sys.exit(0 if held else 1)
