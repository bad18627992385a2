"""Each fault planted in the proof generator is seen by a probe that passes on the generator as it is."""

import dataclasses
from collections.abc import Mapping

import pytest

from hybridkv_ref.expr import BOOL, Lit
from hybridkv_ref.loader import build
from hybridkv_ref.model_checks.generator_probes import (
    Agrees,
    InOrder,
    Probe,
    Proves,
    Refutes,
    RefutesClaim,
    RefutesFirst,
)
from hybridkv_ref.model_checks.mutants import Mutant, mutants
from hybridkv_ref.model_checks.planted_faults import Fault, faults
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_spec
from hybridkv_ref.tables import Response

SPEC = read_spec(SPEC_DIR)
TABLES = build(SPEC)
MUTANTS = tuple(mutants(SPEC, TABLES))


def dropped(file: str, row: str, text: str) -> Mutant:
    """The mutant without this guard or effect."""
    found = [m for m in MUTANTS if (m.file, m.row, m.before, m.after) == (file, row, text, "")]
    assert len(found) == 1, (row, text)
    return found[0]


COMMON, HIT, DISK = "common.toml", "protocols/prefix_hit.toml", "kinds/on_disk_prefix.toml"


def ranked_flat(claim: Response) -> Response:
    return dataclasses.replace(claim, rank=(Lit(0, claim.rank[0].type),))


def helped_by_nobody(claim: Response) -> Response:
    return dataclasses.replace(
        claim, helpful=tuple(dataclasses.replace(h, who=Lit(1, BOOL)) if h.by else h for h in claim.helpful)
    )


def helped_by_the_unfair(claim: Response) -> Response:
    return dataclasses.replace(claim, helpful=tuple(dataclasses.replace(h, row="seal") for h in claim.helpful))


FREE = Proves(("swa_window.free",))
REOPENED = Refutes(
    dropped(COMMON, "reopen", "pins == 0"), "uncompressed_tail.reopen", ("/intact_generation", "@~lease")
)
UNMOVED = Refutes(dropped(COMMON, "free", "generation += 1"), "swa_window.free", ("/life_moves_generation",))

STAGES = ", ".join(TABLES.kinds["on_disk_prefix"].stages)
NOWHERE = dataclasses.replace(dropped(DISK, "rot", "intact"), after=f"stage not in {{{STAGES}}}")

PROBES: Mapping[str, Probe] = {
    "no bystander segment": Refutes(
        dropped(DISK, "skip", "ticket == serving"), "on_disk_prefix.skip", ("/ticket_is_taken", "@~self")),
    "no bystander lease": Refutes(
        dropped(COMMON, "reschedule", "pins == 0 or until >= keep_until"),
        "swa_window.reschedule", ("/checked_life", "@~")),
    "no bystander copy": Refutes(dropped(COMMON, "retire", "holds == 0"), "swa_window.retire", ("/spill_source", "@")),
    "no second lease on the actor's segment": REOPENED,
    "a sum without its rest": REOPENED,
    "a rest that may be negative": FREE,
    "counted subsets forgotten": Proves(("request.start_hit", "request.join")),
    "the two ends of a copy confused": Proves(("clone_end[recurrent_state>recurrent_state]",)),
    "old and new swapped": FREE,
    "a step property over the old state only": UNMOVED,
    "an invariant over the old state": Refutes(dropped(COMMON, "free", "mem = 0"), "swa_window.free", ("/uncharged",)),
    "guards not assumed": FREE,
    "invariants of bystanders not assumed": FREE,
    "the goal assumed": UNMOVED,
    "a scope opened and not closed": FREE,
    "contributors forgotten": Proves(("swa_window.pin",)),
    "enum ranges lost": Refutes(NOWHERE, "on_disk_prefix.rot", ("/can_fire",)),
    "enum members counted from one": Agrees(400),
    "a chosen constant excuses the property": Refutes(
        dropped(DISK, "want", "ticket = next_ticket"), "on_disk_prefix.want", ("/ticket_is_taken",)),
    "changed globals overlooked": Refutes(
        dropped(DISK, "skip", "ticket == serving"), "on_disk_prefix.skip", ("/ticket_is_taken", "@~self")),
    "sums of actors not asked": Refutes(dropped(COMMON, "free", "used -= mem"), "swa_window.free", ("/sum.global.",)),
    "edges and counters not asked": Refutes(dropped(COMMON, "unmark", "EVICTING"), "swa_window.unmark", ("/edges.",)),
    "later effects over the first state": InOrder(("split", "restore_begin")),
    "later guards over the first state": InOrder(("split", "restore_begin")),
    "what is passed read after the first part": InOrder(("join", "clone_begin")),
    "every rank falls": RefutesClaim("recovery_ends<on_disk_prefix>", ranked_flat, ("_lowers",)),
    "every helpful row fair": RefutesClaim("erasing_ends<on_disk_prefix>", helped_by_the_unfair, ("is_a_fair_row",)),
    "another's help taken for granted": RefutesClaim("queue_moves<on_disk_prefix>", helped_by_nobody, ("_enabled",)),
    "first state not asked": RefutesFirst("uncharged<swa_window>"),
    "first state not literal": Proves((), first_state=True),
}  # fmt: skip


def test_at_least_20_faults_are_planted_and_each_has_its_probe() -> None:
    names = [f.name for f in faults()]
    assert len(set(names)) == len(names) >= 20
    assert set(names) == set(PROBES)


@pytest.mark.parametrize("probe", list(dict.fromkeys(PROBES.values())), ids=str)
def test_the_probe_passes_on_the_generator_as_it_is(probe: Probe) -> None:
    assert probe.passes(SPEC, TABLES)


@pytest.mark.parametrize("fault", faults(), ids=lambda f: f.name)
def test_the_fault_is_seen(fault: Fault) -> None:
    with fault.plant():
        assert not PROBES[fault.name].passes(SPEC, TABLES)


def test_a_fault_ends_with_its_scope() -> None:
    for fault in faults():
        with fault.plant():
            pass
    assert FREE.passes(SPEC, TABLES)
    assert UNMOVED.passes(SPEC, TABLES)
