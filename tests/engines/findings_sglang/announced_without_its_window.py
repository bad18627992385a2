"""SGLang 0.5.20, 0.5.23: pages stay announced whose window is gone, so that no lookup can end there.

The events have no group: a page of full attention is announced as the block, and an evicted window is not told.
Exits 1 while a prefix is announced in full and no lookup of it, however continued, finds a token.
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
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
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
announced = [t for e in cache.take_events() if type(e).__name__ == "BlockStored" for t in e.token_ids]
found = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", [*range(30), 99, 98]))))
hit = len(found.device_indices) if hasattr(found, "device_indices") else found.device_prefix_len
print(f"{cls.__name__}: tokens announced: {len(announced)}; of the first 30 a lookup finds {hit}")
sys.exit(int(announced[:30] == list(range(30)) and hit == 0))
