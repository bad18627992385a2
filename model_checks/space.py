"""The state space of one instance: where each variable lies, and every event bound to every fitting tuple of entities.

A state is one entry per *position* (a variable of an entity, or a global).  Positions that some bound row writes are
columns of an array; the rest, constants and rigid values included, are plain numbers.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from hybridkv_ref.expr import Expr, Ref, Type
from hybridkv_ref.model_checks.canonical import Reduction, reduction
from hybridkv_ref.model_checks.deadness import Facts
from hybridkv_ref.model_checks.instances import Entity, Instance
from hybridkv_ref.model_checks.vector import VectorFunction, code, vector_function
from hybridkv_ref.tables import Event, Tables

Ints = npt.NDArray[np.int64]
Columns = Sequence[Any]
Writes = dict[int, Any]


@dataclass(frozen=True)
class Code:
    """An event as functions over ``slots``; indices of guards that read no input are ``plain``, others ``tested``."""

    slots: tuple[Ref, ...]
    guards: tuple[VectorFunction, ...]
    effects: tuple[VectorFunction, ...]
    fixed: tuple[int, ...]
    plain: tuple[int, ...]
    tested: tuple[int, ...]


class Compiled:
    """The events of one set of tables as vector functions, made when first used and shared by all instances."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.done: dict[str, Code] = {}
        self.stated: dict[int, tuple[tuple[Ref, ...], VectorFunction]] = {}
        self.facts = Facts(tables)

    def property(self, expr: Expr) -> tuple[tuple[Ref, ...], VectorFunction]:
        """The slots and the function of a property's expression."""
        if id(expr) not in self.stated:
            slots = tuple(sorted(self.facts.refs(expr), key=lambda r: (r.role, r.name, r.new)))
            self.stated[id(expr)] = slots, vector_function(expr, slots)
        return self.stated[id(expr)]

    def code(self, event: Event) -> Code:
        """The functions of one event."""
        if event.id not in self.done:
            read = [self.facts.refs(g.expr) for g in event.guards]
            every = set().union(*read, *(self.facts.refs(e.expr) for e in event.effects))
            slots = tuple(sorted(every, key=lambda r: (r.role, r.name)))
            roles = [{r.role for r in found} for found in read]
            fixed = tuple(i for i, r in enumerate(roles) if "input" in r and r <= {"input", "const"})
            tested = tuple(i for i, r in enumerate(roles) if "input" in r and i not in fixed)
            self.done[event.id] = Code(
                slots,
                tuple(vector_function(g.expr, slots) for g in event.guards),
                tuple(vector_function(e.expr, slots) for e in event.effects),
                fixed, tuple(i for i, r in enumerate(roles) if "input" not in r), tested,
            )  # fmt: skip
        return self.done[event.id]


@dataclass
class Binding:
    """An event on a tuple of entities.  ``at`` is the position of each slot (input i: -1 - i).

    ``choices`` are all input tuples of the instance, ``combos`` the rows of it that pass the guards on inputs alone.
    """

    event: Event
    entities: tuple[Entity, ...]
    code: Code
    at: tuple[int, ...]
    targets: tuple[int, ...]
    choices: Ints
    combos: Ints
    active: bool
    budget: int = -1
    equal: list[tuple[int, list[tuple[int, int]]]] = field(default_factory=list)
    resets: list[tuple[int, dict[int, list[tuple[int, int]]]]] = field(default_factory=list)
    shifts: bool = False

    @property
    def label(self) -> str:
        """The event and its entities, as a trace prints them."""
        return f"{self.event.id}({', '.join(e.name for e in self.entities)})"

    def allowed(self, columns: Columns, choices: Ints) -> npt.NDArray[np.bool_]:
        """Which input tuples pass the guards that read nothing but inputs, constants and rigid values."""
        values = self.values(columns, None, list(choices.T))
        keep = np.ones(len(choices), bool)
        for guard in self.code.fixed:
            keep &= self.code.guards[guard](values)
        return keep

    def add(self, columns: Columns, choice: list[int]) -> bool:
        """Makes sure that an input tuple is tried from now on; False if a guard on inputs alone refuses it."""
        row = np.array([choice], np.int64)
        if not self.allowed(columns, row)[0]:
            return False
        if choice not in self.combos.tolist():
            self.combos = np.vstack([self.combos, row])
        return True

    def values(self, columns: Columns, index: Any, combos: Any = None) -> list[Any]:
        """The slots' values at the states of ``index`` (None: all), inputs from ``combos`` (one array each)."""
        out = []
        for p in self.at:
            value = (combos[-1 - p] if combos is not None else 0) if p < 0 else columns[p]
            out.append(value[index] if index is not None and p >= 0 and isinstance(value, np.ndarray) else value)
        return out

    def enabled(self, columns: Columns, count: int) -> tuple[Ints, Ints] | None:
        """The (state, combo) pairs in which every guard holds, or None."""
        mask: Any = np.True_
        values = self.values(columns, None)
        if self.budget >= 0:
            mask = columns[self.budget] > 0
        for guard in self.code.plain:
            mask = mask & self.code.guards[guard](values)
            if not mask.any():
                return None
        index = np.flatnonzero(np.broadcast_to(mask, count))
        size = len(self.combos)
        if not self.event.inputs:
            return index, np.zeros(len(index), np.int64)
        grid: Any = np.ones((size, len(index)), bool)
        values = self.values(columns, index, [c[:, None] for c in self.combos.T])
        for guard in self.code.tested:
            grid &= self.code.guards[guard](values)
        combo, where = np.nonzero(grid)
        return (index[where], combo) if len(where) else None

    def effects(self, columns: Columns, index: Ints, combo: Ints) -> Writes:
        """Position -> value written, for these pairs, before any reduction."""
        values = self.values(columns, index, [c[combo] for c in self.combos.T])
        return {p: effect(values) for p, effect in zip(self.targets, self.code.effects, strict=True)}


