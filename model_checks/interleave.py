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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build
from hybridkv_ref.model_checks import obligations
from hybridkv_ref.model_checks.thread_models import (
    BROKEN,
    LABEL,
    PLAIN,
    ModelSpec,
    VariantSpec,
    edited,
    read_model,
    rows_only,
)
from hybridkv_ref.model_checks.thread_programs import Frame, Move, Slot, System, TraceStep
from hybridkv_ref.spec_files import Spec, read_spec
from hybridkv_ref.tables import Tables

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

    def search(self) -> obligations.Search:
        """The result as a record of a check; must-fail models are named as such."""
        name = self.name if self.expected == "holds" else f"{self.name} (must fail)"
        detail = "" if self.ok else f"expected {self.expected} {self.breaks}, got {self.got} {self.broken}: {self.doc}"
        return obligations.Search(
            name, "interleaving", self.got, self.ok, "one slot", -1, self.states, detail, self.rules
        )


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
            tables = build(changed, whole=False)
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
