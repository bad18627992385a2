"""``hybridkv export``: every row, property and kind, in JSON that its own schema accepts and that means the same."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from helpers import copy_spec, edit, faulty

from hybridkv_ref import cli
from hybridkv_ref.export import export_json, schema_json, tree
from hybridkv_ref.expr import BOOL, INT, Expr, Lit, Member, Op, Ref, Type, enum, refs
from hybridkv_ref.loader import SCHEMA_VERSION, load_tables
from hybridkv_ref.tables import Event

TABLES = load_tables()
DOCUMENT: dict[str, Any] = json.loads(export_json(TABLES))
SCHEMA: dict[str, Any] = json.loads(schema_json())


def rebuilt(node: dict[str, Any], known: Callable[[str, bool], Ref], kind: Type | None = None) -> Expr:
    """An expression read back from its exported tree alone, as an engine in another language would."""
    match node:
        case {"lit": bool() as value}:
            return Lit(int(value), BOOL)
        case {"lit": str() as value}:
            return Lit(value, kind or enum(()))
        case {"lit": value}:
            return Lit(value, INT)
        case {"ref": name}:
            return known(name, node.get("new", False))
        case {"in": members, "arg": arg}:
            return Member(rebuilt(arg, known), tuple(members))
    args = [rebuilt(a, known) for a in node["args"]]
    typed = next((a.type for a in args if a.type.members), None)
    args = [Lit(a.value, typed) if isinstance(a, Lit) and isinstance(a.value, str) and typed else a for a in args]
    op = node["op"]
    if op == "ite":
        return Op(op, tuple(args), args[1].type)
    return Op(op, tuple(args), INT if op in ("+", "-", "neg", "min", "max") else BOOL)


def refs_of(event: Event) -> Callable[[str, bool], Ref]:
    found: dict[str, Ref] = {}
    for expr in (*(g.expr for g in event.guards), *(e.expr for e in event.effects)):
        for ref in refs(expr):
            found[f"{ref.role}.{ref.name}"] = ref
    return lambda name, new: found[name]


def test_the_document_follows_its_schema_and_the_schema_is_one() -> None:
    jsonschema.validators.validator_for(SCHEMA).check_schema(SCHEMA)
    jsonschema.validate(DOCUMENT, SCHEMA)


@pytest.mark.parametrize(
    "damage", [lambda d: d.pop("rows"), lambda d: d.update(sha256=3), lambda d: d["rows"][0].pop("guards")]
)
def test_the_schema_refuses_a_damaged_document(damage: Callable[[dict[str, Any]], Any]) -> None:
    document = json.loads(export_json(TABLES))
    damage(document)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(document, SCHEMA)


def test_the_head_names_version_and_table_hash() -> None:
    assert (DOCUMENT["schema_version"], DOCUMENT["sha256"]) == (SCHEMA_VERSION, TABLES.sha256)
    assert len(TABLES.sha256) == 64


def test_every_row_property_claim_kind_and_variable_is_there() -> None:
    assert [row["id"] for row in DOCUMENT["rows"]] == [e.id for e in TABLES.events]
    assert [p["id"] for p in DOCUMENT["properties"]] == [p.id for p in TABLES.properties]
    assert [c["id"] for c in DOCUMENT["claims"]] == [c.id for c in TABLES.responses]
    assert set(DOCUMENT["globals"]) == set(TABLES.globals)
    assert set(DOCUMENT["constants"]) == set(TABLES.constants)
    for name, kind in TABLES.kinds.items():
        found = DOCUMENT["kinds"][name]
        assert found["stages"] == list(kind.stages)
        assert {tuple(edge) for edge in found["edges"]} == set(kind.edges)
        assert set(found["variables"]) == set(kind.vars)
    for name, variables in TABLES.classes.items():
        assert set(DOCUMENT["classes"][name]) == set(variables)


def test_guards_and_effects_read_back_as_the_same_trees() -> None:
    for row, event in zip(DOCUMENT["rows"], TABLES.events, strict=True):
        known = refs_of(event)
        for exported, guard in zip(row["guards"], event.guards, strict=True):
            assert tree(rebuilt(exported["tree"], known)) == tree(guard.expr)
        for exported, effect in zip(row["effects"], event.effects, strict=True):
            assert exported["target"] == f"{effect.target.role}.{effect.target.name}"
            assert tree(rebuilt(exported["value"]["tree"], known)) == tree(effect.expr)


@pytest.mark.parametrize(
    ("expr", "expected"),
    [
        (Lit(1, BOOL), {"lit": True}),
        (Lit(1, INT), {"lit": 1}),
        (Lit("A", enum(("A", "B"))), {"lit": "A"}),
        (Ref("lease", "seen", INT), {"ref": "lease.seen"}),
        (Ref("self", "mem", INT, new=True), {"ref": "self.mem", "new": True}),
        (Member(Ref("self", "x", enum(("A", "B"))), ("A",)), {"in": ["A"], "arg": {"ref": "self.x"}}),
        (Op("not", (Ref("self", "p", BOOL),), BOOL), {"op": "not", "args": [{"ref": "self.p"}]}),
    ],
)
def test_an_expression_as_a_tree(expr: Expr, expected: dict[str, Any]) -> None:
    assert tree(expr) == expected


def test_an_export_is_canonical_and_follows_the_tables(tmp_path: Path) -> None:
    assert export_json(TABLES) == export_json(TABLES)
    spec = copy_spec(tmp_path)
    assert export_json(faulty(spec)) == export_json(TABLES)
    edit(spec / "common.toml", '"off >= 0"', '"off >= 1"', "rows.move")
    changed = json.loads(export_json(faulty(spec)))
    assert changed["sha256"] != DOCUMENT["sha256"]
    differing = [a["id"] for a, b in zip(changed["rows"], DOCUMENT["rows"], strict=True) if a != b]
    assert differing == [e.id for e in TABLES.events if e.row == "move"]


def test_the_command_prints_or_writes_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["export"]) == 0
    assert capsys.readouterr().out.encode() == export_json(TABLES)
    assert cli.main(["export", "--out", str(tmp_path / "t.json")]) == 0
    assert (tmp_path / "t.json").read_bytes() == export_json(TABLES)
    assert cli.main(["export", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
