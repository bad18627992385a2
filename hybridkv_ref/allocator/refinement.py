"""The allocator beside the tables: what memory and files say is what the tables say, after every step.

``Shadow`` fires each row a second time, in a machine of its own over the pristine tables: a change that no row made,
or a row that the tables refuse, is found at once.  ``abstraction`` reads arenas, block tables and files without asking
the allocator's books for any count; ``differences`` compares it with the table state.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from hybridkv_ref.allocator.allocator import HeterogeneousAllocator
from hybridkv_ref.allocator.arena import NULL_SLOT, POISON
from hybridkv_ref.allocator.ledger import machine_for
from hybridkv_ref.allocator.media import TEMPORARY, Files
from hybridkv_ref.compile_py import attribute
from hybridkv_ref.lanes import worlds
from hybridkv_ref.machine import Entity, Machine, Refused, World
from hybridkv_ref.tables import CLASS_OF, HANDOFFS, ROLES, Property, Tables, Var

State = dict[tuple[str, str], Any]


class Shadow:
    """An observer that fires every row again beside the allocator; ``faults`` lists what differed."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.worlds: dict[int, World] = {}
        self.twins: dict[int, Any] = {}
        self.lanes: list[Any] = []
        self.faults: list[str] = []
        self.rows = 0
        self.counts: dict[str, int] = {}

    def attach(self, lanes: Sequence[Any], made: Sequence[Any]) -> None:
        """Begins beside an allocator: its lanes, and the entities that it has already."""
        self.lanes = list(lanes)
        made_for = worlds(machine_for(self.tables, tuple(sorted(lane.constants.items()))) for lane in lanes)
        self.worlds = {lane.index: world for lane, world in zip(lanes, made_for, strict=True)}
        pool = made_for[0].pool
        for name in self.tables.globals:  # what an earlier process left: the state after a crash is given
            setattr(pool, attribute(name), getattr(lanes[0].world.pool, attribute(name)))
        for entity in made:
            twin = self.twin(self.worlds[0], entity)
            for name in self.tables.vars_of(entity.cls, entity.kind):
                setattr(twin, attribute(name), getattr(entity, attribute(name)))

    def limits(self, constants: Mapping[int, Mapping[str, int]]) -> None:
        """The caps have changed."""
        for index, world in self.worlds.items():
            world.machine = machine_for(self.tables, tuple(sorted(constants[index].items())))

    def before(self, event_id: str) -> None:
        """Nothing: only what has fired counts."""

    def after(self, event_id: str, lane: int, entities: Sequence[Entity], inputs: Mapping[str, int | str]) -> None:
        """Fires the row on the twins and compares every variable of them and of the pool."""
        if not self.worlds:
            return
        world = self.worlds[lane]
        twins = [self.twin(world, entity) for entity in entities]
        for entity, twin in zip(entities, twins, strict=True):
            twin.refs = {role: self.twin(world, target) for role, target in entity.refs.items()}
        try:
            world.fire(event_id, *twins, **inputs)
        except Refused as refused:
            self.faults.append(f"{event_id}: fired, but {refused}")
            return
        self.rows += 1
        self.counts[event_id] = self.counts.get(event_id, 0) + 1
        for entity, twin in zip(entities, twins, strict=True):
            for name in self.tables.vars_of(entity.cls, entity.kind):
                mine, theirs = getattr(entity, attribute(name)), getattr(twin, attribute(name))
                if mine != theirs:
                    self.faults.append(f"{event_id}: {entity.name}.{name} is {mine}, the tables say {theirs}")
        pool = self.lanes[lane].world.pool
        for name in self.tables.globals:
            mine, theirs = getattr(pool, attribute(name)), getattr(world.pool, attribute(name))
            if mine != theirs:
                self.faults.append(f"{event_id}: {name} is {mine}, the tables say {theirs}")

    def twin(self, world: World, entity: Entity) -> Any:
        """The entity's twin; what is rigid is taken over, since it is set while the entity is at rest."""
        variables = self.tables.vars_of(entity.cls, entity.kind)
        twin = self.twins.get(id(entity))
        if twin is None:
            twin = world.add(entity.cls, entity.kind)
            world.entities.clear()
            self.twins[id(entity)] = twin
        for name, var in variables.items():
            if var.rigid:
                setattr(twin, attribute(name), getattr(entity, attribute(name)))
        return twin


def occupied(allocator: HeterogeneousAllocator) -> dict[str, set[int]]:
    """Per layout, the slots whose bytes are not all poison, the null slot left out."""
    found = {}
    for page, arena in allocator.book.arenas.items():
        free = (arena.bytes == POISON).all(dim=1).cpu().numpy()
        found[f"{page.layout.id}/{page.entries}/{page.stride}/{page.dim}"] = set(np.flatnonzero(~free).tolist()) - {
            NULL_SLOT
        }
    return found


