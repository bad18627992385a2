"""What holds between the table files: rules are cited, stages and edges are used, shared text names no kind."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import copy_spec, edit, faulty

from hybridkv_ref.expr import Lit, Member, refs
from hybridkv_ref.loader import load_tables
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.rules import load_rules
from hybridkv_ref.spec_files import Spec, read_spec
from hybridkv_ref.tables import Tables

TABLES, RULES, SPEC = load_tables(), load_rules(), read_spec(SPEC_DIR)
PROVED = {"invariant", "step", "liveness"}
PACKAGE = Path(SPEC_DIR).parent


def cited(tables: Tables) -> set[str]:
    lists = (
        [e.rules for e in tables.events] + [p.rules for p in tables.properties] + [c.rules for c in tables.responses]
    )
    return {rule for rules in lists for rule in rules}


def stated(tables: Tables) -> dict[str, set[str]]:
    """Rule -> how the tables state it: as invariant, step property or liveness claim."""
    found: dict[str, set[str]] = {}
    for prop in tables.properties:
        if prop.form != "sometimes":
            for rule in prop.rules:
                found.setdefault(rule, set()).add(prop.form)
    for claim in tables.responses:
        for rule in claim.rules:
            found.setdefault(rule, set()).add("liveness")
    return found


# -- rules -------------------------------------------------------------------------------------------------------------
def test_every_cited_rule_exists() -> None:
    assert cited(TABLES) <= set(RULES)


def test_every_row_goal_and_claim_cites_a_rule() -> None:
    assert [e.id for e in TABLES.events if not e.rules] == []
    assert [p.id for p in TABLES.properties if p.form != "sometimes" and p.role == "goal" and not p.rules] == []
    assert [c.id for c in TABLES.responses if not c.rules] == []


def test_every_rule_that_only_a_proof_checks_is_stated_in_a_table() -> None:
    """Separation, counters and edges are proved of every row without being written down; the rest is written."""
    generic = generic_rules()
    only_proved = {n for n, rule in RULES.items() if rule.level != "INFO" and set(rule.checked_by) <= PROVED}
    assert sorted(only_proved - set(stated(TABLES)) - generic) == []


def generic_rules() -> set[str]:
    """The rules of the obligations that every row has."""
    from hybridkv_ref.model_checks.frames import Assumptions

    event = TABLES.event("swa_window.free")
    obligations = Task(TABLES, event, Assumptions(TABLES)).run().obligations
    named = {p.id for p in TABLES.properties}
    return {r for o in obligations if o.property not in named for r in o.rules}


def test_a_rule_without_its_property_would_be_seen(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "common.toml", 'rules = ["HKV-S1-002"]', "rules = []", "invariant.kind_cap")
    assert "invariant" in stated(TABLES)["HKV-S1-002"]
    assert "HKV-S1-002" not in stated(faulty(spec))


# -- stages, edges, sets -----------------------------------------------------------------------------------------------
def taken_edges(tables: Tables, kind: str) -> set[tuple[str, str]]:
    """(from, to) of every row that moves a segment of this kind; a remembered stage may be any allowed one."""
    allowed, found = tables.kinds[kind].edges, set()
    for event in tables.events:
        for role, (sources, target) in event.edges.items():
            if event.kinds.get(role) == kind:
                goals = {b for a, b in allowed if a in sources} if target.startswith("*") else {target}
                found |= {(a, b) for a in sources for b in goals if a != b}
    return found


@pytest.mark.parametrize("kind", TABLES.kinds)
def test_every_edge_of_a_kind_is_taken_by_a_row_and_none_else(kind: str) -> None:
    assert set(TABLES.kinds[kind].edges) <= taken_edges(TABLES, kind)


def test_an_edge_without_a_row_would_be_seen(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "kinds/swa_window.toml", '"FREE -> FILLING", ', '"FREE -> FILLING", "FREE -> MISALIGNED", ')
    tables = faulty(spec)
    assert set(tables.kinds["swa_window"].edges) - taken_edges(tables, "swa_window") == {("FREE", "MISALIGNED")}


@pytest.mark.parametrize("kind", TABLES.kinds)
def test_every_stage_can_be_entered_and_left(kind: str) -> None:
    edges = taken_edges(TABLES, kind)
    stages = set(TABLES.kinds[kind].stages)
    assert {b for _, b in edges} == stages == {a for a, _ in edges}


@pytest.mark.parametrize("kind", TABLES.kinds)
def test_a_kinds_sets_fit_together(kind: str) -> None:
    sets = {name: set(members) for name, members in TABLES.kinds[kind].sets.items()}
    first = TABLES.kinds[kind].stages[0]
    assert sets["EMPTY"] == {first}, "an empty segment is in its first stage"
    assert sets["READABLE"] <= sets["PINNABLE"] <= sets["KEPT"]
    assert sets["FRESH"] <= sets["QUIET"]
    assert not sets["QUIET"] & (sets["EVICTING"] | sets["EMPTY"] | sets["WRITTEN"] | sets["INBOUND"])
    assert not sets["READABLE"] & (sets["WRITTEN"] | sets["INBOUND"] | sets["EVICTING"] | sets["EMPTY"])
    if "cacheable" in TABLES.kinds[kind].capabilities:
        assert sets["FRESH"] <= sets["READABLE"], "what a commit leaves may be read"
        assert sets["OPEN"] <= sets["WRITTEN"]
        assert sets["EVICTING"] <= sets["KEPT"]


# -- variables ---------------------------------------------------------------------------------------------------------
def written_and_read(tables: Tables) -> tuple[set[str], set[str]]:
    """Names that some row writes, and names that some guard, effect, property or sum reads."""
    written = {e.target.name for event in tables.events for e in event.effects}
    exprs = [g.expr for event in tables.events for g in event.guards]
    exprs += [e.expr for event in tables.events for e in event.effects]
    exprs += [p.expr for p in tables.properties]
    variables = [v for k in tables.kinds.values() for v in k.vars.values()]
    variables += [v for group in tables.classes.values() for v in group.values()]
    variables += list(tables.globals.values())
    exprs += [t for v in variables for total in v.sums for t in total.terms.values()]
    return written, {r.name for expr in exprs for r in refs(expr)}


def test_every_variable_is_read_and_every_flexible_one_is_written() -> None:
    written, read = written_and_read(TABLES)
    variables = [v for k in TABLES.kinds.values() for v in k.vars.values()]
    variables += [v for group in TABLES.classes.values() for v in group.values()]
    variables += list(TABLES.globals.values())
    assert sorted({v.name for v in variables} - read) == []
    assert sorted({v.name for v in variables if not v.rigid} - written) == []
    assert sorted({v.name for v in variables if v.rigid} & written) == []


def test_every_constant_is_read_and_bounded_by_an_assumption_or_arbitrary() -> None:
    _, read = written_and_read(TABLES)
    surface = {name.rpartition(".")[2] for name in read}
    assert sorted(n for n in TABLES.constants if n.rpartition(".")[2] not in surface) == []
    free = {n for n, c in TABLES.constants.items() if not c.assume}
    chosen = {r.name for p in TABLES.properties for r in refs(p.choose)} | {
        r.name for claim in TABLES.responses for h in claim.helpful for r in refs(h.probe)
    }
    assert free <= chosen | {"PROBE", "RANK"}, "a constant without an assumption stands for any value"


def test_the_small_constants_meet_every_assumption() -> None:
    from helpers import evaluate

    for constant in TABLES.constants.values():
        for text, expr in constant.assume:
            assert evaluate(expr, lambda ref: TABLES.constants[ref.name].small), f"{constant.name}: {text}"


# -- shared text names no kind -----------------------------------------------------------------------------------------
def texts(spec: Spec) -> Iterator[tuple[str, str]]:
    """(place, text) of every rule in the shared files, comments and doc left out."""
    for label, file in spec.files.items():
        if file.kind:
            continue
        for section in ("rows", "handoffs", "invariant", "step", "response", "sometimes"):
            for name, item in getattr(file, section).items():
                for key in item.__struct_fields__:
                    if key not in ("doc", "rules", "kernel"):
                        yield f"{label}: {section}.{name}.{key}", repr(getattr(item, key))


def kinds_named(spec: Spec) -> list[str]:
    kinds = [f.kind for f in spec.files.values() if f.kind]
    word = re.compile(rf"\b(?:{'|'.join(kinds)})\b")
    return [place for place, text in texts(spec) if word.search(text)]


def test_shared_rows_and_properties_name_no_kind() -> None:
    assert kinds_named(SPEC) == []


def test_a_kind_named_in_a_shared_row_would_be_seen(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(
        spec / "common.toml",
        'tags = ["admission", "write"]',
        'tags = ["admission", "write", "swa_window"]',
        "rows.admit",
    )
    assert kinds_named(read_spec(spec)) == ["common.toml: rows.admit.tags"]


def test_shared_rows_name_no_stage_of_a_kind() -> None:
    owned = {stage for kind in TABLES.kinds.values() for stage in kind.stages}
    shared = {s for owner, stages in TABLES.stages.items() if owner not in TABLES.kinds for s in stages}
    shared |= {name for sets in TABLES.sets.values() for name in sets}
    word = re.compile(rf"\b(?:{'|'.join(sorted(owned - shared))})\b")
    assert [place for place, text in texts(SPEC) if word.search(text)] == []


CORE = ("expr", "spec_files", "names", "rows", "needs", "loader", "tables", "compile_py", "machine", "export", "graph")
SOURCES = [*(PACKAGE / "hybridkv_ref" / f"{n}.py" for n in CORE), *sorted((PACKAGE / "model_checks").glob("*.py"))]


@pytest.mark.parametrize("path", [p for p in SOURCES if p.exists()], ids=lambda p: p.name)
def test_no_kind_is_named_in_the_code_that_reads_or_proves_tables(path: Path) -> None:
    found = re.findall(rf"[\"'](?:{'|'.join(TABLES.kinds)})[\"']", path.read_text("utf-8"))
    assert found == []


def test_there_is_code_to_look_at() -> None:
    assert len([p for p in SOURCES if p.exists()]) > len(CORE)


# -- literals ----------------------------------------------------------------------------------------------------------
def test_no_guard_is_a_constant() -> None:
    for event in TABLES.events:
        for guard in event.guards:
            if refs(guard.expr):
                continue
            assert isinstance(guard.expr, (Lit, Member)) or event.scope == "copy", f"{event.id}: {guard.text}"
