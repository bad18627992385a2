"""Traces of fired rows: what an engine (or a script) did to its segments, replayed on the tables.

A trace is JSON Lines. Its first line is the header; each further one makes an entity, fires a row or is a crash::

    {"schema": "hybridkv.rows/1", "title": "...", "table_sha256": null, "constants": {"GPU_CAP": 64}}
    {"add": "segment", "name": "c", "kind": "compressed_kv", "set": {"group": 1}}
    {"add": "request", "name": "q", "set": {"length": 9, "kernel": true}}
    {"add": "lease", "name": "c.q", "of": ["c", "q"]}
    {"row": "compressed_kv.admit", "on": ["c", "c.q", "q"], "in": {"at": 0, ...}}
    {"crash": true}

``set`` gives rigid variables, ``of`` the entities that the new one points at, ``on`` those of the row, both in the
tables' order of roles; ``in`` gives every input of the row. Constants that the header leaves out have the tables' small
values. With ``table_sha256`` a trace is one of those tables only.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from hybridkv_ref.compile_py import attribute
from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, Type
from hybridkv_ref.machine import Entity, Machine, Refused, Value, World
from hybridkv_ref.tables import CLASS_OF, LINKS, Tables

Scalar = int | bool | str
Source = str | Path | Iterable[str | bytes]
"""A path, or the lines themselves."""

UNNAMED = "trace"
"""What stands in the place of the file where a trace is given as lines."""


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    pass


class Header(_Record, frozen=True, omit_defaults=False):
    """The first line; ``constants`` are of the tables, by name."""

    schema: Literal["hybridkv.rows/1"]
    title: str
    table_sha256: str | None = None
    constants: dict[str, int] = {}


class Add(_Record, frozen=True):
    """A new entity of class ``add``, in its first stage."""

    add: str
    name: str
    kind: str = ""
    of: tuple[str, ...] = ()
    set: dict[str, Scalar] = {}


class Fire(_Record, frozen=True, rename={"inputs": "in"}):
    """A row that fired, by event id."""

    row: str
    on: tuple[str, ...] = ()
    inputs: dict[str, Scalar] = {}


class Crash(_Record, frozen=True):
    """The process died here; the value is true."""

    crash: bool


Line = Add | Fire | Crash
_FORMS: dict[str, type[Header] | type[Line]] = {"row": Fire, "add": Add, "crash": Crash, "schema": Header}


@dataclass(frozen=True)
class Refusal:
    """The first row that the tables refuse: its line, event, entities, the false guard and the values that it saw."""

    line: int
    event: str
    on: tuple[str, ...]
    guard: str
    values: Mapping[str, Value]
    message: str


@dataclass
class Replay:
    """Where a replay has come: the world and its entities by name, rows fired by event id, crashes, and the refusal.

    A replay ends with the first refusal; the world is then as it was before that row.
    """

    world: World
    entities: dict[str, Entity] = field(default_factory=dict)
    fired: Counter[str] = field(default_factory=Counter)
    crashes: int = 0
    refusal: Refusal | None = None


def read_rows(source: Source) -> tuple[Header, list[tuple[int, Line]]]:
    """The header and each further line with its number.

    InputError with file, line and reason: a file that cannot be read or is empty, a line that is no record of the
    format, a header that is missing or not the first line.
    """
    place, lines = _lines(source)
    records = [(number, _decode(line, f"{place}:{number}")) for number, line in lines]
    if not records:
        raise InputError(f"{place}:1: empty; expected a header")
    header, rest = records[0][1], [(n, r) for n, r in records[1:] if not isinstance(r, Header)]
    if not isinstance(header, Header):
        raise InputError(f"{place}:1: expected a header with schema, title, table_sha256")
    if len(rest) + 1 != len(records):
        second = next(n for n, r in records[1:] if isinstance(r, Header))
        raise InputError(f"{place}:{second}: a second header")
    return header, rest


def encode_rows(header: Header, lines: Iterable[Line]) -> bytes:
    """The trace as a file's contents."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in (header, *lines))


def replay(source: Source, tables: Tables, constants: Mapping[str, int] | None = None) -> Replay:
    """Replays a trace up to its end or its first refusal; ``constants`` go before those of the header.

    InputError where the trace is no trace of these tables: what `read_rows` raises, another table hash, a name that is
    unknown or taken, entities or inputs that the row does not take.
    """
    header, lines = read_rows(source)
    player = Player(header, tables, constants, _place(source))
    for number, record in lines:
        if player.play(number, record) is not None:
            break
    return player.replay


def leftovers(world: World) -> list[str]:
    """What is not at rest, one phrase each: counts that are not 0, entities that are not in their first stage."""
    tables, found = world.machine.tables, []
    for name, var in tables.globals.items():
        if var.sums and getattr(world.pool, attribute(name)):
            found.append(f"{name} is {getattr(world.pool, attribute(name))}")
    for entity in world.entities:
        for name, var in tables.vars_of(entity.cls, entity.kind).items():
            value = getattr(entity, attribute(name))
            if (var.sums and value) or (name == "stage" and value != var.init):
                found.append(f"{entity.name}.{name} is {value}")
    return found


