"""Drives SGLang's real radix cache by chance, the oracle in lock step: a scheduler in small, in its own process.

The requests share prefixes and come again; the pools are so small that they take pages from each other. Chunked
prefill, decode, locks of others, retraction, abort, salts, adapters, evictions of each component and resets.
"""

import random
from array import array
from collections import Counter
from typing import Any

from hybridkv_ref.adapters.sglang import Attached
from hybridkv_ref.adapters.sglang_build import build
from hybridkv_ref.adapters.sglang_workload import Prompts, geometry, judge, sizes
from hybridkv_ref.events import Drain, Event
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_records import Refusal


class Driver:
    """Drives one cache for a model; ``pages`` and ``window_pages`` of its pools, default: room for a few requests.

    ``kind``: the cache's class, where a release has several. ``extra``: keys that callers give.
    """

    def __init__(
        self,
        name: str,
        seed: int,
        pages: int = 0,
        window_pages: int = 0,
        kind: str = "",
        extra: tuple[str, ...] = ("e",),
    ) -> None:
        self.chance, self.extra = random.Random(seed), extra
        model, window, self.page = geometry(name)
        size = sizes(window, self.page, pages, window_pages)
        self.scale, self.longest = max(self.page // 2, 1), size.longest
        self.cache, self.header = build(model, self.page, size.pages, size.window_pages, size.longest, kind)
        from sglang.srt.managers import schedule_batch
        from sglang.srt.mem_cache import allocation, common
        from sglang.srt.mem_cache.base_prefix_cache import EvictParams
        from sglang.srt.sampling.sampling_params import SamplingParams

        self.engine, self.allocation, self.common, self.evicting = schedule_batch, allocation, common, EvictParams
        self.sampling = SamplingParams(max_new_tokens=64)
        self.oracle, self.events = Oracle(self.header), 0
        self.refusals: list[Refusal] = []
        self.trail: list[Event] = []
        self.attached = Attached(self.cache, self.header, self.hear)
        self.missing = self.attached.missing
        self.slots = self.cache.token_to_kv_pool_allocator
        self.by_node = hasattr(self.cache, "cache_unfinished_req")
        self.window, self.states = window - 1, self.cache.supports_mamba()
        self.prompts = Prompts(self.chance, size.room, self.scale)
        self.waiting: list[Any] = []
        self.running: list[Any] = []
        self.locks: list[tuple[Any, Any]] = []
        self.limits: dict[str, int] = {}
        self.count = 0
        self.stats: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()

    def hear(self, event: Event) -> None:
        """Takes one event in, and what the oracle says of it."""
        self.events += 1
        self.trail.append(event)
        self.refusals += self.oracle.feed(event).refusals

    # -- requests --------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """A request, some under a salt or an adapter."""
        c, tokens = self.chance, self.prompts.draw()
        self.count += 1
        salt = "s" if c.random() < 0.1 else None
        adapter = "a" if c.random() < 0.1 else None
        extra = c.choice(self.extra) if c.random() < 0.1 else None
        made = self.engine.Req(
            f"r{self.count}", "", array("q", tokens), self.sampling, extra_key=extra, lora_id=adapter, cache_salt=salt
        )
        self.limits[made.rid] = c.randint(2, 40) + (self.window if c.random() < 0.1 else 0)
        self.waiting.append(made)

    def size(self, req: Any) -> int:
        """Tokens so far."""
        return len(req.origin_input_ids) + len(req.output_ids)

    def fits(self, count: int) -> bool:
        """Whether the pools have room for so many tokens, after evictions."""
        need = count + self.page
        if self.states:
            free = self.cache.req_to_token_pool.mamba_allocator.available_size() + self.cache.mamba_evictable_size()
            return bool(free > 2 and need <= self.slots.available_size() + self.cache.full_evictable_size())
        full = self.slots.full_available_size() + self.cache.full_evictable_size()
        return bool(need <= full and need <= self.slots.swa_available_size() + self.cache.swa_evictable_size())

    def begin(self) -> None:
        """Admits the first that waits, from its hit."""
        req = self.waiting[0]
        req.init_next_round_input(self.cache)
        used = len(req.prefix_indices) if self.by_node else req.prefix_len
        judge(self.oracle, self.attached, req, used, self.stats, self.lost)
        if self.chance.random() < 0.3:
            self.unlock(req.last_node, self.lock(req.last_node))
        count = min(self.size(req) - used, self.chance.choice((self.size(req), 16 * self.scale, 8 * self.scale)))
        if used + count < self.size(req):
            count = max((used + count) // self.page * self.page - used, min(self.page, self.size(req) - used))
        held = self.lock(req.last_node)
        if not self.fits(count) or not self.rows_left():
            self.stats["refused"] += 1
            self.unlock(req.last_node, held)
            return
        if self.by_node:
            req.lock_receipt = held
        else:
            req.lock = held
        self.waiting.pop(0)
        self.running.append(req)
        self.stats["begun"] += 1
        indices = req.prefix_indices if self.by_node else self.cache.prefix_device_indices(req)
        if self.states and not self.cache.req_to_token_pool.mamba_allocator.available_size():
            self.cache.evict(self.evicting(mamba_num=1))
        self.cache.req_to_token_pool.alloc([req])
        self.cache.req_to_token_pool.write((req.kv.req_pool_idx, slice(0, used)), indices.int())
        self.extend(req, used, used + count)

    def rows_left(self) -> bool:
        """Whether one more request can have a row."""
        return bool(self.cache.req_to_token_pool.available_size())

    def extend(self, req: Any, lo: int, hi: int) -> None:
        """Slots for [lo, hi) and the step that computes them."""
        import torch

        row = self.cache.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        if self.page == 1:
            slots = self.allocation.alloc_token_slots(self.cache, hi - lo)
        else:
            ends = torch.tensor([lo]), torch.tensor([lo]), torch.tensor([hi]), torch.tensor([hi])
            last = row[lo - 1 : lo].long() if lo else torch.tensor([-1])
            slots = self.allocation.alloc_paged_token_slots_extend(self.cache, *ends, last, hi - lo)
        row[lo:hi] = slots.int()
        if self.by_node:
            req.set_extend_range(lo, hi)
        else:
            req.extend_end = hi
        req.kv.kv_allocated_len = req.kv.kv_committed_len = hi
        self.attached.began(req, lo, hi)

    def advance(self, req: Any) -> None:
        """The step in flight is done; the next one begins."""
        self.attached.ended(req)
        done, decoding = req.kv.kv_allocated_len, req.decode_batch_idx > 0
        if done >= self.size(req):
            req.output_ids.append(self.chance.randrange(1 << 16))
        if not decoding:
            self.store(req)
            if done >= self.size(req) - 1:
                req.decode_batch_idx = 1
        left = self.size(req) - done
        count = min(left, self.chance.choice((left, 16 * self.scale, 8 * self.scale)))
        if count < left:
            count = max((done + count) // self.page * self.page - done, min(self.page, left))
        while not self.fits(count):
            victim = self.running[-1]
            self.stop(victim)
            if victim is req:
                return
        if decoding:
            if not self.states:
                self.slide(req)
            req.decode_batch_idx += 1
        self.extend(req, done, done + count)

    def store(self, req: Any) -> None:
        """The tree gets what a running request has computed."""
        if self.by_node:
            req.full_untruncated_fill_ids = array("q", [*req.origin_input_ids, *req.output_ids])
            self.common.maybe_cache_unfinished_req(req, self.cache)
        else:
            req.refresh_fill_ids()
            self.common.checkpoint_kv_cache(req, self.cache)

    def slide(self, req: Any) -> None:
        """What the scheduler gives back before each decode: slots behind the window, the window's part of a lock."""
        at = self.size(req) - 1
        grouped = self.chance.random() < 0.5
        if grouped:
            self.slots.free_group_begin()
        if self.by_node:
            self.common.free_swa_out_of_window_slots(
                req, at, sliding_window_size=self.cache.sliding_window_size, page_size=self.page,
                req_to_token_pool=self.cache.req_to_token_pool, token_to_kv_pool_allocator=self.slots,
                retain_floor=self.cache.swa_retain_floor(req),
            )  # fmt: skip
        else:
            self.cache.evict_sliding_windows(req, at)
        if req.decode_batch_idx >= self.window and self.chance.random() < 0.7:
            self.release(req)
        if grouped:
            self.slots.free_group_end()

    def release(self, req: Any) -> None:
        """The window's part of a request's lock ends early."""
        if not self.by_node:
            self.cache.release_swa_prefix_lock(req)
        elif not req.swa_prefix_lock_released and req.lock_receipt.swa_uuid_for_lock is not None:
            self.cache.dec_swa_lock_only(req.last_node, req.lock_receipt)
            req.swa_prefix_lock_released = True
        self.stats["released"] += 1

    def stop(self, req: Any, reason: Any = None) -> None:
        """Retracts, or ends."""
        self.running.remove(req)
        self.attached.ended(req)
        req.finished_reason = reason
        insert = reason is not None
        given = {"is_insert" if self.by_node else "checkpoint": insert}
        self.common.release_kv_cache(req, self.cache, **given)
        if reason is None:
            self.stats["retracted"] += 1
            req.reset_for_retract()
            self.waiting.insert(0, req)

    # -- locks of others, eviction -------------------------------------------------------------------------------------

    def lock(self, node: Any) -> Any:
        """A lock on the way to a node, and what it is given back with."""
        return self.cache.inc_lock_ref(node).to_dec_params() if self.by_node else self.cache.lock(node)

    def unlock(self, node: Any, held: Any) -> None:
        """The end of a lock."""
        if self.by_node:
            self.cache.dec_lock_ref(node, held)
        else:
            self.cache.unlock(held)

    def step(self) -> None:
        """One step of the engine, and what comes and goes beside it."""
        c = self.chance
        self.cache.take_events()
        if len(self.waiting) < 3 and c.random() < 0.5:
            self.arrive()
        if self.waiting and len(self.running) < 5:
            self.begin()
        for req in list(self.running):
            if req in self.running and c.random() < 0.8:
                self.advance(req)
        for req in list(self.running):
            if len(req.output_ids) > self.limits[req.rid] or c.random() < 0.02 or self.size(req) > self.longest - 40:
                self.stop(req, self.engine.FINISH_ABORT() if c.random() < 0.3 else self.engine.FINISH_LENGTH(1))
        if self.waiting and c.random() < 0.03:
            self.drop(self.waiting.pop())
        if self.waiting and c.random() < 0.05:
            req = self.waiting[-1]
            req.init_next_round_input(self.cache)
            self.locks.append((req.last_node, self.lock(req.last_node)))
        while self.locks and (c.random() < 0.3 or len(self.locks) > 3):
            self.unlock(*self.locks.pop(c.randrange(len(self.locks))))
        if c.random() < 0.15:
            some = c.randint(1, 12) * self.scale
            full, window = c.choice(((0, some), (some, 0), (some, some)))
            if self.states:
                self.cache.evict(self.evicting(num_tokens=full, mamba_num=min(window, 3)))
            else:
                self.cache.evict(self.evicting(num_tokens=full, swa_num_tokens=window))
            self.stats["evictions"] += 1
        if c.random() < 0.005:
            self.end()
            if c.random() < 0.5:
                self.cache.reset()
                self.slots.clear()
                if self.states:
                    self.cache.req_to_token_pool.mamba_allocator.clear()
                self.attached.cleared()
                self.stats["resets"] += 1

    def drop(self, req: Any) -> None:
        """Gives up a request that waits; it may have a state's slot already."""
        if req.kv.holds_mamba:
            self.common.release_kv_cache(req, self.cache, **{"is_insert" if self.by_node else "checkpoint": False})
        self.attached.dropped(req)

    def end(self) -> None:
        """Ends all that runs or waits, and every lock."""
        for req in list(self.running):
            self.stop(req, self.engine.FINISH_LENGTH(1))
        while self.locks:
            self.unlock(*self.locks.pop())
        for req in self.waiting:
            self.drop(req)
        self.waiting.clear()
        self.hear(Drain())
