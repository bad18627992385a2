"""SGLang 0.5.20: evicting for the window frees full pages that the result leaves out.

The branch for full attention adds what ``_iteratively_delete_tombstone_leaf`` frees, the window's does not.
Exits 1 while the result tells less than what was freed.
"""

import sys
from array import array
from importlib import import_module
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

for part in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
    name = f"torchvision{part}"  # imported by the engine, not used here
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[], __version__="0.26")

import torch
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

WINDOW, POOL = 8, 200
kind = {"size": POOL, "size_swa": POOL, "page_size": 1, "dtype": torch.bfloat16, "device": "cpu"}
layers = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1]}
pool = SWAKVPool(**kind, **layers, head_num=1, head_dim=2, enable_memory_saver=False)
slots = SWATokenToKVPoolAllocator(**kind, kvcache=pool, need_sort=False)
base = {"disable": False, "req_to_token_pool": ReqToTokenPool(4, 512, "cpu", False), "page_size": 1}
base |= {"token_to_kv_pool_allocator": slots, "sliding_window_size": WINDOW, "enable_kv_cache_events": True}
try:
    cls = import_module("sglang.srt.mem_cache.swa_radix_cache").SWARadixCache
except ImportError:
    cls = import_module("sglang.srt.mem_cache.unified_radix_cache").UnifiedRadixCache
    kinds = import_module("sglang.srt.mem_cache.unified_cache.component_type").ComponentType
    base |= {"tree_components": (kinds.FULL, kinds.SWA), "tree_core_backend": "python"}
cache = cls(CacheInitParams(**base))


def store(tokens: range, gone: int = 0) -> None:
    """Stores computed tokens, the window's slots of the first ``gone`` given back before."""
    values = slots.alloc(len(tokens))
    slots.free_swa_segment(values[:gone], start_pos=0)
    params = InsertParams(key=RadixKey(array("q", tokens)), value=values)
    params.swa_evicted_seqlen = gone
    params.component_evicted_seqlens = {1: gone}  # the same, in later releases
    cache.insert(params)


store(range(40), gone=30)
before = slots.full_available_size()
result = cache.evict(EvictParams(swa_num_tokens=1))
freed = slots.full_available_size() - before
print(f"{cls.__name__}: {freed} slots of full attention freed, {result.num_tokens_evicted} told")
sys.exit(int(freed != result.num_tokens_evicted))
