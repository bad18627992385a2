"""Faults planted in the proof generator itself, to show that none of them would go unseen.

A generator that loses a bystander proves everything and means nothing.  Each fault here changes one function of the
generator for the time of a ``with``; one of the ``generator_probes`` that passes without it must not pass with it.
Which one is said in ``spec/planted_faults.toml``.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from unittest import mock

import z3

from hybridkv_ref import rows
from hybridkv_ref.expr import TRUE, Expr, Ref, Type, rewrite
from hybridkv_ref.model_checks import base, frames, induction, liveness, smt
from hybridkv_ref.model_checks.base import Base
from hybridkv_ref.model_checks.frames import Assumptions, Inst
from hybridkv_ref.model_checks.generator_probes import Probe
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.liveness import Claim
from hybridkv_ref.model_checks.obligations import Search
from hybridkv_ref.spec_files import Spec
from hybridkv_ref.tables import Event, Helpful, Tables

Planted = contextlib.AbstractContextManager[Any]
Plant = Callable[[], Planted]


def _instead(owner: object, name: str, value: object) -> Plant:
    return lambda: mock.patch.object(owner, name, value)


def _silent(owner: object, name: str) -> Plant:
    """A group of obligations that is never asked."""
    return lambda: mock.patch.object(owner, name)


def _placements(keep: Callable[[str, Mapping[str, Inst], set[Inst]], bool]) -> Plant:
    """Of the placements beside a row those that ``keep`` wants; it gets the scope, the binding and the actors."""

    def fewer(tables: Tables, acting: Mapping[str, Inst], scope: str, kinds: Mapping[str, str]) -> Iterator[Any]:
        known = set(acting.values())
        yield from (b for b in frames.placements(tables, acting, scope, kinds) if keep(scope, b, known))

    return _instead(induction, "placements", fewer)


def _no_bystander(scope: str) -> Plant:
    role = {"segment": "self"}.get(scope, scope)
    return _placements(lambda asked, bound, known: asked != scope or bound[role] in known)


def _no_second_lease(scope: str, bound: Mapping[str, Inst], known: set[Inst]) -> bool:
    return scope != "lease" or bound["lease"] in known or bound["self"] not in known


def _sums(change: Callable[[list[z3.BoolRef], list[z3.BoolRef]], list[z3.BoolRef]]) -> Plant:
    """Other facts about sums; ``change`` gets all facts, and those that say that a rest is not negative."""
    plain = Assumptions.sums

    def sums(self: Assumptions, frame: frames.Frame) -> list[z3.BoolRef]:
        facts = plain(self, frame)
        return change(facts, [f for f in facts if f.decl().kind() == z3.Z3_OP_GE])

    return _instead(Assumptions, "sums", sums)


def _ends_confused(ref: Ref, bound: Mapping[str, Inst]) -> str:
    return frames.owner_name(dataclasses.replace(ref, role="src") if ref.role == "dst" else ref, bound)


def _post(reads_after: Callable[[Ref, bool], bool]) -> Plant:
    """``Task.post`` with another choice of the variables that are read after the step."""

    def post(self: Task, expr: Expr, bound: Mapping[str, Inst], two_state: bool) -> z3.ExprRef:
        def look(ref: Ref) -> z3.ExprRef:
            owner = frames.owner_name(ref, bound)
            after = self.after.get((owner, ref.name)) if reads_after(ref, two_state) else None
            return self.base.words.cell(owner, ref) if after is None else after

        return smt.term(expr, look)

    return _instead(Task, "post", post)


def _unguarded() -> Planted:
    plain = Task.__init__

    def init(self: Task, tables: Tables, event: Event, base_: Assumptions, batch: bool = False) -> None:
        plain(self, tables, dataclasses.replace(event, guards=()), base_, batch)

    return mock.patch.object(Task, "__init__", init)


def _bystanders_unknown() -> Planted:
    plain = Assumptions.facts

    def facts(self: Assumptions, frame: frames.Frame, only: frozenset[str] | None = None) -> list[z3.BoolRef]:
        return plain(self, frame, only) if only is None else self.sums(frame)

    return mock.patch.object(Assumptions, "facts", facts)


def _goal_assumed() -> Planted:
    plain = Task.prove

    def prove(self: Task, name: str, goal: z3.BoolRef, *rest: Any) -> None:
        self.solver.add(goal)
        plain(self, name, goal, *rest)

    return mock.patch.object(Task, "prove", prove)


def _scope_left_open() -> Planted:
    plain = Task.prove

    def prove(self: Task, name: str, goal: z3.BoolRef, *rest: Any) -> None:
        plain(self, name, goal, *rest)
        self.solver.push()
        self.solver.add(z3.Not(goal))  # as if the query's own scope were still open

    return mock.patch.object(Task, "prove", prove)


def _counted_from_one() -> Planted:
    plain = smt.literal

    def literal(value: int | str, kind: Type) -> z3.ExprRef:
        return plain(value, kind) + 1 if kind.name == "enum" else plain(value, kind)

    return mock.patch.object(smt, "literal", literal)


def _chosen_away() -> Planted:
    plain = Task.property

    def unchosen(self: Task, prop: Any, bound: dict[str, Inst], label: str) -> None:
        if getattr(prop, "choose", TRUE) == TRUE:
            plain(self, prop, bound, label)

    return mock.patch.object(Task, "property", unchosen)


def _globals_overlooked() -> Planted:
    plain = Task.touches

    def touches(self: Task, prop: Any, bound: dict[str, Inst]) -> bool:
        changed, self.changed = self.changed, {c for c in self.changed if c[0] != "global"}
        found = plain(self, prop, bound)
        self.changed = changed
        return found

    return mock.patch.object(Task, "touches", touches)


def _fuse(guards_late: bool, effects_late: bool) -> Plant:
    """``rows.fuse`` in which guards or effects of a later part may stay over the state before the first."""
    plain = rows.fuse

    def fuse(parts: Iterable[rows.Part]) -> Any:
        given = list(parts)
        guards, effects, edges = plain(given)
        as_written = {e.target: e for p in given for e in p.effects}
        return (
            guards if guards_late else tuple(g for p in given for g in p.guards),
            effects if effects_late else tuple(as_written.values()),
            edges,
        )

    return _instead(rows, "fuse", fuse)


def _passed_late() -> Planted:
    plain = rows.RowBuilder.side

    def side(self: rows.RowBuilder, *args: Any) -> rows.Part:
        part, passed = plain(self, *args), args[6]

        def early(expr: Expr) -> Expr | None:
            return passed.get(expr.name) if isinstance(expr, Ref) and expr.role == "input" else None

        part.guards = [dataclasses.replace(g, expr=rewrite(g.expr, early)) for g in part.guards]
        part.effects = [dataclasses.replace(e, expr=rewrite(e.expr, early)) for e in part.effects]
        return part

    return mock.patch.object(rows.RowBuilder, "side", side)


def _every_rank_falls() -> Planted:
    plain = liveness.lexicographic
    return mock.patch.object(liveness, "lexicographic", lambda low, high: (z3.BoolVal(True), plain(low, high)[1]))


def _every_row_fair() -> Planted:
    plain = Claim.helpful_row

    def helpful_row(self: Claim, helpful: Helpful, bound: dict[str, Inst]) -> Any:
        found = plain(self, helpful, bound)
        return found and (dataclasses.replace(found[0], fair=True), found[1])

    return mock.patch.object(Claim, "helpful_row", helpful_row)


def plants() -> Mapping[str, Plant]:
    """Every fault by its name in the file, with how it is planted."""
    return {
        "no_bystander_segment": _no_bystander("segment"),
        "no_bystander_lease": _no_bystander("lease"),
        "no_bystander_copy": _no_bystander("copy"),
        "no_second_lease_on_the_actors_segment": _placements(_no_second_lease),
        "a_sum_without_its_rest": _sums(lambda facts, bounds: [*facts, *(b.arg(0) <= 0 for b in bounds)]),
        "a_rest_that_may_be_negative": _sums(lambda facts, bounds: [f for f in facts if f not in bounds]),
        "counted_subsets_forgotten": _instead(frames, "subset_lemmas", lambda tables: ()),
        "the_two_ends_of_a_copy_confused": _instead(induction, "owner_name", _ends_confused),
        "old_and_new_swapped": _post(lambda ref, two_state: not (two_state and ref.new)),
        "a_step_property_over_the_old_state_only": _post(lambda ref, two_state: not two_state),
        "an_invariant_over_the_old_state": _post(lambda ref, two_state: two_state and ref.new),
        "guards_not_assumed": _unguarded,
        "invariants_of_bystanders_not_assumed": _bystanders_unknown,
        "the_goal_assumed": _goal_assumed,
        "a_scope_opened_and_not_closed": _scope_left_open,
        "contributors_forgotten": _instead(induction, "contributors", lambda *_: ()),
        "enum_ranges_lost": _instead(frames, "in_range", lambda term, kind: []),
        "enum_members_counted_from_one": _counted_from_one,
        "a_chosen_constant_excuses_the_property": _chosen_away,
        "changed_globals_overlooked": _globals_overlooked,
        "sums_of_actors_not_asked": _silent(Task, "sums_of_actors"),
        "edges_and_counters_not_asked": _silent(Task, "generic"),
        "later_guards_over_the_first_state": _fuse(guards_late=False, effects_late=True),
        "later_effects_over_the_first_state": _fuse(guards_late=True, effects_late=False),
        "what_is_passed_read_after_the_first_part": _passed_late,
        "every_rank_falls": _every_rank_falls,
        "every_helpful_row_fair": _every_row_fair,
        "anothers_help_taken_for_granted": _silent(Claim, "covered"),
        "first_state_not_asked": _silent(Base, "initially"),
        "first_state_not_literal": _instead(base, "literal", lambda value, kind: smt.constant("any", kind)),
    }


def seen(spec: Spec, tables: Tables, name: str, probe: Probe) -> Search:
    """One fault: whether its probe passes on the generator as it is, and no longer once the fault is planted."""
    passes = probe.passes(spec, tables)
    with plants()[name]():
        unseen = probe.passes(spec, tables)
    status = "unseen" if unseen else "found" if passes else "fails without a fault"
    return Search(f"planted {name}", "planted fault", status, passes and not unseen)
