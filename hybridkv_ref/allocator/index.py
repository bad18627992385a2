"""The prefix index: which segments and durable copies belong to a prefix, by a chain of hashes over the grid.

A key stands for all tokens up to a grid position, the salt and the model's layouts included, so that equal keys mean
equal bytes.  The index names candidates only; whether one may be used is asked of the tables.
"""

import hashlib
from collections.abc import Container, Sequence

import numpy as np
from numpy.typing import NDArray

from hybridkv_ref.allocator.geometry import Geometry
from hybridkv_ref.allocator.records import CacheSegment, StoredObject
from hybridkv_ref.recovery import Contents

Tokens = NDArray[np.int64]


class Node:
    """What is cached at one grid position of one prefix, by group index."""

    __slots__ = ("objects", "segments")

    def __init__(self, groups: int) -> None:
        self.segments: list[CacheSegment | None] = [None] * groups
        self.objects: list[StoredObject | None] = [None] * groups


class PrefixIndex:
    """Nodes by key; not thread-safe: the caller holds the ledger's lock."""

    def __init__(self, geometry: Geometry, readable: Sequence[Container[str]]) -> None:
        self.geometry, self.readable = geometry, readable
        self.nodes: dict[bytes, Node] = {}

    def keys(self, tokens: Tokens, salt: bytes) -> list[bytes]:
        """One key per whole grid unit of the tokens."""
        unit, key, keys = self.geometry.unit, hashlib.blake2b(salt, digest_size=16).digest(), []
        data = tokens.astype("<i8", copy=False).tobytes()
        for end in range(unit * 8, len(data) + 1, unit * 8):
            key = hashlib.blake2b(data[end - unit * 8 : end], digest_size=16, key=key).digest()
            keys.append(key)
        return keys

    def path(self, keys: Sequence[bytes]) -> list[Node]:
        """The nodes of the longest indexed prefix."""
        found = []
        for key in keys:
            node = self.nodes.get(key)
            if node is None:
                break
            found.append(node)
        return found

    def contents(self, path: Sequence[Node]) -> dict[str, Contents]:
        """What each group has readable on the device, as bitmaps over the grid and exact ends."""
        found = {}
        for group, readable in zip(self.geometry.groups, self.readable, strict=True):
            held = [
                at
                for at, node in enumerate(path)
                if (segment := node.segments[group.index]) is not None and segment.entity.stage in readable
            ]
            found[group.name] = self.as_contents(group.exact, held)
        return found

    def stored(self, path: Sequence[Node]) -> dict[str, Contents]:
        """What each group has in durable copies."""
        return {
            group.name: self.as_contents(
                group.exact, [at for at, node in enumerate(path) if node.objects[group.index] is not None]
            )
            for group in self.geometry.groups
        }

    def as_contents(self, exact: bool, held: Sequence[int]) -> Contents:
        """Grid units as a bitmap, or as the positions at which they end."""
        unit = self.geometry.unit
        if exact:
            return Contents(ends=frozenset((at + 1) * unit for at in held))
        if held and held[-1] == len(held) - 1:
            return Contents((1 << len(held)) - 1)
        bits = bytearray((held[-1] if held else 0) // 8 + 1)
        for at in held:
            bits[at >> 3] |= 1 << (at & 7)
        return Contents(int.from_bytes(bits, "little"))

    def put(self, segment: CacheSegment) -> bool:
        """Makes a segment findable under its key; False if another one is found there already."""
        if segment.key is None:
            return False
        node = self.nodes.get(segment.key)
        if node is None:
            node = self.nodes[segment.key] = Node(len(self.geometry.groups))
        if node.segments[segment.group.index] is None:
            node.segments[segment.group.index] = segment
        return node.segments[segment.group.index] is segment

    def drop(self, segment: CacheSegment) -> None:
        """A segment is found no more."""
        node = self.nodes.get(segment.key) if segment.key is not None else None
        if node is not None and node.segments[segment.group.index] is segment:
            node.segments[segment.group.index] = None
            self.prune(segment.key)

    def put_object(self, stored: StoredObject) -> None:
        """Makes a durable copy findable under its keys."""
        for key in stored.keys:
            self.nodes.setdefault(key, Node(len(self.geometry.groups))).objects[stored.group.index] = stored

    def drop_object(self, stored: StoredObject) -> None:
        """A durable copy is found no more."""
        for key in stored.keys:
            node = self.nodes.get(key)
            if node is not None and node.objects[stored.group.index] is stored:
                node.objects[stored.group.index] = None
                self.prune(key)

    def prune(self, key: bytes | None) -> None:
        """Forgets a node that names nothing."""
        node = self.nodes.get(key) if key is not None else None
        if key is not None and node is not None and not any(node.segments) and not any(node.objects):
            del self.nodes[key]
