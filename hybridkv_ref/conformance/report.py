"""A report as files: JSON, Markdown for a job's summary, a badge, and one trace for each thing that went wrong."""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from hybridkv_ref.conformance.records import Report, RuleResult
from hybridkv_ref.errors import InputError
from hybridkv_ref.rules import load_rules

COLOURS = {"pass": "brightgreen", "partial": "yellow", "fail": "red"}
MOST = 12
"""Events of a trace that the Markdown shows."""


def write(report: Report, folder: Path) -> Report:
    """Writes everything into a folder; gives the report with the traces' names and the commands that replay them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        told = with_traces(report, folder)
        _put(folder / "report.json", msgspec.json.format(msgspec.json.encode(told), indent=1))
        _put(folder / "report.md", markdown(told).encode())
        _put(folder / "badge.json", msgspec.json.encode(badge(told)))
    except OSError as error:
        raise InputError(f"--hybridkv-report:{folder}: cannot be written: {error.strerror}") from None
    return told


def with_traces(report: Report, folder: Path) -> Report:
    """One trace for each fault."""
    rules, written = dict(report.rules), dict[str, Path]()
    for rule, verdict in report.rules.items():
        found = verdict.found
        if found is None:
            continue
        if found.message not in written:
            written[found.message] = folder / f"{rule}.jsonl"
            title = msgspec.structs.replace(report.header, title=f"{rule}: {found.message}")
            lines = [msgspec.json.encode(title), *(msgspec.json.encode(event) for event in found.events)]
            _put(written[found.message], b"\n".join(lines) + b"\n")
        path = written[found.message]
        told = msgspec.structs.replace(found, trace=path.name, replay=f"hybridkv validate {path}")
        rules[rule] = msgspec.structs.replace(verdict, found=told)
    return msgspec.structs.replace(report, rules=rules)


def badge(report: Report) -> dict[str, Any]:
    """An endpoint badge: the verdict and how many rules were shown."""
    shown = sum(1 for v in report.rules.values() if v.result == "pass")
    message = f"{report.verdict}, {shown} rules"
    return {"schemaVersion": 1, "label": "hybridkv", "message": message, "color": COLOURS[report.verdict]}


def markdown(report: Report) -> str:
    """The summary for people."""
    return "\n".join(_lines(report)) + "\n"


def _lines(report: Report) -> Iterator[str]:
    statements = load_rules()
    counts = Counter(v.result for v in report.rules.values())
    yield f"## {report.engine} {report.version}: {report.verdict}\n"
    yield f"{', '.join(f'{n} {what}' for what, n in counts.most_common())} of {len(report.rules)} rules."
    yield (
        f"{report.examples} histories ({report.profile}), {report.operations:,} operations, {report.events:,} events, "
        f"{report.rows_fired:,} rows, {report.seconds:.1f} s; tables {report.table_sha256[:12]}."
    )
    yield f"Claims: {', '.join(report.capabilities) or 'nothing'}."
    if report.error:
        yield f"\n**The engine failed:** `{report.error}`\n"
        yield from _code(report.error_operations[-MOST:])
    for title, rules in (("Broken", _of(report, "fail")), ("Claimed and not shown", report.open)):
        if rules:
            yield f"\n### {title}\n"
        for rule in rules:
            yield f"* `{rule}` {statements[rule].statement}{' (known gap)' if report.rules[rule].known_gap else ''}"
    for rule in report.stale:
        yield f"\n**Stale:** `{rule}` is listed as a known gap and was not seen broken."
    told = set()
    for rule, verdict in report.rules.items():
        found = verdict.found
        if found is not None and found.message not in told:
            told.add(found.message)
            yield f"\n### {rule}: {found.message}\n"
            yield f"Seen in history {found.example}. {f'Replay: `{found.replay}`' if found.replay else ''}\n"
            yield from _code(found.events[-MOST:])
    yield "\n| rule | level | result | premises | needs |\n|---|---|---|---|---|"
    for rule, verdict in report.rules.items():
        if verdict.result != "not observable":
            yield f"| {rule} | {verdict.level} | {verdict.result} | {verdict.premises:,} | {verdict.sees} |"


def _code(lines: list[Any]) -> Iterator[str]:
    yield from ("```json", *(msgspec.json.encode(line).decode() for line in lines), "```")


def _of(report: Report, result: str) -> list[str]:
    return [rule for rule, v in report.rules.items() if v.result == result]


def reason(rule: str, verdict: RuleResult) -> str:
    """Why a rule was not shown, in one line."""
    if verdict.result == "not observable":
        level = f"an observer needs level {verdict.sees}" if verdict.sees else "no event shows it"
        return f"{rule}: not observable: {level}"
    if verdict.asked_by:
        return f"{rule}: {verdict.result}: claimed by {', '.join(verdict.asked_by)}, and nothing showed it"
    if verdict.unclaimed:
        return f"{rule}: {verdict.result}: the engine does not claim {' or '.join(verdict.unclaimed)}"
    return f"{rule}: {verdict.result}: no claimed capability asks for it"


def _put(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    temporary.replace(path)
