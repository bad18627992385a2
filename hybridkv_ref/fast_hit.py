"""The longest sound reuse, fast: the same answer as ``recovery.longest_hit`` from stored bitmaps.

The plain definition tries every candidate.  Here a missing block rules out many at once.  If both ends of a group's
need grow with the two positions, then every candidate below the one that failed starts at or before the missing block;
it fails as long as it still reaches past it.  So the search goes on at the largest candidate that ends before the
block, found by bisection.  Whether the ends grow is read off the entry's expression; a group of another kind is tried
candidate by candidate, as in the definition.

``plan_hit`` does the search over several tiers: what each group reads, from where, and what it costs.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import Expr, Lit, Op, Ref, refs
from hybridkv_ref.need_functions import runtime_form
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import NOTHING, Contents, Group, Hit, can_resume, candidate_frontiers, entries, make_hit


def grows(expr: Expr) -> bool:
    """Whether an expression over s and F never falls when they rise; False where its form does not show it."""
    match expr:
        case Lit() | Ref():
            return True
        case Op(op="+" | "min" | "max", args=args):
            return all(grows(arg) for arg in args)
        case Op(op="-" | "floor_to", args=(left, right)):
            return grows(left) and not refs(right)
    return False


@dataclass(frozen=True, slots=True)
class Tier:
    """What one tier holds of the matched prefix, by group; a group that is not named holds nothing there."""

    name: str
    contents: Mapping[str, Contents]


@dataclass(frozen=True, slots=True)
class Part:
    """Positions [lo, hi) of one group, whole blocks of it inside what is read, that one tier holds."""

    group: str
    tier: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A hit, from which tier each group reads what, and the cost.

    ``parts`` follow one another without gap or overlap for each group that reads.  ``loaded``: tokens per group that
    come from another tier than the first one.  ``hit.recompute``: matched tokens that are computed again.
    """

    hit: Hit
    parts: tuple[Part, ...]
    loaded: Mapping[str, int]


class _Plain:
    """A group that is asked candidate by candidate."""

    __slots__ = ("group", "held")

    def __init__(self, group: Group, held: Contents) -> None:
        self.group, self.held = group, held

    def hole(self, s: int, frontier: int) -> tuple[int, bool] | None:
        """None if the group can resume; else a hole that rules out nothing more."""
        return None if can_resume(self.group, self.held, s, frontier) else (0, False)


