"""SGLang 0.5.20, 0.5.23: with --enable-mixed-chunk a prompt gets window slots that the running requests need.

``PrefillAdder`` takes the tokens of the running requests, which decode in the same batch, off what is left for full
attention and not off what is left for the window. Exits 1 where the batch it admits cannot get its slots.
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
from sglang.srt.managers import schedule_policy
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.allocation import alloc_token_slots
from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.sampling.sampling_params import SamplingParams

WINDOW, POOL, FREE, PROMPT, DECODING = 8, 400, 64, 50, 20
os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
kind = {"size": POOL, "size_swa": FREE, "page_size": 1, "dtype": torch.bfloat16, "device": "cpu"}
layers = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1]}
pool = SWAKVPool(**kind, **layers, head_num=1, head_dim=2, enable_memory_saver=False)
slots = SWATokenToKVPoolAllocator(**kind, kvcache=pool, need_sort=False)
base = {"disable": False, "req_to_token_pool": ReqToTokenPool(4, 512, "cpu", False), "page_size": 1}
base |= {"token_to_kv_pool_allocator": slots, "sliding_window_size": WINDOW}
cache = UnifiedRadixCache(CacheInitParams(**base, tree_components=(ComponentType.FULL, ComponentType.SWA)))

features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
schedule_policy.get_exec = lambda: SimpleNamespace(features=features)  # a server's settings, in later releases
running = SimpleNamespace(reqs=[])
adder = schedule_policy.PrefillAdder(1, cache, slots, running, 1.0, 4096, PROMPT, num_mixed_decode_tokens=DECODING)
req = Req("r", "", array("q", range(PROMPT)), SamplingParams(max_new_tokens=1))
req.init_next_round_input(cache)
adder.rem_chunk_tokens = PROMPT  # room in the batch is not what is short
adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
print(
    f"{type(cache).__name__}: {FREE} window slots, {DECODING} needed to decode; prompt of {PROMPT} admitted:", end=" "
)
print(bool(adder.can_run_list))
try:
    for count in (PROMPT, DECODING) if adder.can_run_list else (DECODING,):
        alloc_token_slots(cache, count)
except RuntimeError as error:
    sys.exit(print(str(error).splitlines()[0]) or 1)
