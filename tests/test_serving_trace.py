"""The serving trace: accepted as it is, every property of the tables along it, and each one-fault variant refused."""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import pytest
import serving_script
from trace_script import STORE, Script

from hybridkv_ref.compile_py import attribute, python, role_name
from hybridkv_ref.expr import Expr, Ref, refs
from hybridkv_ref.loader import load_tables
from hybridkv_ref.row_faults import Fault, faulty, load_faults
from hybridkv_ref.row_traces import Add, Crash, Fire, Line, Player, encode_rows, leftovers, read_rows, replay
from hybridkv_ref.tables import CLASS_OF, LINKS, ROLES, Event, Tables

TABLES = load_tables()
HEADER, NUMBERED = read_rows(serving_script.PATH)
LINES = [line for _, line in NUMBERED]
FAULTS = load_faults(serving_script.PATH.with_name("serving_faults.toml"))
Values = dict[str, dict[str, Any]]


# ---- the trace -------------------------------------------------------------------------------------------------------


def test_the_committed_trace_is_what_the_script_writes() -> None:
    assert serving_script.PATH.read_bytes() == serving_script.serving()


def test_it_is_accepted_and_ends_at_rest() -> None:
    found = replay(serving_script.PATH, TABLES)
    assert found.refusal is None
    assert leftovers(found.world) == []
    assert found.crashes == 1


def test_every_row_of_the_tables_is_fired_in_it() -> None:
    fired = replay(serving_script.PATH, TABLES).fired
    assert [e.id for e in TABLES.events if not fired[e.id]] == []


def test_without_the_drain_something_is_left() -> None:
    script = Script()
    for chapter in serving_script.CHAPTERS[:-1]:
        chapter(script)
    found = replay(encode_rows(HEADER, script.lines).splitlines(), TABLES)
    assert found.refusal is None
    assert any("gpu_used" in phrase for phrase in leftovers(found.world))


def test_the_crash_leaves_sealed_objects_and_nothing_else() -> None:
    at = next(n for n, line in enumerate(LINES) if isinstance(line, Crash))
    player = Player(HEADER, TABLES)
    for number, line in enumerate(LINES[:at]):
        assert player.play(number, line) is None
    before = leftovers(player.replay.world)
    assert {"gpu_reserved is 4", "io_used is 1", "replays is 1"} <= set(before)
    assert player.play(at, LINES[at]) is None
    world: Any = player.replay.world
    named = {phrase.split()[0].split(".")[0] for phrase in leftovers(world)}
    assert named == {*serving_script.DURABLE, "disk_used", "object_used", STORE}


# ---- every property of the tables, line by line ----------------------------------------------------------------------


