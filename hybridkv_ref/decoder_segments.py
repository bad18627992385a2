"""One request's state in the allocator's segments: where the decoder finds its rows, and the rows of the tables that
make room for a step, begin and end its folds, accept what is confirmed and give up what is refused.

What a step of the decoder is to the tables::

    decoder                              allocator                                  row
    first token after a hit              handoffs.resume(snapshot)                  clone_begin, clone_end, reopen
    first token from scratch             writer.allocate                            admit
    the next grid unit                   writer.allocate, per group                 admit
    rows of a window, a tail, a state    writer.append                              append
    a step reads what it holds           book.dispatch, book.complete               dispatch, complete
    RATIO rows become an entry           handoffs.fold_begin, fold_end              fold_begin, fold_end
    a draft's recurrent state            handoffs.resume(running state)             clone_begin, clone_end, reopen
    tokens are accepted                  allocator.confirm, writer.accept           confirm, accept_tokens
    drafts are refused                   handoffs.unfold, writer.give_up            unfold, reject_drafts, cancel, abort
    a grid unit is complete              writer.commit, handoffs.clone              commit; clone_begin, clone_end
    no later token needs a segment       writer.let_go_before                       let_go

A step never crosses the end of an entry or of a grid unit, so that one fold at most per tail runs in it.  A recurrent
state is never rewound: every draft has a copy of its own of the committed state, of which the accepted one goes on.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hybridkv_ref.allocator import CacheSegment, GroupGeometry, HeterogeneousAllocator, Lease, Request
from hybridkv_ref.allocator.handoffs import Fold
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_state import Operation, Rows, copy_rows


class Segments:
    """The segments of a running request, as the decoder's state; ``position``: tokens that are committed.

    A hit at ``start`` with entries cached up to ``frontier`` is being read: tokens between the two are computed again.
    """

    def __init__(
        self, decoder: Decoder, allocator: HeterogeneousAllocator, request: Request, start: int, frontier: int
    ) -> None:
        self._decoder, self._allocator, self._request = decoder, allocator, request
        self._groups = allocator.geometry.groups
        self._unit = allocator.geometry.unit
        self._running: dict[int, CacheSegment] = {}  # by group: the tail or state that goes on
        self._drafts: dict[int, dict[int, CacheSegment]] = {}  # by group and position: states of drafts
        self._tables: dict[tuple[int, str], Rows] = {}
        self.position, self._frontier = start, frontier
        for group in self._groups:
            if group.exact:
                self._running[group.index] = self._begin(group)

    # ---- What the decoder reads and writes ----

    def rows(self, layer: int, group: str) -> Rows:
        """The rows of ``group`` in ``layer``, for the step that has begun."""
        return self._tables[layer, group]

    def begins(self, layer: int) -> int:
        """0: a hit is full, so every row that a query may see is there."""
        return 0

    def writes_from(self, group: str) -> int:
        """The end of what the hit's segments hold: they are whole grid units, and nobody writes in what is cached."""
        return max((s.token_range[1] for s in self._hit_of(self._allocator.geometry.group(group))), default=0)

    def operation(self, row: Operation, group: str) -> Callable[..., Tensor]:
        """The operation that this row of the tables names."""
        ledger, rows = self._allocator.ledger, self._allocator.geometry.group(group)
        if row == "append":
            return ledger.kernel(ledger.event_id(rows.kind, row))
        return ledger.kernel(ledger.handoff_id(row, rows.kind, self._groups[rows.cache].kind))

    # ---- One step ----

    def next_cut(self, at: int) -> int:
        """The first position after ``at`` at which an entry or a grid unit ends."""
        ratios = {group.group.ratio for group in self._groups if group.group.ratio}
        return min(at - at % step + step for step in {*ratios, self._unit})

    def branch(self, drafts: int) -> None:
        """So many tokens come that may be refused: a copy of every committed state for each of them."""
        for group in self._groups:
            if group.whole:
                source = self._running[group.index]
                self._drafts[group.index] = {
                    self.position + n: self._allocator.handoffs.resume(source, self._request)
                    if source.token_range[1]
                    else self._allocate(group, (0, 1))
                    for n in range(1, drafts + 1)
                }

    def begin(self, at: int, to: int) -> tuple[list[Fold], list[Lease]]:
        """A step over tokens [at, to) begins: its rows have places, its folds hold what they read.

        Refused where memory is needed and nothing can make way; then no fold has begun.
        """
        writer = self._allocator.writer
        for group in self._groups:
            if group.whole:
                self._append_states(group, at, to)
            elif group.exact:
                self._append_rows(self._running[group.index], to)
            elif to > (self.writes_from(group.name) if group.group.shape == "window" else self._frontier):
                segment = self._unit_of(group, at) or self._allocate(group, self._span(at))
                if group.group.shape == "window":
                    writer.append(segment, self._request, to - at)
        leases = [one for one in self._leases() if self._allocator.ledger.has(one.segment.kind, "dispatch")]
        folds: list[Fold] = []
        try:
            for tail in self._groups:
                if tail.cache != tail.index and to % (tail.group.ratio or 1) == 0 and to > self._frontier:
                    entries = self._unit_of(self._groups[tail.cache], at)
                    if entries is not None:
                        folds.append(self._allocator.handoffs.fold_begin(self._running[tail.index], entries))
            self._allocator.book.dispatch(leases)
        except BaseException:
            self.end((folds, []), failed=True)
            raise
        self._place(at)
        return folds, leases

    def end(self, begun: tuple[list[Fold], list[Lease]], failed: bool = False) -> None:
        """The step is done; ``failed``: its folds have made nothing."""
        folds, leases = begun
        for fold in folds:
            self._allocator.handoffs.fold_end(fold, failed)
        self._allocator.complete(leases)

    def _append_rows(self, tail: CacheSegment, to: int) -> None:
        """Rows of a tail; of tokens before the frontier only those that the first fold after it needs."""
        end = tail.token_range[1]
        if to > end:
            self._allocator.writer.append(tail, self._request, to - end)

    def _append_states(self, group: GroupGeometry, at: int, to: int) -> None:
        drafts = self._drafts.get(group.index)
        if not drafts:
            self._allocator.writer.append(self._running[group.index], self._request, to - at)
            return
        for end, segment in drafts.items():
            if at < end <= to:
                self._allocator.writer.append(segment, self._request, end - self.position)

    # ---- After a step ----

    def settle(self, tokens: Sequence[int]) -> None:
        """``tokens``, all from 0 on, are accepted; what was computed besides goes."""
        before, self.position = self.position, len(tokens)
        self._allocator.confirm(self._request, tokens, salt=self._decoder.identity.encode())
        for tail in self._groups:
            if tail.group.shape == "ring":
                self._refuse_rows(tail)
        for lease in list(self._request.writing):
            segment = lease.segment
            if segment.group.group.shape == "window" and segment.token_range[1] > self.position:
                if segment.token_range[0] < self.position:
                    self._allocator.transition(segment, "reject_drafts", request=self._request, to=self.position)
                else:
                    self._allocator.writer.give_up(segment, self._request)
        for group in self._groups:
            if group.whole:
                self._choose(group)
        for lease in list(self._request.writing):
            self._allocator.writer.accept([lease])
        for cut in range(before - before % self._unit + self._unit, self.position + 1, self._unit):
            self._publish(cut)
        self._request.position = self.position

    def _refuse_rows(self, tail: GroupGeometry) -> None:
        """Takes back rows and entries of refused drafts, the last ones first."""
        segment, entries = self._running[tail.index], self._groups[tail.cache]
        position = max(self.position, self._frontier)
        while segment.token_range[1] > position:
            mark = segment.entity.mark
            to = max(position, mark)
            if to < segment.token_range[1]:
                self._allocator.transition(segment, "reject_drafts", request=self._request, to=to)
            if position < mark:
                last = self._unit_of(entries, mark - 1)
                later = self._unit_of(entries, mark)
                if later is not None and later is not last:
                    self._allocator.writer.give_up(later, self._request)
                if last is not None:
                    self._allocator.handoffs.unfold(segment, last)
        for lease in list(self._request.writing):
            if lease.segment.group is entries and lease.segment.token_range[0] > self.position:
                self._allocator.writer.give_up(lease.segment, self._request)

    def _choose(self, group: GroupGeometry) -> None:
        """Of the states of drafts the one at the committed position goes on; those at grid positions before it stay."""
        drafts = self._drafts.pop(group.index, {})
        for end, segment in drafts.items():
            if end == self.position:
                self._allocator.writer.give_up(self._running[group.index], self._request)
                self._running[group.index] = segment
            elif end < self.position and end % self._unit == 0 and self._kept_at(group, end):
                self._allocator.writer.accept([self._allocator.writer.lease_of(segment, self._request)])
                self._commit(segment, end)
            else:
                self._allocator.writer.give_up(segment, self._request)

    def _publish(self, cut: int) -> None:
        """The grid unit that ends at ``cut`` is complete: it can be found, with what resuming there needs."""
        for group in self._groups:
            if not group.exact:
                segment = self._unit_of(group, cut - 1)
                if segment is not None:
                    self._commit(segment, cut)
            elif self._kept_at(group, cut):
                running = self._running[group.index]
                if not group.whole:
                    self._snapshot(group, running, cut)
                elif running.token_range[1] == cut:
                    self._allocator.handoffs.clone(running, self._key(cut))
        self._allocator.writer.let_go_before(self._request, cut)

    def _snapshot(self, group: GroupGeometry, running: CacheSegment, cut: int) -> None:
        """The rows of a tail that resuming at ``cut`` needs, in a segment of their own."""
        lo, hi = group.extent(cut)
        if lo == hi or (lo < running.token_range[0] and cut <= self._frontier):
            return  # nothing is needed there, or it was not computed
        segment = self._allocate(group, (lo, hi))
        self._allocator.writer.append(segment, self._request, hi - lo)
        for source, target in zip(self._layers(group, running), self._layers(group, segment), strict=True):
            copy_rows(source, range(lo, hi), target, range(hi - lo))
        self._allocator.writer.accept([self._allocator.writer.lease_of(segment, self._request)])
        self._commit(segment, cut)

    def _commit(self, segment: CacheSegment, cut: int) -> None:
        segment.key = self._key(cut)
        self._allocator.commit(segment, request=self._request)

    def _key(self, cut: int) -> bytes:
        return self._request.keys[cut // self._unit - 1]

    def _kept_at(self, group: GroupGeometry, cut: int) -> bool:
        return self._allocator.writer.snapshot(group, self._request, cut)

    # ---- Segments ----

    def _begin(self, group: GroupGeometry) -> CacheSegment:
        """The tail or state that computing goes on in: a copy of the hit's, or an empty one."""
        ring, (first, _, _) = group.group.ring_rows or 0, group.recovery.need(self.position, self._frontier)
        for segment in self._hit_of(group):
            return self._allocator.handoffs.resume(segment, self._request, ring)
        return self._allocate(group, (0, 1) if group.whole else (first, self._frontier + 1), ring)

    def _hit_of(self, group: GroupGeometry) -> list[CacheSegment]:
        return [lease.segment for lease in self._request.hits if lease.segment.group is group]

    def _allocate(self, group: GroupGeometry, span: tuple[int, int], ring: int = 0) -> CacheSegment:
        return self._allocator.writer.allocate(span, group, self._request, ring=ring)

    def _span(self, at: int) -> tuple[int, int]:
        first = at - at % self._unit
        return first, first + self._unit

    def _unit_of(self, group: GroupGeometry, at: int) -> CacheSegment | None:
        """The segment that the request writes of the grid unit of a position."""
        first = self._span(at)[0]
        for lease in self._request.writing:
            if lease.segment.group is group and lease.segment.token_range[0] == first:
                return lease.segment
        return None

    def _leases(self) -> Iterator[Lease]:
        yield from self._request.hits
        yield from self._request.kept
        yield from self._request.writing

    # ---- Block tables ----

    def _place(self, at: int) -> None:
        """The block tables of a step that begins at ``at``."""
        for group in self._groups:
            if group.whole:
                tables = self._state_tables(group, at)
            elif group.exact:
                tables = self._layers(group, self._running[group.index])
            else:
                tables = self._unit_tables(group)
            for layer, rows in zip(group.group.layer_ids or (), tables, strict=True):
                self._tables[layer, group.name] = rows

    def _arena(self, group: GroupGeometry) -> Tensor:
        return self._allocator.book.arena(group).bytes

    def _layers(self, group: GroupGeometry, segment: CacheSegment) -> list[Rows]:
        """A segment's own rows, per layer."""
        return [Rows(self._arena(group), group.page, table[None], segment.ring) for table in slots_of(segment)]

    def _empty(self, group: GroupGeometry) -> Tensor:
        """int32 [layers, blocks] that reach as far as a request may, every block missing."""
        rows = self._decoder.sizes.reach if group.whole else group.rows(0, self._span(self._decoder.sizes.reach)[1])
        return torch.full((group.layers, -(-rows // group.page.entries)), -1, dtype=torch.int32)

    def _unit_tables(self, group: GroupGeometry) -> list[Rows]:
        table = self._empty(group)
        for lease in self._leases():
            segment = lease.segment
            if segment.group is group:
                first, slots = group.blocks(0, segment.token_range[0]), slots_of(segment)
                table[:, first : first + slots.shape[1]] = slots
        return [Rows(self._arena(group), group.page, one[None].contiguous()) for one in table]

    def _state_tables(self, group: GroupGeometry, at: int) -> list[Rows]:
        """Row p is the state after token p: of the step before, and of those that this one writes."""
        table, running = self._empty(group), self._running[group.index]
        drafts = self._drafts.get(group.index, {})
        states = {self.position: running, **drafts} if drafts else {at: running, running.token_range[1]: running}
        for end, segment in states.items():
            if end:
                table[:, end - 1] = slots_of(segment)[:, 0]
        return [Rows(self._arena(group), group.page, one[None].contiguous()) for one in table]


def slots_of(segment: CacheSegment) -> Tensor:
    """int32 [layers, blocks]; none of a segment that holds no memory."""
    if segment.slots is None:
        return torch.zeros(segment.group.layers, 0, dtype=torch.int32)
    return torch.from_numpy(segment.slots).int()
