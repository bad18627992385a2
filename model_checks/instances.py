"""The finite instances: which entities, constants and input values a search runs over (data: ``spec/instances.toml``).

An instance is written once and may be stated for every kind with a capability (``has``; ``*`` stands for the kind),
as the tables' own properties are, so a new kind is explored without a line here.  A search may start after a *script*
of steps, leave rows out (``off``, or no values for an input) or end at a depth; what was restricted is said wherever
its result is shown.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import Type
from hybridkv_ref.spec_files import Record, read_toml
from hybridkv_ref.tables import CLASS_OF, LINKS, Event, Tables

FILE = "instances.toml"
Value = int | str


class OnlySpec(Record, frozen=True):
    """What is different for one kind."""

    inputs: dict[str, list[int | bool | str]] = {}
    constants: dict[str, int] = {}


class InstanceSpec(Record, frozen=True):
    """One entry of the file; the words are explained there."""

    doc: str
    has: str = ""
    segments: dict[str, dict[str, int | bool | str]] = {}
    requests: dict[str, dict[str, int | bool | str]] = {}
    transfers: dict[str, dict[str, int | bool | str]] = {}
    leases: list[str] = []
    ranks: dict[str, dict[str, int | bool | str]] = {}
    copies: list[str] = []
    shipments: dict[str, dict[str, int | bool | str]] = {}
    graphs: list[str] = []
    constants: dict[str, int] = {}
    inputs: dict[str, list[int | bool | str]] = {}
    budgets: dict[str, int] = {}
    off: list[str] = []
    script: list[str] = []
    depth: int = 0
    exact: bool = False
    only: dict[str, OnlySpec] = {}


class PinSpec(Record, frozen=True):
    """The size that a search had when it was last looked at."""

    states: int
    edges: int


class InstancesSpec(Record, frozen=True):
    """The file; ``inputs`` are the values of an instance that gives none."""

    title: str
    instance: dict[str, InstanceSpec]
    inputs: dict[str, list[int | bool | str]] = {}
    pinned: dict[str, PinSpec] = {}


@dataclass(frozen=True)
class Entity:
    """One entity: ``owners`` maps the roles that it points at to entities' names, ``rigid`` holds its fixed values."""

    name: str
    cls: str
    kind: str
    owners: Mapping[str, str]
    rigid: Mapping[str, Value]


@dataclass(frozen=True)
class Step:
    """One step of a script: an event, the entities in the order of its roles, the inputs in the event's order."""

    event: str
    entities: tuple[str, ...]
    inputs: tuple[Value, ...]


@dataclass(frozen=True)
class Instance:
    """A finite instance, resolved against the tables; ``inputs`` maps (event id, input) to the values tried."""

    name: str
    doc: str
    entities: tuple[Entity, ...]
    constants: Mapping[str, int]
    inputs: Mapping[tuple[str, str], tuple[Value, ...]]
    budgets: Mapping[str, int]
    off: frozenset[str]
    script: tuple[Step, ...]
    depth: int
    exact: bool

    @property
    def restriction(self) -> str:
        """What the search leaves out, in words; empty when it is exhaustive."""
        parts = [f"starts after {len(self.script)} steps"] if self.script else []
        parts += [f"ends at depth {self.depth}"] if self.depth else []
        parts += [f"without {', '.join(sorted(self.off))}"] if self.off else []
        return "bounded: " + "; ".join(parts) if parts else ""

    def leaves_out(self, row: str, entities: tuple[Entity, ...]) -> bool:
        """Whether a row is switched off, for all or for one of these entities (``off`` entry ``row entity``)."""
        return row in self.off or any(f"{row} {e.name}" in self.off for e in entities)

    def choices(self, event: Event) -> Iterator[tuple[Value, ...]]:
        """Every tuple of values tried for the inputs of an event."""
        yield from product(*(self.inputs[event.id, name] for name in event.inputs))

    def bindings(self, event: Event) -> Iterator[tuple[Entity, ...]]:
        """Every tuple of entities that fits the roles of an event."""
        yield from fitting(self.entities, event.roles, event.kinds)


