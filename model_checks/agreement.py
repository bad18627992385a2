"""Do the back ends mean the same?  Random states x events, evaluated by every one of them, compared value by value.

A table is written once and read by four generators: Python source (what runs), Z3 terms (what is proved), array functions
(what is searched) and Promela (what Spin runs).  Each is given the same random values of all variables of an event's
entities, globals, constants and inputs, whether or not such a state can be reached, and says which guard conjuncts hold and
what every variable is after the event; a refused event changes nothing.

Half of the samples are repaired until every guard holds, most others until exactly one does not, so that every conjunct
decides; the rest is left as drawn.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import z3

from hybridkv_ref.compile_py import attribute, namer, python, role_name
from hybridkv_ref.expr import BOOL, INT, Ref, refs
from hybridkv_ref.machine import Machine
from hybridkv_ref.model_checks.frames import Assumptions, owner_name
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.promela import assignments, condition, promela
from hybridkv_ref.model_checks.smt import literal
from hybridkv_ref.model_checks.spin import build, run_verifier
from hybridkv_ref.model_checks.vector import code, decode, vector_function
from hybridkv_ref.tables import CLASS_OF, Event, Guard, Tables

Ints = npt.NDArray[np.int64]
ROUNDS = 60  # of repair; a sample that is not as wanted by then is used as it is
PER_ROUND = 40  # samples of an event with the same constants, which the machine compiles in


@dataclass(frozen=True)
class Batch:
    """Samples of one event: ``values[i, j]`` is variable ``cells[j]`` in sample i, enum members as positions."""

    event: Event
    cells: tuple[Ref, ...]
    values: Ints

    def constants(self) -> dict[str, int]:
        """The constants, which are the same in all samples of a batch."""
        return {r.name: int(v) for r, v in zip(self.cells, self.values[0], strict=True) if r.role == "const"}


@dataclass(frozen=True)
class Outcome:
    """What an evaluator says of a batch: guards[i, k] is 1 if conjunct k holds, after[i, j] the value of cell j afterwards."""

    guards: Ints
    after: Ints


class Evaluator(Protocol):
    """One back end over one set of tables."""

    name: str

    def evaluate(self, batches: Sequence[Batch]) -> Iterator[Outcome]:
        """The outcome of every batch, in order."""
        ...


@dataclass(frozen=True)
class Disagreement:
    """Two back ends differ about one sample: ``what`` is a guard's text or a variable; ``values`` is the state before."""

    event: str
    what: str
    first: tuple[str, int]
    second: tuple[str, int]
    values: tuple[tuple[str, int | str], ...]


@dataclass
class Agreement:
    """The result: how many samples, which events fired in one, which conjuncts (event, index) alone refused one."""

    samples: int = 0
    fired: set[str] = field(default_factory=set)
    decided: set[tuple[str, int]] = field(default_factory=set)
    disagreements: list[Disagreement] = field(default_factory=list)


# ---- samples -----------------------------------------------------------------------------------------------------------


def cells(tables: Tables, event: Event) -> tuple[Ref, ...]:
    """Every variable within an event's reach, and more: all those of its entities, all globals, constants and inputs."""
    found = [Ref("global", n, v.type) for n, v in tables.globals.items()]
    found += [Ref("const", n, INT) for n in tables.constants]
    for role in event.roles:
        found += [Ref(role, n, v.type) for n, v in tables.vars_of(CLASS_OF[role], event.kinds.get(role, "")).items()]
    found += [Ref("input", n, t) for n, t in event.inputs.items()]
    mentioned = {(r.role, r.name): r for r in mentions(event)}  # an enum's label may differ from the declaration's
    return tuple(mentioned.get((r.role, r.name), r) for r in found)


def mentions(event: Event) -> set[Ref]:
    """The variables that an event reads or writes."""
    read = set().union(*(refs(g.expr) for g in event.guards), *(refs(e.expr) for e in event.effects))
    return read | {e.target for e in event.effects}


