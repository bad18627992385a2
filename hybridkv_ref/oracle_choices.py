"""Hidden choices: which of several equal blocks lost its entry, where no event says so.

The states that are possible then differ only in which of the blocks has which number. One of them is followed and the
numbers are remembered as interchangeable; an event that needs one of them alive, or empty, settles that number, and the
state that is followed is renamed to one that fits it. Where none fits, what is followed is refused like any other.
"""

from hybridkv_ref.oracle_records import Block, GroupState
from hybridkv_ref.oracle_tiers import Tier

Place = tuple[str, int, int]


def equal(blocks: list[Block]) -> bool:
    """Whether nothing but their numbers tells these blocks apart: one entry each, nobody's, of one content."""
    first = blocks[0]
    return all(
        b.segment.keys == 1
        and not (b.leases() or b.segment.pins or b.segment.holds or b.segment.steps)
        and (b.content, b.key, b.segment.start, b.segment.end, b.segment.epoch)
        == (first.content, first.key, first.segment.start, first.segment.end, first.segment.epoch)
        for b in blocks
    )


class Choices:
    """Numbers that may stand for one another, by tier, group and number."""

    def __init__(self) -> None:
        self.of: dict[Place, set[int]] = {}

    def open(self, tier: Tier, group: GroupState, blocks: list[Block]) -> None:
        """One of these blocks is no more; which one is not known."""
        numbers = {block.number for block in blocks}
        for number in list(numbers):
            numbers |= self.of.get((tier.name, group.index, number), set())
        self.of |= dict.fromkeys(((tier.name, group.index, number) for number in numbers), numbers)

    def settle(self, tier: Tier, group: GroupState, number: int, alive: bool) -> None:
        """An event needs this number alive, or empty."""
        numbers = self.of.pop((tier.name, group.index, number), None)
        if numbers is None:
            return
        numbers.discard(number)
        blocks = tier.blocks[group.index]
        if (blocks.get(number) is not None) != alive:
            other = next((n for n in sorted(numbers) if (blocks.get(n) is not None) == alive), None)
            if other is not None:
                old, new = (other, number) if alive else (number, other)
                block = blocks.pop(old)
                if block is not None:
                    block.number = new
                    blocks.add(new, block)
        if len({blocks.get(n) is not None for n in numbers}) < 2:
            self.close(tier, group, numbers)

    def close(self, tier: Tier, group: GroupState, numbers: set[int]) -> None:
        """Nothing is open about these numbers any more."""
        for number in numbers:
            self.of.pop((tier.name, group.index, number), None)
