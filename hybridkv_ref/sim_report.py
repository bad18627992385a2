"""What a simulation reports, as a record and as a table for the terminal."""

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from rich.table import Table


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one simulation; tokens and bytes are integers, rates are from 0 to 1.

    ``hit_tokens`` were matched, ``saved_tokens`` of them were not computed again, ``recomputed_tokens`` were.
    ``hit_rate`` is hit / input tokens, ``validation_pass_rate`` saved / hit tokens (1 if nothing was matched) and
    ``composite`` their product. ``limiting`` counts, per group, the hits that were shortened because of it; a hit that
    several groups refused counts for each. ``peak_bytes`` and ``evictions`` are per kind, device copies only.
    ``spills`` and ``reloads`` count objects, ``load_wait_ms`` is the time that requests waited for loads, added up.
    """

    model: str
    recovery: str
    alignment: int
    gpu_memory: int
    disk: int
    requests: int
    input_tokens: int
    hit_tokens: int
    saved_tokens: int
    recomputed_tokens: int
    hit_rate: float
    validation_pass_rate: float
    composite: float
    load_bytes: int
    load_wait_ms: float
    limiting: dict[str, int]
    peak_bytes: dict[str, int]
    evictions: dict[str, int]
    spills: int
    reloads: int
    rows_fired: int


def report_table(report: Report) -> "Table":
    """The report as a rich table of two columns."""
    from rich.table import Table  # late: only the command line needs it

    table = Table(title=f"{report.model}, recovery {report.recovery}, hits in units of {report.alignment} tokens")
    table.add_column("figure")
    table.add_column("value", justify="right")
    rows: list[tuple[str, str]] = [
        ("requests", f"{report.requests:,}"),
        ("input tokens", f"{report.input_tokens:,}"),
        ("hit rate", f"{report.hit_rate:.1%}"),
        ("validation pass rate", f"{report.validation_pass_rate:.1%}"),
        ("composite", f"{report.composite:.1%}"),
        ("matched tokens", f"{report.hit_tokens:,}"),
        ("saved tokens", f"{report.saved_tokens:,}"),
        ("matched, yet computed again", f"{report.recomputed_tokens:,}"),
        *((f"shortened by {group}", f"{count:,}") for group, count in report.limiting.items()),
        *((f"peak of {kind}", _bytes(size)) for kind, size in report.peak_bytes.items()),
        *((f"evictions of {kind}", f"{count:,}") for kind, count in report.evictions.items()),
        ("spills", f"{report.spills:,}"),
        ("reloads", f"{report.reloads:,}"),
        ("loaded", _bytes(report.load_bytes)),
        ("waited for loads", f"{report.load_wait_ms / 1000:,.1f} s"),
        ("rows fired", f"{report.rows_fired:,}"),
    ]
    for figure, value in rows:
        table.add_row(figure, value)
    return table


def _bytes(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:,.0f} B" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"