def sample(event: Event, at: tuple[Ref, ...], fixed: dict[str, int], count: int, rng: np.random.Generator) -> Batch:
    """Random values, repaired by redrawing the variables of guards that are not as wanted."""
    values = np.stack([_draw(r, count, rng) for r in at], axis=1)
    for index, ref in enumerate(at):
        if ref.role == "const":
            values[:, index] = fixed[ref.name]
    guards = len(event.guards)
    wanted = np.ones((count, guards), bool)
    mode = rng.integers(0, 8, count)
    one = np.flatnonzero(mode < 3) if guards else np.zeros(0, np.int64)
    wanted[one, rng.integers(0, max(guards, 1), len(one))] = False
    repaired = mode < 7
    functions = [vector_function(g.expr, at) for g in event.guards]
    free = [[at.index(r) for r in sorted(refs(g.expr), key=str) if r.role != "const"] for g in event.guards]
    for _ in range(ROUNDS):
        settled = True
        for guard, function in enumerate(functions):
            holds = np.broadcast_to(function(list(values.T)), count)
            wrong = np.flatnonzero(repaired & (holds != wanted[:, guard]))
            settled = settled and not len(wrong)
            chosen = rng.integers(0, len(free[guard]), len(wrong)) if free[guard] else wrong
            for number, column in enumerate(free[guard]):
                rows = wrong[chosen == number]
                values[rows, column] = _redraw(at, column, event.guards[guard], values[rows], rng)
        if settled:
            break
    return Batch(event, at, values)


def _draw(ref: Ref, count: int, rng: np.random.Generator) -> Ints:
    if not ref.type.number:
        return rng.integers(0, 2 if ref.type == BOOL else len(ref.type.members), count)
    wide = rng.random(count) < 0.05
    return np.where(wide, rng.integers(-50, 50, count), rng.integers(-1, 6, count))


def _redraw(at: tuple[Ref, ...], column: int, guard: Guard, values: Ints, rng: np.random.Generator) -> Ints:
    """New values of one variable; for a number, half of them stand near another number of the same guard."""
    fresh = _draw(at[column], len(values), rng)
    near = [at.index(r) for r in refs(guard.expr) if r != at[column] and r.type.number]
    if not at[column].type.number or not near:
        return fresh
    close = values[:, int(rng.choice(sorted(near)))] + rng.integers(-1, 2, len(values))
    return np.where(rng.random(len(values)) < 0.5, close, fresh)


# ---- the back ends -----------------------------------------------------------------------------------------------------


class PythonRows:
    """The machine: its compiled events, run on entities; and each conjunct's own source."""

    name = "python"

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def evaluate(self, batches: Sequence[Batch]) -> Iterator[Outcome]:
        """The conjunct that the machine refuses with must be the first false one: otherwise its value is turned round."""
        machine = Machine(self.tables)
        for batch in batches:
            constants = batch.constants()
            if constants != machine.constants:
                machine = Machine(self.tables, constants)
            event = machine.events[batch.event.id].event
            name = namer(machine.constants)
            arguments = ", ".join(["G", *map(role_name, event.roles), *(f"in_{i}" for i in event.inputs)])
            conjuncts = eval(f"lambda {arguments}: [{', '.join(python(g.expr, name) for g in event.guards)}]")
            pool: Any = machine.globals_type()
            entities = {r: machine.types[CLASS_OF[r], event.kinds.get(r, "")]() for r in event.roles}
            owners = [pool if c.role == "global" else entities.get(c.role) for c in batch.cells]
            slots = [(j, o, attribute(c.name), c.type) for j, (c, o) in enumerate(zip(batch.cells, owners, strict=True)) if o is not None]
            given = [(j, c.type) for j, c in enumerate(batch.cells) if c.role == "input"]
            guards = np.zeros((len(batch.values), len(event.guards)), np.int64)
            after = batch.values.copy()
            for row, values in enumerate(batch.values.tolist()):
                for j, owner, attr, kind in slots:
                    setattr(owner, attr, decode(values[j], kind))
                inputs = [decode(values[j], t) for j, t in given]
                guards[row] = [bool(v) for v in conjuncts(pool, *entities.values(), *inputs)]
                index = machine.events[event.id].call(pool, *entities.values(), *inputs)
                for false in {index, _first_false(guards[row])} if index != _first_false(guards[row]) else ():
                    guards[row, false] = 1 - guards[row, false]
                after[row, [j for j, *_ in slots]] = [code(getattr(o, a), t) for _, o, a, t in slots]
            yield Outcome(guards, after)