class Space:
    """Positions, bindings and reductions of one instance."""

    def __init__(
        self, tables: Tables, instance: Instance, compiled: Compiled, alive: frozenset[tuple[str, str]] = frozenset()
    ) -> None:
        self.tables, self.instance, self.compiled = tables, instance, compiled
        self.names: list[tuple[str, str]] = []
        self.types: list[Type] = []
        self.initial: list[int] = []
        self.index: dict[tuple[str, str], int] = {}
        for name, var in tables.globals.items():
            self.add("", name, var.type, var.init)
        for entity in instance.entities:
            for name, var in tables.vars_of(entity.cls, entity.kind).items():
                self.add(entity.name, name, var.type, entity.rigid.get(name, var.init))
        numbers = Type("int")
        for row, left in instance.budgets.items():
            self.add("budget", row, numbers, left)
        for name, number in instance.constants.items():
            self.add("const", name, numbers, number)
        self.bindings = list(self.bind())
        scripted = {(s.event, s.entities) for s in instance.script}
        active = [b for b in self.bindings if b.active or (b.event.id, tuple(e.name for e in b.entities)) in scripted]
        self.written = sorted({p for b in active for p in b.targets} | {b.budget for b in active if b.budget >= 0})
        rows = {b.event.id: b.event for b in active}.values()
        bounded = frozenset(instance.budgets)
        self.reduction = (
            Reduction((), frozenset(), {}, compiled.facts)
            if instance.exact
            else reduction(tables, rows, bounded, compiled.facts)
        )
        self.alive = alive
        self.reduce()

    def add(self, owner: str, name: str, kind: Type, value: int | str) -> None:
        """One position."""
        self.index[owner, name] = len(self.names)
        self.names.append((owner, name))
        self.types.append(kind)
        self.initial.append(code(value, kind))

    def position(self, ref: Ref, by_role: Mapping[str, Entity]) -> int:
        """Where a variable of these entities lies."""
        owner = {"global": "", "const": "const"}.get(ref.role)
        return self.index[by_role[ref.role].name if owner is None else owner, ref.name]

    def bind(self) -> Iterator[Binding]:
        """Every event on every fitting tuple of entities."""
        instance, environment = self.instance, "environment"
        for event in self.tables.events:
            domains = [instance.inputs.get((event.id, n), ()) for n in event.inputs]
            kinds = event.inputs.values()
            tuples = [[code(v, t) for v, t in zip(c, kinds, strict=True)] for c in product(*domains)]
            choices = np.array(tuples, np.int64).reshape(len(tuples), len(domains))
            for entities in instance.bindings(event):
                by_role = dict(zip(event.roles, entities, strict=True))
                compiled = self.compiled.code(event)
                order = {n: i for i, n in enumerate(event.inputs)}
                at = tuple(
                    -1 - order[r.name] if r.role == "input" else self.position(r, by_role) for r in compiled.slots
                )
                targets = tuple(self.position(e.target, by_role) for e in event.effects)
                on = not instance.leaves_out(event.row, entities) and (
                    event.actor != environment or event.row in instance.budgets
                )
                budget = self.index["budget", event.row] if event.row in instance.budgets else -1
                binding = Binding(event, entities, compiled, at, targets, choices, choices, on, budget)
                binding.combos = choices[binding.allowed(self.initial, choices)]
                yield binding

    def reduce(self) -> None:
        """Plans, per binding, what the reductions make of its writes; sets the reduced initial state."""
        reduced = self.reduction
        owned: dict[int, list[tuple[int, int]]] = {}
        self.counters: list[int] = []
        self.members: list[tuple[int, int, Any]] = []
        by_name = {e.name: e for e in self.instance.entities}
        for position, (owner, name) in enumerate(self.names):
            cls = by_name[owner].cls if owner in by_name else "global"
            for group in reduced.groups if owner not in ("budget", "const") else ():
                if (cls, name) in group.counters and group.form == "shift":
                    self.counters.append(position)
                elif (cls, name) in group.counters:
                    owned.setdefault(position, [])
                elif (cls, name) in group.members and group.form == "shift":
                    self.members.append((position, *self.dead_table(by_name[owner], name)))
                elif (cls, name) in group.members:
                    counter = group.via.get((cls, name))
                    if counter is not None:
                        target = "" if counter == "global" else by_name[owner].owners[counter]
                        names = [n for c, n in group.counters if c == ("global" if not target else by_name[target].cls)]
                        owned.setdefault(self.index[target, names[0]], []).append(
                            (position, self.index[owner, "stage"])
                        )
        owned = {c: memories for c, memories in owned.items() if c in self.written}
        for position, memories in owned.items():
            for memory, _ in memories:
                self.initial[memory] = int(self.initial[memory] == self.initial[position])
            self.initial[position] = 1
        columns = {*self.written, *(m for memories in owned.values() for m, _ in memories)}
        self.written = sorted(columns)
        self.ghosts = {p for p in columns if self.key(p, by_name) in reduced.ghosts}
        resets = {e.name: self.resets(e, columns) for e in self.instance.entities}
        for binding in self.bindings:
            touched = set(binding.targets)
            binding.equal = [(c, m) for c, m in owned.items() if touched & {c, *(p for p, _ in m)}]
            binding.shifts = bool(touched & set(self.counters))
            stages = ((self.index.get((e.name, "stage"), -1), resets[e.name]) for e in binding.entities)
            binding.resets = [(p, table) for p, table in stages if p in touched and table]

    def key(self, position: int, by_name: Mapping[str, Entity]) -> tuple[str, str]:
        """(class or global, name) of a position."""
        owner, name = self.names[position]
        return (by_name[owner].cls if owner in by_name else "global", name)

    def dead_table(self, entity: Entity, name: str) -> tuple[int, Any]:
        """The entity's stage position and, per stage, whether the variable is dead there."""
        stages = self.tables.stages[entity.kind or entity.cls]
        dead = [name in self.reduction.dead.get((entity.cls, entity.kind, s), ()) for s in stages]
        return self.index[entity.name, "stage"], np.array(dead)

    def resets(self, entity: Entity, columns: set[int]) -> dict[int, list[tuple[int, int]]]:
        """Stage code -> (position, first value) of what is dead there."""
        found = {}
        for number, stage in enumerate(self.tables.stages.get(entity.kind or entity.cls, ())):
            dead = self.reduction.dead.get((entity.cls, entity.kind, stage), frozenset())
            spots = [self.index[entity.name, n] for n in sorted(dead) if (entity.name, n) not in self.alive]
            chosen = [(p, self.initial[p]) for p in spots if p in columns]
            if chosen:
                found[number] = chosen
        return found

    def canonical(self, binding: Binding, writes: Writes, old: Any) -> None:
        """Reduces the writes in place; ``old(position)`` is the value before."""
        for counter, memories in binding.equal:
            now = writes.get(counter, old(counter))
            for memory, stage in memories:
                same = (writes[memory] if memory in writes else old(memory)) == now
                blank = writes.get(stage, old(stage)) == 0
                writes[memory] = np.where(blank, self.initial[memory], same)
            writes[counter] = 1
        for position in self.ghosts & writes.keys():
            del writes[position]
        if binding.shifts:
            now = {c: writes.get(c, old(c)) for c in self.counters}
            base = np.minimum.reduce(list(now.values()))
            writes.update({c: v - base for c, v in now.items()})
            for member, stage, dead in self.members:
                value = writes.get(member, old(member))
                at = writes.get(stage, old(stage))
                writes[member] = np.where(dead[at], self.initial[member], value - base)
        for stage, table in binding.resets:
            at = writes[stage]
            for number, spots in table.items():
                here = at == number
                for position, first in spots if np.any(here) else ():
                    before = writes.get(position, old(position))
                    writes[position] = first if np.all(here) else np.where(here, first, before)


__all__ = ["Binding", "Code", "Columns", "Compiled", "Ints", "Space", "Writes"]
