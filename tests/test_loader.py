"""What the loader refuses, in one line with file, place, column and token; how rows of several files become events."""

import copy
import random
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from helpers import copy_spec, edit, faulty

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build, load_tables, table_hash
from hybridkv_ref.model_checks.check import cited_rules_exist
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import FileSpec, Spec, read_spec, read_toml
from hybridkv_ref.tables import Tables

COMMON = "common.toml"
DATA = Path(__file__).parent / "data"
FAULTS: dict[str, list[dict[str, str]]] = tomllib.loads((DATA / "refused_tables.toml").read_text("utf-8"))


def message(folder: Path, fault: dict[str, str]) -> str:
    """What the loader says to a copy with this fault."""
    spec = copy_spec(folder)
    edit(spec / fault["file"], fault["old"], fault["new"], fault.get("section", ""))
    with pytest.raises(InputError) as error:
        faulty(spec)
    return str(error.value)


def named(fault: dict[str, str]) -> str:
    return fault["says"]


@pytest.mark.parametrize("fault", FAULTS["refused"], ids=named)
def test_a_mistake_is_named_with_its_place(tmp_path: Path, fault: dict[str, str]) -> None:
    found = message(tmp_path, fault)
    assert fault["says"] in found
    assert "\n" not in found


@pytest.mark.parametrize("fault", FAULTS["misspelt"], ids=named)
def test_a_misspelt_tie_is_no_smaller_spec(tmp_path: Path, fault: dict[str, str]) -> None:
    assert fault["says"] in message(tmp_path, fault)


@pytest.mark.parametrize("fault", FAULTS["impossible"], ids=named)
def test_an_assumption_that_cannot_hold_is_refused(tmp_path: Path, fault: dict[str, str]) -> None:
    assert fault["says"] in message(tmp_path, fault)


def test_the_unchanged_copy_loads(tmp_path: Path) -> None:
    assert faulty(copy_spec(tmp_path)).sha256 == load_tables().sha256


def test_a_rule_that_nobody_wrote_is_not_cited(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / COMMON, '"HKV-S1-001"', '"HKV-S1-999"', "invariant.charged")
    with pytest.raises(
        InputError, match=r"common.toml: invariant.charged: .* cites 'HKV-S1-999', which rules.toml does not"
    ):
        cited_rules_exist(faulty(spec), spec)


def test_a_need_cites_no_rule_that_nobody_wrote(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "recovery.toml", '"HKV-CKV-001"', '"HKV-CKV-999"')
    with pytest.raises(InputError, match=r"^recovery.toml: need.compressed_kv: cites 'HKV-CKV-999', which rules.toml"):
        cited_rules_exist(faulty(spec), spec)


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("missing", None, "cannot be read: No such file"),
        ("empty", b"", "empty table"),
        ("only a comment", b"# nothing\n", "empty table"),
        ("binary", b"\x00\xff\xfe\x01", "byte 1: not UTF-8 text"),
        ("malformed", b"title = \n", "Invalid value (at line 1, column 9)"),
        ("cut short", b'title = "x', "(at end of document)"),
        ("deep", b"x = " + b"[" * 5000 + b"]" * 5000, "nested too deeply"),
        ("without a title", b'[pool]\nx = { type = "int" }\n', "missing required field `title`"),
    ],
)
def test_a_file_that_is_no_table_is_named(tmp_path: Path, name: str, data: bytes | None, reason: str) -> None:
    for label in (COMMON, "recovery.toml", "rules.toml") if name != "without a title" else (COMMON,):
        spec = copy_spec(tmp_path / label)
        (spec / label).unlink()
        if data is not None:
            (spec / label).write_bytes(data)
        with pytest.raises(InputError) as error:
            cited_rules_exist(faulty(spec), spec)
        assert str(error.value).startswith(f"{label}: ")
        assert reason in str(error.value)
        assert "\n" not in str(error.value)


