"""Transfers: blocks that move between tiers and peers, part by part, all groups or none."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hybridkv_ref.events import DEVICE, Io, Part, TransferBegin, TransferCancel, TransferEnd, TransferFail, TransferPart
from hybridkv_ref.io_unit import remainders
from hybridkv_ref.oracle_blocks import Blocks
from hybridkv_ref.oracle_index import Index
from hybridkv_ref.oracle_records import (
    REMEMBERED,
    Block,
    Bound,
    GroupState,
    Place,
    Request,
    digest,
)
from hybridkv_ref.oracle_row import Row
from hybridkv_ref.oracle_state import State
from hybridkv_ref.oracle_tiers import Tier

PEER = "peer"
"""A tier whose name begins so is another engine's: what it holds is as the event says."""


@dataclass(slots=True)
class Shipment:
    """One block on its way."""

    group: GroupState
    source: Block
    target: Block
    entity: Any

    @property
    def pair(self) -> tuple[GroupState, int, int]:
        """Its group, and the numbers of its source and target."""
        return self.group, self.source.number, self.target.number


@dataclass(slots=True)
class Transfer:
    """A transfer that runs: its entity, tiers, and shipments by group and target."""

    entity: Any
    source: Tier
    target: Tier
    shipments: dict[tuple[int, int], Shipment]
    request: Request | None

    @property
    def pairs(self) -> list[tuple[GroupState, int, int]]:
        """Group, source and target of each shipment."""
        return [s.pair for s in self.shipments.values()]


