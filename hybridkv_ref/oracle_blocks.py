"""The blocks that requests write and read: taken, given back, evicted."""

from collections.abc import Container, Iterable

from hybridkv_ref.events import Allocate, DeferFree, Evict, Free, Reset
from hybridkv_ref.oracle_entities import Lease, Record
from hybridkv_ref.oracle_hits import Hits
from hybridkv_ref.oracle_pins import Pins
from hybridkv_ref.oracle_records import UNTOLD, Block, Bound, GroupState, Place, Request
from hybridkv_ref.oracle_requests import Requests
from hybridkv_ref.oracle_row import Row
from hybridkv_ref.oracle_state import State
from hybridkv_ref.oracle_tiers import Tier


class Ends:
    """The rows by which references to the blocks of one group end, and the blocks with the last of them."""

    __slots__ = (
        "abort", "cancel", "drop", "free", "left_behind", "let_go", "pass_by", "release", "retire", "unheld", "unhold",
    )  # fmt: skip

    def __init__(self, rows: dict[str, Row], unheld: Row) -> None:
        self.abort, self.cancel, self.drop = rows["abort"], rows["cancel"], rows["drop"]
        self.left_behind, self.let_go, self.pass_by = rows["left_behind"], rows["let_go"], rows["pass_by"]
        self.release, self.retire, self.free = rows["release"], rows["retire"], rows["free"]
        self.unheld, self.unhold = unheld, rows["unhold"]


