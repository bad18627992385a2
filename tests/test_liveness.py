"""Liveness by ranking: every claim is proved, and a broken promise of progress fails the claim that rests on it."""

import dataclasses
from pathlib import Path

import pytest
from helpers import copy_spec, edit, failed, faulty, prove_claims, table_properties

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import load_tables
from hybridkv_ref.model_checks.frames import Assumptions
from hybridkv_ref.tables import Tables

TABLES = load_tables()
BASE = Assumptions(TABLES)
COMMON, HIT, HANDOFFS, GRAPH = "common.toml", *(f"protocols/{n}.toml" for n in ("prefix_hit", "handoffs", "cuda_graph"))
TRANSFER = "protocols/transfer.toml"
SWA, INDEX, DISK = (f"kinds/{n}.toml" for n in ("swa_window", "indexer_state", "on_disk_prefix"))
CLAIMS = tuple(dict.fromkeys(claim.id.partition("<")[0] for claim in TABLES.responses))


@pytest.mark.parametrize("name", CLAIMS)
def test_the_claim_is_proved(name: str) -> None:
    result = prove_claims(TABLES, name, BASE, kinds=2)  # `hybridkv check` proves it for all
    assert result.obligations
    assert failed(result) == []


def test_all_four_forms_occur() -> None:
    assert {claim.form for claim in TABLES.responses} >= {"response", "drain"}


def test_every_kind_that_is_cached_gives_its_leases_back() -> None:
    cached = {k for k, kind in TABLES.kinds.items() if "cacheable" in kind.capabilities}
    assert {c.kinds["self"] for c in TABLES.responses if c.id.startswith("lease_ends<")} == cached


# file, section, text, what stands there instead, the claim that fails, and the obligation that says why
FAULTS = [
    (COMMON, "rows.free", "fair = true\n", "", "eviction_ends", "helpful[2]_is_a_fair_row"),
    (COMMON, "rows.unmark", "fair = true\n", "", "eviction_ends", "helpful[0]_is_a_fair_row"),
    (
        COMMON,
        "rows.free",
        'when = ["pins == 0", "steps == 0"]',
        'when = ["pins == 0", "steps == 0", "holds == 7"]',
        "eviction_ends",
        "helpful[2]_free_enabled",
    ),
    (
        COMMON,
        "response.eviction_ends",
        '  { row = "unmark", when = "pins > 0" },\n',
        "",
        "eviction_ends",
        "somebody_helps",
    ),
    (
        COMMON,
        "response.eviction_ends",
        '"1 if pins > 0 else 0"',
        '"0 if pins > 0 else 1"',
        "eviction_ends",
        "rank_never_rises",
    ),
    (
        COMMON,
        "response.eviction_ends",
        '  { by = "steps_of_the_gone_end", count = "steps", when = "pins == 0 and steps > 0" },\n',
        "",
        "eviction_ends",
        "somebody_helps",
    ),
    (COMMON, "response.eviction_ends", '"steps if pins == 0 else 0"', '"0"', "eviction_ends", "helpful[1]_end_lowers"),
    (COMMON, "response.eviction_ends", '"1 if pins > 0 else 0"', '"0 - pins"', "eviction_ends", "rank[0]_not_negative"),
    (COMMON, "response.device_drains", 'also_fair = ["retire"]\n', "", "device_drains", "is_a_fair_row"),
    (COMMON, "response.device_drains", 'without = ["intake"]\n', "", "device_drains", "rank_never_rises"),
    (HIT, "rows.retry", '"f < req.f"', '"f <= req.f"', "request_ends", "rank_never_rises"),
    (HIT, "rows.drop", "fair = true\n", "", "lease_ends", "helpful[0]_is_a_fair_row"),
    (HIT, "rows.complete", "fair = true\n", "", "steps_of_the_gone_end", "helpful[0]_is_a_fair_row"),
    (HIT, "rows.preempt", 'then = ["req.preempts += 1"]\n', "", "request_ends", "rank_never_rises"),
    (HIT, "rows.resume_cold", "fair = true\n", "", "request_ends", "is_a_fair_row"),
    (HANDOFFS, "handoffs.clone_fail", "fair = true\n", "", "copy_ends_clone", "helpful[0]_is_a_fair_row"),
    (HANDOFFS, "handoffs.clone_fail", 'to = "IDLE"', 'to = "ARRIVED"', "copy_ends_clone", "helpful[0]_stays"),
    (TRANSFER, "handoffs.ship_stop", "fair = true\n", "", "copy_ends_shipment", "helpful[1]_is_a_fair_row"),
    (TRANSFER, "rows.transfer_close", "fair = true\n", "", "transfer_ends", "is_a_fair_row"),
    (TRANSFER, "rows.withdraw", "fair = true\n", "", "votes_end", "helpful[2]_is_a_fair_row"),
    (SWA, "rows.realign_end", "fair = true\n", "", "realign_ends", "helpful[0]_is_a_fair_row"),
    (INDEX, "rows.rebuild_end", 'to = "SYNCED"', 'to = "REBUILDING"', "rebuild_ends", "rebuild_end_lowers"),
    (DISK, "rows.settle", "fair = true\n", "", "recovery_ends", "is_a_fair_row"),
    (DISK, "rows.skip", "fair = true\n", "", "queue_moves", "is_a_fair_row"),
    (GRAPH, "rows.replayed", "fair = true\n", "", "replay_ends", "helpful[0]_is_a_fair_row"),
]


def changed(folder: Path, label: str, header: str, old: str, new: str) -> Tables:
    spec = copy_spec(folder)
    edit(spec / label, old, new, header)
    tables = faulty(spec)
    assert table_properties(tables) == table_properties(TABLES)
    return dataclasses.replace(TABLES, events=tables.events, responses=tables.responses)


@pytest.mark.parametrize(("label", "header", "old", "new", "claim", "why"), FAULTS)
def test_a_broken_promise_fails_its_claim(
    tmp_path: Path, label: str, header: str, old: str, new: str, claim: str, why: str
) -> None:
    broken = failed(prove_claims(changed(tmp_path, label, header, old, new), claim, BASE, kinds=1))
    assert [o.id for o in broken if why in o.id], [o.id for o in broken]
    assert all(o.property.partition("<")[0] == claim for o in broken)


def test_a_claim_that_rests_on_an_unknown_row_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"response\.eviction_ends: no row 'fre'"):
        changed(tmp_path, COMMON, "response.eviction_ends", 'row = "free"', 'row = "fre"')


def test_a_copy_that_nobody_promises_to_end_helps_nobody(tmp_path: Path) -> None:
    tables = changed(tmp_path, HANDOFFS, "response.copy_ends_spill", 'src_has = "spills"', 'src_has = "folds"')
    broken = failed(prove_claims(tables, "device_drains", BASE, kinds=1))
    assert [o.id for o in broken if "copy_ends" in o.id]
