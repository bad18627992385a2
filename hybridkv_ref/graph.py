"""A kind's stages and rows as a diagram, made from the table: Mermaid text, or SVG through Graphviz."""

from collections.abc import Iterator
from pathlib import Path

from hybridkv_ref.errors import InputError
from hybridkv_ref.tables import Tables

Edge = tuple[str, str, str]


def stage_edges(tables: Tables, kind: str) -> Iterator[Edge]:
    """(from, to, row) for every row that moves a segment of this kind; a row to a remembered stage fans out."""
    if kind not in tables.kinds:
        raise InputError(f"graph: no kind '{kind}'; there are {', '.join(tables.kinds)}")
    seen: dict[Edge, None] = {}
    for event in tables.events:
        for role, (sources, target) in event.edges.items():
            if event.kinds.get(role) != kind:
                continue
            for source in sources:
                goals = remembered(tables, kind, target[1:]) if target.startswith("*") else {target}
                for goal in sorted(goals):
                    seen.setdefault((source, goal, event.row))
    yield from seen


def remembered(tables: Tables, kind: str, variable: str) -> set[str]:
    """The stages that some row of this kind stores in ``variable``: those it leaves when it does."""
    found: set[str] = set()
    for event in tables.events:
        for role, (sources, _) in event.edges.items():
            stores = any((e.target.role, e.target.name) == (role, variable) for e in event.effects)
            if event.kinds.get(role) == kind and stores:
                found.update(sources)
    return found


def merged(tables: Tables, kind: str) -> dict[tuple[str, str], list[str]]:
    """Rows by edge, so that one arrow carries all of them."""
    found: dict[tuple[str, str], list[str]] = {}
    for source, target, row in stage_edges(tables, kind):
        found.setdefault((source, target), []).append(row)
    return found


def mermaid(tables: Tables, kind: str) -> str:
    """A Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {tables.kinds[kind].stages[0]}" if kind in tables.kinds else ""]
    for (source, target), rows in merged(tables, kind).items():
        lines.append(f"    {source} --> {target}: {', '.join(rows)}")
    return "\n".join(lines) + "\n"


def write_svg(tables: Tables, kind: str, path: Path) -> None:
    """The same diagram as SVG; needs the extra ``svg`` (pygraphviz)."""
    edges = merged(tables, kind)
    if not path.parent.is_dir():
        raise InputError(f"{path}: cannot be written: no such folder")
    try:
        import pygraphviz
    except ImportError:
        raise InputError("graph --svg: pygraphviz is missing: pip install 'hybridkv-ref[svg]'") from None
    picture = pygraphviz.AGraph(directed=True, rankdir="LR", fontname="sans-serif")
    picture.node_attr.update(shape="box", style="rounded", fontname="sans-serif", fontsize="12")
    picture.edge_attr.update(fontname="sans-serif", fontsize="9")
    readable = tables.kinds[kind].sets.get("READABLE", ())
    for stage in tables.kinds[kind].stages:
        picture.add_node(stage, **({"fillcolor": "#dcefdc", "style": "rounded,filled"} if stage in readable else {}))
    for (source, target), rows in edges.items():
        picture.add_edge(source, target, label="\n".join(rows))
    partial = path.with_name(path.name + ".part")
    try:
        picture.draw(str(partial), format="svg", prog="dot")
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
