"""The vocabulary of events: records, JSON, schema, and the map from events to rows."""

import json
import typing
from pathlib import Path

import jsonschema
import msgspec
import pytest
from helpers import copy_oracle_spec, edit

from hybridkv_ref.cli import main
from hybridkv_ref.errors import InputError
from hybridkv_ref.event_map import guard_name, load_event_map, row_name
from hybridkv_ref.events import SCHEMA, Event, GroupSpec, Header, KeyPublish, Lookup, schema, tag
from hybridkv_ref.oracle_tables import kind_name, oracle_hash, oracle_tables
from hybridkv_ref.rules import load_rules
from hybridkv_ref.tables import Tables

FORMS = typing.get_args(Event)
GROUPS = (GroupSpec("full", "compressed_kv", 16), GroupSpec("a.b-c", "swa_window", 16, window=32))
# Lists of strings, everything else by its type.
SAMPLES = {str: "x", int: 3, bool: True, list[int]: [1, 2], list[str]: ["a"]}


@pytest.fixture(scope="module")
def tables() -> Tables:
    return oracle_tables(GROUPS)


def sample(form: type) -> Event:
    """A record of this form whose required fields are filled."""
    hints = typing.get_type_hints(form)
    values = {}
    for field in msgspec.structs.fields(form):
        if field.required:
            hint = hints[field.name]
            literal = typing.get_args(hint) if typing.get_origin(hint) is typing.Literal else ()
            values[field.name] = literal[0] if literal else SAMPLES.get(hint, [])
    return typing.cast(Event, form(**values))


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
def test_a_record_survives_json_and_meets_the_schema(form: type) -> None:
    record = sample(form)
    line = msgspec.json.encode(record)
    assert msgspec.json.decode(line, type=Event) == record
    jsonschema.validate(msgspec.json.decode(line), schema())


def test_the_schema_refuses_what_the_records_refuse() -> None:
    for wrong in ({"event": "lookup", "req": "a"}, {"event": "nonsense"}, {"event": "drain", "more": 1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(wrong, schema())
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Event)


def test_a_header_meets_the_schema() -> None:
    header = Header("hybridkv.events/1", groups=GROUPS)
    jsonschema.validate(msgspec.json.decode(msgspec.json.encode(header)), schema())
    assert header.schema == SCHEMA


def test_the_schema_is_exported(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "--events"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(schema()))


def test_every_event_is_mapped_and_every_mapped_event_exists() -> None:
    assert set(load_event_map().rows) == {tag(sample(form)) for form in FORMS}


def test_the_index_spaces_of_the_vocabulary_are_named() -> None:
    assert tag(KeyPublish("full", ["k"])) == "key_publish"
    assert Lookup("a", 16).matched == -1


def test_every_row_of_the_oracle_stands_for_an_event_or_a_hidden_step(tables: Tables) -> None:
    mapped = {row for rows in load_event_map().rows.values() for row in rows}
    own = {row_name(event) for event in tables.events if event.file.startswith("oracle/") and event.scope == "system"}
    assert own - mapped <= load_event_map().books
    assert not mapped & load_event_map().books


def test_rules_of_rows_and_of_blame_exist_and_blame_names_guards(tables: Tables) -> None:
    rules, guards = load_rules(), dict[str, set[str]]()
    for event in tables.events:
        assert set(event.rules) <= rules.keys(), event.id
        guards.setdefault(row_name(event), set()).update(guard_name(guard) for guard in event.guards)
    for row, blamed in load_event_map().blame.items():
        assert blamed.keys() <= guards[row], row
        assert {rule for named in blamed.values() for rule in named} <= rules.keys()


def test_every_row_of_the_oracle_has_a_rule(tables: Tables) -> None:
    assert [e.id for e in tables.events if e.file.startswith("oracle/") and not e.rules] == []


def test_hidden_steps_pin_nothing_free_nothing_publish_nothing_and_move_no_generation(tables: Tables) -> None:
    hidden = {row for rows in load_event_map().hidden.values() for row in rows}
    kept = {"pins", "keys", "generation", "placed", "mem", "stage", "start", "end", "writers"}
    for event in tables.events:
        if row_name(event) in hidden:
            assert not [e.text for e in event.effects if e.target.role == "self" and e.target.name in kept], event.id


def test_the_shared_rows_are_used_and_not_written_again(tables: Tables) -> None:
    for name, file in (("free", "common.toml"), ("pin", "protocols/prefix_hit.toml"), ("admit", "common.toml")):
        assert tables.event(f"full.{name}").file == file
    assert tables.event("ship_begin[full>full]").file == "protocols/transfer.toml"


def test_group_names_become_kinds() -> None:
    assert [kind_name(n) for n in ("full", "a.b-c", "4x")] == ["full", "a_b_c", "g_4x"]
    with pytest.raises(InputError, match="two groups have the same name"):
        oracle_tables([GroupSpec("a-b", "compressed_kv", 1), GroupSpec("a.b", "compressed_kv", 1)])


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('rows = ["at_rest"]', 'rows = ["at_ease"]', "events.drain.rows: no row 'at_ease' in the tables"),
        ('hidden = ["close"]', 'hidden = ["shut"]', "events.free.hidden: no hidden step 'shut'"),
        ('needs = ["covers"]', 'needs = ["hides"]', "events.toml: needs: no row 'hides' in the tables"),
        ('books = ["forget"', 'books = ["forgive"', "events.toml: books: no row 'forgive' in the tables"),
        ('level = "L3"', 'level = "L9"', "events.toml: Invalid enum value 'L9'"),
        ("[capabilities.tree]", "[capability.tree]", "events.toml: Object contains unknown field `capability`"),
    ],
)
def test_a_bad_map_is_one_clear_line(tmp_path: Path, old: str, new: str, reason: str) -> None:
    spec = copy_oracle_spec(tmp_path)
    edit(spec / "events.toml", old, new)
    with pytest.raises(InputError) as caught:
        oracle_tables(GROUPS, spec)
    assert reason in str(caught.value)


def test_the_hash_moves_with_a_rule_and_not_with_a_comment(tmp_path: Path) -> None:
    spec = copy_oracle_spec(tmp_path)
    assert oracle_hash(spec) == oracle_hash()
    commented = copy_oracle_spec(tmp_path / "commented")
    (commented / "oracle" / "block.toml").write_text("# note\n" + (spec / "oracle" / "block.toml").read_text())
    assert oracle_hash(commented) == oracle_hash()
    changed = copy_oracle_spec(tmp_path / "changed")
    edit(changed / "oracle" / "index.toml", 'when = ["count <= real", ', 'when = ["count == real", ')
    assert oracle_hash(changed) != oracle_hash()
