"""Do the back ends mean the same?  Random states x events, evaluated by every one of them, compared value by value.

A table is written once and read by four generators: Python source (what runs), Z3 terms (what is proved), array
functions (what is searched) and Promela (what Spin runs).  Each is given the same samples and says which guard
conjuncts hold and what every variable is after the event; a refused event changes nothing.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import z3

from hybridkv_ref.compile_py import attribute, namer, python, role_name
from hybridkv_ref.expr import Ref
from hybridkv_ref.machine import Machine
from hybridkv_ref.model_checks.frames import Assumptions, owner_name
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.model_text import late
from hybridkv_ref.model_checks.promela import PROMELA
from hybridkv_ref.model_checks.random_states import Batch, Ints, mentions, samples
from hybridkv_ref.model_checks.smt import literal
from hybridkv_ref.model_checks.spin import build, run_verifier
from hybridkv_ref.model_checks.vector import code, decode, vector_function
from hybridkv_ref.tables import CLASS_OF, Event, Tables


@dataclass(frozen=True)
class Outcome:
    """What an evaluator says: guards[i, k] is 1 if conjunct k holds in sample i, after[i, j] is cell j afterwards."""

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
    """Two back ends differ about ``what``, a guard's text or a variable, in the state ``values`` (before the event)."""

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


class PythonRows:
    """The machine: its compiled events, run on entities; and each conjunct's own source."""

    name = "python"

    def __init__(self, tables: Tables) -> None:
        self.tables = tables

    def evaluate(self, batches: Sequence[Batch]) -> Iterator[Outcome]:
        """The conjunct that the machine refuses with must be the first false one, or both are turned round."""
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
            places = enumerate(zip(batch.cells, owners, strict=True))
            slots = [(j, owner, attribute(c.name), c.type) for j, (c, owner) in places if owner is not None]
            given = [(j, c.type) for j, c in enumerate(batch.cells) if c.role == "input"]
            guards = np.zeros((len(batch.values), len(event.guards)), np.int64)
            after = batch.values.copy()
            for row, values in enumerate(batch.values.tolist()):
                for j, owner, attr, kind in slots:
                    setattr(owner, attr, decode(values[j], kind))
                inputs = [decode(values[j], t) for j, t in given]
                guards[row] = [bool(v) for v in conjuncts(pool, *entities.values(), *inputs)]
                refused, expected = (
                    machine.events[event.id].call(pool, *entities.values(), *inputs),
                    _first_false(guards[row]),
                )
                for wrong in (refused, expected) if refused != expected else ():
                    guards[row, wrong] = 1 - guards[row, wrong] if wrong >= 0 else guards[row, wrong]
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
            owned = [(j, c, owner_name(c, task.acting)) for j, c in enumerate(batch.cells)]
            written = [j for j, c, owner in owned if (owner, c.name) in task.after]
            terms = [*guards, *(task.post(batch.cells[j], task.acting, False) for j in written)]
            row = z3.Function("row", *(t.sort() for t in terms), z3.BoolSort())(*terms)
            read = mentions(event)
            symbols = [(j, c.type, self.base.words.cell(owner, c)) for j, c, owner in owned if c in read]
            seen = {(kind, v) for j, kind, _ in symbols for v in batch.values[:, j].tolist()}
            numbers = {(kind, v): literal(decode(v, kind), kind) for kind, v in seen}
            found = np.zeros((len(batch.values), len(terms)), np.int64)
            for i, values in enumerate(batch.values.tolist()):
                pairs = [(symbol, numbers[kind, values[j]]) for j, kind, symbol in symbols]
                found[i] = [_number(child) for child in z3.simplify(z3.substitute(row, *pairs)).children()]
            verdicts, after = found[:, : len(guards)], batch.values.copy()
            fires = np.flatnonzero(verdicts.all(axis=1))
            after[np.ix_(fires, np.array(written, np.int64))] = found[fires, len(guards) :]
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
    """The text that ``PROMELA`` writes for an event, compiled and run by Spin on samples from a file."""

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
        """A model that takes one step per sample of the file ``samples`` and writes ``results``."""
        saved = sorted({local for event, _ in events for local in late(event.effects).values()})
        # The line number keeps the states of two equal samples apart: Spin would not go on from a state that it knows.
        read = f"now.more = fread(&now.which, 4, 1, in) == 1 && fread(now.cell, 4, {width}, in) == {width}; now.line++;"
        write = f"fwrite(now.holds, 4, {most}, out); fwrite(now.cell, 4, {width}, out);"
        opened = 'in = fopen("samples", "rb"); out = fopen("results", "wb");'
        lines = ["c_decl { FILE *in, *out; }", f"int line, which, more, cell[{width}], holds[{most}];"]
        lines += [f"hidden int {local};" for local in saved]
        lines += ["active proctype driver() {", f"  c_code {{ {opened} {read} }};", "  do"]
        for number, (event, at) in enumerate(events):
            name = {ref: f"cell[{j}]" for j, ref in enumerate(at)}.__getitem__
            holds = "".join(f"holds[{k}] = {PROMELA.expression(g.expr, name)}; " for k, g in enumerate(event.guards))
            then = "; ".join([*PROMELA.assignments(event.effects, name), "skip"])
            step = f"{holds}if :: {PROMELA.condition(event.guards, name)} -> {then} :: else fi"
            lines.append(f"  :: d_step {{ more && which == {number} -> {step}; c_code {{ {write} {read} }} }}")
        return "\n".join([*lines, "  :: !more -> break", "  od;", "  c_code { fclose(out); }", "}", ""])


def agree(tables: Tables, count: int, seed: int, evaluators: Sequence[Evaluator]) -> Agreement:
    """Compares the first evaluator with each other one, over at least ``count`` samples."""
    batches = list(samples(tables, count, seed))
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
        pairs = zip(batch.cells, batch.values[row].tolist(), strict=True)
        values = tuple((f"{c.role}.{c.name}", decode(v, c.type)) for c, v in pairs)
        sides = [(name, int(found[row, column])) for name, found in ((first[0], mine), (second[0], theirs))]
        yield Disagreement(batch.event.id, names[column], sides[0], sides[1], values)
