"""What the tests of Spin and Rumur share: instances, our search of them, faults planted in the generated text."""

from collections.abc import Callable, Iterator, Sequence

import pytest

from hybridkv_ref.loader import load_tables
from hybridkv_ref.model_checks.explore import Graph, explore
from hybridkv_ref.model_checks.explorers import MOST_STATES
from hybridkv_ref.model_checks.instances import Instance, read_instances
from hybridkv_ref.model_checks.model_text import Language, Model, Namer, Writer
from hybridkv_ref.model_checks.space import Binding, Compiled
from hybridkv_ref.model_checks.verifiers import Run
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.tables import Effect, Guard

TABLES = load_tables()
COMPILED = Compiled(TABLES)
INSTANCES = {i.name: i for i in read_instances(TABLES, SPEC_DIR / "instances.toml")[0]}
DEEP = {i.name: i for i in read_instances(TABLES, SPEC_DIR / "instances_deep.toml")[0]}
WITHOUT_DEPTH = [n for n, i in INSTANCES.items() if not i.depth]
WITH_DEPTH = next(n for n, i in INSTANCES.items() if i.depth)
AT_LEAST = 3_000_000


def names(of: str) -> list[str]:
    """The first instance whose name starts so: instances are data, and kinds come and go."""
    return [n for n in INSTANCES if n.startswith(of)][:1]


def searched(instance: Instance) -> Graph:
    """Our search of an instance, to its end."""
    graph = explore(TABLES, instance, MOST_STATES, COMPILED)
    assert not graph.truncated
    return graph


def search_of(word: str) -> Graph:
    """Our search of the first instance whose name starts so."""
    return searched(INSTANCES[names(word)[0]])


def lose_guards(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Makes the generators lose every guard conjunct with this word."""
    plain = Language.condition

    def lossy(language: Language, guards: Sequence[Guard], name: Namer) -> str:
        return plain(language, [g for g in guards if word not in g.text], name)

    monkeypatch.setattr(Language, "condition", lossy)


def lose_a_guard(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the generators lose a guard of this instance that is not about a stage."""
    guards = (g.text for b in graph.space.bindings if b.active for g in b.event.guards)
    lose_guards(monkeypatch, next(text for text in guards if "stage" not in text))


def lose_an_effect(_: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the generators lose the first effect of every event."""
    plain = Language.assignments

    def lossy(language: Language, effects: Sequence[Effect], name: Namer) -> list[str]:
        return plain(language, effects[1:], name)

    monkeypatch.setattr(Language, "assignments", lossy)


FAULTS: list[Callable[[Graph, pytest.MonkeyPatch], None]] = [lose_a_guard, lose_an_effect]


def lose_the_reductions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the generators keep differences between states that mean nothing."""

    def nothing(_: Writer, binding: Binding) -> Iterator[str]:
        yield from ()

    monkeypatch.setattr(Writer, "reduced", nothing)


def is_seen(
    fault: Callable[[Graph, pytest.MonkeyPatch], None],
    model: Callable[[Graph], Model],
    check: Callable[[str], Run],
    wanted: Callable[[Graph], tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> bool:
    """Whether an explorer finds another count, or an error, once this fault is in the generated text."""
    graph = search_of("graph")
    sound = model(graph).source
    fault(graph, monkeypatch)
    faulty = model(graph).source
    assert faulty != sound
    run = check(faulty)
    return bool(run.error) or (run.states, run.transitions) != wanted(graph)
