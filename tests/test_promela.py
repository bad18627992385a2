"""Spin, given the generated model of an instance, stores exactly the states that our search found."""

from collections.abc import Callable
from pathlib import Path

import pytest
from explorers import (
    AT_LEAST,
    DEEP,
    FAULTS,
    INSTANCES,
    TABLES,
    WITHOUT_DEPTH,
    is_seen,
    lose_guards,
    lose_the_reductions,
    names,
    search_of,
    searched,
)

from hybridkv_ref.expr import BOOL, INT, Lit, Op, Ref
from hybridkv_ref.model_checks import promela, spin
from hybridkv_ref.model_checks.explore import Graph, explore
from hybridkv_ref.model_checks.explorers import EXPLORERS, agrees
from hybridkv_ref.model_checks.instances import Instance
from hybridkv_ref.model_checks.promela import PROMELA
from hybridkv_ref.model_checks.verifiers import VerifierError
from hybridkv_ref.tables import Effect

needs_spin = pytest.mark.skipif(bool(spin.missing()), reason=spin.missing() or "-")


def agree(instance: Instance) -> int:
    """Compares the two counts; gives the number of states of our search."""
    graph = searched(instance)
    tool = next(e for e in EXPLORERS if e.name == "Spin")
    assert agrees(graph, tool.count(tool.model(graph).source), tool.wanted(graph))
    return graph.states


@needs_spin
@pytest.mark.parametrize("name", [*names("graph"), *names("media"), *names("queue"), *names("fold<")])
def test_spin_stores_the_states_that_we_find(name: str) -> None:
    agree(INSTANCES[name])


@needs_spin
@pytest.mark.deep
@pytest.mark.parametrize("name", WITHOUT_DEPTH)
def test_spin_stores_the_states_that_we_find_in_every_instance(name: str) -> None:
    agree(INSTANCES[name])


@needs_spin
@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(DEEP))
def test_spin_and_our_search_agree_on_millions_of_states(name: str) -> None:
    assert agree(DEEP[name]) >= AT_LEAST


# ---- a fault in the generated text is seen -------------------------------------------------------------------


@needs_spin
@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_guard_or_effect_is_seen(
    fault: Callable[[Graph, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_seen(fault, promela.model, spin.check, promela.size, monkeypatch)


@needs_spin
def test_a_lost_cap_breaks_an_assertion_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = search_of("epoch")
    lose_guards(monkeypatch, "gpu_used")
    faulty = promela.model(graph)
    run = spin.check(faulty.source, optimise="-O0")
    assert promela.broken(faulty, run.error) == "total_cap()"


@needs_spin
def test_states_that_differ_in_a_meaningless_value_would_be_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = search_of("fold<")
    lose_the_reductions(monkeypatch)
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
