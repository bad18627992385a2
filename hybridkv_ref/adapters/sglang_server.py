"""A real SGLang Scheduler on a CPU, without the processes around it.

Stood in for are its channels, its tokenizer, the other ranks, and its worker, which has no model; the scheduler, its
policy, its batches and its event loops are the engine's own, and so are the cache and its pools.
"""

import inspect
import json
import os
import tempfile
from contextlib import ExitStack
from functools import cache as once
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol
from unittest.mock import patch

from hybridkv_ref.adapters.sglang_build import settings
from hybridkv_ref.adapters.sglang_runner import Worker
from hybridkv_ref.adapters.sglang_workload import Sizes
from hybridkv_ref.adapters.vllm_runner import VOCABULARY

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 2 * VOCABULARY,
    "max_position_embeddings": 1 << 16, "torch_dtype": "bfloat16",
}  # fmt: skip
"""A model whose name the engine knows; the scheduler asks of it no more than lengths. Pools come from the geometry."""

RUNNING = 5
"""Requests at once."""


class Around(Protocol):
    """What surrounds a scheduler; ``chunk``: tokens of a chunk, ``size``: of the pools, ``options``: of the engine."""

    cache: Any
    worker: Worker
    queue: Any
    page: int
    chunk: int
    size: Sizes
    options: dict[str, Any]

    def next_pass(self) -> None:
        """The loop asks for what arrived."""

    def scheduling(self, begins: bool) -> None:
        """A batch begins to be made up, or is."""

    def launched(self, batch: Any) -> None:
        """A batch begins to run."""

    def resulted(self, batch: Any) -> None:
        """The result of a batch is processed."""

    def answered(self, output: Any, req: Any = None) -> None:
        """What the scheduler sends out."""


@once
def driven_class() -> type:
    """The engine's Scheduler without what surrounds it."""
    from sglang.srt import runtime_context as context
    from sglang.srt.managers import scheduler

    class Driven(scheduler.Scheduler):  # type: ignore[misc]
        driver: Around
        result_queue = property(lambda self: self.driver.queue, lambda self, _: None)

        def ingest_requests(self) -> list[Any]:
            self.driver.next_pass()
            return []

        def get_next_batch_to_run(self, *args: Any, **kwargs: Any) -> Any:
            self.driver.scheduling(True)
            plan = super().get_next_batch_to_run(*args, **kwargs)
            self.driver.scheduling(False)
            return plan

        def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.driver.launched(batch)
            return super().run_batch(batch, *args, **kwargs)

        def process_batch_result(self, batch: Any, result: Any) -> None:
            self.driver.resulted(batch)
            super().process_batch_result(batch, result)

        # What is stood in for.
        def init_ipc_channels(self, port_args: Any) -> None:
            out = SimpleNamespace(send_output=self.driver.answered)
            self.ipc_channels = SimpleNamespace(
                send_to_tokenizer=out, send_to_detokenizer=out, recv_from_rpc=None, send_metrics_from_scheduler=None
            )
            self.load_snapshot_writer = self.recv_from_tokenizer = None

        def init_soft_watchdog(self) -> None: ...
        def init_idle_sleeper(self) -> None:
            self.idle_sleeper = None

        def init_tokenizer(self) -> None:
            self.is_generation, self.tokenizer, self.processor, self._mm_processor = True, None, None, None

        def init_moe_gemm_config(self) -> None:
            self.require_mlp_sync = False

        def init_mamba_backend(self) -> None: ...
        def init_watch_dog_memory_saver_input_blocker(self) -> None:
            self.watchdog = self.memory_saver_adapter = self.recv_skipper = self.input_blocker = None

        def init_model_worker(self) -> None:
            import torch

            self.tp_worker = self.model_worker = self.driver.worker
            self.driver.worker.model_config = self.driver.worker.model_runner.model_config = self.model_config
            self.draft_worker = self.external_corpus_manager = self.min_free_slots_delayer = None
            self.kv_cache_allocation_time, self.random_seed, self.device = 0.0, 0, "cpu"
            self.schedule_stream, self.forward_stream = torch.cpu.Stream(), torch.cpu.Stream()
            self.max_total_num_tokens, self.max_prefill_tokens = self.driver.size.room, 4 * self.driver.chunk
            self.max_running_requests, self.max_queued_requests = RUNNING, None
            self.max_req_len = self.max_req_input_len = self.driver.size.longest
            self.pad_input_ids_func, self._war_barrier_enabled = None, False
            for name in GROUPS:
                setattr(self, name, ALONE)
                setattr(self, name.replace("_group", "_cpu_group"), None)
            context.get_context().override("driver", pp_max_micro_batch_size=RUNNING)

    return Driven


