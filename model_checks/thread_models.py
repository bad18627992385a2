"""The file ``spec/interleavings.toml``: thread programs, the variants of them, and what each variant edits.

A step is a row of the tables or what an engine does between rows.  ``thread_programs`` compiles the programs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.spec_files import Record, RowSpec, Spec, read_toml

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