def _first_false(guards: Ints) -> int:
    return int(np.argmin(guards)) if len(guards) and not guards.all() else -1


class Z3Rows:
    """The terms that the induction proofs are made of, with numbers put in for their symbols."""

    name = "z3"

    def __init__(self, tables: Tables) -> None:
        self.tables, self.base = tables, Assumptions(tables)

    def evaluate(self, batches: Sequence[Batch]) -> Iterator[Outcome]:
        """All terms of an event hang under one function symbol, so that a sample takes one substitution."""
        for batch in batches:
            event = self.tables.event(batch.event.id)
            task = Task(self.tables, event, self.base)
            guards = [self.base.words.pre(g.expr, task.acting) for g in event.guards]
            written = [j for j, c in enumerate(batch.cells) if c.role not in ("const", "input") and (owner_name(c, task.acting), c.name) in task.after]
            terms = [*guards, *(task.post(batch.cells[j], task.acting, False) for j in written)]
            row = z3.Function("row", *(t.sort() for t in terms), z3.BoolSort())(*terms)
            read = mentions(event)
            symbols = [(j, c, self.base.words.cell(owner_name(c, task.acting), c)) for j, c in enumerate(batch.cells) if c in read]
            numbers = {(c.type, v): literal(decode(v, c.type), c.type) for j, c, _ in symbols for v in set(batch.values[:, j].tolist())}
            found = np.zeros((len(batch.values), len(terms)), np.int64)
            for i, values in enumerate(batch.values.tolist()):
                pairs = [(symbol, numbers[c.type, values[j]]) for j, c, symbol in symbols]
                found[i] = [_number(child) for child in z3.simplify(z3.substitute(row, *pairs)).children()]
            verdicts, after = found[:, : len(guards)], batch.values.copy()
            fires = np.flatnonzero(verdicts.all(axis=1))
            after[np.ix_(fires, written)] = found[fires, len(guards) :]
            yield Outcome(verdicts, after)


def _number(term: z3.ExprRef) -> int:
    return int(term.as_long()) if isinstance(term, z3.IntNumRef) else int(z3.is_true(term))


class ColumnRows:
    """The array functions of the finite-state search."""

    name = "columns"

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def evaluate(self, batches: Sequence[Batch]) -> Iterator[Outcome]:
        """Whole batches at a time."""
        for batch in batches:
            event, columns, count = self.tables.event(batch.event.id), list(batch.values.T), len(batch.values)
            guards = np.ones((count, len(event.guards)), np.int64)
            for k, guard in enumerate(event.guards):
                guards[:, k] = vector_function(guard.expr, batch.cells)(columns)
            after, fires = batch.values.copy(), guards.all(axis=1)
            for effect in event.effects:
                value = np.broadcast_to(vector_function(effect.expr, batch.cells)(columns), count)
                after[fires, batch.cells.index(effect.target)] = value[fires]
            yield Outcome(guards, after)


