"""The machine: the tables, running.

A ``Machine`` is the tables compiled for one choice of constants; a ``World`` is one state: globals and entities.
``fire`` applies one event atomically; a refused one changes nothing and says which guard was false, with the values
it saw. Everything here is generic: there is no kind, row or rule by name.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hybridkv_ref.compile_py import Namer, attribute, namer, predicate_source, python, role_name
from hybridkv_ref.expr import Expr, Ref, refs
from hybridkv_ref.tables import CLASS_OF, HANDOFFS, ROLES, Effect, Event, Guard, Survivor, Tables, Var

Value = int | str


class Refused(Exception):
    """A row's guard was false.  ``event``, ``guard`` and ``values`` (name as written -> value) say which and why."""

    def __init__(self, event: Event, guard: Guard, values: Mapping[str, Value]) -> None:
        self.event, self.guard, self.values = event, guard, dict(values)
        shown = ", ".join(f"{n}={v}" for n, v in self.values.items())
        rules = f" ({', '.join(event.rules)})" if event.rules else ""
        super().__init__(f"{event.id}: refused by '{guard.text}' with {shown}{rules}")


def event_source(event: Event, function: str, constants: Mapping[str, int], effects: bool = True) -> str:
    """One event as a function ``f(G, <roles...>, <inputs...>) -> int``.

    It returns the index of the first false guard, or -1 after all effects were assigned.  Guards come before effects,
    so a refused row has changed nothing; every right-hand side reads the state before the step.
    """
    arguments = ["G", *map(role_name, event.roles), *(f"in_{i}" for i in event.inputs)]
    return "\n".join([f"def {function}({', '.join(arguments)}):", *event_lines(event, namer(constants), effects)])


def event_lines(event: Event, name: Namer, effects: bool = True) -> list[str]:
    """The lines of an event's function: its guards, its effects if they are wanted, and -1."""
    lines = [f"    if not {python(g.expr, name)}: return {index}" for index, g in enumerate(event.guards)]
    return [*lines, *(_assignments(event.effects, name) if effects else ()), "    return -1"]


def named_values(expr: Expr, look: Callable[[Ref], Value]) -> dict[str, Value]:
    """What ``look`` finds for the variables of an expression, by the name a reader knows."""
    bare = ("self", "global", "const", "input")
    found = sorted(refs(expr), key=lambda r: (r.role, r.name))
    return {(r.name if r.role in bare else f"{r.role}.{r.name}"): look(r) for r in found}


def _assignments(effects: Sequence[Effect], name: Namer) -> list[str]:
    """The effects as if all at once: what a later right-hand side still reads is stored after the last of them.

    Two roles may be one entity, so what counts is the variable, of whichever role.
    """
    now, then = list[str](), list[str]()
    read: set[str] = set()
    for index, effect in reversed(list(enumerate(effects))):
        target, value = name(effect.target), python(effect.expr, name)
        if effect.target.name in read:
            then.append(f"    {target} = v{index}")
            target = f"v{index}"
        now.append(f"    {target} = {value}")
        read |= {ref.name for ref in refs(effect.expr)}
    return [*reversed(now), *reversed(then)]


class Entity:
    """One segment, lease, request, copy or graph.  Variables are attributes; ``refs`` points at its owners by role."""

    __slots__ = ("cls", "kind", "name", "refs")
    cls: str
    kind: str
    name: str
    refs: dict[str, "Entity"]

    def __repr__(self) -> str:
        return self.name

    if TYPE_CHECKING:
        # For the type checker alone: a class that has it when it runs reads every attribute several times slower.
        def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Compiled:
    """An event with its functions.

    ``call(G, *entities, *inputs)`` gives the false guard's index, or -1 when fired; ``test`` does so without firing.
    """

    event: Event
    call: Callable[..., int]
    test: Callable[..., int]


def _record(name: str, variables: Mapping[str, Var], base: type) -> type:
    slots = tuple(attribute(v) for v in variables)
    return type(name, (base,), {"__slots__": slots, "__module__": __name__})


class Globals:
    """The pool variables of a world, as attributes."""

    __slots__ = ()


