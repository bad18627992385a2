"""The prefix index: entries come and go as a multiset, and what they say of their blocks."""

from collections.abc import Iterable

from hybridkv_ref.events import DEVICE, KeyPublish, KeyRemove, Measure
from hybridkv_ref.oracle_blocks import Blocks
from hybridkv_ref.oracle_choices import equal
from hybridkv_ref.oracle_records import Block, GroupState, Request
from hybridkv_ref.oracle_row import Row
from hybridkv_ref.oracle_state import State
from hybridkv_ref.oracle_tiers import Entry, Found, Tier


class Index:
    """Entries come and go; ``parents``: by tier, group and key, the key that an entry of a tree continues."""

    def __init__(self, state: State, blocks: Blocks, found: Found) -> None:
        self.state, self.blocks, self.found = state, blocks, found
        self.on_publish, self.on_remove = state.bind("key_publish"), state.bind("key_remove")
        self.on_measure, self.on_reset = state.bind("measure"), state.bind("reset")
        self.parents: dict[tuple[str, int, str], str] = {}

    def publish(self, events: Iterable[KeyPublish]) -> None:
        """From here on the blocks can be found under these keys."""
        state, on, null, tree = self.state, self.on_publish, self.state.header.null, "tree" in self.state.claims
        pool, choices, unwritten, group, name = state.pool, state.choices.of, self.blocks.open, None, None
        not_null, found = on.other["not_null"], self.found
        for e in events:
            state.index += 1
            if e.group != group or e.tier != name:
                group, name = e.group, e.tier
                g, tier = state.named(group), state.tier(name)
                entries, held, rows = found.of(name, g.index), tier.blocks[g.index], on.group[g.index]
                near, on_device = held.near, tier is state.device
                publish, at_tier = rows["publish"], tier.pool
            numbers, parent, at = e.blocks, e.parent, e.at
            if e.tokens is not None:
                covered = len(e.keys) * g.spec.block
                state.fire(on.other["dense"], e.tokens[1] - e.tokens[0], covered, segment=group)
            if tree and parent and not self.findable(tier, g, parent):
                continue
            if numbers and not g.states and (first := held.get(numbers[0])) is not None:
                before = entries.get(parent, []) if parent else []
                if not self.right_place(e, g, tier, first, before):
                    continue
            for place, key in enumerate(e.keys):
                block: Entry = None
                live = entries.get(key)
                if numbers:
                    number = numbers[place] if place < len(numbers) else null
                    not_null.count += 1
                    if (index := not_null.sys1(pool, number == null)) >= 0:
                        state.refuse(not_null, index, (number == null,), (group, number))
                        continue
                    if choices:
                        state.choices.settle(tier, g, number, alive=True)
                    block = near[number] if 0 <= number < len(near) else held.get(number)
                    block = block or state.unnamed(held, number)
                if block is not None:
                    seg, writer = block.segment, block.writer
                    right = writer is None or seg.stage not in unwritten or self.commit(rows, g, block, writer)
                    if right and (live or at >= 0):
                        right = self.agrees(g, block, at, live)
                    if right:
                        publish.count += 1
                        if (index := publish.seg0(at_tier, seg)) >= 0:
                            right = state.refuse(publish, index, (seg,), (group, number), at_tier)
                    if not right:
                        state.lose(tier, g, block)
                        continue
                    block.key = key
                    if on_device:
                        found.more(g.index, block.content)
                if live is None:
                    entries[key] = [block]
                else:
                    live.append(block)
                if tree and parent and block is not None:
                    self.parents[tier.name, g.index, key] = parent
                    for above in {tier.name, DEVICE}:
                        self.blocks.below.setdefault((above, g.index, parent), []).append(block)
                parent = key

    def right_place(self, e: KeyPublish, g: GroupState, tier: Tier, first: Block, before: list[Entry]) -> bool:
        """A first block begins where the announced span does, and where a block that it continues (before) ends."""
        other, start, right = self.on_publish.other, first.segment.start, True
        if e.tokens is not None:
            right = self.state.fire(other["begins_there"], e.tokens[0], start, segment=(e.group, first.number))
        end = -1
        above = () if tier is self.state.device else self.found.of(DEVICE, g.index).get(e.parent, ())
        for entry in (*before, *above):
            if entry is not None and end != start:
                end = max(end, entry.segment.end) if entry.segment.end != start else start
        if end >= 0:
            row = other["continues"]
            row.count += 1
            if (index := row.sys2(self.state.pool, start, end)) >= 0:
                return self.state.refuse(row, index, (start, end), (e.group, first.number))
        return right

    def findable(self, tier: Tier, g: GroupState, parent: str) -> bool:
        """What an entry of a tree continues is in the index, of its tier or of the device."""
        count = sum(len(self.found.of(name, g.index).get(parent, ())) for name in {tier.name, DEVICE})
        return self.state.fire(self.on_publish.other["parent_findable"], count, segment=(g.spec.name, parent))

    def commit(self, rows: dict[str, Row], g: GroupState, block: Block, writer: Request) -> bool:
        """The writer of a block is done: what it wrote of what its request has accepted is the block's content."""
        state, seg, record, lease = self.state, block.segment, writer.record, block.lease_of(writer.uid)
        if lease is None:
            return True
        known = seg.end if seg.end < record.accepted else record.accepted
        if known > seg.committed:
            state.hidden += 1
            row = rows["accept_tokens"]
            row.count += 1
            if (index := row.lease1(state.pool, seg, lease, record, known)) >= 0:
                state.refuse(row, index, (seg, lease, record, known), "")
        row = rows["commit"]
        row.count += 1
        if (index := row.lease0(state.pool, seg, lease, record)) >= 0:
            return state.refuse(row, index, (seg, lease, record), (g.spec.name, block.number))
        self.name_content(block, writer)
        return True

    def agrees(self, g: GroupState, block: Block, at: int, live: list[Entry] | None) -> bool:
        """A block ends where its label says, and its content is that of the key's other entries (``live``)."""
        state, other, where = self.state, self.on_publish.other, (g.spec.name, block.number)
        if at >= 0 and not state.fire(other["at_label"], at, block.segment.end, segment=where):
            return False
        known = next((b.content for b in live or () if b is not None and b.content), 0) if block.content else 0
        return not known or state.fire(other["same_content"], block.content, known, segment=where)

    @staticmethod
    def name_content(block: Block, writer: Request) -> None:
        """What the writer has written: its tokens up to the block's end, under its other inputs."""
        tokens = block.tokens = writer.content(block.segment.end)
        domain = block.domain = writer.domain if tokens else 0
        block.content = tokens ^ domain

    def remove(self, events: Iterable[KeyRemove]) -> None:
        """Entries leave; a block that no other entry names and nobody holds is given back."""
        state, on, claims = self.state, self.on_remove, self.state.claims
        tree, tails, choices = "tree" in claims, "tails" in claims, state.choices.of
        pool, group, name = state.pool, None, None
        known = on.other["known_entry"]
        for e in events:
            state.index += 1
            if e.group != group or e.tier != name:
                group, name = e.group, e.tier
                g, tier = state.named(group), state.tier(name)
                entries, held, rows = self.found.of(name, g.index), tier.blocks[g.index], on.group[g.index]
                unpublish = rows["unpublish"]
            for place, key in enumerate(e.keys):
                live: list[Entry] = entries.pop(key, [])
                known.count += 1
                if (index := known.sys1(pool, len(live))) >= 0:
                    state.refuse(known, index, (len(live),), (e.group, key))
                    continue
                number = e.blocks[place] if place < len(e.blocks) else None
                if choices and number is not None:
                    state.choices.settle(tier, g, number, alive=True)
                place_of = self.choose(tier, g, live, number) if len(live) > 1 else 0
                entry = live.pop(place_of)
                if live:
                    entries[key] = live
                if tree:
                    if not live:
                        below = self.blocks.below.get((e.tier, g.index, key), ())
                        state.fire(on.other["leaf"], len(below), segment=(e.group, key))
                    self.forget_child(tier.name, g.index, key, entry, last=not live)
                if entry is None or held.get(entry.number) is not entry:
                    continue
                seg = entry.segment
                unpublish.count += 1
                if (index := unpublish.seg0(tier.pool, seg)) >= 0:
                    state.refuse(unpublish, index, (seg,), (e.group, entry.number), tier.pool)
                    state.lose(tier, g, entry)
                    continue
                self.lose_content(tier, g, entry)
                if seg.stage in self.blocks.fresh:
                    if tails and state.legal(self.blocks.unheld[g.index], seg, pool=tier.pool):
                        self.blocks.in_order(on.other["tail_first"], tier, g, entry, (e.group, entry.number))
                    self.blocks.give_back(rows["retire"], rows["free"], tier, g, entry)

    def choose(self, tier: Tier, g: GroupState, live: list[Entry], number: int | None) -> int:
        """Which of several equal entries goes: the named one, else the one that nobody holds.

        Where nobody holds several of them the choice is hidden: it stays open where nothing tells their blocks apart,
        else none of these is judged until it is taken anew.
        """
        if number is not None:
            return next((i for i, b in enumerate(live) if b is not None and b.number == number), 0)
        idle = [i for i, b in enumerate(live) if b is None or not b.segment.pins]
        self.state.peak = max(self.state.peak, len(idle))
        if len(idle) > 1:
            self.state.hidden += 1
            held = tier.blocks[g.index]
            blocks = [b for i in idle if (b := live[i]) is not None and held.get(b.number) is b]
            if len(blocks) == len(idle) and equal(blocks) and not self.state.claims & {"tree", "tails"}:
                self.state.choices.open(tier, g, blocks)
            else:
                for block in blocks:
                    self.forget_choice(tier, g, block.number)
                    if held.get(block.number) is block:
                        self.lose_content(tier, g, block)
                        self.state.lose(tier, g, block)
        return idle[0] if idle else 0

    def forget_child(self, tier: str, group: int, key: str, entry: Entry, last: bool) -> None:
        """The entry continues no other one any more; ``last``: of those of its key."""
        parent = self.parents.get((tier, group, key), "")
        if last:
            self.parents.pop((tier, group, key), None)
        for above in {tier, DEVICE} if entry is not None else ():
            below = self.blocks.below.get((above, group, parent), [])
            if entry in below:
                below.remove(entry)
            if not below:
                self.blocks.below.pop((above, group, parent), None)

    def lose_content(self, tier: Tier, g: GroupState, block: Block) -> None:
        """One findable block fewer holds this content."""
        if tier is self.state.device:
            self.found.fewer(g.index, block.content)

    def clear(self, group: GroupState, numbers: list[int]) -> None:
        """The entries of a group's device blocks go with a reset."""
        rows = self.on_reset.group[group.index]
        device = self.state.device
        choices = self.state.choices
        if not numbers:
            choices.close(device, group, {n for tier, i, n in choices.of if (tier, i) == (DEVICE, group.index)})
        for number in numbers:
            self.forget_choice(device, group, number)
        entries = self.found.of(DEVICE, group.index)
        chosen = set(numbers)
        for key, live in list(entries.items()):
            for entry in [b for b in live if b is not None and (not chosen or b.number in chosen)]:
                live.remove(entry)
                if device.blocks[group.index].get(entry.number) is entry:
                    self.state.fire(rows["unpublish"], entry.segment, segment=f"{group.spec.name}:{entry.number}")
                    self.lose_content(device, group, entry)
            if not live or (not chosen and all(b is None for b in live)):
                del entries[key]

    def forget_choice(self, tier: Tier, group: GroupState, number: int) -> None:
        """Nothing is judged any more of the blocks among which a choice is open that has this number in it."""
        together = self.state.choices.of.get((tier.name, group.index, number), set())
        self.state.choices.close(tier, group, together)
        for other in together:
            if (block := tier.blocks[group.index].get(other)) is not None:
                self.lose_content(tier, group, block)
                self.state.lose(tier, group, block)
            tier.blocks[group.index].lost.add(other)

    def measure(self, e: Measure) -> None:
        """Counts that the engine reports."""
        state, other = self.state, self.on_measure.other
        match e.what:
            case "cached":
                g = state.named(e.group)
                entries = self.found.of(DEVICE, g.index).values()
                real = sum(1 for live in entries for b in live if b is None or b.segment.keys)
                state.fire(other["counted"], e.value, real, segment=e.group)
            case "pool":
                row, told = other["balance"], (e.free, e.used, e.reserved, e.capacity)
                row.count += 1
                if (index := row.sys4(state.pool, *told)) >= 0:
                    state.refuse(row, index, told, e.group)
            case "rows":
                spec = state.named(e.group).spec
                told = (e.bound, spec.window, spec.block, state.header.limits.in_flight)
                state.fire(other["window_bound"], e.value, *told, segment=e.group)
