"""All mutants over all cores, and the table of killers."""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from pathlib import Path

import msgspec
from rich.table import Table

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build, table_hash
from hybridkv_ref.model_checks.mutants import Mutant, mutants
from hybridkv_ref.model_checks.mutation import Killer, Verdict
from hybridkv_ref.spec_files import read_spec

SCHEMA = "hybridkv.mutate/1"
CHUNK = 8


class MutationSummary(msgspec.Struct):
    """Totals; ``lint`` mutants are refused by the loader and count neither way."""

    mutants: int
    killed: int
    equivalent: int
    lint: int
    survived: int
    seconds: float

    @property
    def passed(self) -> bool:
        """Nothing survived."""
        return not self.survived


class MutationReport(msgspec.Struct):
    """All verdicts."""

    schema: str
    table_sha256: str
    summary: MutationSummary
    verdicts: list[Verdict]


@lru_cache(maxsize=1)
def _killer(directory: str) -> Killer:
    return Killer(read_spec(Path(directory)))


def _run(directory: str, chunk: list[Mutant]) -> list[Verdict]:
    killer = _killer(directory)
    return [killer.run(mutant) for mutant in chunk]


def mutate(
    directory: Path, only: str = "", jobs: int = 0, progress: Callable[[int, int], None] | None = None
) -> MutationReport:
    """Runs every mutant whose name contains ``only``; InputError for unreadable tables or when none fits."""
    begun = time.perf_counter()
    spec = read_spec(directory)
    chosen = [m for m in mutants(spec, build(spec)) if only in m.id]
    if not chosen:
        raise InputError(f"--row {only}: no mutant has this in its name")
    chunks = [chosen[i : i + CHUNK] for i in range(0, len(chosen), CHUNK)]
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    verdicts: list[Verdict] = []
    with ProcessPoolExecutor(jobs or os.cpu_count() or 1, mp_context=multiprocessing.get_context(method)) as pool:
        for future in [pool.submit(_run, str(directory), chunk) for chunk in chunks]:
            verdicts += future.result()
            if progress:
                progress(len(verdicts), len(chosen))
    count = Counter(v.status for v in verdicts)
    summary = MutationSummary(
        len(verdicts),
        count["killed"],
        count["equivalent"],
        count["lint"],
        count["survived"],
        round(time.perf_counter() - begun, 1),
    )
    return MutationReport(SCHEMA, table_hash(spec), summary, verdicts)


def mutation_table(report: MutationReport) -> Table:
    """Killers by method, then whatever is not killed."""
    s = report.summary
    title = (
        f"{s.mutants} mutants: {s.killed} killed, {s.equivalent} proved equivalent, {s.lint} refused by the loader,"
        f" {s.survived} survived ({s.seconds} s)"
    )
    table = Table(title=title, title_justify="left")
    for name in ("verdict", "by", "mutants", "most frequent killers"):
        table.add_column(name, justify="right" if name == "mutants" else "left")
    for (status, method), number in Counter((v.status, v.method) for v in report.verdicts).most_common():
        killers = Counter(
            v.killer.partition("<")[0] for v in report.verdicts if (v.status, v.method) == (status, method)
        )
        common = ", ".join(f"{k} {n}" for k, n in killers.most_common(3) if k)
        table.add_row(status, method, str(number), common)
    for verdict in report.verdicts:
        if verdict.status == "survived":
            table.add_row("survived", "", "", verdict.mutant, style="red")
    return table
