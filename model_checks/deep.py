"""What ``hybridkv check --deep`` adds: longer, and none of it trusts the generator of the other checks.

* the obligations that a plain run skips because the row changes nothing they read,
* every mutant,
* the ledger: each assumption with a configuration that violates it, and that must fail,
* random states on which Python, Z3, the explorer's columns and (where Spin is installed) a generated Promela model must
  agree on every guard and every value after every row.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from hybridkv_ref.model_checks.agreement import ColumnRows, Evaluator, PromelaRows, PythonRows, Z3Rows, agree
from hybridkv_ref.model_checks.frames import Assumptions
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.ledger import violated
from hybridkv_ref.model_checks.mutants import mutants
from hybridkv_ref.model_checks.mutation import Killer
from hybridkv_ref.model_checks.obligations import Search, TaskResult
from hybridkv_ref.model_checks.spin import missing
from hybridkv_ref.spec_files import Spec
from hybridkv_ref.tables import Tables

SAMPLES = 100_000
SEED = 20_260_101
MUTANTS_PER_TASK = 40


def deep_names(spec: Spec, tables: Tables) -> Iterator[str]:
    """The tasks, long ones first."""
    yield from ("deep:agreement", "deep:ledger")
    for begin in range(0, len(list(mutants(spec, tables))), MUTANTS_PER_TASK):
        yield f"deep:mutants:{begin}"
    yield from (f"deep:skipped:{event.id}" for event in tables.events)


def run_deep(name: str, spec: Spec, tables: Tables, base: Assumptions, directory: Path) -> TaskResult:
    """One task; ``name`` is without ``deep:``."""
    what, _, rest = name.partition(":")
    if what == "skipped":
        return Task(tables, tables.event(rest), base).run_skipped()
    if what == "ledger":
        return TaskResult(searches=list(violated(tables, directory)))
    if what == "mutants":
        return TaskResult(searches=[_mutants(spec, tables, int(rest))])
    return TaskResult(searches=[_agreement(tables)])


def _mutants(spec: Spec, tables: Tables, begin: int) -> Search:
    """One slice of the mutants as one record."""
    chosen = list(mutants(spec, tables))[begin : begin + MUTANTS_PER_TASK]
    killer = Killer(spec)
    verdicts = [killer.run(mutant) for mutant in chosen]
    count = Counter(v.status for v in verdicts)
    alive = [v.mutant for v in verdicts if v.status == "survived"]
    detail = ", ".join(f"{n} {s}" for s, n in sorted(count.items())) + "".join(f"; survived: {m}" for m in alive)
    label = f"mutants {begin} to {begin + len(chosen) - 1}"
    return Search(label, "mutation", "fails" if alive else "holds", not alive, detail=detail)


def _agreement(tables: Tables) -> Search:
    """Random states through every evaluator there is."""
    evaluators: list[Evaluator] = [PythonRows(tables), Z3Rows(tables), ColumnRows(tables)]
    absent = missing()
    if not absent:
        evaluators.append(PromelaRows(tables))
    found = agree(tables, SAMPLES, SEED, evaluators)
    names = ", ".join(e.name for e in evaluators) + (f" (no Promela: {absent})" if absent else "")
    status = "fails" if found.disagreements else "holds"
    detail = f"{names}; {len(found.fired)} of {len(tables.events)} rows fired"
    detail += "".join(f"; {d}" for d in found.disagreements[:3])
    passed = not found.disagreements and len(found.fired) == len(tables.events)
    return Search("random states", "agreement", status, passed, states=found.samples, detail=detail)
