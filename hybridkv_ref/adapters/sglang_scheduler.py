"""Drives SGLang's real Scheduler by chance, with a worker that has no model, the oracle in lock step.

The engine's own event loops run, a pass at a time: what they receive is made up here (``sglang_server`` says what is
stood in for). A waiting request is also matched to put it in order; only the match that a request begins with is told
as a lookup.
"""

import random
from array import array
from collections import Counter, deque
from typing import Any

from hybridkv_ref import events as ev
from hybridkv_ref.adapters.sglang import Attached
from hybridkv_ref.adapters.sglang_build import build, with_states
from hybridkv_ref.adapters.sglang_records import Life
from hybridkv_ref.adapters.sglang_server import schedule, worker
from hybridkv_ref.adapters.sglang_tree import FULL, WINDOW
from hybridkv_ref.adapters.sglang_workload import Prompts, geometry, judge, sizes
from hybridkv_ref.events import Drain, Event
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_records import Refusal

WAYS: dict[str, dict[str, Any]] = {
    "scheduler": {},
    "overlapped scheduler": {"overlap": True},
    "scheduler, longest prefix first": {"schedule_policy": "lpm"},
    "scheduler, by priority": {"enable_priority_scheduling": True},
    "scheduler, mixed chunks": {"enable_mixed_chunk": True},
}
"""What a driver may be told."""


def ways(model: str) -> list[str]:
    """The ways that go with a model: the engine does not overlap steps of one with states, as it is built here."""
    states = with_states(*geometry(model)[::2])
    return [how for how in WAYS if not (states and WAYS[how].get("overlap"))]


class Passed(Exception):
    """A pass of the engine's event loop is over."""


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

    ``overlap``: a step is launched before the result of the one before is processed. ``kind``: the cache's class, by
    default the one that the engine's registry takes. Other options are the engine's own.
    """

    def __init__(
        self, name: str, seed: int, overlap: bool = False, kind: str = "UnifiedRadixCache", **options: Any
    ) -> None:
        self.chance, self.options = random.Random(seed), options
        model, window, self.page = geometry(name)
        self.size = size = sizes(window, self.page)
        self.scale = max(self.page // 2, 1)
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
        self.scheduler = schedule(self, overlap)
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

    def scheduling(self, begins: bool) -> None:
        """A batch begins to be made up, or is."""
        self.attached.scheduling = begins

    def resulted(self, batch: Any) -> None:
        """The result of a batch is processed: the oldest step of each of its requests is done."""
        for req in batch.reqs:
            self.attached.ended(req)

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
            rid=f"r{self.stats['arrived']}.", input_text="", input_ids=array("q", self.prompts.draw()),
            input_embeds=None, mm_inputs=None, token_type_ids=None, sampling_params=limits, return_logprob=False,
            logprob_start_len=-1, top_logprobs_num=0, token_ids_logprob=None, stream=False,
            extra_key="e" if c.random() < 0.1 else None, cache_salt="s" if c.random() < 0.1 else None, **chosen,
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
