"""References: a request pins its hit, other holders take references of their own, and each ends once."""

from collections.abc import Iterable

from hybridkv_ref.events import Pin, Unpin
from hybridkv_ref.oracle_hits import Hits
from hybridkv_ref.oracle_records import Block, GroupState, Request
from hybridkv_ref.oracle_row import Row
from hybridkv_ref.oracle_state import State
from hybridkv_ref.oracle_tiers import Tier


class Pins:
    """Pin and unpin; ``holders``: blocks that are held under a name, by holder, tier, group and number."""

    def __init__(self, state: State, hits: Hits) -> None:
        self.state, self.hits = state, hits
        self.on_pin, self.on_unpin = state.bind("pin"), state.bind("unpin")
        self.holders: dict[tuple[str, str, str, int], list[Block]] = {}

    def pin(self, events: Iterable[Pin]) -> None:
        """A request pins its hit; any other holder takes references of its own."""
        state, null = self.state, self.state.header.null
        for e in events:
            state.index += 1
            g, tier, request = state.named(e.group), state.tier(e.tier), state.requests.get(e.req)
            rows, pool = self.on_pin.group[g.index], state.pool
            find, pin = rows["find"], rows["pin"]
            if request is not None and request.lost:
                state.skipped += 1
                continue
            hit = request is not None and tier is state.device and request.record.stage == self.hits.matched
            own = self.written(request, g) if request is not None and request.running and tier is state.device else {}
            for number in e.blocks:
                block = state.block(tier, g, number, alive=True) if number != null else None
                if block is None:
                    continue
                if request is not None and own.get(block.segment.start, 0) == (block.content or -1):
                    self.adopt(rows["adopt"], g, block, request)
                    continue
                if request is None or not hit:
                    if state.fire(rows["hold"], block.segment, segment=(e.group, number), pool=tier.pool):
                        self.holders.setdefault((e.req, e.tier, e.group, number), []).append(block)
                    else:
                        state.lose(tier, g, block)
                    continue
                lease, record, seg = block.lease_of(request.uid), request.record, block.segment
                if lease is None:
                    lease = state.make.lease()
                    if not state.fire(find, seg, lease, record, segment=(e.group, number)):
                        state.lose(tier, g, block)
                        continue
                    block.hold(request.uid, lease)
                    self.hits.leases.setdefault(request.uid, []).append((g, block, lease))
                pin.count += 1
                if (index := pin.lease0(pool, seg, lease, record)) >= 0:
                    state.refuse(pin, index, (seg, lease, record), (e.group, number))
                    state.lose(tier, g, block)

    def written(self, request: Request, g: GroupState) -> dict[int, int]:
        """What a running request holds of a group, by position: the content of its block."""
        blocks = [b for b in self.state.device.blocks[g.index].values() if b.lease_of(request.uid) is not None]
        return {b.segment.start: request.content(b.segment.end) ^ request.domain for b in blocks}

    def adopt(self, row: Row, g: GroupState, block: Block, request: Request) -> None:
        """The request goes on with this block, so that its own one of the same tokens may go."""
        lease = self.state.make.lease()
        if block.lease_of(request.uid) is not None:
            return
        if self.state.fire(row, block.segment, lease, request.record, segment=(g.spec.name, block.number)):
            block.hold(request.uid, lease)
            request.held += 1
            request.adopted[g.index, block.segment.start] = block
        else:
            self.state.lose(self.state.device, g, block)

    def unpin(self, events: Iterable[Unpin]) -> None:
        """A holder's reference ends."""
        state, null = self.state, self.state.header.null
        for e in events:
            state.index += 1
            g, tier = state.named(e.group), state.tier(e.tier)
            row = self.on_unpin.group[g.index]["unhold"]
            for number in e.blocks:
                if number != null:
                    self.unhold(row, tier, g, e.req, number)

    def unhold(self, row: Row, tier: Tier, g: GroupState, name: str, number: int) -> bool:
        """One reference that was held under this name ends; whether it is known to have been of this block."""
        state, key = self.state, (name, tier.name, g.spec.name, number)
        held = self.holders.get(key, [])
        count, taken = len(held), held.pop() if held else None
        if count == 1:
            del self.holders[key]
        block = state.block(tier, g, number)
        if block is None:
            return False
        if taken is not None and taken is not block:
            # The block that was held is lost; another one has its number now.
            state.skipped += 1
            return False
        if state.fire(row, block.segment, count, segment=(g.spec.name, number), pool=tier.pool):
            return True
        state.lose(tier, g, block)
        return False
