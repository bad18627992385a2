"""The oracle: a lock-step shadow of an engine's cache that judges each event by rows of the tables.

``feed`` takes one event at a time and gives a verdict. Two references are kept together: *contents*, which blocks
each group could use, and *physical identity*, which prefix each slot was last written with. What the oracle was not
told it does not judge; what it refuses it names by rule, event, segment, guard and values.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

from hybridkv_ref.errors import InputError
from hybridkv_ref.events import (
    Abort,
    Accept,
    Admit,
    Agree,
    Allocate,
    Arrive,
    Capture,
    Complete,
    Decide,
    DeferFree,
    Dispatch,
    Draft,
    Drain,
    Epoch,
    Event,
    Evict,
    Finish,
    Free,
    Header,
    Io,
    KeyPublish,
    KeyRemove,
    Lookup,
    Measure,
    Pin,
    Position,
    Preempt,
    Register,
    Reject,
    Replay,
    Reset,
    Run,
    TableWrite,
    TransferBegin,
    TransferCancel,
    TransferEnd,
    TransferFail,
    TransferPart,
    Unpin,
    Vote,
    Wait,
    tag,
)
from hybridkv_ref.oracle_blocks import Blocks
from hybridkv_ref.oracle_claims import Claims
from hybridkv_ref.oracle_coverage import Coverage, coverage
from hybridkv_ref.oracle_hits import Hits
from hybridkv_ref.oracle_index import Index
from hybridkv_ref.oracle_pins import Pins
from hybridkv_ref.oracle_ranks import Ranks
from hybridkv_ref.oracle_records import Refusal
from hybridkv_ref.oracle_requests import Requests
from hybridkv_ref.oracle_state import State
from hybridkv_ref.oracle_steps import Steps
from hybridkv_ref.oracle_tiers import Found
from hybridkv_ref.oracle_transfers import Transfers
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import Hit


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one event led to: nothing to say, or rows that the tables refuse."""

    refusals: tuple[Refusal, ...] = ()

    @property
    def ok(self) -> bool:
        """Nothing was refused."""
        return not self.refusals

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules of the refused rows, each once."""
        return tuple(dict.fromkeys(rule for r in self.refusals for rule in r.rules))


FINE = Verdict()
"""The verdict that there is nothing to say."""

SHOWN = ("stage", "start", "end", "pins", "writers", "steps", "holds", "keys", "generation")
"""What a snapshot tells of a block."""


class Illegal(Exception):
    """A strict oracle met a refusal, which is ``refusal``."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        super().__init__(f"{refusal} ({', '.join(refusal.rules)})")


def _one_by_one(state: State, reduce: Callable[[Any], None], events: Iterable[Any]) -> None:
    for event in events:
        state.index += 1
        reduce(event)


def _reset(blocks: Blocks, index: Index, claims: Claims, event: Reset) -> None:
    # Not of the oracle, which would then refer to itself and not die with its last use.
    if blocks.state.header.null in event.blocks:
        claims.dirty_null = False
    index.clear(blocks.state.named(event.group), event.blocks)
    blocks.reset(event)


