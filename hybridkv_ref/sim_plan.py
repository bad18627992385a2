"""Where a request of a simulation resumes in a matched prefix: ``recovery.longest_hit`` over a path of the tree.

Candidates are the positions that the prefix index names, the last token excepted. A *plain* hit computes from where
every group can resume (s = F). A *replay* computes from further back and needs only what prefill alone can make again,
up to F: ``bounded`` replays one window, ``zero-exact`` as many tokens as make everything from F on exact without stored
windows. What each group needs comes from ``recovery.toml``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hybridkv_ref.errors import InputError
from hybridkv_ref.exact_start import exact_start, layer_stack
from hybridkv_ref.models import Model
from hybridkv_ref.recovery import PREFILL, Group
from hybridkv_ref.sim_machine import GroupRows
from hybridkv_ref.sim_tree import Cell, Node

Recovery = Literal["full", "bounded", "zero-exact"]
Path = Sequence[tuple[Node, int]]
Place = tuple[int, int, int]
"""(index in the path, place in the node, position)"""

_FAR = 1 << 40  # a position so late that no need is cut off at 0; a multiple of every power of two


@dataclass(frozen=True, slots=True)
class Plan:
    """Compute from ``s`` with entries read up to ``frontier``; ``top`` was the largest candidate.

    ``limiting``: the groups because of which the hit is shorter than one at ``top``. ``plain``: every group is read.
    """

    top: int
    s: int
    frontier: int
    limiting: tuple[str, ...]
    plain: bool


class Planner:
    """The search for one model and one way to recover; InputError for an unknown way or an unknown order of layers."""

    def __init__(
        self, model: Model, needs: Sequence[Group], groups: Sequence[GroupRows], recovery: str, alignment: int
    ) -> None:
        if recovery not in get_args(Recovery):
            raise InputError(f"simulate:recovery: expected one of {', '.join(get_args(Recovery))}, got {recovery!r}")
        self.groups, self.recovery, self.unit = groups, recovery, model.alignment
        self.ranges = [g for g in groups if g.prefill and g.ranged]
        self.snapshots = [g for g in groups if g.prefill and not g.ranged]
        far = _FAR - _FAR % alignment
        self.back = _bounded(model, needs, far) if recovery == "bounded" else self.exact(model, needs, far)

    def exact(self, model: Model, needs: Sequence[Group], far: int) -> int | None:
        """Tokens that an exact replay computes; None if the order of the layers is not known and not asked for."""
        positional = {g.group.name for g in self.snapshots}
        try:
            stack = layer_stack(model, needs)
        except InputError:
            if self.recovery == "full":
                return None
            raise
        # Snapshots are looked for on the path, at or before the start that the other groups ask for.
        free = tuple(tuple(g for g in layer if g.name not in positional) for layer in stack)
        return far - exact_start(free, far, far, {})

    def plan(self, path: Path, limit: int) -> Plan:
        """The longest reuse of at most ``limit`` tokens of this path."""
        search = _Search(self.groups, path)
        places = list(search.places(limit))
        if not places:
            return Plan(0, 0, 0, (), True)
        top, plain, refused = places[0][2], 0, search.refusing(self.groups, *places[0])
        if self.recovery == "full":
            if not refused:
                return Plan(top, top, top, (), True)
            plain = next((p[2] for p in places if not search.refusing(self.groups, *p)), 0)
        start, frontier, late = self.replay(search, places)
        names = refused if self.recovery == "full" else (*(g for g in refused if g in self.ranges), *late)
        limiting = tuple(g.group.name for g in names)
        if start > plain:
            return Plan(top, start, frontier, limiting, False)
        return Plan(top, plain, plain, limiting, True)

    def replay(self, search: "_Search", places: Sequence[Place]) -> tuple[int, int, Sequence[GroupRows]]:
        """The latest (s, F) of a replay, (0, 0) if none is left; and the groups that hold s back even further."""
        frontier = next((p[2] for p in places if not search.refusing(self.ranges, *p)), 0)
        start = (frontier - (self.back or 0)) // self.unit * self.unit
        if self.back is None or start <= 0:
            return 0, 0, ()
        held = (p[2] for p in places if p[2] <= start and not search.refusing(self.snapshots, *p))
        found = next(held, 0) if self.snapshots else start
        return found, frontier if found else 0, self.snapshots if found < start else ()

    def wanted(self, path: Path, limit: int) -> list[tuple[Cell, int]]:
        """Cells and places that would have to come back from durable copies for a hit of ``limit`` tokens."""
        search = _Search(self.groups, path)
        found: list[tuple[Cell, int]] = []
        top = next(iter(search.places(limit)), None)
        if top is None:
            return found
        for g in self.groups:
            lo, hi, _ = g.need(top[2], top[2])
            if lo >= hi:
                continue
            if g.ranged:
                cells = [n.cells[g.index] for n, _ in path if n.start < hi and n.cuts[-1] > lo]
                found += [(c, 0) for c in cells if c.segments[0] is None and c.objects[0] is not None]
                continue
            for at, place, _ in search.places(limit):
                cell = path[at][0].cells[g.index]
                if cell.segments[place] is not None:
                    break
                if cell.objects[place] is not None:
                    found.append((cell, place))
                    break
        return found


class _Search:
    """What the groups hold along one path; per ranged group, where the gap-free range begins that ends with a node."""

    def __init__(self, groups: Sequence[GroupRows], path: Path) -> None:
        self.groups, self.path = groups, path
        self.runs: list[list[int | None]] = []
        for g in groups:
            run: list[int | None] = []
            begin: int | None = None
            for node, _ in path if g.ranged else ():
                if node.cells[g.index].segments[0] is None:
                    begin = None
                elif begin is None:
                    begin = node.start
                run.append(begin)
            self.runs.append(run)

    def places(self, limit: int) -> Iterator[Place]:
        """Each candidate up to ``limit``, largest first."""
        for at in range(len(self.path) - 1, -1, -1):
            node, count = self.path[at]
            for place in range(count - 1, -1, -1):
                if node.cuts[place] <= limit:
                    yield at, place, node.cuts[place]

    def refusing(self, groups: Sequence[GroupRows], at: int, place: int, cut: int) -> tuple[GroupRows, ...]:
        """Those of ``groups`` that cannot resume at this candidate."""
        return tuple(g for g in groups if not self.holds(g, at, place, cut))

    def holds(self, g: GroupRows, at: int, place: int, cut: int) -> bool:
        """Whether one group can resume at this candidate."""
        lo, hi, _ = g.need(cut, cut)
        if lo >= hi:
            return True
        if g.ranged:
            begin = self.runs[g.index][at]
            return begin is not None and begin <= lo
        segment: Any = self.path[at][0].cells[g.index].segments[place]
        return segment is not None and segment.start <= lo


def _bounded(model: Model, needs: Sequence[Group], far: int) -> int:
    """Tokens that a bounded replay computes: one window, and all rows that a partial entry is made of."""
    rows = [(g.miss, *g.need(far, far)) for g in needs]
    tails = [hi - lo for miss, lo, hi, exact in rows if exact and miss != PREFILL]
    return max((*(g.span or 0 for g in model.groups), *tails), default=0)
