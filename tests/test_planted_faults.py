"""Each fault planted in the proof generator is seen by a probe that passes on the generator as it is."""

from pathlib import Path

import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build
from hybridkv_ref.model_checks.generator_probes import FILE, Proves, Refutes, read_probes
from hybridkv_ref.model_checks.planted_faults import plants, seen
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_spec

SPEC = read_spec(SPEC_DIR)
TABLES = build(SPEC)
PROBES = read_probes(SPEC_DIR)


def test_at_least_20_faults_are_planted_and_each_has_its_probe() -> None:
    assert len(plants()) >= 20
    assert set(plants()) == set(PROBES)


@pytest.mark.parametrize("name", plants())
def test_the_fault_is_seen(name: str) -> None:
    found = seen(SPEC, TABLES, name, PROBES[name])
    assert (found.status, found.passed) == ("found", True)


def test_a_probe_that_does_not_look_is_found_out() -> None:
    blind = Proves(rows=["graph.capture"])
    found = seen(SPEC, TABLES, "no_bystander_segment", blind)
    assert (found.status, found.passed) == ("unseen", False)


def test_a_probe_that_fails_anyway_is_found_out() -> None:
    probe = PROBES["the_goal_assumed"]
    assert isinstance(probe, Refutes)
    found = seen(
        SPEC, TABLES, "the_goal_assumed", Refutes(probe.file, probe.row, probe.text, probe.event, ["/nowhere"])
    )
    assert (found.status, found.passed) == ("fails without a fault", False)


def test_a_fault_ends_with_its_scope() -> None:
    for plant in plants().values():
        with plant():
            pass
    assert PROBES["old_and_new_swapped"].passes(SPEC, TABLES)
    assert PROBES["the_goal_assumed"].passes(SPEC, TABLES)


def test_a_stale_text_and_two_probes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"rows\.free: has 'nothing' 0 times"):
        Refutes("common.toml", "free", "nothing", "swa_window.free", []).passes(SPEC, TABLES)
    (tmp_path / FILE).write_text('title = "x"\n[fault.x]\nagrees = { states = 1 }\nproves = { rows = [] }\n')
    with pytest.raises(InputError, match=r"fault\.x: has 2 probes, expected one"):
        read_probes(tmp_path)