ALONE = SimpleNamespace(
    cpu_group=None, device_group=None, device="cpu", rank_in_group=0, first_rank=0, world_size=1, is_first_rank=True,
    is_last_rank=True, ranks=[0],
)  # fmt: skip
"""A group of one process."""

GROUPS = ("world_group", "tp_group", "pp_group", "attn_tp_group", "attn_cp_group", "dp_tp_group")
RANKS = (
    "tp_rank", "pp_rank", "moe_ep_rank", "moe_dp_rank", "moe_tp_rank", "attn_tp_rank", "attn_cp_rank", "dcp_rank",
    "attn_dcp_rank", "attn_dp_rank", "dp_rank",
)  # fmt: skip
"""Ranks of the only process."""


@once
def single_process() -> ExitStack:
    """Tells the engine's topology once that there is no other process; it holds as long as the result is kept."""
    from sglang.srt import runtime_context as context

    stack = ExitStack()
    alone = dict.fromkeys(RANKS, 0) | dict.fromkeys(GROUPS[:-1], ALONE)
    stack.enter_context(context.get_parallel().override(**alone))
    return stack


def worker(cache: Any, window: int) -> Worker:
    """A worker, and what a scheduler asks of one beside its forward pass."""
    made = Worker(cache, window)
    absent = ("canary_manager", "hisparse_coordinator", "attn_backend", "lora_manager", "eplb_manager")
    made.model_runner = SimpleNamespace(
        **dict.fromkeys(absent), device="cpu", prefill_aware_swa=False,
        ngram_embedding_manager=SimpleNamespace(table=None, prepare_for_forward=lambda batch, **_: batch),
    )  # fmt: skip
    return made


def schedule(driver: Around, overlap: bool) -> Any:
    """A real Scheduler for a driver's cache."""
    from sglang.srt import runtime_context as context
    from sglang.srt.managers import scheduler as module
    from sglang.srt.server_args import ServerArgs

    kind: Any = driven_class()
    kind.driver = driver
    os.environ.setdefault("SGLANG_SWA_EVICTION_INTERVAL", "2")  # so that windows slide in requests as short as these
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        args = ServerArgs(
            model_path=folder, device="cpu", skip_tokenizer_init=True, load_format="dummy", page_size=driver.page,
            disable_overlap_schedule=not overlap, attention_backend="torch_native", sampling_backend="pytorch",
            chunked_prefill_size=driver.chunk, max_running_requests=RUNNING, disable_cuda_graph=True, **driver.options,
        )  # fmt: skip
        context.publish(args, role="scheduler")
        settings(get_spec=context.get_spec, get_serving=context.get_serving)
        states = driver.cache.supports_mamba()
        wanted = {
            "is_hybrid_swa": not states, "is_hybrid_ssm": states, "disable_radix_cache": False,
            "sliding_window_size": getattr(driver.cache, "sliding_window_size", None),
            "full_tokens_per_layer": driver.size.pages * driver.page,
            "swa_tokens_per_layer": driver.size.window_pages * driver.page,
            "req_to_token_pool": driver.cache.req_to_token_pool, "tree_cache": driver.cache,
            "token_to_kv_pool_allocator": driver.cache.token_to_kv_pool_allocator,
        }  # fmt: skip
        result = module.kv_cache_builder.KVCacheBuildResult(**wanted)
        with ExitStack() as stack:
            stack.enter_context(patch.object(module.kv_cache_builder, "build_kv_cache", lambda **_: result))
            given = inspect.signature(module.Scheduler.__init__).parameters
            if "tp_rank" in given:  # else the process groups tell
                return kind(args, SimpleNamespace(nccl_port=0), *[0] * (len(given) - 4), None)
            for name in ("init_parallel_runtime", "init_layer_runtime"):
                stack.enter_context(patch.object(module.bootstrap, name, lambda **_: None))
            single_process()
            return kind(args, SimpleNamespace(nccl_port=0))
