"""Exhaustive exploration of a finite instance: breadth first, level by level, on whole columns of states.

Every transition of a level is computed as a difference to the fingerprints of its source, so a state is written out
only when it is new.  Fingerprints are two independent 64-bit sums; a clash of the first is seen by the second and
ends the search.  A search that meets its limit gives no verdict: ``Graph.truncated`` is set and nothing else may be
asked of it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridkv_ref.errors import InputError
from hybridkv_ref.model_checks.instances import Instance, Step
from hybridkv_ref.model_checks.space import Binding, Columns, Compiled, Ints, Space, Writes
from hybridkv_ref.model_checks.vector import code, decode
from hybridkv_ref.tables import CLASS_OF, Tables

LIMIT = 200_000
SEED = 20_250_901


class ScriptRefusedError(InputError):
    """A step of an instance's script is illegal (or changes nothing) under these tables."""


@dataclass(frozen=True)
class TraceStep:
    """One step of a trace: the event, its entities and inputs, and what changed (name -> before, after)."""

    event: str
    entities: tuple[str, ...]
    inputs: dict[str, int | str]
    changed: dict[str, tuple[int | str, int | str]]

    def __str__(self) -> str:
        inputs = "".join(f" {n}={v}" for n, v in self.inputs.items())
        changed = ", ".join(f"{n}: {a} -> {b}" for n, (a, b) in self.changed.items())
        return f"{self.event} {' '.join(self.entities)}{inputs}  [{changed}]"


class Graph:
    """What a search found.  ``columns[position]`` is that variable in every state (a plain number if it never changes).

    Edges are parallel arrays: ``src`` and ``dst`` states, ``bound`` index into ``space.bindings``, ``combo`` index
    into that binding's ``combos``.  ``depth`` counts steps from the first state.  States from ``opened`` up to
    ``closed`` have all their edges (a script's own states and those at the last depth do not).
    """

    def __init__(self, space: Space) -> None:
        self.space = space
        self.columns: Columns = ()
        self.depth: Ints = np.zeros(0, np.int64)
        self.parent: Ints = np.zeros(0, np.int64)
        self.src: Ints = np.zeros(0, np.int64)
        self.dst: Ints = np.zeros(0, np.int64)
        self.bound: Ints = np.zeros(0, np.int64)
        self.combo: Ints = np.zeros(0, np.int64)
        self.opened = self.closed = 0
        self.truncated = False

    @property
    def instance(self) -> Instance:
        """The instance that was searched."""
        return self.space.instance

    @property
    def states(self) -> int:
        """How many states were found."""
        return len(self.depth)

    @property
    def edges(self) -> int:
        """How many transitions were found."""
        return len(self.src)

    def of_binding(self) -> dict[int, Ints]:
        """The edges of each binding that fired, in the order found."""
        order = np.argsort(self.bound, kind="stable")
        fired, starts = np.unique(self.bound[order], return_index=True)
        return dict(zip(fired.tolist(), np.split(order, starts[1:]), strict=True))

    def value(self, position: int, state: int) -> int | str:
        """One variable of one state, as the tables write it."""
        column = self.columns[position]
        number = column[state] if isinstance(column, np.ndarray) else column
        return decode(int(number), self.space.types[position])

    def step(self, edge: int) -> TraceStep:
        """One edge as a step of a trace."""
        binding = self.space.bindings[self.bound[edge]]
        src, dst = int(self.src[edge]), int(self.dst[edge])
        changed = {}
        for position in self.space.written:
            before, after = self.value(position, src), self.value(position, dst)
            if before != after:
                changed[".".join(n for n in self.space.names[position] if n)] = (before, after)
        kinds = binding.event.inputs.items()
        inputs = (
            {n: decode(int(v), t) for (n, t), v in zip(kinds, binding.combos[self.combo[edge]], strict=True)}
            if kinds
            else {}
        )
        return TraceStep(binding.event.id, tuple(e.name for e in binding.entities), inputs, changed)

    def trace(self, state: int) -> list[TraceStep]:
        """A shortest way to a state (a script's own steps first)."""
        steps = []
        while self.parent[state] >= 0:
            steps.append(self.step(int(self.parent[state])))
            state = int(self.src[self.parent[state]])
        return steps[::-1]


