"""Drives SGLang's real Scheduler by chance, with a worker that has no model, the oracle in lock step.

The engine's own event loops run, a pass at a time: what they receive is made up here. Stood in for are the processes
around a scheduler (its channels, its tokenizer, the other ranks), and its worker; the cache and its pools are the
engine's own, made for the geometry. A waiting request is also matched to put it in order; only the match that a request
begins with is told as a lookup.
"""

import inspect
import json
import random
import tempfile
from array import array
from collections import Counter, deque
from contextlib import ExitStack
from functools import cache as once
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from hybridkv_ref import events as ev
from hybridkv_ref.adapters.sglang import Attached
from hybridkv_ref.adapters.sglang_build import build, settings
from hybridkv_ref.adapters.sglang_records import Life
from hybridkv_ref.adapters.sglang_runner import Worker
from hybridkv_ref.adapters.sglang_tree import FULL, WINDOW
from hybridkv_ref.adapters.sglang_workload import Prompts, geometry, judge, sizes
from hybridkv_ref.adapters.vllm_runner import VOCABULARY
from hybridkv_ref.events import Drain, Event
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_records import Refusal

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 2 * VOCABULARY,
    "max_position_embeddings": 1 << 16, "torch_dtype": "bfloat16",
}  # fmt: skip
"""A model whose name the engine knows; the scheduler asks of it no more than lengths. Pools come from the geometry."""

RUNNING = 5
"""Requests at once."""

WAYS: dict[str, dict[str, Any]] = {
    "scheduler": {},
    "overlapped scheduler": {"overlap": True},
    "scheduler, longest prefix first": {"schedule_policy": "lpm"},
    "scheduler, by priority": {"enable_priority_scheduling": True},
    "scheduler, mixed chunks": {"enable_mixed_chunk": True},
}
"""What a driver may be told."""


class Passed(Exception):
    """A pass of the engine's event loop is over."""


