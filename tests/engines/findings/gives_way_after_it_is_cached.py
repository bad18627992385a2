"""vLLM 0.33.0: a request that gives way in the step it was scheduled in leaves blocks cached that nobody computes.

Under the priority policy: `allocate_slots` enters the blocks of a step into the index when it is scheduled. A
request of higher priority, later in the same `schedule`, may preempt it again: its tokens leave the output, its entries
stay and are hit. Exits 1 while they are.
"""

import json
import tempfile
from pathlib import Path

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCKS, SIZE = 12, 16
register_all_kvcache_specs(None)
init_none_hash(sha256)
with tempfile.TemporaryDirectory() as folder:
    known = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 1}
    (Path(folder) / "config.json").write_text(json.dumps(known))
    caches = CacheConfig(block_size=SIZE, enable_prefix_caching=True)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, is_encoder_decoder=False,
                             policy="priority", long_prefill_token_threshold=32, watermark=0.0,
                             scheduler_reserve_full_isl=False)  # fmt: skip
    config = VllmConfig(model_config=ModelConfig(folder, skip_tokenizer_init=True, max_model_len=512),
                        scheduler_config=limits, cache_config=caches)  # fmt: skip
caches.num_gpu_blocks = BLOCKS
group = KVCacheGroupSpec(["layer"], FullAttentionSpec(SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32))
scheduler = Scheduler(config, KVCacheConfig(BLOCKS, [], [group]), StructuredOutputManager(config), block_size=SIZE)
hasher = get_request_block_hasher(SIZE, sha256)
computed: dict[str, int] = {}
for name, priority, length in (("low", 1, 160), ("high", 0, 144)):
    tokens = range(priority << 10, (priority << 10) + length)
    scheduler.add_request(Request(name, list(tokens), SamplingParams(max_tokens=8), None, block_hasher=hasher,
                                  priority=priority, arrival_time=-priority))  # fmt: skip
    for _ in range(1 if name == "low" else 2):
        output = scheduler.schedule()
        starts = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
        old = output.scheduled_cached_reqs
        starts |= dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        for key, count in output.num_scheduled_tokens.items():
            computed[key] = max(computed.get(key, 0), starts[key] + count)
        names = {key: at for at, key in enumerate(output.num_scheduled_tokens)}
        scheduler.update_from_output(output, ModelRunnerOutput(list(names), names, [[] for _ in names]))
low = scheduler.requests["low"]
_, hit, _ = scheduler.kv_cache_manager.get_computed_blocks(low)
print(f"low: status {low.status.name}, {computed['low']} tokens computed, {hit} tokens hit")
raise SystemExit(hit > computed["low"])
