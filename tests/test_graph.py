"""``hybridkv graph``: a kind's diagram shows the edges of its table, each with the rows that take it."""

import re
from pathlib import Path

import pytest
from helpers import copy_spec, edit, faulty

from hybridkv_ref import cli
from hybridkv_ref.errors import InputError
from hybridkv_ref.graph import merged, mermaid, stage_edges, write_svg
from hybridkv_ref.loader import load_tables
from hybridkv_ref.tables import Tables

TABLES = load_tables()
ARROW = re.compile(r"    (\w+) --> (\w+): (\S.*)")


def arrows(text: str) -> dict[tuple[str, str], set[str]]:
    """The labelled arrows of a Mermaid text."""
    return {(m[1], m[2]): set(m[3].split(", ")) for m in map(ARROW.fullmatch, text.splitlines()) if m}


def moves(tables: Tables, kind: str) -> set[tuple[str, str]]:
    return {edge for edge in tables.kinds[kind].edges if edge[0] != edge[1]}


@pytest.mark.parametrize("kind", TABLES.kinds)
def test_the_arrows_are_the_allowed_edges(kind: str) -> None:
    found = {edge for edge in arrows(mermaid(TABLES, kind)) if edge[0] != edge[1]}
    assert found == moves(TABLES, kind)


@pytest.mark.parametrize("kind", TABLES.kinds)
def test_every_row_that_moves_a_segment_stands_on_an_arrow(kind: str) -> None:
    shown = set().union(*arrows(mermaid(TABLES, kind)).values())
    moving = {e.row for e in TABLES.events for role in e.edges if e.kinds.get(role) == kind}
    assert shown == moving


@pytest.mark.parametrize("kind", TABLES.kinds)
def test_the_text_is_mermaid_and_begins_in_the_first_stage(kind: str) -> None:
    head, first, *rest = mermaid(TABLES, kind).splitlines()
    assert head == "stateDiagram-v2"
    assert first == f"    [*] --> {TABLES.kinds[kind].stages[0]}"
    assert all(ARROW.fullmatch(line) for line in rest)
    assert len(rest) == len(merged(TABLES, kind))


def test_an_edge_that_no_row_takes_is_not_drawn(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "kinds/swa_window.toml", '"FREE -> FILLING", ', '"FREE -> FILLING", "FREE -> MISALIGNED", ')
    tables = faulty(spec)
    assert ("FREE", "MISALIGNED") in moves(tables, "swa_window")
    assert ("FREE", "MISALIGNED") not in arrows(mermaid(tables, "swa_window"))


def test_a_row_to_another_stage_is_drawn_there(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "kinds/swa_window.toml", 'to = "MISALIGNED"', 'to = "REALIGNING"', "rows.skew")
    assert "skew" in arrows(mermaid(faulty(spec), "swa_window"))["READY", "REALIGNING"]


def test_an_unknown_kind_is_refused() -> None:
    for call in (lambda: list(stage_edges(TABLES, "nothing")), lambda: mermaid(TABLES, "nothing")):
        with pytest.raises(InputError, match="graph: no kind 'nothing'; there are compressed_kv, "):
            call()


def test_the_command_prints_the_diagram(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["graph", "swa_window"]) == 0
    assert capsys.readouterr().out == mermaid(TABLES, "swa_window")


def test_the_svg_shows_the_same_stages_and_rows(tmp_path: Path) -> None:
    pytest.importorskip("pygraphviz", reason="the extra 'svg' is not installed")
    target = tmp_path / "out.svg"
    write_svg(TABLES, "swa_window", target)
    text = target.read_text("utf-8")
    assert "<svg" in text
    for stage in TABLES.kinds["swa_window"].stages:
        assert f">{stage}<" in text
    for rows in merged(TABLES, "swa_window").values():
        assert all(f">{row}<" in text for row in rows)
    assert [p.name for p in tmp_path.iterdir()] == ["out.svg"]


def test_an_svg_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    pytest.importorskip("pygraphviz", reason="the extra 'svg' is not installed")
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "nowhere" / "out.svg", tmp_path / "folder"):
        with pytest.raises(InputError, match="cannot be written"):
            write_svg(TABLES, "swa_window", target)
    assert [p.name for p in tmp_path.iterdir()] == ["folder"]
    assert not list((tmp_path / "folder").iterdir())
