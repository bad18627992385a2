"""The suite as tests, one for each rule: ``pytest --pyargs hybridkv_ref.conformance -k HKV-SWA``."""

from collections.abc import Callable

import pytest

from hybridkv_ref.conformance.records import Report
from hybridkv_ref.conformance.report import reason
from hybridkv_ref.conformance.run import is_open
from hybridkv_ref.rules import load_rules

RULES = load_rules()


def test_the_engine_does_what_it_is_asked(hybridkv_report: Report) -> None:
    """No operation raised, and each event was of the vocabulary and named a group of the header."""
    if hybridkv_report.error:
        pytest.fail(f"{hybridkv_report.engine}: {hybridkv_report.error}", pytrace=False)


@pytest.mark.parametrize("rule", RULES)
def test_rule(rule: str, hybridkv_report: Report, record_property: Callable[[str, object], None]) -> None:
    """The rule held whenever its premise did."""
    verdict = hybridkv_report.rules[rule]
    record_property("result", verdict.result)
    record_property("premises", verdict.premises)
    if verdict.found is not None:
        text = f"{rule} {RULES[rule].statement}\n  {verdict.found.message}\n  replay: {verdict.found.replay}"
        if verdict.known_gap:
            pytest.xfail(text)
        pytest.fail(text, pytrace=False)
    if verdict.known_gap:
        pytest.fail(f"{rule}: a known gap that was not seen broken ({verdict.result}): take it out", pytrace=False)
    if is_open(verdict):
        pytest.fail(reason(rule, verdict), pytrace=False)
    if verdict.result != "pass":
        pytest.skip(reason(rule, verdict))
