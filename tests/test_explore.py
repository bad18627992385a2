"""The search agrees with the machine, its reductions lose nothing, and a planted fault ends in a shortest trace."""

from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build
from hybridkv_ref.machine import Entity, Machine, World
from hybridkv_ref.model_checks.explore import Graph, explore
from hybridkv_ref.model_checks.instances import Instance, read_instances
from hybridkv_ref.model_checks.second_opinion import second_opinion
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import Spec, read_spec
from hybridkv_ref.tables import Tables

SPEC = read_spec(SPEC_DIR)
TABLES = build(SPEC)
INSTANCES = {i.name: i for i in read_instances(TABLES, SPEC_DIR / "instances.toml")[0]}
State = tuple[int | str, ...]

READER = """
title = "a test"
[instance.reader]
doc = "one writer, one reader, one segment"
segments = { a = { kind = "compressed_kv" } }
requests = { r = { length = 9, kernel = true, "uses.compressed_kv" = true }, q = { length = 9, kernel = true } }
leases = ["a.r", "a.q"]
constants = { "compressed_kv.CAP" = 1, RATIO = 1 }
off = ["reject", "match q", "start_cold r", "rebase"]
inputs = { at = [0], size = [1], meta = [0], off = [0], until = [0], n = [1], s = [1], f = [1], bound = [1], \
known = [9], matched = [9], to = [0] }
"""


def instance(tmp_path: Path, text: str = READER, tables: Tables = TABLES) -> Instance:
    path = tmp_path / "instances.toml"
    path.write_text(text)
    return read_instances(tables, path)[0][0]


def changed_row(label: str, row: str, **fields: object) -> Spec:
    """The spec with some fields of one row replaced, in memory."""
    file = SPEC.files[label]
    rows = {**file.rows, row: msgspec.structs.replace(file.rows[row], **fields)}
    return msgspec.structs.replace(SPEC, files={**SPEC.files, label: msgspec.structs.replace(file, rows=rows)})


def without_guard(label: str, row: str, text: str) -> Tables:
    when = SPEC.files[label].rows[row].when
    assert text in when
    return build(changed_row(label, row, when=[w for w in when if w != text]))


class Replay:
    """An instance in the machine: the same entities, states as tuples of all their variables."""

    def __init__(self, tables: Tables, chosen: Instance) -> None:
        self.instance, self.machine = chosen, Machine(tables, chosen.constants)
        self.world: World = self.machine.world()
        self.entities: dict[str, Entity] = {}
        for e in chosen.entities:
            owners = {role: self.entities[name] for role, name in e.owners.items()}
            self.entities[e.name] = self.world.add(e.cls, e.kind, owners, **e.rigid)
        self.slots = [(self.world.pool, n) for n in type(self.world.pool).__slots__]
        self.slots += [(e, n) for e in self.entities.values() for n in type(e).__slots__]

    def state(self) -> State:
        return tuple(getattr(owner, name) for owner, name in self.slots)

    def restore(self, state: State) -> None:
        for (owner, name), value in zip(self.slots, state, strict=True):
            setattr(owner, name, value)

    def bindings(self) -> list[tuple[str, tuple[Entity, ...], tuple[int | str, ...]]]:
        found = []
        for event in self.machine.tables.events:
            for chosen in self.instance.bindings(event):
                if event.actor != "environment" and not self.instance.leaves_out(event.row, chosen):
                    domains = [self.instance.inputs[event.id, n] for n in event.inputs]
                    entities = tuple(self.entities[e.name] for e in chosen)
                    found += [(event.id, entities, values) for values in product(*domains)]
        return found

    def search(self, depth: int) -> tuple[set[State], int]:
        """All states up to a depth and the number of transitions out of those before it, the plain way."""
        frontier, seen, edges = {self.state()}, {self.state()}, 0
        calls = [(self.machine.events[e].call, entities, values) for e, entities, values in self.bindings()]
        for _ in range(depth):
            reached = set()
            for state in frontier:
                for call, entities, values in calls:
                    self.restore(state)
                    if call(self.world.pool, *entities, *values) < 0:
                        edges += 1
                        reached.add(self.state())
            frontier = reached - seen
            seen |= frontier
        return seen, edges


