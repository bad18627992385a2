"""An engine and an oracle in lock step: one history of operations, each followed by what the oracle says of it."""

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from hybridkv_ref.conformance.capabilities import load_suite
from hybridkv_ref.conformance.engine import (
    Abort,
    AnyOperation,
    Begin,
    Complete,
    Engine,
    Finish,
    Load,
    Preempt,
    Schedule,
    Store,
    Transfer,
    perform,
)
from hybridkv_ref.conformance.process import EngineError
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Abort as Gone
from hybridkv_ref.events import Arrive, Drain, Event, Header, Measure
from hybridkv_ref.events import Engine as Writer
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_records import Refusal
from hybridkv_ref.oracle_state import group_specs
from hybridkv_ref.oracle_tables import oracle_hash

ENOUGH = 1000
"""Operations by which everything has come to rest, or never will."""


@dataclass
class Client:
    """A request as the suite knows it: tokens known, computed up to ``done``, dispatched up to ``sent``.

    ``steps`` in flight are (end, drafts); ``stage`` is waiting (a load may run for it), running, preempted or gone.
    """

    tokens: list[int]
    salt: str
    stage: str = "waiting"
    sent: int = 0
    done: int = 0
    steps: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Refused:
    """A refusal, and how many operations and events had happened by then."""

    refusal: Refusal
    operations: int
    events: int


def full_header(engine: Engine) -> Header:
    """The engine's header with its name, its claims and the hash of the tables."""
    judged = load_suite().judged
    return msgspec.structs.replace(
        engine.header,
        engine=Writer(engine.name, engine.version),
        table_sha256=oracle_hash(),
        capabilities=tuple(c for c in engine.capabilities if c in judged),
    )


