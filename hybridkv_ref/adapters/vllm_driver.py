"""Drives vLLM's real manager by chance, the oracle in lock step: a scheduler in small, in the engine's own process.

The requests share prefixes and come again; the pool is so small that they preempt each other. Chunked prefill, decode,
drafts that are refused, steps in flight, external tokens that come late or never, salts, evictions and resets.
"""

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

from hybridkv_ref.adapters.vllm import Attached
from hybridkv_ref.adapters.vllm_build import build
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Event, Header
from hybridkv_ref.models import Model, load_model
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_records import Refusal

MODELS = {
    "gpt-oss-20b": 60,
    "gpt-oss-20b:32,48": 40,
    "gemma-3-27b": 260,
    "deepseek-v4-flash": 900,
    "deepseek-v3.2": 40,
    "qwen3-next-80b-a3b": 18,
}
"""Blocks of the pool by model: room for a few requests. After a colon: block sizes by group, other than the model's."""


def geometry(name: str) -> Model:
    """A model, with other blocks where the name says so; InputError where it names other groups than there are."""
    base, _, sizes = name.partition(":")
    model = load_model(base)
    if not sizes:
        return model
    blocks = [int(size) for size in sizes.split(",") if size.isdecimal() and int(size)]
    if len(blocks) != len(model.groups):
        raise InputError(f"--model {name}: expected block sizes of {len(model.groups)} groups after the colon")
    groups = [msgspec.structs.replace(g, block_tokens=b) for g, b in zip(model.groups, blocks, strict=True)]
    return msgspec.structs.replace(model, groups=tuple(groups))


class Prompts:
    """Token ids of prompts: one that came before, a part of one, or a new end after a shared beginning."""

    def __init__(self, chance: random.Random, align: int, longest: int) -> None:
        self.chance, self.align = chance, align
        self.stems = [[chance.randrange(1 << 20) for _ in range(longest)] for _ in range(3)]
        self.past: list[list[int]] = []

    def draw(self) -> list[int]:
        """The next one."""
        c = self.chance
        if self.past and c.random() < 0.4:
            tokens = list(c.choice(self.past))
            if c.random() < 0.4:
                tokens = tokens[: c.randint(1, len(tokens))]
        else:
            stem = c.choice(self.stems)
            cut = c.randint(0, len(stem))
            if c.random() < 0.5:
                cut -= cut % self.align
            tokens = stem[:cut] + [c.randrange(1 << 20) for _ in range(c.randint(1, self.align + 5))]
        self.past = [*self.past[-5:], tokens]
        return tokens


def longest(header: Header, blocks: int) -> int:
    """Tokens of the shared beginnings: beyond every window, if the pool has room for that."""
    align = math.lcm(*(g.block for g in header.groups))
    return min(6 * align + 2 * max(g.window for g in header.groups), blocks * min(g.block for g in header.groups))


