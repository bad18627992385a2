"""The blocks that requests write and read: taken, given back, evicted."""

from collections.abc import Container, Iterable, Sequence
from typing import Any

from hybridkv_ref.events import Allocate, DeferFree, Evict, Free, Reset
from hybridkv_ref.oracle_hits import Hits
from hybridkv_ref.oracle_pins import Pins
from hybridkv_ref.oracle_records import UNTOLD, Block, Bound, GroupState, Place, Request, Row, Tier
from hybridkv_ref.oracle_requests import Requests
from hybridkv_ref.oracle_state import State


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
        self.candidate, self.lease = hits.candidate, state.lease
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
                row, size, shared = on.group[g.index]["admit"], g.spec.block, self.sharing[g.index]
                held, lost = device.blocks[g.index], device.lost[g.index]
            if request.lost or not (request.running or self.hits.settle(request)):
                state.skipped += 1
                for number in e.blocks:
                    state.lose(device, g, held.get(number) or Block(number, None))
                continue
            if request.refused and not state.fire(on.other["granted"], False in request.refused, segment=req):
                for number in e.blocks:
                    state.lose(device, g, held.get(number) or Block(number, None))
                continue
            record, at = request.record, e.at
            if at < 0:
                at = request.positions.get(group, record.f)
            for number in e.blocks:
                if number != null:
                    lost.discard(number)
                    if choices:
                        state.choices.settle(device, g, number, alive=False)
                    block = held.get(number) or state.unnamed(device, g, number)
                    if block is not None and (not shared or self.apart(on, g, number)):
                        self.take(row, g, block, request, record, at)
                at += size
            request.positions[group] = at

    def apart(self, on: Bound, group: GroupState, number: int) -> bool:
        """No other group of the pool has the block of this number; where one has, nothing of either is judged."""
        state, device = self.state, self.state.device
        for g in self.sharing[group.index]:
            if state.choices.of:
                state.choices.settle(device, g, number, alive=False)
            other = device.blocks[g.index].get(number)
            if other is not None and not state.fire(
                on.group[g.index]["apart"], other.segment, segment=(g.spec.name, number)
            ):
                state.lose(device, g, other)
                state.lose(device, group, device.blocks[group.index][number])
                return False
        return True

    def take(self, row: Row, g: GroupState, block: Block, request: Request, record: Any, at: int) -> None:
        """One block for a writer."""
        state, known, make, call = self.state, record.accepted, self.lease, row.call
        seg, lease = block.segment, make()
        row.count += 1
        # Spelled out, as wherever a row is fired for block after block: a call of fire takes as long as the row. Nor is
        # it row.call(...): the interpreter is quick to call what a local holds, and not what an attribute does.
        if (index := call(state.pool, seg, lease, record, at, 1, 0, 0, UNTOLD, known)) >= 0:
            state.refuse(row, index, (seg, lease, record, at, 1, 0, 0, UNTOLD, known), (g.spec.name, block.number))
            state.lose(state.device, g, block)
            return
        block.leases[request.uid] = lease
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
            if request is not None and request.lost:
                state.skipped += 1
                continue
            if e.tier != name:
                name = e.tier
                tier, rows, unheld = state.tier(name), on.group[g.index], self.unheld[g.index].test
                held, pool = tier.blocks[g.index], tier.pool
            record, uid = (request.record, request.uid) if request is not None else (self.requests.nobody, 0)
            for number in e.blocks:
                if number == null or (block := held.get(number) or state.unnamed(tier, g, number)) is None:
                    continue
                if self.deferred and not self.in_time(on, e, number):
                    state.lose(tier, g, block)
                    continue
                lease = block.leases.get(uid)
                if lease is None and (e.req, name, group, number) in self.pins.holders:
                    if self.pins.unhold(rows["unhold"], tier, g, e.req, number):
                        self.give_back(rows, tier, g, block)
                    continue
                if lease is None and request is not None and block.owner is request:
                    block.owner = None
                elif not self.let_go(rows, g, block, record, lease, request):
                    state.lose(tier, g, block)
                    continue
                if lease is not None:
                    del block.leases[uid]
                if block.writer is request:
                    block.writer = None
                if request is not None:
                    request.held -= 1
                if tails:
                    self.together[g.index, number] = uid
                # Most blocks stay findable: asked here, the call is saved.
                if (seg := block.segment).stage in empty or unheld(pool, seg) < 0:
                    self.give_back(rows, tier, g, block)
            if request is not None and not (request.held or request.running):
                self.requests.close(request, "free")

    def in_time(self, on: Bound, e: Free, number: int) -> bool:
        """A free that was put off comes after what it waits for."""
        where = (e.group, number)
        waits = self.deferred.pop((e.req, *where), "")
        runs = (waits in names for names in self.running)
        return not waits or self.state.fire(on.other["waited_for"], *runs, segment=where)

    def let_go(
        self, rows: dict[str, Row], g: GroupState, block: Block, record: Any, lease: Any, request: Request | None
    ) -> bool:
        """One reference ends by the row that its stage asks for."""
        state, seg, row = self.state, block.segment, rows["let_go"]
        if lease is None:
            row, lease = rows["release"], state.lease()
        elif (stage := lease.stage) == self.candidate:
            row = rows["drop"]
        else:
            running = request is not None and request.running
            if running and request is not None and g.spec.reuse:
                other = request.adopted.get((g.index, seg.start)) if request.adopted else None
                again = other is not None and other is not block and request.uid in other.leases
                where = (g.spec.name, block.number)
                if not state.fire(rows["left_behind"], seg, g.low(request.at), again, segment=where):
                    return False
            if stage in self.hit:
                row = rows["pass_by" if running else "release"]
            elif stage in self.writes:
                where = (g.spec.name, block.number)
                if not state.fire(rows["cancel"], seg, lease, record, segment=where):
                    return False
                row = rows["abort"]
        row.count += 1
        call = row.call
        if (index := call(state.pool, seg, lease, record)) < 0:
            return True
        return state.refuse(row, index, (seg, lease, record), (g.spec.name, block.number))

    def give_back(self, rows: dict[str, Row], tier: Tier, g: GroupState, block: Block, where: Place = "") -> None:
        """What nobody holds and no entry names goes back to the pool."""
        state, seg, pool = self.state, block.segment, tier.pool
        if seg.stage not in self.empty:
            unheld = self.unheld[g.index].test
            if unheld(pool, seg) >= 0:
                return
            for row in (rows["retire"], rows["free"]):
                row.count += 1
                call = row.call
                if (index := call(pool, seg)) >= 0:
                    state.refuse(row, index, (seg,), where or (g.spec.name, block.number), pool)
                    state.lose(tier, g, block)
                    return
        block.writer = block.owner = None
        if self.together:
            self.together.pop((g.index, block.number), None)
        if not block.leases:
            state.rest(tier, g, block)

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
            self.give_back(rows, tier, g, block)
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
        numbers: Sequence[int] = e.blocks or list(device.blocks[g.index])
        for number in numbers:
            block = state.block(device, g, number) if number != state.header.null else None
            if block is None or block.segment.stage in self.empty:
                continue
            if e.blocks:
                self.clear(rows, device, g, block, (e.group, number))
            elif state.legal(rows["retire"], block.segment):
                self.give_back(rows, device, g, block)
