"""The tasks of a run by name: what there is to prove, and to search, about some tables.

A task is a row over one choice of kinds, a liveness claim, or one of the wholes (sums and first states, a crash, the
recovery entries, a search).  Solvers are imported only where a task runs, so that naming tasks is cheap.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hybridkv_ref.model_checks.obligations import TaskResult
from hybridkv_ref.spec_files import Spec
from hybridkv_ref.tables import Tables

if TYPE_CHECKING:
    from hybridkv_ref.model_checks.frames import Assumptions

Progress = Callable[[int, int], None]
WHOLES = ("crash", "base", "recovery")
SEARCHES = ("search:finite", "search:threads")


def proof_names(tables: Tables, kind: str = "") -> Iterator[str]:
    """Every proof; ``kind`` keeps the rows and claims in which that kind takes part."""
    yield from () if kind else WHOLES
    for claim in tables.responses:
        if not kind or kind in claim.kinds.values():
            yield f"claim:{claim.id}"
    for event in tables.events:
        if not kind or kind in event.kinds.values():
            yield f"row:{event.id}"


def task_names(tables: Tables, kind: str = "") -> Iterator[str]:
    """Every task of a plain run, long ones first; without the searches for one kind alone."""
    yield from () if kind else SEARCHES
    yield from proof_names(tables, kind)


def prove(name: str, spec: Spec, tables: Tables, base: "Assumptions") -> TaskResult:
    """One proof, in this process; KeyError for a name that is none."""
    from hybridkv_ref.model_checks.base import prove_base
    from hybridkv_ref.model_checks.crash import Crash
    from hybridkv_ref.model_checks.induction import Task
    from hybridkv_ref.model_checks.liveness import Claim
    from hybridkv_ref.model_checks.recovery_equality import prove_equality

    what, _, rest = name.partition(":")
    if what == "row":
        return Task(tables, tables.event(rest), base).run()
    if what == "claim":
        return Claim(tables, next(c for c in tables.responses if c.id == rest), base).run()
    if what == "base":
        return prove_base(tables, base)
    if what == "crash":
        return Crash(tables, base).run()
    if what == "recovery":
        return TaskResult(obligations=prove_equality(spec))
    raise KeyError(name)


def search(name: str, tables: Tables, base: "Assumptions", directory: Path) -> TaskResult:
    """One of SEARCHES, in this process; ``base`` proves that a conjunct which is never alone in refusing is implied."""
    from hybridkv_ref.model_checks.finite import search_instances
    from hybridkv_ref.model_checks.interleave import run as run_threads
    from hybridkv_ref.model_checks.mutation import implied

    if name == "search:threads":
        return TaskResult(searches=[r.search() for r in run_threads(tables, directory)])
    if name != "search:finite":
        raise KeyError(name)
    return search_instances(tables, directory, lambda event, index: implied(tables, base, event, index))