class Oracle:
    """An oracle for the engine that a header describes.

    ``strict`` raises Illegal at the first refusal; ``advisory`` goes on, without judging what the refused event was
    about. InputError for a header that the tables cannot be built for, and for events that name no group of it.
    """

    def __init__(self, header: Header, mode: Literal["strict", "advisory"] = "advisory", spec: Path = SPEC_DIR) -> None:
        self.header, self.mode = header, mode
        state = self.state = State(header, spec)
        found = Found(state.device)
        self.ranks = Ranks(state)
        self.hits = Hits(state, self.ranks, found)
        self.pins = Pins(state, self.hits)
        self.requests = Requests(state, self.hits, self.ranks)
        self.blocks = Blocks(state, self.hits, self.pins, self.requests)
        self.index = Index(state, self.blocks, found)
        self.transfers = Transfers(state, self.blocks, self.index)
        self.steps = Steps(state, self.hits, self.blocks)
        self.claims = Claims(state, self.steps)
        self.blocks.running = (self.steps.steps, self.transfers.running)
        b, i, p, q, r = self.blocks, self.index, self.pins, self.requests, self.ranks
        s, t, c = self.steps, self.transfers, self.claims
        each: dict[Any, Callable[[Any], None]] = {
            Arrive: q.arrive, Admit: c.admit, Lookup: self.hits.lookup, Preempt: q.preempt, Abort: q.abort,
            Finish: q.finish, DeferFree: b.defer, Evict: b.evict, Reset: partial(_reset, b, i, c),
            TableWrite: c.table_write, Dispatch: s.dispatch, Complete: s.complete, Draft: s.draft, Accept: s.accept,
            Reject: s.reject,
            Position: c.position, Measure: i.measure, TransferBegin: t.begin, TransferPart: t.part,
            TransferEnd: t.end, TransferFail: t.fail, TransferCancel: t.cancel, Io: t.io, Vote: r.vote,
            Agree: r.agree, Decide: c.decide, Wait: c.wait, Run: c.run, Capture: c.capture, Replay: c.replay,
            Epoch: c.epoch, Register: c.register, Drain: c.drain,
        }  # fmt: skip
        # What engines say block by block, thousands of times in a row, is taken in runs: a call costs as much as a row.
        runs: dict[Any, Callable[[Iterable[Any]], None]] = {
            Allocate: b.allocate, Free: b.free, Pin: p.pin, Unpin: p.unpin, KeyPublish: i.publish, KeyRemove: i.remove,
        }  # fmt: skip
        runs |= {form: partial(_one_by_one, state, reduce) for form, reduce in each.items()}
        self._reduce = {form: (str(form.__struct_config__.tag), reduce) for form, reduce in runs.items()}

    @property
    def seen(self) -> int:
        """How many events were fed; of one that cannot be fed, its number."""
        return self.state.index

    def feed(self, event: Event) -> Verdict:
        """Judges one event and follows it."""
        state = self.state
        state.event, reduce = self._reduce[type(event)]
        try:
            reduce((event,))
        except InputError as error:
            raise InputError(f"event {self.seen} ({tag(event)}): {error}") from None
        if not state.refusals:
            return FINE
        verdict = Verdict(tuple(state.refusals))
        state.refusals.clear()
        if self.mode == "strict":
            raise Illegal(verdict.refusals[0])
        return verdict

    def feed_all(self, events: Iterable[Event]) -> tuple[Refusal, ...]:
        """Feeds events one after the other; gives what was refused."""
        return tuple(self.judge(events))

    def judge(self, events: Iterable[Event]) -> Iterator[Refusal]:
        """As ``feed`` for one event after the other, faster: the refusals of each, and then InputError if there is one.

        Nothing is judged that is not asked for; a refusal's ``index`` says of which event it is.
        """
        state = self.state
        for form, run in groupby(events, type):
            if self.mode == "strict":
                for event in run:
                    self.feed(event)
                continue
            state.event, reduce = self._reduce[form]
            fault = ""
            try:
                reduce(run)
            except InputError as error:
                fault = f"event {state.index} ({state.event}): {error}"
            if state.refusals:
                refusals, state.refusals = state.refusals, []
                yield from (r for r in refusals if not fault or r.index < state.index)
            if fault:
                raise InputError(fault)

    def expected_hit(self, request: str) -> Hit:
        """The longest hit of a request that arrived, from what was published and not removed; KeyError for another."""
        return self.hits.expected(self.state.requests[request])

    def coverage(self) -> Coverage:
        """Per rule, what the events so far showed."""
        return coverage(self.state)

    def snapshot(self) -> dict[str, Any]:
        """What is alive: requests by name, and per tier and group the blocks, as plain data."""
        state = self.state
        requests = {
            r.name: {"stage": r.record.stage, "at": r.at, "life": r.life, "lost": r.lost}
            for r in state.requests.values()
        }
        tiers: dict[str, dict[str, dict[int, dict[str, Any]]]] = {}
        for tier in state.tiers.values():
            tiers[tier.name] = {
                g.spec.name: {
                    b.number: {name: getattr(b.segment, name) for name in SHOWN} for b in tier.blocks[g.index].values()
                }
                for g in state.groups
            }
        return {"events": self.seen, "requests": requests, "tiers": tiers}

    def explain(self, refusal: Refusal) -> str:
        """A refusal in words: the event, the row with its meaning, the false guard, the values, the rules."""
        from hybridkv_ref.rules import load_rules

        row = self.state.tables.event(refusal.row)
        rules = load_rules(self.state.spec)
        lines = [str(refusal), f"  row {refusal.row}: {row.doc}", f"  in {row.file}"]
        lines += [f"  {rule}: {rules[rule].statement}" for rule in refusal.rules if rule in rules]
        return "\n".join(lines)