class Machine:
    """The tables compiled for one choice of constants (default: the small ones of the tables)."""

    def __init__(self, tables: Tables, constants: Mapping[str, int] | None = None) -> None:
        self.tables = tables
        self.constants = {n: c.small for n, c in tables.constants.items()} | dict(constants or {})
        self.types: dict[tuple[str, str], type] = {
            ("segment", k): _record(k, kind.vars, Entity) for k, kind in tables.kinds.items()
        }
        self.types |= {(c, ""): _record(c, v, Entity) for c, v in tables.classes.items()}
        self.globals_type = _record("Pool", tables.globals, Globals)
        source = [event_source(e, f"f{i}", self.constants) for i, e in enumerate(tables.events)]
        source += [event_source(e, f"t{i}", self.constants, effects=False) for i, e in enumerate(tables.events)]
        space: dict[str, Any] = {}
        exec(compile("\n".join(source), "<tables>", "exec"), space)
        self.predicates: dict[int, tuple[Expr, Callable[..., bool]]] = {}
        self.survivors: dict[str, list[tuple[Survivor, list[Callable[..., bool]]]]] = {}
        for survivor in tables.survivors:
            guards = [self.predicate(g.expr, "segment") for g in survivor.guards]
            self.survivors.setdefault(survivor.kind, []).append((survivor, guards))
        self.events = {e.id: Compiled(e, space[f"f{i}"], space[f"t{i}"]) for i, e in enumerate(tables.events)}

    @staticmethod
    def roles(expr: Expr, scope: str) -> tuple[str, ...]:
        """The entities that ``predicate`` takes: those of the scope; of a handoff's, only what the expression names."""
        used = {r.role for r in refs(expr)}
        return tuple(r for r in ROLES[scope] if r in used or scope not in HANDOFFS)

    def predicate(self, expr: Expr, scope: str) -> Callable[..., bool]:
        """A one-state expression over a scope's roles as a function of (G, *entities), compiled once."""
        known = self.predicates.get(id(expr))
        if known is not None:
            return known[1]
        roles = self.roles(expr, scope)
        space: dict[str, Any] = {}
        exec(predicate_source(expr, "p", roles, self.constants), space)
        function: Callable[..., bool] = space["p"]
        self.predicates[id(expr)] = (expr, function)
        return function

    def world(self) -> "World":
        """A fresh world: every global at its first value, no entities."""
        return World(self)


