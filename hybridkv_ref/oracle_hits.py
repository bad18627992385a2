"""Lookups, pins, and the way of a request through the hit protocol, most of which engines do not report."""

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from hybridkv_ref.events import Agree, Lookup, Pin, Unpin, Vote
from hybridkv_ref.oracle_records import REMEMBERED, Block, Bound, GroupState, Place, Request, Row, Tier
from hybridkv_ref.oracle_state import State
from hybridkv_ref.recovery import Contents, Hit, candidate_frontiers, longest_hit

RUNNING, OVER, LOOKING = "RUNNING", "OVER", "LOOKING"


class Hits:
    """Lookup, pin and unpin; ``settle`` brings a request to where it may compute."""

    def __init__(self, state: State, found: list[dict[int, int]]) -> None:
        self.state, self.found = state, found
        self.on_lookup, self.on_pin, self.on_unpin = (state.bind(e) for e in ("lookup", "pin", "unpin"))
        self.hidden = state.bind("allocate")
        self.on_agree = state.bind("agree")
        sets = state.tables.sets["request"]
        self.running, self.looking = frozenset(sets[RUNNING]), frozenset(sets[LOOKING])
        self.over = frozenset(sets[OVER])
        self.first = state.tables.classes["request"]["stage"].init
        self.matched = next(e for e in state.tables.events if e.id == "request.match").edges["req"][1]
        self.none = state.tables.classes["lease"]["stage"].init
        self.candidate = next(e for e in state.tables.events if e.row == "find").edges["lease"][1]
        self.readable = state.tables.kinds[state.groups[0].kind].sets["READABLE"]
        self.holders: dict[tuple[str, str, str, int], list[Block]] = {}
        self.votes: OrderedDict[str, dict[int, int]] = OrderedDict()
        self.agreed: OrderedDict[str, int] = OrderedDict()
        self.leases: dict[int, list[tuple[GroupState, Block, Any]]] = {}
        self.groups = [g.need for g in state.groups if g.spec.reuse]
        self.whole = [g for g in state.groups if g.low(g.spec.block) == 0 and not g.need.exact and g.spec.reuse]

    # -- what an engine could use ----------------------------------------------------------------------------------

    def contents(self, request: Request) -> dict[str, Contents]:
        """What each group has findable on the device for this request's tokens."""
        held: dict[str, Contents] = {}
        for g in self.state.groups:
            if not g.spec.reuse:
                continue
            found, blocks, ends, size = self.found[g.index], 0, set(), g.spec.block
            for index in range(request.known // size):
                content = request.content((index + 1) * size)
                if content ^ request.domain in found or (request.rough and content ^ request.rough in found):
                    blocks |= 1 << index
                    ends.add((index + 1) * size)
            held[g.spec.name] = Contents(blocks, frozenset(ends))
        return held

    def expected(self, request: Request, matched: int = -1) -> Hit:
        """The longest hit that every group can serve; ``matched`` -1: as far as any group knows the prompt."""
        contents = self.contents(request)
        matched = request.known if matched < 0 else min(matched, request.known)
        return longest_hit(self.groups, contents, matched, max(request.length, 1), self.state.alignment)

    # -- lookup ----------------------------------------------------------------------------------------------------

    def lookup(self, e: Lookup) -> None:
        """A pure question; what it found is remembered with its generations until it is pinned."""
        state = self.state
        request, other = state.request(e.req), self.on_lookup.other
        if request.lost:
            state.skipped += 1
            return
        used, matched = e.used, e.matched if e.matched >= 0 else e.used
        if not (self.record_match(request, used, max(matched, used)) and self.claims(e, request, matched)):
            state.lose_request(request)
            return
        request.outside, request.roughly = e.outside, e.grade == "bounded"
        leases = self.leases.setdefault(request.uid, [])
        tier = state.tier(e.tier)
        for name, numbers in e.blocks.items():
            g = state.named(name)
            rows, null, size = self.on_lookup.group[g.index], state.header.null, g.spec.block
            last = first = 0
            for index, number in enumerate(numbers):
                if number == null:
                    continue
                block = state.block(tier, g, number, alive=True)
                if block is None:
                    state.lose_request(request)
                    return
                lease = None
                where = (name, number)
                if tier is state.device and request.record.stage == self.matched:
                    lease = state.lease()
                    if not state.fire(rows["find"], block.segment, lease, request.record, segment=where):
                        state.lose_request(request)
                        return
                    block.leases[request.uid] = lease
                    leases.append((g, block, lease))
                elif not state.fire(other["right_tier"], int(block.segment.stage not in self.readable), segment=where):
                    state.lose_request(request)
                    return
                if not (
                    self.in_place(rows, g, block, index * size, where, tier)
                    and self.same(rows, block, request, (index + 1) * size, where)
                ):
                    state.lose_request(request)
                    return
                covered = block.segment.end
                first = first if last == block.segment.start and last else block.segment.start
                last = covered
            if used and not self.covered(self.on_lookup, g, e.req, used, used, first, last):
                state.lose_request(request)
                return
        for g in state.groups if used else ():
            bare = g.spec.reuse and g.spec.name not in e.blocks
            if bare and not self.covered(self.on_lookup, g, e.req, used, used, 0, 0):
                state.lose_request(request)
                return

    def in_place(self, rows: dict[str, Row], g: GroupState, block: Block, place: int, where: Place, tier: Tier) -> bool:
        """A block holds what its place in the table says, and weights of today wrote it."""
        state, seg = self.state, block.segment
        at = seg.end - g.spec.block if g.states else seg.start
        if not state.fire(self.on_lookup.other["in_place"], at, place, segment=where):
            return False
        return not tier.pool.model_epoch or state.fire(rows["todays_weights"], seg, segment=where, pool=tier.pool)

    def same(self, rows: dict[str, Row], block: Block, request: Request, end: int, where: Place) -> bool:
        """Physical identity: the slot was last written with what is asked for."""
        asked = request.content(end)
        if not asked or not block.tokens:
            return True
        seg = block.segment
        asked_domain = request.rough if block.domain == request.rough else request.domain
        return self.state.fire(rows["same_tokens"], seg, block.tokens, asked, segment=where) and self.state.fire(
            rows["same_domain"], seg, block.domain, asked_domain, segment=where
        )

    def covered(self, on: Bound, g: GroupState, req: str, at: int, used: int, first: int, last: int) -> bool:
        """Contents: the group can resume at a position, where all beyond what is used comes from elsewhere."""
        lo, hi, exact = g.need.need(at, at)
        inputs = (lo, min(hi, used), first, last, exact)
        return self.state.fire(on.group[g.index]["covers"], *inputs, segment=(g.spec.name, req))

    def held(self, request: Request, pinned: list[tuple[GroupState, Block, Any]]) -> bool:
        """What of a hit is pinned is enough: every group resumes from blocks that it holds. Nothing pinned, no hit."""
        hit = pinned or request.outside
        spans = dict.fromkeys((g.index for g in self.state.groups if g.spec.reuse), (0, 0)) if hit else {}
        for g, block, _ in pinned:
            first, last = spans[g.index]
            seg = block.segment
            spans[g.index] = (first if last == seg.start and last else seg.start), seg.end
        used, groups = request.record.f, self.state.groups
        at = used + request.outside
        return all(self.covered(self.hidden, groups[i], request.name, at, used, *span) for i, span in spans.items())

    def record_match(self, request: Request, used: int, matched: int) -> bool:
        """Brings the request's record to a match of this length; a lookup that was not pinned leaves nothing."""
        state, record, other = self.state, request.record, self.on_lookup.other
        again = record.stage in self.looking
        if again and not record.held:
            for g, block, lease in self.leases.pop(request.uid, ()):
                if lease.stage != self.none:
                    state.fire(self.on_lookup.group[g.index]["drop"], block.segment, lease, record)
                block.leases.pop(request.uid, None)
        if record.stage in self.running:
            return True
        request.positions.clear()
        if not used and not again:
            return True
        record = self.longer(request)
        row = "look_again" if again else "match" if record.stage == self.first else "resume"
        if not state.fire(other[row], record, used, used, used, matched, segment=request.name):
            return False
        agreed = self.agreed.get(request.name, min(self.votes.get(request.name, {}).values(), default=-1))
        return agreed < 0 or state.fire(other["within_agreed"], used, agreed, segment=request.name)

    def longer(self, request: Request) -> Any:
        """The record, another one where a preempted request comes again with a longer prompt and holds nothing."""
        state, record, books = self.state, request.record, self.state.books.other
        if record.length != request.length and state.legal(self.hidden.other["resume_cold"], record):
            request.record = state.new_record(request.uid, request.length, bool(record.kernel))
            state.fire(books["come_again"], request.record, record.preempts)
        return request.record

    def claims(self, e: Lookup, request: Request, matched: int) -> bool:
        """What the lookup claims about itself."""
        state, other, used = self.state, self.on_lookup.other, e.used
        checks: list[tuple[str, tuple[int, ...]]] = [("graded", (e.grade == "bounded", request.grade == "bounded"))]
        if used:
            checks.append(("aligned", (used % state.alignment,)))
        length = max(request.length, 1)
        tried = candidate_frontiers(self.groups, {}, min(max(matched, 0), length), length, state.alignment)
        top = tried[0] if tried else 0
        if "limits" in state.claims and e.matched >= 0:
            checks.append(("limits_named", (used, top, len(e.limiting))))
        # What the groups have is known only while no block is lost.
        sure = request.chain and not any(state.device.lost)
        if "announced" in state.claims and e.matched >= 0 and sure:
            checks.append(("found_again", (matched, self.known(request))))
        if "longest" in state.claims and sure:
            checks.append(("longest", (used, self.expected(request, e.matched).r)))
        if e.limiting and sure:
            able = set(e.limiting) - set(self.expected(request, e.matched).limiting)
            checks.append(("limits_true", (used, top, len(able))))
        return state.fire_all(other, checks, e.req)

    def known(self, request: Request) -> int:
        """Tokens from 0 on that some group without a window has findable for this request."""
        best = 0
        for g in self.whole:
            count, size = 0, g.spec.block
            found, known = self.found[g.index], request.known
            while (count + 1) * size <= known and request.content((count + 1) * size) ^ request.domain in found:
                count += 1
            best = max(best, count * size)
        return best

    # -- references ------------------------------------------------------------------------------------------------

    def pin(self, events: Iterable[Pin]) -> None:
        """A request pins its hit; any other holder takes references of its own."""
        state, null = self.state, self.state.header.null
        for e in events:
            state.index += 1
            g, tier, request = state.named(e.group), state.tier(e.tier), state.requests.get(e.req)
            rows = self.on_pin.group[g.index]
            if request is not None and request.lost:
                state.skipped += 1
                continue
            hit = request is not None and tier is state.device and request.record.stage == self.matched
            own = self.written(request, g) if request is not None and request.running and tier is state.device else {}
            for number in e.blocks:
                block = state.block(tier, g, number, alive=True) if number != null else None
                if block is None:
                    continue
                where = (e.group, number)
                if request is not None and own.get(block.segment.start, 0) == (block.content or -1):
                    self.adopt(rows["adopt"], g, block, request)
                    continue
                if request is None or not hit:
                    if state.fire(rows["hold"], block.segment, segment=where, pool=tier.pool):
                        self.holders.setdefault((e.req, e.tier, e.group, number), []).append(block)
                    else:
                        state.lose(tier, g, block)
                    continue
                lease, record = block.leases.get(request.uid), request.record
                if lease is None:
                    lease = state.lease()
                    if not state.fire(rows["find"], block.segment, lease, record, segment=where):
                        state.lose(tier, g, block)
                        continue
                    block.leases[request.uid] = lease
                    self.leases.setdefault(request.uid, []).append((g, block, lease))
                if not state.fire(rows["pin"], block.segment, lease, record, segment=where):
                    state.lose(tier, g, block)

    def written(self, request: Request, g: GroupState) -> dict[int, int]:
        """What a running request holds of a group, by position: the content of its block."""
        blocks = [b for b in self.state.device.blocks[g.index].values() if request.uid in b.leases]
        return {b.segment.start: request.content(b.segment.end) ^ request.domain for b in blocks}

    def adopt(self, row: Row, g: GroupState, block: Block, request: Request) -> None:
        """The request goes on with this block, so that its own one of the same tokens may go."""
        lease = self.state.lease()
        if request.uid in block.leases:
            return
        if self.state.fire(row, block.segment, lease, request.record, segment=(g.spec.name, block.number)):
            block.leases[request.uid] = lease
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

    # -- ranks -----------------------------------------------------------------------------------------------------

    def vote(self, e: Vote) -> None:
        """A rank's own hit; the first one after an agreement is for another hit."""
        if self.agreed.pop(e.req, None) is not None:
            del self.votes[e.req]
        self.votes.setdefault(e.req, {})[e.rank] = e.hit
        if len(self.votes) > REMEMBERED:
            self.forget(next(iter(self.votes)))

    def agree(self, e: Agree) -> None:
        """The hit that all use."""
        votes = self.votes.setdefault(e.req, {})
        if votes:
            self.state.fire(self.on_agree.other["smallest"], e.hit, min(votes.values()), segment=e.req)
        self.agreed[e.req] = e.hit
        if len(self.votes) > REMEMBERED:
            self.forget(next(iter(self.votes)))

    def forget(self, name: str) -> None:
        """Nothing is kept of what ranks said about this request."""
        self.votes.pop(name, None)
        self.agreed.pop(name, None)

    # -- hidden: from the match to the computing -------------------------------------------------------------------

    def settle(self, request: Request) -> bool:
        """The layers of the hit protocol, fired when the request first computes; False where one refuses."""
        if request.running:
            return True
        state, record, other = self.state, request.record, self.hidden.other
        leases = self.leases.pop(request.uid, [])
        done = self.layers(request, record, leases) if record.stage == self.matched else True
        if done and record.stage == self.first:
            state.hidden += 1
            done = state.fire(other["start_cold"], record, segment=request.name)
        elif done and record.stage not in self.running:
            state.hidden += 1
            done = state.fire(other["resume_cold"], record, segment=request.name)
        request.running = done
        if not done:
            state.lose_request(request)
        return done

    def layers(self, request: Request, record: Any, leases: list[tuple[GroupState, Block, Any]]) -> bool:
        """Check, L1 and L2, joint, L4, read."""
        state, rows, other = self.state, self.hidden.group, self.hidden.other
        pinned = []
        for g, block, lease in leases:
            if lease.stage == self.candidate:
                state.fire(rows[g.index]["drop"], block.segment, lease, record)
                block.leases.pop(request.uid, None)
            elif lease.stage != self.none:
                pinned.append((g, block, lease))
        if leases and not pinned and not request.outside:
            request.cold, request.positions = True, dict.fromkeys(state.by_name, 0)
        if not self.held(request, pinned):
            return False
        # Four rows of the request and four of each lease; candidates that nobody pinned are dropped.
        state.hidden += 4 + 4 * len(pinned) + len(leases) - len(pinned)
        for step, of_leases in (("check", ("pass_l1", "pass_l2")), ("join", ("pass_l4",)), ("validate", ("read",))):
            if not state.fire(other[step], record, segment=request.name):
                return False
            for g, block, lease in pinned:
                for row in of_leases:
                    where = (g.spec.name, block.number)
                    if not state.fire(rows[g.index][row], block.segment, lease, record, segment=where):
                        return False
        request.held += len(pinned)
        if request.rough and (request.roughly or any(b.domain == request.rough for _, b, _ in pinned)):
            # What it computes rests on an approximate recovery: other values than those of the exact grade.
            request.domain = request.rough
        return state.fire(other["start_hit"], record, segment=request.name)