class Transfers:
    """Begin, part, end, fail and cancel; I/O calls."""

    def __init__(self, state: State, blocks: Blocks, index: Index) -> None:
        self.state, self.blocks, self.index = state, blocks, index
        self.running: dict[str, Transfer] = {}
        self.lost: dict[str, None] = {}
        self.bound: dict[tuple[str, str], Bound] = {}
        self.shipment = state.code.maker("shipment", ("part", "group"))
        self.transfer = state.code.maker("transfer", ("parts",))
        self.first = state.tables.classes["shipment"]["stage"].init
        self.moving = next(e for e in state.tables.events if e.id.startswith("ship_begin[")).edges["shipment"][1]
        self.failing = next(e for e in state.tables.events if e.row == "transfer_fail").edges["xfer"][1]
        self.io_rows = state.bind("io")

    def rows(self, event: str, tier: Tier) -> Bound:
        """The rows of an event, with the caps of the tier that receives."""
        key = (event, tier.name)
        if key not in self.bound:
            self.bound[key] = self.state.bind(event, tier.name)
        return self.bound[key]

    def begin(self, e: TransferBegin) -> None:
        """All parts are checked before a byte moves."""
        state = self.state
        source, target = state.tier(e.source), state.tier(e.target)
        on, owner = self.rows("transfer_begin", target), state.requests.get(e.req)
        pairs = [(state.named(p.group), *ends) for p in e.parts for ends in zip(p.source, p.target, strict=False)]
        places = [
            p.at + i * state.named(p.group).spec.block if p.at >= 0 else -1
            for p in e.parts
            for i, _ in enumerate(zip(p.source, p.target, strict=False))
        ]
        for g, src, dst in pairs if state.choices.of else ():
            state.choices.settle(source, g, src, alive=True)
            state.choices.settle(target, g, dst, alive=False)
        named = {p.group for p in e.parts}
        missing = sum(1 for g in state.groups if g.spec.reuse and g.spec.name not in named)
        right = not e.whole or state.fire(on.other["all_groups"], missing, e.partial, segment=e.xfer)
        for part in e.parts:
            if part.source and part.target:
                ends = len(part.source), len(part.target)
                right = state.fire(on.other["paired"], *ends, segment=(part.group, e.xfer)) and right
        if owner is not None and e.target == DEVICE:
            right = state.fire(on.other["granted"], bool(owner.refused), segment=e.req) and right
        described = [self.described(part, source, on) for part in e.parts]
        if not (right and all(described)):
            return
        entity = self.transfer(parts=max(len(pairs), 1))
        self.lost.pop(e.xfer, None)
        state.fire(on.other["offer"], entity)
        made = Transfer(entity, source, target, {}, owner)
        for (g, src, dst), at in zip(pairs, places, strict=True):
            begun = self.ship(g, src, dst, at, made, on)
            if begun is None:
                self.lost[e.xfer] = None
                if len(self.lost) > REMEMBERED:
                    del self.lost[next(iter(self.lost))]
                self.lose(source, target, pairs)
                return
            made.shipments[g.index, dst] = begun
        self.running[e.xfer] = made

    def lose(self, source: Tier, target: Tier, pairs: Iterable[tuple[GroupState, int, int]]) -> None:
        """Nothing about the blocks at both ends is judged any more."""
        for g, src, dst in pairs:
            for tier, number in ((source, src), (target, dst)):
                block = tier.blocks[g.index].get(number)
                if block is not None:
                    self.state.lose(tier, g, block)
                tier.blocks[g.index].lost.add(number)

    def known(self, event: str, name: str, ends: bool) -> tuple[Transfer | None, Bound]:
        """The transfer of this name, if it runs and is judged, and the rows of the event."""
        made = self.running.get(name)
        on = self.rows(event, made.target if made else self.state.device)
        if name in self.lost:
            self.state.skipped += 1
            if ends:
                del self.lost[name]
        else:
            self.state.fire(on.other["known_transfer"], made is not None, segment=name)
        return made, on

    def described(self, part: Part, source: Tier, on: Bound) -> bool:
        """What a part says of its layouts, units and keys."""
        state, g = self.state, self.state.named(part.group)
        checks: list[tuple[str, tuple[int, ...]]] = []
        if part.layout or part.target_layout:
            checks.append(("declared", (int(bool(part.layout and part.target_layout)),)))
            checks.append(("same_layout", (int(part.layout != part.target_layout),)))
        if part.ratio >= 0:
            checks.append(("source_ratio", (part.ratio, g.spec.kernel_blocks)))
        if part.stride >= 0 and part.group in state.strides:
            checks.append(("stride_of", (part.stride, state.strides[part.group])))
        held = [b.segment.end for n in part.source if (b := source.blocks[g.index].get(n)) is not None]
        if part.saved >= 0 and held:
            checks.append(("saved_whole", (part.saved, max(held))))
        right = state.fire_all(on.other, checks, part.group)
        return self.asked(part, source, on) and right

    def asked(self, part: Part, source: Tier, on: Bound) -> bool:
        """Each object below the device is asked for by the key under which it was stored."""
        right = True
        g = self.state.named(part.group)
        for key, number in zip(part.keys, part.source, strict=False):
            block = source.blocks[g.index].get(number) if source.name != DEVICE else None
            if block is not None and block.key:
                keys = (digest(key), digest(block.key))
                right = self.state.fire(on.other["asked_as_stored"], *keys, segment=(part.group, number)) and right
        return right

    def ship(self, g: GroupState, src: int, dst: int, told_at: int, made: Transfer, on: Bound) -> Shipment | None:
        """One block begins to move; ``told_at`` is where the event says that a peer's one begins, or -1."""
        state, rows = self.state, on.group[g.index]
        source, target = state.block(made.source, g, src), state.block(made.target, g, dst)
        if source is None or target is None:
            return None
        if made.target is state.device and not self.blocks.apart(on, self.blocks.sharing[g.index], g, dst):
            return None
        where = f"{g.spec.name}:{src}>{dst}"
        seg = source.segment
        if made.source.name.startswith(PEER) and seg.stage in self.blocks.empty:
            own = made.request if target.writer is made.request else None
            at = told_at if told_at >= 0 else target.segment.start if own is not None else 0
            told = state.books.group[g.index]["told"]
            state.fire(told, seg, at, at + g.spec.block, segment=where, pool=made.source.pool)
            if own is not None:
                source.writer = own
                self.index.name_content(source, own)
        elif seg.stage in self.blocks.open and source.writer is not None:
            lease = source.lease_of(source.writer.uid)
            if lease is None or not state.fire(rows["commit"], seg, lease, source.writer.record, segment=where):
                state.lose(made.source, g, source)
                return None
            self.index.name_content(source, source.writer)
        writer = target.writer
        lease = target.lease_of(writer.uid) if writer is not None else None
        if writer is not None and lease is not None and target.segment.stage in self.blocks.open:
            if not g.states and not state.fire(on.other["in_place"], seg.start, target.segment.start, segment=where):
                return None
            for row in ("cancel", "abort"):
                if not state.fire(rows[row], target.segment, lease, writer.record, segment=where):
                    state.lose(made.target, g, target)
                    return None
            target.let(writer.uid)
        entity = self.shipment(part=made.entity.begun, group=g.index)
        arguments = (seg, target.segment, made.entity, entity, 1, 0)
        if not state.fire(rows["ship_begin"], *arguments, segment=where, pool=made.target.pool):
            state.lose(made.source, g, source)
            state.lose(made.target, g, target)
            return None
        target.tokens, target.domain, target.content, target.key = source.tokens, source.domain, source.content, ""
        return Shipment(g, source, target, entity)

    def part(self, e: TransferPart) -> None:
        """Some blocks are there, unreadable until all are."""
        state = self.state
        made, on = self.known("transfer_part", e.xfer, ends=False)
        if made is None:
            return
        g = state.named(e.group)
        for number in e.blocks:
            shipment = made.shipments.get((g.index, number))
            moving = shipment is not None and shipment.entity.stage == self.moving
            where = (e.group, number)
            if state.fire(on.other["known_part"], moving, segment=where) and shipment is not None:
                self.fire(on, "ship_part", shipment, made, where)

    def fire(self, on: Bound, row: str, s: Shipment, made: Transfer, where: Place) -> bool:
        """A row of one shipment."""
        compiled = on.group[s.group.index][row]
        return self.state.fire(
            compiled, s.source.segment, s.target.segment, made.entity, s.entity, segment=where, pool=made.target.pool
        )

    def end(self, e: TransferEnd) -> None:
        """Everything arrived: it turns readable at once; of a cancelled transfer nothing survives."""
        state = self.state
        made, on = self.known("transfer_end", e.xfer, ends=True)
        if made is None:
            return
        del self.running[e.xfer]
        if not self.arrived(e, made, on):
            self.lose(made.source, made.target, made.pairs)
            return
        cancelled = made.entity.stage == self.failing
        for s in made.shipments.values():
            where = f"{s.group.spec.name}:{s.source.number}>{s.target.number}"
            if self.fire(on, "ship_discard" if cancelled else "ship_publish", s, made, where):
                self.settle(on, s, made, where)
            else:
                self.lose(made.source, made.target, [s.pair])
        if made.shipments:
            state.fire(on.other["transfer_close"], made.entity, segment=e.xfer)

    def arrived(self, e: TransferEnd, made: Transfer, on: Bound) -> bool:
        """Whether an end is for the life that began the transfer, and all of it may turn readable."""
        state, owner = self.state, made.request
        if owner is not None and e.life >= 0:
            current = state.requests.get(owner.name, owner).life
            if not state.fire(on.other["completes_current"], e.life, current, segment=e.xfer):
                return False
        for s in made.shipments.values():
            if s.entity.stage == self.moving:
                self.fire(on, "ship_part", s, made, e.xfer)
        cancelled = made.entity.stage == self.failing
        return cancelled or not made.shipments or state.fire(on.other["deliver"], made.entity, segment=e.xfer)

    def settle(self, on: Bound, s: Shipment, made: Transfer, where: Place) -> None:
        """The request that waited for a block takes it; nobody's block goes back."""
        state, owner, target = self.state, s.target.owner, s.target
        rows = on.group[s.group.index]
        if target.segment.stage in self.blocks.fresh and owner is not None and owner.running:
            lease = state.make.lease()
            if state.fire(rows["reopen"], target.segment, lease, owner.record, segment=where):
                target.hold(owner.uid, lease)
        elif target.segment.stage in self.blocks.empty and owner is None:
            self.blocks.give_back(rows["retire"], rows["free"], made.target, s.group, target, where)
        self.release(rows, s, made, where)

    def release(self, rows: dict[str, Row], s: Shipment, made: Transfer, where: Place) -> None:
        """What another engine does with the block that it sent is not told, so nothing of it is kept."""
        if made.source.name.startswith(PEER):
            self.blocks.give_back(rows["retire"], rows["free"], made.source, s.group, s.source, where)

    def fail(self, e: TransferFail) -> None:
        """Nothing survives; with its bytes stopped, all is given back."""
        state = self.state
        made, on = self.known("transfer_fail", e.xfer, ends=e.stopped)
        if made is None:
            return
        if made.entity.stage != self.failing and made.shipments:
            state.fire(on.other["transfer_fail"], made.entity, segment=e.xfer)
        if not e.stopped:
            return
        del self.running[e.xfer]
        for s in made.shipments.values():
            where = f"{s.group.spec.name}:{s.source.number}>{s.target.number}"
            if s.entity.stage == self.moving:
                self.fire(on, "ship_stop", s, made, where)
            if self.fire(on, "ship_discard", s, made, where):
                self.again(on, s, where)
                self.release(on.group[s.group.index], s, made, where)
            else:
                self.lose(made.source, made.target, [s.pair])
        if made.shipments:
            state.fire(on.other["transfer_close"], made.entity, segment=e.xfer)

    def again(self, on: Bound, s: Shipment, where: Place) -> None:
        """The request that allocated a target has it again, empty, to compute into."""
        owner, target, g = s.target.owner, s.target, s.group
        target.tokens = target.domain = target.content = 0
        if owner is not None and owner.running and not owner.lost:
            start = target.segment.start
            self.blocks.take(on.group[g.index]["admit"], g, target, owner, owner.record, start)
            owner.held -= 1

    def cancel(self, e: TransferCancel) -> None:
        """Nobody waits for it any more."""
        made, on = self.known("transfer_cancel", e.xfer, ends=False)
        if made is not None and made.shipments:
            self.state.fire(on.other["transfer_fail"], made.entity, segment=e.xfer)

    def io(self, e: Io) -> None:
        """Remainders by the unit of direct I/O."""
        unit, row = max(e.unit, 1), self.io_rows.other["io_not_refused" if e.refused else "direct_io"]
        self.state.fire(row, e.direct, *remainders(e.address, e.offset, e.length, unit))
