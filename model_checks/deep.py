"""What ``hybridkv check --deep`` adds: longer, and none of it trusts the generator of the other checks.

* the obligations that a plain run skips because the row changes nothing they read,
* every mutant,
* the ledger: each assumption with a configuration that violates it, and that must fail,
* the same queries to another solver (cvc5, where it is installed), and to Spacer, which finds invariants of its own,
* invariants inferred from templates, without those of the tables: how many of these were not needed,
* faults planted in the generator, each with a probe that must see it,
* composed instances of millions of states, counted by our search, by Spin and by Rumur (where these are installed),
* random states on which Python, Z3, the explorer's columns and (where Spin is installed) a generated Promela model must
  agree on every guard and every value after every row.
"""

from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

from hybridkv_ref.model_checks import spin
from hybridkv_ref.model_checks.agreement import ColumnRows, Evaluator, PromelaRows, PythonRows, Z3Rows, agree
from hybridkv_ref.model_checks.cvc5_opinion import beside_cvc5
from hybridkv_ref.model_checks.cvc5_opinion import installed as cvc5_installed
from hybridkv_ref.model_checks.explore import explore
from hybridkv_ref.model_checks.explorers import EXPLORERS, MOST_STATES, agrees
from hybridkv_ref.model_checks.frames import Assumptions, subset_lemmas
from hybridkv_ref.model_checks.generator_probes import read_probes
from hybridkv_ref.model_checks.houdini import InferResult, infer
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.instances import FILE as INSTANCES
from hybridkv_ref.model_checks.instances import read_instances
from hybridkv_ref.model_checks.ledger import violated
from hybridkv_ref.model_checks.mutants import mutants
from hybridkv_ref.model_checks.mutation import Killer
from hybridkv_ref.model_checks.obligations import Search, TaskResult
from hybridkv_ref.model_checks.planted_faults import seen
from hybridkv_ref.model_checks.spacer import goals, opinion
from hybridkv_ref.model_checks.tasks import proof_names, prove
from hybridkv_ref.spec_files import Spec
from hybridkv_ref.tables import Tables

SAMPLES = 100_000
SEED = 20_260_101
MUTANTS_PER_TASK = 40
MIN_HELPERS = 12  # helper invariants, by name, that inference must find by itself
INFER, LEMMAS = "deep:infer", "lemmas"
COMPOSED = "instances_deep.toml"


def deep_names(spec: Spec, tables: Tables, directory: Path) -> Iterator[str]:
    """The tasks, long ones first."""
    yield from (INFER, "deep:agreement", "deep:ledger")
    yield from (f"deep:composed:{i.name}" for i in read_instances(tables, directory / COMPOSED)[0])
    for begin in range(0, len(list(mutants(spec, tables))), MUTANTS_PER_TASK):
        yield f"deep:mutants:{begin}"
    yield from (f"deep:spacer:{goal.id}" for goal in goals(tables))
    yield from (f"deep:planted:{name}" for name in read_probes(directory))
    yield from (f"deep:cvc5:{name}" for name in ((LEMMAS, *proof_names(tables)) if cvc5_installed() else ("",)))
    yield from (f"deep:skipped:{event.id}" for event in tables.events)


def second_solver() -> str:
    """The solver that repeats the queries, and its version."""
    return f"cvc5 {version('cvc5')}" if cvc5_installed() else "no cvc5"


def run_deep(name: str, spec: Spec, tables: Tables, base: Assumptions, directory: Path) -> TaskResult:
    """One task; ``name`` is without ``deep:``."""
    what, _, rest = name.partition(":")
    match what:
        case "skipped":
            return Task(tables, tables.event(rest), base).run_skipped()
        case "cvc5":
            return _cvc5(rest, spec, tables, base)
        case "ledger":
            return TaskResult(searches=list(violated(tables, directory)))
        case "planted":
            return TaskResult(searches=[seen(spec, tables, rest, read_probes(directory)[rest])])
        case "spacer":
            return TaskResult(searches=[opinion(tables, next(g for g in goals(tables) if g.id == rest))])
        case "mutants":
            return TaskResult(searches=[_mutants(spec, tables, int(rest))])
        case "composed":
            return TaskResult(searches=list(_composed(tables, directory, rest)))
        case "infer":
            return TaskResult(searches=[_inference(tables, directory)])
        case "agreement":
            return TaskResult(searches=[_agreement(tables)])
    raise KeyError(name)


