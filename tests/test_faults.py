"""Public faults.

Each is refused at its event by its rule, its correction is accepted, and so are 20 variants of both.
"""

import json
import operator
import re
import tomllib
from pathlib import Path

import msgspec
import pytest
from trace_variants import variants

from hybridkv_ref.events import Event, Header
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_records import Refusal
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.rules import load_rules

FOLDER = Path(__file__).parent / "faults"
MOST_LEFT_OUT = 6
LISTED, FURTHER = "KVB-", "PUB-"


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    system: str
    say: str
    rule: str
    at: int
    before: str
    bad: str
    good: str
    source: str = ""

    def trace(self, ending: str) -> tuple[Header, list[Event]]:
        lines = (self.before + ending).splitlines()
        return (
            msgspec.json.decode(lines[0], type=Header),
            [msgspec.json.decode(line, type=Event) for line in lines[1:]],
        )


def load() -> dict[str, Fault]:
    found: dict[str, Fault] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        if path.name != "labels.toml":
            entries = msgspec.convert(tomllib.loads(path.read_text()), dict[str, Fault])
            assert not found.keys() & entries.keys(), path
            found |= entries
    return found


FAULTS = load()
README = (FOLDER / "README.md").read_text()
LABELS: dict[str, list[str]] = tomllib.loads((FOLDER / "labels.toml").read_text())


def refused(header: Header, events: list[Event]) -> tuple[Refusal, ...]:
    return Oracle(header).feed_all(events)


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_the_fault_is_refused_and_its_correction_is_not(name: str) -> None:
    fault = FAULTS[name]
    found = refused(*fault.trace(fault.bad))
    assert found
    assert found[0].index == fault.at, found[0]
    assert fault.rule in found[0].rules, found[0]
    assert refused(*fault.trace(fault.good)) == ()


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_variants_get_the_same_verdict(name: str) -> None:
    fault = FAULTS[name]
    header, events = fault.trace(fault.bad)
    tried = variants(header, events)
    assert len(tried) == 20
    for what, changed, marked in tried:
        found = refused(changed, [event for _, event in marked])
        assert found, what
        assert marked[found[0].index - 1][0] == fault.at, (what, found[0])
        assert fault.rule in found[0].rules, (what, found[0])
    for what, changed, marked in variants(*fault.trace(fault.good)):
        assert refused(changed, [event for _, event in marked]) == (), what


def test_every_fault_of_the_list_is_there_and_has_a_rule_of_its_labels(shared_data: Path) -> None:
    listed = {}
    for line in (shared_data / "public_bugs.jsonl").read_text().splitlines():
        entry = json.loads(line)
        own = entry["expected_verdict"]["rule_ids"]
        more = [entry["class"], *entry["also"], *([entry["new_rule"]] if entry["new_rule"] else [])]
        listed[entry["id"]] = (entry["system"], [*own, *more])
    ours = {name: fault for name, fault in FAULTS.items() if name.startswith(LISTED)}
    assert ours.keys() <= listed.keys()
    assert len(listed) - len(ours) <= MOST_LEFT_OUT
    for name, fault in ours.items():
        system, labels = listed[name]
        assert fault.system == system
        assert fault.rule in {rule for label in labels for rule in LABELS[label]}, name


def test_further_faults_say_where_they_come_from_and_the_readme_counts_them() -> None:
    further = {name for name in FAULTS if not name.startswith(LISTED)}
    assert sorted(further) == [f"{FURTHER}{number:03d}" for number in range(1, len(further) + 1)]
    assert all(bool(fault.source) == (name in further) for name, fault in FAULTS.items())
    counted = re.findall(r"^\| `(pub_\w+\.toml)` \|[^|]*\| (.*) \|$", README, re.MULTILINE)
    assert {file for file, _ in counted} == {path.name for path in FOLDER.glob("pub_*.toml")}
    for file, rounds in counted:
        named, written = zip(*((int(a), int(b)) for a, b in re.findall(r"(\d+) of (\d+)", rounds)), strict=True)
        assert sum(written) == len(tomllib.loads((FOLDER / file).read_text())), file
        assert all(map(operator.le, named, written)), file


def test_labels_and_faults_name_rules_that_exist() -> None:
    rules = load_rules()
    assert {rule for rules_of in LABELS.values() for rule in rules_of} <= rules.keys()
    assert {fault.rule for fault in FAULTS.values()} <= rules.keys()


def test_no_table_mentions_a_fault_or_a_system() -> None:
    names = {fault.system.split()[0].lower() for fault in FAULTS.values()} | {"kvb"}
    pattern = re.compile(rf"\b(?:{'|'.join(map(re.escape, sorted(names)))})\b")
    for path in (*(SPEC_DIR / "oracle").glob("*.toml"), SPEC_DIR / "events.toml"):
        assert not pattern.findall(path.read_text().lower()), path
