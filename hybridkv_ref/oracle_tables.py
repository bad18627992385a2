"""The tables that the oracle fires: the shared rows and protocols of the specification, and its own rows about events.

Each cache group of a trace gets a kind of its own, made of ``oracle/block.toml`` under the group's name, which *uses*
the shared rows of ``common.toml`` and the protocols. The rows about index entries, units, ranks and so on stand in
the other files of ``oracle/``. What the proofs say about the shared rows stays where it is: here only rows are built.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.event_map import FILE as EVENTS_FILE
from hybridkv_ref.event_map import load_event_map, row_name
from hybridkv_ref.events import GroupSpec
from hybridkv_ref.loader import build
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import FileSpec, Spec, read_file, read_spec, read_toml
from hybridkv_ref.tables import Tables

FOLDER = "oracle"
TEMPLATE = "oracle/block.toml"
_CLAIMS = ("invariant", "step", "response", "crash", "extend_claim", "sometimes")
# What a block's kind needs to resume is judged by a row of its own (covers), from the run-time form of recovery.toml.
_NO_NEED = {"lo": "0", "hi": "0", "miss": "prefill"}


def kind_name(group: str) -> str:
    """The identifier under which a group's kind stands in the tables."""
    name = re.sub(r"\W", "_", group)
    return name if name.isidentifier() else f"g_{name}"


@lru_cache(maxsize=8)
def _parts(spec: Path) -> tuple[Spec, FileSpec, dict[str, FileSpec]]:
    base = read_spec(spec)
    folder = spec / FOLDER
    found = {}
    for path in sorted(folder.glob("*.toml")):
        label = f"{FOLDER}/{path.name}"
        found[label] = read_file(path, label)
    if TEMPLATE not in found:
        raise InputError(f"{folder}: no {TEMPLATE}")
    template = found.pop(TEMPLATE)
    return base, template, found


@lru_cache(maxsize=8)
def oracle_hash(spec: Path = SPEC_DIR) -> str:
    """SHA-256 of everything by which the oracle judges: rows, recovery entries and the event map, without comments."""
    base, template, found = _parts(spec)
    whole = [base, template, found, read_toml(spec / EVENTS_FILE, EVENTS_FILE)]
    return hashlib.sha256(msgspec.json.encode(whole, order="deterministic")).hexdigest()


def _without_need(file: FileSpec) -> FileSpec:
    """A row that recovery.toml completes judges nothing of it here, so it does not count for the rules either."""
    rows = {n: msgspec.structs.replace(r, rules=[]) if r.resume else r for n, r in file.rows.items()}
    return msgspec.structs.replace(file, rows=rows)


def oracle_tables(groups: Sequence[GroupSpec], spec: Path = SPEC_DIR) -> Tables:
    """The tables for these groups; InputError where two groups have one name or a table is not right."""
    return _oracle_tables(tuple(kind_name(g.name) for g in groups), spec)


@lru_cache(maxsize=32)
def _oracle_tables(kinds: tuple[str, ...], spec: Path) -> Tables:
    if len(set(kinds)) != len(kinds):
        raise InputError("groups: two groups have the same name")
    base, template, own = _parts(spec)
    rows_only: Mapping[str, object] = {name: {} for name in _CLAIMS}
    files = {n: _without_need(msgspec.structs.replace(f, **rows_only)) for n, f in base.files.items() if not f.kind}
    files |= own
    for kind in kinds:
        files[f"{TEMPLATE}:{kind}"] = msgspec.structs.replace(template, kind=kind)
    positions = {n: base.recovery[n] for n in ("title", "positions", "boundary")}
    tables = build(Spec(files, {**positions, "need": dict.fromkeys(kinds, _NO_NEED)}), whole=False)
    known = {row_name(e) for e in tables.events}
    event_map = load_event_map(spec)
    cited = {
        "needs": set(event_map.needs),
        "books": event_map.books,
        **{f"events.{event}.rows": rows for event, rows in event_map.rows.items()},
    }
    for place, rows in cited.items():
        for row in sorted(rows - known):
            raise InputError(f"{EVENTS_FILE}: {place}: no row '{row}' in the tables")
    return tables
