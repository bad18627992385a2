"""The suite finds every fault that is planted in the reference allocator; the committed table says by which rule."""

import re

import pytest
from conformance_mutants import MUTANTS, PARAMETERS, PROFILE, REPORT, Mutant, hunt

from hybridkv_ref.conformance.capabilities import load_suite
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
    assert hunt(MUTANTS[name], PARAMETERS[key]) is not None


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
