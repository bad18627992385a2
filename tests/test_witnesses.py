"""Every row, stage, ``sometimes`` and guard conjunct has its witness, and what cannot happen is missed."""

from pathlib import Path

import msgspec
import pytest

from hybridkv_ref.loader import build
from hybridkv_ref.model_checks.explore import Graph, explore
from hybridkv_ref.model_checks.finite import LostWitness, search_instances
from hybridkv_ref.model_checks.instances import PinSpec, read_instances
from hybridkv_ref.model_checks.obligations import Search, TaskResult
from hybridkv_ref.model_checks.witnesses import Witnesses, size_difference
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import Spec, read_spec
from hybridkv_ref.tables import Event, Tables

SPEC = read_spec(SPEC_DIR)
TABLES = build(SPEC)
PATH = SPEC_DIR / "instances.toml"


def never(event: Event, index: int) -> bool:
    """The prover that proves nothing."""
    return False


@pytest.fixture(scope="module")
def everything() -> TaskResult:
    return search_instances(TABLES, SPEC_DIR, never)


@pytest.fixture(scope="module")
def graphs() -> dict[str, Graph]:
    names = ("reader<compressed_kv>", "graph", "media")
    return {i.name: explore(TABLES, i) for i in read_instances(TABLES, PATH)[0] if i.name in names}


def of(result: TaskResult, method: str) -> list[Search]:
    return [s for s in result.searches if s.method == method]


def with_row(label: str, row: str, **fields: object) -> Tables:
    table = SPEC.files[label]
    rows = {**table.rows, row: msgspec.structs.replace(table.rows[row], **fields)}
    return build(msgspec.structs.replace(SPEC, files={**SPEC.files, label: msgspec.structs.replace(table, rows=rows)}))


def test_everything_is_reached(everything: TaskResult) -> None:
    found = of(everything, "witness")
    assert [s.id for s in found if not s.passed] == []
    wanted = len(TABLES.events) + sum(map(len, TABLES.stages.values())) + len(TABLES.forms("sometimes"))
    assert len(found) == wanted >= 60
    assert all(s.bound and s.depth >= 0 for s in found)


def test_first_stages_are_reached_at_once_and_rows_later(everything: TaskResult) -> None:
    depth = {s.id: s.depth for s in of(everything, "witness")}
    assert depth["stage compressed_kv.FREE"] == 0
    assert depth["row request.start_cold"] == 1
    assert depth["row compressed_kv.admit"] == 2  # the request must run before it may write
    assert depth["stage compressed_kv.READY"] == depth["row compressed_kv.commit"]


def test_properties_hold_and_claims_have_no_fair_cycle(everything: TaskResult) -> None:
    assert [s.id for s in of(everything, "exploration") if s.status != "holds"] == []
    cycles = of(everything, "fair cycle")
    assert {s.id for s in cycles} == {c.id for c in TABLES.responses}
    assert [s.id for s in cycles if s.status != "holds"] == []
    assert of(everything, "trap") == []
    assert everything.counterexamples == []


def test_the_sizes_are_the_pinned_ones(everything: TaskResult) -> None:
    assert [s.detail for s in of(everything, "size")] == []


def test_a_size_that_differs_is_shown_but_fails_nothing(graphs: dict[str, Graph]) -> None:
    graph = graphs["graph"]
    assert size_difference(graph, {"graph": PinSpec(graph.states, graph.edges)}) == ""
    assert "pinned 1 and 2" in size_difference(graph, {"graph": PinSpec(1, 2)})
    assert "not pinned" in size_difference(graph, {})


def test_most_conjuncts_are_seen_as_the_only_false_one(everything: TaskResult) -> None:
    total = sum(len(e.guards) for e in TABLES.events)
    missing = [s for s in of(everything, "conjunct") if s.status == "missing"]
    seen = int(next(s.detail for s in of(everything, "conjunct") if s.status == "found"))
    assert seen + len(missing) == total
    assert seen > total * 3 // 4


