"""vLLM 0.33.0: full attention announces a part of a block that no lookup can find.

``FullAttentionManager.cache_blocks`` enters the prompt's last hash boundary inside a block whenever its block is
larger than the hash block, also where ``enable_partial_hash_hits`` is false and every hit is a multiple of the
scheduler block.
The entry costs a place in the index; its ``BlockStored`` names a parent that was never announced and a block size that
the group does not have; under EAGLE a block with no other entry is kept as if it were cached.
Exits 1 while such an entry is announced.
"""

import sys

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.request import Request

register_all_kvcache_specs(None)
init_none_hash(sha256)
FULL, HASH, PROMPT, head = 256, 64, 400, {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
specs = [
    FullAttentionSpec(block_size=FULL, **head),
    SlidingWindowSpec(block_size=HASH, sliding_window=128, **head),
]
groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
config = KVCacheConfig(200, [], groups)
sizes = {"scheduler_block_size": FULL, "hash_block_size": HASH}
manager = KVCacheManager(config, max_model_len=4096, enable_kv_cache_events=True, **sizes)
hasher = get_request_block_hasher(HASH, sha256)


def request(name: str, tokens: int) -> Request:
    return Request(name, list(range(tokens)), SamplingParams(max_tokens=500), None, block_hasher=hasher)


first = request("first", PROMPT)
manager.get_computed_blocks(first)
manager.allocate_slots(first, PROMPT)
first.num_computed_tokens = PROMPT
for token in range(PROMPT, 2 * FULL + 1):  # decode past the end of the block
    first.append_output_token_ids(token)
    manager.allocate_slots(first, 1)
    first.num_computed_tokens += 1
stored = [e for e in manager.take_events() if e.group_idx == 0]
announced = {h for e in stored if e.block_size == FULL for h in e.block_hashes}
odd = [e for e in stored if e.block_size != FULL]
hits = {manager.get_computed_blocks(request(f"r{n}", n))[1] for n in range(1, 2 * FULL + 2)}
for event in odd:
    known = event.parent_block_hash in announced
    print(f"announced: {event.block_size} tokens in a group of {FULL}; parent announced: {known}")
print(f"partial hits enabled: {manager.coordinator.enable_partial_hash_hits}; hits that lookups give: {sorted(hits)}")
sys.exit(1 if odd and not manager.coordinator.enable_partial_hash_hits else 0)
