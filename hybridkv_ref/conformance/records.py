"""What a run found, as records: the report, and what workers of one run tell each other."""

from typing import Any, Literal

import msgspec

from hybridkv_ref.events import Header

SCHEMA = "hybridkv.conformance/1"

Result = Literal["pass", "fail", "not exercised", "not observable", "inconclusive"]
Outcome = Literal["pass", "partial", "fail"]


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """The first refusal that names a rule: in which history, what refused it, and the shortest way there.

    ``operations`` lead the engine there; ``events`` are those that the oracle still refuses, ``trace`` a file of them.
    """

    example: int
    seconds: float
    row: str
    guard: str
    segment: str
    values: dict[str, int | str | bool]
    message: str
    operations: list[Any]
    events: list[Any]
    trace: str = ""
    replay: str = ""


class RuleResult(msgspec.Struct, frozen=True, kw_only=True):
    """One rule.  ``premises``: how often what it speaks of happened; ``sees``: the level at which it can be observed.

    ``asked_by``: claimed capabilities that have to exercise it; ``unclaimed``: others that would.
    """

    level: str
    result: Result
    premises: int
    sees: str
    asked_by: list[str]
    unclaimed: list[str]
    known_gap: bool = False
    found: Found | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """A run: ``partial`` where a MUST of a claimed capability never happened, ``fail`` where a rule broke.

    ``open`` are the rules that make it partial, ``stale`` known gaps that did not show.  ``error`` is what the engine
    raised, with the operations that led to it.
    """

    schema: str
    engine: str
    version: str
    capabilities: list[str]
    profile: str
    table_sha256: str
    verdict: Outcome
    examples: int
    operations: int
    events: int
    rows_fired: int
    seconds: float
    rules: dict[str, RuleResult]
    open: list[str]
    known_gaps: list[str]
    stale: list[str]
    header: Header
    error: str = ""
    error_operations: list[Any] = []


def schema() -> dict[str, Any]:
    """The JSON Schema of a report."""
    (report,), components = msgspec.json.schema_components([Report], ref_template="#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **report, "$defs": components}