def states_of(graph: Graph, replay: Replay) -> set[State]:
    """The states of a graph in the order of the replay's slots."""
    places = []
    for owner, slot in replay.slots:
        owned = next((n for n, e in replay.entities.items() if e is owner), "")
        places.append(
            next(p for p, (o, n) in enumerate(graph.space.names) if o == owned and n.replace(".", "__") == slot)
        )
    return {tuple(graph.value(p, s) for p in places) for s in range(graph.states)}


@pytest.mark.parametrize("name", ["exact<compressed_kv>", "exact<recurrent_state>", "leftover<swa_window>"])
def test_the_search_finds_what_the_machine_finds(name: str) -> None:
    chosen = INSTANCES[name]
    depth = min(chosen.depth, 5)
    chosen = Instance(**{**vars(chosen), "depth": depth, "script": ()})
    graph, replay = explore(TABLES, chosen), Replay(TABLES, chosen)
    states, edges = replay.search(depth)
    assert graph.states == len(states) > 10
    assert graph.edges == edges
    assert states_of(graph, replay) == states


def test_every_trace_replays_in_the_machine() -> None:
    chosen = INSTANCES["spill<swa_window>"]
    graph = explore(TABLES, chosen)
    for state in range(0, graph.states, 97):
        replay = Replay(TABLES, chosen)
        for step in graph.trace(state):
            replay.world.fire(step.event, *(replay.entities[n] for n in step.entities), **step.inputs)
        for name, entity in replay.entities.items():
            assert entity.stage == graph.value(graph.space.index[name, "stage"], state)


def stage_views(graph: Graph) -> set[State]:
    places = [p for p, (_, name) in enumerate(graph.space.names) if name == "stage"]
    return {tuple(graph.value(p, s) for p in places) for s in range(graph.states)}


def test_collapsed_counters_reach_the_same_stages() -> None:
    chosen = INSTANCES["graph"]
    counted = explore(TABLES, chosen)
    collapsed = explore(TABLES, Instance(**{**vars(chosen), "budgets": {}}))
    assert collapsed.states < counted.states
    assert stage_views(collapsed) == stage_views(counted)


def test_reduced_states_reach_the_same_stages_as_exact_ones(tmp_path: Path) -> None:
    chosen = instance(tmp_path)
    reduced = explore(TABLES, Instance(**{**vars(chosen), "depth": 11}))
    exact = explore(TABLES, Instance(**{**vars(chosen), "depth": 11, "exact": True}))
    assert reduced.states < exact.states
    assert stage_views(reduced) == stage_views(exact)


def test_properties_hold_on_an_instance_of_each_sort() -> None:
    for name in ("reader<recurrent_state>", "spill<compressed_kv>", "fold<indexer_state>", "queue", "graph"):
        opinion = second_opinion(explore(TABLES, INSTANCES[name]))
        assert opinion.checked > 40
        assert opinion.violations == ()


def test_a_freed_pin_is_found_with_its_shortest_trace(tmp_path: Path) -> None:
    broken = without_guard("common.toml", "free", "pins == 0")
    chosen = instance(tmp_path, READER.replace("inputs =", "depth = 7\ninputs ="), broken)
    found = {v.property: v for v in second_opinion(explore(broken, chosen)).violations}
    trace = found["pinned_bytes_stay<compressed_kv>"].trace
    assert [s.event.split(".")[1] for s in trace] == ["start_cold", "admit", "append", "commit", "retire", "free"]
    assert trace[-1].changed["a.stage"] == ("RETIRING", "FREE")
    assert "pinned_is_kept<compressed_kv>" in found


