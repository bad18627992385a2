"""SGLang's radix cache as events: ``Attached`` watches a real one; ``sglang_build`` makes one.

Only calls of the cache, of its slot allocator and of its request pool are watched, and what can be seen after each: the
tree's pages and locks, the row of each request, the pools' free pages. Nothing here says what is legal.

A page of the tree is an entry of the index. A request holds the pages of its own part of its row, and those on which
its lock counts; a lock is another holder's until its request computes. Of stored tokens that the tree has it gets the
tree's pages: told as a preemption that looks up and writes its last page's rows again. A state's slot is a page.

Hidden from the cache, and told by the caller: a step that begins (``began``) and ends (``ended``).
"""

from collections import Counter
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from hybridkv_ref import events as ev
from hybridkv_ref.adapters.sglang_features import STORES, missing_features, rules_of
from hybridkv_ref.adapters.sglang_records import Life, Lock, domain_of, receipt_of
from hybridkv_ref.adapters.sglang_tree import FULL, STATE, WINDOW, Entry, Tree
from hybridkv_ref.events import Event, Header
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import group_of


class Attached:
    """Watches one cache and tells ``sink`` each event. ``missing`` names what this release cannot show."""

    def __init__(self, cache: Any, header: Header, sink: Callable[[Event], object], spec: Path = SPEC_DIR) -> None:
        self.cache, self.header, self.sink = cache, header, sink
        self.page, self.names = header.unit, [g.name for g in header.groups]
        self.needs = [group_of(g, spec) for g in header.groups]
        self.tree = Tree(cache, self.page, self.needs[1].exact)
        self.missing = missing_features(type(cache), window=not self.tree.states)
        self.rules = rules_of(type(cache))
        self.rows, self.slots = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
        self.lives: dict[str, Life] = {}
        self.locks: list[Lock] = []
        self.named: list[dict[int, Entry]] = [{}, {}]
        self.inside: list[Life | None] = []
        self.storing: Life | None = None
        self.count = 0
        self._watch(cache, "match_prefix", self._match)
        for owner, name in self._lock_calls():
            self._watch(owner, name, partial(self._locked, name == "inc_lock_ref"))
        for name in ("evict", "evict_for_alloc"):
            self._watch(cache, name, self._plain)
        for name in ("release_swa_prefix_lock", "claim_kv_row", *(n for calls in STORES for n in calls)):
            self._watch(cache, name, partial(self._of_request, name))
        self._watch(self.slots, "free_swa_segment", self._plain)
        self._watch(self.rows, "free", self._over)

    def _lock_calls(self) -> list[tuple[Any, str]]:
        early = self.cache if hasattr(self.cache, "dec_swa_lock_only") else self.tree.core
        return [(self.cache, "inc_lock_ref"), (self.cache, "dec_lock_ref"), (early, "dec_swa_lock_only")]

    @staticmethod
    def _watch(owner: Any, name: str, watcher: Callable[..., Any]) -> None:
        if hasattr(owner, name):
            setattr(owner, name, partial(watcher, getattr(owner, name)))

    # -- calls -----------------------------------------------------------------------------------------------------

    @contextmanager
    def _call(self, life: Life | None = None) -> Any:
        """A watched call; what it did is told when the outermost one returns."""
        self.inside.append(life)
        try:
            yield
        finally:
            self.inside.pop()
        if not self.inside:
            self._settle()

    def _plain(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        with self._call():
            return call(*args, **kwargs)

    def _of_request(self, name: str, call: Callable[..., Any], req: Any, *args: Any, **kwargs: Any) -> Any:
        life = self._life(req)
        self._progress(life)
        life.ending = life.ending or name in ("cache_finished_req", "claim_kv_row")
        self.storing = life
        with self._call(life):
            return call(req, *args, **kwargs)

    def _match(self, call: Callable[..., Any], params: Any) -> Any:
        result = call(params)
        if params.req is not None and not self.inside:
            life = self._life(params.req)
            if hasattr(result, "device_indices"):
                slots = result.device_indices
            else:
                slots = self.cache.path_device_indices(result.last_device_node)[: result.device_prefix_len]
            self._look(life, slots, result.last_device_node)
        return result

    def _locked(self, gains: bool, call: Callable[..., Any], node: Any, *args: Any, **kwargs: Any) -> Any:
        """A lock comes or goes: by how much each node's counts change says what it was worth."""
        before = [(n, self.tree.locks(n), self.tree.pages(n)) for n in self.tree.way(node)]
        with self._call():
            result = call(node, *args, **kwargs)
            changed = [Counter[int](), Counter[int]()]
            for n, locks, pages in reversed(before):
                now = self.tree.locks(n)
                for group in (FULL, WINDOW):
                    change = now[group] - locks[group]
                    if change:
                        changed[group].update({p: change for p in pages[group] if p})
                    legal = self.tree.states or self.rules.locked_tombstones or all(pages[group])
                    if change > 0 and not legal:
                        self.sink(ev.Pin("tombstone", self.names[group], self.tree.free()[group][:1]))
            if gains:
                self._gain(node, changed)
            else:
                self._lose(node, changed, args[0] if args else kwargs.get("params"))
        return result

    def _gain(self, node: Any, gained: list[Counter[int]]) -> None:
        life = next((one for one in self.inside if one is not None), None)
        self.count += 1
        lock = Lock(f"lock{self.count}", node, gained)
        if life is not None:
            life.locks.append(lock)
            return
        self.locks.append(lock)
        for group in (FULL, WINDOW):
            if gained[group]:
                self.sink(ev.Pin(lock.name, self.names[group], list(gained[group])))

    def _lose(self, node: Any, lost: list[Counter[int]], receipt: Any) -> None:
        """The lock that goes: of the request whose call or receipt this is, else one of nobody's."""
        own = [one for one in self.inside if one is not None]
        own += [
            one for one in self.lives.values() if one.ending or (receipt is not None and receipt_of(one.req) is receipt)
        ]
        places = [one.locks for one in own] or [self.locks, *(one.locks for one in self.lives.values())]
        for place in places:
            for lock in reversed(place):
                if lock.node != node:
                    continue
                for group in (FULL, WINDOW):
                    gone = [p for p, n in lost[group].items() for _ in range(-n)]
                    lock.pages[group].subtract(gone)
                    lock.pages[group] += Counter()
                    if place is self.locks and gone:
                        self.sink(ev.Unpin(lock.name, self.names[group], gone))
                if not any(lock.pages):
                    place.remove(lock)
                return

    def _over(self, call: Callable[..., Any], req: Any) -> Any:
        """A request's row goes back: the end of a life, or of its memory."""
        life = self._life(req)
        with self._call(life):
            result = call(req)
        self._complete(life)
        name, over, aborted = req.rid, req.finished(), "ABORT" in type(req.finished_reason).__name__
        self.sink(ev.Abort(name) if aborted else ev.Finish(name) if over else ev.Preempt(name))
        life.ending = life.running = False
        self._let_go(life, self._kept(life))
        del self.lives[name]
        if not over:
            self.lives[name] = Life(req, life.told, locks=life.locks)
        self._balance()
        return result

    def dropped(self, req: Any) -> None:
        """A request that never computed was given up."""
        if self.lives.pop(req.rid, None) is not None:
            self.sink(ev.Abort(req.rid))

    def cleared(self) -> None:
        """The tree was reset and its pools were cleared."""
        self._settle()

    # -- requests --------------------------------------------------------------------------------------------------

    def _tokens(self, req: Any) -> list[int]:
        return [*req.origin_input_ids, *req.output_ids]

    def _ids(self, tokens: list[int], lo: int = 0) -> list[int]:
        size = self.page
        return [hash(tuple(tokens[i : i + size])) for i in range(lo - lo % size, len(tokens) - size + 1, size)]

    def _life(self, req: Any) -> Life:
        life = self.lives.get(req.rid)
        if life is None:
            tokens = self._tokens(req)
            self.sink(ev.Arrive(req.rid, len(tokens), self._ids(tokens), domain_of(req)))
            life = self.lives[req.rid] = Life(req, len(tokens))
        return life

    def _progress(self, life: Life) -> None:
        tokens = self._tokens(life.req)
        if len(tokens) > life.told:
            self.sink(ev.Accept(life.req.rid, len(tokens), self._ids(tokens, life.told)))
            life.told = len(tokens)

    def _look(self, life: Life, slots: Any, node: Any) -> None:
        life.used = len(slots)
        if self.tree.states:
            ends = [self.tree.pages(n)[STATE][-1] for n in self.tree.way(node)[:1]]
            second = [*[0] * (life.used - 1), *ends]
            life.state = ends[0] if ends else 0
        else:
            second = self.tree.window(slots)
        found = dict(zip(self.names, (self.tree.paged(slots), second), strict=True))
        blocks = {name: pages for name, pages in found.items() if any(pages)}
        self.sink(ev.Lookup(life.req.rid, life.used, blocks=blocks))

    def began(self, req: Any, lo: int, hi: int) -> None:
        """The caller dispatches a step that computes the tokens [lo, hi) of a request, whose row has their slots."""
        life = self._life(req)
        self._progress(life)
        first = not life.running
        if first:
            self._adopt(life)
        life.running = True
        self._take(life, lo)
        reads = []
        for group, need in enumerate(self.needs):
            low = need.need(lo, lo)[0]
            if lo > low and (first or (low and not need.exact)):
                low -= low % self.page
                pages = [life.state] if need.exact else self._row(req, group, low, lo)
                reads.append(ev.Span(need.name, pages, low, lo))
        self._dispatch(life, lo, hi, reads)
        self._balance()

    def ended(self, req: Any) -> None:
        """The step of a request is done."""
        self._complete(self._life(req))

    def _complete(self, life: Life) -> None:
        if life.step:
            self.sink(ev.Complete(life.step))
        life.step = ""

    def _dispatch(self, life: Life, lo: int, hi: int, reads: list[ev.Span]) -> None:
        self.count += 1
        life.step, life.sent = f"{life.req.rid}#{self.count}", hi
        down = lo - lo % self.page
        writes = [ev.Span(self.names[g], self._row(life.req, g, down, hi), lo, hi) for g in (FULL, WINDOW)]
        self.sink(ev.Dispatch(life.step, life.req.rid, reads, writes))

    def _adopt(self, life: Life) -> None:
        """The lock that was taken for a request becomes its own."""
        lock = next((one for one in reversed(self.locks) if one.node == life.req.last_node), None)
        if lock is not None:
            self.locks.remove(lock)
            life.locks.append(lock)
            self._pin(life)
            for group in (FULL, WINDOW):
                if lock.pages[group]:
                    self.sink(ev.Unpin(lock.name, self.names[group], list(lock.pages[group])))

    def _pin(self, life: Life) -> None:
        for group in (FULL, WINDOW):
            pages = [p for lock in life.locks for p in lock.pages[group] if p not in life.held[group]]
            if pages:
                self.sink(ev.Pin(life.req.rid, self.names[group], pages))
                life.held[group] |= dict.fromkeys(pages, 0)

    def _take(self, life: Life, begin: int) -> None:
        """New pages of the request's own part of its row, and its state, which begins where its step does."""
        lo, hi = life.req.kv.cache_protected_len, life.req.kv.kv_allocated_len
        if self.tree.states:
            self._take_state(life, int(life.req.kv.mamba_pool_idx), begin)
        for group in (FULL, WINDOW):
            for place, page in enumerate(() if self._is_state(group) else self._row(life.req, group, lo, hi)):
                if page and page not in life.held[group]:
                    self.sink(ev.Allocate(life.req.rid, self.names[group], [page], lo + place * self.page))
                    life.held[group][page] = 0

    def _take_state(self, life: Life, slot: int, at: int) -> None:
        if slot not in life.held[STATE]:
            self.sink(ev.Allocate(life.req.rid, self.names[STATE], [slot], at))
            life.held[STATE][slot] = 0

    # -- what can be seen ------------------------------------------------------------------------------------------

    def _is_state(self, group: int) -> bool:
        return self.tree.states and group == STATE

    def _row(self, req: Any, group: int, lo: int, hi: int) -> list[int]:
        """The pages of [lo, hi) of a request's row; ``lo`` begins a page."""
        if req.kv.req_pool_idx is None or hi <= lo:
            return []
        if self.tree.states and group == STATE:
            return [int(req.kv.mamba_pool_idx)] if req.kv.mamba_pool_idx is not None else []
        slots = self.rows.req_to_token[req.kv.req_pool_idx, lo:hi]
        return self.tree.paged(slots) if group == FULL else self.tree.window(slots)

    def _kept(self, life: Life) -> list[set[int]]:
        """What a request holds: what its locks count on, and its own part of its row."""
        kept = []
        for group in (FULL, WINDOW):
            pages = {p for lock in life.locks for p in lock.pages[group]}
            if life.running:
                lo = 0 if self._is_state(group) else life.req.kv.cache_protected_len
                pages |= set(self._row(life.req, group, lo, life.req.kv.kv_allocated_len))
            kept.append(pages - {0})
        return kept

    def _let_go(self, life: Life, kept: list[set[int]]) -> None:
        for group in (FULL, WINDOW):
            if gone := [p for p in life.held[group] if p not in kept[group]]:
                self.sink(ev.Free(life.req.rid, self.names[group], gone[::-1]))
                for page in gone:
                    del life.held[group][page]

    def _settle(self) -> None:
        """Tells what a call did: entries that came and went, then what each request holds."""
        now = self.tree.entries()
        came = [
            [e for k, e in new.items() if k not in old or old[k].page != e.page]
            for new, old in zip(now, self.named, strict=True)
        ]
        went = [
            [e for k, e in old.items() if k not in new or new[k].page != e.page]
            for new, old in zip(now, self.named, strict=True)
        ]
        for group in (WINDOW, FULL):
            if gone := sorted(went[group], key=lambda e: -e.depth):
                self.sink(ev.KeyRemove(self.names[group], [str(e.key) for e in gone], [e.page for e in gone]))
        if self.tree.states:
            self._copied(came[STATE])
        self._come(came)
        self.named = now
        for life in list(self.lives.values()):
            if life.running and not life.ending:
                kept = self._kept(life)
                if any(kept[g] - life.held[g].keys() for g in (FULL, WINDOW)):
                    self._look_again(life)
                else:
                    self._let_go(life, kept)
        self._balance()

    def _copied(self, came: list[Entry]) -> None:
        """States that a request copied for the tree: a new slot each, written up to the request's position."""
        for e in came:
            life = self.storing
            if life is not None and e.page not in life.held[STATE]:
                self._take_state(life, e.page, e.depth)
                self.count += 1
                write = ev.Span(self.names[STATE], [e.page], e.depth, e.depth + 1)
                self.sink(ev.Dispatch(f"copy{self.count}", life.req.rid, [], [write]))
                self.sink(ev.Complete(f"copy{self.count}"))

    def _come(self, came: list[list[Entry]]) -> None:
        for group in (FULL, WINDOW):
            chain: list[Entry] = []
            for e in sorted(came[group], key=lambda e: e.depth):
                if chain and chain[-1].key != e.parent:
                    self._publish(group, chain)
                    chain = []
                chain.append(e)
            self._publish(group, chain)

    def _publish(self, group: int, chain: list[Entry]) -> None:
        if chain:
            keys, above = [str(e.key) for e in chain], str(chain[0].parent or "")
            self.sink(ev.KeyPublish(self.names[group], keys, [e.page for e in chain], parent=above))

    def _look_again(self, life: Life) -> None:
        """The tree's pages in place of the request's own."""
        req, sent = life.req, life.sent
        self._complete(life)
        self.sink(ev.Preempt(req.rid))
        self._let_go(life, [set(), set()])
        lo = req.kv.cache_protected_len
        self._look(life, self.rows.req_to_token[req.kv.req_pool_idx, :lo].long(), req.last_node)
        self._pin(life)
        self._take(life, lo)
        if sent > lo:
            self._dispatch(life, lo, sent, [])
            self._complete(life)

    def _balance(self) -> None:
        """Free and used pages of each pool; a page that is free and still held or named is told as evicted."""
        if self.inside or self.slots.free_group is not None or any(one.ending for one in self.lives.values()):
            return
        for group, free in enumerate(self.tree.free()):
            used = {e.page for e in self.named[group].values()}
            kept = 0
            for life in self.lives.values():
                used |= life.held[group].keys()
                kept += self._is_state(group) and not life.running and life.req.kv.mamba_pool_idx is not None
            if lost := used.intersection(free):
                self.sink(ev.Evict(self.names[group], sorted(lost)))
            room = self.header.groups[group].capacity - 1
            self.sink(
                ev.Measure("pool", self.names[group], free=len(free), used=len(used), reserved=kept, capacity=room)
            )
