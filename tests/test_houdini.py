"""Inference: what is inferred is inductive, contains no false claim, and contains what the tables needed to be told."""

import dataclasses

import numpy as np
import pytest

from hybridkv_ref.expr import BOOL, INT, Expr, Lit, Op, Ref, render
from hybridkv_ref.loader import build, build_events
from hybridkv_ref.model_checks.deep import MIN_HELPERS, helpers_found
from hybridkv_ref.model_checks.frames import Assumptions
from hybridkv_ref.model_checks.houdini import Houdini, follows, infer
from hybridkv_ref.model_checks.houdini_templates import Candidate, Related, candidates, scopes
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.instances import read_instances
from hybridkv_ref.model_checks.mutants import mutants
from hybridkv_ref.model_checks.samples import Samples, sampled
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_spec

SPEC = read_spec(SPEC_DIR)
TABLES = build(SPEC)
EVERY = tuple(candidates(TABLES))
KIND = "on_disk_prefix"
SEGMENT = ("segment", (("self", KIND),))
NAMES = ("io", "tries", "mem", "MAX_TRIES")


def about(*names: str) -> list[Candidate]:
    """The candidates about these variables of one kind's segments alone."""
    return [c for c in EVERY if c.scope == SEGMENT and _names(c.claim) <= set(names)]


def _names(expr: Expr) -> set[str]:
    return {expr.name} if isinstance(expr, Ref) else set().union(*map(_names, getattr(expr, "args", ())))


def left(search: Houdini) -> set[str]:
    """What was inferred, as text."""
    found = set()
    for (scope, premise), claims in search.settled.items():
        assert scope == SEGMENT
        found |= {" and ".join(map(render, premise)) + " => " + render(c) for c in claims}
    return found


@pytest.fixture(scope="module")
def small() -> Houdini:
    """Inference over a few variables of one kind."""
    search = Houdini(TABLES)
    search.run(about(*NAMES), {})
    return search


def test_what_is_left_is_inductive_without_the_tables_own_invariants(small: Houdini) -> None:
    found = small.assuming(small.properties())
    assert {p.role for p in found.properties} == {"inferred"}
    base = Assumptions(found)
    for event in found.events:
        done = Task(found, event, base).run().obligations
        assert [o.id for o in done if o.method == "induction" and o.status != "proved"] == []


def test_true_claims_stay_and_false_ones_go(small: Houdini) -> None:
    found = left(small)
    assert " => tries <= MAX_TRIES" in found
    assert " => mem >= 0" in found
    assert "stage == LOADING => io >= 1" in found
    assert "stage == DURABLE => io <= 0" in found
    assert " => io <= 0" not in found
    assert "stage == WAITING => tries <= 0" not in found
    assert small.dropped > 0


def test_invariants_of_the_tables_follow(small: Houdini) -> None:
    found = small.assuming(small.properties())
    base, known = Assumptions(found), {p.id: p for p in TABLES.forms("invariant")}
    for name in ("slot_in_load", "no_slot_at_rest", "tries_bounded"):
        assert follows(found, base, known[f"{name}<{KIND}>"])
    assert not follows(found, base, known[f"parts_tile<{KIND}>"])


def test_a_fault_in_a_row_takes_the_invariant_away() -> None:
    bent = next(m for m in mutants(SPEC, TABLES) if (m.row, m.before, m.after) == ("settle", "io = 0", ""))
    search = Houdini(dataclasses.replace(TABLES, events=build_events(bent.apply(SPEC))))
    search.run(about("io"), {})
    assert "stage == DURABLE => io <= 0" not in left(search)
    assert "stage == LOADING => io >= 1" in left(search)


def test_samples_only_save_work(small: Houdini) -> None:
    instances = [i for i in read_instances(TABLES, SPEC_DIR / "instances.toml")[0] if i.name.startswith("queue")]
    samples = sampled(TABLES, instances, {SEGMENT: ("self",)})
    assert set(samples) == {SEGMENT}
    search = Houdini(TABLES)
    for candidate in about(*NAMES):
        search.left.setdefault((candidate.scope, candidate.premise), {})[candidate.claim] = None
    tried = sum(map(len, search.left.values()))
    search.observed(samples)
    kept = {render(c) for claims in search.left.values() for c in claims}
    assert 0 < search.dropped < tried
    assert "tries <= MAX_TRIES" in kept
    refuted = [render(c) for c in search.left[SEGMENT, ()]]
    assert "io <= 0" not in refuted  # without a premise: a load that runs holds a slot
    search = Houdini(TABLES)
    search.run(about(*NAMES), samples)
    assert left(search) == left(small)


def test_samples_refute_what_a_search_has_seen() -> None:
    stage = Ref("self", "stage", TABLES.kinds[KIND].vars["stage"].type)
    seen = Samples((stage, Ref("self", "io", INT)), np.array([[4, 1], [0, 0]]))
    assert seen.holds(Op(">=", (Ref("self", "io", INT), Lit(1, INT)), BOOL)).tolist() == [True, False]


def test_rows_relate_what_they_compare_or_assign() -> None:
    related = Related(TABLES)
    start, mem = Ref("self", "start", INT), Ref("self", "mem", INT)
    assert related(start, Ref("self", "end", INT))
    assert related(mem, Ref("global", "gpu_used", INT))
    assert not related(start, mem)


def test_every_scope_has_candidates() -> None:
    assert {c.scope for c in EVERY} == set(scopes(TABLES))
    assert {p.scope for p in TABLES.forms("invariant")} <= {scope for scope, _ in scopes(TABLES)}


@pytest.mark.deep
def test_at_least_12_helpers_are_found_with_nothing_assumed() -> None:
    result = infer(TABLES, read_instances(TABLES, SPEC_DIR / "instances.toml")[0])
    assert result.sound
    assert len(helpers_found(TABLES, result)) >= MIN_HELPERS == 12
    assert set(result.implied) | set(result.missed) == {p.id for p in TABLES.forms("invariant")}
