"""Lookups, and the way of a request through the hit protocol, most of which engines do not report."""

from hybridkv_ref.events import Lookup
from hybridkv_ref.oracle_entities import Lease, Record
from hybridkv_ref.oracle_ranks import Ranks
from hybridkv_ref.oracle_records import Block, Bound, GroupState, Request
from hybridkv_ref.oracle_row import Row
from hybridkv_ref.oracle_state import State
from hybridkv_ref.oracle_tiers import Found, Tier
from hybridkv_ref.recovery import Contents, Hit, candidate_frontiers, longest_hit

RUNNING, OVER, LOOKING = "RUNNING", "OVER", "LOOKING"


class Hits:
    """Lookup; ``settle`` brings a request to where it may compute."""

    def __init__(self, state: State, ranks: Ranks, found: Found) -> None:
        self.state, self.ranks, self.found = state, ranks, found
        self.on_lookup, self.hidden = state.bind("lookup"), state.bind("allocate")
        sets = state.tables.sets["request"]
        self.running, self.looking = frozenset(sets[RUNNING]), frozenset(sets[LOOKING])
        self.over = frozenset(sets[OVER])
        self.first = state.tables.classes["request"]["stage"].init
        self.matched = next(e for e in state.tables.events if e.id == "request.match").edges["req"][1]
        self.none = state.tables.classes["lease"]["stage"].init
        self.candidate = next(e for e in state.tables.events if e.row == "find").edges["lease"][1]
        self.readable = state.tables.kinds[state.groups[0].kind].sets["READABLE"]
        self.leases: dict[int, list[tuple[GroupState, Block, Lease]]] = {}
        self.groups = [g.need for g in state.groups if g.spec.reuse]
        self.whole = [g for g in state.groups if g.low(g.spec.block) == 0 and not g.need.exact and g.spec.reuse]

    # -- what an engine could use ----------------------------------------------------------------------------------

    def contents(self, request: Request) -> dict[str, Contents]:
        """What each group has findable on the device for this request's tokens."""
        held: dict[str, Contents] = {}
        for g in self.state.groups:
            if not g.spec.reuse:
                continue
            found, blocks, ends, size = self.found.contents(g.index), 0, set(), g.spec.block
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
            rows, null, size, record = self.on_lookup.group[g.index], state.header.null, g.block, request.record
            last = first = 0
            find, finds = rows["find"], tier is state.device and record.stage == self.matched
            for index, number in enumerate(numbers):
                if number == null:
                    continue
                block = state.block(tier, g, number, alive=True)
                if block is None:
                    state.lose_request(request)
                    return
                seg = block.segment
                if finds:
                    lease = state.make.lease()
                    find.count += 1
                    if (bad := find.lease0(state.pool, seg, lease, record)) >= 0:
                        state.refuse(find, bad, (seg, lease, record), (name, number))
                        state.lose_request(request)
                        return
                    block.hold(request.uid, lease)
                    leases.append((g, block, lease))
                elif not state.fire(other["right_tier"], int(seg.stage not in self.readable), segment=(name, number)):
                    state.lose_request(request)
                    return
                if not (
                    self.in_place(rows, g, block, index * size, tier)
                    and self.same(rows, g, block, request, (index + 1) * size)
                ):
                    state.lose_request(request)
                    return
                if last != seg.start or not last:
                    first = seg.start
                last = seg.end
            if used and not self.covered(self.on_lookup, g, e.req, used, used, first, last):
                state.lose_request(request)
                return
        for g in state.groups if used else ():
            bare = g.spec.reuse and g.spec.name not in e.blocks
            if bare and not self.covered(self.on_lookup, g, e.req, used, used, 0, 0):
                state.lose_request(request)
                return

    def in_place(self, rows: dict[str, Row], g: GroupState, block: Block, place: int, tier: Tier) -> bool:
        """A block holds what its place in the table says, and weights of today wrote it."""
        state, seg, row, where = self.state, block.segment, self.on_lookup.other["in_place"], (g.name, block.number)
        at = seg.end - g.block if g.states else seg.start
        row.count += 1
        if (index := row.sys2(state.pool, at, place)) >= 0:
            return state.refuse(row, index, (at, place), where)
        return not tier.pool.model_epoch or state.fire(rows["todays_weights"], seg, segment=where, pool=tier.pool)

    def same(self, rows: dict[str, Row], g: GroupState, block: Block, request: Request, end: int) -> bool:
        """Physical identity: the slot was last written with what is asked for."""
        asked = request.content(end)
        if not asked or not block.tokens:
            return True
        state, seg, where, row = self.state, block.segment, (g.name, block.number), rows["same_tokens"]
        row.count += 1
        if (index := row.seg2(state.pool, seg, block.tokens, asked)) >= 0:
            return state.refuse(row, index, (seg, block.tokens, asked), where)
        domain, row = request.rough if block.domain == request.rough else request.domain, rows["same_domain"]
        row.count += 1
        if (index := row.seg2(state.pool, seg, block.domain, domain)) >= 0:
            return state.refuse(row, index, (seg, block.domain, domain), where)
        return True

    def covered(self, on: Bound, g: GroupState, req: str, at: int, used: int, first: int, last: int) -> bool:
        """Contents: the group can resume at a position, where all beyond what is used comes from elsewhere."""
        lo, hi, exact = g.need.need(at, at)
        inputs = (lo, min(hi, used), first, last, exact)
        return self.state.fire(on.group[g.index]["covers"], *inputs, segment=(g.spec.name, req))

    def held(self, request: Request, pinned: list[tuple[GroupState, Block, Lease]]) -> bool:
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
                block.let(request.uid)
        if record.stage in self.running:
            return True
        request.positions.clear()
        if not used and not again:
            return True
        record = self.longer(request)
        row = "look_again" if again else "match" if record.stage == self.first else "resume"
        if not state.fire(other[row], record, used, used, used, matched, segment=request.name):
            return False
        agreed = self.ranks.hit(request.name)
        return agreed < 0 or state.fire(other["within_agreed"], used, agreed, segment=request.name)

    def longer(self, request: Request) -> Record:
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
        sure = request.chain and not any(held.lost for held in state.device.blocks)
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
            found, known = self.found.contents(g.index), request.known
            while (count + 1) * size <= known and request.content((count + 1) * size) ^ request.domain in found:
                count += 1
            best = max(best, count * size)
        return best

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

    def layers(self, request: Request, record: Record, leases: list[tuple[GroupState, Block, Lease]]) -> bool:
        """Check, L1 and L2, joint, L4, read."""
        state, rows, other = self.state, self.hidden.group, self.hidden.other
        pinned = []
        for g, block, lease in leases:
            if lease.stage == self.candidate:
                state.fire(rows[g.index]["drop"], block.segment, lease, record)
                block.let(request.uid)
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
            # Block by block, which is the order of the refusals; the rows are looked up once for a group's blocks.
            last = None
            for g, block, lease in pinned:
                if g is not last:
                    last, fired = g, [rows[g.index][name] for name in of_leases]
                for row in fired:
                    row.count += 1
                    if (index := row.lease0(state.pool, block.segment, lease, record)) >= 0:
                        return state.refuse(row, index, (block.segment, lease, record), (g.name, block.number))
        request.held += len(pinned)
        if request.rough and (request.roughly or any(b.domain == request.rough for _, b, _ in pinned)):
            # What it computes rests on an approximate recovery: other values than those of the exact grade.
            request.domain = request.rough
        return state.fire(other["start_hit"], record, segment=request.name)
