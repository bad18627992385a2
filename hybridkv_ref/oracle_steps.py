"""Steps: what a request writes and reads, dispatched and completed apart, and drafts that are accepted or refused."""

from typing import Any

from hybridkv_ref.events import Accept, Complete, Dispatch, Draft, Reject, Span
from hybridkv_ref.oracle_blocks import Blocks
from hybridkv_ref.oracle_entities import Lease, Record
from hybridkv_ref.oracle_hits import Hits
from hybridkv_ref.oracle_records import Block, GroupState, Request
from hybridkv_ref.oracle_row import Row
from hybridkv_ref.oracle_state import State


class StepRows:
    """The rows that a step fires for the blocks of one group."""

    __slots__ = ("append", "complete", "issue", "write_on", "written")

    def __init__(self, dispatch: dict[str, Row], complete: dict[str, Row]) -> None:
        self.append, self.issue, self.write_on = dispatch["append"], dispatch["dispatch"], dispatch["write_on"]
        self.written, self.complete = complete["written"], complete["complete"]


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
        on = self.on = {name: state.bind(name) for name in ("dispatch", "complete", "accept", "reject")}
        self.rows = [StepRows(*rows) for rows in zip(on["dispatch"].group, on["complete"].group, strict=True)]
        # What every step asks is at hand, since a lookup takes as long as a row.
        other = on["dispatch"].other
        self.index_type, self.length_unit, self.confirm = other["index_type"], other["length_unit"], other["confirm"]
        self.write_inside, self.read_inside = other["write_inside"], other["read_inside"]
        self.known_step, self.accepted = on["complete"].other["known_step"], on["accept"].other["confirm"]
        self.steps: dict[str, list[Ran]] = {}
        self.at: dict[str, int] = {}
        self.replays: dict[str, list[Any]] = {}
        self.windows: dict[int, int] = {}
        self.kept = next(e for e in state.tables.events if e.row == "write_on").edges["lease"][0][0]

    def dispatch(self, e: Dispatch) -> None:
        """A step: writes first, since a token attends to itself."""
        state, request = self.state, self.state.request(e.req)
        ran = self.steps.get(step := e.step)
        if ran is None:
            ran = self.steps[step] = []
        if request.lost or not (request.running or self.hits.settle(request)):
            state.skipped += 1
            return
        if (at := self.starts(e)) >= 0:
            self.at[step] = at
        writes = e.writes
        if request.cold and writes:
            request.cold = False
            start = min(span.lo for span in writes)
            if not state.fire(self.on["dispatch"].other["from_the_start"], start, segment=e.req):
                state.lose_request(request)
                return
        self.write(writes, request, ran)
        self.read(e.reads, request, ran)

    def starts(self, e: Dispatch) -> int:
        """The position that a step is told of, which is that of all that start with it; -1 where it is not told."""
        if starts := list(e.starts.items()):
            at = e.at if e.at >= 0 else starts.pop(0)[1]
            for name, start in starts:
                self.state.fire(self.on["dispatch"].other["same_start"], at, start, segment=name)
        return e.at

    def right(self, span: Span, unit: str, g: GroupState) -> bool:
        """The indices of a span are what they should be."""
        state, right, space, ratio = self.state, True, span.space == "group", g.ratio
        row = self.index_type
        row.count += 1
        if (index := row.sys1(state.pool, space)) >= 0:
            right = state.refuse(row, index, (space,), g.name)
        token, group, entry = unit == "token", unit == "group", unit == "entry"
        row = self.length_unit
        row.count += 1
        if (index := row.sys4(state.pool, token, group, entry, ratio)) >= 0:
            right = state.refuse(row, index, (token, group, entry, ratio), g.name)
        if (window := span.window) >= 0:
            declared = self.windows.get(span.layer, g.spec.window if span.layer < 0 and g.spec.window else -1)
            if declared >= 0:
                row = self.on["dispatch"].other["own_window"]
                right = state.fire(row, window, declared, segment=g.name) and right
        if g.layout and span.layout:
            row = self.on["dispatch"].other["same_layout"]
            right = state.fire(row, int(span.layout != g.layout), segment=g.name) and right
        return right

    def write(self, spans: list[Span], request: Request, ran: list[Ran]) -> None:
        """Appends the tokens of spans to their blocks."""
        state, record, null, uid, make = self.state, request.record, self.state.header.null, request.uid, self.make
        pool, device, confirm, inside = state.pool, state.device, self.confirm, self.write_inside
        drafts, kept, groups = request.drafts, self.kept, state.by_name
        for span in spans:
            g, unit = groups.get(span.group) or state.named(span.group), span.unit
            if not self.right(span, unit, g):
                continue
            rows, size, held, states = self.rows[g.index], g.block, device.blocks[g.index], g.states
            near, top = held.near, len(held.near)
            append, issue = rows.append, rows.issue
            part = Ran(g, record, wrote=True)
            ran.append(part)
            used, leases = part.blocks, part.leases
            lo, hi, numbers, end = span.lo, span.hi, span.blocks, 0
            if unit == "entry":
                lo, hi = lo * g.ratio, hi * g.ratio
            if (to := hi - drafts) > record.accepted:
                state.hidden += 1
                confirm.count += 1
                if (index := confirm.req1(pool, record, to)) >= 0:
                    state.refuse(confirm, index, (record, to), "")
            for number in numbers:
                block = near[number] if 0 <= number < top else held.get(number)
                if number == null or (block := block or state.unnamed(held, number)) is None:
                    continue
                seg, lease = block.segment, block.lease_of(uid) or make.lease()
                if lease.stage == kept and not state.fire(rows.write_on, seg, lease, record, segment=(g.name, number)):
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
                    state.refuse(append, index, (seg, lease, record, at, count), (g.name, number))
                    state.lose(device, g, block)
                    continue
                issue.count += 1
                if (index := issue.lease1(pool, seg, lease, record, seg.end)) >= 0:
                    state.refuse(issue, index, (seg, lease, record, seg.end), (g.name, number))
                    state.lose(device, g, block)
                    continue
                used.append(block)
                leases.append(lease)
            if hi and end and not states and number != null:
                inside.count += 1
                if (index := inside.sys2(pool, hi, end)) >= 0:
                    state.refuse(inside, index, (hi, end), g.name)
            if hi > request.at:
                request.at = hi

    def read(self, spans: list[Span], request: Request, ran: list[Ran]) -> None:
        """The blocks that a step reads, each up to where the span reaches."""
        state, record, null, uid, make = self.state, request.record, self.state.header.null, request.uid, self.make
        pool, device, inside, groups = state.pool, state.device, self.read_inside, state.by_name
        for span in spans:
            g, unit = groups.get(span.group) or state.named(span.group), span.unit
            if not self.right(span, unit, g):
                continue
            issue, size, held = self.rows[g.index].issue, g.block, device.blocks[g.index]
            near, top = held.near, len(held.near)
            part = Ran(g, record, wrote=False)
            ran.append(part)
            used, leases, numbers = part.blocks, part.leases, span.blocks
            lo, hi, last = span.lo, span.hi, 0
            if unit == "entry":
                lo, hi = lo * g.ratio, hi * g.ratio
            if hi and not g.states and null in numbers:
                self.nulls(g, numbers, lo, g.low(hi))
            for number in numbers:
                block = near[number] if 0 <= number < top else held.get(number)
                if number == null or (block := block or state.unnamed(held, number)) is None:
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
                    state.refuse(issue, index, (seg, lease, record, upto), (g.name, number))
                    state.lose(device, g, block)
            if hi and last and not g.states:
                inside.count += 1
                if (index := inside.sys2(pool, hi, last)) >= 0:
                    state.refuse(inside, index, (hi, last), g.name)

    def nulls(self, g: GroupState, blocks: list[int], lo: int, low: int) -> None:
        """Null blocks among those that a step reads from ``lo`` on."""
        size, row = g.spec.block, self.on["dispatch"].other["null_unread"]
        for place, number in enumerate(blocks):
            if number == self.state.header.null:
                self.state.fire(row, lo - lo % size + (place + 1) * size, low, segment=g.spec.name)

    def complete(self, e: Complete) -> None:
        """A step is done; a step that failed has confirmed no write."""
        state, step, known = self.state, e.step, self.known_step
        ran = self.steps.pop(step, None)
        replayed = self.replays.pop(step, ()) if self.replays else ()
        for graph in replayed:
            state.fire(self.on["complete"].other["replayed"], graph, segment=step)
        known.count += 1
        found = ran is not None or bool(replayed)
        if (index := known.sys1(state.pool, found)) >= 0:
            state.refuse(known, index, (found,), step)
            return
        if self.at and (at := self.at.pop(step, -1)) >= 0 and e.at >= 0:
            state.fire(self.on["complete"].other["step_position"], e.at, at, segment=step)
        pool, ok = state.pool, e.ok
        for part in ran or ():
            g, record, rows, wrote = part.group, part.record, self.rows[part.group.index], part.wrote and ok
            written, done = rows.written, rows.complete
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
        state, request, to = self.state, self.state.request(e.req), e.to
        if request.lost or not (request.running or self.hits.settle(request)):
            return
        drafts, request.drafts = request.drafts, 0
        if ids := e.ids:
            request.extend(ids)
        record = request.record
        if drafts:
            at = max(request.at, record.accepted, request.length)
            if not state.fire(self.on["accept"].other["accepts_written"], to, at, segment=e.req):
                return
        if to > record.accepted:
            row = self.accepted
            row.count += 1
            if (index := row.req1(state.pool, record, to)) >= 0:
                state.refuse(row, index, (record, to), e.req)

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
        if not low or state.device.blocks[g.index].lost:
            return
        own = [b.segment for b in state.device.blocks[g.index].values() if b.lease_of(request.uid) is not None]
        for seg in sorted(own, key=lambda seg: -seg.start):
            if seg.start < held <= seg.end:
                held = seg.start
        if own:
            state.fire(self.on["reject"].other["still_held"], low, held, segment=(g.spec.name, request.name))