class Lockstep:
    """One history, up to the first refusal.

    What follows from a refusal is not judged; only where all its rules are ``ignored``, known gaps, the history goes
    on.  An operation that makes no sense now is passed over, so that any part of a history is one too.
    """

    def __init__(self, engine: Engine, header: Header, ignored: Collection[str] = ()) -> None:
        self.engine, self.header = engine, header
        self.oracle = Oracle(header)
        specs = group_specs(header)
        units = [g.block for g in specs if g.reuse] or [1]
        self.unit = header.unit or math.gcd(*units)
        self.chunk = header.alignment or math.lcm(*units)
        self.groups = {g.name for g in specs}
        self.clients: dict[str, Client] = {}
        self.history: list[AnyOperation] = []
        self.events: list[Event] = []
        self.refused: list[Refused] = []
        self.ignored = ignored
        self.broken = ""
        self.stopped = False
        self.fresh = 0
        self.transfers = 0
        self.counts: dict[str, tuple[int, int]] = {}
        try:
            engine.reset()
            engine.drain()
        except Exception as error:
            # An engine under test may raise anything; the report says what.
            self.broken = _said("reset", error)

    def over(self) -> bool:
        """Nothing more is judged."""
        return bool(self.broken or self.stopped)

    # -- operations ----------------------------------------------------------------------------------------------------

    def do(self, operation: AnyOperation) -> bool:
        """Performs an operation and feeds what it led to; False where it makes no sense or the engine cannot."""
        if self.over() or not self.sensible(operation):
            return False
        self.history.append(operation)
        self.before(operation)
        name = str(type(operation).__struct_config__.tag)
        try:
            result = perform(self.engine, operation)
            events = self.engine.drain()
        except Exception as error:
            # An engine under test may raise anything; the report says what.
            self.broken = _said(name, error)
            return False
        self.feed(events)
        if self.over():
            return False
        done = result is not None and result is not False
        if done:
            self.after(operation, result)
        self.count()
        return done

    def sensible(self, operation: AnyOperation) -> bool:
        """Whether a scheduler would ask for this now."""
        client = self.clients.get(getattr(operation, "req", ""))
        match operation:
            case Begin():
                return client is None or client.stage in ("waiting", "preempted")
            case Load():
                return client is None
            case Schedule(count=count, new=new, drafts=drafts):
                if client is None or client.stage != "running" or (client.steps and client.steps[-1][1]):
                    return False
                end, known = client.sent + count, len(client.tokens)
                fits = end == known + len(new) if new else end <= known
                return count > 0 and fits and drafts < max(len(new), 1)
            case Complete(accepted=accepted):
                return client is not None and bool(client.steps) and accepted <= client.steps[0][1]
            case Finish() | Preempt():
                return client is not None and client.stage == "running" and not client.steps
            case Abort():
                return client is not None and client.stage != "gone"
        return True

    def before(self, operation: AnyOperation) -> None:
        """What the client did, and what it leads to whatever the engine says."""
        match operation:
            case (Begin() | Load()) as first if first.req not in self.clients:
                self.clients[first.req] = Client(list(first.tokens), first.salt)
                ids = [first.tokens[at] for at in range(0, len(first.tokens) // self.unit * self.unit, self.unit)]
                domain = {"salt": first.salt} if first.salt else {}
                self.feed([Arrive(first.req, len(first.tokens), ids=ids, domain=domain)])
            case Abort(req=req):
                self.clients[req].stage = "gone"
                self.feed([Gone(req)])

    def after(self, operation: AnyOperation, result: object) -> None:
        """The client's books after an operation that was done."""
        client = self.clients[req] if (req := getattr(operation, "req", "")) else Client([], "")
        match operation:
            case Begin(tokens=tokens):
                client.tokens, client.stage = list(tokens), "running"
                client.sent = client.done = int(result) if isinstance(result, int) else 0
            case Schedule(count=count, new=new, drafts=drafts):
                client.tokens += new
                client.sent += count
                client.steps.append((client.sent, drafts))
            case Complete(accepted=accepted):
                end, drafts = client.steps.pop(0)
                if drafts > accepted and client.stage == "running":
                    end -= drafts - accepted
                    del client.tokens[end:]
                    client.sent = end
                client.done = end
            case Finish():
                client.stage = "gone"
            case Preempt():
                client.stage, client.sent, client.done = "preempted", 0, 0
            case Store() | Load():
                self.transfers += 1

    # -- judging -------------------------------------------------------------------------------------------------------

    def feed(self, events: Iterable[Event]) -> None:
        """Feeds events to the oracle and keeps what it refuses."""
        for event in events:
            self.events.append(event)
            try:
                verdict = self.oracle.feed(event)
            except InputError as error:
                self.broken = str(error)
                return
            for refusal in verdict.refusals:
                self.refused.append(Refused(refusal, len(self.history), len(self.events)))
                self.stopped = self.stopped or not set(refusal.rules) <= set(self.ignored)
            if self.stopped:
                return

    def count(self) -> None:
        """The engine's own counts, against what its events said: nothing is used that no event took."""
        try:
            pools = self.engine.snapshot()
        except Exception as error:
            # An engine under test may raise anything; the report says what.
            self.broken = _said("snapshot", error)
            return
        state = self.oracle.state
        for name in pools.keys() & self.groups:
            group, pool = state.by_name[name], pools[name]
            held = state.device.blocks[group.index]
            if held.lost:
                continue
            used = sum(b.segment.mem for b in held.values())
            if self.counts.get(name) != (pool.free, used):
                self.counts[name] = (pool.free, used)
                self.feed([Measure("pool", name, free=pool.free, used=used, capacity=pool.capacity)])

    # -- longer operations ---------------------------------------------------------------------------------------------

    def new_tokens(self, count: int) -> tuple[int, ...]:
        """Token ids that no prompt has, each once."""
        self.fresh += count
        return tuple(range(-self.fresh, -self.fresh + count))

    def compute(self, req: str, chunk: int) -> bool:
        """Computes the rest of what is known of a request, a chunk at a time; False if it cannot."""
        client = self.clients.get(req, Client([], ""))
        while client.stage == "running" and client.sent < len(client.tokens):
            count = min(chunk, len(client.tokens) - client.sent)
            if not (self.do(Schedule(req, count)) and self.do(Complete(req))):
                return False
        return client.stage == "running"

    def decode(self, req: str, drafts: int, accepted: int) -> bool:
        """One token more, and drafts, so many of which are accepted."""
        step = Schedule(req, 1 + drafts, self.new_tokens(1 + drafts), drafts)
        return self.do(step) and self.do(Complete(req, accepted))

    def again(self, req: str) -> bool:
        """A running request gives its memory back and takes it up again."""
        client = self.clients.get(req, Client([], ""))
        return self.do(Preempt(req)) and self.do(Begin(req, tuple(client.tokens), client.salt))

    def serve(self, tokens: Sequence[int], salt: str = "", drafts: Sequence[tuple[int, int]] = ()) -> str:
        """A request from its arrival to its end; ``drafts`` are (computed, accepted) in its steps after the prompt."""
        req = self.name()
        prefilled = self.do(Begin(req, tuple(tokens), salt)) and self.compute(req, 2 * self.chunk)
        if prefilled and all(self.decode(req, *step) for step in drafts):
            self.do(Finish(req))
        return req

    def repeat(self, operation: AnyOperation) -> int:
        """The operation for as long as it can be done; how often that was. An engine that always says yes is left."""
        for count in range(ENOUGH):
            if not self.do(operation):
                return count
        return ENOUGH

    def name(self) -> str:
        """A name that no request had."""
        return f"r{len(self.clients)}"

    def rest(self) -> None:
        """Ends everything: requests that are not gone, steps and transfers that run; then all should be at rest."""
        for req, client in list(self.clients.items()):
            if client.stage != "gone":
                self.do(Abort(req))
            while client.steps and self.do(Complete(req)):
                pass
        if self.transfers:
            self.repeat(Transfer())
        if not self.over():
            self.feed([Drain()])


def replay(engine: Engine, header: Header, history: Iterable[AnyOperation], ignored: Collection[str] = ()) -> Lockstep:
    """A history once more, on an engine that is reset first."""
    made = Lockstep(engine, header, ignored)
    for operation in history:
        made.do(operation)
    made.rest()
    return made


def _said(operation: str, error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"{operation} raised {type(error).__name__}: {error}"
