"""A validation report for people."""

from collections import Counter
from collections.abc import Iterator

import msgspec
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from hybridkv_ref.validate import FirstRefusal, ValidationReport

MOST = 12
"""Events of a shortened trace that are shown."""


def render(report: ValidationReport) -> RenderableType:
    """The verdict, what was refused with its shortest trace, and what was shown of the rules."""
    return Group(*_parts(report))


def _parts(report: ValidationReport) -> Iterator[RenderableType]:
    found = report.coverage
    if report.first:
        table = Table("rules", "line", "where", "row", "refused by", "with", title="First refusal of each rule")
        together: dict[str, list[FirstRefusal]] = {}
        for first in report.first:
            together.setdefault(f"{first.line} {first.message}", []).append(first)
        for first, *more in together.values():
            values = "\n".join(f"{n}={v}" for n, v in first.values.items())
            place = f"{first.instance} {first.segment}".strip()
            rules = "\n".join(r.rule for r in (first, *more))
            table.add_row(*(escape(t) for t in (rules, str(first.line), place, first.row, first.guard, values)))
        yield table
    for first in report.first:
        if first.events:
            yield f"\nThe shortest trace found that {escape(first.row)} still refuses ({len(first.events)} events):"
            for event in first.events[-MOST:]:
                yield escape(msgspec.json.encode(event).decode())
    counts = Counter(v.result for v in found.rules.values())
    premises = sum(v.premises for v in found.rules.values())
    yield f"rules: {', '.join(f'{n} {r}' for r, n in counts.most_common())}; {premises:,} premises"
    if found.open:
        yield f"claimed and not exercised: {', '.join(found.open)}"
    yield (
        f"{found.verdict}: {report.events:,} events, {found.rows_fired:,} rows, {report.refusals:,} refused, "
        f"{found.hidden:,} hidden steps (at most {found.peak} choices), {found.skipped:,} not judged, "
        f"tables {report.table_sha256[:12]}"
    )
