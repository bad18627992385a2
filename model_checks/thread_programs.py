"""The programs of ``spec/interleavings.toml``, compiled against one kind and taken one atomic step at a time.

Labels become counters, expressions functions; the search over all interleavings is ``interleave``'s.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hybridkv_ref.compile_py import attribute, namer, python
from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, INT, Ref, Type, parse
from hybridkv_ref.machine import Entity, Machine, Refused, Value
from hybridkv_ref.model_checks.thread_models import LABEL, ModelSpec, StepSpec, VariantSpec
from hybridkv_ref.names import declare
from hybridkv_ref.spec_files import Spec
from hybridkv_ref.tables import ROLES, Event, Tables


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
