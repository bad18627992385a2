"""vLLM 0.33.0: a recurrent group counts one block where tokens of a connector are loaded at once, and takes two.

`allocate_slots` asks whether the free blocks are enough and returns None where they are not. A request whose connector
loads tokens in the same step needs a block for the loaded state and one for the state of the step, of which
`MambaManager.get_num_blocks_to_allocate` caps both at one: the request is admitted to a pool that is one block short,
and taking the blocks raises. Exits 1 while it does.
"""

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, MambaSpec
from vllm.v1.request import Request

SIZE = 16
register_all_kvcache_specs(None)
init_none_hash(sha256)
hasher = get_request_block_hasher(SIZE, sha256)
groups = [
    KVCacheGroupSpec(["attention"], FullAttentionSpec(SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32)),
    KVCacheGroupSpec(["state"], MambaSpec(SIZE, ((1,),), (torch.float32,), mamba_cache_mode="align")),
]
bad = 0
for free in range(2, 7):  # besides the null block; 16 tokens are loaded and 16 computed: two blocks for each group
    manager = KVCacheManager(KVCacheConfig(1 + free, [], groups), 512, scheduler_block_size=SIZE, hash_block_size=SIZE)
    request = Request("a", list(range(40)), SamplingParams(max_tokens=4), None, block_hasher=hasher)
    blocks, used, _ = manager.get_computed_blocks(request)
    try:
        got = manager.allocate_slots(
            request, SIZE, num_new_computed_tokens=used, new_computed_blocks=blocks, num_external_computed_tokens=SIZE
        )
        taken = free - manager.block_pool.get_num_free_blocks()
        print(f"{free} blocks free: {'refused' if got is None else f'admitted, {taken} taken'}")
    except ValueError as error:
        bad += 1
        print(f"{free} blocks free: {error}")
raise SystemExit(bad > 0)