def test_a_folder_without_kinds_is_no_spec(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    for path in (spec / "kinds").iterdir():
        path.unlink()
    with pytest.raises(InputError, match="no table of a kind"):
        read_spec(spec)
    with pytest.raises(InputError, match="not a directory of tables"):
        read_spec(tmp_path / "nothing")


# -- what is loaded ----------------------------------------------------------------------------------------------------
def test_every_kind_has_each_row_that_it_uses_with_its_own_extension() -> None:
    tables, spec = load_tables(), read_spec(SPEC_DIR)
    ids = {e.id for e in tables.events}
    for file in spec.files.values():
        for row in file.uses if file.kind else ():
            shared = next(s.rows[row] for s in spec.files.values() if row in s.rows)
            assert (f"{file.kind}.{row}" in ids) is not shared.part
        for row, extension in file.extend.items():
            event = next(
                (e for e in tables.events if e.row == row and e.kinds.get("self", file.kind) == file.kind), None
            )
            texts = [g.text for g in event.guards] if event else extension.when
            assert set(extension.when) <= set(texts)


def test_handoffs_bind_kinds_by_capability_only() -> None:
    tables, spec = load_tables(), read_spec(SPEC_DIR)
    for file in spec.files.values():
        for name, handoff in file.handoffs.items():
            able = {
                (a, b)
                for a, src in tables.kinds.items()
                for b, dst in tables.kinds.items()
                if handoff.src.has in src.capabilities and handoff.dst.has in dst.capabilities
                if not handoff.same_kind or a == b
            }
            bound = [e for e in tables.events if e.row == name and set(e.kinds) == {"src", "dst"}]
            assert {(e.kinds["src"], e.kinds["dst"]) for e in bound} == able
            assert able


def test_comments_do_not_count_for_the_hash_and_every_rule_does(tmp_path: Path) -> None:
    spec, original = copy_spec(tmp_path), read_spec(SPEC_DIR)
    edit(spec / COMMON, "[pool]", "# a comment\n\n[pool]")
    assert table_hash(read_spec(spec)) == table_hash(original)
    edit(spec / COMMON, '"off >= 0"', '"off >= 1"', "rows.move")
    assert table_hash(read_spec(spec)) != table_hash(original)


def test_a_recovery_entry_counts_for_the_hash(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "recovery.toml", "window - 1", "window", "need.swa_window")
    assert table_hash(read_spec(spec)) != load_tables().sha256


# -- anything at all ---------------------------------------------------------------------------------------------------
def raw_files() -> dict[str, dict[str, Any]]:
    files = {label: read_toml(SPEC_DIR / label, label) for label in (*read_spec(SPEC_DIR).files, "recovery.toml")}
    return dict(files)


def places(data: Any, at: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    if at:
        yield at
    for key, value in data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ():
        yield from places(value, (*at, key))


def change(data: Any, at: tuple[str | int, ...], how: str) -> None:
    key: Any
    for key in at[:-1]:
        data = data[key]
    key = at[-1]
    match how:
        case "delete":
            del data[key]
        case "rename" if isinstance(data, dict):
            data["renamed"] = data.pop(key)
        case "double" if isinstance(data, list):
            data.append(data[key])
        case "empty":
            data[key] = type(data[key])()
        case "number":
            data[key] = -7
        case _:
            data[key] = "nonsense"


def broken(seed: int, count: int) -> Iterator[str]:
    """Changes anything in any file; yields what came back as anything else than tables or one clear line."""
    raw, rng = raw_files(), random.Random(seed)
    everything = [(label, at) for label, data in raw.items() for at in places(data)]
    good = {label: msgspec.convert(data, FileSpec) for label, data in raw.items() if label != "recovery.toml"}
    for label, at in rng.sample(everything, count):
        how = rng.choice(["delete", "rename", "double", "empty", "number", "nonsense"])
        data = copy.deepcopy(raw[label])
        change(data, at, how)
        try:
            recovery = data if label == "recovery.toml" else raw["recovery.toml"]
            files = good if label == "recovery.toml" else {**good, label: msgspec.convert(data, FileSpec)}
            assert isinstance(build(Spec(files, recovery)), Tables)
        except (InputError, msgspec.ValidationError) as error:
            if "\n" in str(error):
                yield f"{label}: {at} {how}: more than one line"
        except Exception as error:  # anything else is what this looks for
            yield f"{label}: {at} {how}: {error!r}"


def test_no_change_of_a_table_ends_in_a_traceback() -> None:
    assert list(broken(1, 40)) == []


@pytest.mark.deep
def test_no_change_of_a_table_ends_in_a_traceback_deep() -> None:
    assert list(broken(2, 3000)) == []
