"""The four back ends mean the same on random states, every event fires in some, and a fault in any of them is seen."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import pytest
import z3

from hybridkv_ref.expr import TRUE, Expr, Op, rewrite
from hybridkv_ref.loader import load_tables
from hybridkv_ref.machine import Machine
from hybridkv_ref.model_checks import agreement, smt, spin
from hybridkv_ref.model_checks.agreement import (
    Agreement,
    ColumnRows,
    Evaluator,
    PromelaRows,
    PythonRows,
    Z3Rows,
    agree,
)
from hybridkv_ref.model_checks.model_text import Language, Namer, late
from hybridkv_ref.tables import Effect, Event, Tables

TABLES = load_tables()
needs_spin = pytest.mark.skipif(bool(spin.missing()), reason=spin.missing() or "-")
MAKERS = [PythonRows, ColumnRows, Z3Rows, pytest.param(PromelaRows, marks=needs_spin)]
SEED = 3


def only(events: Iterable[Event]) -> Tables:
    return replace(TABLES, events=tuple(events))


# A few of the events that have most effects: enough to see a fault, quick to compile.
FEW = only(sorted(TABLES.events, key=lambda e: -len(e.effects))[:8])


def faulty(tables: Tables, number: int, **parts: object) -> Tables:
    """The tables with parts of one event replaced."""
    events = list(tables.events)
    events[number] = replace(events[number], **parts)  # type: ignore[arg-type]
    return replace(tables, events=tuple(events))


def judged(*evaluators: Evaluator, tables: Tables = FEW, count: int = 480) -> Agreement:
    return agree(tables, count, SEED, evaluators)


def compare(count: int, others: Sequence[Evaluator]) -> Agreement:
    found = agree(TABLES, count, SEED, [PythonRows(TABLES), *others])
    assert found.samples >= count
    assert found.disagreements == []
    assert found.fired == {e.id for e in TABLES.events}, "an event that never fires has no post-state to compare"
    return found


def test_python_z3_and_array_functions_agree() -> None:
    found = compare(5_000, [ColumnRows(TABLES), Z3Rows(TABLES)])
    assert len(found.decided) > sum(len(e.guards) for e in TABLES.events) / 2, "most conjuncts decide in some sample"


@needs_spin
def test_the_promela_model_agrees() -> None:
    compare(5_000, [PromelaRows(TABLES)])


@pytest.mark.deep
def test_all_agree_on_a_hundred_thousand_samples() -> None:
    found = compare(100_000, [ColumnRows(TABLES), Z3Rows(TABLES), *([] if spin.missing() else [PromelaRows(TABLES)])])
    undecided = {
        (e.id, e.guards[k].text) for e in TABLES.events for k in range(len(e.guards)) if (e.id, k) not in found.decided
    }
    # What never decides alone follows from the other conjuncts; that is for the mutation run to prove, one by one.
    assert len(undecided) < sum(len(e.guards) for e in TABLES.events) / 20, sorted(undecided)


def test_the_same_seed_draws_the_same_samples() -> None:
    first, second = (judged(ColumnRows(FEW)) for _ in range(2))
    assert (first.samples, first.fired, first.decided) == (second.samples, second.fired, second.decided)


@pytest.mark.parametrize("maker", MAKERS)
def test_a_dropped_guard_is_seen(maker: type[Evaluator]) -> None:
    event = FEW.events[0]
    guards = (replace(event.guards[0], expr=TRUE), *event.guards[1:])
    found = judged(ColumnRows(FEW), maker(faulty(FEW, 0, guards=guards)))  # type: ignore[call-arg]
    assert {(d.event, d.what) for d in found.disagreements} == {(event.id, event.guards[0].text)}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_dropped_effect_is_seen(maker: type[Evaluator]) -> None:
    event = FEW.events[1]
    lost = event.effects[0].target
    found = judged(ColumnRows(FEW), maker(faulty(FEW, 1, effects=event.effects[1:])))  # type: ignore[call-arg]
    assert {(d.event, d.what) for d in found.disagreements} == {(event.id, f"new {lost.role}.{lost.name}")}


@pytest.mark.parametrize("maker", MAKERS)
def test_a_flipped_comparison_is_seen(maker: type[Evaluator]) -> None:
    def flip(expr: Expr) -> Expr | None:
        return Op("<", expr.args, expr.type) if isinstance(expr, Op) and expr.op == "<=" else None

    bent = replace(FEW, events=tuple(_bent(e, flip) for e in FEW.events))
    found = judged(ColumnRows(FEW), maker(bent))  # type: ignore[call-arg]
    assert found.disagreements
    assert all("<=" in d.what for d in found.disagreements), "only at the boundary, and nothing else differs"


def _bent(event: Event, change: Callable[[Expr], Expr | None]) -> Event:
    return replace(event, guards=tuple(replace(g, expr=rewrite(g.expr, change)) for g in event.guards))


@needs_spin
def test_effects_that_read_what_was_just_written_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def in_sequence(language: Language, effects: Sequence[Effect], name: Namer) -> list[str]:
        return [f"{name(e.target)} = {language.expression(e.expr, name)}" for e in effects]

    monkeypatch.setattr(Language, "assignments", in_sequence)
    reading = only(e for e in TABLES.events if late(e.effects))
    found = judged(ColumnRows(reading), PromelaRows(reading), tables=reading)
    assert found.disagreements
    assert all(d.what.startswith("new ") for d in found.disagreements), "guards are evaluated before"


def test_swapped_branches_of_the_z3_terms_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = smt._operator

    def swapped(expr: Op, args: list[z3.ExprRef]) -> z3.ExprRef:
        return plain(expr, [args[0], args[2], args[1]] if expr.op == "ite" else args)

    monkeypatch.setattr(smt, "_operator", swapped)
    choosing = only(e for e in TABLES.events if any(" if " in effect.text for effect in e.effects))
    assert judged(ColumnRows(choosing), Z3Rows(choosing), tables=choosing).disagreements


def test_a_machine_that_refuses_with_another_conjunct_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(Machine):
        def __init__(self, tables: Tables, constants: Mapping[str, int] | None = None) -> None:
            super().__init__(tables, constants)
            for compiled in self.events.values():
                object.__setattr__(compiled, "call", lambda *_, f=compiled.call: max(f(*_), 0))

    monkeypatch.setattr(agreement, "Machine", Hasty)
    assert judged(ColumnRows(FEW), PythonRows(FEW)).disagreements
