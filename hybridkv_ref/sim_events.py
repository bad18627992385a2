"""What `simulate` does, as events: a simulation that tells its lookups, writes and evictions, block by block.

The simulation knows segments that cover nodes of its prefix tree; here each place of a node is one block of its group,
of as many tokens as the alignment has, which has to be a multiple of the blocks that the requests come in.
"""

import itertools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from hybridkv_ref.collector import collector_paused
from hybridkv_ref.errors import InputError
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
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.request_traces import Request
from hybridkv_ref.sim_report import Report
from hybridkv_ref.simulate import Simulation


def tell(
    requests: Iterable[Request],
    model: Model,
    gpu_memory: int,
    alignment: int | None,
    begin: Callable[[Header], None],
    sink: Callable[[Event], None],
    spec: Path = SPEC_DIR,
) -> Report:
    """As `simulate` with full recovery and no durable store; ``begin`` gets the header and ``sink`` each event.

    The default alignment is the least that fits the model and the blocks of the first request.
    """
    coming = iter(requests)
    first = list(itertools.islice(coming, 1))
    fitting = math.lcm(model.alignment, *(request.block_tokens or 1 for request in first))
    simulation = Telling(model, gpu_memory, fitting if alignment is None else alignment, spec)
    begin(simulation.header)
    with collector_paused():
        for request in itertools.chain(first, coming):
            simulation.arrive(request)
            for event in simulation.events:
                sink(event)
            simulation.events.clear()
        return simulation.finish()


class Telling(Simulation):
    """A simulation with full recovery and without a durable store; ``events`` is what it told so far."""

    def __init__(self, model: Model, gpu_memory: int, alignment: int, spec: Path = SPEC_DIR) -> None:
        super().__init__(model, gpu_memory, alignment=alignment, spec=spec)
        self.events: list[Event] = []
        self.numbers: dict[tuple[int, int], int] = {}
        self.last, size = 0, self.alignment
        self.cache.evicted = lambda cell, place: self.gone(
            cell.rows, list(cell.node.keys) if cell.rows.ranged else [cell.node.keys[place]]
        )
        groups = tuple(
            GroupSpec(g.group.name, g.kind, size, g.group.ratio or 1, g.group.halo or 0, g.group.span or 0)
            for g in self.machines.groups
        )
        claims = ("blocks", "reuse", "index", "steps")
        self.header = Header("hybridkv.events/1", unit=size, groups=groups, capabilities=claims)

    def gone(self, rows: Any, keys: list[int]) -> None:
        """A group lost what it held for these keys."""
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
        if request.block_tokens and self.alignment % request.block_tokens:
            raise InputError(
                f"simulate:alignment: {self.alignment} is no multiple of the {request.block_tokens} tokens of the "
                "requests' blocks, and so events cannot tell of whole blocks"
            )
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
        """What a request wrote: blocks, one step, entries; then its end."""
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
