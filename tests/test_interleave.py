"""The interleavings: what must hold holds, what must fail fails as named, and the search itself can fail."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build, load_tables
from hybridkv_ref.machine import Entity, Machine, Refused
from hybridkv_ref.model_checks.interleave import InterleaveResult, explore, plain, render, run, system
from hybridkv_ref.model_checks.thread_models import (
    BROKEN,
    LABEL,
    EditSpec,
    ModelSpec,
    StepSpec,
    VariantSpec,
    edited,
    read_model,
)
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.rules import load_rules
from hybridkv_ref.spec_files import read_spec
from hybridkv_ref.tables import ROLES

MODEL = read_model(SPEC_DIR)
SPEC = read_spec(SPEC_DIR)
VARIANTS = {"plain": plain(MODEL), **MODEL.variants}
MUST_FAIL = [name for name, variant in VARIANTS.items() if variant.expect == "fails"]


@pytest.fixture(scope="module")
def results() -> dict[str, InterleaveResult]:
    return {result.name: result for result in run(load_tables(), SPEC_DIR)}


def search(variant: VariantSpec, model: ModelSpec = MODEL) -> InterleaveResult:
    return explore("made", variant, system(load_tables(), SPEC, model, "made", variant))


@pytest.mark.parametrize("name", VARIANTS)
def test_holds_or_fails_as_the_file_says(name: str, results: dict[str, InterleaveResult]) -> None:
    result = results[name]
    assert result.ok, render(result)
    assert (result.trace == ()) == (result.got == "holds")


def test_results_are_the_file_s_in_order(results: dict[str, InterleaveResult]) -> None:
    assert list(results) == list(VARIANTS)


def test_rules_exist_and_every_rule_that_counts_on_interleavings_is_named() -> None:
    known = load_rules(SPEC_DIR)
    named = {rule for variant in VARIANTS.values() for rule in variant.rules}
    assert named <= set(known)
    assert {i for i, rule in known.items() if "interleaving" in rule.checked_by} <= named


# ---- the traces mean what they say: replayed with a lease and a request per thread -----------------------------------


def steps_of(name: str, thread: str) -> list[StepSpec]:
    program = thread.partition("#")[0]
    return MODEL.setup if program == "setup" else VARIANTS[name].steps.get(program, MODEL.threads[program].steps)


class Replay:
    """A second, plain way to run the programs: one world, real entities for each thread, labels followed by hand."""

    def __init__(self, name: str) -> None:
        self.name, variant = name, VARIANTS[name]
        self.kind = variant.kind or MODEL.kind
        machine = Machine(build(edited(SPEC, variant.tables, "test")))
        self.world = machine.world()
        self.slot = self.world.add("segment", self.kind)
        self.rigid = {k if k != "uses" else f"uses.{self.kind}": v for k, v in MODEL.request.items()}
        self.counters: dict[str, int] = {}
        self.owned: dict[str, dict[str, Entity]] = {}
        self.bytes, self.matched, self.reading = 0, dict[str, int](), set[str]()
        for _ in MODEL.setup:
            self.go("setup", fires=True)

    def go(self, thread: str, fires: bool) -> StepSpec:
        """Takes the thread's next step, which must fire or be refused as told; gives the step."""
        if thread not in self.owned:
            request = self.world.add("request", "", None, **self.rigid)
            lease = self.world.add("lease", "", {"self": self.slot, "req": request})
            self.owned[thread] = {"self": self.slot, "lease": lease, "req": request}
        steps = steps_of(self.name, thread)
        pc = self.counters.get(thread, 0)
        step = steps[pc]
        labels = {"start": 0, "end": len(steps)} | {s.at: i for i, s in enumerate(steps) if s.at}
        if step.row:
            events = self.world.machine.events
            event = (events.get(f"{self.kind}.{step.row}") or events[f"request.{step.row}"]).event
            fired = True
            try:
                self.world.fire(event.id, *(self.owned[thread][r] for r in ROLES[event.scope]), **step.inputs)
                self.bytes += not set(MODEL.rewrites).isdisjoint(event.tags)
            except Refused:
                fired = False
            assert fired == fires, (thread, step)
        if step.match and fires:
            self.matched[thread] = self.bytes
        if step.touch:
            (self.reading.add if step.touch == "begin" else self.reading.discard)(thread)
        self.counters[thread] = labels[step.else_] if not fires else labels[step.goto] if step.goto else pc + 1
        return step


