"""What a vLLM request's block tables hold, followed by comparing them with what was last seen.

Most calls change no table, or only its end: lists are compared and cut whole, block by block only where a window slid.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import Any

from hybridkv_ref.need_functions import NeedFunction

Run = tuple[int, list[int]]
"""Block numbers of consecutive table indices, from the first index on."""

PIECE = 64
"""Blocks that are compared at once."""


def follow(
    seen: list[Any], numbers: list[int], now: Sequence[Any], null: int, first: int = 0
) -> tuple[list[int], list[Run]]:
    """Brings one table up to date, the engine's blocks (``seen``) and their numbers; gives what left and what came.

    Null blocks neither leave nor come. What stands before ``first`` is taken to be as it was.
    """
    known, count = len(seen), len(now)
    both = min(known, count)
    first = min(first, both)
    same = seen[first:both] == now[first:both]
    gone, came = ([], []) if same else _replaced(seen, numbers, now, first, both, null)
    if count < known:
        gone += _others(numbers[count:], null)
        del seen[count:], numbers[count:]
    elif count > known:
        more = now[known:]
        seen += more
        fresh = [b.block_id for b in more]
        numbers += fresh
        came += _runs(known, fresh, null)
    return gone, came


def _replaced(
    seen: list[Any], numbers: list[int], now: Sequence[Any], lo: int, hi: int, null: int
) -> tuple[list[int], list[Run]]:
    """What changed among the blocks from ``lo`` up to ``hi``, which are not all the same."""
    while seen[lo : lo + PIECE] == now[lo : lo + PIECE]:
        lo += PIECE
    while hi > lo + PIECE and seen[hi - PIECE : hi] == now[hi - PIECE : hi]:
        hi -= PIECE
    old, there = numbers[lo:hi], now[lo:hi]
    if there[0].block_id == null and there.count(there[0]) == hi - lo:
        # A window that slid on: nothing but the null block is left.
        gone = _others(old, null)
        seen[lo:hi], numbers[lo:hi] = there, [null] * (hi - lo)
        return gone, []
    fresh = [b.block_id for b in there]
    same = [null if a == b else b for a, b in zip(old, fresh, strict=True)] if fresh.count(null) < hi - lo else fresh
    gone = [a for a, b in zip(old, fresh, strict=True) if a != b and a != null]
    seen[lo:hi], numbers[lo:hi] = there, fresh
    return gone, _runs(lo, same, null)


def _others(numbers: list[int], null: int) -> list[int]:
    return [n for n in numbers if n != null] if null in numbers else numbers


def _runs(first: int, numbers: list[int], null: int) -> list[Run]:
    """What is not null, together where it is consecutive; ``first`` is the index of the first number."""
    nulls = numbers.count(null)
    if numbers[:nulls].count(null) == nulls:
        return [(first + nulls, numbers[nulls:])] if nulls < len(numbers) else []
    runs: list[Run] = []
    for i, n in enumerate(numbers, first):
        if n == null:
            continue
        if runs and runs[-1][0] + len(runs[-1][1]) == i:
            runs[-1][1].append(n)
        else:
            runs.append((i, [n]))
    return runs


def first_block(numbers: list[int], at: int, null: int) -> int:
    """The index of the first number from ``at`` on that is not null."""
    count = len(numbers)
    while at < count and numbers[at] == null:
        at += 1
    return at


def split(came: list[Run], hit: list[int], null: int) -> tuple[list[int], list[Run]]:
    """What came apart into blocks of a hit, each at its own index, and others."""
    hits: list[int] = []
    others: list[Run] = []
    for first, numbers in came:
        found = hit[first : first + len(numbers)]
        if found == numbers[: len(found)]:
            hits += found
            left = numbers[len(found) :]
            others += [(first + len(found), left)] if left else []
        else:
            same = [i < len(found) and found[i] == n for i, n in enumerate(numbers)]
            hits += compress(numbers, same)
            others += _runs(first, [null if there else n for n, there in zip(numbers, same, strict=True)], null)
    return hits, others


class Held:
    """How many blocks of one group requests hold (``count``), each of a pool of so many ``blocks`` once."""

    def __init__(self, blocks: int) -> None:
        self.count = 0
        self.uses: list[int] = [0] * blocks

    def take(self, numbers: Sequence[int]) -> None:
        """One reference more to each."""
        uses = self.uses
        for number in numbers:
            before = uses[number]
            uses[number] = before + 1
            if not before:
                self.count += 1

    def give(self, numbers: Sequence[int]) -> None:
        """One reference less to each."""
        uses = self.uses
        for number in numbers:
            if before := uses[number]:
                uses[number] = before - 1
                if before == 1:
                    self.count -= 1


class Oldest:
    """The first block that a request needs of one group to go on, and the positions for which that is known."""

    def __init__(self) -> None:
        self.first, self.since, self.until = 0, 0, -1

    def at(self, need: NeedFunction, size: int, position: int) -> int:
        """Its index in the table. What is needed never moves back, so two positions stand for those between them."""
        if not self.since <= position <= self.until:
            self.first, self.since, self.until = need(position, position)[0] // size, position, position
            last = position + size - 1
            if need(last, last)[0] // size == self.first:
                self.until = last
        return self.first


@dataclass(slots=True)
class Life:
    """What was last seen of a request: its tables, tokens told, positions dispatched and done, steps in flight.

    ``blocks`` are the engine's own, of which the tables are the numbers: lists of them compare by identity, fast.
    ``firsts``: per table the index before which it was all null; ``whole``: its length when that was last looked at;
    ``oldest``: the first block that is needed of it; ``changed``: whether the table has,
    since a step was told to read it.
    """

    tables: list[list[int]]
    blocks: list[list[Any]]
    stored: list[int]
    firsts: list[int]
    whole: list[int]
    oldest: list[Oldest]
    changed: list[bool]
    told: int
    sent: int = 0
    used: int = -1
    steps: list[tuple[str, int]] = field(default_factory=list)
    load: str = ""
