"""The machine: a row fires whole or not at all, says why not, and reads the state before the step."""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest
from helpers import Scene, add_row, evaluate, refusal, snapshot
from hypothesis import given
from hypothesis import strategies as st

from hybridkv_ref.compile_py import attribute
from hybridkv_ref.expr import Ref, refs
from hybridkv_ref.loader import build, load_tables
from hybridkv_ref.machine import Machine, Refused, World
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_spec
from hybridkv_ref.tables import Event, Tables

TABLES = load_tables()
MACHINE = Machine(TABLES)
EVENTS = [e.id for e in TABLES.events]
TRIES, STEPS = 3, 400
ORDINARY = "compressed_kv"  # any kind whose segments are written and read would do


def key(scene: Scene, ref: Ref) -> tuple[str, str]:
    return ("" if ref.role == "global" else scene.by_role[ref.role].name, ref.name)


def check_step(scene: Scene) -> bool:
    """One call of ``fire``: refused and nothing changed, or all effects of the table and nothing else."""
    before, event = scene.state(), scene.event
    expected = dict(before)
    for effect in event.effects:
        expected[key(scene, effect.target)] = evaluate(effect.expr, scene.look)
    false = next((g for g in event.guards if not evaluate(g.expr, scene.look)), None)
    seen = {ref: scene.look(ref) for g in event.guards for ref in refs(g.expr)}
    error = refusal(scene.fire)
    if false is None:
        assert error is None
        assert scene.state() == expected
        return True
    assert error is not None
    assert scene.state() == before
    assert error.event is event
    assert error.guard is false
    assert sorted(error.values.values(), key=str) == sorted((seen[r] for r in refs(false.expr)), key=str)
    return False


@pytest.mark.parametrize("name", EVENTS)
def test_every_row_fires_whole_or_changes_nothing(name: str) -> None:
    event, rng = TABLES.event(name), random.Random(name)
    fired = refused = 0
    for _ in range(TRIES):
        scene = Scene(MACHINE.world(), event, rng)
        for _ in range(STEPS):
            before = next((g for g in event.guards if not evaluate(g.expr, scene.look)), None)
            if check_step(scene):
                fired += 1
                break
            refused += 1
            scene.shake(before.expr if before else event.guards[0].expr)
    assert fired, "no world was found in which this row fires"
    assert refused or len(event.guards) < 3, "no world was found in which this row is refused"


@given(st.sampled_from(EVENTS), st.randoms(use_true_random=False))
def test_any_row_in_any_world(name: str, rng: random.Random) -> None:
    check_step(Scene(MACHINE.world(), TABLES.event(name), rng))


# -- the checker of this file must be able to fail ---------------------------------------------------------------------
def scene_of(machine: Machine, event: str, **values: Any) -> Scene:
    """A scene with these values, by variable (globals, entities by role) or input."""
    scene = Scene(machine.world(), machine.tables.event(event), random.Random(0))
    for name, value in values.items():
        role, _, variable = name.partition("__")
        if not variable:
            scene.inputs[name] = value
        else:
            setattr(scene.world.pool if role == "pool" else scene.by_role[role], variable, value)
    return scene


def with_call(scene: Scene, call: Callable[..., int]) -> Scene:
    """The scene with another function in the place of the compiled row."""
    machine = Machine(TABLES)
    machine.events[scene.event.id] = dataclasses.replace(machine.events[scene.event.id], call=call)
    scene.world.machine = machine
    return scene


def test_a_half_fired_row_would_be_seen() -> None:
    def half(pool: Any, seg: Any, *rest: Any) -> int:
        seg.mem += 1
        return 0

    with pytest.raises(AssertionError):
        check_step(with_call(scene_of(MACHINE, f"{ORDINARY}.free", self__stage="READY"), half))


def test_a_forgotten_effect_would_be_seen() -> None:
    lazy = with_call(scene_of(MACHINE, f"{ORDINARY}.free", self__stage="RETIRING", self__pins=0), lambda *_: -1)
    with pytest.raises(AssertionError):
        check_step(lazy)


def test_the_wrong_conjunct_would_be_seen() -> None:
    wrong = with_call(scene_of(MACHINE, f"{ORDINARY}.free", self__stage="READY", self__pins=1), lambda *_: 1)
    with pytest.raises(AssertionError):
        check_step(wrong)


# -- refusals ----------------------------------------------------------------------------------------------------------
def test_a_refusal_names_row_conjunct_values_and_rules() -> None:
    scene = scene_of(MACHINE, f"{ORDINARY}.free", self__stage="RETIRING", self__pins=2)
    with pytest.raises(Refused) as error:
        scene.fire()
    assert error.value.event.id == f"{ORDINARY}.free"
    assert error.value.guard.text == "pins == 0"
    assert error.value.values == {"pins": 2}
    assert str(error.value).startswith(f"{ORDINARY}.free: refused by 'pins == 0' with pins=2 (")
    assert "HKV-S3-004" in str(error.value)
    assert "\n" not in str(error.value)


def test_the_first_false_conjunct_is_the_one_that_is_named() -> None:
    scene = scene_of(MACHINE, f"{ORDINARY}.free", self__stage="READY", self__pins=2)
    with pytest.raises(Refused, match="refused by 'stage == RETIRING' with stage=READY"):
        scene.fire()


