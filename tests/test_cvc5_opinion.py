"""cvc5 agrees with Z3 on what it is asked, and a lost hypothesis shows as a disagreement or a failed proof."""

import dataclasses

import pytest

from hybridkv_ref.loader import load_tables
from hybridkv_ref.model_checks.frames import Assumptions

pytest.importorskip("cvc5", reason="the extra 'second-opinion' is not installed")

from hybridkv_ref.model_checks.cvc5_opinion import second_opinion

TABLES = load_tables()


@pytest.mark.parametrize(
    "name", ["row:graph.replay", "row:compressed_kv.free", "claim:replay_ends", "row:transfer.deliver"]
)
def test_both_solvers_agree(name: str) -> None:
    found = second_opinion(TABLES, [name])
    assert found
    assert {o.status for o in found} == {"proved"}
    assert {o.method for o in found} == {"cvc5"}


def test_both_refute_a_row_without_its_guard() -> None:
    free = TABLES.event("compressed_kv.free")
    broken = dataclasses.replace(free, guards=tuple(g for g in free.guards if g.text != "pins == 0"))
    events = tuple(broken if e is free else e for e in TABLES.events)
    tables = dataclasses.replace(TABLES, events=events)
    found = second_opinion(tables, ["row:compressed_kv.free"], base=Assumptions(tables))
    assert {o.status for o in found} == {"proved"}  # agreement, also on what Z3 refutes
