"""Invariants and step properties once more, on every state and transition that a search found.

The proofs hold for any number of entities; this is the same statement in a finite instance, by another method and with
another back end, and its counterexamples are real: each comes with a shortest way from the first state.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridkv_ref.expr import Ref
from hybridkv_ref.model_checks.explore import Graph, TraceStep
from hybridkv_ref.model_checks.instances import Entity, fitting
from hybridkv_ref.model_checks.space import Binding, Ints, Writes
from hybridkv_ref.model_checks.vector import VectorFunction
from hybridkv_ref.tables import ROLES, Property


@dataclass(frozen=True)
class Violation:
    """A property that does not hold: where, for which entities, and the steps that lead there."""

    property: str
    instance: str
    entities: tuple[str, ...]
    trace: tuple[TraceStep, ...]


@dataclass(frozen=True)
class Opinion:
    """``checked`` counts (property, entities) pairs; ``left_out`` names what reduced states cannot show."""

    checked: int
    left_out: tuple[str, ...]
    violations: tuple[Violation, ...]


def tuples(graph: Graph, item: Property) -> Iterator[dict[str, Entity]]:
    """The entities (by role) of the instance that a property is about; none if its kind does not occur."""
    entities = graph.instance.entities
    present = {e.kind for e in entities}
    if all(kind in present for kind in item.kinds.values()):
        roles = ROLES[item.scope]
        for chosen in fitting(entities, roles, item.kinds):
            yield dict(zip(roles, chosen, strict=True))


def holds(graph: Graph, item: Property, by_role: dict[str, Entity]) -> Any:
    """Per state, whether a one-state property holds (a plain truth value if it is the same in all)."""
    slots, function = graph.space.compiled.property(item.expr)
    return function([graph.columns[graph.space.position(r, by_role)] for r in slots])


def second_opinion(graph: Graph) -> Opinion:
    """Evaluates every invariant and step property of the tables on a graph."""
    tables, space = graph.space.tables, graph.space
    left_out: list[str] = []
    found: list[Violation] = []
    steps: list[tuple[Property, dict[str, Entity]]] = []
    checked = 0
    for item in (*tables.forms("invariant"), *tables.forms("step")):
        bound = [] if item.on else list(tuples(graph, item))
        if bound and not space.reduction.keeps(item.expr):
            left_out.append(item.id)
            continue
        for by_role in bound:
            checked += 1
            if item.form == "step":
                steps.append((item, by_role))
                continue
            good = np.broadcast_to(holds(graph, item, by_role), graph.states)
            if not good.all():
                trace = tuple(graph.trace(int(np.argmin(good))))
                found.append(Violation(item.id, graph.instance.name, _names(item, by_role), trace))
    acting = [p for p in tables.forms("step") if p.on and space.reduction.keeps(p.expr)]
    found += _steps(graph, steps, acting)
    return Opinion(checked + len(acting), tuple(left_out), tuple(found))


def _steps(
    graph: Graph, steps: list[tuple[Property, dict[str, Entity]]], acting: list[Property]
) -> Iterator[Violation]:
    """Step properties: once per state for steps that touch none of their variables, and per binding that does."""
    space = graph.space
    placed = [_place(graph, item, by_role) for item, by_role in steps]
    rest = [np.broadcast_to(np.logical_not(p.function([graph.columns[q] for q in p.at])), graph.states) for p in placed]
    restless = [bool(bad.any()) for bad in rest]
    worst: dict[tuple[str, tuple[str, ...]], tuple[int, _Placed, int]] = {}
    for number, chosen in graph.of_binding().items():
        binding = space.bindings[number]
        src, combo = graph.src[chosen], graph.combo[chosen]
        writes, targets = binding.effects(graph.columns, src, combo), set(binding.targets)
        judged = []
        for spot, bad_at_rest, moves in zip(placed, rest, restless, strict=True):
            if targets & spot.moving:
                judged.append((spot, np.logical_not(spot.function(_both(graph, src, writes, spot)))))
            elif moves:
                judged.append((spot, bad_at_rest[src]))
        for item in acting:
            roles = _acting(binding, item)
            if roles is not None:
                spot = _place(graph, item, roles)
                inputs = dict(zip(binding.event.inputs, (c[combo] for c in binding.combos.T), strict=True))
                judged.append((spot, np.logical_not(spot.function(_both(graph, src, writes, spot, inputs)))))
        for spot, bad in judged:
            if np.any(bad):
                edge = int(chosen[int(np.argmax(np.broadcast_to(bad, len(chosen))))])
                found = (int(graph.depth[graph.src[edge]]), spot, edge)
                key = (spot.item.id, spot.names)
                worst[key] = min(worst.get(key, found), found, key=lambda f: f[0])
    for _, spot, edge in worst.values():
        trace = (*graph.trace(int(graph.src[edge])), graph.step(edge))
        yield Violation(spot.item.id, graph.instance.name, spot.names, trace)


@dataclass(frozen=True)
class _Placed:
    """A step property on some entities: its slots, where they lie (inputs: -1), and the positions read as ``new``."""

    item: Property
    names: tuple[str, ...]
    function: VectorFunction
    slots: tuple[Ref, ...]
    at: tuple[int, ...]
    moving: frozenset[int]


def _place(graph: Graph, item: Property, by_role: dict[str, Entity]) -> _Placed:
    slots, function = graph.space.compiled.property(item.expr)
    at = tuple(-1 if r.role == "input" else graph.space.position(r, by_role) for r in slots)
    moving = frozenset(p for p, r in zip(at, slots, strict=True) if r.new)
    return _Placed(item, _names(item, by_role), function, slots, at, moving)


def _names(item: Property, by_role: dict[str, Entity]) -> tuple[str, ...]:
    return tuple(by_role[r].name for r in ROLES[item.scope])


def _both(
    graph: Graph, src: Ints, writes: Writes, spot: _Placed, inputs: Mapping[str, Ints] | None = None
) -> list[Any]:
    """The slots' values before (where ``new``, after) the transitions from ``src``."""
    values: list[Any] = []
    for ref, position in zip(spot.slots, spot.at, strict=True):
        if position < 0:
            values.append((inputs or {})[ref.name])
            continue
        column = graph.columns[position]
        before = column[src] if isinstance(column, np.ndarray) else column
        values.append(writes.get(position, before) if ref.new else before)
    return values


def _acting(binding: Binding, item: Property) -> dict[str, Entity] | None:
    """The entities of a step property that is stated for rows with a tag: those that act."""
    by_role = dict(zip(binding.event.roles, binding.entities, strict=True))
    fits = item.on in binding.event.tags and set(ROLES[item.scope]) <= by_role.keys()
    return by_role if fits and all(by_role[r].kind == k for r, k in item.kinds.items()) else None


__all__ = ["Opinion", "Violation", "holds", "second_opinion", "tuples"]
