"""Threads against each other: every interleaving of the programs in ``spec/interleavings.toml``, explored.

Theory of operation.  A thread runs a program whose steps are rows of the tables, fired by the machine, and what an engine
does between rows: a load into a local, a test, a touch of the bytes.  One step is one atomic action; the state is the
slot with its pools, and per thread a *frame* (program counter, locals, lease, request).  A step sees the slot and its own
frame only, so each distinct (slot, frame) pair is computed once and the search over all threads is a search over pairs of
numbers.  The search is breadth first: a counterexample is a shortest one.

What is checked owes nothing to the generations, guards and invariants of the tables.  The search counts the *bytes* of
the slot itself (they change when a row tagged as rewriting fires), notes which a thread matched, and demands: a touch
meets the bytes that were matched; no bytes change between the begin and the end of another thread's read; a row that a
program counts on is never refused; a thread that ends or starts over holds nothing; when all are at rest, so is the slot;
no thread is kept inside its program for ever by a fair schedule.  Variants edit a program or a row; those that must fail
have to fail in the way that they name.  In the plain model, and in the programs that a variant brings to show that it
holds, each step must be taken and each refusal seen: nothing holds because nothing happens.

Assumed: a row is atomic; memory is sequentially consistent; the constants have their small values; one slot.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import networkx as nx

from hybridkv_ref.compile_py import attribute, namer, python
from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, INT, Expr, Ref, Scope, Type, parse
from hybridkv_ref.loader import build
from hybridkv_ref.machine import Entity, Machine, Refused, Value
from hybridkv_ref.names import declare
from hybridkv_ref.spec_files import Record, RowSpec, Spec, read_spec, read_toml
from hybridkv_ref.tables import ROLES, Event, Tables

LABEL = "interleavings.toml"
BROKEN = {
    "stale_bytes": "a touch meets other bytes than those that were matched",
    "rewritten_under_read": "the bytes change while another thread reads them",
    "refused": "a row that the program counts on is refused",
    "not_at_rest": "a thread ends or starts over while it still holds something",
    "unsettled": "every thread is at rest and the slot is not",
    "livelock": "a fair schedule keeps the thread inside its program for ever",
    "unreached": "a step or a refusal that no interleaving shows",
}
"""What can go wrong in an interleaving, by the name that a variant gives in ``breaks``."""

Breaks = Literal["stale_bytes", "rewritten_under_read", "refused", "not_at_rest", "unsettled", "livelock", "unreached"]


class StepSpec(Record, frozen=True, rename={"else_": "else"}):
    """One atomic step: exactly one of ``row``, ``load`` (with ``value``), ``test`` and ``touch``."""

    row: str = ""
    inputs: dict[str, int | bool | str] = {}
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
    """The same threads with other programs, rows or kind.  ``breaks`` is how a variant that must fail fails."""

    doc: str
    rules: list[str]
    expect: Literal["holds", "fails"] = "fails"
    breaks: Breaks | None = None
    kind: str = ""
    steps: dict[str, list[StepSpec]] = {}
    tables: list[EditSpec] = []


class ModelSpec(Record, frozen=True):
    """The file."""

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


class TraceStep(NamedTuple):
    """One step of an interleaving; ``changed`` maps a variable to (before, after), ``note`` says why a row was refused."""

    thread: str
    step: str
    changed: Mapping[str, tuple[Value | None, Value | None]]
    note: str = ""


@dataclass(frozen=True)
class InterleaveResult:
    """What exploring one model showed.

    ``states`` were found until the search ended (all of them when it holds); ``broken`` is a key of BROKEN or empty;
    ``loop`` is the index in ``trace`` from which a livelock repeats.
    """

    name: str
    expected: str
    got: str
    states: int
    trace: tuple[TraceStep, ...] = ()
    broken: str = ""
    breaks: str = ""
    rules: tuple[str, ...] = ()
    doc: str = ""
    loop: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the model holds as expected, or fails in the very way that it names."""
        return self.got == self.expected and self.broken == self.breaks


def read_model(spec_dir: Path) -> ModelSpec:
    """The file as records; a one-line InputError names the first thing that is wrong with its shape."""
    try:
        model = msgspec.convert(read_toml(spec_dir / LABEL, LABEL), ModelSpec)
    except msgspec.ValidationError as error:
        reason, _, path = str(error).partition(" - at `$")
        raise InputError(f"{LABEL}: {path.rstrip('`').lstrip('.') or 'file'}: {reason}") from None
    for name, thread in model.threads.items():
        if thread.count < 1:
            raise InputError(f"{LABEL}: threads.{name}.count: {thread.count} threads are none")
    for name, variant in model.variants.items():
        if (variant.expect == "fails") != (variant.breaks is not None):
            raise InputError(f"{LABEL}: variants.{name}.breaks: goes with expect = \"fails\", and only with it")
        for thread_name in variant.steps:
            if thread_name not in model.threads:
                raise InputError(f"{LABEL}: variants.{name}.steps.{thread_name}: no such thread")
    return model


def edited(spec: Spec, edits: Sequence[EditSpec], place: str) -> Spec:
    """The spec with these edits of shared rows; an edit that changes nothing is an error."""
    files = dict(spec.files)
    for index, edit in enumerate(edits):
        where = f"{LABEL}: {place}[{index}]"
        label = next((n for n, f in files.items() if not f.kind and edit.row in f.rows), None)
        if label is None:
            raise InputError(f"{where}.row: no shared row '{edit.row}'")
        row = files[label].rows[edit.row]
        changed = _edit(row, edit, where)
        if changed == row:
            raise InputError(f"{where}: changes nothing")
        files[label] = msgspec.structs.replace(files[label], rows={**files[label].rows, edit.row: changed})
    return msgspec.structs.replace(spec, files=files)


def _edit(row: RowSpec, edit: EditSpec, where: str) -> RowSpec:
    when, then = list(row.when), list(row.then)
    for key, text, texts in (("drop_when", edit.drop_when, when), ("drop_then", edit.drop_then, then)):
        if text and text not in texts:
            raise InputError(f"{where}.{key}: row '{edit.row}' does not say '{text}'")
        if text:
            texts.remove(text)
    then += [edit.add_then] if edit.add_then else []
    source, segment = edit.from_ or row.from_, edit.segment_from or row.segment_from
    return msgspec.structs.replace(row, when=when, then=then, from_=source, segment_from=segment)


# ---- programs --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Step:
    text: str
    then: int
    otherwise: int | None
    event: Event | None
    spec: StepSpec
    local: int = -1
    value: Callable[..., Any] | None = None


@dataclass(frozen=True)
class _Program:
    """Compiled steps; ``len(steps)`` is the counter of a thread that has ended."""

    name: str
    steps: tuple[_Step, ...]
    locals: tuple[str, ...]

    @property
    def loops(self) -> bool:
        """Whether a jump leads back inside: only then can a thread stay in for ever, since no step waits."""
        targets = ((i, t) for i, s in enumerate(self.steps) for t in (s.then, s.otherwise) if t is not None)
        return any(0 < target <= index for index, target in targets)


class _Shared(NamedTuple):
    bytes: int
    pool: tuple[Value, ...]
    segment: tuple[Value, ...]


class _Frame(NamedTuple):
    pc: int
    matched: int | None
    reading: bool
    locals: tuple[Value, ...]
    lease: tuple[Value, ...]
    request: tuple[Value, ...]


class _Move(NamedTuple):
    shared: int
    frame: int
    rewrites: bool
    broken: str
    trace: TraceStep


class _Numbers[T]:
    """Values numbered in order of arrival."""