def fitting(
    entities: tuple[Entity, ...], roles: tuple[str, ...], kinds: Mapping[str, str]
) -> Iterator[tuple[Entity, ...]]:
    """The tuples of distinct entities for these roles and kinds in which every owner is the entity's own."""

    def extend(chosen: dict[str, Entity], left: tuple[str, ...]) -> Iterator[tuple[Entity, ...]]:
        if not left:
            yield tuple(chosen[r] for r in roles)
            return
        role, taken = left[0], {e.name for e in chosen.values()}
        owner = next((e.owners[role] for e in chosen.values() if role in e.owners), None)
        for entity in entities:
            fits = entity.cls == CLASS_OF[role] and entity.kind == kinds.get(role, entity.kind)
            if fits and entity.name not in taken and owner in (None, entity.name):
                yield from extend({**chosen, role: entity}, left[1:])

    # Owned classes first: a lease or a copy leaves its owners no choice.
    yield from extend({}, tuple(sorted(roles, key=lambda r: r not in LINKS)))


class _Reader:
    def __init__(self, tables: Tables, label: str, inputs: Mapping[str, list[int | bool | str]]) -> None:
        self.tables, self.label, self.inputs = tables, label, inputs

    def resolve(self, name: str, spec: InstanceSpec) -> Iterator[Instance]:
        """The instance for each kind it is stated for."""
        kinds = [k for k, kind in self.tables.kinds.items() if spec.has in kind.capabilities] if spec.has else [""]
        for kind in kinds:
            where = f"{self.label}: instance.{name}"
            only = spec.only.get(kind, OnlySpec())
            entities = tuple(self.entities(spec, kind, where))
            by_name = {e.name: e for e in entities}
            if len(by_name) != len(entities):
                raise InputError(f"{where}: two entities have the same name")
            constants = {n: c.small for n, c in self.tables.constants.items()}
            for key, value in {**spec.constants, **only.constants}.items():
                constants[self.known(key.replace("*", kind), constants, f"{where}.constants", "constant")] = value
            rows = {e.row for e in self.tables.events}
            for text in (*spec.off, *spec.budgets):
                row, *token = text.split(maxsplit=1)
                self.known(row, rows, where, "row")
                if token:
                    self.known(token[0], by_name, where, "entity")
            domains = {**self.inputs, **spec.inputs, **only.inputs}
            bound = [e for e in self.tables.events if any(True for _ in fitting(entities, e.roles, e.kinds))]
            inputs = {(e.id, i): self.domain(e, i, t, domains, where) for e in bound for i, t in e.inputs.items()}
            untried = {e.row for e in bound for i in e.inputs if not inputs[e.id, i]}
            script = enumerate(spec.script)
            yield Instance(
                f"{name}<{kind}>" if kind else name, spec.doc, entities, constants, inputs,
                dict(spec.budgets), frozenset(spec.off) | untried,
                tuple(self.step(s.replace("*", kind), by_name, f"{where}.script[{n}]") for n, s in script),
                spec.depth, spec.exact,
            )  # fmt: skip

    def entities(self, spec: InstanceSpec, kind: str, where: str) -> Iterator[Entity]:
        """The entities of one entry, owners first."""
        kinds: dict[str, str] = {}
        for name, values in spec.segments.items():
            kinds[name] = str(values.get("kind", "")).replace("*", kind)
            self.known(kinds[name], self.tables.kinds, f"{where}.segments.{name}.kind", "kind")
            rigid = {k: v for k, v in values.items() if k != "kind"}
            yield self.entity(name, "segment", kinds[name], {}, rigid, f"{where}.segments.{name}")
        for name, values in spec.requests.items():
            fixed = {k.replace("*", kind): v for k, v in values.items()}
            yield self.entity(name, "request", "", {}, fixed, f"{where}.requests.{name}")
        for name, values in spec.transfers.items():
            yield self.entity(name, "transfer", "", {}, values, f"{where}.transfers.{name}")
        owners = {"segment": spec.segments, "request": spec.requests, "transfer": spec.transfers}
        links: tuple[tuple[str, Iterable[str]], ...]
        links = (("lease", spec.leases), ("rank", spec.ranks), ("copy", spec.copies), ("shipment", spec.shipments))
        for cls, names in links:
            for name in names:
                # a.r is a lease, v.r a vote of rank v, a>b a copy, a>b@x a shipment.
                ends = re.split(r"[.>@]", name)[-len(LINKS[cls]) :]
                if len(ends) != len(LINKS[cls]) or any(
                    e not in owners[CLASS_OF[r]] for e, r in zip(ends, LINKS[cls], strict=True)
                ):
                    raise InputError(f"{where}: '{name}' is no {cls} between entities of this instance")
                rigid = {"shipment": spec.shipments, "rank": spec.ranks}.get(cls, {}).get(name, {})
                place = f"{where}.{cls}s.{name}" if rigid else where
                yield self.entity(name, cls, "", dict(zip(LINKS[cls], ends, strict=True)), rigid, place)
        for name in spec.graphs:
            yield self.entity(name, "graph", "", {}, {}, where)

    def entity(
        self, name: str, cls: str, kind: str, owners: dict[str, str], rigid: Mapping[str, int | bool | str], where: str
    ) -> Entity:
        """One entity with its fixed values checked."""
        variables = self.tables.vars_of(cls, kind)
        values: dict[str, Value] = {n: v.init for n, v in variables.items() if v.rigid}
        for key, value in rigid.items():
            if not key.endswith("?") or key[:-1] in values:
                name_of = self.known(key.removesuffix("?"), values, where, "rigid variable")
                values[name_of] = self.value(value, variables[name_of].type, where)
        return Entity(name, cls, kind, owners, values)

    def domain(
        self, event: Event, name: str, kind: Type, domains: Mapping[str, list[int | bool | str]], where: str
    ) -> tuple[Value, ...]:
        """The values tried for one input of one event, none where the file names none."""
        for key in (f"{event.row}.{name}", name):
            if key in domains:
                return tuple(self.value(v, kind, f"{where}.inputs.{key}") for v in domains[key])
        if kind.name in ("bool", "enum"):
            return kind.members or (0, 1)
        return ()

    def step(self, text: str, by_name: Mapping[str, Entity], where: str) -> Step:
        """``event entity name=value ...``: the entity is the one that points at the others, or ``a>b``."""
        words = text.split()
        event = next((e for e in self.tables.events if words and e.id == words[0]), None)
        if event is None:
            raise InputError(f"{where}: '{text}' names no event")
        token = words[1] if len(words) > 1 and "=" not in words[1] else ""
        match by_name.get(token):
            case Entity(owners=owners):
                chosen = [owners.get(r, token) for r in event.roles]
            case _:
                chosen = token.split(">") if token else []
        fits = fitting(tuple(by_name.values()), event.roles, event.kinds)
        if tuple(chosen) not in {tuple(e.name for e in entities) for entities in fits}:
            raise InputError(f"{where}: '{token}' does not fit {event.id}")
        given = dict(w.split("=", 1) for w in words if "=" in w)
        if set(given) != set(event.inputs):
            raise InputError(f"{where}: {event.id} takes the inputs {', '.join(event.inputs) or 'none'}")
        inputs = tuple(self.value(given[n], t, where) for n, t in event.inputs.items())
        return Step(event.id, tuple(chosen), inputs)

    @staticmethod
    def value(value: int | bool | str, kind: Type, where: str) -> Value:
        """A value of the type; whole numbers and true/false may be written as text in a script."""
        text = str(value)
        if kind.name == "enum" and text in kind.members:
            return text
        if kind.name == "bool" and text.lower() in ("true", "false"):
            return int(text.lower() == "true")
        if kind.number and not isinstance(value, bool) and text.lstrip("-").isdigit():
            return int(text)
        raise InputError(f"{where}: {value!r} is not {kind}")

    @staticmethod
    def known(name: str, names: object, where: str, what: str) -> str:
        """The name, if it is one."""
        if not hasattr(names, "__contains__") or name not in names:
            raise InputError(f"{where}: '{name}' is no {what}")
        return name


def read_instances(tables: Tables, path: Path) -> tuple[list[Instance], dict[str, PinSpec]]:
    """The instances of a file and their pinned sizes; InputError names file, place and reason."""
    try:
        spec = msgspec.convert(read_toml(path, path.name), InstancesSpec)
    except msgspec.ValidationError as error:
        raise InputError(f"{path.name}: {error}") from None
    reader = _Reader(tables, path.name, spec.inputs)
    return [i for name, entry in spec.instance.items() for i in reader.resolve(name, entry)], spec.pinned
