"""What driving a real engine showed, as records, and the report of it: JSON and Markdown."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from hybridkv_ref.events import Header
from hybridkv_ref.oracle_coverage import Coverage, RuleVerdict, merged
from hybridkv_ref.oracle_tables import oracle_hash
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.rules import load_rules

SCHEMA = "hybridkv.engine/1"

Outcome = Literal["pass", "partial", "fail"]


class Refused(msgspec.Struct, frozen=True, kw_only=True):
    """The refusal that ended a run: rules, message, and the shortest part of its events that is still refused."""

    rules: tuple[str, ...]
    message: str
    events: list[Any]


class Played(msgspec.Struct, frozen=True, kw_only=True):
    """One run. ``lookups`` and the tokens of hits are those that were compared with the longest hit.

    ``longer`` and ``shorter``: lookups that differ from it. ``lost``: tokens given up, by the groups that cost them.
    ``missing``: what this release cannot show. ``skipped``: events that could not be judged. ``error``: what the
    engine raised.
    """

    model: str
    how: str
    seed: int
    steps: int
    events: int
    lookups: int
    hit_tokens: int
    best_tokens: int
    longer: int
    shorter: int
    lost: dict[str, int]
    stats: dict[str, int]
    missing: dict[str, list[str]]
    skipped: int
    seconds: float
    header: Header
    refused: Refused | None = None
    error: str = ""

    @property
    def failed(self) -> bool:
        """Something was refused, a hit was too long, or the engine raised."""
        return bool(self.refused or self.longer or self.error)


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """All runs. ``open``: rules that the claims ask for and nothing showed; these or a missing feature: ``partial``."""

    schema: str
    engine: str
    version: str
    table_sha256: str
    verdict: Outcome
    capabilities: tuple[str, ...]
    steps: int
    events: int
    rows_fired: int
    seconds: float
    runs: list[Played]
    rules: dict[str, RuleVerdict]
    open: tuple[str, ...]


def report(runs: Sequence[Played], shown: Sequence[Coverage]) -> EngineReport:
    """The report of runs of one engine, at least one, and of what each showed."""
    header = runs[0].header
    coverage = merged(shown, header, SPEC_DIR)
    short = coverage.open or any(r.missing or r.skipped for r in runs)
    return EngineReport(
        schema=SCHEMA,
        engine=header.engine.name,
        version=header.engine.version,
        table_sha256=oracle_hash(),
        verdict="fail" if any(r.failed for r in runs) else "partial" if short else "pass",
        capabilities=header.capabilities,
        steps=sum(r.steps for r in runs),
        events=sum(r.events for r in runs),
        rows_fired=coverage.rows_fired,
        seconds=round(sum(r.seconds for r in runs), 1),
        runs=list(runs),
        rules=coverage.rules,
        open=coverage.open,
    )


def traces(found: EngineReport) -> Iterator[tuple[str, bytes]]:
    """Name and content of a trace for each run that something was refused in."""
    for number, run in enumerate(found.runs, 1):
        if run.refused:
            title = msgspec.structs.replace(run.header, title=run.refused.message)
            lines = [msgspec.json.encode(line) for line in (title, *run.refused.events)]
            yield f"{number}-{run.refused.rules[0]}.jsonl", b"\n".join(lines) + b"\n"


def markdown(found: EngineReport) -> str:
    """The report for people."""
    return "\n".join(_lines(found)) + "\n"


def _lines(found: EngineReport) -> Iterator[str]:
    yield f"## {found.engine} {found.version}: {found.verdict}\n"
    yield (
        f"{len(found.runs)} runs, {found.steps:,} steps, {found.events:,} events, {found.rows_fired:,} rows, "
        f"{found.seconds:.0f} s; tables {found.table_sha256[:12]}."
    )
    yield f"Claims: {', '.join(found.capabilities)}."
    for feature, names in {f: m for r in found.runs for f, m in r.missing.items()}.items():
        yield f"\nThis release does not show {feature}: no `{'`, `'.join(names)}`."
    yield "\n### Hits against the longest one over what the engine had published\n"
    yield "*Sound*: none was longer. *Complete*: none was shorter; else tokens given up, by groups that cost them.\n"
    yield "| model | driven | steps | events | lookups | tokens hit | of | sound | complete |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for r in found.runs:
        lost = "; ".join(f"{tokens:,} by {groups}" for groups, tokens in r.lost.items())
        cells = (r.model, r.how, r.steps, r.events, r.lookups, r.hit_tokens, r.best_tokens)
        shown = (f"{c:,}" if isinstance(c, int) else c for c in cells)
        yield f"| {' | '.join(shown)} | {'no' if r.longer else 'yes'} | {lost or 'yes'} |"
    for r in found.runs:
        if r.failed:
            yield f"\n### {r.model}, {r.how}, seed {r.seed}, step {r.steps}\n"
        if r.error:
            yield f"The engine raised: `{r.error}`"
        if r.refused:
            yield f"{r.refused.message} ({', '.join(r.refused.rules)})\n"
            yield from ("```json", *(msgspec.json.encode(e).decode() for e in r.refused.events[-12:]), "```")
    levels = load_rules()
    yield "\n### Rules\n"
    if found.open:
        yield f"Claimed and not shown: {', '.join(found.open)}.\n"
    yield "| rule | level | result | premises |\n|---|---|---|---|"
    for rule, verdict in found.rules.items():
        if verdict.result != "not observable":
            yield f"| {rule} | {levels[rule].level} | {verdict.result} | {verdict.premises:,} |"
    hidden = sum(1 for v in found.rules.values() if v.result == "not observable")
    yield f"\n{hidden} rules cannot be seen from here."