@pytest.mark.parametrize("name", MUST_FAIL)
def test_a_counterexample_happens_on_a_machine_with_every_thread_in_it(
    name: str, results: dict[str, InterleaveResult]
) -> None:
    result, replay = results[name], Replay(name)
    before = replay.bytes
    for seen in result.trace:
        before = replay.bytes
        replay.go(seen.thread, fires=not seen.note or seen.step.startswith("touch"))
        slot = vars_of(replay.slot)
        assert {n: slot[n] for n in seen.changed if n in slot} == {
            n: v for n, (_, v) in seen.changed.items() if n in slot
        }
    last = result.trace[-1].thread
    if result.broken == "stale_bytes":
        assert last in replay.reading
        assert replay.matched[last] != replay.bytes
    elif result.broken == "rewritten_under_read":
        assert replay.reading - {last}
        assert replay.bytes > before
    else:
        assert result.broken == "livelock"
        assert {seen.thread for seen in result.trace[result.loop :]} == {"evictor", "reader#0", "reader#1"}


def vars_of(entity: Entity) -> dict[str, int | str]:
    return {name: getattr(entity, name) for name in type(entity).__slots__}


# ---- a second opinion on the search ----------------------------------------------------------------------------------


def whole_states(variant: VariantSpec) -> int:
    """States counted over whole values, depth first, without numbers or remembered moves."""
    built = system(load_tables(), SPEC, MODEL, "counted", variant)
    slot, frame = built.slot, built.start(built.setup)
    while frame.pc < len(built.setup.steps):
        slot, frame, *_ = built.move(built.setup, slot, frame)
    first = (slot, tuple(built.start(program) for _, program in built.threads))
    known, todo = {first}, [first]
    while todo:
        slot, frames = todo.pop()
        for i, (_, program) in enumerate(built.threads):
            if frames[i].pc < len(program.steps):
                move = built.move(program, slot, frames[i])
                after = (move.slot, (*frames[:i], move.frame, *frames[i + 1 :]))
                if after not in known:
                    known.add(after)
                    todo.append(after)
    return len(known)


def test_state_counts_are_exact(results: dict[str, InterleaveResult]) -> None:
    small = [n for n, r in results.items() if r.got == "holds" and n not in ("plain", "test_after_the_mark_suffices")]
    assert small
    for name in small:
        assert results[name].states == whole_states(VARIANTS[name]), name


# ---- each thing that can be broken is found --------------------------------------------------------------------------


def program(thread: str, change: Callable[[list[StepSpec]], Iterator[StepSpec]]) -> dict[str, list[StepSpec]]:
    return {thread: list(change(MODEL.threads[thread].steps))}


def without(row: str) -> Callable[[list[StepSpec]], Iterator[StepSpec]]:
    return lambda steps: (step for step in steps if step.row != row)


def never_reached(steps: list[StepSpec]) -> Iterator[StepSpec]:
    """The first commit may now be refused, says the program; it never is."""
    return (msgspec.structs.replace(s, else_="end") if s.row == "commit" else s for s in steps)


@pytest.mark.parametrize(
    ("variant", "broken", "where"),
    [
        (VariantSpec("", [], steps=program("writer", without("append"))), "refused", "commit"),
        (VariantSpec("", [], steps=program("writer", without("close"))), "not_at_rest", "finish"),
        (VariantSpec("", [], "holds", steps=program("writer", never_reached)), "unreached", "commit"),
        (VariantSpec("", [], tables=[EditSpec("let_go", drop_then="pins -= 1")]), "unsettled", "close"),
        (
            VariantSpec("", [], tables=[EditSpec("pass_l1", drop_when="lease.seen == generation")]),
            "stale_bytes",
            "touch",
        ),
        (VariantSpec("", [], tables=[EditSpec("pin", segment_from="KEPT")]), "refused", "free"),
    ],
)
def test_the_search_finds(variant: VariantSpec, broken: str, where: str) -> None:
    result = search(variant)
    assert result.broken == broken, render(result)
    assert result.trace[-1].step.startswith(where), render(result)
    assert not result.ok


