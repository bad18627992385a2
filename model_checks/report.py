"""A check report for people: a table per method, failures with their rules, counterexamples as changed fields."""

from collections import Counter

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hybridkv_ref.model_checks.check import Report
from hybridkv_ref.model_checks.obligations import Counterexample, Obligation

MEANING = {
    "induction": "every row keeps every invariant",
    "step": "what a row may change",
    "sum": "counters move by what they count",
    "initial": "invariants hold at first",
    "separation": "other kinds' pools stay",
    "vacuity": "each row can fire, with each bystander",
    "boundary": "each row is possible at its limits",
    "ranking": "what is owed happens",
    "drain": "without new work all is given back",
    "crash": "invariants hold after a crash",
    "equality": "proved and run-time need agree",
    "second solver": "cvc5 gives the same answer to each query",
}
TOLD = ("inference", "agreement", "explorers")  # searches of which the report prints what they found
SHOWN = 20


def methods_table(report: Report) -> Table:
    """Obligations by method and verdict."""
    table = Table(
        title=f"Proofs for any number of segments, leases and requests ({report.solver})", title_justify="left"
    )
    for name, right in (("method", False), ("says", False), ("proved", True), ("failed", True), ("unknown", True)):
        table.add_column(name, justify="right" if right else "left")
    count: Counter[tuple[str, str]] = Counter((o.method, o.status) for o in report.obligations)
    for method in sorted({m for m, _ in count}, key=lambda m: list(MEANING).index(m) if m in MEANING else 99):
        row = [str(count[method, s] or "-") for s in ("proved", "failed", "unknown")]
        table.add_row(method, MEANING.get(method, ""), *row)
    return table


def searches_table(report: Report) -> Table:
    """Searches by method; each says nothing beyond its finite instances."""
    table = Table(title="Searches of finite instances (they prove nothing beyond them)", title_justify="left")
    for name, right in (("method", False), ("as expected", True), ("not", True), ("states", True)):
        table.add_column(name, justify="right" if right else "left")
    for method in dict.fromkeys(s.method for s in report.searches):
        mine = [s for s in report.searches if s.method == method]
        good = sum(1 for s in mine if s.passed)
        states = sum(s.states for s in mine)
        table.add_row(method, str(good), str(len(mine) - good or "-"), f"{states:,}" if states else "-")
    return table


def failures(report: Report) -> list[str]:
    """One line per failure: what, where and the rules it concerns."""
    lines = [_failure(o) for o in report.obligations if o.status != "proved"]
    lines += [f"{s.method}: {s.id}: {s.status} {s.detail}{_rules(s.rules)}" for s in report.searches if not s.passed]
    return lines


def notes(report: Report) -> list[str]:
    """What searches found that are few and say more than a verdict, and what could not be run."""
    told = [s for s in report.searches if s.passed and (s.method in TOLD or s.status == "not run")]
    silent = [s for s in report.searches if s.passed and s.status == "not expressible"]
    lines = [f"{s.method}: {s.detail}" for s in told]
    if silent:
        lines.append(f"{silent[0].method}: no opinion on {len(silent)} goals: {', '.join(s.id for s in silent)}")
    return lines


def _failure(obligation: Obligation) -> str:
    verdict = "no verdict within the solver's limit" if obligation.status == "unknown" else obligation.status
    return f"{obligation.method}: {obligation.id}: {verdict}{_rules(obligation.rules)}"


def _rules(rules: tuple[str, ...]) -> str:
    return f"  [{', '.join(rules)}]" if rules else ""


def counterexample_table(example: Counterexample) -> Table:
    """The step that breaks a property, as changed fields."""
    hint = "reached by a run" if example.reachable else "may be unreachable: then an invariant is missing"
    table = Table(title=f"{example.event} breaks {example.property} ({hint})\n{example.text}", title_justify="left")
    for name in ("entity", "field", "before", "after"):
        table.add_column(name)
    for change in example.changes:
        table.add_row(change.entity, change.field, str(change.before), str(change.after))
    return table


def render(report: Report) -> RenderableType:
    """The whole report for a terminal."""
    parts: list[RenderableType] = [methods_table(report)]
    if report.searches:
        parts.append(searches_table(report))
    lines = failures(report)
    parts += [Text(line, style="red") for line in lines[:SHOWN]]
    if len(lines) > SHOWN:
        parts.append(Text(f"... and {len(lines) - SHOWN} more (--json has all)", style="red"))
    parts += [Text(line) for line in notes(report)]
    parts += [counterexample_table(c) for c in report.counterexamples[:3]]
    parts.append(Text(verdict(report), style="bold green" if report.summary.passed else "bold red"))
    return Group(*parts)


def verdict(report: Report) -> str:
    """The last line."""
    s = report.summary
    cached = sum(1 for o in report.obligations if o.cached)
    word = "proved" if s.passed else "NOT proved"
    return (
        f"{word}: {s.proved:,} of {s.obligations:,} obligations ({cached:,} cached), {s.witnesses} witnesses"
        f" ({s.witnesses_missing} missing), {s.searches - s.searches_failed} of {s.searches} searches as expected,"
        f" {s.seconds:.1f} s, tables {report.table_sha256[:12]}"
    )


def markdown(report: Report) -> str:
    """The report for a job summary."""
    from io import StringIO

    lines = ["# hybridkv check", "", verdict(report), "", "| method | proved | failed | unknown |", "|---|---|---|---|"]
    count: Counter[tuple[str, str]] = Counter((o.method, o.status) for o in report.obligations)
    for method in sorted({m for m, _ in count}):
        lines.append(
            f"| {method} | " + " | ".join(str(count[method, s]) for s in ("proved", "failed", "unknown")) + " |"
        )
    lines += ["", "| search | as expected | not |", "|---|---|---|"]
    for method in dict.fromkeys(s.method for s in report.searches):
        mine = [s for s in report.searches if s.method == method]
        good = sum(1 for s in mine if s.passed)
        lines.append(f"| {method} | {good} | {len(mine) - good} |")
    lines += ["", *(f"* {line}" for line in (*failures(report), *notes(report)))]
    for example in report.counterexamples[:SHOWN]:
        out = StringIO()
        Console(file=out, width=110).print(counterexample_table(example))
        lines += ["", "```", out.getvalue().rstrip(), "```"]
    return "\n".join(lines).rstrip() + "\n"
