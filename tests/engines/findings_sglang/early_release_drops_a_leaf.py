"""SGLang 0.5.20: releasing the window's part of a lock frees a leaf's window at once, also where nobody needs room.

An inner node's window turns evictable; a leaf's is freed, and with it every hit at the end of the prompt. An option,
off by default, whose docstring says so. Exits 1 while the hit is lost with most of the pool free.
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


def store(tokens: range) -> None:
    cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots.alloc(len(tokens))))


store(range(20))
key = MatchPrefixParams(key=RadixKey(array("q", range(20))))
node = cache.match_prefix(key).last_device_node
if hasattr(cache, "dec_swa_lock_only"):
    cache.dec_swa_lock_only(node, cache.inc_lock_ref(node).to_dec_params())
else:
    cache.release_swa(cache.lock(node))
found = cache.match_prefix(key)
hit = len(found.device_indices) if hasattr(found, "device_indices") else found.device_prefix_len
print(f"{cls.__name__}: hit after the release: {hit} of 20; free window slots: {slots.swa_available_size()} of {POOL}")
sys.exit(int(hit == 0))