def abstraction(allocator: HeterogeneousAllocator) -> State:
    """The pool's sums as memory, block tables and files show them."""
    tables, state = allocator.ledger.tables, {}
    used: dict[str, int] = dict.fromkeys(tables.kinds, 0)
    for segment in allocator.book.segments:
        if segment.slots is not None:
            used[segment.kind] += segment.slots.size * segment.group.page.stride
    state["", "gpu_used"] = sum(used.values())
    for group in allocator.geometry.groups:
        state["", f"{group.kind}.used"] = used[group.kind]
    slots = occupied(allocator)
    stride = {f"{p.layout.id}/{p.entries}/{p.stride}/{p.dim}": p.stride for p in allocator.book.arenas}
    state["arenas", "bytes"] = sum(len(members) * stride[name] for name, members in slots.items())
    for name, medium in allocator.tiers.media.items():
        amount = sum(int(about["kept.mem"]) for _, about in medium.objects_now()) if isinstance(medium, Files) else None
        if amount is not None:
            state["files", name] = amount
    return state


def differences(allocator: HeterogeneousAllocator) -> list[str]:
    """Every way in which memory, files and records differ from the table state; none as it should be."""
    with allocator.ledger.lock:
        return [*_memory(allocator), *_sums(allocator), *_invariants(allocator), *_files(allocator)]


def _memory(allocator: HeterogeneousAllocator) -> Iterator[str]:
    found, pool = abstraction(allocator), allocator.ledger.pool
    for (owner, name), value in found.items():
        if owner == "" and (kept := getattr(pool, attribute(name))) != value:
            yield f"{name} is {kept}, block tables hold {value} bytes"
    if allocator.ledger.pool.gpu_used != found["arenas", "bytes"]:
        yield f"gpu_used is {allocator.ledger.pool.gpu_used}, {found['arenas', 'bytes']} bytes of the arenas are in use"
    owners: dict[tuple[int, int], str] = {}
    for segment in allocator.book.segments:
        empty = segment.stage in allocator.ledger.sets(segment.kind, "EMPTY")
        if empty != (segment.slots is None):
            yield f"{segment!r} holds {'no slots' if segment.slots is None else 'slots'}"
        for slot in [] if segment.slots is None else segment.slots.reshape(-1).tolist():
            key = (id(allocator.book.arena(segment.group)), slot)
            if slot == NULL_SLOT or key in owners:
                yield f"{segment!r} holds slot {slot}, which is {owners.get(key, 'the null slot')}'s"
            owners[key] = repr(segment)


def _sums(allocator: HeterogeneousAllocator) -> Iterator[str]:
    ledger = allocator.ledger
    tables, world = ledger.tables, ledger.lanes[0].world
    members: dict[tuple[str, str], list[Any]] = {}
    for entity in ledger.made:
        members.setdefault((entity.cls, entity.kind), []).append(entity)
    for name, var in tables.globals.items():
        if var.sums and getattr(ledger.pool, attribute(name)) != (total := world.recount(var)):
            yield f"{name} is {getattr(ledger.pool, attribute(name))}, adds up to {total}"
    for (cls, kind), owners in members.items():
        for name, var in tables.vars_of(cls, kind).items():
            if var.sums:
                totals = _totals(allocator, var, members)
                for owner in owners:
                    if getattr(owner, attribute(name)) != (total := totals.get(id(owner), 0)):
                        yield f"{owner.name}.{name} is {getattr(owner, attribute(name))}, adds up to {total}"


def _totals(
    allocator: HeterogeneousAllocator, var: Var, members: Mapping[tuple[str, str], Sequence[Any]]
) -> dict[int, int]:
    """A sum by owner, added up in one pass over the entities that it counts."""
    ledger = allocator.ledger
    machine = ledger.lanes[0].world.machine
    totals: dict[int, int] = {}
    for share in var.sums:
        role = next(r for r, c in CLASS_OF.items() if c == share.cls)
        terms = {
            kind: (machine.roles(term, share.cls), machine.predicate(term, share.cls))
            for kind, term in share.terms.items()
        }
        for (cls, _), entities in members.items():
            for entity in entities if cls == share.cls else ():
                by_role = {role: entity, **entity.refs}
                owner = by_role.get(share.via)
                found = terms.get(by_role["self"].kind if "self" in by_role else "")
                if owner is not None and found is not None:
                    amount = int(found[1](ledger.pool, *(by_role[role] for role in found[0])))
                    totals[id(owner)] = totals.get(id(owner), 0) + amount
    return totals


