"""The generated state machine passes on the tables, and finds each planted fault."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hybridkv_ref.loader import build
from hybridkv_ref.model_checks.instances import read_instances
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import Spec, read_spec
from hybridkv_ref.table_rules import BrokenPropertyError, machine_class, run_rules
from hybridkv_ref.tables import Tables

SPEC = read_spec(SPEC_DIR)
TABLES = build(SPEC)
COMMON, HIT, GRAPH = "common.toml", "protocols/prefix_hit.toml", "protocols/cuda_graph.toml"
DISK, INDEX, KV = "kinds/on_disk_prefix.toml", "kinds/indexer_state.toml", "kinds/compressed_kv.toml"
TRANSFER = "protocols/transfer.toml"


def instance(tables: Tables, name: str) -> Any:
    return next(i for i in read_instances(tables, SPEC_DIR / "instances.toml")[0] if i.name == name)


@pytest.mark.parametrize(
    ("name", "events"),
    [("reader<compressed_kv>", 18), ("spill<compressed_kv>", 12), ("graph", 7), ("transfer<swa_window>", 8)],
)
def test_the_tables_pass_and_rows_fire(name: str, events: int) -> None:
    fired = run_rules(machine_class(TABLES, instance(TABLES, name)), examples=40, steps=40)
    assert len(fired) >= events
    assert sum(fired.values()) > 100


def planted(file: str, section: str, row: str, key: str, change: Callable[[Any], Any]) -> Spec:
    table = SPEC.files[file]
    entries = dict(getattr(table, section))
    old = getattr(entries[row], key)
    new = change(old)
    assert new != old
    entries[row] = msgspec.structs.replace(entries[row], **{key: new})
    return msgspec.structs.replace(
        SPEC, files={**SPEC.files, file: msgspec.structs.replace(table, **{section: entries})}
    )


def without(text: str) -> Callable[[list[str]], list[str]]:
    return lambda texts: [t for t in texts if t != text]


def instead(old: str, new: str) -> Callable[[list[str]], list[str]]:
    return lambda texts: [new if t == old else t for t in texts]


FAULTS = [
    ("freed under a pin", COMMON, "rows", "free", "when", without("pins == 0"), "reader<compressed_kv>"),
    ("admitted past the cap", COMMON, "rows", "admit", "when", without("used + size <= CAP"), "reader<swa_window>"),
    ("generation stands still", COMMON, "rows", "abort", "then", without("generation += 1"), "reader<compressed_kv>"),
    ("a pin is not counted", HIT, "rows", "release", "then", without("req.held -= 1"), "joint"),
    ("a writer stays", COMMON, "rows", "commit", "then", without("writers -= 1"), "reader<indexer_state>"),
    ("rebased under a replay", GRAPH, "rows", "rebase", "when", without("replays == 0"), "graph"),
    ("replay of an old graph", GRAPH, "rows", "replay", "when", without("graph.captured == topology"), "graph"),
    ("outdated under a reader", INDEX, "rows", "outdate", "when", without("pins == 0"), "workers<indexer_state>"),
    ("loads past the I/O cap", DISK, "rows", "load_begin", "when", without("io_used + 1 <= IO_CAP"), "queue"),
    ("reservation is kept", DISK, "rows", "load_fail", "then", without("gpu_reserved -= reserved"), "queue"),
    ("fold adds two entries", KV, "rows", "fold_in_end", "then", instead("end += RATIO", "end += RATIO + RATIO"),
     "fold<compressed_kv>"),
    ("delivered with a part missing", TRANSFER, "rows", "deliver", "when", without("xfer.arrived == xfer.parts"),
     "transfer<compressed_kv>"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("file", "section", "row", "key", "change", "name"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS]
)
def test_a_planted_fault_is_found(
    file: str, section: str, row: str, key: str, change: Callable[[Any], Any], name: str
) -> None:
    tables = build(planted(file, section, row, key, change))
    with pytest.raises(BrokenPropertyError) as caught:
        run_rules(machine_class(tables, instance(tables, name)), examples=500, steps=40)
    assert len(str(caught.value).splitlines()) > 1  # the steps that lead there
