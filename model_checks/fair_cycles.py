"""Liveness once more, by search: a fair cycle in which a claim's goal never comes.

A claim (``tables.responses``) fails in a finite instance if some execution stays for ever in states where it is
pending (``start`` and not ``goal``) although every fair row is either taken again and again or disabled again and
again (weak fairness).  Such an execution ends in a strongly connected set of pending states; a single state counts
too, since doing nothing for ever is an execution: a stutter is a cycle.

Most pending states form one large component, so it is cut first by coarse views (stages of the claim's entities, all
their variables, the stages of all entities): a cycle lies within one component of every view.  What survives is cut
exactly, by networkx.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import networkx as nx
import numpy as np

from hybridkv_ref.expr import Expr, Lit
from hybridkv_ref.model_checks.explore import Graph, TraceStep
from hybridkv_ref.model_checks.instances import Entity, fitting
from hybridkv_ref.model_checks.space import Ints
from hybridkv_ref.tables import ROLES, Response

FACTOR = 1_000_003


@dataclass(frozen=True)
class Lasso:
    """A counterexample: the way to the cycle, and the cycle (empty: nothing happens any more)."""

    claim: str
    instance: str
    entities: tuple[str, ...]
    prefix: tuple[TraceStep, ...]
    cycle: tuple[TraceStep, ...]


@dataclass(frozen=True)
class FairCycles:
    """``checked`` (claim, entities) pairs with pending states, and the counterexamples."""

    checked: tuple[tuple[str, tuple[str, ...]], ...]
    lassos: tuple[Lasso, ...]


def fair_cycles(graph: Graph) -> FairCycles:
    """Every claim on every fitting tuple of the instance.

    An instance that ends at a depth, or has a row switched off whose fairness a claim counts on, says nothing about it.
    """
    checked: list[tuple[str, tuple[str, ...]]] = []
    lassos: list[Lasso] = []
    for claim, by_role in _claims(graph):
        search = _Pending(graph, claim, by_role)
        if search.any:
            checked.append((claim.id, search.names))
            lasso = search.lasso()
            if lasso is not None:
                lassos.append(lasso)
    return FairCycles(tuple(checked), tuple(lassos))


def is_closed(graph: Graph, also_fair: frozenset[str] = frozenset()) -> bool:
    """Whether every state found has all its steps, and every fair row may fire."""
    fair_off = any((b.event.fair or b.event.row in also_fair) and not b.active for b in graph.space.bindings)
    return not graph.truncated and graph.closed == graph.states and not fair_off


def _claims(graph: Graph) -> Iterator[tuple[Response, dict[str, Entity]]]:
    entities, reduction = graph.instance.entities, graph.space.reduction
    kinds = {e.kind for e in entities}
    for claim in graph.space.tables.responses:
        fits = all(k in kinds for k in claim.kinds.values()) and is_closed(graph, claim.also_fair)
        if fits and all(reduction.keeps(e) for e in (claim.start, claim.goal, claim.given)):
            roles = ROLES[claim.scope]
            for chosen in fitting(entities, roles, claim.kinds):
                yield claim, dict(zip(roles, chosen, strict=True))


class _Pending:
    """The pending states of one claim, with the edges that stay among them."""

    def __init__(self, graph: Graph, claim: Response, by_role: Mapping[str, Entity]) -> None:
        self.graph, self.claim, self.by_role = graph, claim, by_role
        self.names = tuple(by_role[r].name for r in ROLES[claim.scope])
        waits = self.truth(claim.start) & ~self.truth(claim.goal) & self.truth(claim.given)
        waits[: graph.opened] = False
        self.waits = waits
        self.any = bool(waits.any())
        bindings = graph.space.bindings
        without = claim.without
        self.runs = np.array(
            [b.event.row not in without and not (b.event.intake and "intake" in without) for b in bindings]
        )

    def truth(self, expr: Expr) -> Any:
        """One predicate in every state."""
        if isinstance(expr, Lit):
            return np.full(self.graph.states, bool(expr.value))
        slots, function = self.graph.space.compiled.property(expr)
        value = function([self.graph.columns[self.graph.space.position(r, self.by_role)] for r in slots])
        return np.array(np.broadcast_to(value, self.graph.states))

    def lasso(self) -> Lasso | None:
        """A fair cycle, or None."""
        graph = self.graph
        use = self.runs[graph.bound] & self.waits[graph.src]
        self.sources, self.bound = graph.src[use], graph.bound[use]
        self.targets, self.edges = graph.dst[use], np.flatnonzero(use)
        also, bindings = self.claim.also_fair, graph.space.bindings
        fair = [n for n, b in enumerate(bindings) if (b.event.fair or b.event.row in also) and self.runs[n]]
        self.enabled: dict[int, Any] = {}
        for number in fair:
            here = self.sources[self.bound == number]
            if len(here):
                self.enabled[number] = np.zeros(graph.states, bool)
                self.enabled[number][here] = True
        inner = self.waits[self.targets]
        everything = np.flatnonzero(self.waits)
        return self.refine(everything, np.flatnonzero(inner), self.views())

    def views(self) -> list[list[int]]:
        """Coarse views as positions."""
        space = self.graph.space
        own = {e.name for e in self.by_role.values()}
        columns = [p for p in space.written if isinstance(self.graph.columns[p], np.ndarray)]
        stages = [p for p in columns if space.names[p][1] == "stage"]
        mine = [p for p in columns if space.names[p][0] in own]
        return [[p for p in stages if p in mine], mine, sorted({*stages, *mine})]

    def refine(self, states: Ints, edges: Ints, views: list[list[int]]) -> Lasso | None:
        """Looks for a fair cycle among ``states`` and ``edges`` (indices into this search's own edges)."""
        if not len(states) or self.starved(states, edges):
            return None
        if not views:
            return self.exact(states, edges)
        # Two views that share a key only make the view coarser: still no cycle is cut.
        keys = np.zeros(len(states), np.int64)
        for position in views[0]:
            keys = keys * FACTOR + self.graph.columns[position][states]
        _, part = np.unique(keys, return_inverse=True)
        count = int(part.max()) + 1
        label = np.full(self.graph.states, -1)
        label[states] = part
        ends = np.stack([label[self.sources[edges]], label[self.targets[edges]]])
        coarse: Any = nx.DiGraph()
        coarse.add_nodes_from(range(count))
        steps = np.unique(ends[0] * count + ends[1])
        coarse.add_edges_from(zip((steps // count).tolist(), (steps % count).tolist(), strict=True))
        component = np.zeros(count, np.int64)
        for number, members in enumerate(nx.strongly_connected_components(coarse)):
            component[list(members)] = number
        of_state, of_edge = component[label[states]], component[ends]
        stays = of_edge[0] == of_edge[1]
        for number in np.unique(of_state).tolist():
            found = self.refine(states[of_state == number], edges[stays & (of_edge[0] == number)], views[1:])
            if found is not None:
                return found
        return None

    def starved(self, states: Ints, edges: Ints) -> bool:
        """Whether some fair row is enabled in all these states and no edge among them takes it: no fair cycle here."""
        taken = set(np.unique(self.bound[edges]).tolist())
        return any(n not in taken and bool(on[states].all()) for n, on in self.enabled.items())

    def exact(self, states: Ints, edges: Ints) -> Lasso | None:
        """The same on the states themselves: every strongly connected component, single states included."""
        precise: Any = nx.MultiDiGraph()
        precise.add_nodes_from(states.tolist())
        precise.add_edges_from(
            zip(self.sources[edges].tolist(), self.targets[edges].tolist(), edges.tolist(), strict=True)
        )
        for members in nx.strongly_connected_components(precise):
            chosen = np.array(sorted(members))
            label = np.zeros(self.graph.states, bool)
            label[chosen] = True
            inner = edges[label[self.sources[edges]] & label[self.targets[edges]]]
            if not self.starved(chosen, inner):
                return self.build(precise.subgraph(members), chosen, inner)
        return None

    def build(self, component: Any, states: Ints, edges: Ints) -> Lasso:
        """The component as a lasso: a round that takes, or passes a state that disables, every fair row."""
        start = int(states[np.argmin(self.graph.depth[states])])
        cycle: list[int] = []
        here = start
        for number, enabled in self.enabled.items():
            off = states[~enabled[states]]
            if len(off):
                here = self.walk(component, here, int(off[0]), cycle)
                continue
            edge = int(edges[self.bound[edges] == number][0])
            self.walk(component, here, int(self.sources[edge]), cycle)
            cycle.append(edge)
            here = int(self.targets[edge])
        self.walk(component, here, start, cycle)
        steps = tuple(self.graph.step(int(self.edges[e])) for e in cycle)
        return Lasso(self.claim.id, self.graph.instance.name, self.names, tuple(self.graph.trace(start)), steps)

    @staticmethod
    def walk(component: Any, source: int, target: int, cycle: list[int]) -> int:
        """Appends a shortest way within the component; gives its end."""
        path = nx.shortest_path(component, source, target)
        for one, two in pairwise(path):
            cycle.append(next(iter(component[one][two])))
        return target


@dataclass(frozen=True)
class Stuck:
    """``judged``: (kind or class, stage) pairs that were looked at.

    ``traps``: (entity, stage, trace) from which the entity's first stage cannot be reached; ``dead``: traces to states
    in which no row is enabled although some entity is not in its first stage.
    """

    judged: frozenset[tuple[str, str]]
    traps: tuple[tuple[str, str, tuple[TraceStep, ...]], ...]
    dead: tuple[tuple[TraceStep, ...], ...]


def stuck(graph: Graph) -> Stuck:
    """Trap stages and dead states, judged only where no row is off but those that bring new work: no way out lacks."""
    missing = [
        b for b in graph.space.bindings if not b.active and not b.event.intake and b.event.actor != "environment"
    ]
    if missing or not is_closed(graph):
        return Stuck(frozenset(), (), ())
    traps: list[tuple[str, str, tuple[TraceStep, ...]]] = []
    judged: set[tuple[str, str]] = set()
    back = _Backwards(graph)
    idle = np.ones(graph.states, bool)
    for entity in graph.instance.entities:
        owner = entity.kind or entity.cls
        column = graph.columns[graph.space.index[entity.name, "stage"]]
        if not isinstance(column, np.ndarray):
            continue
        idle &= column == 0
        stages = graph.space.tables.stages[owner]
        judged |= {(owner, stages[n]) for n in np.unique(column[graph.opened :]).tolist()}
        lost = np.flatnonzero(~back.reach(column == 0)[graph.opened :]) + graph.opened
        values, first = np.unique(column[lost], return_index=True)
        for number, where in zip(values.tolist(), first.tolist(), strict=True):
            traps.append((entity.name, stages[number], tuple(graph.trace(int(lost[where])))))
    leaves = ~idle
    leaves[graph.src] = False
    leaves[: graph.opened] = False
    return Stuck(frozenset(judged), tuple(traps), tuple(tuple(graph.trace(s)) for s in np.flatnonzero(leaves).tolist()))


class _Backwards:
    """The edges of a graph by their target."""

    def __init__(self, graph: Graph) -> None:
        order = np.argsort(graph.dst, kind="stable")
        self.before = graph.src[order]
        self.begin = np.searchsorted(graph.dst[order], np.arange(graph.states + 1))

    def reach(self, goal: Any) -> Any:
        """The states from which some state of ``goal`` can be reached."""
        found = goal.copy()
        frontier = np.flatnonzero(found)
        while len(frontier):
            counts = self.begin[frontier + 1] - self.begin[frontier]
            offsets = np.repeat(self.begin[frontier] - np.cumsum(counts) + counts, counts)
            sources = np.unique(self.before[offsets + np.arange(len(offsets))])
            frontier = sources[~found[sources]]
            found[frontier] = True
        return found


__all__ = ["FairCycles", "Lasso", "Stuck", "fair_cycles", "is_closed", "stuck"]
