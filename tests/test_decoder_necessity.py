"""Each rule is needed: with it every logit is right, without it some history goes wrong."""

import re
from pathlib import Path

import pytest
from decoder_switches import Witness
from decoder_witnesses import WITNESSES

from hybridkv_ref.decoder_geometry import Descriptor
from hybridkv_ref.rules import load_rules

RESULTS = Path(__file__).parent / "results" / "decoder_necessity.md"


@pytest.mark.parametrize("one", WITNESSES, ids=lambda one: one.rule)
def test_with_the_rule_all_is_right_and_without_it_not(one: Witness) -> None:
    assert one.run(True).harmless
    assert not one.run(False).harmless


def test_every_field_of_the_descriptor_has_a_witness() -> None:
    shown = {one.rule.removeprefix("kernel ABI: ") for one in WITNESSES}
    assert set(Descriptor.__struct_fields__) <= shown


def test_every_cited_rule_exists() -> None:
    assert {rule for one in WITNESSES for rule in one.ids} <= set(load_rules())


def test_the_committed_table_has_these_rows() -> None:
    rows = [line.split(" | ") for line in RESULTS.read_text().splitlines() if re.match(r"\| (?!rule)", line)]
    assert [(row[0].removeprefix("| "), row[1], row[2]) for row in rows] == [
        (one.rule, ", ".join(one.ids), one.history) for one in WITNESSES
    ]
    assert all("differ by 0 " not in row[5] for row in rows)
