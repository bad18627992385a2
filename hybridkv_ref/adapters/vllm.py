"""vLLM's KV-cache manager as events: ``Attached`` watches a real ``KVCacheManager``; ``vllm_build`` makes one.

Only public calls of the manager are watched, and what can be seen after each: block tables, hashes, reference counts,
the free count and the published events. A call becomes the events that it stands for, in the order of its effects:
blocks left behind, pins, entries that leave the index, new blocks, the step that the blocks are for, entries that come.
Nothing here says what is legal.

Hidden from the manager, and told as follows: a step is done when the caller's computed position, less what it says is
in flight, has passed it, or when the caller frees the request. Tokens that a connector delivers are a transfer from a
peer where caching is delayed, else a step that writes. Blocks lent twice under several groups count once per group.
Entries of a part of a block (``Attached.index`` counts them) are not told: the events know whole blocks only.
"""

import inspect
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hybridkv_ref.adapters.vllm_features import call_names, missing_features
from hybridkv_ref.adapters.vllm_index import WatchedIndex
from hybridkv_ref.adapters.vllm_tables import PIECE, Held, Life, Oldest, Run, first_block, follow, split
from hybridkv_ref.events import (
    Abort,
    Accept,
    Allocate,
    Arrive,
    Complete,
    Dispatch,
    Draft,
    Event,
    Finish,
    Free,
    Header,
    Lookup,
    Measure,
    Part,
    Pin,
    Preempt,
    Reject,
    Span,
    TransferBegin,
    TransferEnd,
    TransferFail,
)
from hybridkv_ref.need_functions import NeedFunction
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import group_of

CLAIMS = ("blocks", "reuse", "index", "steps", "in_order")
"""What a trace of this adapter shows."""


class Reused:
    """A group that steps read and write: its place among all, tokens of a block, and what it needs at a position."""

    def __init__(self, index: int, name: str, size: int, need: NeedFunction) -> None:
        self.index, self.name, self.size, self.need = index, name, size, need


