"""Random states for single events: values of all variables within an event's reach, reachable or not.

Half of the samples are repaired until every guard holds, most others until exactly one does not, so that every conjunct
decides; the rest is left as drawn.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hybridkv_ref.expr import BOOL, INT, Ref, refs
from hybridkv_ref.model_checks.vector import vector_function
from hybridkv_ref.tables import CLASS_OF, Event, Tables

Ints = npt.NDArray[np.int64]
ROUNDS = 60  # of repair; a sample that is not as wanted by then is used as it is
PER_ROUND = 40  # samples of an event with the same constants, which the machine compiles in


@dataclass(frozen=True)
class Batch:
    """Samples of one event: ``values[i, j]`` is variable ``cells[j]`` in sample i, enum members as positions."""

    event: Event
    cells: tuple[Ref, ...]
    values: Ints

    def constants(self) -> dict[str, int]:
        """The constants, which are the same in all samples of a batch."""
        return {r.name: int(v) for r, v in zip(self.cells, self.values[0], strict=True) if r.role == "const"}


def cells(tables: Tables, event: Event) -> tuple[Ref, ...]:
    """All variables of an event's entities, all globals and constants, and its inputs."""
    found = [Ref("global", n, v.type) for n, v in tables.globals.items()]
    found += [Ref("const", n, INT) for n in tables.constants]
    for role in event.roles:
        found += [Ref(role, n, v.type) for n, v in tables.vars_of(CLASS_OF[role], event.kinds.get(role, "")).items()]
    found += [Ref("input", n, t) for n, t in event.inputs.items()]
    mentioned = {(r.role, r.name): r for r in mentions(event)}  # an enum's label may differ from the declaration's
    return tuple(mentioned.get((r.role, r.name), r) for r in found)


def mentions(event: Event) -> set[Ref]:
    """The variables that an event reads or writes."""
    read = set().union(*(refs(g.expr) for g in event.guards), *(refs(e.expr) for e in event.effects))
    return read | {e.target for e in event.effects}


def sample(event: Event, at: tuple[Ref, ...], fixed: dict[str, int], count: int, rng: np.random.Generator) -> Batch:
    """Random values, repaired by redrawing the variables of guards that are not as wanted."""
    values = np.stack([_draw(r, count, rng) for r in at], axis=1)
    for index, ref in enumerate(at):
        if ref.role == "const":
            values[:, index] = fixed[ref.name]
    guards = len(event.guards)
    wanted = np.ones((count, guards), bool)
    mode = rng.integers(0, 8, count)
    one = np.flatnonzero(mode < 3) if guards else np.zeros(0, np.int64)
    wanted[one, rng.integers(0, max(guards, 1), len(one))] = False
    repaired = mode < 7
    functions = [vector_function(g.expr, at) for g in event.guards]
    place = {ref: index for index, ref in enumerate(at)}
    read = [sorted(place[r] for r in refs(g.expr)) for g in event.guards]
    free = [[i for i in columns if at[i].role != "const"] for columns in read]
    for _ in range(ROUNDS):
        settled = True
        for guard, function in enumerate(functions):
            holds = np.broadcast_to(function(list(values.T)), count)
            wrong = np.flatnonzero(repaired & (holds != wanted[:, guard]))
            settled = settled and not len(wrong)
            chosen = rng.integers(0, len(free[guard]), len(wrong)) if free[guard] else wrong
            for number, column in enumerate(free[guard]):
                rows = wrong[chosen == number]
                near = [i for i in read[guard] if i != column and at[i].type.number]
                values[rows, column] = _redraw(at[column], values[np.ix_(rows, np.array(near, np.int64))], rng)
        if settled:
            break
    return Batch(event, at, values)


def _draw(ref: Ref, count: int, rng: np.random.Generator) -> Ints:
    if not ref.type.number:
        return rng.integers(0, 2 if ref.type == BOOL else len(ref.type.members), count)
    wide = rng.random(count) < 0.05
    return np.where(wide, rng.integers(-50, 50, count), rng.integers(-1, 6, count))


def _redraw(ref: Ref, near: Ints, rng: np.random.Generator) -> Ints:
    """New values of one variable; if it is a number, half of them stand close to one of those in ``near``."""
    count, others = near.shape
    fresh = _draw(ref, count, rng)
    if not ref.type.number or not others:
        return fresh
    close = near[:, int(rng.integers(others))] + rng.integers(-1, 2, count)
    return np.where(rng.random(count) < 0.5, close, fresh)


def samples(tables: Tables, count: int, seed: int) -> Iterator[Batch]:
    """At least ``count`` samples, equally many of every event; every batch of a round has the same constants."""
    rng = np.random.default_rng(seed)
    each = -(-count // len(tables.events))
    layouts = [(event, cells(tables, event)) for event in tables.events]
    for begin in range(0, each, PER_ROUND):
        fixed = {name: int(rng.integers(0, 7)) for name in tables.constants}
        for event, at in layouts:
            yield sample(event, at, fixed, min(PER_ROUND, each - begin), rng)
