"""States that the finite instances reach, gathered per scope: cheap evidence against a claim, never for one.

The searches merge states that differ in what does not matter (see ``canonical``), so a claim that fails here may still
hold of the rows; whoever uses the samples may lose a true claim by that, and gains no false one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridkv_ref.expr import INT, Expr, Ref, refs
from hybridkv_ref.model_checks.explore import Graph, explore
from hybridkv_ref.model_checks.instances import Entity, Instance, fitting
from hybridkv_ref.model_checks.space import Compiled
from hybridkv_ref.model_checks.vector import VectorFunction, vector_function
from hybridkv_ref.tables import CLASS_OF, Tables

MOST = 400
Scope = tuple[str, tuple[tuple[str, str], ...]]  # a scope and the kinds of its segment roles


@dataclass
class Samples:
    """The states of one scope: a row per state, a column per variable of the roles (see ``vector``)."""

    columns: tuple[Ref, ...]
    rows: Any
    functions: dict[Expr, tuple[tuple[Ref, ...], VectorFunction]] = field(default_factory=dict)

    def holds(self, expr: Expr) -> Any:
        """Per row, whether a bool expression holds."""
        if expr not in self.functions:
            slots = tuple(refs(expr))
            self.functions[expr] = slots, vector_function(expr, slots)
        slots, function = self.functions[expr]
        found = function([self.rows[:, self.columns.index(r)] for r in slots])
        return np.broadcast_to(found, len(self.rows))


def sampled(
    tables: Tables, instances: Iterable[Instance], scopes: Mapping[Scope, tuple[str, ...]]
) -> dict[Scope, Samples]:
    """What these instances reach, for the wanted scopes (with their roles); one that no instance has is left out."""
    compiled, parts = Compiled(tables), dict[Scope, list[Any]]()
    columns = {scope: tuple(_columns(tables, roles, dict(scope[1]))) for scope, roles in scopes.items()}
    for instance in instances:
        graph = explore(tables, instance, compiled=compiled)
        for scope, roles in scopes.items():
            for chosen in fitting(graph.instance.entities, roles, dict(scope[1])):
                parts.setdefault(scope, []).append(_rows(graph, columns[scope], dict(zip(roles, chosen, strict=True))))
    return {s: Samples(columns[s], np.concatenate(p)) for s, p in parts.items()}


def _columns(tables: Tables, roles: tuple[str, ...], kinds: Mapping[str, str]) -> Iterable[Ref]:
    yield from (Ref("const", n, INT) for n in tables.constants)
    yield from (Ref("global", n, v.type) for n, v in tables.globals.items())
    for role in roles:
        yield from (Ref(role, v.name, v.type) for v in tables.vars_of(CLASS_OF[role], kinds.get(role, "")).values())


def _rows(graph: Graph, columns: tuple[Ref, ...], by_role: dict[str, Entity]) -> Any:
    """Every state of a small graph, evenly spread ones of a large."""
    step = 1 + graph.states // MOST
    found = np.empty((len(range(0, graph.states, step)), len(columns)), np.int64)
    for index, ref in enumerate(columns):
        column = graph.columns[graph.space.position(ref, by_role)]
        found[:, index] = column[::step] if isinstance(column, np.ndarray) else column
    return found
