"""One-fault variants of a trace of rows: which change of it the tables refuse, at which row and guard.

A TOML file names the trace and, per fault, one change of one line::

    [faults.free_before_complete]
    doc = "..."
    drop = { row = "compressed_kv.complete", on = ["c"], nth = 2 }
    refused = { row = "compressed_kv.free", on = ["c"], guard = "steps == 0" }

A line is found by its row, by entities that it must name, and by which of those it is (``nth``, from 1). ``drop``
leaves it out, ``repeat`` has it twice, ``move`` has it elsewhere, ``change`` gives some inputs (``in``) other values,
``insert`` has one more line; ``move`` and ``insert`` need ``before`` or ``after``. ``create`` gives an entity other
rigid values, ``constants`` the machine.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.row_traces import Add, Fire, Header, Line, Scalar


class _Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    pass


class Where(_Record, frozen=True):
    """A line: the ``nth`` one that fires ``row`` on entities among which are those of ``on``."""

    row: str
    on: tuple[str, ...] = ()
    nth: Annotated[int, msgspec.Meta(ge=1)] = 1


class Created(_Record, frozen=True):
    """Other rigid values of the entity with this name."""

    name: str
    set: dict[str, Scalar]


class Refused(_Record, frozen=True):
    """The refusal that the change must lead to: row, entities among those that it names, and the guard's text."""

    row: str
    guard: str
    on: tuple[str, ...] = ()


class Fault(_Record, frozen=True, kw_only=True, rename={"inputs": "in"}):
    """One change and its refusal."""

    doc: str
    refused: Refused
    drop: Where | None = None
    repeat: Where | None = None
    move: Where | None = None
    change: Where | None = None
    insert: Fire | None = None
    create: Created | None = None
    constants: dict[str, int] | None = None
    inputs: dict[str, Scalar] = {}
    before: Where | None = None
    after: Where | None = None


class Faults(_Record, frozen=True):
    """The file; ``trace`` is relative to it."""

    title: str
    trace: str
    faults: dict[str, Fault]


CHANGES = ("drop", "repeat", "move", "change", "insert", "create", "constants")


def load_faults(path: Path) -> Faults:
    """Reads a file of faults; InputError with file, place and reason for one that is not of this form."""
    try:
        found = msgspec.toml.decode(path.read_bytes(), type=Faults)
    except OSError as error:
        raise InputError(f"{path}:1: cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        raise InputError(f"{path}:{place.strip('`$.') or 'file'}: {reason}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}:file: not TOML: {error}") from None
    if not found.faults:
        raise InputError(f"{path}:faults: empty")
    for name, fault in found.faults.items():
        _check(fault, f"{path}:faults.{name}")
    return found


def _check(fault: Fault, place: str) -> None:
    changes = [name for name in CHANGES if getattr(fault, name) is not None]
    if len(changes) != 1:
        raise InputError(f"{place}: needs one of {', '.join(CHANGES)}, got {', '.join(changes) or 'none'}")
    places = (fault.before is not None) + (fault.after is not None)
    if places != (changes[0] in ("move", "insert")):
        raise InputError(f"{place}: 'move' and 'insert' need 'before' or 'after', nothing else takes one")
    if bool(fault.inputs) != (changes[0] == "change"):
        raise InputError(f"{place}.in: 'change' needs it, nothing else takes it")


def faulty(fault: Fault, header: Header, lines: Sequence[Line], place: str = "fault") -> tuple[Header, list[Line]]:
    """The trace with the one change; InputError (at ``place``) where a line that it names is not there."""
    out = list(lines)
    if fault.constants is not None:
        header = msgspec.structs.replace(header, constants={**header.constants, **fault.constants})
    if fault.create is not None:
        _create(fault.create, out, place)
    if fault.drop is not None:
        del out[_find(fault.drop, out, place)]
    if fault.repeat is not None:
        at = _find(fault.repeat, out, place)
        out.insert(at, out[at])
    if fault.change is not None:
        at = _find(fault.change, out, place)
        out[at] = _changed(out[at], fault.inputs, place)
    target = fault.before or fault.after
    if target is not None:
        moved = fault.insert if fault.move is None else out.pop(_find(fault.move, out, place))
        if moved is not None:
            out.insert(_find(target, out, place) + (fault.before is None), moved)
    return header, out


def _find(where: Where, lines: Sequence[Line], place: str) -> int:
    """The index of a line."""
    named = set(where.on)
    hits = (n for n, e in enumerate(lines) if isinstance(e, Fire) and e.row == where.row and named <= set(e.on))
    for count, index in enumerate(hits, 1):
        if count == where.nth:
            return index
    on = f" on {', '.join(where.on)}" if where.on else ""
    raise InputError(f"{place}: the trace does not fire {where.row}{on} {where.nth} times")


def _create(created: Created, lines: list[Line], place: str) -> None:
    """Gives an entity other rigid values, in place."""
    for index, line in enumerate(lines):
        if isinstance(line, Add) and line.name == created.name:
            lines[index] = msgspec.structs.replace(line, set={**line.set, **created.set})
            return
    raise InputError(f"{place}: the trace makes no '{created.name}'")


def _changed(line: Line, inputs: dict[str, Scalar], place: str) -> Line:
    if not isinstance(line, Fire) or not inputs.keys() <= line.inputs.keys():
        raise InputError(f"{place}.in: the line has no such inputs")
    return msgspec.structs.replace(line, inputs={**line.inputs, **inputs})