def test_a_refusal_shows_constants_inputs_and_dotted_names() -> None:
    event = TABLES.event(f"{ORDINARY}.admit")
    scene = scene_of(MACHINE, event.id)
    scene.settle()
    setattr(scene.world.pool, attribute(f"{ORDINARY}.used"), 10**6)
    with pytest.raises(Refused) as error:
        scene.fire()
    assert error.value.guard.text == "used + size <= CAP"
    assert set(error.value.values) == {f"{ORDINARY}.used", f"{ORDINARY}.CAP", "size"}
    scene.by_role["req"].stage = "IDLE"  # type: ignore[attr-defined]
    with pytest.raises(Refused) as error:
        scene.fire()
    assert error.value.values == {"req.stage": "IDLE"}


def test_marking_and_copying_out_are_legal_on_pinned_segments() -> None:
    pinned = {"self__stage": "READY", "self__pins": 3, "self__holds": 0}
    assert refusal(scene_of(MACHINE, f"{ORDINARY}.retire", **pinned).fire) is None
    spills = [e for e in TABLES.events if e.row == "spill_begin"]
    assert spills
    for event in spills:
        scene = Scene(MACHINE.world(), event, random.Random(event.id))
        scene.settle(src__pins=3)
        scene.fire()
        assert scene.by_role["src"].pins == 3


# -- calls that are no firing at all -----------------------------------------------------------------------------------
def leased(kind: str) -> tuple[World, Any, Any, Any]:
    world = MACHINE.world()
    segment, request = world.add("segment", kind), world.add("request")
    return world, segment, world.add("lease", kind, {"self": segment, "req": request}), request


def test_a_call_with_the_wrong_entities_or_inputs_is_no_firing() -> None:
    world, segment, lease, request = leased(ORDINARY)
    other_kind = next(k for k in TABLES.kinds if k != ORDINARY)
    stranger, twin, second = world.add("segment", other_kind), world.add("segment", ORDINARY), world.add("request")
    move, pin = f"{ORDINARY}.move", f"{ORDINARY}.pin"
    before = snapshot(world)
    for event, entities, inputs in (
        (move, (), {"off": 0}),
        (move, (segment,), {}),
        (move, (segment,), {"off": 0, "more": 1}),
        (move, (stranger,), {"off": 0}),
        (move, (request,), {"off": 0}),
        (pin, (segment, request, lease), {}),
        (pin, (twin, lease, request), {}),
        (pin, (segment, lease, second), {}),
    ):
        with pytest.raises(TypeError, match=f"^{event}: "):
            world.fire(event, *entities, **inputs)
    assert snapshot(world) == before
    with pytest.raises(KeyError):
        world.fire("nothing", segment)
    with pytest.raises(Refused):
        world.fire(pin, segment, lease, request)


def test_rigid_variables_are_set_once_and_only_they() -> None:
    world = MACHINE.world()
    assert world.add("request", length=7).length == 7
    with pytest.raises(KeyError, match="'s' is not a rigid variable"):
        world.add("request", s=1)
    with pytest.raises(KeyError, match="'nothing' is not a rigid variable"):
        world.add("request", nothing=1)
    bounded = [
        (k, n, v.at_least) for k, kind in TABLES.kinds.items() for n, v in kind.vars.items() if v.at_least is not None
    ]
    assert bounded
    for kind, name, least in bounded:
        assert getattr(world.add("segment", kind, None, **{name: least}), name) == least
        with pytest.raises(ValueError, match=f"{name}={least - 1} is below {least}"):
            world.add("segment", kind, None, **{name: least - 1})


def test_an_unknown_variable_of_an_entity_is_no_silent_attribute() -> None:
    _, segment, _, request = leased(ORDINARY)
    with pytest.raises(AttributeError):
        segment.pinns = 1
    with pytest.raises(AttributeError, match="no attribute 'pinned'"):
        _ = request.pinned


# -- effects read the old state ----------------------------------------------------------------------------------------
def made_up(**row: Any) -> tuple[Tables, Event]:
    spec = add_row(read_spec(SPEC_DIR), f"kinds/{ORDINARY}.toml", "made_up", **row)
    tables = build(spec)
    return tables, tables.event(f"{ORDINARY}.made_up")


def test_effects_read_the_state_before_the_step() -> None:
    tables, event = made_up(then=["start = end", "end = start", "mark = start + end", "generation += mark"])
    scene = scene_of(Machine(tables), event.id, self__start=3, self__end=8, self__mark=2, self__generation=10)
    scene.fire()
    segment: Any = scene.by_role["self"]
    assert (segment.start, segment.end, segment.mark, segment.generation) == (8, 3, 11, 12)


def test_the_second_part_of_a_handoff_sees_the_first_ones_effects() -> None:
    """Both parts of a join-like step write the same pool: the counts add up."""
    joins = [e for e in TABLES.events if e.row == "join" and e.scope == "pair"]
    assert joins
    for event in joins:
        scene, kind = Scene(MACHINE.world(), event, random.Random(event.id)), event.kinds["src"]
        scene.settle()
        src, dst = scene.by_role["src"].name, scene.by_role["dst"].name
        before = scene.state()
        scene.fire()
        after = scene.state()
        assert after["", f"{kind}.used"] == before["", f"{kind}.used"]
        assert after[src, "mem"] == int(before[src, "mem"]) + int(before[dst, "mem"])
        assert after[dst, "mem"] == 0


def test_worlds_share_nothing() -> None:
    one, two = MACHINE.world(), MACHINE.world()
    name = next(n for n, v in TABLES.globals.items() if v.type.number)
    setattr(one.pool, attribute(name), 5)
    assert getattr(two.pool, attribute(name)) == TABLES.globals[name].init


def test_constants_are_the_small_ones_unless_given() -> None:
    assert Machine(TABLES).constants == {n: c.small for n, c in TABLES.constants.items()}
    name = next(iter(TABLES.constants))
    assert Machine(TABLES, {name: 99}).constants[name] == 99
