"""Threads against each other: every interleaving of the programs in ``spec/interleavings.toml``, explored.

Theory of operation.  A thread runs a program whose steps are rows of the tables, fired by the machine, and what an
engine does between rows: a load into a local, a test, a touch of the bytes.  One step is one atomic action.  A state is
the slot with its pools, and per thread a *frame* (program counter, locals, lease, request).  A step sees the slot and
its own frame only, so each (slot, frame) pair is fired once and the search goes over tuples of numbers, breadth first:
a counterexample is a shortest one.

What is checked owes nothing to the generations, guards and invariants of the tables.  The search counts the *bytes* of
the slot itself (they change when a row with a rewriting tag fires), notes which bytes a thread matched, and demands: a
touch meets the bytes that were matched; no bytes change between begin and end of another thread's read; a row that a
program counts on is never refused; a thread that ends or starts over holds nothing; with all threads at rest, so is the
slot; no fair schedule keeps a thread inside its program for ever.  Variants edit programs, rows or the kind; one that
must fail has to fail in the way that it names.  Where the file says that programs hold, each of their steps must be
taken and each refusal be seen.

Assumed: a row is atomic; memory is sequentially consistent; constants have their small values; there is one slot.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import networkx as nx

from hybridkv_ref.compile_py import attribute, namer, python
from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, INT, Ref, Type, parse
from hybridkv_ref.loader import build
from hybridkv_ref.machine import Entity, Machine, Refused, Value
from hybridkv_ref.names import declare
from hybridkv_ref.spec_files import Record, RowSpec, Spec, read_spec, read_toml
from hybridkv_ref.tables import ROLES, Event, Tables

LABEL = "interleavings.toml"
PLAIN = "plain"
BROKEN = {
    "stale_bytes": "a touch meets other bytes than those that were matched",
    "rewritten_under_read": "the bytes change while another thread reads them",
    "refused": "a row that the program counts on is refused",
    "not_at_rest": "a thread ends or starts over while it holds something",
    "unsettled": "every thread is at rest, the slot is not",
    "livelock": "a fair schedule keeps the thread inside its program for ever",
    "unreached": "no interleaving takes the step, or none refuses it",
}
"""What can be wrong, by the name that a variant gives in ``breaks``."""


class StepSpec(Record, frozen=True, rename={"else_": "else"}):
    """One atomic step: exactly one of ``row``, ``load``, ``test`` and ``touch``.  ``at`` is its label."""

    row: str = ""
    inputs: dict[str, int | bool | str] = msgspec.field(default_factory=dict)
    match: bool = False
    load: str = ""
    value: str = ""
    test: str = ""
    touch: Literal["", "begin", "end"] = ""
    at: str = ""
    else_: str = ""
    goto: str = ""


class ThreadSpec(Record, frozen=True):
    """``count`` threads that run the same program."""

    doc: str
    steps: list[StepSpec]
    count: int = 1


class EditSpec(Record, frozen=True, rename={"from_": "from"}):
    """A change of one shared row: a conjunct or effect taken out, an effect added, a stage column replaced."""

    row: str
    drop_when: str = ""
    drop_then: str = ""
    add_then: str = ""
    from_: str = ""
    segment_from: str = ""


class VariantSpec(Record, frozen=True):
    """The same threads with other programs, rows or kind.  ``breaks`` is how one that must fail does so."""

    doc: str
    rules: list[str]
    expect: Literal["holds", "fails"] = "fails"
    breaks: str = ""
    kind: str = ""
    steps: dict[str, list[StepSpec]] = msgspec.field(default_factory=dict)
    tables: list[EditSpec] = msgspec.field(default_factory=list)


class ModelSpec(Record, frozen=True):
    """The file; its own head is the model that must hold, named ``plain`` in results."""

    title: str
    kind: str
    request: dict[str, int | bool | str]
    rewrites: list[str]
    at_rest: str
    settled: str
    rules: list[str]
    setup: list[StepSpec]
    threads: dict[str, ThreadSpec]
    variants: dict[str, VariantSpec]


# ---- the file --------------------------------------------------------------------------------------------------------


def read_model(spec_dir: Path) -> ModelSpec:
    """The file as records; a one-line InputError names the first thing that is wrong with its shape."""
    try:
        model = msgspec.convert(read_toml(spec_dir / LABEL, LABEL), ModelSpec)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        raise InputError(f"{LABEL}: {path.rstrip('`').lstrip('.') or 'file'}: {reason}") from None
    for name, thread in model.threads.items():
        if thread.count < 1:
            raise InputError(f"{LABEL}: threads.{name}.count: expected 1 or more, got {thread.count}")
    for name, variant in model.variants.items():
        place = f"{LABEL}: variants.{name}"
        if name == PLAIN:
            raise InputError(f"{place}: the name of the model without a variant")
        if variant.breaks not in (BROKEN if variant.expect == "fails" else ("",)):
            wanted = f"one of {', '.join(BROKEN)}" if variant.expect == "fails" else "nothing in what holds"
            raise InputError(f"{place}.breaks: expected {wanted}, got '{variant.breaks}'")
        unknown = next((n for n in variant.steps if n not in model.threads), None)
        if unknown:
            raise InputError(f"{place}.steps.{unknown}: no such thread")
        if not (variant.steps or variant.tables or variant.kind):
            raise InputError(f"{place}: changes nothing")
    return model


def rows_only(spec: Spec) -> Spec:
    """The spec without what no interleaving looks at: handoffs and every stated property."""
    empty: dict[str, Any] = {"handoffs": {}, "invariant": {}, "step": {}, "response": {}, "sometimes": {}}
    return msgspec.structs.replace(spec, files={n: msgspec.structs.replace(f, **empty) for n, f in spec.files.items()})


def edited(spec: Spec, edits: Sequence[EditSpec], place: str) -> Spec:
    """The spec with these edits of shared rows; an edit that finds no row or changes nothing is an error."""
    files = dict(spec.files)
    for index, edit in enumerate(edits):
        where = f"{LABEL}: {place}[{index}]"
        label = next((n for n, f in files.items() if not f.kind and edit.row in f.rows), None)
        if label is None:
            raise InputError(f"{where}.row: no shared row '{edit.row}'")
        row = files[label].rows[edit.row]
        changed = _edited_row(row, edit, where)
        if changed == row:
            raise InputError(f"{where}: changes nothing")
        files[label] = msgspec.structs.replace(files[label], rows={**files[label].rows, edit.row: changed})
    return msgspec.structs.replace(spec, files=files)


def _edited_row(row: RowSpec, edit: EditSpec, where: str) -> RowSpec:
    when, then = list(row.when), list(row.then)
    for key, text, texts in (("drop_when", edit.drop_when, when), ("drop_then", edit.drop_then, then)):
        if text and text not in texts:
            raise InputError(f"{where}.{key}: row '{edit.row}' does not say '{text}'")
        if text:
            texts.remove(text)
    then += [edit.add_then] if edit.add_then else []
    source, segment = edit.from_ or row.from_, edit.segment_from or row.segment_from
    return msgspec.structs.replace(row, when=when, then=then, from_=source, segment_from=segment)


# ---- programs --------------------------------------------------------------------------------------------------------


class TraceStep(NamedTuple):
    """One step of an interleaving; ``changed`` maps a variable to (before, after), ``note`` tells of a refusal."""

    thread: str
    step: str
    changed: Mapping[str, tuple[Value | None, Value | None]]
    note: str = ""


class Step(NamedTuple):
    """A step, compiled: counters instead of labels, an event or a function instead of text."""

    text: str
    spec: StepSpec
    then: int
    otherwise: int | None
    event: Event | None
    value: Callable[..., Any] | None
    local: int


class Program(NamedTuple):
    """Compiled steps; counter ``len(steps)`` is that of a thread that has ended."""

    name: str
    steps: tuple[Step, ...]
    local_names: tuple[str, ...]


class Slot(NamedTuple):
    """What all threads see; ``bytes`` counts the rewrites of the slot, whatever its generation says."""

    bytes: int
    pool: tuple[Value, ...]
    segment: tuple[Value, ...]


class Frame(NamedTuple):
    """What one thread has; ``matched`` is the count of bytes that it found, ``reading`` is between begin and end."""

    pc: int
    matched: int | None
    reading: bool
    local_values: tuple[Value, ...]
    lease: tuple[Value, ...]
    request: tuple[Value, ...]


class Move(NamedTuple):
    """What one step does to (slot, frame)."""

    slot: Slot
    frame: Frame
    taken: bool
    rewrites: bool
    broken: str
    trace: TraceStep


class System:
    """One model: its programs, compiled against one kind, and the world that fires their rows.

    The world holds one segment and the lease and request of whichever thread moves; frames keep the others'.
    """

    def __init__(self, tables: Tables, spec: Spec, model: ModelSpec, variant: VariantSpec, place: str) -> None:
        self.kind = variant.kind or model.kind
        if self.kind not in tables.kinds or "cacheable" not in tables.kinds[self.kind].capabilities:
            where = f"{place}.kind" if variant.kind else "kind"
            raise InputError(f"{LABEL}: {where}: no cacheable kind '{self.kind}'")
        self.machine = Machine(tables)
        self.rewrites = frozenset(model.rewrites)
        unknown = sorted(self.rewrites - {tag for event in tables.events for tag in event.tags})
        if unknown:
            raise InputError(f"{LABEL}: rewrites: no row has the tag '{unknown[0]}'")
        self.scope = declare(spec.files).scope("lease", {"self": self.kind})
        self.world = self.machine.world()
        segment = self.world.add("segment", self.kind)
        request = self.world.add("request", "", None, **self.rigid(model.request))
        lease = self.world.add("lease", refs={"self": segment, "req": request})
        self.entities: dict[str, Entity] = {"self": segment, "lease": lease, "req": request}
        parts: tuple[tuple[Any, str, Mapping[str, object]], ...] = (
            (self.world.pool, "", tables.globals),
            (segment, "", tables.vars_of("segment", self.kind)),
            (lease, "lease.", tables.classes["lease"]),
            (request, "req.", tables.classes["request"]),
        )
        self.stores = [(owner, tuple(map(attribute, names))) for owner, _, names in parts]
        self.names = ("bytes", *(prefix + name for _, prefix, names in parts for name in names))
        self.at_rest = self.function(model.at_rest, (), "at_rest", BOOL)
        self.settled = self.function(model.settled, (), "settled", BOOL)
        self.slot = Slot(0, *self.take(0, 2))
        self.fresh = Frame(0, None, False, (), *self.take(2, 4))
        self.setup = self.program("setup", model.setup, "setup")
        self.threads: list[tuple[str, Program]] = []
        for name, thread in model.threads.items():
            steps = variant.steps.get(name, thread.steps)
            where = f"threads.{name}.steps" if steps is thread.steps else f"{place}.steps.{name}"
            program = self.program(name, steps, where)
            if program.steps:
                names = [f"{name}#{i}" for i in range(thread.count)] if thread.count > 1 else [name]
                self.threads += [(each, program) for each in names]
        if not self.threads:
            raise InputError(f"{LABEL}: {place}: no thread has a step")

    def rigid(self, values: Mapping[str, Value]) -> dict[str, Value]:
        """The rigid request variables, per-kind ones under the kind's own name."""
        variables, stored = self.machine.tables.classes["request"], {}
        for name, value in values.items():
            place = f"{LABEL}: request.{name}"
            ref = self.scope.names.get(f"req.{name}")
            if ref is None or not variables[ref.name].rigid:
                raise InputError(f"{place}: no rigid variable of a request")
            stored[ref.name] = _typed(value, ref.type, place)
        return stored

    def function(self, text: str, local_names: Sequence[str], place: str, want: Type) -> Callable[..., Any]:
        """An expression as a function of (pool, segment, lease, request, locals...)."""
        scope = self.scope.with_names({name: Ref("input", name, INT) for name in local_names})
        body = python(parse(text, scope, f"{LABEL}: {place}", want), namer(self.machine.constants))
        arguments = ", ".join(["G", "seg", "lease", "req", *(f"in_{name}" for name in local_names)])
        made: Callable[..., Any] = eval(f"lambda {arguments}: {body}")
        return made

    def program(self, name: str, specs: Sequence[StepSpec], place: str) -> Program:
        """The steps, compiled; labels become counters."""
        labels = {"start": 0, "end": len(specs)}
        for index, spec in enumerate(specs):
            if spec.at in labels:
                raise InputError(f"{LABEL}: {place}[{index}].at: '{spec.at}' is a label already")
            if spec.at:
                labels[spec.at] = index
        local_names = tuple(dict.fromkeys(s.load for s in specs if s.load))
        for local in local_names:
            if not local.isidentifier() or local in self.scope.names:
                raise InputError(f"{LABEL}: {place}: load '{local}': no name, or one that is taken")
        steps = [self.step(s, i, labels, local_names, f"{place}[{i}]") for i, s in enumerate(specs)]
        reached, todo = {0}, [0] if steps else []
        while todo:
            step = steps[todo.pop()]
            fresh = {t for t in (step.then, step.otherwise) if t is not None and t < len(steps)} - reached
            reached |= fresh
            todo += fresh
        dead = next((i for i in range(len(steps)) if i not in reached), None)
        if dead is not None:
            raise InputError(f"{LABEL}: {place}[{dead}]: no step leads here")
        return Program(name, tuple(steps), local_names)

    def step(
        self, spec: StepSpec, index: int, labels: Mapping[str, int], local_names: tuple[str, ...], place: str
    ) -> Step:
        """One step, compiled."""
        where = f"{LABEL}: {place}"
        if sum(map(bool, (spec.row, spec.load, spec.test, spec.touch))) != 1:
            raise InputError(f"{where}: expected exactly one of row, load, test and touch")
        if bool(spec.load) != bool(spec.value) or bool(spec.inputs or spec.match) > bool(spec.row):
            raise InputError(f"{where}: a load has a value; only a row has inputs or match")
        if bool(spec.test) > bool(spec.else_) or bool(spec.else_) > bool(spec.test or spec.row):
            raise InputError(f"{where}: a test needs else, a row may have it, nothing else does")
        unknown = next((n for n in (spec.goto, spec.else_) if n and n not in labels), None)
        if unknown:
            raise InputError(f"{where}: no step is labelled '{unknown}'")
        event = self.event(spec, where) if spec.row else None
        text, value, local = spec.row or f"touch {spec.touch}", None, -1
        if spec.load:
            text, local = f"{spec.load} := {spec.value}", local_names.index(spec.load)
            value = self.function(spec.value, local_names, f"{place}.value", INT)
        elif spec.test:
            text, value = f"test {spec.test}", self.function(spec.test, local_names, f"{place}.test", BOOL)
        return Step(text, spec, labels.get(spec.goto, index + 1), labels.get(spec.else_), event, value, local)

    def event(self, spec: StepSpec, where: str) -> Event:
        """The event of a row of this kind or of requests, its inputs checked."""
        ids = (f"{self.kind}.{spec.row}", f"request.{spec.row}")
        event = next((self.machine.events[i].event for i in ids if i in self.machine.events), None)
        if event is None:
            raise InputError(f"{where}.row: '{spec.row}' is no row of {self.kind} or of a request")
        if set(spec.inputs) != set(event.inputs):
            raise InputError(f"{where}.inputs: row '{spec.row}' takes {', '.join(event.inputs) or 'none'}")
        for name, kind in event.inputs.items():
            _typed(spec.inputs[name], kind, f"{where}.inputs.{name}")
        return event

    # -- firing --------------------------------------------------------------------------------------------------------
    def take(self, first: int, last: int) -> list[tuple[Value, ...]]:
        """The values now in some of the four stores: pool, segment, lease, request."""
        return [tuple(getattr(owner, name) for name in names) for owner, names in self.stores[first:last]]

    def put(self, slot: Slot, frame: Frame) -> None:
        """Makes the world that of one thread."""
        values = (slot.pool, slot.segment, frame.lease, frame.request)
        for (owner, names), row in zip(self.stores, values, strict=True):
            for name, value in zip(names, row, strict=True):
                setattr(owner, name, value)

    def call(self, function: Callable[..., Any], local_values: tuple[Value, ...]) -> Any:
        """A compiled expression over the world as it stands."""
        return function(self.world.pool, *self.entities.values(), *local_values)

    def move(self, program: Program, slot: Slot, frame: Frame) -> Move:
        """The thread's next step."""
        step, spec = program.steps[frame.pc], program.steps[frame.pc].spec
        self.put(slot, frame)
        count, matched, reading = slot.bytes, frame.matched, spec.touch == "begin" or (frame.reading and not spec.touch)
        values, taken, broken, note = list(frame.local_values), True, "", ""
        if step.event:
            try:
                self.world.fire(step.event.id, *(self.entities[r] for r in ROLES[step.event.scope]), **spec.inputs)
                count += not self.rewrites.isdisjoint(step.event.tags)
            except Refused as refusal:
                taken, note, broken = False, str(refusal), "" if spec.else_ else "refused"
        elif step.value and spec.load:
            values[step.local] = self.call(step.value, frame.local_values)
        elif step.value:
            taken = bool(self.call(step.value, frame.local_values))
            note = "" if taken else "no"
        elif matched != count:
            broken, note = "stale_bytes", f"bytes {count}, matched {matched}"
        if spec.match and taken:
            matched = count
        after = Slot(count, *self.take(0, 2))
        pc = step.then if taken or step.otherwise is None else step.otherwise
        moved = Frame(pc, matched, reading, tuple(values), *self.take(2, 4))
        trace = TraceStep(program.name, step.text, self.changes(program, slot, frame, after, moved), note)
        if pc in (0, len(program.steps)) and not broken:
            if reading or not self.call(self.at_rest, ()):
                broken = "not_at_rest"
            moved = self.start(program)._replace(pc=pc)
        return Move(after, moved, taken, count != slot.bytes, broken, trace)

    def start(self, program: Program) -> Frame:
        """A thread before its first step: a lease and a request that are fresh."""
        return self.fresh._replace(local_values=(0,) * len(program.local_names))

    def changes(
        self, program: Program, slot: Slot, frame: Frame, after: Slot, moved: Frame
    ) -> dict[str, tuple[Value | None, Value | None]]:
        """The variables that differ, by name."""

        def row(slot: Slot, frame: Frame) -> tuple[Value | None, ...]:
            shared = (slot.bytes, *slot.pool, *slot.segment)
            return (*shared, *frame.lease, *frame.request, frame.matched, *frame.local_values)

        names = (*self.names, "matched", *program.local_names)
        pairs = zip(names, row(slot, frame), row(after, moved), strict=True)
        return {name: (old, new) for name, old, new in pairs if old != new}


