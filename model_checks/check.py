"""``hybridkv check``: every proof and search, as independent tasks over all cores, with verdicts kept between runs.

A task's name is its cache key.  The parent never imports the solver, so that a run whose verdicts are all cached is
fast.
"""

import multiprocessing
import os
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build
from hybridkv_ref.model_checks.cache import Cache
from hybridkv_ref.model_checks.obligations import Counterexample, Obligation, Search, TaskResult
from hybridkv_ref.model_checks.tasks import Progress, prove, search, task_names
from hybridkv_ref.needs import FILE as NEEDS_FILE
from hybridkv_ref.needs import read_needs
from hybridkv_ref.rules import load_rules
from hybridkv_ref.spec_files import Spec, read_spec
from hybridkv_ref.tables import Tables

SCHEMA = "hybridkv.check/1"
OPTIONS = "QF_LIA timeout=10s"
EVENTS_PER_CHUNK = 3


class Summary(msgspec.Struct):
    """The counts of a run."""

    obligations: int
    proved: int
    failed: int
    unknown: int
    witnesses: int
    witnesses_missing: int
    searches: int
    searches_failed: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether everything is as it must be; unknown is a failure."""
        return not (self.failed or self.unknown or self.witnesses_missing or self.searches_failed)


class Report(msgspec.Struct):
    """All of a run, as ``--json`` writes it."""

    schema: str
    package_version: str
    table_sha256: str
    solver: str
    summary: Summary
    obligations: list[Obligation]
    searches: list[Search]
    counterexamples: list[Counterexample]


@lru_cache(maxsize=1)
def _worker(directory: str) -> tuple[Spec, Tables, object]:
    """What every task of a worker process shares: the spec, its tables and the solver's terms for them."""
    from hybridkv_ref.model_checks.frames import Assumptions

    spec = read_spec(Path(directory))
    tables = build(spec)
    return spec, tables, Assumptions(tables)


def run_task(directory: str, name: str) -> TaskResult:
    """One task, in this process."""
    from hybridkv_ref.model_checks.frames import Assumptions

    spec, tables, terms = _worker(directory)
    base = terms if isinstance(terms, Assumptions) else Assumptions(tables)
    what, _, rest = name.partition(":")
    if what == "deep":
        from hybridkv_ref.model_checks.deep import run_deep

        return run_deep(rest, spec, tables, base, Path(directory))
    if what == "search":
        return search(name, tables, base, Path(directory))
    return prove(name, spec, tables, base)


def _run_chunk(directory: str, names: list[str]) -> list[tuple[str, TaskResult]]:
    return [(name, run_task(directory, name)) for name in names]


def _chunks(names: list[str]) -> Iterator[list[str]]:
    """Long tasks alone, rows a few at a time."""
    yield from ([n] for n in names if not n.startswith("row:"))
    rows = [n for n in names if n.startswith("row:")]
    for begin in range(0, len(rows), EVENTS_PER_CHUNK):
        yield rows[begin : begin + EVENTS_PER_CHUNK]


def check(
    directory: Path,
    kind: str = "",
    use_cache: bool = True,
    jobs: int = 0,
    progress: Progress | None = None,
    deep: bool = False,
    infer: bool = False,
) -> Report:
    """Runs every task that is not cached.

    ``jobs`` 0 means one process per core; ``deep`` adds what ``model_checks.deep`` lists, ``infer`` of that only the
    inference of invariants. InputError for unreadable tables.
    """
    begun = time.perf_counter()
    spec = read_spec(directory)
    tables = build(spec)
    if kind and kind not in tables.kinds:
        raise InputError(f"--kind {kind}: no such kind; there are {', '.join(tables.kinds)}")
    cited_rules_exist(tables, directory)
    cache = Cache(searched_hash(tables, directory), OPTIONS)
    if use_cache:
        cache.read()
    names, solver = list(task_names(tables, kind)), cache.solver
    if deep or infer:
        from hybridkv_ref.model_checks.deep import INFER, deep_names, second_solver

        names += deep_names(spec, tables, directory) if deep else [INFER]
        solver += f", {second_solver()}" if deep else ""
    known = {n: _from_cache(cache.entries[n]) for n in names if n in cache.entries}
    missing = [n for n in names if n not in known]
    if missing:
        for name, result in _run(directory, missing, jobs, len(known), progress):
            known[name] = result
            cache.entries[name] = result
        if use_cache:
            cache.write()
    return _report(tables, solver, [known[n] for n in names], time.perf_counter() - begun)


def _run(
    directory: Path, names: list[str], jobs: int, done: int, progress: Progress | None
) -> Iterator[tuple[str, TaskResult]]:
    total = done + len(names)
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(jobs or os.cpu_count() or 1, mp_context=context) as pool:
        running = [pool.submit(_run_chunk, str(directory), chunk) for chunk in _chunks(names)]
        for future in running:
            for pair in future.result():
                done += 1
                yield pair
            if progress:
                progress(done, total)


def _from_cache(result: TaskResult) -> TaskResult:
    for obligation in result.obligations:
        obligation.cached = True
    return result


def searched_hash(tables: Tables, directory: Path) -> str:
    """The table hash together with the data that only the searches read."""
    parts = [tables.sha256]
    for name in ("instances.toml", "interleavings.toml", "assumptions.toml", "planted_faults.toml"):
        path = directory / name
        parts.append(path.read_text(encoding="utf-8", errors="replace") if path.exists() else "")
    return "\n".join(parts)


def cited_rules_exist(tables: Tables, directory: Path) -> None:
    """Every rule ID that a table cites is in rules.toml."""
    known: Mapping[str, object] = load_rules(directory)
    cited = [(e.file, e.id, e.rules) for e in tables.events]
    cited += [(p.place, p.id, p.rules) for p in tables.properties]
    cited += [(r.id, r.id, r.rules) for r in tables.responses]
    cited += [(NEEDS_FILE, f"need.{n.kind}", n.rules) for n in read_needs(read_spec(directory).recovery)[1].values()]
    for where, name, rules in cited:
        for rule in rules:
            if rule not in known:
                raise InputError(f"{where}: {name}: cites '{rule}', which rules.toml does not have")


def _report(tables: Tables, solver: str, results: list[TaskResult], seconds: float) -> Report:
    obligations = [o for r in results for o in r.obligations]
    searches = [s for r in results for s in r.searches]
    count = {status: sum(1 for o in obligations if o.status == status) for status in ("proved", "failed", "unknown")}
    witnesses = [s for s in searches if s.method == "witness"]
    others = [s for s in searches if s.method != "witness"]
    summary = Summary(
        len(obligations),
        count["proved"],
        count["failed"],
        count["unknown"],
        sum(1 for s in witnesses if s.passed),
        sum(1 for s in witnesses if not s.passed),
        len(others),
        sum(1 for s in others if not s.passed),
        round(seconds, 2),
    )
    counterexamples = [c for r in results for c in r.counterexamples]
    return Report(
        SCHEMA, version("hybridkv-ref"), tables.sha256, solver, summary, obligations, searches, counterexamples
    )