def test_a_thread_that_waits_for_what_never_comes_is_a_livelock() -> None:
    spins = [StepSpec(row="retire"), StepSpec(test="pins < 0", at="again", else_="again")]
    result = search(VariantSpec("", [], steps={"evictor": spins}))
    assert result.broken == "livelock"
    assert result.loop is not None
    assert "evictor" in {step.thread for step in result.trace[result.loop :]}


def test_a_loop_that_only_an_unfair_schedule_keeps_up_is_no_livelock() -> None:
    """The evictor spins while a reader holds the slot, and the reader can always move on."""
    spins = [StepSpec(row="retire"), StepSpec(row="free", at="again", else_="again")]
    result = search(VariantSpec("", [], "holds", steps={"evictor": spins}))
    assert result.ok, render(result)


def test_a_setup_that_is_refused_is_a_result_not_a_crash() -> None:
    model = msgspec.structs.replace(MODEL, setup=[s for s in MODEL.setup if s.row != "append"])
    result = search(VariantSpec("", []), model)
    assert (result.broken, result.states, result.trace[-1].thread) == ("refused", 0, "setup")


def test_a_variant_that_fails_in_another_way_is_not_ok() -> None:
    wrong = msgspec.structs.replace(VARIANTS["version_without_pin"], breaks="livelock")
    result = search(wrong)
    assert result.got == result.expected == "fails"
    assert not result.ok
    assert "expected: fails livelock" in render(result)


def test_render_shows_each_step_with_its_changes(results: dict[str, InterleaveResult]) -> None:
    for name in MUST_FAIL:
        text = render(results[name])
        head, *lines = text.splitlines()
        assert BROKEN[results[name].broken] in head
        assert str(results[name].states) in head
        assert len(lines) == len(results[name].trace) + (results[name].loop is not None)
        assert "lease.stage: NONE -> FOUND" in text


