"""Steps: what a request writes and reads, dispatched and completed apart, and drafts that are accepted or refused."""

from collections.abc import Iterator
from typing import Any

from hybridkv_ref.events import Accept, Complete, Dispatch, Draft, Reject, Span
from hybridkv_ref.oracle_blocks import Blocks
from hybridkv_ref.oracle_hits import Hits
from hybridkv_ref.oracle_records import Block, GroupState, Request
from hybridkv_ref.oracle_state import State

Ran = tuple[GroupState, Block, Any, Any, bool]
"""What a step used: group, block, lease, record, whether it wrote."""


class Steps:
    """Steps in flight by name; ``windows`` are those that layers declared, ``replays`` graphs that run in a step."""

    def __init__(self, state: State, hits: Hits, blocks: Blocks) -> None:
        self.state, self.hits, self.writes, self.lease = state, hits, blocks.writes, state.lease
        self.on = {name: state.bind(name) for name in ("dispatch", "complete", "accept", "reject")}
        self.steps: dict[str, list[Ran]] = {}
        self.at: dict[str, int] = {}
        self.replays: dict[str, list[Any]] = {}
        self.windows: dict[int, int] = {}

    def dispatch(self, e: Dispatch) -> None:
        """A step: writes first, since a token attends to itself."""
        state, request = self.state, self.state.request(e.req)
        on, ran = self.on["dispatch"], self.steps.setdefault(e.step, [])
        if request.lost or not self.hits.settle(request):
            state.skipped += 1
            return
        starts, at = list(e.starts.items()), e.at
        if at < 0 and starts:
            at = starts.pop(0)[1]
        for name, start in starts:
            state.fire(on.other["same_start"], at, start, segment=name)
        if e.at >= 0:
            self.at[e.step] = e.at
        if request.cold and e.writes:
            request.cold = False
            start = min(span.lo for span in e.writes)
            if not state.fire(on.other["from_the_start"], start, segment=e.req):
                state.lose_request(request)
                return
        self.write(e.writes, request, ran)
        self.read(e.reads, request, ran)

    def right(self, spans: list[Span]) -> Iterator[tuple[Span, GroupState]]:
        """The spans whose indices are what they should be, each with its group."""
        state, other = self.state, self.on["dispatch"].other
        index_type, length_unit, pool = other["index_type"], other["length_unit"], state.pool
        type_call, unit_call, name = index_type.call, length_unit.call, None
        for span in spans:
            if span.group != name:
                name = span.group
                g = state.named(name)
            right = True
            space, unit, ratio = span.space == "group", span.unit, g.spec.ratio
            index_type.count += 1
            if (index := type_call(pool, space)) >= 0:
                right = state.refuse(index_type, index, (space,), span.group)
            token, group, entry = unit == "token", unit == "group", unit == "entry"
            length_unit.count += 1
            if (index := unit_call(pool, token, group, entry, ratio)) >= 0:
                right = state.refuse(length_unit, index, (token, group, entry, ratio), span.group)
            if span.window >= 0 and span.layer in self.windows:
                windows = (span.window, self.windows[span.layer])
                right = state.fire(other["own_window"], *windows, segment=span.group) and right
            if span.layout and g.spec.layout:
                right = (
                    state.fire(other["same_layout"], int(span.layout != g.spec.layout), segment=span.group) and right
                )
            if right:
                yield span, g

    def write(self, spans: list[Span], request: Request, ran: list[Ran]) -> None:
        """Appends the tokens of spans to their blocks."""
        state, record, null, uid, make = self.state, request.record, self.state.header.null, request.uid, self.lease
        on, pool, device = self.on["dispatch"], state.pool, state.device
        confirm, drafts, last = on.other["confirm"], request.drafts, None
        confirm_call = confirm.call
        for span, g in self.right(spans):
            if g is not last:
                last, rows, size, held, states = g, on.group[g.index], g.spec.block, device.blocks[g.index], g.states
                append, issue = rows["append"], rows["dispatch"]
                append_call, issue_call = append.call, issue.call
            lo, hi, numbers = span.lo, span.hi, span.blocks
            if span.unit == "entry":
                lo, hi = lo * g.spec.ratio, hi * g.spec.ratio
            if (to := hi - drafts) > record.accepted:
                state.hidden += 1
                confirm.count += 1
                if (index := confirm_call(pool, record, to)) >= 0:
                    state.refuse(confirm, index, (record, to), "")
            for number in numbers:
                if number == null or (block := held.get(number) or state.unnamed(device, g, number)) is None:
                    continue
                seg = block.segment
                lease = block.leases.get(uid) or make()
                start = seg.start
                end = start + size
                if not hi:
                    at, count = seg.end, end - seg.end
                else:
                    at = lo if lo > start else start
                    # A state stands for all tokens up to its position: the last block of the span has the step's.
                    count = (hi if hi < end or (states and number == numbers[-1]) else end) - at
                # Spelled out for speed, as in oracle_blocks.
                append.count += 1
                if (index := append_call(pool, seg, lease, record, at, count)) >= 0:
                    state.refuse(append, index, (seg, lease, record, at, count), (span.group, number))
                    state.lose(device, g, block)
                    continue
                issue.count += 1
                if (index := issue_call(pool, seg, lease, record, seg.end)) >= 0:
                    state.refuse(issue, index, (seg, lease, record, seg.end), (span.group, number))
                    state.lose(device, g, block)
                    continue
                ran.append((g, block, lease, record, True))
            if hi > request.at:
                request.at = hi

    def read(self, spans: list[Span], request: Request, ran: list[Ran]) -> None:
        """The blocks that a step reads, each up to where the span reaches."""
        state, record, null, device = self.state, request.record, self.state.header.null, self.state.device
        for span, g in self.right(spans):
            issue, size = self.on["dispatch"].group[g.index]["dispatch"], g.spec.block
            hi, last = span.hi * (g.spec.ratio if span.unit == "entry" else 1), 0
            for number in span.blocks:
                block = state.block(device, g, number) if number != null else None
                if block is None:
                    continue
                seg, lease = block.segment, block.leases.get(request.uid) or self.lease()
                upto = seg.end if not hi else min(hi, seg.start + size)
                last = max(last, seg.start + size)
                if state.fire(issue, seg, lease, record, upto, segment=(span.group, number)):
                    ran.append((g, block, lease, record, False))
                else:
                    state.lose(device, g, block)
            if hi and last and not g.states:
                state.fire(self.on["dispatch"].other["read_inside"], hi, last, segment=span.group)

    def complete(self, e: Complete) -> None:
        """A step is done; a step that failed has confirmed no write."""
        state, on = self.state, self.on["complete"]
        ran = self.steps.pop(e.step, None)
        replayed = self.replays.pop(e.step, ())
        for graph in replayed:
            state.fire(on.other["replayed"], graph, segment=e.step)
        if not state.fire(on.other["known_step"], ran is not None or bool(replayed), segment=e.step):
            return
        at = self.at.pop(e.step, -1)
        if e.at >= 0 and at >= 0:
            state.fire(on.other["step_position"], e.at, at, segment=e.step)
        pool, ok, last = state.pool, e.ok, None
        for g, block, lease, record, wrote in ran or ():
            if g is not last:
                last, rows = g, on.group[g.index]
                written, done = rows["written"], rows["complete"]
                written_call, done_call = written.call, done.call
            seg = block.segment
            if wrote and ok:
                written.count += 1
                if (index := written_call(pool, seg, lease, record)) >= 0:
                    state.refuse(written, index, (seg, lease, record), (g.spec.name, block.number))
            done.count += 1
            if (index := done_call(pool, seg, lease, record)) >= 0:
                state.refuse(done, index, (seg, lease, record), (g.spec.name, block.number))

    # -- drafts ----------------------------------------------------------------------------------------------------

    def draft(self, e: Draft) -> None:
        """The next written tokens are drafts."""
        self.state.request(e.req).drafts = e.tokens

    def accept(self, e: Accept) -> None:
        """The target model confirmed tokens."""
        state, request = self.state, self.state.request(e.req)
        if request.lost or not self.hits.settle(request):
            return
        request.drafts = 0
        if e.ids:
            request.extend(e.ids)
        if e.to > request.record.accepted:
            state.fire(self.on["accept"].other["confirm"], request.record, e.to, segment=e.req)

    def reject(self, e: Reject) -> None:
        """Tokens are given up: the rows of each block that holds some of them."""
        state, request, on = self.state, self.state.request(e.req), self.on["reject"]
        if request.lost or not self.hits.settle(request):
            return
        request.drafts = 0
        if e.at >= 0:
            state.fire(on.other["truncated"], e.at, e.to, segment=e.req)
        if e.low >= 0:
            g = state.named(e.group)
            state.fire(on.other["still_held"], g.low(e.to), e.low, segment=(e.group, e.req))
        for g in state.groups:
            reject = on.group[g.index]["reject_drafts"]
            for block in [b for b in state.device.blocks[g.index].values() if b.writer is request]:
                seg, lease = block.segment, block.leases.get(request.uid)
                if lease is not None and lease.stage in self.writes and seg.end > e.to and seg.end > seg.start:
                    to = max(e.to, seg.start)
                    state.fire(reject, seg, lease, request.record, to, segment=(g.spec.name, block.number))
        request.at = min(request.at, e.to)