class Watch:
    """Evaluates the tables' invariants and step properties in the states of a replay; names the first broken one."""

    def __init__(self, player: Player) -> None:
        self.player, self.tables = player, player.tables
        constants = player.replay.world.machine.constants

        def name(ref: Ref) -> str:
            if ref.role == "const":
                return repr(constants[ref.name])
            if ref.role == "input":
                return f"inputs[{ref.name!r}]"
            owner = "''" if ref.role == "global" else role_name(ref.role)
            return f"{'new' if ref.new else 'old'}[{owner}][{ref.name!r}]"

        def compiled(expr: Expr, scope: str) -> Callable[..., Any]:
            arguments = ", ".join(["old", "new", "inputs", *map(role_name, ROLES[scope])])
            space: dict[str, Any] = {}
            exec(f"def p({arguments}): return {python(expr, name)}", space)
            function: Callable[..., Any] = space["p"]
            return function

        self.properties = [
            (item, any(ref.role == "global" for ref in refs(item.expr)), compiled(item.expr, item.scope))
            for item in self.tables.properties
            if item.form in ("invariant", "step")
        ]
        # By class of what is added up: whose variable it is, through which role that is found, the terms per kind.
        self.sums: dict[str, list[tuple[tuple[str, str], str, str, dict[str, Callable[..., Any]]]]] = {}
        owned = {("", ""): self.tables.globals} | {(c, ""): v for c, v in self.tables.classes.items()}
        owned |= {("segment", k): kind.vars for k, kind in self.tables.kinds.items()}
        for owner, variables in owned.items():
            for var in variables.values():
                for share in var.sums:
                    terms = {k: compiled(term, share.cls) for k, term in share.terms.items()}
                    self.sums.setdefault(share.cls, []).append((owner, share.via, var.name, terms))
        self.summed = {entry[2] for entries in self.sums.values() for entry in entries}
        self.state = self.values()
        self.evaluated = 0

    def values(self) -> Values:
        world = self.player.replay.world
        found = {"": {n: getattr(world.pool, attribute(n)) for n in self.tables.globals}}
        for e in world.entities:
            found[e.name] = {n: getattr(e, attribute(n)) for n in self.tables.vars_of(e.cls, e.kind)}
        return found

    def choices(self, scope: str, kinds: Mapping[str, str], changed: set[str]) -> Iterator[tuple[str, ...]]:
        """Every choice of entities that goes together, one of them in ``changed`` (all where "" is)."""
        roles, entities = ROLES[scope], self.player.replay.world.entities
        link = next((r for r in roles if CLASS_OF[r] in LINKS), None)
        if link is None:
            own = [(CLASS_OF[r], kinds.get(r, "")) for r in roles]
            pools = [[e.name for e in entities if e.cls == cls and e.kind in (kind, "")] for cls, kind in own]
            yield from (c for c in itertools.product(*pools) if "" in changed or not changed.isdisjoint(c))
            return
        for entity in entities:
            if entity.cls == CLASS_OF[link]:
                owners = {link: entity, **entity.refs}
                names = tuple(owners[r].name for r in roles)
                fits = all(owners[r].kind == k for r, k in kinds.items() if r in owners)
                if fits and ("" in changed or not changed.isdisjoint(names)):
                    yield names

    def step(self, number: int, line: Line) -> str | None:
        """Plays one line; the property that it breaks, the refusal's guard, or None."""
        refusal = self.player.play(number, line)
        if refusal is not None:
            return f"refused: {refusal.message}"
        if isinstance(line, Add):
            self.state[line.name] = self.values()[line.name]
            return None
        old, new = self.state, self.values()
        self.state = new
        changed = {name for name, values in new.items() if values != old[name]}
        event = self.tables.event(line.row) if isinstance(line, Fire) else None
        actors = dict(zip(event.roles, line.on, strict=True)) if isinstance(line, Fire) and event else {}
        kinds, inputs = (event.kinds, line.inputs) if isinstance(line, Fire) and event else ({}, {})
        known: dict[Any, list[tuple[str, ...]]] = {}
        for item, reads_globals, holds in self.properties:
            # A step property is of every row, of the rows with a tag (then of those who act in them), or of a crash.
            if item.form == "step" and ((event is None) != (item.on == "crash")):
                continue
            if item.form == "step" and item.on and event is not None:
                if item.on not in event.tags or any(kinds.get(r) != k for r, k in item.kinds.items()):
                    continue
                choices = [tuple(actors[r] for r in ROLES[item.scope])]
            else:
                # What was true of entities that did not change still is.
                key = (item.scope, tuple(item.kinds.items()), reads_globals and "" in changed)
                if key not in known:
                    known[key] = list(self.choices(item.scope, item.kinds, changed if key[2] else changed - {""}))
                choices = known[key]
            for names in choices:
                self.evaluated += 1
                if not holds(new if item.form == "invariant" else old, new, inputs, *names):
                    return f"{item.id} of {', '.join(names)}"
        return self.count()

    def count(self) -> str | None:
        """A variable that is not the sum of what the tables say it adds up."""
        totals: Counter[tuple[str, str]] = Counter()
        state = self.state
        for e in self.player.replay.world.entities:
            role = next(r for r in ROLES[e.cls] if CLASS_OF[r] == e.cls)
            owners = {**e.refs, role: e}
            names = [owners[r].name for r in ROLES[e.cls]]
            kind = owners["self"].kind if "self" in owners else e.kind
            for key, via, variable, terms in self.sums.get(e.cls, ()):
                term = terms.get(kind) or terms.get("")
                owner = owners[via] if via else None
                if term is not None and key == ((owner.cls, owner.kind) if owner else ("", "")):
                    totals[owner.name if owner else "", variable] += int(term(state, state, {}, *names))
        for name, values in state.items():
            for variable in self.summed & values.keys():
                if values[variable] != totals[name, variable]:
                    return f"{name}.{variable} is {values[variable]}, its terms add up to {totals[name, variable]}"
        return None


