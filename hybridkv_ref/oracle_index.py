"""The prefix index: entries come and go as a multiset, and what they say of their blocks."""

from hybridkv_ref.events import DEVICE, KeyPublish, KeyRemove, Measure
from hybridkv_ref.oracle_blocks import Blocks
from hybridkv_ref.oracle_choices import equal
from hybridkv_ref.oracle_records import Block, GroupState, Tier
from hybridkv_ref.oracle_state import State

Entry = Block | None
"""A block, or None where the event did not say which."""


class Index:
    """Live entries by tier, group and key; per group, how many findable blocks of the device hold a content."""

    def __init__(self, state: State, blocks: Blocks, found: list[dict[int, int]]) -> None:
        self.state, self.blocks, self.found = state, blocks, found
        self.on_publish, self.on_remove = state.bind("key_publish"), state.bind("key_remove")
        self.on_measure, self.on_reset = state.bind("measure"), state.bind("reset")
        self.entries: dict[tuple[str, int], dict[str, list[Entry]]] = {}
        self.parents: dict[tuple[str, int, str], str] = {}

    def of(self, tier: str, group: int) -> dict[str, list[Entry]]:
        """The entries of one group in one tier."""
        key = (tier, group)
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = {}
        return found

    def publish(self, e: KeyPublish) -> None:
        """From here on the blocks can be found under these keys."""
        state, g, on = self.state, self.state.named(e.group), self.on_publish
        tier, entries, parent = state.tier(e.tier), self.of(e.tier, g.index), e.parent
        null, tree, numbers = state.header.null, "tree" in state.claims, e.blocks
        not_null = on.other["not_null"]
        if e.tokens is not None:
            covered = len(e.keys) * g.spec.block
            state.fire(on.other["dense"], e.tokens[1] - e.tokens[0], covered, segment=e.group)
        if parent and tree:
            count = len(entries.get(parent, ())) + (
                len(self.of(DEVICE, g.index).get(parent, ())) if tier.name != DEVICE else 0
            )
            if not state.fire(on.other["parent_findable"], count, segment=(e.group, parent)):
                return
        if numbers and not g.states and not self.right_place(e, g, tier):
            return
        for place, key in enumerate(e.keys):
            block: Entry = None
            if numbers:
                number = numbers[place] if place < len(numbers) else null
                not_null.count += 1
                if (index := not_null.call(state.pool, number == null)) >= 0:
                    state.refuse(not_null, index, (number == null,), (e.group, number))
                    continue
                block = state.block(tier, g, number, alive=True)
                if block is not None and not self.put(tier, g, block, key, e.at, entries):
                    state.lose(tier, g, block)
                    continue
                if block is not None:
                    block.key = key
            live = entries.get(key)
            if live is None:
                entries[key] = [block]
            else:
                live.append(block)
            if parent and tree and block is not None:
                self.parents[tier.name, g.index, key] = parent
                for above in {tier.name, DEVICE}:
                    self.blocks.below.setdefault((above, g.index, parent), []).append(block)
            parent = key

    def right_place(self, e: KeyPublish, g: GroupState, tier: Tier) -> bool:
        """The first block begins where the announced span does, and where the block that it continues ends."""
        other, first, where = self.on_publish.other, tier.blocks[g.index].get(e.blocks[0]), (e.group, e.blocks[0])
        if first is None:
            return True
        start = first.segment.start
        right = e.tokens is None or self.state.fire(other["begins_there"], e.tokens[0], start, segment=where)
        ends = {
            b.segment.end for t in {tier.name, DEVICE} for b in self.of(t, g.index).get(e.parent, ()) if b is not None
        }
        end = start if start in ends else max(ends, default=start)
        return (not ends or self.state.fire(other["continues"], start, end, segment=where)) and right

    def put(self, tier: Tier, g: GroupState, block: Block, key: str, at: int, entries: dict[str, list[Entry]]) -> bool:
        """One entry: the writer is done if it was not, the content is that of the key's other entries."""
        state, rows, other, seg = self.state, self.on_publish.group[g.index], self.on_publish.other, block.segment
        where = (g.spec.name, block.number)
        writer = block.writer
        if seg.stage in self.blocks.open and writer is not None and writer.uid in block.leases:
            lease, record = block.leases[writer.uid], writer.record
            known = min(seg.end, record.accepted)
            if known > seg.committed:
                state.hidden += 1
                state.fire(rows["accept_tokens"], seg, lease, record, known)
            row = rows["commit"]
            row.count += 1
            if (index := row.call(state.pool, seg, lease, record)) >= 0:
                state.refuse(row, index, (seg, lease, record), where)
                return False
            self.name_content(g, block)
        if at >= 0 and not state.fire(other["at_label"], at, seg.end, segment=where):
            return False
        content = block.content
        for recorded in entries.get(key, ()) if content else ():
            if recorded is not None and recorded.content:
                if not state.fire(other["same_content"], content, recorded.content, segment=where):
                    return False
                break
        row = rows["publish"]
        row.count += 1
        if (index := row.call(tier.pool, seg)) >= 0:
            state.refuse(row, index, (seg,), where, tier.pool)
            return False
        if content and tier is state.device:
            found = self.found[g.index]
            found[content] = found.get(content, 0) + 1
        return True

    @staticmethod
    def name_content(g: GroupState, block: Block) -> None:
        """What the writer has written: its tokens up to the block's end, under its other inputs."""
        writer = block.writer
        if writer is not None:
            block.tokens = writer.content(block.segment.end)
            block.domain = writer.domain if block.tokens else 0
            block.content = block.tokens ^ block.domain

    def remove(self, e: KeyRemove) -> None:
        """Entries leave; a block that no other entry names and nobody holds is given back."""
        state, g, on = self.state, self.state.named(e.group), self.on_remove
        tier, entries = state.tier(e.tier), self.of(e.tier, g.index)
        known, rows, tree, pool = on.other["known_entry"], on.group[g.index], "tree" in state.claims, state.pool
        unpublish, tails = rows["unpublish"], "tails" in state.claims
        for place, key in enumerate(e.keys):
            live: list[Entry] = entries.get(key) or []
            known.count += 1
            if (index := known.call(pool, len(live))) >= 0:
                state.refuse(known, index, (len(live),), (e.group, key))
                continue
            number = e.blocks[place] if place < len(e.blocks) else None
            if number is not None and state.choices.of:
                state.choices.settle(tier, g, number, alive=True)
            place_of = self.choose(tier, g, live, number) if len(live) > 1 else 0
            entry = live.pop(place_of)
            if not live:
                del entries[key]
            if tree and not live:
                below = self.blocks.below.get((e.tier, g.index, key), ())
                state.fire(on.other["leaf"], len(below), segment=(e.group, key))
            if tree:
                self.forget_child(tier.name, g.index, key, entry, last=not live)
            if entry is None or tier.blocks[g.index].get(entry.number) is not entry:
                continue
            where = (e.group, entry.number)
            unpublish.count += 1
            if (index := unpublish.call(tier.pool, entry.segment)) >= 0:
                state.refuse(unpublish, index, (entry.segment,), where, tier.pool)
                state.lose(tier, g, entry)
                continue
            self.lose_content(tier, g, entry)
            if entry.segment.stage in self.blocks.fresh:
                if tails and state.legal(self.blocks.unheld[g.index], entry.segment, pool=tier.pool):
                    self.blocks.in_order(on.other["tail_first"], tier, g, entry, where)
                self.blocks.give_back(rows, tier, g, entry, where)

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
        found, content = self.found[g.index], block.content
        count = found.get(content, 0) if tier is self.state.device else 0
        if count > 1:
            found[content] = count - 1
        elif count:
            del found[content]

    def clear(self, group: GroupState, numbers: list[int]) -> None:
        """The entries of a group's device blocks go with a reset."""
        rows = self.on_reset.group[group.index]
        device = self.state.device
        choices = self.state.choices
        if not numbers:
            choices.close(device, group, {n for tier, i, n in choices.of if (tier, i) == (DEVICE, group.index)})
        for number in numbers:
            self.forget_choice(device, group, number)
        entries = self.of(DEVICE, group.index)
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
            tier.lost[group.index].add(other)

    def measure(self, e: Measure) -> None:
        """Counts that the engine reports."""
        state, other = self.state, self.on_measure.other
        match e.what:
            case "cached":
                g = state.named(e.group)
                real = sum(1 for live in self.of(DEVICE, g.index).values() for b in live if b is None or b.segment.keys)
                state.fire(other["counted"], e.value, real, segment=e.group)
            case "pool":
                state.fire(other["balance"], e.free, e.used, e.reserved, e.capacity, segment=e.group)
            case "rows":
                spec = state.named(e.group).spec
                told = (e.bound, spec.window, spec.block, state.header.limits.in_flight)
                state.fire(other["window_bound"], e.value, *told, segment=e.group)