def _cvc5(name: str, spec: Spec, tables: Tables, base: Assumptions) -> TaskResult:
    """cvc5's word on every query of one proof; without cvc5, one record that says so."""
    if not name:
        reason = "cvc5 is not installed: pip install 'hybridkv-ref[second-opinion]'"
        return TaskResult(searches=[Search("cvc5", "second solver", "not run", True, detail=reason)])
    subset_lemmas(tables)  # asked before, so that its queries fall into no task but their own
    if name == LEMMAS:
        return TaskResult(obligations=beside_cvc5(name, lambda: subset_lemmas.__wrapped__(tables)))
    return TaskResult(obligations=beside_cvc5(name, lambda: prove(name, spec, tables, base)))


def _composed(tables: Tables, directory: Path, name: str) -> Iterator[Search]:
    """One composed instance, counted by every explorer that there is: ours, Spin, Rumur."""
    instance = next(i for i in read_instances(tables, directory / COMPOSED)[0] if i.name == name)
    graph = explore(tables, instance, MOST_STATES)
    for tool in EXPLORERS:
        label, bound = f"{name} by {tool.name}", f"the instance {name}"
        if absent := tool.missing():
            yield Search(label, "explorers", "not run", True, bound, detail=f"no {tool.name}: {absent}")
            continue
        wanted, run = tool.wanted(graph), tool.count(tool.model(graph).source)
        same = agrees(graph, run, wanted)
        detail = f"{tool.name} {run.states:,} states and {run.transitions:,} transitions"
        detail += f", should be {wanted[0]:,} and {wanted[1]:,}"
        detail += f"; {run.error}" if run.error else ""
        yield Search(label, "explorers", "holds" if same else "differs", same, bound, states=run.states, detail=detail)


def helpers_found(tables: Tables, result: InferResult) -> tuple[str, ...]:
    """The helper invariants that were inferred for some kind, by the name under which they are written."""
    helpers = {p.id for p in tables.forms("invariant") if p.role == "helper"}
    return tuple(dict.fromkeys(i.partition("<")[0] for i in result.implied if i in helpers))


def _inference(tables: Tables, directory: Path) -> Search:
    """What templates alone give: the invariants of the tables that follow from them."""
    result = infer(tables, read_instances(tables, directory / INSTANCES)[0])
    names = helpers_found(tables, result)
    passed = result.sound and len(names) >= MIN_HELPERS
    detail = (
        f"{result.candidates:,} candidates, {result.dropped:,} dropped in {result.rounds} rounds; implied:"
        f" {len(result.implied)} of {len(result.implied) + len(result.missed)} invariants, among them the helpers"
        f" {', '.join(names)}"
    )
    return Search("invariants from templates", "inference", "holds" if passed else "fails", passed, detail=detail)


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
    absent = spin.missing()
    if not absent:
        evaluators.append(PromelaRows(tables))
    found = agree(tables, SAMPLES, SEED, evaluators)
    names = ", ".join(e.name for e in evaluators) + (f" (no Promela: {absent})" if absent else "")
    status = "fails" if found.disagreements else "holds"
    detail = f"{names}; {len(found.fired)} of {len(tables.events)} rows fired"
    detail += "".join(f"; {d}" for d in found.disagreements[:3])
    passed = not found.disagreements and len(found.fired) == len(tables.events)
    return Search("random states", "agreement", status, passed, states=found.samples, detail=detail)