class Attached:
    """Watches one manager and tells ``sink`` each event. ``missing`` names what this release cannot show."""

    def __init__(self, manager: Any, header: Header, sink: Callable[[Event], object], spec: Path = SPEC_DIR) -> None:
        self.manager, self.header, self.sink = manager, header, sink
        self.missing = missing_features(type(manager))
        self.unit, self.names, self.pool = header.unit, [g.name for g in header.groups], manager.block_pool
        self.needs = [group_of(g, spec) for g in header.groups]
        reused = [(i, need) for i, need in enumerate(self.needs) if header.groups[i].reuse]
        self.reused = [Reused(i, need.name, need.unit, need.need) for i, need in reused]
        self.lives: dict[str, Life] = {}
        self.held = [Held(self.pool.num_gpu_blocks) for _ in self.names]
        self.told_free = self.told_used = -1
        self.count = 0
        watched = [name for name in call_names() if hasattr(self, f"_{name}") and hasattr(manager, name)]
        self.calls = {name: getattr(manager, name) for name in watched}
        self.index = WatchedIndex(self.pool, header, self.calls["take_events"], sink)
        self.blocks_of: Callable[[str], Sequence[list[Any]]] = manager.coordinator.get_blocks
        self.parameters = list(inspect.signature(self.calls["allocate_slots"]).parameters)[2:]
        for name in self.calls:
            setattr(manager, name, getattr(self, f"_{name}"))

    # -- requests --------------------------------------------------------------------------------------------------

    def _ids(self, request: Any, lo: int, hi: int) -> list[int]:
        # Tuples of a unit's tokens, which are left out where fewer are left. A hash of a hash is below 2 ** 61, which
        # is as long as an int may be to be fast in a compiled oracle.
        tokens = iter(request.all_token_ids[lo - lo % self.unit : hi])
        return list(map(hash, map(hash, zip(*[tokens] * self.unit, strict=False))))

    def _life(self, request: Any) -> Life:
        life = self.lives.get(request.request_id)
        if life is None:
            count = request.num_tokens
            adapter, salt = getattr(request, "lora_request", None), getattr(request, "cache_salt", None)
            # A name may come to mean another adapter, so what it was loaded from belongs to it.
            domain = {"adapter": f"{adapter.lora_name} {getattr(adapter, 'lora_path', '')}"} if adapter else {}
            domain |= {"salt": salt} if salt else {}
            for part in getattr(request, "mm_features", None) or ():
                domain[f"media{part.mm_position.offset}"] = str(part.identifier)
            self.sink(Arrive(request.request_id, count, self._ids(request, 0, count), domain))
            life = self._new_life([[] for _ in self.names], [[] for _ in self.names], count)
            self.lives[request.request_id] = life
        return life

    def _new_life(self, tables: list[list[int]], blocks: list[list[Any]], told: int) -> Life:
        stored, firsts, whole = ([0] * len(tables) for _ in range(3))
        return Life(tables, blocks, stored, firsts, whole, [Oldest() for _ in tables], [True for _ in tables], told)

    def _progress(self, request: Any, life: Life) -> None:
        """Steps that the caller counts as done, tokens that it accepted, drafts that it gave up."""
        name, at, count = request.request_id, request.num_computed_tokens, request.num_tokens
        # A position before what was known then only says that the caller has not counted the step.
        drafts = life.sent > at >= life.told
        self._done(life, life.sent if drafts else at - getattr(request, "num_in_flight_tokens", 0))
        if drafts:
            self.sink(Accept(name, at))
            self.sink(Reject(name, at))
            life.sent = at
        if count > life.told:
            known = life.told - life.told % self.unit
            ids = self._ids(request, known, count) if count - known >= self.unit else []
            self.sink(Accept(name, count, ids))
            life.told = count

    def _done(self, life: Life, position: int) -> None:
        """Steps up to a position are done."""
        steps = life.steps
        while steps and steps[0][1] <= position:
            self.sink(Complete(steps.pop(0)[0]))

    # -- calls -----------------------------------------------------------------------------------------------------

    def _get_computed_blocks(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        result = self.calls["get_computed_blocks"](request, *args, **kwargs)
        self._look(request, result[0], result[1])
        self._tell_index()
        return result

    def _look(self, request: Any, blocks: Any, used: int, outside: int = 0) -> None:
        life = self._life(request)
        life.used = used
        groups = zip(self.names, blocks.blocks, strict=True) if used else ()
        found = {name: [b.block_id for b in group] for name, group in groups if group}
        self.sink(Lookup(request.request_id, used, blocks=found, outside=outside))

    def _allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
        call = self.calls["allocate_slots"]
        given = dict(zip(self.parameters, args, strict=False)) | kwargs if args else kwargs
        life, start = self._life(request), request.num_computed_tokens
        self._progress(request, life)
        local, outside = given.get("num_new_computed_tokens", 0), given.get("num_external_computed_tokens", 0)
        hits = given.get("new_computed_blocks")
        new = not life.sent and not any(life.tables)
        result = call(request, num_new_tokens, *args, **kwargs)
        if new and result is not None and (local != max(life.used, 0) or (local and outside)):
            self._look(request, hits, local, outside)
        cached = [[b.block_id for b in g] for g in hits.blocks] if hits is not None and new else []
        pinned, taken = self._moved(request.request_id, life, cached)
        for index, numbers in pinned:
            self.sink(Pin(request.request_id, self.names[index], numbers))
        stored = self.index.leave([numbers for _, (_, numbers) in taken])
        for index, (at, numbers) in taken:
            self.sink(Allocate(request.request_id, self.names[index], numbers, at * self.header.groups[index].block))
        if new and cached:
            life.stored = [len(blocks) for blocks in cached]
        if result is not None:
            begin = start + local + outside
            if outside:
                self._external(request.request_id, life, start + local, begin, given.get("delay_cache_blocks", False))
            if num_new_tokens:
                self._step(request, life, begin, begin + num_new_tokens)
            life.used = -1
        if stored:
            self.index.come(stored, life)
        self._balance()
        return result

    def _step(self, request: Any, life: Life, lo: int, hi: int) -> None:
        """What is written, and what is read before it.

        A group that keeps everything is told whole only once, another one when its table has changed, and else the
        oldest block that it needs, which is the first that may go.
        """
        reads: list[Span] = []
        for group in self.reused if lo else ():
            index, size = group.index, group.size
            first, table = life.oldest[index].at(group.need, size, lo), life.tables[index]
            if first * size >= lo or (not first and life.sent):
                continue
            if life.changed[index]:
                life.changed[index] = False
                reads.append(Span(group.name, table[first : -(-lo // size)], first * size, lo))
            else:
                end = (first + 1) * size
                reads.append(Span(group.name, table[first : first + 1], first * size, end if end < lo else lo))
        life.steps.append((self._dispatch(request.request_id, life, lo, hi, reads), hi))
        life.sent = hi

    def _dispatch(self, name: str, life: Life, lo: int, hi: int, reads: list[Span]) -> str:
        """Tells a step, whose name it gives."""
        return self._write(name, life, lo, hi, reads)

    def _write(self, name: str, life: Life, lo: int, hi: int, reads: list[Span]) -> str:
        self.count += 1
        step = f"{name}#{self.count}"
        if hi > life.told:
            self.sink(Draft(name, hi - max(lo, life.told)))
        writes: list[Span] = []
        for group in self.reused:
            size = group.size
            writes.append(Span(group.name, life.tables[group.index][lo // size : -(-hi // size)], lo, hi))
        self.sink(Dispatch(step, name, reads, writes))
        return step

    def _external(self, name: str, life: Life, lo: int, hi: int, delayed: bool) -> None:
        if not delayed:
            self.sink(Complete(self._write(name, life, lo, hi, [])))
            return
        self.count += 1
        life.load, parts = f"load{self.count}", []
        for index, group in enumerate(self.header.groups):
            blocks = life.tables[index][lo // group.block : -(-hi // group.block)]
            if target := [b for b in blocks if b != self.header.null]:
                # The peer's numbers are not known: each of its blocks is told by one that no other load has.
                parts.append(Part(group.name, [self.count * self.pool.num_gpu_blocks + b for b in target], target))
        self.sink(TransferBegin(life.load, parts, "peer", req=name))

    def loaded(self, request: Any, ok: bool = True) -> None:
        """The connector's tokens have arrived, or will not: the manager is not told, so the caller says so."""
        life = self.lives[request.request_id]
        self.sink(TransferEnd(life.load) if ok else TransferFail(life.load))
        life.load = ""

    def _cache_blocks(self, request: Any, num_computed_tokens: int) -> Any:
        life = self._life(request)
        result = self.calls["cache_blocks"](request, num_computed_tokens)
        self.index.come(self.index.leave(), life)
        return result

    def _free(self, request: Any) -> Any:
        life = self._life(request)
        self._progress(request, life)
        for step, _ in life.steps:
            self.sink(Complete(step))
        if life.load:
            self.loaded(request, False)
        result = self.calls["free"](request)
        self._left(request, life)
        return result

    def _left(self, request: Any, life: Life) -> None:
        """A request has given its blocks back, for good or to begin again."""
        name, over = request.request_id, request.is_finished()
        aborted = over and "ABORT" in request.status.name
        self.sink(Abort(name) if aborted else Finish(name) if over else Preempt(name))
        self._moved(name, life, [])
        del self.lives[name]
        if not over:
            self.lives[name] = self._new_life(life.tables, life.blocks, life.told)
        self._tell_index()
        self._balance()

    def _remove_skipped_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> Any:
        result = self.calls["remove_skipped_blocks"](request_id, *args, **kwargs)
        if request_id in self.lives:
            self._moved(request_id, self.lives[request_id], [])
            self._balance()
        return result

    def _evict_blocks(self, block_ids: set[int]) -> Any:
        result = self.calls["evict_blocks"](block_ids)
        self._tell_index()
        return result

    def _reset_prefix_cache(self) -> Any:
        result = self.calls["reset_prefix_cache"]()
        self._tell_index()
        return result

    def _take_events(self) -> list[Any]:
        self._tell_index()
        taken, self.index.taken = self.index.taken, []
        return taken

    def _tell_index(self) -> None:
        """After a call that computes nothing."""
        self.index.come(self.index.leave())

    # -- what can be seen ------------------------------------------------------------------------------------------

    def _moved(
        self, name: str, life: Life, cached: Sequence[list[int]]
    ) -> tuple[list[tuple[int, list[int]]], list[tuple[int, Run]]]:
        """Tells what left a request's tables; gives what came: (group, pinned blocks), (group, new blocks)."""
        pinned: list[tuple[int, list[int]]] = []
        taken: list[tuple[int, Run]] = []
        null = self.header.null
        for index, now in enumerate(self.blocks_of(name)):
            seen, first = life.blocks[index], life.firsts[index]
            # What a window has left behind is all null, and long: whether it still is, is not asked at every step.
            if len(now) >= life.whole[index] + PIECE:
                life.whole[index], first = len(now), 0
            if len(now) == len(seen) and (now[first:] == seen[first:] if first else now == seen):
                continue
            life.changed[index] = True
            gone, came = follow(seen, life.tables[index], now, null, first)
            life.firsts[index] = first_block(life.tables[index], min([first, *(at for at, _ in came)]), null)
            if gone:
                self.held[index].give(gone)
                self.sink(Free(name, self.names[index], gone[::-1]))
            for _, numbers in came:
                self.held[index].take(numbers)
            if came and cached and cached[index]:
                # A block of the hit that the window has passed is not pinned, and may come back as a new one.
                hits, came = split(came, cached[index], null)
                if hits:
                    pinned.append((index, hits))
            taken += [(index, run) for run in came]
        return pinned, taken

    def _balance(self) -> None:
        """Counts that did not change are not told again."""
        free, used = self.pool.get_num_free_blocks(), 0
        for held in self.held:
            used += held.count
        if free != self.told_free or used != self.told_used:
            self.told_free, self.told_used = free, used
            self.sink(Measure("pool", free=free, used=used, capacity=self.pool.num_gpu_blocks - 1))
