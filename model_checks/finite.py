"""All searches of the finite instances, as records of a check: what ``hybridkv check`` runs beside the proofs."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hybridkv_ref.errors import InputError
from hybridkv_ref.model_checks.explore import Graph, ScriptRefusedError, TraceStep, explore
from hybridkv_ref.model_checks.fair_cycles import fair_cycles, stuck
from hybridkv_ref.model_checks.instances import FILE, Instance, PinSpec, read_instances
from hybridkv_ref.model_checks.obligations import Change, Counterexample, Search, TaskResult
from hybridkv_ref.model_checks.second_opinion import second_opinion
from hybridkv_ref.model_checks.space import Compiled
from hybridkv_ref.model_checks.witnesses import Witnesses, size_difference
from hybridkv_ref.tables import Event, Tables

# Twice the largest instance: far below what memory holds, far above what a sound change of a row adds.
LIMIT = 150_000
Implied = Callable[[Event, int], bool]


def search_instances(tables: Tables, directory: Path, implied: Implied) -> TaskResult:
    """Explores every instance of ``directory / instances.toml`` and judges what was found; InputError for a bad file.

    ``implied`` proves a guard conjunct from the others and the invariants, where it was never seen as the only false
    one.
    """
    instances, pinned = read_instances(tables, directory / FILE)
    return _Searches(tables, pinned).run(instances, implied)


class LostWitness:
    """For mutation: what changed rows no longer reach, or what fails in the instances in which they take part.

    Called with the changed tables and the ids of the changed events, it names a property or claim that fails, a script
    that is refused, or a row, stage or ``sometimes`` that no instance reaches any more; empty if there is none.  Tables
    that no search can end on, and searches cut short, give no verdict.
    """

    def __init__(self, tables: Tables, directory: Path) -> None:
        self.tables = tables
        self.instances = read_instances(tables, directory / FILE)[0]
        self.compiled = Compiled(tables)
        self.known: dict[str, set[tuple[str, str]]] = {}

    def __call__(self, tables: Tables, events: Iterable[str]) -> str:
        """The killer's name, or nothing."""
        ids, compiled = set(events), Compiled(tables)
        changed = [e for e in tables.events if e.id in ids]
        before: set[tuple[str, str]] = set()
        after: set[tuple[str, str]] = set()
        for instance in self.instances:
            before |= self.before(instance)
            if not any(True for e in changed for _ in instance.bindings(e)):
                after |= self.before(instance)
                continue
            try:
                graph = explore(tables, instance, LIMIT, compiled)
            except ScriptRefusedError as refused:
                return str(refused)
            except InputError:
                return ""
            if graph.truncated:
                return ""
            failed = [v.property for v in second_opinion(graph).violations]
            failed += [c.claim for c in fair_cycles(graph).lassos]
            if failed:
                return failed[0]
            after |= _reached(tables, graph)
        lost = sorted(before - after, key=lambda w: (w[1] not in ids, w))
        return " ".join(lost[0]) if lost else ""

    def before(self, instance: Instance) -> set[tuple[str, str]]:
        """What an instance reaches under the unchanged tables."""
        if instance.name not in self.known:
            graph = explore(self.tables, instance, LIMIT, self.compiled)
            self.known[instance.name] = _reached(self.tables, graph)
        return self.known[instance.name]


def _reached(tables: Tables, graph: Graph) -> set[tuple[str, str]]:
    witnesses = Witnesses(tables)
    witnesses.add(graph)
    return set(witnesses.found)