def without_extended_guard(label: str, row: str, text: str) -> Tables:
    file = SPEC.files[label]
    when = file.extend[row].when
    assert text in when
    extension = msgspec.structs.replace(file.extend[row], when=[w for w in when if w != text])
    changed = msgspec.structs.replace(file, extend={**file.extend, row: extension})
    return build(msgspec.structs.replace(SPEC, files={**SPEC.files, label: changed}))


@pytest.mark.parametrize(
    ("label", "row", "guard", "name", "broken"),
    [
        ("common.toml", "free", "steps == 0", "steps<compressed_kv>", "steps_see_their_bytes<compressed_kv>"),
        ("common.toml", "reject_drafts", "steps == 0", "drafts<swa_window>", "steps_see_their_bytes<swa_window>"),
        ("common.toml", "commit", "end <= committed", "drafts<swa_window>", "published_is_committed<swa_window>"),
        ("protocols/prefix_hit.toml", "check", "req.votes >= req.ranks", "ranks", "ranks_agree"),
        (
            "protocols/prefix_hit.toml", "pass_l1", "end + req.ahead <= req.matched",
            "ahead<indexer_state>", "successor_is_known<indexer_state>",
        ),
        (
            "protocols/prefix_hit.toml", "pass_l1", "group == req.group",
            "other_group<swa_window>", "checked_group<swa_window>",
        ),
        (
            "common.toml", "accept_tokens", "to <= req.accepted",
            "drafts<indexer_state>", "accepted_by_the_request<indexer_state>",
        ),
        (
            "protocols/transfer.toml", "deliver", "xfer.arrived == xfer.parts",
            "parts<recurrent_state>", "delivery_is_whole",
        ),
        (
            "kinds/uncompressed_tail.toml", "append",
            "end + n - RING <= committed - RATIO - HALO + 1 or end + n - RING <= low",
            "fold_drafts<compressed_kv>", "margin<uncompressed_tail>",
        ),
    ],
)  # fmt: skip
def test_without_a_guard_of_serving_a_named_property_fails(
    label: str, row: str, guard: str, name: str, broken: str
) -> None:
    remove = without_extended_guard if row in SPEC.files[label].extend else without_guard
    tables = remove(label, row, guard)
    found = {v.property: v for v in second_opinion(explore(tables, INSTANCES[name])).violations}
    assert broken in found
    assert found[broken].trace[-1].event.endswith(f".{row}")
    assert broken not in {v.property for v in second_opinion(explore(TABLES, INSTANCES[name])).violations}


def test_an_unbalanced_charge_is_found(tmp_path: Path) -> None:
    then = [t for t in SPEC.files["common.toml"].rows["free"].then if t != "mem = 0"]
    broken = build(changed_row("common.toml", "free", then=then))
    found = {v.property for v in second_opinion(explore(broken, instance(tmp_path, tables=broken))).violations}
    assert "uncharged<compressed_kv>" in found


def test_a_step_property_with_inputs_is_evaluated(tmp_path: Path) -> None:
    then = ["end += n + n" if t == "end += n" else t for t in SPEC.files["common.toml"].rows["append"].then]
    broken = build(changed_row("common.toml", "append", then=then))
    found = {v.property for v in second_opinion(explore(broken, instance(tmp_path, tables=broken))).violations}
    assert "only_the_writer_appends<compressed_kv>" in found


def test_a_search_that_meets_its_limit_says_so(tmp_path: Path) -> None:
    graph = explore(TABLES, instance(tmp_path), limit=50)
    assert graph.truncated
    assert not explore(TABLES, instance(tmp_path)).truncated


def test_an_unbounded_value_is_never_called_explored(tmp_path: Path) -> None:
    grows = build(changed_row("common.toml", "reschedule", when=[], inputs={}, then=["keep_until += 1"]))
    assert explore(grows, instance(tmp_path, tables=grows), limit=5000).truncated