class _Search:
    def __init__(self, space: Space, limit: int) -> None:
        self.space, self.limit = space, limit
        self.slot = {p: i for i, p in enumerate(space.written)}
        generator = np.random.default_rng(SEED)
        self.weights = generator.integers(1, 2**63, (len(space.names), 2), dtype=np.int64) * 2 + 1
        self.store = np.zeros((len(space.written), 1024), np.int16)
        self.prints = np.zeros((2, 1024), np.int64)
        self.depths = [0]
        self.parents = [-1]
        self.store[:, 0] = [space.initial[p] for p in space.written]
        self.count = 1
        self.known: Ints = np.zeros(1, np.int64)
        self.known_at: Ints = np.zeros(1, np.int64)
        self.edges: list[tuple[Ints, Ints, Ints, Ints]] = []
        self.edge_count = 0

    def columns(self, low: int, high: int) -> list[Any]:
        """Every position over a range of states."""
        views: list[Any] = list(self.space.initial)
        for position, slot in self.slot.items():
            views[position] = self.store[slot, low:high]
        return views

    def run(self) -> Graph:
        graph = Graph(self.space)
        low = 0
        for number, step in enumerate(self.space.instance.script):
            low = self.scripted(low, number, step)
        graph.opened, depth = low, len(self.space.instance.script)
        last = depth + self.space.instance.depth if self.space.instance.depth else None
        while low < self.count and depth != last and not graph.truncated:
            high, depth = self.count, depth + 1
            self.level(low, high, depth, lambda b, c, n: b.enabled(c, n) if b.active else None)
            low = high
            graph.truncated = self.count > self.limit
        graph.closed = low
        graph.columns = self.columns(0, self.count)
        graph.depth, graph.parent = np.array(self.depths), np.array(self.parents)
        joined = [np.concatenate(parts) for parts in zip(*self.edges, strict=True)] if self.edges else [graph.src] * 4
        graph.src, graph.bound, graph.combo, graph.dst = joined
        return graph

    def scripted(self, state: int, number: int, step: Step) -> int:
        """Fires one step of the script and gives the state it leads to."""
        tables, before = self.space.tables, self.count
        kinds = tables.event(step.event).inputs.values()
        wanted = [code(v, t) for v, t in zip(step.inputs, kinds, strict=True)]

        def only(binding: Binding, columns: Columns, count: int) -> tuple[Ints, Ints] | None:
            if binding.event.id != step.event or tuple(e.name for e in binding.entities) != step.entities:
                return None
            found = binding.enabled(columns, count) if binding.add(self.space.initial, wanted) else None
            if found is None:
                return None
            chosen = [list(c) == wanted for c in binding.combos[found[1]].tolist()]
            return (found[0][chosen], found[1][chosen]) if any(chosen) else None

        self.level(state, state + 1, number + 1, only)
        if self.count == before:
            name = self.space.instance.name
            raise ScriptRefusedError(f"instance {name}: script[{number}]: '{step.event}' is refused or changes nothing")
        return self.count - 1

    def level(
        self, low: int, high: int, depth: int, enabled: Callable[[Binding, Columns, int], tuple[Ints, Ints] | None]
    ) -> None:
        """Fires every binding in every state of a level and adds what is new."""
        columns, prints = self.columns(low, high), self.prints[:, low:high]
        batch: list[tuple[int, Ints, Ints, Writes]] = []
        sums: list[Ints] = []
        for number, binding in enumerate(self.space.bindings):
            found = enabled(binding, columns, high - low)
            if found is None:
                continue
            index, combo = found
            writes = binding.effects(columns, index, combo)
            if binding.budget >= 0:
                writes[binding.budget] = columns[binding.budget][index] - 1

            def old(position: int, at: Ints = index) -> Any:
                column = columns[position]
                return column[at] if isinstance(column, np.ndarray) else column

            self.space.canonical(binding, writes, old)
            total = prints[:, index].copy()
            for position, value in writes.items():
                moved = np.asarray(value, np.int64) - old(position)
                total += self.weights[position][:, None] * moved
            batch.append((number, index + low, combo, writes))
            sums.append(total)
        if batch:
            self.merge(batch, np.concatenate(sums, axis=1), depth)

    def merge(self, batch: list[tuple[int, Ints, Ints, Writes]], sums: Ints, depth: int) -> None:
        """Finds which targets of a level are new, stores them, and records its edges."""
        first, check = sums
        unique, at, back = np.unique(first, return_index=True, return_inverse=True)
        spot = np.minimum(np.searchsorted(self.known, unique), len(self.known) - 1)
        seen = self.known[spot] == unique
        number = np.where(seen, self.known_at[spot], -1)
        fresh = np.flatnonzero(~seen)
        fresh = fresh[np.argsort(at[fresh], kind="stable")]
        number[fresh] = self.count + np.arange(len(fresh))
        self.reserve(len(fresh))
        self.fill(batch, at[fresh], number[fresh])
        self.prints[0, number[fresh]], self.prints[1, number[fresh]] = unique[fresh], check[at[fresh]]
        target = number[back]
        if (self.prints[1, target] != check).any():
            raise RuntimeError(f"{self.space.instance.name}: two states share a fingerprint; change the seed")
        self.parents += (self.edge_count + at[fresh]).tolist()
        self.depths += [depth] * len(fresh)
        order = np.argsort(unique[fresh])
        where = np.searchsorted(self.known, unique[fresh][order])
        self.known = np.insert(self.known, where, unique[fresh][order])
        self.known_at = np.insert(self.known_at, where, number[fresh][order])
        self.count += len(fresh)
        bound = np.repeat([b[0] for b in batch], [len(b[1]) for b in batch])
        self.edges.append((np.concatenate([b[1] for b in batch]), bound, np.concatenate([b[2] for b in batch]), target))
        self.edge_count += len(target)

    def reserve(self, more: int) -> None:
        """Makes room for so many states."""
        size = self.store.shape[1]
        while size < self.count + more:
            size *= 2
        if size != self.store.shape[1]:
            self.store = np.concatenate(
                [self.store, np.zeros((len(self.store), size - self.store.shape[1]), np.int16)], axis=1
            )
            self.prints = np.concatenate([self.prints, np.zeros((2, size - self.prints.shape[1]), np.int64)], axis=1)

    def fill(self, batch: list[tuple[int, Ints, Ints, Writes]], chosen: Ints, numbers: Ints) -> None:
        """Writes out new states: the source with the writes of the transition that found them (``chosen`` ascends)."""
        offset = begin = 0
        for _, src, _, writes in batch:
            end = int(np.searchsorted(chosen, offset + len(src)))
            if end > begin:
                local, states = chosen[begin:end] - offset, numbers[begin:end]
                self.store[:, states] = self.store[:, src[local]]
                for position, value in writes.items():
                    if position in self.slot:
                        array = np.asarray(value)
                        self.store[self.slot[position], states] = array[local] if array.ndim else array
            offset, begin = offset + len(src), end