class World:
    """One state of the machine: ``pool`` holds the globals, ``entities`` everything else in order of creation."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pool: Any = machine.globals_type()
        for name, var in machine.tables.globals.items():
            setattr(self.pool, attribute(name), var.init)
        self.entities: list[Entity] = []

    def add(self, cls: str, kind: str = "", refs: Mapping[str, Entity] | None = None, **rigid: Value) -> Any:
        """A new entity in its first stage; ``rigid`` sets rigid variables, ``refs`` its owners by role."""
        tables = self.machine.tables
        entity: Any = self.machine.types[cls, kind if cls == "segment" else ""]()
        entity.cls, entity.kind, entity.refs = cls, kind, dict(refs or {})
        entity.name = f"{kind or cls}#{sum(1 for e in self.entities if e.cls == cls and e.kind == kind)}"
        variables = tables.vars_of(cls, kind)
        for name, var in variables.items():
            setattr(entity, attribute(name), var.init)
        for name, value in rigid.items():
            if name not in variables or not variables[name].rigid:
                raise KeyError(f"{entity.name}: '{name}' is not a rigid variable")
            least = variables[name].at_least
            if least is not None and int(value) < least:
                raise ValueError(f"{entity.name}: {name}={value} is below {least}")
            setattr(entity, attribute(name), value)
        self.entities.append(entity)
        return entity

    def fire(self, event_id: str, *entities: Entity, **inputs: Value) -> None:
        """Fires one event on these entities (in the order of its roles).

        Raises Refused and changes nothing if illegal.
        """
        compiled = self.machine.events[event_id]
        self.check_arguments(compiled.event, entities, inputs)
        self.take(compiled, entities, inputs)

    def take(self, compiled: Compiled, entities: tuple[Entity, ...], inputs: Mapping[str, Value]) -> None:
        """As ``fire``, for a caller who knows that these are the event's entities and inputs."""
        index = compiled.call(self.pool, *entities, *[inputs[name] for name in compiled.event.inputs])
        if index >= 0:
            guard = compiled.event.guards[index]
            raise Refused(compiled.event, guard, self.values(guard.expr, compiled.event, entities, inputs))

    def allows(self, event_id: str, *entities: Entity, **inputs: Value) -> bool:
        """Whether ``fire`` with these arguments would be legal now; changes nothing."""
        compiled = self.machine.events[event_id]
        return compiled.test(self.pool, *entities, *[inputs[name] for name in compiled.event.inputs]) < 0

    def crash(self) -> None:
        """The process dies: entities keep what the tables say survives, everything volatile starts over."""
        for entity in self.entities:
            self.survive(entity)
        for name, var in self.machine.tables.globals.items():
            if not var.durable and not var.sums:
                setattr(self.pool, attribute(name), var.init)
        self.recount_all()

    def survive(self, entity: Entity) -> bool:
        """A crash of one entity: it keeps what the tables say survives and starts over; whether anything survived."""
        variables = self.machine.tables.vars_of(entity.cls, entity.kind)
        fresh = {n: v.init for n, v in variables.items() if not v.rigid}
        survived = False
        for survivor, guards in self.machine.survivors.get(entity.kind, ()) if entity.cls == "segment" else ():
            if entity.stage in survivor.stages and all(g(self.pool, entity) for g in guards):
                fresh |= {n: getattr(entity, attribute(n)) for n in survivor.keep}
                fresh["stage"] = survivor.to
                survived = True
                break
        for name, value in fresh.items():
            setattr(entity, attribute(name), value)
        return survived

    def recount_all(self) -> None:
        """Every volatile sum of the pool, added up over the entities as they are."""
        for name, var in self.machine.tables.globals.items():
            if not var.durable and var.sums:
                setattr(self.pool, attribute(name), self.recount(var))

    def recount(self, var: Var, owner: Entity | None = None) -> int:
        """A sum, added up over the entities that point at its owner; a global's over all."""
        total = 0
        for share in var.sums:
            role = next(r for r, c in CLASS_OF.items() if c == share.cls)
            for entity in self.entities:
                if entity.cls != share.cls or (owner is not None and entity.refs.get(share.via) is not owner):
                    continue
                by_role = {role: entity, **entity.refs}
                kind = by_role["self"].kind if "self" in by_role else ""
                found = share.terms.get(kind)
                if found is not None:
                    roles = self.machine.roles(found, share.cls)
                    total += int(self.machine.predicate(found, share.cls)(self.pool, *(by_role[r] for r in roles)))
        return total

    def check_arguments(self, event: Event, entities: tuple[Entity, ...], inputs: Mapping[str, Value]) -> None:
        """Refuses a call that is no firing of this event at all: wrong entities, kinds or inputs (TypeError)."""
        if len(entities) != len(event.roles) or set(inputs) != set(event.inputs):
            raise TypeError(f"{event.id}: takes entities {event.roles} and inputs {tuple(event.inputs)}")
        by_role = dict(zip(event.roles, entities, strict=True))
        for role, entity in by_role.items():
            if entity.cls != CLASS_OF[role] or (role in event.kinds and entity.kind != event.kinds[role]):
                raise TypeError(f"{event.id}: {entity.name} cannot be '{role}'")
            for owner, target in entity.refs.items():
                if owner in by_role and by_role[owner] is not target:
                    raise TypeError(f"{event.id}: {entity.name} belongs to {target.name}, not {by_role[owner].name}")

    def values(
        self, expr: Expr, event: Event, entities: tuple[Entity, ...], inputs: Mapping[str, Value]
    ) -> dict[str, Value]:
        """What the variables of an expression were, by the name a reader knows."""
        by_role = dict(zip(event.roles, entities, strict=True))

        def look(ref: Ref) -> Value:
            if ref.role == "const":
                return self.machine.constants[ref.name]
            if ref.role == "input":
                return inputs[ref.name]
            owner = self.pool if ref.role == "global" else by_role[ref.role]
            value: Value = getattr(owner, attribute(ref.name))
            return value

        return named_values(expr, look)
