"""vLLM 0.33.0: ``BlockStored`` of a group that caches some blocks only names fewer hashes than its tokens make.

``cache_full_blocks`` leaves null and masked blocks out of ``block_hashes`` and ``extra_keys``, and takes ``token_ids``
from the first to the last block all the same. A consumer that pairs the i-th hash with the i-th ``block_size`` tokens
learns wrong contents, and the parent that is named was never announced. Reached by default: recurrent states.
Exits 1 while an announced span is not covered by the announced blocks.
"""

import sys

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

register_all_kvcache_specs(None)
init_none_hash(sha256)
BLOCK = 16
specs = [
    FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=64, dtype=torch.bfloat16),
    MambaSpec(block_size=BLOCK, shapes=((64,),), dtypes=(torch.float32,), mamba_cache_mode="align"),
]
groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
sizes = {"scheduler_block_size": BLOCK, "hash_block_size": BLOCK}
manager = KVCacheManager(KVCacheConfig(100, [], groups), max_model_len=4096, enable_kv_cache_events=True, **sizes)
hasher = get_request_block_hasher(BLOCK, sha256)
request = Request("a", list(range(4 * BLOCK)), SamplingParams(max_tokens=1), None, block_hasher=hasher)
manager.get_computed_blocks(request)
manager.allocate_slots(request, 3 * BLOCK)
announced, wrong = [e for e in manager.take_events() if type(e).__name__ == "BlockStored"], 0
for event in announced:
    covered = len(event.block_hashes) * event.block_size
    wrong += covered != len(event.token_ids)
    print(f"group {event.group_idx}: {len(event.token_ids)} tokens announced, {covered} in the announced blocks")
sys.exit(1 if wrong else 0)
