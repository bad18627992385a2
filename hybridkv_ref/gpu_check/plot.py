"""The figures as a picture: for every kernel the share of what the device allows, beside plain torch where compared."""

from xml.etree import ElementTree

from hybridkv_ref.gpu_check.records import NOT_MEASURED, Figure, Report

WIDTH, LEFT, BAR, LINE = 900, 330, 11, 20
COLOURS = {"": "#2b6cb0", ", eager": "#a0aec0", ", compiled": "#68774d"}
LABELS = {"": "this kernel", ", eager": "torch, eager", ", compiled": "torch.compile"}


def svg(report: Report) -> bytes:
    """An SVG document; a figure that was not measured is said to be so, and has no bar."""
    rows = [(name, form, f) for name, group in _grouped(report).items() for form, f in group.items()]
    height = LINE * (len(rows) + 4)
    root = ElementTree.Element(
        "svg", xmlns="http://www.w3.org/2000/svg", width=str(WIDTH), height=str(height), viewBox=f"0 0 {WIDTH} {height}"
    )
    ElementTree.SubElement(root, "rect", width="100%", height="100%", fill="white")
    _text(root, 10, LINE, f"Share of the limit reached on {report.device}", weight="bold")
    for number, (form, colour) in enumerate(COLOURS.items()):
        at = LEFT + 150 * number
        ElementTree.SubElement(
            root, "rect", x=str(at), y=str(2 * LINE - BAR), width=str(BAR), height=str(BAR), fill=colour
        )
        _text(root, at + 16, 2 * LINE, LABELS[form])
    scale = WIDTH - LEFT - 190
    for number, (name, form, figure) in enumerate(rows):
        y = LINE * (number + 4)
        if not form:
            _text(root, 10, y, name)
        if figure.share is not None:
            width = max(1.0, min(figure.share, 1.0) * scale)
            ElementTree.SubElement(
                root, "rect", x=str(LEFT), y=str(y - BAR), width=f"{width:.1f}", height=str(BAR), fill=COLOURS[form]
            )
            _text(root, LEFT + width + 6, y, f"{figure.share:.0%}, {figure.value:.3g} {figure.unit}")
        else:
            _text(root, LEFT, y, f"{NOT_MEASURED}: {figure.why or 'no ceiling was measured'}"[:80], fill="#718096")
    ElementTree.indent(root)
    document: bytes = ElementTree.tostring(root, encoding="utf-8", xml_declaration=True)
    return document + b"\n"


def _grouped(report: Report) -> dict[str, dict[str, Figure]]:
    """Figures by kernel and form."""
    found: dict[str, dict[str, Figure]] = {f.name: {"": f} for f in report.figures("speed")}
    for figure in report.figures("compare"):
        for form in (", eager", ", compiled"):
            if figure.name.endswith(form):
                found.setdefault(figure.name.removesuffix(form), {})[form] = figure
    return found


def _text(root: ElementTree.Element, x: float, y: float, text: str, fill: str = "#1a202c", weight: str = "") -> None:
    style = {"font-weight": weight} if weight else {}
    element = ElementTree.SubElement(
        root,
        "text",
        {"x": f"{x:.0f}", "y": f"{y:.0f}", "font-family": "sans-serif", "font-size": "12", "fill": fill} | style,
    )
    element.text = text
