"""Invariants and step properties once more, on every state and transition that a search found.

The proofs hold for any number of entities; this is the same statement in a finite instance, by another method and with
another back end, and its counterexamples are real: each comes with a shortest way from the first state.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridkv_ref.model_checks.explore import Graph, TraceStep
from hybridkv_ref.model_checks.instances import Entity, fitting
from hybridkv_ref.model_checks.space import Binding, Ints, Writes
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
    """``checked`` counts (property, entities) pairs; ``left_out`` names the properties that reduced states cannot show."""

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
                found.append(_violation(graph, item, by_role, graph.trace(int(np.argmin(good)))))
    acting = [p for p in tables.forms("step") if p.on and space.reduction.keeps(p.expr)]
    found += _steps(graph, steps, acting)
    return Opinion(checked + len(acting), tuple(left_out), tuple(found))


def _steps(graph: Graph, steps: list[tuple[Property, dict[str, Entity]]], acting: list[Property]) -> Iterator[Violation]:
    """Step properties: once per state for steps that touch none of their variables, then per binding that writes some."""
    space = graph.space
    placed = []
    for item, by_role in steps:
        slots, function = space.compiled.property(item.expr)
        at = tuple(space.position(r, by_role) for r in slots)
        placed.append((item, by_role, function, at, tuple(r.new for r in slots)))
    edges = graph.of_binding()
    touching = {n: set(space.bindings[n].targets) for n in edges}
    bad_at_rest = [np.broadcast_to(np.logical_not(f([graph.columns[p] for p in at])), graph.states) for _, _, f, at, _ in placed]
    failed: set[int] = set()
    for number, chosen in edges.items():
        binding = space.bindings[number]
        src, combo = graph.src[chosen], graph.combo[chosen]
        writes = binding.effects(graph.columns, src, combo)
        for index, (item, by_role, function, at, new) in enumerate(placed):
            if index in failed:
                continue
            if touching[number] & {p for p, n in zip(at, new, strict=True) if n}:
                bad = np.logical_not(function(_both(graph, src, writes, at, new)))
            else:
                bad = bad_at_rest[index][src] if bad_at_rest[index].any() else np.False_
            if np.any(bad):
                failed.add(index)
                yield _on_edge(graph, item, by_role, chosen, bad)
        for item in acting:
            by_role = _acting(binding, item)
            if by_role is not None:
                slots, function = space.compiled.property(item.expr)
                own = [r for r in slots if r.role != "input"]
                at = tuple(space.position(r, by_role) for r in own)
                known = dict(zip(own, _both(graph, src, writes, at, tuple(r.new for r in own)), strict=True))
                for name, column in zip(binding.event.inputs, binding.combos.T, strict=True):
                    known |= {r: column[combo] for r in slots if r.role == "input" and r.name == name}
                bad = np.logical_not(function([known[r] for r in slots]))
                if np.any(bad):
                    yield _on_edge(graph, item, by_role, chosen, bad)


def _both(graph: Graph, src: Ints, writes: Writes, at: tuple[int, ...], new: tuple[bool, ...]) -> list[Any]:
    """The values before (and, where ``new``, after) the transitions from ``src``."""
    values = []
    for position, after in zip(at, new, strict=True):
        column = graph.columns[position]
        before = column[src] if isinstance(column, np.ndarray) else column
        values.append(writes.get(position, before) if after else before)
    return values


def _acting(binding: Binding, item: Property) -> dict[str, Entity] | None:
    """The entities of a step property that is stated for rows with a tag: those that act."""
    by_role = dict(zip(binding.event.roles, binding.entities, strict=True))
    fits = item.on in binding.event.tags and set(ROLES[item.scope]) <= by_role.keys()
    return by_role if fits and all(by_role[r].kind == k for r, k in item.kinds.items()) else None


def _on_edge(graph: Graph, item: Property, by_role: dict[str, Entity], chosen: Ints, bad: Any) -> Violation:
    edge = int(chosen[int(np.argmax(np.broadcast_to(bad, len(chosen))))])
    return _violation(graph, item, by_role, [*graph.trace(int(graph.src[edge])), graph.step(edge)])


def _violation(graph: Graph, item: Property, by_role: dict[str, Entity], trace: list[TraceStep]) -> Violation:
    names = tuple(by_role[r].name for r in ROLES[item.scope] if r in by_role)
    return Violation(item.id, graph.instance.name, names, tuple(trace))


__all__ = ["Opinion", "Violation", "holds", "second_opinion", "tuples"]
