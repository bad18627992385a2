"""What an engine implements to be tested: a few operations, and the events that they led to.

The suite plays the scheduler and the clients.  It says itself what clients do (``Arrive``, ``Abort``) and when
everything should be at rest (``Drain``); all other events are the engine's to report, in the order in which they
happened.  An operation that cannot be done now, for want of memory say, returns False (``begin``: None) and leaves
nothing behind.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec

from hybridkv_ref.events import Event, Header


class Pool(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Blocks of one group on the device: all but the null block, and those that nobody holds and nobody can find."""

    capacity: int
    free: int


class Engine(Protocol):
    """A cache manager under test.  Tokens are counted from 0; plain attributes will do for the first four."""

    @property
    def name(self) -> str:
        """Its name in reports."""

    @property
    def version(self) -> str:
        """Its version in reports."""

    @property
    def capabilities(self) -> Sequence[str]:
        """What it claims: names of ``events.toml`` and ``conformance.toml``."""

    @property
    def header(self) -> Header:
        """Groups, unit, limits and model, as in the first line of a trace; the suite fills in the rest."""

    def reset(self) -> None:
        """Forgets everything: an engine as it starts, with nothing cached."""

    def begin(self, req: str, tokens: Sequence[int], salt: str) -> int | None:
        """Looks up the prompt (token ids) and takes what it needs to compute; gives the position where computing
        starts."""

    def schedule(self, req: str, count: int, new: Sequence[int], drafts: int) -> bool:
        """Dispatches a step that computes the next ``count`` tokens.

        ``new`` are the ids of those that lie beyond the tokens known so far; the last ``drafts`` of them are drafts.
        """

    def complete(self, req: str, accepted: int) -> bool:
        """The oldest step of the request is done, also of one that is gone; so many of its drafts are accepted."""

    def finish(self, req: str) -> bool:
        """The request has its answer."""

    def abort(self, req: str) -> bool:
        """The client gave up, at any time: while a step or a load runs, or before the request has begun."""

    def evict(self, group: str, blocks: int) -> bool:
        """Memory of a group is wanted ("": of each): so many of its cached blocks are given up, or all that may be."""

    def drain(self) -> list[Event]:
        """The events since the last call."""

    def snapshot(self) -> Mapping[str, Pool]:
        """Its own counts by group; groups that it does not count are left out."""


class Recorder:
    """What most engines share: events are kept until they are drained; nothing is counted."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def drain(self) -> list[Event]:
        """See ``Engine``."""
        events, self.events = self.events, []
        return events

    def snapshot(self) -> Mapping[str, Pool]:
        """See ``Engine``."""
        return {}


class Preempting(Engine, Protocol):
    """An engine that claims ``preemption``."""

    def preempt(self, req: str) -> bool:
        """The request, no step of which runs, gives its memory back; ``begin`` takes it up again."""


class Transferring(Engine, Protocol):
    """An engine that claims ``transfers``."""

    def store(self) -> bool:
        """Begins to copy some cached block to a lower tier."""

    def load(self, req: str, tokens: Sequence[int], salt: str) -> bool:
        """Begins to bring back what a lower tier has of the prompt of a request that has yet to begin."""

    def transfer(self, ok: bool) -> bool:
        """The oldest transfer that runs arrives, or fails."""


class Operation(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, tag_field="op", tag=str.lower
):
    """Base of the operations as records: what a history is made of and what a separate process is sent."""


class Reset(Operation, frozen=True):
    """See ``Engine.reset``."""


class Begin(Operation, frozen=True):
    """See ``Engine.begin``."""

    req: str
    tokens: tuple[int, ...]
    salt: str = ""


class Load(Operation, frozen=True):
    """See ``Transferring.load``."""

    req: str
    tokens: tuple[int, ...]
    salt: str = ""


class Schedule(Operation, frozen=True):
    """See ``Engine.schedule``."""

    req: str
    count: int
    new: tuple[int, ...] = ()
    drafts: int = 0


class Complete(Operation, frozen=True):
    """See ``Engine.complete``."""

    req: str
    accepted: int = 0


class Finish(Operation, frozen=True):
    """See ``Engine.finish``."""

    req: str


class Abort(Operation, frozen=True):
    """See ``Engine.abort``."""

    req: str


class Preempt(Operation, frozen=True):
    """See ``Preempting.preempt``."""

    req: str


class Evict(Operation, frozen=True):
    """See ``Engine.evict``."""

    group: str
    blocks: int


class Store(Operation, frozen=True):
    """See ``Transferring.store``."""


class Transfer(Operation, frozen=True):
    """See ``Transferring.transfer``."""

    ok: bool = True


AnyOperation = Reset | Begin | Load | Schedule | Complete | Finish | Abort | Preempt | Evict | Store | Transfer
"""What a process may be sent, and a history may hold."""


def perform(engine: Engine, operation: AnyOperation) -> Any:
    """Calls the method that an operation names."""
    form = type(operation)
    values = [getattr(operation, field) for field in form.__struct_fields__]
    return getattr(engine, str(form.__struct_config__.tag))(*values)