def test_a_counter_compared_with_a_number_is_refused(tmp_path: Path) -> None:
    when = [*SPEC.files["common.toml"].rows["move"].when, "generation < 3"]
    counted = build(changed_row("common.toml", "move", when=when))
    with pytest.raises(InputError, match=r"move.*'generation < 3'.*generation"):
        explore(counted, instance(tmp_path, tables=counted))


def test_a_leftover_that_a_row_reads_is_kept(tmp_path: Path) -> None:
    """A row of the lease that reads the segment's range wherever the segment is."""
    reads = build(changed_row("protocols/prefix_hit.toml", "drop", when=["start == 0"]))
    assert ("a", "start") in explore(reads, instance(tmp_path, tables=reads)).space.alive
    assert explore(TABLES, instance(tmp_path)).space.alive == frozenset()


def test_a_budget_bounds_a_row() -> None:
    graph = explore(TABLES, INSTANCES["graph"])
    column = graph.columns[graph.space.index["", "topology"]]
    assert np.max(column) == INSTANCES["graph"].budgets["rebase"]


def test_a_restricted_search_says_what_it_leaves_out() -> None:
    assert INSTANCES["graph"].restriction == ""
    assert INSTANCES["queue"].restriction.startswith("bounded: starts after")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ('kind = "compressed_kv"', 'kind = "nothing"', "segments.a.kind: 'nothing' is no kind"),
        ('"a.q"]', '"b.q"]', "'b.q' is no lease between entities"),
        ("kernel = true, ", "kernel = 3, ", "3 is not bool"),
        ("length = 9", "size = 9", "'size' is no rigid variable"),
        ('off = ["reject"', 'off = ["refuse"', "'refuse' is no row"),
        ('"match q"', '"match z"', "'z' is no entity"),
        ("RATIO = 1", "RATIOS = 1", "'RATIOS' is no constant"),
        ('doc = "one', 'note = "one', "note"),
        ("at = [0]", "at = [true]", "inputs.at: True is not int"),
        ("inputs =", 'script = ["request.start_cold a"]\ninputs =', "'a' does not fit request.start_cold"),
        ("inputs =", 'script = ["request.nothing q"]\ninputs =', "names no event"),
        ("inputs =", 'script = ["compressed_kv.append a.q n=1"]\ninputs =', "takes the inputs at, n"),
        ("known = [9]", "known = [true]", "inputs.known: True is not int"),
        (
            "leases =",
            'transfers = { x = { parts = 1 } }\nshipments = { "a>a@x" = { size = 1 } }\nleases =',
            "shipments.a>a@x: 'size' is no rigid variable",
        ),
        ("title", "titles", "titles"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, old: str, new: str, reason: str) -> None:
    assert old in READER
    with pytest.raises(InputError) as caught:
        instance(tmp_path, READER.replace(old, new))
    assert str(caught.value).startswith("instances.toml: ")
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_values_of_the_file_stand_in_where_an_instance_names_none(tmp_path: Path) -> None:
    admit, reject = ("compressed_kv.admit", "known"), ("compressed_kv.reject_drafts", "to")
    bare = READER.replace(", known = [9], matched = [9], to = [0]", "")
    assert "admit" in instance(tmp_path, bare).off
    shared = bare.replace('"a test"', '"a test"\ninputs = { known = [9], to = [0] }')
    assert instance(tmp_path, shared).inputs[admit] == (9,)
    assert "admit" not in instance(tmp_path, shared).off
    own = instance(tmp_path, shared.replace("at = [0]", 'at = [0], known = [0, 1], "accept_tokens.to" = [1]'))
    assert own.inputs[admit] == (0, 1)
    assert own.inputs["compressed_kv.accept_tokens", "to"] == (1,)
    assert own.inputs[reject] == (0,)


def test_a_script_that_is_refused_is_an_input_error(tmp_path: Path) -> None:
    text = READER.replace("inputs =", 'script = ["request.start_cold q", "request.start_cold q"]\ninputs =')
    with pytest.raises(InputError, match=r"script\[1\].*refused"):
        explore(TABLES, instance(tmp_path, text))