# ---- bad files -------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("common.toml", "recovery.toml", LABEL):
        shutil.copy(SPEC_DIR / name, tmp_path / name)
    for name in ("protocols", "kinds"):
        shutil.copytree(SPEC_DIR / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("title =", "tilte =", "unknown field `tilte`"),
        ("count = 2", "count = 0", "threads.reader.count: expected 1 or more"),
        ("count = 2", 'count = "2"', "Expected `int`, got `str`"),
        ('kind = "compressed_kv"', 'kind = "on_disk_prefix"', "kind: no cacheable kind"),
        ('kind = "recurrent_state"', 'kind = "nothing"', "variants.overwrite.kind: no cacheable kind"),
        ("length = 3", "lenght = 3", "request.lenght: no rigid variable"),
        ("length = 3", "f = 3", "request.f: no rigid variable"),
        ("length = 3", "length = true", "request.length: True is not int"),
        ('["write", "free"]', '["write", "fred"]', "rewrites: no row has the tag 'fred'"),
        ('settled = "pins', 'settled = "pinz', "settled: column 1, at 'pinz': unknown name"),
        ('at_rest = "lease.stage == NONE', 'at_rest = "lease.stage == NOON', "at_rest: column"),
        ('row = "retire"', 'row = "retired"', "threads.evictor.steps[0].row: 'retired' is no row"),
        ('row = "retire"', 'row = "restore_begin"', "threads.evictor.steps[0].row: 'restore_begin' is no row"),
        ('{ row = "retire" }', "{}", "threads.evictor.steps[0]: expected exactly one of"),
        ('{ row = "retire" }', '{ row = "retire", touch = "end" }', "steps[0]: expected exactly one of"),
        ('{ row = "retire" }', '{ row = "retire", value = "pins" }', "steps[0]: a load has a value"),
        ('touch = "begin"', 'touch = "middle"', "Invalid enum value 'middle'"),
        ('touch = "begin"', 'touch = "begin", else = "miss"', "a test needs else"),
        ('touch = "begin"', 'touch = "begin", match = true', "only a row has inputs or match"),
        ('"seen_pins == 0", else = "busy"', '"seen_pins == 0"', "steps[2]: a test needs else"),
        ('"seen_pins == 0", else', '"seen_pin == 0", else', "steps[2].test: column 1, at 'seen_pin': unknown name"),
        ('load = "seen_pins", value = "pins"', 'load = "pins", value = "pins"', "load 'pins': no name, or one"),
        ('load = "seen_pins", value = "pins"', 'load = "a b", value = "pins"', "load 'a b': no name, or one"),
        ('value = "pins"', 'value = "stage"', "value: column 1, at 'stage': is enum"),
        ('row = "free", goto = "end"', 'row = "free", goto = "ende"', "no step is labelled 'ende'"),
        ('row = "free", goto = "end"', 'row = "free", at = "test"', "steps[3].at: 'test' is a label already"),
        ('row = "free", goto = "end"', 'row = "free", at = "end"', "steps[3].at: 'end' is a label already"),
        ('"seen_pins == 0", else = "busy"', '"seen_pins == 0", else = "end"', "steps[4]: no step leads here"),
        ("{ at = 0, n = 2 }", "{ at = 0 }", "inputs: row 'append' takes at, n"),
        ("{ at = 0, n = 2 }", '{ at = 0, n = "two" }', "inputs.n: 'two' is not int"),
        ("steps.writer = []", "steps.wirter = []", "variants.move.steps.wirter: no such thread"),
        ('breaks = "livelock"', 'breaks = "live_lock"', "breaks: expected one of stale_bytes"),
        ('breaks = "livelock"', "", "breaks: expected one of stale_bytes"),
        ('expect = "holds"', 'expect = "holds"\nbreaks = "refused"', "expected nothing in what holds, got 'refused'"),
        ('expect = "holds"', 'expect = "hold"', "Invalid enum value 'hold'"),
        ("[variants.move]", "[variants.plain]", "variants.plain: the name of the model without a variant"),
        ('row = "pin", segment_from', 'row = "pni", segment_from', "tables[0].row: no shared row 'pni'"),
        ('drop_when = "pins == 0"', 'drop_when = "pins == 1"', "drop_when: row 'free' does not say 'pins == 1'"),
        ('segment_from = "KEPT"', 'segment_from = "PINNABLE"', "tables[0]: changes nothing"),
        ('segment_from = "KEPT"', 'segment_from = "KEEPT"', "variants.marked_takes_pins.tables: protocols/prefix_hit"),
        ('tables = [{ row = "free", drop_when = "pins == 0" }]', "", "test_after_the_mark_suffices: changes nothing"),
    ],
)
def test_a_bad_file_is_refused_in_one_line(folder: Path, old: str, new: str, reason: str) -> None:
    text = (SPEC_DIR / LABEL).read_text("utf-8")
    assert old in text
    (folder / LABEL).write_text(text.replace(old, new, 1), "utf-8")
    with pytest.raises(InputError) as refused:
        run(load_tables(), folder)
    message = str(refused.value)
    assert reason in message
    assert message.startswith(f"{LABEL}: ")
    assert "\n" not in message


def test_a_missing_empty_or_binary_file_is_refused_in_one_line(folder: Path) -> None:
    for content, reason in ((b"", "empty table"), (b"\xff", "byte 0: not UTF-8 text"), (None, "cannot be read")):
        (folder / LABEL).unlink()
        if content is not None:
            (folder / LABEL).write_bytes(content)
        with pytest.raises(InputError, match=rf"^{LABEL}: {reason}"):
            read_model(folder)
