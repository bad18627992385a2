"""What `simulate` does, as events: a simulation that tells its lookups, writes and evictions, block by block.

The simulation knows segments that cover nodes of its prefix tree; here each place of a node is one block of its group,
of as many tokens as the alignment has.
"""

from typing import Any

from hybridkv_ref.events import (
    Allocate,
    Arrive,
    Complete,
    Dispatch,
    Event,
    Finish,
    Free,
    GroupSpec,
    Header,
    KeyPublish,
    KeyRemove,
    Lookup,
    Pin,
    Span,
)
from hybridkv_ref.models import Model
from hybridkv_ref.simulate import Simulation


class Telling(Simulation):
    """A simulation with full recovery and without a durable store; ``events`` is what it told so far."""

    def __init__(self, model: Model, gpu_memory: int, alignment: int) -> None:
        super().__init__(model, gpu_memory, alignment=alignment)
        self.events: list[Event] = []
        self.numbers: dict[tuple[int, int], int] = {}
        self.last = 0
        evict: Any = self.cache.evict

        def telling(cell: Any, place: int) -> bool:
            keys = list(cell.node.keys) if cell.rows.ranged else [cell.node.keys[place]]
            gone = bool(evict(cell, place))
            if gone:
                self.gone(cell.rows, keys)
            return gone

        self.cache.evict = telling  # type: ignore[method-assign]
        groups = tuple(
            GroupSpec(g.group.name, g.kind, alignment, g.group.ratio or 1, g.group.halo or 0, g.group.span or 0)
            for g in self.machines.groups
        )
        claims = ("blocks", "reuse", "index", "steps")
        self.header = Header("hybridkv.events/1", unit=alignment, groups=groups, capabilities=claims)

    def gone(self, rows: Any, keys: list[int]) -> None:
        # What a request wrote and lost again before it was over was never told.
        told = [key for key in keys if (rows.index, key) in self.numbers]
        numbers = [self.numbers.pop((rows.index, key)) for key in told]
        if told:
            self.events.append(KeyRemove(rows.group.name, [f"{rows.index}.{key}" for key in told], blocks=numbers))

    def held(self, keys: list[int]) -> set[tuple[int, int]]:
        """(group, key) of what is on the device for these keys."""
        found = set()
        for node, count in self.tree.walk(keys):
            for g in self.machines.groups:
                cell = node.cells[g.index]
                for place in range(count):
                    if cell.segments[0 if g.ranged else place] is not None:
                        found.add((g.index, node.keys[place]))
        return found

    def run(self, running: Any) -> None:
        """One request: what it found, what had to go for it, what it wrote."""
        request, keys, cuts = running.request, running.keys, running.cuts
        name = f"r{self.requests}"
        plan = self.planner.plan(self.tree.walk(keys), min(running.matched, request.input_tokens - 1))
        used = plan.s if plan.s == plan.frontier else 0
        self.events.append(Arrive(name, request.input_tokens, ids=keys))
        blocks: dict[str, list[int]] = {}
        for g in self.machines.groups:
            lo, hi, _ = g.need(used, used)
            if lo < hi:
                places = range(cuts.index(used) + 1)
                blocks[g.group.name] = [self.numbers[g.index, keys[i]] if cuts[i] > lo else 0 for i in places]
        self.events.append(Lookup(name, used, matched=running.matched, blocks=blocks))
        self.events += [Pin(name, group, [n for n in numbers if n]) for group, numbers in blocks.items()]
        super().run(running)
        self.wrote(name, keys, cuts, sorted(self.held(keys) - self.numbers.keys()), blocks)

    def wrote(
        self, name: str, keys: list[int], cuts: list[int], fresh: list[tuple[int, int]], blocks: dict[str, list[int]]
    ) -> None:
        place = {key: index for index, key in enumerate(keys)}
        mine: dict[str, list[int]] = {group: [n for n in numbers if n] for group, numbers in blocks.items()}
        published: list[Event] = []
        spans = []
        for g in self.machines.groups:
            own = sorted((k for i, k in fresh if i == g.index), key=place.__getitem__)
            for key in own:
                self.last += 1
                self.numbers[g.index, key] = self.last
                lo = cuts[place[key]] - self.alignment
                self.events.append(Allocate(name, g.group.name, [self.last], at=lo))
                spans.append(Span(g.group.name, [self.last], lo, cuts[place[key]]))
            numbers = [self.numbers[g.index, key] for key in own]
            if numbers:
                published.append(KeyPublish(g.group.name, [f"{g.index}.{key}" for key in own], numbers))
                mine.setdefault(g.group.name, []).extend(numbers)
        reads = [Span(group, [n for n in numbers if n]) for group, numbers in blocks.items()]
        self.events += [Dispatch(name, name, reads=reads, writes=spans), Complete(name), *published, Finish(name)]
        self.events += [Free(name, group, numbers[::-1]) for group, numbers in mine.items()]
