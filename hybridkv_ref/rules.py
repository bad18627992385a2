"""The rules of the system, as ``spec/rules.toml`` states them: what a stable ID means and what checks it.

Tables, reports and verdicts cite a rule by its ID only; its sentence stands once, in that file.
"""

import re
from pathlib import Path
from typing import Literal

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_toml

AREAS = (
    *("L1", "L2", "L3", "L4", "S1", "S2", "S3", "S4", "REF", "LIVE"),
    *("KEY", "POS", "UNIT", "ERR", "MISS", "ACC", "ALIAS", "RANK", "CLOSED", "OBS"),
    *("CKV", "TAIL", "SWA", "IDX", "DISK", "REC"),
)
"""The middle part of an ID, in the order of the file: what all kinds share, then one area per kind."""

CHECKS = (
    *("invariant", "step", "liveness", "witness", "composition", "recovery", "interleaving", "separation"),
    *("allocator", "oracle"),
)
"""What ``checked_by`` may name, besides ``test:<pytest file>``; spec/README.md says what each one does."""

_LABEL = "rules.toml"
_ID = re.compile(rf"HKV-(?:{'|'.join(AREAS)})-(?!000)\d{{3}}", re.ASCII)
_TEST = re.compile(r"test:test_\w+\.py", re.ASCII)


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a rule comes from: sections of the articles, of the design, of the facts and of the prototype's notes."""

    article: tuple[str, ...] = ()
    design: str = ""
    facts: str = ""
    tables: str = ""


class _Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    level: Literal["MUST", "SHOULD", "INFO"]
    statement: str
    source: Source
    checked_by: tuple[str, ...]
    note: str = ""


class Rule(msgspec.Struct, frozen=True):
    """One rule: a single testable sentence under a stable ID."""

    id: str
    level: Literal["MUST", "SHOULD", "INFO"]
    statement: str
    source: Source
    checked_by: tuple[str, ...]
    note: str


def load_rules(spec_dir: Path = SPEC_DIR) -> dict[str, Rule]:
    """All rules by ID, in the order of the file; a one-line InputError names the first entry that is not one."""
    data = read_toml(spec_dir / _LABEL, _LABEL)
    for section in data:
        if section not in ("rules", "articles"):
            raise InputError(f"{_LABEL}:{section}: unknown section")
    entries = data.get("rules")
    if not isinstance(entries, dict) or not entries:
        raise InputError(f"{_LABEL}:rules: no rules")
    return {name: _rule(name, entry) for name, entry in entries.items()}


def _rule(name: str, entry: object) -> Rule:
    place = f"{_LABEL}:rules.{name}"
    if not _ID.fullmatch(name):
        raise InputError(f"{place}: not an ID of the form HKV-<AREA>-<001 to 999> with a known area")
    try:
        fields = msgspec.convert(entry, _Entry)
    except msgspec.ValidationError as error:
        raise InputError(f"{place}: {error}") from None
    _check_sentence(f"{place}.statement", fields.statement)
    if fields.source == Source():
        raise InputError(f"{place}.source: names no source")
    if not fields.checked_by:
        raise InputError(f"{place}.checked_by: empty")
    for check in fields.checked_by:
        if check not in CHECKS and not _TEST.fullmatch(check):
            raise InputError(f"{place}.checked_by: '{check}' is none of {', '.join(CHECKS)}, test:test_<name>.py")
    if len(set(fields.checked_by)) < len(fields.checked_by):
        raise InputError(f"{place}.checked_by: names a check twice")
    return Rule(name, fields.level, fields.statement, fields.source, fields.checked_by, fields.note)


def _check_sentence(place: str, statement: str) -> None:
    if not statement.removesuffix(".").strip():
        raise InputError(f"{place}: empty")
    if not statement.endswith("."):
        raise InputError(f"{place}: does not end with a period")
    if re.search(r"[\r\n]|\.\s+[A-Z]", statement):
        raise InputError(f"{place}: more than one sentence")
