"""``spec/events.toml``.

The level of each event, the rows that it stands for, hidden steps, and what an engine may claim.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_toml
from hybridkv_ref.tables import Event, Guard

FILE = "events.toml"
LEVELS = ("L0", "L1", "L2", "L3")


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["L0", "L1", "L2", "L3"]
    doc: str
    rows: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()


class _Hidden(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    doc: str
    rows: tuple[str, ...]


class Capability(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an engine may claim, and the rules that its trace then has to exercise."""

    doc: str
    rules: tuple[str, ...]


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    needs: tuple[str, ...]
    books: frozenset[str]
    events: dict[str, _Entry]
    hidden: dict[str, _Hidden]
    capabilities: dict[str, Capability]
    blame: dict[str, dict[str, tuple[str, ...]]] = {}


@dataclass(frozen=True)
class EventMap:
    """The file, read.

    ``rows``: per event the rows it may fire, hidden ones included; ``hidden``: those of hidden steps only; ``level``:
    per event; ``capabilities``: by name; ``blame``: per row and guard, the rules that it breaks where it is false;
    ``needs``: rows that stand for the rules of a group's recovery entry too; ``books``: rows that stand for no event.
    """

    rows: Mapping[str, frozenset[str]]
    hidden: Mapping[str, frozenset[str]]
    level: Mapping[str, str]
    capabilities: Mapping[str, Capability]
    blame: Mapping[str, Mapping[str, tuple[str, ...]]]
    needs: tuple[str, ...]
    books: frozenset[str]

    def broken(self, event: Event, guard: Guard) -> tuple[str, ...]:
        """The rules that a false guard of a row breaks: those that ``blame`` names, else all of the row."""
        return self.blame.get(row_name(event), {}).get(guard_name(guard), event.rules)

    def row_level(self) -> dict[str, str]:
        """Per row, the lowest level at which some event fires it."""
        found: dict[str, str] = {}
        for event, rows in self.rows.items():
            for row in rows:
                found[row] = min(found.get(row, LEVELS[-1]), self.level[event])
        return found


def row_name(event: Event) -> str:
    """The name of a row without its kinds."""
    return event.id.split("[")[0] if "[" in event.id else event.row


def guard_name(guard: Guard) -> str:
    """A guard as ``blame`` names it: its text, or row and column where it comes from a column of stages."""
    place = guard.place.rpartition(": ")[2]
    return place.removeprefix("rows.").removeprefix("handoffs.") if place.endswith("from") else guard.text


@lru_cache(maxsize=8)
def load_event_map(spec: Path = SPEC_DIR) -> EventMap:
    """Reads the file; one-line InputError for what it does not allow."""
    try:
        read = msgspec.convert(read_toml(spec / FILE, FILE), _File)
    except msgspec.ValidationError as error:
        raise InputError(f"{FILE}: {error}") from None
    rows, hidden = {}, {}
    for name, entry in read.events.items():
        unknown = [h for h in entry.hidden if h not in read.hidden]
        if unknown:
            raise InputError(f"{FILE}: events.{name}.hidden: no hidden step '{unknown[0]}'")
        hidden[name] = frozenset(row for h in entry.hidden for row in read.hidden[h].rows)
        rows[name] = frozenset(entry.rows) | hidden[name]
    level = {n: e.level for n, e in read.events.items()}
    return EventMap(rows, hidden, level, read.capabilities, read.blame, read.needs, read.books)
