"""The figures as a picture: each kernel's share of what the device allows beside plain torch, and offload by size."""

from dataclasses import dataclass
from xml.etree import ElementTree

from hybridkv_ref.gpu_check.records import ALSO, NOT_MEASURED, Figure, Report

WIDTH, LEFT, BAR, LINE = 900, 330, 11, 20
COLOURS = {
    "this kernel": "#2b6cb0", "eager": "#a0aec0", "compiled": "#68774d", "engine": "#b7791f", "gathered": "#2c7a7b",
}  # fmt: skip
"""By what a bar is of; the last two are the paths of an offload."""


@dataclass(frozen=True)
class Row:
    """One line.  ``label`` is empty where the line above has it; ``length``: 1 is the whole width, None is no bar."""

    label: str
    of: str
    length: float | None
    text: str


def svg(report: Report) -> bytes:
    """An SVG document; a figure that was not measured is said to be so, and has no bar."""
    sections = {
        f"Share of the limit reached on {report.device}": _kernel_rows(report),
        f"Offload by descriptor size on {report.device}": _offload_rows(report),
    }
    height = LINE * (sum(len(rows) + 3 for rows in sections.values()) + 1)
    box = f"0 0 {WIDTH} {height}"
    root = ElementTree.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", width=str(WIDTH), height=str(height), viewBox=box
    )
    ElementTree.SubElement(root, "rect", width="100%", height="100%", fill="white")
    y = 0
    for title, rows in sections.items():
        y += 2 * LINE
        _text(root, 10, y, title, weight="bold")
        for number, kind in enumerate(dict.fromkeys(row.of for row in rows)):
            _bar(root, LEFT + 120 * number, y, BAR, kind)
            _text(root, LEFT + 120 * number + 16, y, kind)
        y += LINE // 2
        for row in rows:
            y += LINE
            _text(root, 10, y, row.label)
            width = 0.0 if row.length is None else max(1.0, min(row.length, 1.0) * (WIDTH - LEFT - 190))
            if width:
                _bar(root, LEFT, y, width, row.of)
            _text(root, LEFT + width + 6, y, row.text, fill="#1a202c" if width else "#718096")
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _kernel_rows(report: Report) -> list[Row]:
    """A line for each kernel, and right below it plain torch where that was compared."""
    compared: dict[str, list[tuple[str, Figure]]] = {}
    for figure in report.figures("compare"):
        name, _, form = figure.name.rpartition(", ")
        compared.setdefault(name, []).append((form, figure))
    rows = []
    for figure in report.figures("speed"):
        if not figure.name.endswith(ALSO):
            others = [(form, other) for form, other in compared.get(figure.name, []) if form in COLOURS]
            for number, (of, one) in enumerate([("this kernel", figure), *others]):
                text = f"{one.share:.0%}, {one.value:.3g} {one.unit}" if one.share is not None else _missing(one)
                rows.append(Row("" if number else figure.name, of, one.share, text))
    return rows


def _offload_rows(report: Report) -> list[Row]:
    """A line for each direction, size and path; the longest bar is the fastest."""
    figures = report.figures("offload")
    most = max((float(f.value) for f in figures if f.value != NOT_MEASURED), default=1.0)
    rows = []
    for figure in figures:
        name, _, path = figure.name.rpartition(", ")
        length = None if figure.value == NOT_MEASURED else float(figure.value) / most
        text = _missing(figure) if length is None else f"{figure.value:.3g} {figure.unit}"
        rows.append(Row(name, path, length, text))
    return rows


def _missing(figure: Figure) -> str:
    return f"{NOT_MEASURED}: {figure.why or 'no ceiling was measured'}"[:80]


def _bar(root: ElementTree.Element, x: float, y: float, width: float, of: str) -> None:
    place = {"x": f"{x:.0f}", "y": f"{y - BAR:.0f}", "width": f"{width:.1f}", "height": str(BAR)}
    ElementTree.SubElement(root, "rect", place, fill=COLOURS[of])


def _text(root: ElementTree.Element, x: float, y: float, text: str, fill: str = "#1a202c", weight: str = "") -> None:
    look = {"font-family": "sans-serif", "font-size": "12", "fill": fill} | ({"font-weight": weight} if weight else {})
    ElementTree.SubElement(root, "text", {"x": f"{x:.0f}", "y": f"{y:.0f}"} | look).text = text
