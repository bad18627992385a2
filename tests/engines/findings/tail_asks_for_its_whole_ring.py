"""vLLM 0.33.0: a compressor's partial state limits hits, and is cached, by its whole ring.

The state of a ratio-128 compressor is a sliding window of 128 tokens to the cache manager. At a hit, always a multiple
of 256, no token waits for its entry: nothing of the ring is read. The lookup asks for all 16 blocks all the same,
so that losing any of them loses the hit, and the mask caches them ("blocks that can never serve a hit stay out of the
prefix-cache hash map", says ``cache_full_blocks``). A ratio-4 compressor reads 4 tokens and is asked for 8.
Exits 1 while evicting one block of the ring loses the hit.
"""

import sys

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec, MLAAttentionSpec, SlidingWindowMLASpec
from vllm.v1.request import Request

register_all_kvcache_specs(None)
init_none_hash(sha256)
ENTRIES, RING, head = 256, 8, {"num_kv_heads": 1, "head_size": 64, "dtype": torch.float32}
groups = [
    KVCacheGroupSpec(["hca"], MLAAttentionSpec(block_size=ENTRIES, tokens_per_state=128, **head)),
    KVCacheGroupSpec(["hca_state"], SlidingWindowMLASpec(block_size=RING, sliding_window=128, **head)),
]
sizes = {"scheduler_block_size": ENTRIES, "hash_block_size": RING}
manager = KVCacheManager(KVCacheConfig(500, [], groups), max_model_len=4096, **sizes)
hasher = get_request_block_hasher(RING, sha256)


def request(name: str) -> Request:
    return Request(name, list(range(ENTRIES + 1)), SamplingParams(max_tokens=1), None, block_hasher=hasher)


first = request("first")
manager.get_computed_blocks(first)
manager.allocate_slots(first, first.num_tokens)
ring = manager.get_block_ids("first")[1]
cached = [i for i, number in enumerate(ring) if manager.block_pool.blocks[number].block_hash is not None]
manager.free(first)
before = manager.get_computed_blocks(request("second"))[1]
manager.evict_blocks({ring[cached[0]]})
after = manager.get_computed_blocks(request("third"))[1]
print(f"ring blocks cached for the boundary at {ENTRIES}: {len(cached)}; hit {before}, without one of them {after}")
sys.exit(1 if after < before else 0)
