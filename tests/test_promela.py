"""Spin, given the generated model of an instance, stores exactly the states that our search found."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from hybridkv_ref.expr import BOOL, INT, Lit, Op, Ref
from hybridkv_ref.loader import load_tables
from hybridkv_ref.model_checks import model_text, promela, spin
from hybridkv_ref.model_checks.explore import Graph, explore
from hybridkv_ref.model_checks.instances import Instance, read_instances
from hybridkv_ref.model_checks.model_text import Language, Namer, Writer
from hybridkv_ref.model_checks.promela import PROMELA
from hybridkv_ref.model_checks.space import Compiled
from hybridkv_ref.model_checks.verifiers import VerifierError
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.tables import Effect, Guard

TABLES = load_tables()
COMPILED = Compiled(TABLES)
INSTANCES = {i.name: i for i in read_instances(TABLES, SPEC_DIR / "instances.toml")[0]}
DEEP = {i.name: i for i in read_instances(TABLES, SPEC_DIR / "instances_deep.toml")[0]}
LIMIT = 20_000_000
AT_LEAST = 3_000_000

needs_spin = pytest.mark.skipif(bool(spin.missing()), reason=spin.missing() or "-")


def counted(instance: Instance) -> tuple[Graph, model_text.Model]:
    graph = explore(TABLES, instance, LIMIT, COMPILED)
    assert not graph.truncated
    return graph, promela.model(graph)


def names(of: str) -> list[str]:
    """The first instance with this word in its name: instances are data, and kinds come and go."""
    return [n for n in INSTANCES if n.startswith(of)][:1]


def agree(instance: Instance) -> int:
    """Compares the two counts; gives the number of states of our search."""
    graph, model = counted(instance)
    states, transitions = promela.size(graph)
    run = spin.check(model.source, memory_mb=12_000, depth=10_000_000, table_bits=24)
    assert (run.states, run.error) == (states, "")
    back = bool(((graph.src >= graph.opened) & (graph.dst < graph.opened)).any())
    assert run.transitions == transitions or (back and run.transitions > transitions)
    return graph.states


@needs_spin
@pytest.mark.parametrize("name", [*names("graph"), *names("media"), *names("queue"), *names("fold<")])
def test_spin_stores_the_states_that_we_find(name: str) -> None:
    agree(INSTANCES[name])


@needs_spin
@pytest.mark.deep
@pytest.mark.parametrize("name", [n for n, i in INSTANCES.items() if not i.depth])
def test_spin_stores_the_states_that_we_find_in_every_instance(name: str) -> None:
    agree(INSTANCES[name])


@needs_spin
@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(DEEP))
def test_spin_and_our_search_agree_on_millions_of_states(name: str) -> None:
    assert agree(DEEP[name]) >= AT_LEAST


# ---- a fault in the generated text is seen -------------------------------------------------------------------


def without(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """Makes the generator lose every guard conjunct with this word."""
    plain = Language.condition

    def lossy(language: Language, guards: Sequence[Guard], name: Namer) -> str:
        return plain(language, [g for g in guards if word not in g.text], name)

    monkeypatch.setattr(Language, "condition", lossy)


@needs_spin
def test_a_lost_guard_changes_the_count(monkeypatch: pytest.MonkeyPatch) -> None:
    instance = INSTANCES["graph"]
    graph, model = counted(instance)
    text = next(g.text for b in graph.space.bindings if b.active for g in b.event.guards if "stage" not in g.text)
    without(monkeypatch, text)
    faulty = promela.model(graph)
    assert faulty.source != model.source
    run = spin.check(faulty.source, optimise="-O0")
    assert run.error or (run.states, run.transitions) != promela.size(graph)


@needs_spin
def test_a_lost_cap_breaks_an_assertion_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = counted(INSTANCES[names("epoch")[0]])
    without(monkeypatch, "gpu_used")
    faulty = promela.model(graph)
    run = spin.check(faulty.source, optimise="-O0")
    assert promela.broken(faulty, run.error) == "total_cap()"


@needs_spin
def test_a_lost_effect_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = counted(INSTANCES["graph"])
    plain = Language.assignments
    monkeypatch.setattr(Language, "assignments", lambda lang, effects, name: plain(lang, effects[1:], name))
    run = spin.check(promela.model(graph).source, optimise="-O0")
    assert run.error or (run.states, run.transitions) != promela.size(graph)


@needs_spin
def test_states_that_differ_in_a_meaningless_value_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph, _ = counted(INSTANCES[names("fold<")[0]])
    monkeypatch.setattr(Writer, "reduced", lambda self, binding: iter(()))
    with pytest.raises(VerifierError, match=r"MEMLIM bound|too small"):
        spin.check(promela.model(graph).source, memory_mb=64, depth=5_000, table_bits=16, optimise="-O0")


# ---- the text ------------------------------------------------------------------------------------------------


def test_effects_read_the_state_before_the_step() -> None:
    a, b = Ref("self", "a", INT), Ref("self", "b", INT)
    swap = [Effect(a, b, "a = b", ""), Effect(b, a, "b = a", "")]
    assert PROMELA.assignments(swap, lambda ref: ref.name) == ["saved_number0 = a", "a = b", "b = saved_number0"]


def test_negative_numbers_and_choices() -> None:
    a = Ref("self", "a", INT)
    chosen = Op("ite", (Op("<", (a, Lit(0, INT)), BOOL), Lit(-1, INT), Op("neg", (a,), INT)), INT)
    assert PROMELA.expression(chosen, lambda ref: ref.name) == "((a < 0) -> (-1) : (0 - a))"
    with pytest.raises(ValueError, match="floor_to"):
        PROMELA.expression(Op("floor_to", (a, a), INT), lambda ref: ref.name)


def test_a_search_that_was_cut_short_has_no_model() -> None:
    graph = explore(TABLES, INSTANCES["graph"], limit=10)
    with pytest.raises(ValueError, match="cut short"):
        promela.model(graph)


# ---- Spin ----------------------------------------------------------------------------------------------------


@needs_spin
def test_a_model_that_spin_refuses_is_an_error() -> None:
    with pytest.raises(VerifierError, match="syntax error"):
        spin.check("active proctype broken( {")


@needs_spin
def test_a_failed_assertion_is_reported() -> None:
    run = spin.check("byte x; active proctype p() { do :: x < 3 -> x++; assert(x != 2) od }", optimise="-O0")
    assert "assertion violated" in run.error


@needs_spin
def test_a_stack_that_is_too_small_gives_no_count() -> None:
    with pytest.raises(VerifierError, match="max search depth too small"):
        spin.check("short x; active proctype p() { do :: x < 900 -> x++ od }", depth=100, optimise="-O0")


def test_where_spin_is_not_installed_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert spin.missing() == "not installed: spin, cc"
    with pytest.raises(VerifierError, match="not installed: spin, cc"):
        spin.check("active proctype p() { skip }")