class PromelaRows:
    """The text that ``promela`` writes for an event, compiled and run by Spin on samples from a file."""

    name = "promela"

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def evaluate(self, batches: Sequence[Batch]) -> Iterator[Outcome]:
        """One run for all batches, which reads sample after sample."""
        events = list(dict.fromkeys(b.event.id for b in batches))
        layouts = {b.event.id: b.cells for b in batches}
        width = max(len(c) for c in layouts.values())
        most = max([1, *(len(self.tables.event(e).guards) for e in events)])
        source = self.driver([(self.tables.event(e), layouts[e]) for e in events], width, most)
        total = sum(len(b.values) for b in batches)
        samples = np.zeros((total, 1 + width), np.int32)
        begin = 0
        for batch in batches:
            end = begin + len(batch.values)
            samples[begin:end, 0] = events.index(batch.event.id)
            samples[begin:end, 1 : 1 + len(batch.cells)] = batch.values
            begin = end
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            samples.tofile(folder / "samples")
            pan, _, _ = build(source, folder, optimise="-O0")
            run_verifier(pan, f"-m{total + 10}")
            results = np.fromfile(folder / "results", np.int32).reshape(total, most + width)
        begin = 0
        for batch in batches:
            part = results[begin : begin + len(batch.values)].astype(np.int64)
            begin += len(batch.values)
            guards = len(self.tables.event(batch.event.id).guards)
            yield Outcome(part[:, :guards], part[:, most : most + len(batch.cells)])

    @staticmethod
    def driver(events: Sequence[tuple[Event, tuple[Ref, ...]]], width: int, most: int) -> str:
        """A model that takes one step per sample of the file ``samples`` and writes ``results``; ``line`` keeps states apart."""
        saved = max(len(event.effects) for event, _ in events)
        read = f"more = fread(&now.which, 4, 1, source) == 1 && fread(now.cell, 4, {width}, source) == {width}; now.line++;"
        write = f"fwrite(now.holds, 4, {most}, target); fwrite(now.cell, 4, {width}, target);"
        lines = [f"int line, which, more, cell[{width}], holds[{most}];", *(f"hidden int saved{i};" for i in range(saved))]
        lines += ["c_decl { FILE *source, *target; }", "active proctype driver() {"]
        lines += [f'  c_code {{ source = fopen("samples", "rb"); target = fopen("results", "wb"); now.{read} }};', "  do"]
        for number, (event, at) in enumerate(events):
            place = {ref: f"cell[{j}]" for j, ref in enumerate(at)}
            verdicts = "".join(f"holds[{k}] = {promela(g.expr, place.__getitem__)}; " for k, g in enumerate(event.guards))
            then = "; ".join([*assignments(event.effects, place.__getitem__), "skip"])
            step = f"if :: {condition(event.guards, place.__getitem__)} -> {then} :: else fi"
            lines.append(f"  :: d_step {{ more && which == {number} -> {verdicts}{step}; c_code {{ {write} now.{read} }} }}")
        return "\n".join([*lines, "  :: !more -> break", "  od;", "  c_code { fclose(target); }", "}", ""])


# ---- the comparison ------------------------------------------------------------------------------------------------------


def agree(tables: Tables, count: int, seed: int, evaluators: Sequence[Evaluator]) -> Agreement:
    """At least ``count`` samples, equally many of every event, compared between the first evaluator and each other one."""
    rng, batches = np.random.default_rng(seed), []
    each = -(-count // len(tables.events))
    layouts = [(event, cells(tables, event)) for event in tables.events]
    for begin in range(0, each, PER_ROUND):
        fixed = {name: int(rng.integers(0, 7)) for name in tables.constants}
        batches += [sample(e, at, fixed, min(PER_ROUND, each - begin), rng) for e, at in layouts]
    result = Agreement(sum(len(b.values) for b in batches))
    first, *others = evaluators
    reference = list(first.evaluate(batches))
    for batch, outcome in zip(batches, reference, strict=True):
        refused = len(batch.event.guards) - outcome.guards.sum(axis=1)
        if (refused == 0).any():
            result.fired.add(batch.event.id)
        alone = outcome.guards[refused == 1]
        result.decided |= {(batch.event.id, int(k)) for k in np.flatnonzero((alone == 0).any(axis=0))}
    for other in others:
        for batch, mine, theirs in zip(batches, reference, other.evaluate(batches), strict=True):
            result.disagreements += _compare(batch, (first.name, mine), (other.name, theirs))
    return result


def _compare(batch: Batch, first: tuple[str, Outcome], second: tuple[str, Outcome]) -> Iterator[Disagreement]:
    """One disagreement per sample: its first guard, or its first variable if the guards agree."""
    names = [g.text for g in batch.event.guards] + [f"new {c.role}.{c.name}" for c in batch.cells]
    mine, theirs = (np.hstack([o.guards, o.after]) for _, o in (first, second))
    for row in np.flatnonzero((mine != theirs).any(axis=1)):
        column = int(np.argmax(mine[row] != theirs[row]))
        values = tuple((f"{c.role}.{c.name}", decode(int(v), c.type)) for c, v in zip(batch.cells, batch.values[row], strict=True))
        yield Disagreement(batch.event.id, names[column], (first[0], int(mine[row, column])), (second[0], int(theirs[row, column])), values)
