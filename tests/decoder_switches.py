"""Switching one rule off: what a witness is, and the runs that all of them share.

With the rule every logit equals that of a run from scratch.  Without it the same history gives other logits, or a
kernel refuses its arguments: nothing here asks the validator whether it was right.  Memory that nobody wrote holds
zeros, the kindest contents, so that no difference is owed to poison.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import msgspec
import torch
from decoder_histories import (
    Request,
    Truth,
    difference,
    planner,
    sequence,
    serve,
    truth,
    wrong,
)
from helpers import copy_spec

from hybridkv_ref import decoder, decoder_state, decoder_store
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_geometry import Sizes, Stored
from hybridkv_ref.decoder_reuse import Planner, Want
from hybridkv_ref.decoder_session import Session
from hybridkv_ref.decoder_store import MemoryStore
from hybridkv_ref.recovery import from_model

LENGTH = 44
BASE = Sizes()
RING = msgspec.structs.replace(BASE, ring_windows=True)
TEXT = sequence(BASE, 1, LENGTH)


@dataclass(frozen=True)
class Outcome:
    """``difference``: largest, from scratch, among logits that are claimed exact.  ``hit``: tokens that were reused."""

    difference: float
    hit: int
    refused: str = ""

    @property
    def harmless(self) -> bool:
        """Nothing went wrong."""
        return self.difference == 0.0 and not self.refused


Run = Callable[[bool], Outcome]


@dataclass(frozen=True)
class Witness:
    """A rule, by its IDs; the history in words; ``run(True)`` with the rule, ``run(False)`` without it."""

    rule: str
    ids: tuple[str, ...]
    history: str
    run: Run


class Witnesses(list[Witness]):
    """The witnesses of one module."""

    def of(self, rule: str, ids: str, history: str) -> Callable[[Run], Run]:
        """Enters a run under a rule; IDs without their first part."""

        def enter(run: Run) -> Run:
            self.append(Witness(rule, tuple(f"HKV-{one}" for one in ids.split()), history, run))
            return run

        return enter


# ---- Running ---------------------------------------------------------------------------------------------------------

Change = Callable[[MemoryStore, Session], None]


@contextmanager
def zeros() -> Iterator[None]:
    """Memory that nobody wrote holds zeros."""
    with mock.patch.object(decoder_state, "POISON", 0), mock.patch.object(decoder_store, "POISON", 0):
        yield


def resume(
    plan: Planner, r: int, end: int = LENGTH, *, reader: Planner | None = None, want: Want | None = None,
    store_type: type[MemoryStore] = MemoryStore, writer_type: type[Session] = Session,
    first: Request | None = None, stored: Callable[[MemoryStore], None] | None = None, resumed: Change | None = None,
    chunks: tuple[int, ...] = (5,), padding: int = 0, text: tuple[int, ...] = TEXT, other: tuple[int, ...] = TEXT,
) -> Outcome:  # fmt: skip
    """One request over ``other[:r]``, then one over ``text[:end]``; the outcome of the second.

    ``stored`` acts on the store between the two, ``resumed`` on the second after its hit and before it computes.
    """
    with zeros():
        store = store_type(plan.decoder, 500)
        first = first or Request(0, r, (7,))
        serve(writer_type(plan, store, other[: first.prompt], first.want), first, truth(plan, other))
        if stored is not None:
            stored(store)
        return outcome(reader or plan, store, end, want, resumed, chunks, padding, text)


def outcome(
    plan: Planner, store: MemoryStore, end: int, want: Want | None = None, resumed: Change | None = None,
    chunks: tuple[int, ...] = (5,), padding: int = 0, text: tuple[int, ...] = TEXT,
) -> Outcome:  # fmt: skip
    """A request over ``text[:end]`` that reuses what it finds."""
    request = Request(0, end, chunks, want=want or Want(alignment=1), padding=padding)
    session = Session(plan, store, text[:end], request.want)
    if resumed is not None:
        resumed(store, session)
    known: Truth = truth(plan, text)
    return Outcome(difference(session, serve(session, request, known), known), session.hit.r)


@cache
def without(kind: str, key: str, text: str, sizes: Sizes = BASE) -> Planner:
    """A planner whose recovery.toml has another line: the rule stands in the table, and so does its absence."""
    with TemporaryDirectory() as folder:
        spec = copy_spec(Path(folder))
        path = spec / "recovery.toml"
        before, entry, after = path.read_text().partition(f"[need.{kind}]\n")
        lines = after.split("\n")
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{key} = "))
        lines[at] = f'{key} = "{text}"'
        path.write_text(before + entry + "\n".join(lines))
        decoder = Decoder(sizes)
        return Planner(decoder, from_model(decoder.model, spec))


def table_rule(
    kind: str, key: str, text: str, r: int, on: bool, want: Want | None = None, end: int = LENGTH
) -> Outcome:
    """A resume at r, with the table as it stands or with one entry changed."""
    return resume(planner(BASE), r, end, reader=planner(BASE) if on else without(kind, key, text), want=want)


def patched(on: bool, target: Any, name: str, value: Any, run: Callable[[], Outcome]) -> Outcome:
    """``run`` as it is, or with one function of the decoder replaced."""
    if on:
        return run()
    with mock.patch.object(target, name, value):
        return run()


@contextmanager
def ring_sizes(size: Callable[[Stored], int | None]) -> Iterator[None]:
    """Requests that begin here have rings of ``size(object)`` rows; None: of those that they should have."""

    class Sized(decoder_state.PrivateState):
        """Rings of other sizes."""

        def _place(self, item: Stored) -> decoder_state.Rows:
            rows = super()._place(item)
            rows_kept = size(item) if rows.ring else None
            return rows if rows_kept is None else replace(rows, ring=rows_kept)

    with mock.patch.object(decoder, "PrivateState", Sized):
        yield


def reject(plan: Planner, text: tuple[int, ...], start: int, drafts: int) -> tuple[float, float]:
    """All of ``drafts`` tokens are rejected at ``start``; every committed step is of one token.

    The largest difference from scratch of any logit before the rejection, and after it.
    """
    session, known = Session(plan, MemoryStore(plan.decoder, 0), text), truth(plan, text).logits
    made = []
    for at, token in enumerate(text):
        if at == start:
            session.compute([wrong(draft, plan.decoder.sizes.vocab) for draft in text[start : start + drafts]])
            session.commit(0)
        made.append(session.compute([token]))
        session.commit(1)
    apart = torch.nan_to_num((torch.cat(made) - known).abs(), nan=torch.inf)
    return apart[:start].max().item(), apart[start:].max().item()


def overwrite(session: Session, shape: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the arenas of one shape of objects in a request's state, block by block."""
    for item in session.planner.decoder.stored:
        if item.shape == shape:
            rows = session.state.rows(item.layer, item.group)
            rows.arena[:] = change(rows.arena)