class Player:
    """A replay in progress, line by line. Arguments as for `replay`; ``place`` is the file, for messages."""

    def __init__(
        self, header: Header, tables: Tables, constants: Mapping[str, int] | None = None, place: str = UNNAMED
    ) -> None:
        own = {**header.constants, **(constants or {})}
        for name in own.keys() - tables.constants.keys():
            raise InputError(f"{place}:1: no constant '{name}' in the tables")
        if header.table_sha256 not in (None, tables.sha256):
            raise InputError(f"{place}:1: is of other tables: table_sha256 {header.table_sha256}, not {tables.sha256}")
        self.tables, self.place = tables, place
        self.replay = Replay(Machine(tables, own).world())

    def play(self, number: int, record: Line) -> Refusal | None:
        """Applies one line; gives the refusal if the tables refuse its row, and then has changed nothing."""
        where = f"{self.place}:{number}"
        match record:
            case Add():
                self.add(record, where)
            case Crash():
                self.replay.world.crash()
                self.replay.crashes += 1
            case Fire():
                return self.fire(record, number, where)
        return None

    def add(self, record: Add, where: str) -> None:
        """Makes an entity."""
        if record.name in self.replay.entities:
            raise InputError(f"{where}: '{record.name}' is taken")
        if record.add not in (*self.tables.classes, "segment"):
            raise InputError(f"{where}: no class '{record.add}' of entities")
        if (record.add == "segment") != (record.kind != "") or (record.kind and record.kind not in self.tables.kinds):
            raise InputError(f"{where}: a segment has a kind of the tables, nothing else has one; got '{record.kind}'")
        roles = LINKS.get(record.add, ())
        owners = dict(zip(roles, self.entities(record.of, where), strict=False))
        wrong = [r for r, e in owners.items() if e.cls != CLASS_OF[r]]
        if len(record.of) != len(roles) or wrong:
            asked = ", ".join(CLASS_OF[r] for r in roles) or "nothing"
            raise InputError(f"{where}: '{record.name}' is of {asked}, not of {', '.join(record.of) or 'nothing'}")
        variables = self.tables.vars_of(record.add, record.kind)
        for name, value in record.set.items():
            if name not in variables or not variables[name].rigid:
                raise InputError(f"{where}: a {record.kind or record.add} has no rigid variable '{name}'")
            check_value(value, variables[name].type, f"{where}: {name}")
        try:
            entity = self.replay.world.add(record.add, record.kind, owners, **record.set)
        except ValueError as error:
            raise InputError(f"{where}: {error}") from None
        entity.name = record.name
        self.replay.entities[record.name] = entity

    def fire(self, record: Fire, number: int, where: str) -> Refusal | None:
        """Fires a row."""
        world = self.replay.world
        if record.row not in world.machine.events:
            raise InputError(f"{where}: no row '{record.row}' in the tables")
        event = world.machine.events[record.row].event
        for name, value in record.inputs.items():
            if name in event.inputs:
                check_value(value, event.inputs[name], f"{where}: {name}")
        try:
            world.fire(record.row, *self.entities(record.on, where), **record.inputs)
        except TypeError as error:
            raise InputError(f"{where}: {error}") from None
        except Refused as error:
            guard, values = error.guard.text, error.values
            self.replay.refusal = Refusal(number, event.id, record.on, guard, values, f"{where}: {error}")
            return self.replay.refusal
        self.replay.fired[event.id] += 1
        return None

    def entities(self, names: Iterable[str], where: str) -> list[Entity]:
        """The entities with these names."""
        found: list[Entity] = []
        for name in names:
            if name not in self.replay.entities:
                raise InputError(f"{where}: no entity '{name}'")
            found.append(self.replay.entities[name])
        return found


def check_value(value: Scalar, kind: Type, where: str) -> None:
    """Refuses a value that is not of this type (InputError)."""
    if kind.name == "enum":
        fits = isinstance(value, str) and value in kind.members
    else:
        fits = isinstance(value, bool) if kind == BOOL else type(value) is int
    if not fits:
        raise InputError(f"{where}: {value!r} is no {kind}")


def _place(source: Source) -> str:
    return str(source) if isinstance(source, str | Path) else UNNAMED


def _lines(source: Source) -> tuple[str, Iterator[tuple[int, str | bytes]]]:
    """The name of a source for messages, and its lines with their numbers."""
    place = _place(source)
    if not isinstance(source, str | Path):
        return place, enumerate(source, 1)
    try:
        data = Path(source).read_bytes()
    except OSError as error:
        raise InputError(f"{place}:1: cannot be read: {error.strerror}") from None
    return place, enumerate(data.splitlines(), 1)


def _decode(line: str | bytes, where: str) -> Header | Line:
    """One line as a record of the form that its keys say."""
    try:
        keys = msgspec.json.decode(line, type=dict[str, Any])
        form = next((form for key, form in _FORMS.items() if key in keys), None)
        if form is None:
            raise InputError(f"{where}: none of the keys {', '.join(_FORMS)}")
        record = msgspec.json.decode(line, type=form)
    except UnicodeDecodeError:
        raise InputError(f"{where}: not UTF-8 text") from None
    except msgspec.ValidationError as error:
        raise InputError(f"{where}: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise InputError(f"{where}: not JSON: {error}") from None
    if isinstance(record, Crash) and not record.crash:
        raise InputError(f"{where}: crash: expected true")
    return record