class Blocks:
    """The life of blocks on the device; ``give_back`` is what every event that ends a last reference does."""

    def __init__(self, state: State, hits: Hits, pins: Pins, requests: Requests) -> None:
        self.state, self.hits, self.pins, self.requests = state, hits, pins, requests
        names = ("allocate", "free", "evict", "reset")
        self.on = {name: state.bind(name) for name in names}
        sets = state.tables.kinds[state.groups[0].kind].sets
        self.empty, self.open, self.fresh = (frozenset(sets[n]) for n in ("EMPTY", "OPEN", "FRESH"))
        lease = state.tables.sets["lease"]
        self.hit, self.writes = frozenset(lease["HIT"]), frozenset(lease["WRITES"])
        self.candidate, self.make = hits.candidate, state.make
        # A lease in one of these stages is of a block that its request wrote or adopted.
        self.own = frozenset(lease["HELD"]) - self.hit | self.writes
        self.together: dict[tuple[int, int], int] = {}
        self.below: dict[tuple[str, int, str], list[Block]] = {}
        # What frees wait for, by request, group and block; and the steps and transfers that run (set by the oracle).
        self.deferred: dict[tuple[str, str, int], str] = {}
        self.running: tuple[Container[str], Container[str]] = ((), ())
        # Per group the others of its pool, whose numbers it shares.
        self.sharing = [
            [o for o in state.groups if o is not g and g.spec.pool and o.spec.pool == g.spec.pool] for g in state.groups
        ]
        self.unheld = [rows["unheld"] for rows in state.books.group]
        self.ends = [Ends(rows, self.unheld[i]) for i, rows in enumerate(self.on["free"].group)]

    # -- writing ---------------------------------------------------------------------------------------------------

    def allocate(self, events: Iterable[Allocate]) -> None:
        """Empty blocks for requests."""
        state, on, null, device = self.state, self.on["allocate"], self.state.header.null, self.state.device
        choices, req, group = state.choices.of, None, None
        for e in events:
            state.index += 1
            if e.req != req or e.group != group:
                req, group = e.req, e.group
                request, g = state.request(req), state.named(group)
                row, size, shared = on.group[g.index]["admit"], g.block, self.sharing[g.index]
                held = device.blocks[g.index]
                near, lost = held.near, held.lost
            if request.lost or not (request.running or self.hits.settle(request)):
                state.skipped += 1
                for number in e.blocks:
                    state.lose_number(device, g, number)
                continue
            if request.refused and not state.fire(on.other["granted"], False in request.refused, segment=req):
                for number in e.blocks:
                    state.lose_number(device, g, number)
                continue
            record, at = request.record, e.at
            if at < 0:
                at = request.positions.get(group, record.f)
            numbers = e.blocks
            top = len(near)
            for number in numbers:
                if number != null:
                    if lost:
                        lost.discard(number)
                    if choices:
                        state.choices.settle(device, g, number, alive=False)
                    block = near[number] if 0 <= number < top else held.get(number)
                    block = block or held.new(number)
                    if (held.alone(number) and not choices) or self.apart(on, shared, g, number):
                        self.take(row, g, block, request, record, at)
                at += size
            request.positions[group] = at

    def apart(self, on: Bound, sharing: list[GroupState], group: GroupState, number: int) -> bool:
        """No other group of the pool has the block of this number; where one has, nothing of either is judged."""
        state, device = self.state, self.state.device
        blocks, choices = device.blocks, state.choices.of
        for g in sharing:
            if choices:
                state.choices.settle(device, g, number, alive=False)
            other = blocks[g.index].get(number)
            if other is not None and not state.fire(
                on.group[g.index]["apart"], other.segment, segment=(g.spec.name, number)
            ):
                state.lose(device, g, other)
                state.lose_number(device, group, number)
                return False
        return True

    def take(self, row: Row, g: GroupState, block: Block, request: Request, record: Record, at: int) -> None:
        """One block for a writer."""
        state, known = self.state, record.accepted
        seg, lease = block.segment, self.make.lease()
        row.count += 1
        # Spelled out, as wherever a row is fired for block after block: a call of fire takes as long as the row.
        if (index := row.lease6(state.pool, seg, lease, record, at, 1, 0, 0, UNTOLD, known)) >= 0:
            state.refuse(row, index, (seg, lease, record, at, 1, 0, 0, UNTOLD, known), (g.spec.name, block.number))
            state.lose(state.device, g, block)
            return
        block.hold(request.uid, lease)
        block.writer = block.owner = request
        block.tokens = block.domain = block.content = 0
        request.held += 1

    # -- giving back -----------------------------------------------------------------------------------------------

    def defer(self, e: DeferFree) -> None:
        """The reference counts until the free, which waits for a step or a transfer."""
        if e.on:
            self.deferred |= dict.fromkeys(((e.req, e.group, number) for number in e.blocks), e.on)

    def free(self, events: Iterable[Free]) -> None:
        """References of requests end."""
        state, on, null, tails = self.state, self.on["free"], self.state.header.null, "tails" in self.state.claims
        requests, empty, group, name = state.requests, self.empty, None, None
        for e in events:
            state.index += 1
            request = requests.get(e.req)
            if e.group != group:
                group, name = e.group, None
                g = state.named(group)
                ends = self.ends[g.index]
            if request is not None and request.lost:
                state.skipped += 1
                continue
            if e.tier != name:
                name = e.tier
                tier, unheld = state.tier(name), ends.unheld
                held, pool = tier.blocks[g.index], tier.pool
                near = held.near
            if request is not None:
                record, uid = request.record, request.uid
                # What a running request gives up has to lie before this.
                low = g.low(request.at) if request.running and g.reuse else -1
            else:
                record, uid, low = self.requests.nobody, 0, -1
            top = len(near)
            for number in e.blocks:
                block = near[number] if 0 <= number < top else held.get(number)
                if number == null or (block := block or state.unnamed(held, number)) is None:
                    continue
                if self.deferred and not self.in_time(on, e, number):
                    state.lose(tier, g, block)
                    continue
                lease = block.lease_of(uid)
                if lease is None and (e.req, name, group, number) in self.pins.holders:
                    if self.pins.unhold(ends.unhold, tier, g, e.req, number):
                        self.give_back(ends.retire, ends.free, tier, g, block)
                    continue
                # The lease of a hit may still be known to the request's lookup.
                own = lease is not None and lease.stage in self.own
                if lease is None and request is not None and block.owner is request:
                    block.owner = None
                elif not self.let_go(ends, g, block, record, lease, request, low):
                    state.lose(tier, g, block)
                    continue
                if lease is not None:
                    block.let(uid)
                    if own and not lease.in_flight:
                        self.make.done(lease)
                if block.writer is request:
                    block.writer = None
                if request is not None:
                    request.held -= 1
                if tails:
                    self.together[g.index, number] = uid
                # Most blocks stay findable: asked here, the call is saved.
                if (seg := block.segment).stage in empty or unheld.seg0(pool, seg) < 0:
                    self.give_back(ends.retire, ends.free, tier, g, block)
            if request is not None and not (request.held or request.running):
                self.requests.close(request, "free")

    def in_time(self, on: Bound, e: Free, number: int) -> bool:
        """A free that was put off comes after what it waits for."""
        where = (e.group, number)
        waits = self.deferred.pop((e.req, *where), "")
        runs = (waits in names for names in self.running)
        return not waits or self.state.fire(on.other["waited_for"], *runs, segment=where)

    def let_go(
        self,
        ends: Ends,
        g: GroupState,
        block: Block,
        record: Record,
        lease: Lease | None,
        request: Request | None,
        low: int,
    ) -> bool:
        """One reference ends by the row that its stage asks for; ``low``: what a running request still needs, or -1."""
        state, seg, row = self.state, block.segment, ends.let_go
        if lease is None:
            row, lease = ends.release, self.make.lease()
        elif (stage := lease.stage) == self.candidate:
            row = ends.drop
        else:
            running = request is not None and request.running
            if low >= 0 and request is not None:
                again = bool(request.adopted) and self.again(request, g, block)
                behind = ends.left_behind
                behind.count += 1
                if (index := behind.seg2(state.pool, seg, low, again)) >= 0:
                    return state.refuse(behind, index, (seg, low, again), (g.name, block.number))
            if stage in self.hit:
                row = ends.pass_by if running else ends.release
            elif stage in self.writes:
                cancel, row = ends.cancel, ends.abort
                cancel.count += 1
                if (index := cancel.lease0(state.pool, seg, lease, record)) >= 0:
                    return state.refuse(cancel, index, (seg, lease, record), (g.name, block.number))
        row.count += 1
        if (index := row.lease0(state.pool, seg, lease, record)) < 0:
            return True
        return state.refuse(row, index, (seg, lease, record), (g.name, block.number))

    @staticmethod
    def again(request: Request, g: GroupState, block: Block) -> bool:
        """The request holds what a block holds in another one that it adopted."""
        other = request.adopted.get((g.index, block.segment.start))
        return other is not None and other is not block and other.lease_of(request.uid) is not None

    def give_back(self, retire: Row, free: Row, tier: Tier, g: GroupState, block: Block, where: Place = "") -> None:
        """What nobody holds and no entry names goes back to the pool, by these two rows."""
        state, seg, pool = self.state, block.segment, tier.pool
        if seg.stage not in self.empty:
            if self.unheld[g.index].seg0(pool, seg) >= 0:
                return
            row = retire
            row.count += 1
            if (index := row.seg0(pool, seg)) < 0:
                row = free
                row.count += 1
                index = row.seg0(pool, seg)
            if index >= 0:
                state.refuse(row, index, (seg,), where or (g.name, block.number), pool)
                state.lose(tier, g, block)
                return
        block.writer = block.owner = None
        if self.together:
            self.together.pop((g.index, block.number), None)
        if not block.uid and block.others is None:
            tier.blocks[g.index].rest(block)

    def evict(self, e: Evict) -> None:
        """Cached bytes go; what is held, copied or still findable does not."""
        state, g, on = self.state, self.state.named(e.group), self.on["evict"]
        tier, rows = state.tier(e.tier), on.group[g.index]
        for number in e.blocks:
            if not state.fire(on.other["not_null"], number == state.header.null, segment=(e.group, number)):
                continue
            block = state.block(tier, g, number, alive=True)
            if block is None:
                continue
            seg, where = block.segment, (e.group, number)
            if "tree" in state.claims and block.key:
                children = self.below.get((e.tier, g.index, block.key), ())
                held = sum(1 for child in children if child.segment.pins)
                if not state.fire(rows["childless"], seg, held, segment=where):
                    state.lose(tier, g, block)
                    continue
            if not self.in_order(on.other["tail_first"], tier, g, block, where):
                continue
            self.clear(rows, tier, g, block, where)

    def clear(self, rows: dict[str, Row], tier: Tier, g: GroupState, block: Block, where: Place) -> None:
        """The bytes of a block go, whether somebody uses it or not."""
        state, seg = self.state, block.segment
        if state.fire(rows["retire"], seg, segment=where, pool=tier.pool) and state.fire(
            rows["free"], seg, segment=where, pool=tier.pool
        ):
            self.give_back(rows["retire"], rows["free"], tier, g, block)
        else:
            state.lose(tier, g, block)

    def in_order(self, row: Row, tier: Tier, g: GroupState, block: Block, where: Place) -> bool:
        """Of what was let go together, the later blocks of any group are evicted first."""
        batch = self.together.get((g.index, block.number))
        if batch is None or "tails" not in self.state.claims:
            return True
        latest = 0
        for (index, number), other in self.together.items():
            known = tier.blocks[index].get(number)
            if other == batch and known is not None and not known.segment.pins:
                latest = max(latest, known.segment.start)
        return self.state.fire(row, block.segment.start, latest, segment=where)

    def reset(self, e: Reset) -> None:
        """Clears the blocks that are named, or of a whole group what nobody uses."""
        state, g = self.state, self.state.named(e.group)
        rows, device = self.on["reset"].group[g.index], state.device
        numbers = e.blocks or [block.number for block in device.blocks[g.index].values()]
        for number in numbers:
            block = state.block(device, g, number) if number != state.header.null else None
            if block is None or block.segment.stage in self.empty:
                continue
            if e.blocks:
                self.clear(rows, device, g, block, (e.group, number))
            elif state.legal(rows["retire"], block.segment):
                self.give_back(rows["retire"], rows["free"], device, g, block)
