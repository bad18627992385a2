"""vLLM 0.33.0: blocks whose load failed stay cached, to be computed again by a request that may never do so.

With `kv_load_failure_policy = "recompute"` the entries of a failed load are kept: "blocks will be recomputed and reused
by other requests". Where the request is aborted first they name what was never written, and are hit. Exits 1 while so.
"""

import json
import tempfile
from pathlib import Path

import torch
from vllm.config import CacheConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

SIZE = 16


class Store(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = lambda *a, **k: None
    update_state_after_alloc, build_connector_meta = start_load_kv, lambda *a, **k: KVConnectorMetadata()
    request_finished_all_groups = lambda *a, **k: (False, None)  # noqa: E731

    def get_num_new_matched_tokens(self, request: Request, known: int) -> tuple[int, bool]:
        return (2 * SIZE if request.request_id == "a" else 0), False


register_all_kvcache_specs(None)
init_none_hash(sha256)
with tempfile.TemporaryDirectory() as folder:
    known = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_attention_heads": 1}
    (Path(folder) / "config.json").write_text(json.dumps(known))
    caches = CacheConfig(block_size=SIZE, enable_prefix_caching=True)
    limits = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=512, is_encoder_decoder=False)
    store = KVTransferConfig(kv_connector="Store", kv_connector_module_path="__main__", kv_role="kv_both",
                             kv_load_failure_policy="recompute")  # fmt: skip
    config = VllmConfig(model_config=ModelConfig(folder, skip_tokenizer_init=True, max_model_len=512),
                        scheduler_config=limits, cache_config=caches, kv_transfer_config=store)  # fmt: skip
caches.num_gpu_blocks = 32
group = KVCacheGroupSpec(["layer"], FullAttentionSpec(SIZE, num_kv_heads=1, head_size=1, dtype=torch.float32))
scheduler = Scheduler(config, KVCacheConfig(32, [], [group]), StructuredOutputManager(config), block_size=SIZE)
hasher = get_request_block_hasher(SIZE, sha256)
a, b = (Request(n, list(range(60)), SamplingParams(max_tokens=4), None, block_hasher=hasher) for n in "ab")
scheduler.add_request(a)
output = scheduler.schedule()
failed = KVConnectorOutput(invalid_block_ids={output.scheduled_new_reqs[0].block_ids[0][1]})
scheduler.update_from_output(output, ModelRunnerOutput(["a"], {"a": 0}, [[7]], kv_connector_output=failed))
print(f"a: {a.num_computed_tokens} tokens computed after its load failed from token {SIZE} on")
scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
hit = scheduler.kv_cache_manager.get_computed_blocks(b)[1]
print(f"b: {hit} tokens hit")
raise SystemExit(hit > SIZE)
