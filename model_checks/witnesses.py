"""What the instances reach: each row, stage and ``sometimes``, and each guard conjunct as the only false one.

A proof about a row that never fires, or about a guard that something else implies, says nothing.  So each has a
witness: the instance in which it was seen and the least number of steps.  A conjunct that was never seen alone must
be proved implied by the others (``implied``, the prover's part).
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridkv_ref.model_checks.explore import Graph
from hybridkv_ref.model_checks.instances import PinSpec
from hybridkv_ref.model_checks.second_opinion import holds, tuples
from hybridkv_ref.model_checks.space import Binding
from hybridkv_ref.tables import Event, Tables

CHUNK = 8192
Conjunct = tuple[str, int]


@dataclass(frozen=True)
class Witness:
    """``kind`` is row, stage or sometimes; the shortest depth at which ``name`` was seen, and in which instance."""

    kind: str
    name: str
    instance: str
    depth: int


@dataclass(frozen=True)
class Conjuncts:
    """Guard conjuncts (event id, index): seen as the only false one, proved implied by the rest, neither."""

    seen: int
    implied: tuple[Conjunct, ...]
    missing: tuple[Conjunct, ...]


class Witnesses:
    """Collects over any number of graphs; a truncated graph is refused (ValueError), since it gives no verdict."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.found: dict[tuple[str, str], Witness] = {}
        self.unseen: dict[str, set[int]] = {e.id: set(range(len(e.guards))) for e in tables.events}

    def add(self, graph: Graph) -> None:
        """Takes in what one search found."""
        if graph.truncated:
            raise ValueError(f"{graph.instance.name}: the search was cut short")
        self._rows(graph)
        self._stages(graph)
        self._sometimes(graph)
        for binding in graph.space.bindings:
            if self.unseen[binding.event.id]:
                self._alone(graph, binding)

    def note(self, kind: str, name: str, graph: Graph, depth: int) -> None:
        """Keeps the shortest witness; ties go to the first instance."""
        old = self.found.get((kind, name))
        if old is None or depth < old.depth:
            self.found[kind, name] = Witness(kind, name, graph.instance.name, depth)

    @property
    def missing(self) -> tuple[tuple[str, str], ...]:
        """(kind, name) of every row, stage and ``sometimes`` without a witness."""
        return tuple(w for w in self.wanted() if w not in self.found)

    def wanted(self) -> Iterable[tuple[str, str]]:
        """Everything that must be witnessed."""
        yield from (("row", e.id) for e in self.tables.events)
        yield from (("stage", f"{owner}.{stage}") for owner, stages in self.tables.stages.items() for stage in stages)
        yield from (("sometimes", p.id) for p in self.tables.forms("sometimes"))

    def conjuncts(self, implied: Callable[[Event, int], bool]) -> Conjuncts:
        """The verdict on guard conjuncts; ``implied(event, index)`` proves one from the others and the invariants."""
        left = [(e, i) for e in self.tables.events for i in sorted(self.unseen[e.id])]
        proved = [(e.id, i) for e, i in left if implied(e, i)]
        missing = [(e.id, i) for e, i in left if (e.id, i) not in set(proved)]
        total = sum(len(e.guards) for e in self.tables.events)
        return Conjuncts(total - len(left), tuple(proved), tuple(missing))

    def _rows(self, graph: Graph) -> None:
        for number, edges in graph.of_binding().items():
            self.note("row", graph.space.bindings[number].event.id, graph, int(graph.depth[graph.src[edges[0]]]) + 1)

    def _stages(self, graph: Graph) -> None:
        for entity in graph.instance.entities:
            owner = entity.kind or entity.cls
            column = graph.columns[graph.space.index[entity.name, "stage"]]
            values, first = np.unique(np.broadcast_to(column, graph.states), return_index=True)
            for value, state in zip(values.tolist(), first.tolist(), strict=True):
                self.note("stage", f"{owner}.{self.tables.stages[owner][value]}", graph, int(graph.depth[state]))

    def _sometimes(self, graph: Graph) -> None:
        for item in self.tables.forms("sometimes"):
            if not graph.space.reduction.keeps(item.expr):
                continue
            for by_role in tuples(graph, item):
                there = np.broadcast_to(holds(graph, item, by_role), graph.states)
                if there.any():
                    self.note("sometimes", item.id, graph, int(graph.depth[int(np.argmax(there))]))

    def _alone(self, graph: Graph, binding: Binding) -> None:
        unseen, code = self.unseen[binding.event.id], binding.code
        for low in range(0, graph.states, CHUNK):
            index = np.arange(low, min(low + CHUNK, graph.states))
            values = binding.values(graph.columns, index)
            false = {g: np.broadcast_to(np.logical_not(code.guards[g](values)), len(index)) for g in code.plain}
            count: Any = sum((f.astype(np.int8) for f in false.values()), np.zeros(len(index), np.int8))
            # Only states in which at most one conjunct without inputs is false, and that one still unseen, can help.
            open_ones = [g for g in code.plain if g in unseen]
            useful = (
                (count == 0) & bool(unseen & {*code.fixed, *code.tested})
                if binding.event.inputs
                else np.zeros(len(index), bool)
            )
            for guard in open_ones:
                useful |= (count == 1) & false[guard]
            if not useful.any():
                continue
            index, count = index[useful], count[useful]
            total: Any = count[None, :].astype(np.int8)
            if binding.event.inputs:
                values = binding.values(graph.columns, index, [c[:, None] for c in binding.choices.T])
                shape = (len(binding.choices), len(index))
                tests = {
                    g: np.broadcast_to(np.logical_not(code.guards[g](values)), shape)
                    for g in (*code.fixed, *code.tested)
                }
                total = total + sum((t.astype(np.int8) for t in tests.values()), np.zeros(shape, np.int8))
            else:
                tests = {}
            single = total == 1
            seen = {g for g in open_ones if (single & false[g][useful]).any()}
            seen |= {g for g, test in tests.items() if g in unseen and (single & test).any()}
            unseen -= seen
            if not unseen:
                return


def size_difference(graph: Graph, pinned: Mapping[str, PinSpec]) -> str:
    """Empty if the instance has its pinned size, else the line to pin: a change to look at, no failed proof."""
    pin, name = pinned.get(graph.instance.name), graph.instance.name
    if pin is not None and (pin.states, pin.edges) == (graph.states, graph.edges):
        return ""
    before = f"pinned {pin.states} and {pin.edges}" if pin is not None else "not pinned"
    return f'"{name}" = {{ states = {graph.states}, edges = {graph.edges} }}  # {before}'


__all__ = ["Conjuncts", "Witness", "Witnesses", "size_difference"]