class _Ranged:
    """A group whose need grows, with the blocks that it lacks of those that any candidate may need, in order."""

    __slots__ = ("group", "missing", "need", "unit")

    def __init__(self, group: Group, held: Contents, top: int) -> None:
        self.group, self.unit, self.need = group, group.unit, group.need
        limit = -(-group.need(top, top)[1] // group.unit)
        lacking = ~held.blocks & ((1 << limit) - 1)
        self.missing: list[int] = []
        if lacking:
            bits = np.frombuffer(lacking.to_bytes(limit // 8 + 1, "little"), dtype=np.uint8)
            self.missing = np.flatnonzero(np.unpackbits(bits, bitorder="little")).tolist()

    def hole(self, s: int, frontier: int) -> tuple[int, bool] | None:
        """(position of a missing block of what is needed, whether the block begins there); None if all are there.

        A block that begins inside is preferred: it rules out every candidate that reaches it.
        """
        missing, unit = self.missing, self.unit
        if not missing:
            return None
        lo, hi, _ = self.need(s, frontier)
        if lo >= hi:
            return None
        at = bisect.bisect_left(missing, -(-lo // unit))
        if at < len(missing) and (position := missing[at] * unit) < hi:
            return position, True
        if lo % unit and at and missing[at - 1] == lo // unit:
            return lo, False
        return None


@dataclass(slots=True)
class Finder:
    """``longest_hit`` for one set of groups; made once per model and spec directory.

    ``ahead`` gives, per group, the successor tokens that its keys need: a block counts only if they were matched, too.
    """

    groups: Sequence[Group]
    ahead: Mapping[str, int] = field(default_factory=dict)
    spec: Path = SPEC_DIR
    _jumps: dict[str, bool] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        needs = entries(self.spec)[1]
        names = {group.name for group in self.groups}
        for name, count in self.ahead.items():
            if name not in names or count < 0:
                raise InputError(f"hit: ahead.{name}: expected a group's name and at least 0 tokens, got {count}")
        for group in self.groups:
            lo, hi = runtime_form(needs[group.kind], group.params)
            self._jumps[group.name] = not group.exact and grows(lo) and grows(hi)

    def visible(self, contents: Mapping[str, Contents], matched: int) -> Mapping[str, Contents]:
        """The contents whose look-ahead was matched; the same object where no group looks ahead."""
        if not any(self.ahead.get(group.name) for group in self.groups):
            return contents
        seen = dict(contents)
        for group in self.groups:
            ahead, held = self.ahead.get(group.name, 0), contents.get(group.name)
            if ahead and held is not None:
                last = max(0, matched - ahead)
                mask = (1 << (last // group.unit)) - 1
                seen[group.name] = Contents(held.blocks & mask, frozenset(e for e in held.ends if e <= last))
        return seen

    def longest_hit(
        self,
        contents: Mapping[str, Contents],
        matched: int,
        length: int,
        alignment: int | None = None,
        replay: int = 0,
        known: int | None = None,
    ) -> Hit:
        """As ``recovery.longest_hit`` on ``visible(contents, matched)``; InputError likewise.

        ``known``: tokens that the index knows, where a hit may use only ``matched`` of them.
        """
        contents = self.visible(contents, matched if known is None else known)
        candidates = candidate_frontiers(self.groups, contents, matched, length, alignment)
        if replay < 0:
            raise InputError(f"longest_hit: replay: expected at least 0 tokens, got {replay}")
        found = self._search(contents, candidates, replay)
        return make_hit(self.groups, contents, matched, candidates, found, read_from=self.groups)

    def _lookup(self, group: Group, held: Contents, top: int) -> _Plain | _Ranged:
        return _Ranged(group, held, top) if self._jumps[group.name] else _Plain(group, held)

    def _search(self, contents: Mapping[str, Contents], candidates: range, replay: int) -> tuple[int, int]:
        top = candidates[0] if candidates else 0
        order = [self._lookup(g, contents.get(g.name, NOTHING), top) for g in self.groups]
        start = best = index = 0
        while index < len(candidates) and (frontier := candidates[index]) > start:
            s, low, following = frontier, max(frontier - replay, start + 1), index + 1
            while s >= low:
                failed = next(((at, hole) for at, look in enumerate(order) if (hole := look.hole(s, frontier))), None)
                if failed is None:
                    start, best = s, frontier
                    break
                at, (position, jumps) = failed
                group = order[at].group
                # The one that refuses stands first from now on: it likely refuses the next candidate, too.
                if at:
                    order.insert(0, order.pop(at))
                if not jumps:
                    s -= 1
                    continue
                if s == frontier:
                    following = _next_frontier(group, position, candidates, index, replay)
                s = _last_start(group, position, low, s, frontier)
            index = following
        return start, best


def _next_frontier(group: Group, position: int, candidates: range, index: int, replay: int) -> int:
    """Index of the largest candidate after ``index`` that some start keeps from reaching ``position``."""
    low, high, step = index + 1, len(candidates), 1
    while low < high:
        # The next one is often it, so steps double from there before they halve.
        middle = min(low + step, high) - 1
        frontier = candidates[middle]
        if group.need(max(0, frontier - replay), frontier)[1] <= position:
            high, step = middle, max(1, (middle - low) // 2)
        else:
            low, step = middle + 1, step * 2
    return low


def _last_start(group: Group, position: int, low: int, high: int, frontier: int) -> int:
    """The largest start in [low, high) that does not reach ``position``; low - 1 if there is none."""
    below, above = low - 1, high
    while above - below > 1:
        middle = (below + above) // 2
        if group.need(middle, frontier)[1] <= position:
            below = middle
        else:
            above = middle
    return below


def plan_hit(
    finder: Finder,
    tiers: Sequence[Tier],
    matched: int,
    length: int,
    alignment: int | None = None,
    replay: int = 0,
) -> Plan:
    """The longest hit over all tiers together, each part read from the first tier that holds it.

    InputError as for ``longest_hit``, and without any tier.
    """
    if not tiers:
        raise InputError("hit: tiers: expected at least one")
    seen = [(tier.name, finder.visible(tier.contents, matched)) for tier in tiers]
    together: dict[str, Contents] = {}
    for group in finder.groups:
        held = [contents.get(group.name, NOTHING) for _, contents in seen]
        blocks = 0
        for one in held:
            blocks |= one.blocks
        together[group.name] = Contents(blocks, frozenset().union(*(one.ends for one in held)))
    hit = finder.longest_hit(together, matched, length, alignment, replay)
    units = {group.name: group for group in finder.groups}
    parts: list[Part] = []
    for read in hit.reads:
        group = units[read.group]
        if group.exact:
            name = next(n for n, contents in seen if read.hi in contents.get(group.name, NOTHING).ends)
            parts.append(Part(group.name, name, read.lo, read.hi))
        else:
            parts += _runs(group, seen, read.lo, read.hi)
    loaded: dict[str, int] = {}
    for part in parts:
        if part.tier != tiers[0].name:
            loaded[part.group] = loaded.get(part.group, 0) + part.hi - part.lo
    return Plan(hit, tuple(parts), loaded)


def _runs(group: Group, seen: Sequence[tuple[str, Mapping[str, Contents]]], lo: int, hi: int) -> list[Part]:
    """Positions [lo, hi) cut where the first tier that holds a block changes."""
    first, last = lo // group.unit, -(-hi // group.unit)
    owner = np.full(last - first, -1, dtype=np.int64)
    for index in reversed(range(len(seen))):
        window = (seen[index][1].get(group.name, NOTHING).blocks >> first) & ((1 << (last - first)) - 1)
        bits = np.frombuffer(window.to_bytes((last - first) // 8 + 1, "little"), dtype=np.uint8)
        owner[np.unpackbits(bits, bitorder="little")[: last - first].astype(bool)] = index
    cuts = [0, *(np.flatnonzero(np.diff(owner)) + 1).tolist(), last - first]
    return [
        Part(group.name, seen[int(owner[a])][0], max(lo, (first + a) * group.unit), min(hi, (first + b) * group.unit))
        for a, b in itertools.pairwise(cuts)
    ]