class _Searches:
    def __init__(self, tables: Tables, pinned: dict[str, PinSpec]) -> None:
        self.tables, self.pinned = tables, pinned
        self.out = TaskResult()
        self.witnesses = Witnesses(tables)
        self.claims: dict[str, list[str]] = {c.id: [] for c in tables.responses}
        self.judged: set[tuple[str, str]] = set()

    def run(self, instances: list[Instance], implied: Implied) -> TaskResult:
        compiled = Compiled(self.tables)
        for instance in instances:
            graph = explore(self.tables, instance, LIMIT, compiled)
            if graph.truncated:
                detail = f"more than {LIMIT} states: no verdict"
                self.out.searches.append(
                    Search(instance.name, "exploration", "unknown", False, instance.name, detail=detail)
                )
                continue
            self.explored(graph)
            self.witnesses.add(graph)
            self.lively(graph)
        self.out.searches += [*self.reached(), *self.conjuncts(implied), *self.ended()]
        return self.out

    def explored(self, graph: Graph) -> None:
        """Invariants and step properties on one graph, and its size."""
        opinion, name = second_opinion(graph), graph.instance.name
        failed = bool(opinion.violations)
        detail = f"{graph.edges} edges, {opinion.checked} properties" + (
            f"; {graph.instance.restriction}" if graph.instance.restriction else ""
        )
        depth = int(graph.depth.max())
        self.out.searches.append(
            Search(name, "exploration", "fails" if failed else "holds", not failed, name, depth, graph.states, detail)
        )
        rules = {p.id: p.rules for p in self.tables.properties}
        for violation in opinion.violations:
            who = f"{violation.property} of {', '.join(violation.entities) or 'the pools'}"
            self.counterexample(
                f"{name}/{violation.property}", violation.property, rules[violation.property], who, violation.trace
            )
        difference = size_difference(graph, self.pinned)
        if difference:
            self.out.searches.append(Search(name, "size", "differs", True, name, depth, graph.states, difference))

    def lively(self, graph: Graph) -> None:
        """Fair cycles, trap stages and dead states of one graph."""
        name, found = graph.instance.name, fair_cycles(graph)
        rules = {c.id: c.rules for c in self.tables.responses}
        for claim, _ in found.checked:
            if name not in self.claims[claim]:
                self.claims[claim].append(name)
        for lasso in found.lassos:
            self.out.searches.append(Search(lasso.claim, "fair cycle", "fails", False, name, rules=rules[lasso.claim]))
            end = "then for ever: " + ("; ".join(map(str, lasso.cycle)) or "nothing")
            self.counterexample(f"{name}/{lasso.claim}", lasso.claim, rules[lasso.claim], end, lasso.prefix)
        ends = stuck(graph)
        self.judged |= ends.judged
        for entity, stage, trace in ends.traps:
            self.out.searches.append(Search(f"{entity} in {stage}", "trap", "fails", False, name))
            self.counterexample(f"{name}/trap", "trap", (), f"{entity} never leaves {stage} for its first stage", trace)
        for trace in ends.dead:
            self.out.searches.append(Search("dead state", "trap", "fails", False, name))
            self.counterexample(f"{name}/dead", "dead state", (), "no row is enabled", trace)

    def counterexample(
        self, where: str, prop: str, rules: tuple[str, ...], text: str, trace: tuple[TraceStep, ...]
    ) -> None:
        """A trace as a record: its steps as text, the last step's changes as fields."""
        last = trace[-1] if trace else None
        changes = tuple(Change(*_field(n), a, b) for n, (a, b) in last.changed.items()) if last else ()
        steps = "; ".join(map(str, trace))
        self.out.counterexamples.append(
            Counterexample(where, last.event if last else "", prop, rules, f"{text}: {steps}", changes, True)
        )

    def reached(self) -> Iterator[Search]:
        """Every row, stage and ``sometimes``."""
        rules = {p.id: p.rules for p in self.tables.properties} | {e.id: e.rules for e in self.tables.events}
        for kind, name in self.witnesses.wanted():
            seen, label = self.witnesses.found.get((kind, name)), f"{kind} {name}"
            if seen is None:
                yield Search(label, "witness", "missing", False, rules=rules.get(name, ()))
            else:
                yield Search(label, "witness", "found", True, seen.instance, seen.depth, rules=rules.get(name, ()))

    def conjuncts(self, implied: Implied) -> Iterator[Search]:
        """Guard conjuncts as the only false one: how many were seen, and each that was not."""
        verdict = self.witnesses.conjuncts(implied)
        texts = {e.id: [g.text for g in e.guards] for e in self.tables.events}
        yield Search("guard conjuncts seen alone", "conjunct", "found", True, detail=str(verdict.seen))
        for name, index in verdict.implied:
            yield Search(f"{name}/guard[{index}]", "conjunct", "implied", True, detail=texts[name][index])
        for name, index in verdict.missing:
            yield Search(f"{name}/guard[{index}]", "conjunct", "missing", False, detail=texts[name][index])

    def ended(self) -> Iterator[Search]:
        """Claims without a fair cycle, and what no instance could judge."""
        failed = {s.id for s in self.out.searches if s.method == "fair cycle"}
        for claim, names in self.claims.items():
            if claim not in failed:
                bound = ", ".join(names)
                yield Search(claim, "fair cycle", "holds" if names else "missing", bool(names), bound)
        for owner, stages in self.tables.stages.items():
            for stage in stages:
                if (owner, stage) not in self.judged:
                    yield Search(f"{owner}.{stage}", "trap", "missing", False, detail="no closed instance reaches it")


def _field(name: str) -> tuple[str, str]:
    """``a.r.stage`` as entity and field; a bare name belongs to the pool."""
    entity, _, variable = name.rpartition(".")
    return entity or "pool", variable