def watched(lines: list[Line], tables: Tables = TABLES, first: int = 0) -> tuple[int, str | None]:
    """How many properties were evaluated from line ``first`` on, and the first one that is broken, with its line."""
    player = Player(HEADER, tables)
    watch = Watch(player)
    for number, line in enumerate(lines, 2):
        if number < first:
            player.play(number, line)
            continue
        if number == first:
            watch.state = watch.values()
        broken = watch.step(number, line)
        if broken is not None:
            return watch.evaluated, f"{number}: {broken}"
    return watch.evaluated, None


def test_every_property_holds_along_it() -> None:
    evaluated, broken = watched(LINES)
    assert broken is None
    assert evaluated > 20 * len(LINES)


# ---- one fault at a time ---------------------------------------------------------------------------------------------


def test_there_are_many_faults_and_each_names_its_own_guard() -> None:
    assert len(FAULTS.faults) >= 25
    assert FAULTS.trace == serving_script.PATH.name
    for name, fault in FAULTS.faults.items():
        guards = [g.text for g in TABLES.event(fault.refused.row).guards]
        assert fault.refused.guard in guards, name


def refused(fault: Fault, name: str, tables: Tables = TABLES) -> tuple[str, str] | None:
    """Row and guard of the refusal of a variant, if its entities are those that the fault names."""
    header, lines = faulty(fault, HEADER, LINES, name)
    found = replay(encode_rows(header, lines).splitlines(), tables).refusal
    if found is None or not set(fault.refused.on) <= set(found.on):
        return None
    return found.event, found.guard


@pytest.mark.parametrize("name", FAULTS.faults)
def test_each_variant_is_refused_at_its_row_and_guard(name: str) -> None:
    fault = FAULTS.faults[name]
    assert refused(fault, name) == (fault.refused.row, fault.refused.guard)


def test_a_change_that_harms_nothing_would_be_seen() -> None:
    harmless = msgspec.convert(
        {
            "doc": "The schedule is left as it was.",
            "drop": {"row": "swa_window.reschedule"},
            "refused": {"row": "swa_window.free", "guard": "pins == 0"},
        },
        Fault,
    )
    assert refused(harmless, "harmless") is None


# ---- what the guards are for -----------------------------------------------------------------------------------------


def unguarded(fault: Fault) -> Tables:
    """The tables without the guard that refuses this fault."""
    row, guard = fault.refused.row, fault.refused.guard

    def without(event: Event) -> Event:
        kept = tuple(g for g in event.guards if g.text != guard)
        return dataclasses.replace(event, guards=kept) if event.id == row else event

    return dataclasses.replace(TABLES, events=tuple(map(without, TABLES.events)))


def consequence(fault: Fault, name: str) -> str | None:
    """What a variant breaks where the guard that refuses it is missing, with the line."""
    header, lines = faulty(fault, HEADER, LINES, name)
    refusal = replay(encode_rows(header, lines).splitlines(), TABLES).refusal
    assert refusal is not None
    return watched(lines, unguarded(fault), refusal.line)[1]


NEEDED = {
    "free_before_complete": "read_is_there",  # the in-flight guard
    "fold_without_margin": "margin",
    "publish_before_the_last_part": "published_parts_arrived",  # the part count of a load
    "deliver_with_a_part_missing": "delivered_is_whole",  # the part count of a transfer
    "commit_with_drafts": "published_is_committed",  # the publish limit
    "load_out_of_turn": "ticket_is_taken",  # the ticket order
    "read_of_a_stale_index": "checked_version",  # the version in the key
    "read_after_a_new_model": "checked_epoch",  # the model in the key
}


@pytest.mark.parametrize("name", NEEDED)
def test_without_its_guard_a_named_property_breaks(name: str) -> None:
    broken = consequence(FAULTS.faults[name], name)
    assert broken is not None
    assert NEEDED[name] in broken


# A stage column is checked as an edge of the kind when the tables are loaded, not as a property.
EDGES_ONLY = {"free_without_a_mark"}


@pytest.mark.parametrize("name", [n for n, f in FAULTS.faults.items() if f.constants is None and n not in EDGES_ONLY])
def test_without_its_guard_each_variant_breaks_a_property_or_is_refused_later(name: str) -> None:
    assert consequence(FAULTS.faults[name], name) is not None