def _typed(value: Value, kind: Type, place: str) -> Value:
    number = isinstance(value, int) and isinstance(value, bool) == (kind == BOOL)
    if not (value in kind.members if kind.members else number):
        raise InputError(f"{place}: {value!r} is not {kind}")
    return value


# ---- the search ------------------------------------------------------------------------------------------------------

_State = tuple[int, ...]  # numbers of the slot and of each thread's frame
_Verdict = tuple[str, list[TraceStep], int | None]


class Search:
    """Every state that some interleaving reaches, with the step that first led there."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.values: list[Any] = []
        self.numbers: dict[tuple[str, Slot | Frame], int] = {}
        self.moves: dict[tuple[int, int, int], tuple[int, int, Move] | None] = {}
        self.states: list[_State] = []
        self.parents: list[tuple[int, int]] = []
        self.edges: list[list[tuple[int, int]]] = []

    def number(self, program: str, value: Slot | Frame) -> int:
        """The number of a slot state (program '') or of a program's frame."""
        found = self.numbers.setdefault((program, value), len(self.values))
        if found == len(self.values):
            self.values.append(value)
        return found

    def verdict(self, shown: set[str]) -> _Verdict:
        """What is broken ('' for nothing), the interleaving, and where it repeats.

        The threads in ``shown`` must show every step.
        """
        broken, slot, trace = self.set_up()
        if broken:
            return broken, trace, None
        broken, trace = self.explore(slot)
        if broken:
            return broken, trace, None
        return self.livelock() or self.unreached(shown) or ("", [], None)

    def set_up(self) -> tuple[str, Slot, list[TraceStep]]:
        """The slot as the setup leaves it."""
        slot, frame, trace = self.system.slot, self.system.start(self.system.setup), []
        while frame.pc < len(self.system.setup.steps):
            move = self.system.move(self.system.setup, slot, frame)
            trace.append(move.trace)
            if move.broken:
                return move.broken, slot, trace
            slot, frame = move.slot, move.frame
        return "" if self.is_settled(slot, frame) else "unsettled", slot, trace

    def explore(self, slot: Slot) -> tuple[str, list[TraceStep]]:
        """Visits every state; stops at the first step that breaks something."""
        threads = self.system.threads
        starts = [(p, self.system.start(p)) for _, p in threads]
        resting = {self.number(p.name, f._replace(pc=pc)) for p, f in starts for pc in (0, len(p.steps))}
        first = (self.number("", slot), *(self.number(p.name, f) for p, f in starts))
        index, self.states, self.parents = {first: 0}, [first], [(-1, -1)]
        for at, state in enumerate(self.states):
            self.edges.append(out := [])
            for thread in range(len(threads)):
                key = (thread, state[0], state[thread + 1])
                found = self.moves[key] if key in self.moves else self.step(*key)
                if found is None:
                    continue
                to_slot, to_frame, move = found
                after = (to_slot, *state[1 : thread + 1], to_frame, *state[thread + 2 :])
                broken = move.broken
                if move.rewrites and self.read_by_another(state, thread):
                    broken = "rewritten_under_read"
                elif not broken and to_frame in resting and resting.issuperset(after[1:]):
                    broken = "" if self.is_settled(move.slot, move.frame) else "unsettled"
                if broken:
                    return broken, [*self.path(at), self.shown(at, thread)]
                there = index.setdefault(after, len(self.states))
                if there == len(self.states):
                    self.states.append(after)
                    self.parents.append((at, thread))
                out.append((thread, there))
        return "", []

    def step(self, thread: int, slot: int, frame: int) -> tuple[int, int, Move] | None:
        """The thread's move, None when it has ended; computed once for all states that look the same to the thread."""
        name, program = self.system.threads[thread]
        found, before = None, self.values[frame]
        if before.pc < len(program.steps):
            move = self.system.move(program, self.values[slot], before)
            move = move._replace(trace=move.trace._replace(thread=name))
            found = (self.number("", move.slot), self.number(program.name, move.frame), move)
        self.moves[thread, slot, frame] = found
        return found

    def is_settled(self, slot: Slot, frame: Frame) -> bool:
        """Whether the slot is as it should be with every thread at rest; the frame is any one of theirs."""
        self.system.put(slot, frame)
        return bool(self.system.call(self.system.settled, ()))

    def read_by_another(self, state: _State, thread: int) -> bool:
        """Whether some other thread is between begin and end of its read."""
        return any(self.values[f].reading for t, f in enumerate(state[1:]) if t != thread)

    def shown(self, at: int, thread: int) -> TraceStep:
        """What a thread did in a state that the search has visited."""
        found = self.moves[thread, self.states[at][0], self.states[at][thread + 1]]
        if found is None:
            raise KeyError(f"state {at}: thread {thread} has ended")
        return found[2].trace

    def path(self, at: int) -> list[TraceStep]:
        """A shortest interleaving that leads to a state."""
        trace = []
        while self.parents[at][0] >= 0:
            at, thread = self.parents[at]
            trace.append(self.shown(at, thread))
        return trace[::-1]

    # -- what no single step shows -------------------------------------------------------------------------------------
    def livelock(self) -> _Verdict | None:
        """A cycle that keeps a thread inside its program although every thread that has not ended moves on it.

        No step waits, so such a cycle holds a jump of the thread back to an earlier step: only what can follow such
        jumps is searched.
        """
        for thread, (_, program) in enumerate(self.system.threads):
            counters = [self.values[state[thread + 1]].pc for state in self.states]
            inside = {at for at, pc in enumerate(counters) if 0 < pc < len(program.steps)}
            jumps = [(i, j) for i in inside for t, j in self.edges[i] if t == thread and 0 < counters[j] <= counters[i]]
            again, todo = {j for _, j in jumps}, [j for _, j in jumps]
            while todo:
                fresh = {j for _, j in self.edges[todo.pop()] if j in inside and j not in again}
                again |= fresh
                todo += fresh
            if again.isdisjoint(i for i, _ in jumps):
                continue
            graph = nx.DiGraph((i, j) for i in again for _, j in self.edges[i] if j in again)
            for component in nx.strongly_connected_components(graph):
                movers = {t for i in component for t, j in self.edges[i] if j in component}
                first = min(component)
                others = set(range(len(self.system.threads))) - movers
                if thread in movers and all(self.ended(first, other) for other in others):
                    prefix = self.path(first)
                    return "livelock", prefix + self.cycle(component, first, movers), len(prefix)
        return None

    def ended(self, at: int, thread: int) -> bool:
        """Whether a thread has ended in a state."""
        frame: Frame = self.values[self.states[at][thread + 1]]
        return frame.pc == len(self.system.threads[thread][1].steps)

    def cycle(self, component: set[int], first: int, movers: set[int]) -> list[TraceStep]:
        """From ``first`` and back inside a component, with a step of every mover."""
        trace, at = [], first
        for mover in [*sorted(movers), None]:
            if mover is None and at == first:
                break
            back: dict[int, tuple[int, int]] = {}
            queue, last = deque([at]), None
            while last is None:
                here = queue.popleft()
                for thread, there in self.edges[here]:
                    if there not in component:
                        continue
                    if thread == mover or (mover is None and there == first):
                        last = (here, thread, there)
                        break
                    if there not in back and there != at:
                        back[there] = (here, thread)
                        queue.append(there)
            here, thread, there = last
            part = [(here, thread)]
            while here != at:
                here, thread = back[here]
                part.append((here, thread))
            trace += [self.shown(i, t) for i, t in reversed(part)]
            at = there
        return trace

    def unreached(self, shown: set[str]) -> _Verdict | None:
        """A step that is never taken or, with an ``else``, never refused."""
        moves = [(self.system.threads[t][1].name, self.values[f].pc, m) for (t, _, f), m in self.moves.items()]
        seen = {(name, pc, found[2].taken) for name, pc, found in moves if found}
        for _, program in self.system.threads:
            for pc, step in enumerate(program.steps) if program.name in shown else ():
                for taken in (True, False) if step.spec.else_ else (True,):
                    if (program.name, pc, taken) not in seen:
                        what = "never taken" if taken else "never refused"
                        return "unreached", [TraceStep(program.name, step.text, {}, what)], None
        return None