def _misread(graph: Graph) -> frozenset[tuple[str, str]]:
    """Values that were reset as dead although an enabled row reads them: where the assumption of ``deadness`` fails."""
    found: set[tuple[str, str]] = set()
    space, facts = graph.space, graph.space.compiled.facts
    blank: dict[str, set[str]] = {}
    for entity in graph.instance.entities:
        blank[entity.name] = {space.names[p][1] for p, _ in space.resets(entity, set(space.written)).get(0, ())}
    for binding in space.bindings:
        by_role = dict(zip(binding.event.roles, binding.entities, strict=True))
        for role, entity in by_role.items() if binding.active else ():
            stages = space.tables.stages.get(entity.kind or CLASS_OF[role], ())
            reset = blank[entity.name]
            if not reset or stages[0] not in facts.stages(binding.event, role, stages):
                continue
            event = binding.event
            reads = [{r.name for r in facts.refs(g.expr) if r.role == role} & reset for g in event.guards]
            used = set().union(
                *reads, *({r.name for r in facts.refs(e.expr) if r.role == role} & reset for e in event.effects)
            )
            if not used:
                continue
            values = binding.values(graph.columns, None)
            mask: Any = graph.columns[space.index[entity.name, "stage"]] == 0
            for guard in binding.code.plain:
                if not reads[guard]:
                    mask = mask & binding.code.guards[guard](values)
            if np.any(mask):
                found |= {(entity.name, name) for name in used}
    return frozenset(found)


def explore(tables: Tables, instance: Instance, limit: int = LIMIT, compiled: Compiled | None = None) -> Graph:
    """Every state that the instance can reach, with every transition; ``truncated`` beyond ``limit`` states.

    InputError where the instance's counters grow without bound and no reduction of ``canonical`` fits them.
    """
    alive: frozenset[tuple[str, str]] = frozenset()
    while True:
        graph = _Search(Space(tables, instance, compiled or Compiled(tables), alive), limit).run()
        misread = frozenset() if graph.truncated else _misread(graph)
        if not misread:
            return graph
        alive |= misread


__all__ = ["Graph", "ScriptRefusedError", "TraceStep", "explore"]