@once
def driven_class() -> type:
    """The engine's Scheduler without what surrounds it."""
    from sglang.srt import runtime_context as context
    from sglang.srt.managers import scheduler

    class Driven(scheduler.Scheduler):  # type: ignore[misc]
        driver: "SchedulerDriver"
        result_queue = property(lambda self: self.driver.queue, lambda self, _: None)

        def ingest_requests(self) -> list[Any]:
            self.driver.next_pass()
            return []

        def get_next_batch_to_run(self, *args: Any, **kwargs: Any) -> Any:
            self.driver.attached.scheduling = True
            plan = super().get_next_batch_to_run(*args, **kwargs)
            self.driver.attached.scheduling = False
            return plan

        def run_batch(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
            self.driver.launched(batch)
            return super().run_batch(batch, *args, **kwargs)

        def process_batch_result(self, batch: Any, result: Any) -> None:
            for req in batch.reqs:
                self.driver.attached.ended(req)
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
            self.max_total_num_tokens, self.max_prefill_tokens = self.driver.room, 4 * self.driver.chunk
            self.max_running_requests, self.max_queued_requests = RUNNING, None
            self.max_req_len = self.max_req_input_len = self.driver.longest
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


class Watched(Attached):
    """A scheduler's cache: steps may overlap, and each ends when its result is processed.

    The device runs them in order, so what a request gives back under a step of its own is overwritten after that step:
    its steps are told as done first.
    """

    def __init__(self, cache: Any, header: ev.Header, driver: "SchedulerDriver") -> None:
        super().__init__(cache, header, driver.hear)
        self.driver = driver
        self.flying: dict[str, deque[str]] = {}
        self.scheduling = False

    def _balance(self) -> None:
        """Not while a batch is made up: it has slots of which nothing was told yet."""
        if not self.scheduling:
            super()._balance()

    def _match(self, call: Any, params: Any) -> Any:
        return call(params) if params.key.limit is None else super()._match(call, params)

    def _look(self, life: Life, slots: Any, node: Any) -> None:
        super()._look(life, slots, node)
        if not life.running:
            self.driver.judged(life.req, life.used)

    def _dispatch(self, life: Life, lo: int, hi: int, reads: list[ev.Span]) -> None:
        super()._dispatch(life, lo, hi, reads)
        self.flying.setdefault(life.req.rid, deque()).append(life.step)

    def _let_go(self, life: Life, kept: list[set[int]]) -> None:
        if any(life.held[group].keys() - kept[group] for group in (FULL, WINDOW)):
            self._complete(life)
        super()._let_go(life, kept)

    def _complete(self, life: Life) -> None:
        while steps := self.flying.get(life.req.rid):
            self.sink(ev.Complete(steps.popleft()))
        life.step = ""

    def launched(self) -> None:
        """All of a batch was told."""
        self._settle()

    def ended(self, req: Any) -> None:
        """The oldest step of a request is done."""
        if steps := self.flying.get(req.rid):
            self.sink(ev.Complete(steps.popleft()))


class SchedulerDriver:
    """Arrivals, aborts, pauses and resets around a real Scheduler.

    ``overlap``: a step is launched before the result of the one before is processed. ``kind``: the cache's class, the one
    that the engine's registry takes where nothing is said. Other options are the engine's own.
    """

    def __init__(
        self, name: str, seed: int, overlap: bool = False, kind: str = "UnifiedRadixCache", **options: Any
    ) -> None:
        self.chance, self.options = random.Random(seed), options
        model, window, self.page = geometry(name)
        size = sizes(window, self.page)
        self.scale = max(self.page // 2, 1)
        self.room, self.longest = size.room, size.longest
        self.chunk = 16 * max(self.scale, self.page)
        self.cache, self.header = build(model, self.page, size.pages, size.window_pages, size.longest, kind)
        self.oracle = Oracle(self.header)
        self.trail: list[Event] = []
        self.refusals: list[Refusal] = []
        self.stats: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.queue: deque[Any] = deque()
        self.attached = Watched(self.cache, self.header, self)
        self.missing = self.attached.missing
        self.worker = worker(self.cache, 0 if self.cache.supports_mamba() else window - 1)
        self.prompts = Prompts(self.chance, size.room, self.scale)
        self.kept = ExitStack()
        self.scheduler = schedule(self, size, overlap)
        self.loop = self.scheduler.event_loop_overlap if overlap else self.scheduler.event_loop_normal
        self.fed = self.ending = False

    # -- what the engine asks and tells ----------------------------------------------------------------------------

    def hear(self, event: Event) -> None:
        """Takes one event in, and what the oracle says of it."""
        self.trail.append(event)
        self.refusals += self.oracle.feed(event).refusals

    def judged(self, req: Any, used: int) -> None:
        """A request that waits was matched: the engine's hit against the longest one."""
        judge(self.oracle, self.attached, req, used, self.stats, self.lost)

    def launched(self, batch: Any) -> None:
        """A batch begins to run; the rows of its requests have the slots."""
        ends = batch.seq_lens_cpu.tolist()
        begins = [end - 1 for end in ends] if batch.forward_mode.is_decode() else batch.prefix_lens
        self.stats["launched"] += 1
        self.attached.scheduling = True
        for req, lo, hi in zip(batch.reqs, begins, ends, strict=True):
            self.stats["begun"] += req.rid not in self.attached.lives or not self.attached.lives[req.rid].running
            self.attached.began(req, lo, hi)
        self.attached.scheduling = False
        self.attached.launched()

    def answered(self, output: Any, req: Any = None) -> None:
        """What the scheduler sends out: a request that never ran may be given up."""
        if req is not None and req.rid in self.attached.lives and not self.attached.lives[req.rid].running:
            self.attached.dropped(req)

    def next_pass(self) -> None:
        """The loop asks for what arrived: once a pass."""
        if self.fed:
            raise Passed
        self.fed = True
        if not self.ending:
            self.feed()

    # -- the clients -----------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One pass of the engine's event loop."""
        self.fed = False
        self.cache.take_events()
        try:
            self.loop()
        except Passed:
            return

    def feed(self) -> None:
        """Arrivals, aborts, pauses, resets."""
        from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput, PauseGenerationReqInput

        c, scheduler = self.chance, self.scheduler
        if scheduler._engine_paused:
            scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        if len(scheduler.waiting_queue) < 4 and c.random() < 0.5:
            self.arrive()
        live = list(self.attached.lives)
        if live and c.random() < 0.03:
            self.stats["aborted"] += 1
            scheduler.abort_request(AbortReq(rid=c.choice(live)))
        if c.random() < 0.005:
            self.stats["pauses"] += 1
            scheduler.pause_generation(PauseGenerationReqInput(mode=c.choice(("retract", "in_place"))))
        if c.random() < 0.005:
            self.reset()

    def reset(self) -> None:
        """Lets all end, then empties the cache."""
        self.drain()
        if self.scheduler.flush_cache(empty_cache=False):
            self.attached.cleared()
            self.stats["resets"] += 1

    def arrive(self) -> None:
        """A request, some under a salt or an adapter."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        c = self.chance
        self.stats["arrived"] += 1
        limits = SamplingParams(max_new_tokens=c.randint(1, 40), ignore_eos=True)
        limits.normalize(None)
        chosen = {"priority": c.randint(0, 3)} if self.options.get("enable_priority_scheduling") else {}
        made = TokenizedGenerateReqInput(
            rid=f"r{self.stats['arrived']}.", input_text="", input_ids=array("q", self.prompts.draw()), input_embeds=None,
            mm_inputs=None, token_type_ids=None, sampling_params=limits, return_logprob=False, logprob_start_len=-1,
            top_logprobs_num=0, token_ids_logprob=None, stream=False, extra_key="e" if c.random() < 0.1 else None,
            cache_salt="s" if c.random() < 0.1 else None, **chosen,
        )  # fmt: skip
        self.scheduler.handle_generate_request(made)

    def drain(self) -> None:
        """Passes of the loop until nothing runs and nothing waits."""
        fed, self.ending = self.fed, True
        for _ in range(2000):
            if self.scheduler.is_fully_idle() or self.refusals:
                break
            self.step()
        self.ending, self.fed = False, fed

    def end(self) -> None:
        """Gives up all that runs."""
        from sglang.srt.managers.io_struct import AbortReq, ContinueGenerationReqInput

        if self.scheduler._engine_paused:
            self.scheduler.continue_generation(ContinueGenerationReqInput(torch_empty_cache=False))
        self.scheduler.abort_request(AbortReq(rid="", abort_all=True))
        self.drain()
        if not self.refusals:
            self.hear(Drain())


def worker(cache: Any, window: int) -> Worker:
    """A worker, and what a scheduler asks of one beside its forward pass."""
    made = Worker(cache, window)
    absent = ("canary_manager", "hisparse_coordinator", "attn_backend", "lora_manager", "eplb_manager")
    made.model_runner = SimpleNamespace(
        **dict.fromkeys(absent), device="cpu", prefill_aware_swa=False,
        ngram_embedding_manager=SimpleNamespace(table=None, prepare_for_forward=lambda batch, **_: batch),
    )  # fmt: skip
    return made


def schedule(driver: SchedulerDriver, size: Any, overlap: bool) -> Any:
    """A real Scheduler for a driver's cache."""
    from sglang.srt import runtime_context as context
    from sglang.srt.managers import scheduler as module
    from sglang.srt.server_args import ServerArgs

    kind = driven_class()
    kind.driver = driver
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
            "full_tokens_per_layer": size.pages * driver.page, "swa_tokens_per_layer": size.window_pages * driver.page,
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
            alone = dict.fromkeys(RANKS, 0) | dict.fromkeys(GROUPS[:-1], ALONE)
            driver.kept.enter_context(context.get_parallel().override(**alone))
            return kind(args, SimpleNamespace(nccl_port=0))
