"""SGLang 0.5.20, 0.5.23: a request of the base model reads what an adapter wrote, if its extra key is the adapter's id.

``Req`` joins ``lora_id`` to the caller's ``extra_key`` without a boundary, so that one text stands for both.
Exits 1 while the base model's request hits the adapter's prefix.
"""

import os
import sys
from array import array
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

for part in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
    name = f"torchvision{part}"  # imported by the engine, not used here
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[], __version__="0.26")

import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import memory_pool
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import InsertParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
ADAPTER, TOKENS = "0123456789abcdef0123456789abcdef", array("q", range(20))
rows = memory_pool.ReqToTokenPool(4, 512, "cpu", False)
kind = {"page_size": 1, "dtype": torch.bfloat16, "head_num": 1, "head_dim": 2, "layer_num": 1, "device": "cpu"}
pool = memory_pool.MHATokenToKVPool(200, **kind, enable_memory_saver=False)
slots = TokenToKVPoolAllocator(200, torch.bfloat16, "cpu", pool, False)
base = {"disable": False, "req_to_token_pool": rows, "page_size": 1, "tree_components": (ComponentType.FULL,)}
cache = UnifiedRadixCache(CacheInitParams(**base, token_to_kv_pool_allocator=slots))

adapted = schedule_batch.Req("a", "", TOKENS, SamplingParams(), lora_id=ADAPTER)
plain = schedule_batch.Req("b", "", TOKENS, SamplingParams(), extra_key=ADAPTER)
cache.insert(InsertParams(key=RadixKey(TOKENS, adapted.extra_key), value=slots.alloc(len(TOKENS))))
plain.init_next_round_input(cache)
hit = len(plain.prefix_indices) if hasattr(plain, "prefix_indices") else plain.prefix_len
print(f"{type(cache).__name__}: the base model hits {hit} tokens of an adapter")
sys.exit(int(hit > 0))
