"""The loaded tables as normalised JSON, for engines in other languages, and its JSON Schema.

Rows are already expanded per kind; every expression comes as text and as a tree: ``{"lit": 1}``, ``{"ref":
"lease.seen"}`` (with ``"new": true`` for the next value), ``{"op": "<=", "args": [...]}``, ``{"in": [...], "arg":
...}``.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from hybridkv_ref.expr import BOOL, Expr, Lit, Member, Ref, render
from hybridkv_ref.loader import SCHEMA_VERSION
from hybridkv_ref.tables import Event, Property, Response, Tables, Var

Tree = dict[str, Any]


class ExportExpr(msgspec.Struct):
    """One expression: as written in the language, and as a tree."""

    text: str
    tree: Tree


class ExportVar(msgspec.Struct):
    """A variable.

    ``type`` is int, counter, bool or the list of an enum's members; ``sum`` says whether it counts others.
    """

    type: str | list[str]
    init: int | bool | str
    rigid: bool
    sum: bool
    doc: str


class ExportEffect(msgspec.Struct):
    """One assignment; ``value`` reads the state before the step."""

    target: str
    value: ExportExpr


class ExportRow(msgspec.Struct):
    """One event: a row over one choice of kinds, all its parts fused."""

    id: str
    row: str
    scope: str
    actor: str
    doc: str
    kinds: dict[str, str]
    entities: list[str]
    inputs: dict[str, str | list[str]]
    guards: list[ExportExpr]
    effects: list[ExportEffect]
    fair: bool
    intake: bool
    tags: list[str]
    rules: list[str]
    kernel: str


class ExportProperty(msgspec.Struct):
    """An invariant, step property or witness."""

    id: str
    form: str
    scope: str
    kinds: dict[str, str]
    holds: ExportExpr
    role: str
    on: str
    rules: list[str]


class ExportClaim(msgspec.Struct):
    """A liveness claim."""

    id: str
    form: str
    scope: str
    kinds: dict[str, str]
    start: ExportExpr
    goal: ExportExpr
    rank: list[ExportExpr]
    rules: list[str]


class ExportKind(msgspec.Struct):
    """A kind of segment: stages, named sets of stages, allowed edges, variables."""

    title: str
    stages: list[str]
    sets: dict[str, list[str]]
    capabilities: list[str]
    edges: list[tuple[str, str]]
    variables: dict[str, ExportVar]


class Export(msgspec.Struct):
    """The whole document; ``sha256`` is the table hash that traces and reports carry."""

    schema_version: int
    sha256: str
    constants: dict[str, list[str]]
    globals: dict[str, ExportVar]
    kinds: dict[str, ExportKind]
    classes: dict[str, dict[str, ExportVar]]
    rows: list[ExportRow]
    properties: list[ExportProperty]
    claims: list[ExportClaim]


def tree(expr: Expr) -> Tree:
    """An expression as nested JSON objects."""
    match expr:
        case Lit(value=value, type=kind):
            return {"lit": bool(value) if kind == BOOL else value}
        case Ref(role=role, name=name, new=new):
            found: Tree = {"ref": f"{role}.{name}"}
            return {**found, "new": True} if new else found
        case Member(arg=arg, members=members):
            return {"in": list(members), "arg": tree(arg)}
    return {"op": expr.op, "args": [tree(a) for a in expr.args]}


def _expr(expr: Expr) -> ExportExpr:
    return ExportExpr(render(expr), tree(expr))


def _var(var: Var) -> ExportVar:
    kind = var.type
    init: int | bool | str = bool(var.init) if kind == BOOL else var.init
    return ExportVar(list(kind.members) or kind.name, init, var.rigid, bool(var.sums), var.doc)


def _vars(variables: Mapping[str, Var]) -> dict[str, ExportVar]:
    return {n: _var(v) for n, v in variables.items()}


def _row(event: Event) -> ExportRow:
    inputs: dict[str, str | list[str]] = {n: list(t.members) or t.name for n, t in event.inputs.items()}
    return ExportRow(
        event.id, event.row, event.scope, event.actor, event.doc, dict(event.kinds), list(event.roles), inputs,
        [_expr(g.expr) for g in event.guards],
        [ExportEffect(f"{e.target.role}.{e.target.name}", _expr(e.expr)) for e in event.effects],
        event.fair, event.intake, list(event.tags), list(event.rules), event.kernel,
    )  # fmt: skip


def _property(prop: Property) -> ExportProperty:
    return ExportProperty(
        prop.id, prop.form, prop.scope, dict(prop.kinds), _expr(prop.expr), prop.role, prop.on, list(prop.rules)
    )


def _claim(claim: Response) -> ExportClaim:
    return ExportClaim(
        claim.id, claim.form, claim.scope, dict(claim.kinds), _expr(claim.start), _expr(claim.goal),
        [_expr(r) for r in claim.rank], list(claim.rules),
    )  # fmt: skip


def export(tables: Tables) -> Export:
    """The document of these tables."""
    kinds = {
        name: ExportKind(
            kind.title, list(kind.stages), {n: list(m) for n, m in kind.sets.items()}, sorted(kind.capabilities),
            sorted(kind.edges), _vars(kind.vars),
        )
        for name, kind in tables.kinds.items()
    }  # fmt: skip
    return Export(
        SCHEMA_VERSION,
        tables.sha256,
        {n: [text for text, _ in c.assume] for n, c in tables.constants.items()},
        _vars(tables.globals),
        kinds,
        {n: _vars(v) for n, v in tables.classes.items()},
        [_row(e) for e in tables.events],
        [_property(p) for p in tables.properties],
        [_claim(c) for c in tables.responses],
    )


def export_json(tables: Tables) -> bytes:
    """The document as canonical, indented JSON."""
    return msgspec.json.format(msgspec.json.encode(export(tables), order="deterministic"), indent=1) + b"\n"


def schema_json() -> bytes:
    """The JSON Schema of the document."""
    return json.dumps(msgspec.json.schema(Export), indent=1, sort_keys=True).encode() + b"\n"
