"""What a vLLM request's block tables hold, followed by comparing them with what was last seen.

Most calls change no table, or only its end: lists are compared and cut whole, block by block only where a window slid.
"""

from collections.abc import Sequence
from itertools import compress
from operator import is_not
from typing import Any

Run = tuple[int, list[int]]
"""Block numbers of consecutive table indices, from the first index on."""

PIECE = 64
"""Blocks that are compared at once."""


def follow(seen: list[Any], numbers: list[int], now: Sequence[Any], null: int) -> tuple[list[int], list[Run]]:
    """Brings one table up to date, the engine's blocks (``seen``) and their numbers; gives what left and what came.

    Null blocks neither leave nor come.
    """
    if seen == now:
        return [], []
    known, count = len(seen), len(now)
    both = min(known, count)
    other = _other(seen, now, both)
    gone = [n for i in other if (n := numbers[i]) != null]
    for i in other:
        seen[i], numbers[i] = now[i], now[i].block_id
    came = _runs(other, [numbers[i] for i in other], null) if other else []
    if count < known:
        gone += [n for n in numbers[count:] if n != null]
        del seen[count:], numbers[count:]
    elif count > known:
        seen += now[known:]
        more = [b.block_id for b in now[known:]]
        numbers += more
        came += [(known, more)] if null not in more else _runs(range(known, count), more, null)
    return gone, came


def _other(seen: list[Any], now: Sequence[Any], both: int) -> list[int]:
    """The indices at which two tables differ."""
    if seen[:both] == now[:both]:
        return []
    found = list[int]()
    for at in range(0, both, PIECE):
        old, new = seen[at : at + PIECE], now[at : at + PIECE]
        if old != new:
            found += compress(range(at, min(at + PIECE, both)), map(is_not, old, new))
    return found


def _runs(places: Sequence[int], numbers: list[int], null: int) -> list[Run]:
    """What came at these indices, together where they are consecutive."""
    runs: list[Run] = []
    for i, n in zip(places, numbers, strict=True):
        if n == null:
            continue
        if runs and runs[-1][0] + len(runs[-1][1]) == i:
            runs[-1][1].append(n)
        else:
            runs.append((i, [n]))
    return runs


def split(came: list[Run], hit: list[int], null: int) -> tuple[list[int], list[Run]]:
    """What came apart into blocks of a hit, each at its own index, and others."""
    hits, others = list[int](), list[Run]()
    for first, numbers in came:
        found = hit[first : first + len(numbers)]
        if found == numbers[: len(found)]:
            hits += found
            numbers, first = numbers[len(found) :], first + len(found)
        else:
            same = [i < len(found) and found[i] == n for i, n in enumerate(numbers)]
            hits += compress(numbers, same)
            numbers = [null if there else n for n, there in zip(numbers, same, strict=True)]
        others += _runs(range(first, first + len(numbers)), numbers, null) if null in numbers else [(first, numbers)]
    return hits, [run for run in others if run[1]]


class Held:
    """The blocks of one group that requests hold, and how often beyond once."""

    def __init__(self) -> None:
        self.blocks: set[int] = set()
        self.again: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.blocks)

    def take(self, numbers: Sequence[int]) -> None:
        """One reference more to each."""
        fresh = set(numbers)
        if len(fresh) == len(numbers) and self.blocks.isdisjoint(fresh):
            self.blocks |= fresh
            return
        for number in numbers:
            if number in self.blocks:
                self.again[number] = self.again.get(number, 0) + 1
            self.blocks.add(number)

    def give(self, numbers: Sequence[int]) -> None:
        """One reference less to each."""
        if not self.again:
            self.blocks.difference_update(numbers)
            return
        for number in numbers:
            left = self.again.pop(number, 0)
            if left > 1:
                self.again[number] = left - 1
            elif not left:
                self.blocks.discard(number)
