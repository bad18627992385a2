"""Rumur, given the generated model of an instance, finds exactly the states and transitions that our search found."""

from collections.abc import Callable
from pathlib import Path

import pytest
from explorers import (
    AT_LEAST,
    DEEP,
    FAULTS,
    INSTANCES,
    TABLES,
    WITH_DEPTH,
    WITHOUT_DEPTH,
    is_seen,
    lose_guards,
    lose_the_reductions,
    names,
    search_of,
    searched,
)

from hybridkv_ref.expr import BOOL, INT, Lit, Op, Ref
from hybridkv_ref.model_checks import murphi, rumur
from hybridkv_ref.model_checks.explore import Graph, explore
from hybridkv_ref.model_checks.explorers import MEMORY_MB, MOST_STATES, agrees
from hybridkv_ref.model_checks.instances import Instance
from hybridkv_ref.model_checks.model_text import Writer, counted, late
from hybridkv_ref.model_checks.murphi import MURPHI
from hybridkv_ref.model_checks.verifiers import VerifierError
from hybridkv_ref.tables import Effect

QUICK = "-O1"  # of small searches the compiler takes most of the time

needs_rumur = pytest.mark.skipif(bool(rumur.missing()), reason=rumur.missing() or "-")


def agree(instance: Instance, optimise: str) -> int:
    """Compares the two counts; gives the number of states of our search."""
    graph = searched(instance)
    assert agrees(graph, rumur.check(murphi.model(graph).source, MEMORY_MB, optimise), counted(graph))
    return graph.states


# With every reduction (spill: also shifts) and with a script that starts in the middle (held).
@needs_rumur
@pytest.mark.parametrize("name", [*names("graph"), *names("preempt"), *names("spill<"), *names("held<")])
def test_rumur_finds_the_states_that_we_find(name: str) -> None:
    agree(INSTANCES[name], QUICK)


@needs_rumur
@pytest.mark.deep
@pytest.mark.parametrize("name", WITHOUT_DEPTH)
def test_rumur_finds_the_states_that_we_find_in_every_instance(name: str) -> None:
    agree(INSTANCES[name], QUICK)


@needs_rumur
@pytest.mark.deep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", list(DEEP))
def test_rumur_and_our_search_agree_on_millions_of_states(name: str) -> None:
    assert agree(DEEP[name], "-O3") >= AT_LEAST


# ---- a fault in the generated text is seen -------------------------------------------------------------------


@needs_rumur
@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_guard_or_effect_is_seen(
    fault: Callable[[Graph, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_seen(fault, murphi.model, lambda source: rumur.check(source, optimise=QUICK), counted, monkeypatch)


@needs_rumur
def test_a_lost_cap_breaks_an_invariant_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = search_of("epoch")
    lose_guards(monkeypatch, "gpu_used")
    assert rumur.check(murphi.model(graph).source, optimise=QUICK).error == 'invariant "total_cap()" failed'


@needs_rumur
def test_states_that_differ_in_a_meaningless_value_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = search_of("graph")
    lose_the_reductions(monkeypatch)
    assert rumur.check(murphi.model(graph).source, optimise=QUICK).states > graph.states


@needs_rumur
def test_a_counter_that_is_not_reduced_leaves_its_range(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = search_of("rough_reopen")
    monkeypatch.setattr(murphi, "NUMBER", "-15..15")
    assert rumur.check(murphi.model(graph).source, optimise=QUICK).error == ""
    lose_the_reductions(monkeypatch)
    assert "write of out-of-range value" in rumur.check(murphi.model(graph).source, optimise=QUICK).error


@needs_rumur
def test_a_step_of_the_script_that_is_refused_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = search_of("held<")
    plain = Writer.script
    monkeypatch.setattr(Writer, "script", lambda self: [plain(self)[0], plain(self)[0]])
    assert "script[1] is refused" in rumur.check(murphi.model(graph).source, optimise=QUICK).error


# ---- the text ------------------------------------------------------------------------------------------------


def test_effects_read_the_state_before_the_step() -> None:
    a, b, c = Ref("self", "a", INT), Ref("self", "b", INT), Ref("self", "c", BOOL)
    effects = [
        Effect(a, b, "a = b", ""),
        Effect(b, a, "b = a", ""),
        Effect(c, Op("==", (a, b), BOOL), "c = a == b", ""),
    ]
    assert late(effects) == {b: "saved_number0", c: "saved_bool1"}
    assert MURPHI.assignments(effects, lambda ref: ref.name) == [
        *("saved_number0 := a", "saved_bool1 := (a = b)"),
        *("a := b", "b := saved_number0", "c := saved_bool1"),
    ]


def test_truth_values_negative_numbers_and_choices() -> None:
    a, b = Ref("self", "a", INT), Ref("self", "b", BOOL)
    chosen = Op("ite", (Op("<", (a, Lit(0, INT)), BOOL), Lit(-1, INT), Op("neg", (a,), INT)), INT)
    assert MURPHI.expression(chosen, lambda ref: ref.name) == "((a < 0) ? (-1) : (0 - a))"
    implied = Op("implies", (b, Op("==", (b, Lit(1, BOOL)), BOOL)), BOOL)
    assert MURPHI.expression(implied, lambda ref: ref.name) == "(!b | (b = true))"


@pytest.mark.parametrize(("name", "limit"), [("graph", 10), (WITH_DEPTH, MOST_STATES)])
def test_a_search_that_was_cut_short_has_no_model(name: str, limit: int) -> None:
    graph = explore(TABLES, INSTANCES[name], limit)
    with pytest.raises(ValueError, match="cut short"):
        murphi.model(graph)


# ---- Rumur ---------------------------------------------------------------------------------------------------

COUNTER = """
type number: -127..127;
var x: number;
startstate begin x := 0; end;
rule x < {limit} ==> begin x := x + 1; end;
"""


@needs_rumur
def test_a_state_without_successor_is_no_error() -> None:
    run = rumur.check(COUNTER.format(limit=9))
    assert (run.states, run.transitions, run.state_bytes, run.error) == (10, 9, 1, "")


@needs_rumur
def test_equal_entities_are_told_apart() -> None:
    lines = "type one: scalarset(2); var at: array [one] of boolean; "
    lines += "startstate begin for i: one do at[i] := false; end; end; "
    run = rumur.check(lines + "ruleset i: one do rule !at[i] ==> begin at[i] := true; end; end;")
    assert run.states == 4


@needs_rumur
def test_a_model_that_rumur_refuses_is_an_error() -> None:
    with pytest.raises(VerifierError, match="syntax error"):
        rumur.check("startstate begin")


@needs_rumur
def test_a_number_that_leaves_its_range_is_an_error() -> None:
    assert "write of out-of-range value into x" in rumur.check(COUNTER.format(limit=1_000)).error


@needs_rumur
def test_a_search_without_memory_gives_no_count() -> None:
    wide = "".join(f"var x{i}: 0..65534;" for i in range(200)) + "startstate begin "
    wide += "".join(f"x{i} := 0;" for i in range(200)) + " end; rule x0 < 65534 ==> begin x0 := x0 + 1; end;"
    wide += " rule x1 < 65534 ==> begin x1 := x1 + 1; end;"
    with pytest.raises(VerifierError, match="out of memory"):
        rumur.check(wide, memory_mb=64)


def test_where_rumur_is_not_installed_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert rumur.missing() == "not installed: rumur, cc"
    with pytest.raises(VerifierError, match="not installed: rumur, cc"):
        rumur.check(COUNTER.format(limit=9))