def _invariants(allocator: HeterogeneousAllocator) -> Iterator[str]:
    subjects = _Subjects(allocator)
    for prop in allocator.ledger.tables.forms("invariant"):
        at = _positions(prop)
        functions = [lane.world.machine.predicate(prop.expr, prop.scope) for lane in allocator.ledger.lanes]
        for lane, entities in subjects.of(prop):
            if not functions[lane](allocator.ledger.pool, *(entities[i] for i in at)):
                yield f"{prop.id} does not hold of {', '.join(e.name for e in entities) or 'the pool'}: {prop.text}"


@lru_cache(maxsize=4096)
def _positions(prop: Property) -> tuple[int, ...]:
    """Where the entities that a property names stand among those of its scope."""
    return tuple(ROLES[prop.scope].index(role) for role in Machine.roles(prop.expr, prop.scope))


class _Subjects:
    """The choices of entities for each scope and kinds: (index of the lane, entities)."""

    def __init__(self, allocator: HeterogeneousAllocator) -> None:
        self.ledger = ledger = allocator.ledger
        self.lane_of = {id(s.entity): ledger.lane_of[s.group.name].index for s in allocator.book.segments}
        self.requests = {
            id(record): lane.index
            for request in allocator.requests.running.values()
            for lane, record in zip(ledger.lanes, request.records, strict=True)
        }
        self.found: dict[tuple[str, tuple[tuple[str, str], ...]], list[tuple[int, tuple[Any, ...]]]] = {}
        for entity in ledger.made:
            for scope, roles in ROLES.items():
                if roles and CLASS_OF[roles[-1]] == entity.cls:
                    self.enter(scope, roles, entity)

    def enter(self, scope: str, roles: tuple[str, ...], entity: Any) -> None:
        """One entity, with those that it belongs to."""
        by_role = {roles[-1]: entity, **entity.refs}
        if not all(role in by_role for role in roles):
            return
        if scope in HANDOFFS and entity.stage == self.ledger.tables.stages[scope][0]:
            return
        if entity.cls == "request":
            if id(entity) not in self.requests:
                return
            lane = self.requests[id(entity)]
        else:
            segments = (e for e in by_role.values() if e.cls == "segment" and e.kind != self.ledger.store)
            first = next(segments, None)
            lane = 0 if first is None else self.lane_of[id(first)]
        kinds = tuple((role, by_role[role].kind) for role in roles if CLASS_OF[role] == "segment")
        self.found.setdefault((scope, kinds), []).append((lane, tuple(by_role[role] for role in roles)))

    def of(self, prop: Property) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """The choices for which a property is stated."""
        if not ROLES[prop.scope]:
            yield 0, ()
            return
        for (scope, kinds), members in self.found.items():
            if scope != prop.scope or any(prop.kinds.get(role, kind) != kind for role, kind in kinds):
                continue
            of_kind = prop.kinds.get("self", "") if prop.scope == "request" else ""
            for lane, entities in members:
                if not of_kind or of_kind in self.ledger.lanes[lane].kinds:
                    yield lane, entities


def _files(allocator: HeterogeneousAllocator) -> Iterator[str]:
    for name, medium in allocator.tiers.media.items():
        if not isinstance(medium, Files):
            continue
        mine = {stored.name: stored for stored in allocator.tiers.objects if stored.medium == name}
        there = dict(medium.objects_now())
        busy = [
            e
            for e in allocator.ledger.made
            if e.kind == allocator.ledger.store and e.medium == name and e.stage in _writing(allocator)
        ]
        for stored in mine.values():
            about = there.pop(stored.name, None)
            if about is None:
                if stored.entity.intact:
                    yield f"{stored.location} is gone, the tables say {stored.stage}"
                continue
            for variable in allocator.tiers.survivor.keep:
                kept, value = about[f"kept.{variable}"], getattr(stored.entity, attribute(variable))
                # ``intact`` falls when the medium loses or changes bytes, which nobody writes down there: a new process
                # begins with what was sealed, and the checksum tells it again when it reads.
                if kept != value and variable != "intact":
                    yield f"{stored.location}: {variable} is {kept} in the file, {value} in the tables"
        if there and not busy:
            yield f"files that no object owns: {', '.join(sorted(there))}"
        if not busy and (torn := medium.unfinished()):
            yield f"temporary files that nobody writes: {', '.join(torn)} ({TEMPORARY})"


def _writing(allocator: HeterogeneousAllocator) -> frozenset[str]:
    return allocator.ledger.sets(allocator.ledger.store, "FILLING_PARTS") | allocator.ledger.sets(
        allocator.ledger.store, "EVICTING"
    )
