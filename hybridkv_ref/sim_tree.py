"""The prefix tree of a simulation: which prompts were seen, and where each group's segments of them are.

Prompts are given as *keys*, one per position at which a hit may end: the trace's block ids, taken where a multiple of
the alignment ends. A node is a range of a prompt that was never seen to branch inside; a *cell* is one group's part of
a node. Nodes stay when their segments are evicted: what was seen before counts as matched, whether it is still there or
not. The tree is bookkeeping only; what may happen to a segment is for the tables.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any

from hybridkv_ref.request_traces import Request
from hybridkv_ref.sim_machine import GroupRows


class Cell:
    """One group's part of a node.

    ``segments`` has one place for a ranged group, else one per key of the node; ``objects`` are the durable copies, in
    the same places. ``queue`` is the eviction order that the cell stands in, if it holds any segment.
    """

    __slots__ = ("node", "objects", "queue", "rows", "segments")

    def __init__(self, rows: GroupRows, node: "Node", places: int) -> None:
        self.rows, self.node = rows, node
        self.segments: list[Any] = [None] * places
        self.objects: list[StoredObject | None] = [None] * places
        self.queue: OrderedDict[Cell, None] | None = None


class StoredObject:
    """A durable copy of one segment; once its node was cut, of the segments of several cells, which tile its range."""

    __slots__ = ("cells", "entity")

    def __init__(self, entity: Any, cell: Cell) -> None:
        self.entity, self.cells = entity, [cell]


class Node:
    """The tokens [start, cuts[-1]) of a prompt: ``keys`` name its positions ``cuts``, ``children`` what followed."""

    __slots__ = ("cells", "children", "cuts", "keys", "start")

    def __init__(self, start: int, keys: list[int], cuts: list[int]) -> None:
        self.start, self.keys, self.cuts = start, keys, cuts
        self.children: dict[int, Node] = {}
        self.cells: list[Cell] = []


class Tree:
    """All prompts seen."""

    def __init__(self, groups: Sequence[GroupRows]) -> None:
        self.groups = groups
        self.root = Node(0, [], [])

    def walk(self, keys: Sequence[int]) -> list[tuple[Node, int]]:
        """The nodes that these keys lead through, each with the number of its keys that agree (at least 1)."""
        path = []
        node, at, total = self.root, 0, len(keys)
        while at < total:
            child = node.children.get(keys[at])
            if child is None:
                break
            own, agree = child.keys, 1
            most = min(len(own), total - at)
            while agree < most and own[agree] == keys[at + agree]:
                agree += 1
            path.append((child, agree))
            at += agree
            if agree < len(own):
                break
            node = child
        return path

    def add(self, parent: Node, keys: list[int], cuts: list[int]) -> Node:
        """A new node below ``parent``, its cells empty."""
        node = Node(parent.cuts[-1] if parent.cuts else 0, keys, cuts)
        node.cells = [Cell(g, node, 1 if g.ranged else len(keys)) for g in self.groups]
        parent.children[keys[0]] = node
        return node

    def cut(self, node: Node, keys: int) -> Node:
        """Cuts a node after its first ``keys`` keys; the rest becomes its only child, whose ranged cells are empty."""
        rest = Node(node.cuts[keys - 1], node.keys[keys:], node.cuts[keys:])
        rest.children, node.children = node.children, {node.keys[keys]: rest}
        rest.cells = [Cell(g, rest, 1 if g.ranged else len(rest.keys)) for g in self.groups]
        for cell, moved in zip(node.cells, rest.cells, strict=True):
            if not cell.rows.ranged:
                moved.segments, cell.segments = cell.segments[keys:], cell.segments[:keys]
                moved.objects, cell.objects = cell.objects[keys:], cell.objects[:keys]
        node.keys, node.cuts = node.keys[:keys], node.cuts[:keys]
        return rest


def positions(request: Request, alignment: int) -> Iterator[tuple[int, int]]:
    """(key, position) of each position at which a hit on this prompt may end, in order.

    A position is where a block ends, rounded down to ``alignment``.  Its key is the id of the block that holds the last
    token before it: ids are chained, so it stands for all tokens before the position.
    """
    last = 0
    for end, key in enumerate(request.block_ids, start=1):
        cut = min(end * request.block_tokens, request.input_tokens)
        cut -= cut % alignment
        if cut > last:
            yield key, cut
            last = cut