class Driver:
    """Drives one manager for a model, ``depth`` steps in flight; ``lost`` are tokens by the groups that cost them."""

    def __init__(
        self, name: str, seed: int, blocks: int = 0, depth: int = 1, evict: float = 0.02, **options: Any
    ) -> None:
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request, RequestStatus

        self.chance, self.depth, self.evict, self.status = random.Random(seed), depth, evict, RequestStatus
        model = geometry(name)
        self.manager, self.header = build(model, blocks or MODELS.get(name, 100), 1 << 14, **options)
        self.oracle, self.events = Oracle(self.header), 0
        self.refusals: list[Refusal] = []
        self.trail: list[Event] = []
        self.attached = Attached(self.manager, self.header, self.hear)
        self.missing = self.attached.missing
        self.align = math.lcm(*(g.block for g in self.header.groups))
        self.states = any(g.shape == "state" for g in model.groups)
        self.gate = "admission of whole sequences" not in self.missing
        self.hasher = get_request_block_hasher(self.header.unit, sha256)
        self.make: Callable[..., Any] = lambda name, tokens, **domain: Request(
            name, tokens, SamplingParams(max_tokens=64), None, block_hasher=self.hasher, **domain
        )
        # One name, which is also a salt, and two adapters that were loaded under it.
        self.adapters = [LoRARequest("s", 1, "/first"), LoRARequest("s", 2, "/second")]
        top = longest(self.header, blocks or MODELS.get(name, 100))
        self.prompts = Prompts(self.chance, self.align, top)
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.loading: list[Any] = []
        self.flight: dict[str, list[int]] = {}
        self.count = 0
        self.stats: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def hear(self, event: Event) -> None:
        """Takes one event in, and what the oracle says of it."""
        self.events += 1
        self.trail.append(event)
        found = self.oracle.feed(event).refusals
        self.refusals += found

    # -- requests --------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """A request, some under a salt or an adapter."""
        tokens = self.prompts.draw()
        self.count += 1
        salt = "s" if self.chance.random() < 0.1 else None
        adapter = None if salt or self.chance.random() >= 0.1 else self.chance.choice(self.adapters)
        self.waiting.append(self.make(f"r{self.count}", tokens, cache_salt=salt, lora_request=adapter))

    def chunk(self, request: Any, at: int) -> int:
        """Tokens of the next step from ``at`` on; states end their chunks on whole blocks, as the scheduler does."""
        left = request.num_tokens - at
        size = self.chance.choice((self.align, 2 * self.align, 3 * self.align + 7, left))
        count = min(left, max(size, 1))
        if self.states and at < request.num_tokens:
            last = request.num_tokens - request.num_tokens % self.align
            if at < last:
                end = min(at + max(count, self.align), last)
                count = max(end - end % self.align - at, 0) or min(self.align - at % self.align, left)
        return int(count)

    def begin(self) -> None:
        """Admits the first that waits, from its hit and sometimes from tokens of a connector."""
        request = self.waiting[0]
        known = request.request_id in self.oracle.state.requests
        blocks, used, *junction = self.manager.get_computed_blocks(request)
        self.judge(request, used)
        request.shared_prefix_boundary = junction[0] if junction else 0
        outside, delayed = 0, False
        left = request.num_tokens - 1 - used
        if left > self.align and self.chance.random() < 0.15 and not self.states and not known:
            outside = self.chance.randint(1, left // self.align) * self.align
            delayed = self.chance.random() < 0.5
        count = 0 if delayed else self.chunk(request, used + outside)
        got = self.manager.allocate_slots(
            request, count, num_new_computed_tokens=used, new_computed_blocks=blocks,
            num_external_computed_tokens=outside, delay_cache_blocks=delayed,
            **({"full_sequence_must_fit": self.chance.random() < 0.5} if self.gate else {}),
        )  # fmt: skip
        if got is None:
            self.stats["refused"] += 1
            return
        self.waiting.pop(0)
        self.stats["begun"] += 1
        self.stats["external"] += bool(outside)
        request.num_computed_tokens = used + outside + count
        if delayed:
            request.num_computed_tokens = used
            request.outside = outside
            self.loading.append(request)
            return
        request.status = self.status.RUNNING
        self.flight[request.request_id] = [count]
        request.num_in_flight_tokens = count
        self.running.append(request)

    def judge(self, request: Any, used: int) -> None:
        """The engine's hit against the longest one."""
        if request.request_id not in self.oracle.state.requests or self.oracle.state.requests[request.request_id].lost:
            return
        best = self.oracle.expected_hit(request.request_id)
        self.stats["lookups"] += 1
        self.stats["hit_tokens"] += used
        self.stats["best_tokens"] += best.r
        if used != best.r:
            self.stats["longer" if used > best.r else "shorter"] += 1
            if used < best.r:
                self.lost[" ".join(self.blamed(request, best.r))] += best.r - used
                self.stats["lost_tokens"] += best.r - used

    def blamed(self, request: Any, best: int) -> list[str]:
        """The groups of which the engine, asked for each alone, finds less than the best position."""
        find = getattr(self.manager.coordinator, "find_longest_cache_hit_per_group", None)
        if find is None:
            return ["?"]
        reach = find(request.block_hashes, best)[1]
        return [g.name for g, r in zip(self.header.groups, reach, strict=True) if r < best]

    def finish_step(self, request: Any) -> None:
        """The oldest step in flight is done."""
        flight = self.flight[request.request_id]
        if flight:
            request.num_in_flight_tokens = getattr(request, "num_in_flight_tokens", 0) - flight.pop(0)
        if request.num_computed_tokens - request.num_in_flight_tokens >= request.num_tokens:
            request.append_output_token_ids(self.chance.randrange(1 << 20))

    def advance(self, request: Any) -> None:
        """One more step of a running request; others give way for it."""
        at, flight = request.num_computed_tokens, self.flight[request.request_id]
        while len(flight) >= self.depth or (flight and at >= request.num_tokens):
            self.finish_step(request)
        drafts = 0
        if at >= request.num_tokens - 1 and not self.states and self.depth == 1 and self.chance.random() < 0.3:
            drafts = self.chance.randint(1, 4)
        count = (self.chunk(request, at) if at < request.num_tokens else 1) + drafts
        ahead = self.chance.choice((0, 0, 3)) if not self.states else 0
        while self.manager.allocate_slots(request, count, num_lookahead_tokens=ahead) is None:
            victim = self.running[-1]
            self.stop(victim)
            if victim is request:
                return
        request.num_computed_tokens += count
        request.num_in_flight_tokens = getattr(request, "num_in_flight_tokens", 0) + count
        flight.append(count)
        if drafts:
            self.finish_step(request)
            taken = self.chance.randint(0, drafts)
            self.stats["drafts"] += drafts
            self.stats["drafts_refused"] += drafts - taken
            request.num_computed_tokens -= drafts - taken
            request.append_output_token_ids([self.chance.randrange(1 << 20) for _ in range(taken)]) if taken else None
            while request.num_tokens <= request.num_computed_tokens:
                request.append_output_token_ids(self.chance.randrange(1 << 20))

    def stop(self, request: Any, status: Any = None) -> None:
        """Preempts, or ends."""
        self.running.remove(request)
        request.num_in_flight_tokens = 0
        self.flight.pop(request.request_id, None)
        if status is not None:
            request.status = status
        self.manager.free(request)
        if status is None:
            self.stats["preempted"] += 1
            request.status = self.status.PREEMPTED
            request.num_computed_tokens = 0
            self.waiting.insert(0, request)

    def step(self) -> None:
        """One step of the engine, and what comes and goes beside it."""
        c = self.chance
        if hasattr(self.manager, "new_step_starts"):
            self.manager.new_step_starts()
        self.manager.take_events()
        if len(self.waiting) < 3 and c.random() < 0.5:
            self.arrive()
        if self.waiting and len(self.running) < 5:
            self.begin()
        for request in list(self.loading):
            if c.random() < 0.4:
                self.loading.remove(request)
                self.land(request, c.random() < 0.8)
        for request in list(self.running):
            if request in self.running and c.random() < 0.8:
                self.advance(request)
        for request in list(self.running):
            if request.num_output_tokens > c.randint(2, 40) or c.random() < 0.02:
                ends = (self.status.FINISHED_STOPPED, self.status.FINISHED_ABORTED)
                self.stop(request, ends[c.random() < 0.3])
        if c.random() < self.evict:
            cached = [b.block_id for b in self.manager.block_pool.blocks if b.block_hash is not None and not b.ref_cnt]
            if cached:
                self.manager.evict_blocks(set(c.sample(cached, min(len(cached), c.randint(1, 3)))))
        if c.random() < 0.01:
            if c.random() < 0.5:
                self.end()
            self.stats["resets"] += bool(self.manager.reset_prefix_cache())

    def land(self, request: Any, ok: bool) -> None:
        """The tokens of a connector have arrived, or not: then the request begins again."""
        self.attached.loaded(request, ok)
        self.stats["loads" if ok else "loads_failed"] += 1
        self.running.append(request)
        self.flight[request.request_id] = []
        request.status = self.status.RUNNING
        if ok:
            request.num_computed_tokens += request.outside
            self.manager.cache_blocks(request, min(request.num_computed_tokens, request.num_tokens))
        else:
            self.stop(request)

    def end(self) -> None:
        """Ends all that runs."""
        for request in list(self.loading):
            self.land(request, False)
        self.loading.clear()
        for request in list(self.running):
            self.stop(request, self.status.FINISHED_STOPPED)
