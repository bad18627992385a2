"""The tiers of the oracle: per group the blocks by number, and what is findable of them by content."""

from collections.abc import Callable
from typing import Final

from hybridkv_ref.events import DEVICE
from hybridkv_ref.oracle_entities import Pool, Segment
from hybridkv_ref.oracle_records import Block, GroupState
from hybridkv_ref.oracle_row import Row

SPARE: Final = 4096
"""How many records of empty blocks are kept to be used again, per group and tier."""

NEAR: Final = 1 << 20
"""Blocks of the device with numbers below this are kept in a list; those of other tiers are few, or far between."""

Entry = Block | None
"""A block that is findable, or None where the event did not say which."""


class Numbered:
    """The blocks of one group in one tier by number: ``near`` ones in a list, which is faster, and ``far`` in a dict.

    ``end``: the first number that is not near. ``lost``: numbers of whose blocks nothing is known. ``counts``: where
    groups share a pool of the device, how many of them have a near block of a number.
    """

    __slots__ = ("counts", "end", "far", "group", "lost", "near", "segment", "spare")

    def __init__(self, group: int, segment: Callable[..., Segment], counts: list[int] | None, end: int) -> None:
        self.group, self.segment, self.counts, self.end = group, segment, counts, end
        self.near: list[Block | None] = []
        self.far: dict[int, Block] = {}
        self.lost: set[int] = set()
        self.spare: list[Block] = []

    def get(self, number: int) -> Block | None:
        """The block of this number, if there is one. Spelled out where it is asked for block after block."""
        near = self.near
        return near[number] if 0 <= number < len(near) else self.far.get(number)

    def values(self) -> list[Block]:
        """Every block."""
        return [*(block for block in self.near if block is not None), *self.far.values()]

    def new(self, number: int) -> Block:
        """An empty block for a number that has none."""
        if self.spare:
            found = self.spare.pop()
            found.number = number
        else:
            found = Block(number, self.segment(group=self.group))
        self.add(number, found)
        return found

    def add(self, number: int, block: Block) -> None:
        """A block of a number that has none."""
        if not 0 <= number < self.end:
            self.far[number] = block
            return
        near, counts = self.near, self.counts
        if number >= len(near):
            near.extend([None] * (min(2 * number + 1, self.end) - len(near)))
        near[number] = block
        if counts is not None:
            if number >= len(counts):
                counts.extend([0] * (len(near) - len(counts)))
            counts[number] += 1

    def pop(self, number: int) -> Block | None:
        """The block of this number, which is there no more."""
        near, counts = self.near, self.counts
        if not 0 <= number < len(near):
            return self.far.pop(number, None)
        found = near[number]
        if found is not None:
            near[number] = None
            if counts is not None:
                counts[number] -= 1
        return found

    def alone(self, number: int) -> bool:
        """No other group of the pool has a block of a number of which this one has one; False where it is not known."""
        return self.counts is None or (0 <= number < self.end and self.counts[number] < 2)

    def rest(self, block: Block) -> None:
        """An empty block of which nobody knows: its record may stand for another one."""
        if self.pop(block.number) is block and len(self.spare) < SPARE:
            block.tokens = block.domain = block.content = 0
            block.key = ""
            self.spare.append(block)


class Tier:
    """One tier: its pool, blocks of each group, and its rows, under its caps."""

    __slots__ = ("blocks", "name", "pool", "rows")

    def __init__(
        self, name: str, pool: Pool, groups: list[GroupState], segment: Callable[..., Segment], rows: list[Row]
    ) -> None:
        self.name, self.pool, self.rows = name, pool, rows
        counts = {g.spec.pool: list[int]() for g in groups if g.spec.pool and name == DEVICE}
        end = NEAR if name == DEVICE else 0
        self.blocks = [Numbered(g.index, segment, counts.get(g.spec.pool), end) for g in groups]


class Found:
    """Live entries by tier, group and key; per group, how many findable blocks of the device hold a content.

    What the blocks hold is counted from the first question on.
    """

    def __init__(self, device: Tier) -> None:
        self.device, self.counts = device, [dict[int, int]() for _ in device.blocks]
        self.asked = False
        self.entries: dict[tuple[str, int], dict[str, list[Entry]]] = {}

    def of(self, tier: str, group: int) -> dict[str, list[Entry]]:
        """The entries of one group in one tier."""
        key = (tier, group)
        found = self.entries.get(key)
        if found is None:
            found = self.entries[key] = {}
        return found

    def contents(self, group: int) -> dict[int, int]:
        """How many findable blocks of a group hold each content."""
        if not self.asked:
            self.asked = True
            for index, blocks in enumerate(self.device.blocks):
                for live in self.of(DEVICE, index).values():
                    for block in live:
                        if block is not None and blocks.get(block.number) is block:
                            self.more(index, block.content)
        return self.counts[group]

    def more(self, group: int, content: int) -> None:
        """One findable block more holds this content."""
        if self.asked and content:
            counts = self.counts[group]
            counts[content] = counts.get(content, 0) + 1

    def fewer(self, group: int, content: int) -> None:
        """One findable block fewer holds this content."""
        if self.asked and content:
            counts = self.counts[group]
            count = counts.get(content, 0)
            if count > 1:
                counts[content] = count - 1
            elif count:
                del counts[content]
