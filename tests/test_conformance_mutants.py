"""The suite finds every fault that is planted in the reference allocator; the committed table says by which rule."""

import re

import pytest
from conformance_mutants import MUTANTS, REPORT
from conformance_planting import PARAMETERS, PROFILE, Mutant, hunt

from hybridkv_ref.conformance.capabilities import load_suite
from hybridkv_ref.conformance.engine import Evict, Load, Store, Transfer
from hybridkv_ref.conformance.lockstep import Lockstep, full_header
from hybridkv_ref.conformance.machine import ALL, prompt
from hybridkv_ref.conformance.reference import ReferenceEngine
from hybridkv_ref.conformance.run import conform
from hybridkv_ref.rules import load_rules


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found_by_its_rule(name: str) -> None:
    found = hunt(MUTANTS[name], PARAMETERS["small"])
    assert found is not None
    assert MUTANTS[name].rule in found.rules, found.message


@pytest.mark.deep
@pytest.mark.parametrize("key", [key for key in PARAMETERS if key != "small"])
@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_fault_is_found_under_every_parameter(name: str, key: str) -> None:
    found = hunt(MUTANTS[name], PARAMETERS[key])
    assert found is not None
    assert MUTANTS[name].rule in found.rules, found.message


@pytest.mark.parametrize("key", PARAMETERS)
def test_without_a_fault_nothing_is_found(key: str) -> None:
    assert hunt(Mutant(""), PARAMETERS[key]) is None


def test_the_hunt_is_no_longer_than_the_quick_profile() -> None:
    quick = load_suite().profiles["quick"]
    assert (PROFILE.examples, PROFILE.steps) == (quick.examples, quick.steps)


def test_the_table_has_every_fault_with_a_rule_that_exists() -> None:
    lines = [line for line in REPORT.read_text().splitlines() if line.startswith("| ")][1:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [row[0] for row in cells] == list(MUTANTS)
    assert len(MUTANTS) >= 30
    rules = load_rules()
    for row in cells:
        assert MUTANTS[row[0]].rule in re.findall(r"HKV-[A-Z0-9]+-\d{3}", row[1])
        assert all(rule in rules for rule in re.findall(r"HKV-[A-Z0-9]+-\d{3}", row[1]))
        assert len(row) == 2 + len(PARAMETERS)
        assert "not found" not in " ".join(row)


@pytest.mark.parametrize("key", PARAMETERS)
def test_the_reference_passes_all_that_it_claims(key: str) -> None:
    engine = ReferenceEngine(**PARAMETERS[key])  # type: ignore[arg-type]
    found = conform(engine, PROFILE, "quick")
    engine.close()
    assert found.error == ""
    assert found.verdict == "pass"
    assert {rule for rule, v in found.rules.items() if v.asked_by} >= set(load_suite().asks["transfers"])


def test_the_reference_without_a_tier_claims_no_transfers() -> None:
    engine = ReferenceEngine(host_bytes=0)
    found = conform(engine, PROFILE, "quick")
    engine.close()
    assert "transfers" not in engine.capabilities
    assert found.verdict == "pass"
    assert found.rules["HKV-L3-003"].unclaimed == ["transfers"]


def test_bytes_of_a_copy_stand_still_until_they_are_let_go_on() -> None:
    engine = ReferenceEngine()
    run = Lockstep(engine, full_header(engine))
    run.serve(prompt((0,), 1, run.chunk))
    assert run.do(Store())
    assert type(run.events[-1]).__name__ == "TransferBegin"
    assert run.do(Transfer(ok=False))
    assert "TransferFail" in [type(event).__name__ for event in run.events]
    assert not run.do(Transfer())
    assert run.refused == []
    engine.close()


def test_a_load_of_what_was_computed_meanwhile_is_given_up() -> None:
    engine = ReferenceEngine()
    run = Lockstep(engine, full_header(engine))
    tokens = prompt((0, 1), 1, run.chunk)
    run.serve(tokens)
    while run.do(Store()):
        run.do(Transfer())
    run.do(Evict("", ALL))
    assert run.do(Load("waiting", tokens))
    run.serve(tokens)
    while run.do(Transfer()):
        pass
    assert any(engine.idle(group) for group in engine.geometry.groups)
    run.rest()
    assert [str(one.refusal) for one in run.refused] == []
    engine.close()
