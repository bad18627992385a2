"""Steps: what a request writes and reads, dispatched and completed apart, and drafts that are accepted or refused."""

from collections.abc import Iterator
from typing import Any

from hybridkv_ref.events import Accept, Complete, Dispatch, Draft, Reject, Span
from hybridkv_ref.oracle_blocks import Blocks
from hybridkv_ref.oracle_entities import Lease, Record
from hybridkv_ref.oracle_hits import Hits
from hybridkv_ref.oracle_records import Block, GroupState, Request
from hybridkv_ref.oracle_state import State


class Ran:
    """What a step used of one group: blocks with the leases of its request, whose record is ``record``."""

    __slots__ = ("blocks", "group", "leases", "record", "wrote")

    def __init__(self, group: GroupState, record: Record, wrote: bool) -> None:
        self.group, self.record, self.wrote = group, record, wrote
        self.blocks: list[Block] = []
        self.leases: list[Lease] = []


class Steps:
    """Steps in flight by name; ``windows`` are those that layers declared, ``replays`` graphs that run in a step."""

    def __init__(self, state: State, hits: Hits, blocks: Blocks) -> None:
        self.state, self.hits, self.writes, self.make = state, hits, blocks.writes, state.make
        self.on = {name: state.bind(name) for name in ("dispatch", "complete", "accept", "reject")}
        self.steps: dict[str, list[Ran]] = {}
        self.at: dict[str, int] = {}
        self.replays: dict[str, list[Any]] = {}
        self.windows: dict[int, int] = {}
        self.kept = next(e for e in state.tables.events if e.row == "write_on").edges["lease"][0][0]

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
        name = None
        for span in spans:
            if span.group != name:
                name = span.group
                g = state.named(name)
            right = True
            space, unit, ratio = span.space == "group", span.unit, g.ratio
            index_type.count += 1
            if (index := index_type.sys1(pool, space)) >= 0:
                right = state.refuse(index_type, index, (space,), span.group)
            token, group, entry = unit == "token", unit == "group", unit == "entry"
            length_unit.count += 1
            if (index := length_unit.sys4(pool, token, group, entry, ratio)) >= 0:
                right = state.refuse(length_unit, index, (token, group, entry, ratio), span.group)
            if span.window >= 0:
                declared = self.windows.get(span.layer, g.spec.window if span.layer < 0 and g.spec.window else -1)
                if declared >= 0:
                    right = state.fire(other["own_window"], span.window, declared, segment=span.group) and right
            if span.layout and g.spec.layout:
                right = (
                    state.fire(other["same_layout"], int(span.layout != g.spec.layout), segment=span.group) and right
                )
            if right:
                yield span, g

    def write(self, spans: list[Span], request: Request, ran: list[Ran]) -> None:
        """Appends the tokens of spans to their blocks."""
        state, record, null, uid, make = self.state, request.record, self.state.header.null, request.uid, self.make
        on, pool, device = self.on["dispatch"], state.pool, state.device
        confirm, drafts, last, kept = on.other["confirm"], request.drafts, None, self.kept
        inside = on.other["write_inside"]
        for span, g in self.right(spans):
            if g is not last:
                last, rows, size, held, states = g, on.group[g.index], g.block, device.blocks[g.index], g.states
                append, issue = rows["append"], rows["dispatch"]
            part = Ran(g, record, wrote=True)
            ran.append(part)
            used, leases = part.blocks, part.leases
            lo, hi, numbers, end = span.lo, span.hi, span.blocks, 0
            if span.unit == "entry":
                lo, hi = lo * g.ratio, hi * g.ratio
            if (to := hi - drafts) > record.accepted:
                state.hidden += 1
                confirm.count += 1
                if (index := confirm.req1(pool, record, to)) >= 0:
                    state.refuse(confirm, index, (record, to), "")
            for number, block in zip(numbers, map(held.get, numbers)):  # noqa: B905 (mypyc)
                if number == null or (block := block or state.unnamed(device, g, number)) is None:
                    continue
                seg, lease = block.segment, block.lease_of(uid) or make.lease()
                if lease.stage == kept and not state.fire(
                    rows["write_on"], seg, lease, record, segment=(span.group, number)
                ):
                    state.lose(device, g, block)
                    continue
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
                if (index := append.lease2(pool, seg, lease, record, at, count)) >= 0:
                    state.refuse(append, index, (seg, lease, record, at, count), (span.group, number))
                    state.lose(device, g, block)
                    continue
                issue.count += 1
                if (index := issue.lease1(pool, seg, lease, record, seg.end)) >= 0:
                    state.refuse(issue, index, (seg, lease, record, seg.end), (span.group, number))
                    state.lose(device, g, block)
                    continue
                used.append(block)
                leases.append(lease)
            if hi and end and not states and number != null:
                inside.count += 1
                if (index := inside.sys2(pool, hi, end)) >= 0:
                    state.refuse(inside, index, (hi, end), span.group)
            if hi > request.at:
                request.at = hi

    def read(self, spans: list[Span], request: Request, ran: list[Ran]) -> None:
        """The blocks that a step reads, each up to where the span reaches."""
        state, record, null, uid, make = self.state, request.record, self.state.header.null, request.uid, self.make
        on, pool, device = self.on["dispatch"], state.pool, state.device
        inside = on.other["read_inside"]
        for span, g in self.right(spans):
            issue, size, held = on.group[g.index]["dispatch"], g.block, device.blocks[g.index]
            part = Ran(g, record, wrote=False)
            ran.append(part)
            used, leases = part.blocks, part.leases
            scale = g.ratio if span.unit == "entry" else 1
            lo, hi, last = span.lo * scale, span.hi * scale, 0
            if hi and not g.states and null in span.blocks:
                self.nulls(g, span.blocks, lo, g.low(hi))
            for number, block in zip(span.blocks, map(held.get, span.blocks)):  # noqa: B905 (mypyc)
                if number == null or (block := block or state.unnamed(device, g, number)) is None:
                    continue
                seg, lease = block.segment, block.lease_of(uid) or make.lease()
                end = seg.start + size
                upto = end if hi > end else hi
                if not hi:
                    upto = seg.end
                if end > last:
                    last = end
                issue.count += 1
                if (index := issue.lease1(pool, seg, lease, record, upto)) < 0:
                    used.append(block)
                    leases.append(lease)
                else:
                    state.refuse(issue, index, (seg, lease, record, upto), (span.group, number))
                    state.lose(device, g, block)
            if hi and last and not g.states:
                inside.count += 1
                if (index := inside.sys2(pool, hi, last)) >= 0:
                    state.refuse(inside, index, (hi, last), span.group)

    def nulls(self, g: GroupState, blocks: list[int], lo: int, low: int) -> None:
        """Null blocks among those that a step reads from ``lo`` on."""
        size, row = g.spec.block, self.on["dispatch"].other["null_unread"]
        for place, number in enumerate(blocks):
            if number == self.state.header.null:
                self.state.fire(row, lo - lo % size + (place + 1) * size, low, segment=g.spec.name)

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
        pool = state.pool
        for part in ran or ():
            g, record, rows, wrote = part.group, part.record, on.group[part.group.index], part.wrote and e.ok
            written, done = rows["written"], rows["complete"]
            for block, lease in zip(part.blocks, part.leases):  # noqa: B905 (mypyc)
                seg = block.segment
                if wrote:
                    written.count += 1
                    if (index := written.lease0(pool, seg, lease, record)) >= 0:
                        state.refuse(written, index, (seg, lease, record), (g.name, block.number))
                done.count += 1
                if (index := done.lease0(pool, seg, lease, record)) >= 0:
                    state.refuse(done, index, (seg, lease, record), (g.name, block.number))

    # -- drafts ----------------------------------------------------------------------------------------------------

    def draft(self, e: Draft) -> None:
        """The next written tokens are drafts."""
        self.state.request(e.req).drafts = e.tokens

    def accept(self, e: Accept) -> None:
        """The target model confirmed tokens."""
        state, request = self.state, self.state.request(e.req)
        if request.lost or not self.hits.settle(request):
            return
        drafts, request.drafts = request.drafts, 0
        if e.ids:
            request.extend(e.ids)
        if drafts:
            at = max(request.at, request.record.accepted, request.length)
            if not state.fire(self.on["accept"].other["accepts_written"], e.to, at, segment=e.req):
                return
        if e.to > request.record.accepted:
            state.fire(self.on["accept"].other["confirm"], request.record, e.to, segment=e.req)

    def reject(self, e: Reject) -> None:
        """Tokens are given up: the rows of each block that holds some of them."""
        state, request, on = self.state, self.state.request(e.req), self.on["reject"]
        if request.lost or not self.hits.settle(request):
            return
        request.drafts = 0
        if not state.fire(on.other["only_back"], e.to, max(request.at, request.record.accepted), segment=e.req):
            return
        if e.at >= 0:
            state.fire(on.other["truncated"], e.at, e.to, segment=e.req)
        if e.low >= 0:
            g = state.named(e.group)
            state.fire(on.other["still_held"], g.low(e.to), e.low, segment=(e.group, e.req))
        for g in state.groups:
            self.held(g, request, e.to)
            reject = on.group[g.index]["reject_drafts"]
            for block in [b for b in state.device.blocks[g.index].values() if b.writer is request]:
                seg, lease = block.segment, block.lease_of(request.uid)
                if lease is not None and lease.stage in self.writes and seg.end > e.to and seg.end > seg.start:
                    to = max(e.to, seg.start)
                    state.fire(reject, seg, lease, request.record, to, segment=(g.spec.name, block.number))
        request.at = min(request.at, e.to)

    def held(self, g: GroupState, request: Request, to: int) -> None:
        """What a group that keeps no whole history needs at ``to`` is in blocks that the request still holds."""
        state, low, held = self.state, g.low(to), to
        if not low or state.device.lost[g.index]:
            return
        own = [b.segment for b in state.device.blocks[g.index].values() if b.lease_of(request.uid) is not None]
        for seg in sorted(own, key=lambda seg: -seg.start):
            if seg.start < held <= seg.end:
                held = seg.start
        if own:
            state.fire(self.on["reject"].other["still_held"], low, held, segment=(g.spec.name, request.name))