def test_a_redundant_conjunct_is_never_seen_alone(graphs: dict[str, Graph]) -> None:
    twice = [*SPEC.files["common.toml"].rows["free"].when, "pins <= 0"]
    tables = with_row("common.toml", "free", when=twice)
    found = Witnesses(tables)
    chosen = next(i for i in read_instances(tables, PATH)[0] if i.name == "reader<compressed_kv>")
    found.add(explore(tables, chosen))
    event = tables.event("compressed_kv.free")
    index = {g.text: i for i, g in enumerate(event.guards)}
    missing = found.conjuncts(never).missing
    assert (event.id, index["pins <= 0"]) in missing
    assert (event.id, index["pins == 0"]) in missing
    proved = found.conjuncts(lambda e, i: e.id == event.id and e.guards[i].text.startswith("pins"))
    assert {(event.id, index["pins <= 0"]), (event.id, index["pins == 0"])} == set(proved.implied)
    assert proved.seen + len(proved.implied) + len(proved.missing) == sum(len(e.guards) for e in tables.events)
    alone = Witnesses(TABLES)
    alone.add(graphs["reader<compressed_kv>"])
    texts = [g.text for g in TABLES.event("compressed_kv.free").guards]
    assert ("compressed_kv.free", texts.index("pins == 0")) not in alone.conjuncts(never).missing


def test_conjuncts_on_inputs_are_seen_alone(graphs: dict[str, Graph]) -> None:
    found = Witnesses(TABLES)
    found.add(graphs["media"])
    event = TABLES.event("on_disk_prefix.open_object")
    missing = {event.guards[i].text for e, i in found.conjuncts(never).missing if e == event.id}
    assert missing == set()


def test_a_row_that_cannot_fire_is_missing() -> None:
    tables = with_row("protocols/cuda_graph.toml", "recapture", when=["graph.captured > topology"])
    found = Witnesses(tables)
    found.add(explore(tables, next(i for i in read_instances(tables, PATH)[0] if i.name == "graph")))
    missing = set(found.missing)
    assert ("row", "graph.recapture") in missing
    assert ("stage", "graph.RECAPTURED") in missing
    assert ("row", "graph.capture") not in missing
    assert found.found["sometimes", "old_graph"].depth == 2  # capture, then rebase


def test_a_search_cut_short_gives_no_witness() -> None:
    chosen = next(i for i in read_instances(TABLES, PATH)[0] if i.name == "graph")
    with pytest.raises(ValueError, match="cut short"):
        Witnesses(TABLES).add(explore(TABLES, chosen, limit=10))


def test_a_new_kind_is_explored_without_a_line_here(tmp_path: Path) -> None:
    """A kind with the capabilities of another one gets the same instances under its own name."""
    label = "kinds/recurrent_state.toml"
    twin = msgspec.structs.replace(SPEC.files[label], kind="delta_state", title="A made-up kind")
    need = SPEC.recovery["need"]
    assert isinstance(need, dict)
    recovery = {**SPEC.recovery, "need": {**need, "delta_state": need["recurrent_state"]}}
    tables = build(Spec({**SPEC.files, "kinds/delta_state.toml": twin}, recovery))
    instances = {i.name: i for i in read_instances(tables, PATH)[0]}
    assert {n.replace("delta", "recurrent") for n in instances if "delta" in n} == {
        n for n in instances if "recurrent" in n
    }
    assert explore(tables, instances["clone<delta_state>"]).states > 1000


def test_a_mutant_is_killed_by_what_it_no_longer_reaches() -> None:
    killer = LostWitness(TABLES, SPEC_DIR)
    assert killer(TABLES, ["graph.recapture"]) == ""
    never_again = with_row("protocols/cuda_graph.toml", "recapture", when=["graph.captured > topology"])
    assert killer(never_again, ["graph.recapture"]) == "row graph.recapture"
    unfair = with_row("protocols/cuda_graph.toml", "replayed", fair=False)
    assert killer(unfair, ["graph.replayed"]) == "replay_ends"
    closed = with_row("kinds/on_disk_prefix.toml", "seal", when=["written > parts"])
    assert "on_disk_prefix.seal" in killer(closed, ["on_disk_prefix.seal"])
