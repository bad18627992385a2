"""SGLang 0.5.20, 0.5.23: with --strip-thinking-cache a request that was retracted gives back what the tree holds.

A retracted request computes its answer again as a part of its prompt, and the tree takes it. At its end only the
prompt counts as its own, and all behind it goes back to the pool. Exits 1 where slots are free that the tree still
names, or where the cache's own assertion ends the process first.
"""

import os
import sys
from array import array
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from unittest.mock import MagicMock

for part in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
    name = f"torchvision{part}"  # imported by the engine, not used here
    sys.modules[name] = MagicMock(__spec__=ModuleSpec(name, None), __path__=[], __version__="0.26")

import torch
from sglang.srt.managers import schedule_batch
from sglang.srt.mem_cache import common, memory_pool
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

PROMPT, ANSWER = 20, 10
os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
for module in (common, schedule_batch):  # what a server would be told
    module.get_spec = lambda: SimpleNamespace(speculative_algorithm=None)
    module.get_serving = lambda: SimpleNamespace(strip_thinking_cache=True)
rows = memory_pool.ReqToTokenPool(4, 512, "cpu", False)
kind = {"page_size": 1, "dtype": torch.bfloat16, "head_num": 1, "head_dim": 2, "layer_num": 1, "device": "cpu"}
pool = memory_pool.MHATokenToKVPool(200, **kind, enable_memory_saver=False)
slots = TokenToKVPoolAllocator(200, torch.bfloat16, "cpu", pool, False)
base = {"disable": False, "req_to_token_pool": rows, "page_size": 1, "tree_components": (ComponentType.FULL,)}
cache = UnifiedRadixCache(CacheInitParams(**base, token_to_kv_pool_allocator=slots))
req = schedule_batch.Req("r", "", array("q", range(PROMPT)), SamplingParams())
req.output_ids, req.reasoning_tokens = array("q", range(100, 100 + ANSWER)), ANSWER  # it was retracted here
req.init_next_round_input(cache)
old = hasattr(cache, "cache_unfinished_req")
if old:
    req.lock_receipt = cache.inc_lock_ref(req.last_node).to_dec_params()
else:
    req.lock = cache.lock(req.last_node)
rows.alloc([req])
taken, size = slots.alloc(PROMPT + ANSWER), PROMPT + ANSWER
rows.write((req.kv.req_pool_idx, slice(0, size)), taken.int())
req.kv.kv_allocated_len = req.kv.kv_committed_len = req.extend_end = size
if old:
    req.set_extend_range(0, size)
(common.maybe_cache_unfinished_req if old else common.checkpoint_kv_cache)(req, cache)
try:
    common.release_kv_cache(req, cache, **{"is_insert" if old else "checkpoint": True})
except AssertionError as error:
    sys.exit(print(f"{type(cache).__name__}: AssertionError: {error}") or 1)
both = sum(slots.free_pages.tolist().count(s) for s in cache.all_values_flatten().tolist())
print(f"{type(cache).__name__}: {both} slots are free that the tree names")
sys.exit(int(both > 0))