# ---- results ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class InterleaveResult:
    """What exploring one model showed.

    ``states`` were found until the search ended: all of them if it holds.  ``broken`` is a key of BROKEN, or empty.
    ``loop`` is the index in ``trace`` from which a livelock repeats.
    """

    name: str
    expected: str
    got: str
    states: int
    trace: tuple[TraceStep, ...]
    broken: str
    breaks: str
    rules: tuple[str, ...]
    doc: str
    loop: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the model holds as expected, or fails in the very way that it names."""
        return self.got == self.expected and self.broken == self.breaks


def run(tables: Tables, spec_dir: Path) -> list[InterleaveResult]:
    """Explores the plain model over ``tables``, then every variant.

    Variants that edit rows are built from ``spec_dir``.  InputError, before anything is explored, for a file that is no
    model of these tables.
    """
    model, spec = read_model(spec_dir), read_spec(spec_dir)
    systems = [(n, v, system(tables, spec, model, n, v)) for n, v in {PLAIN: plain(model), **model.variants}.items()]
    return [explore(name, variant, built) for name, variant, built in systems]


def plain(model: ModelSpec) -> VariantSpec:
    """The programs and rows as they are, written like a variant: every thread must show every step."""
    steps = {name: thread.steps for name, thread in model.threads.items()}
    return VariantSpec("the programs and rows as they are", model.rules, "holds", steps=steps)


def system(tables: Tables, spec: Spec, model: ModelSpec, name: str, variant: VariantSpec) -> System:
    """A variant's system: over ``tables``, or over the spec with the variant's edits of rows."""
    place = f"variants.{name}"
    if variant.tables:
        changed = rows_only(edited(spec, variant.tables, f"{place}.tables"))
        try:
            tables = build(changed)
        except InputError as error:
            raise InputError(f"{LABEL}: {place}.tables: {error}") from None
    return System(tables, spec, model, variant, place)


def explore(name: str, variant: VariantSpec, built: System) -> InterleaveResult:
    """Searches one system."""
    search = Search(built)
    broken, trace, loop = search.verdict(set(variant.steps) if variant.expect == "holds" else set())
    return InterleaveResult(
        name, variant.expect, "fails" if broken else "holds", len(search.states), tuple(trace), broken,
        variant.breaks, tuple(variant.rules), variant.doc, loop,
    )  # fmt: skip


def render(result: InterleaveResult) -> str:
    """The verdict and the interleaving as text, one step a line with the fields that it changed."""
    why = f": {BROKEN[result.broken]}" if result.broken else ""
    wanted = "" if result.ok else f"; expected: {result.expected} {result.breaks}".rstrip()
    lines = [f"{result.name}: {result.got} after {result.states} states{why}{wanted}"]
    for index, step in enumerate(result.trace):
        if index == result.loop:
            lines.append("  from here on, for ever:")
        fields = ", ".join(f"{n}: {old} -> {new}" for n, (old, new) in step.changed.items())
        lines.append(f"  {step.thread:<10} {step.step:<28} {step.note or fields}".rstrip())
    return "\n".join(lines)
