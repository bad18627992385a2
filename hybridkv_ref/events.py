"""What an engine tells the oracle: a small vocabulary of events, as typed records of a JSON Lines trace.

A trace is a header and events, one JSON object a line::

    {"schema": "hybridkv.events/1", "engine": {"name": "mine"}, "level": "L2", "unit": 16,
     "groups": [{"name": "full", "kind": "compressed_kv", "block": 16}]}
    {"event": "arrive", "req": "a", "length": 40, "ids": [1, 2]}
    {"event": "lookup", "req": "a", "used": 0, "matched": 0}
    {"event": "allocate", "req": "a", "group": "full", "blocks": [4, 5, 6], "at": 0}

The records say what was *issued* and what was *completed* in separate events. Index spaces are typed: ``blocks`` are
group blocks (one block of one cache group), ``slots`` places of one token or entry, positions and lengths are tokens
counted from 0, ranges are half open. The null block is ``Header.null``; it stands wherever a group has no block.
``events.toml`` says what each event means and which rows it stands for; this module says only its shape.
"""

from typing import Literal

import msgspec

SCHEMA = "hybridkv.events/1"

Level = Literal["L0", "L1", "L2", "L3"]
Tier = str
"""``device``, or a name of the engine's own for what lies below it: host, disk, object, peer:3."""

DEVICE = "device"
Space = Literal["group", "kernel", "slot", "token", "entry"]


class _Fixed(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, frozen=True):
    pass


class _Record(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    pass


class Engine(_Fixed, frozen=True):
    """Who wrote the trace."""

    name: str = ""
    version: str = ""


class GroupSpec(_Fixed, frozen=True):
    """A cache group: layers that share block table and storage layout.

    ``block`` is the number of tokens of one block, ``ahead`` the successor tokens that its keys need, ``reuse``
    whether it takes part in prefix hits, ``kernel_blocks`` how many blocks of the kernels one block is, ``capacity``
    the number of device blocks, the null block included (0: not told). Groups of one ``pool`` share its block numbers:
    a number is in one of them at a time ("": the group has numbers of its own).
    """

    name: str
    kind: str
    block: int
    ratio: int = 1
    halo: int = 0
    window: int = 0
    ahead: int = 0
    reuse: bool = True
    kernel_blocks: int = 1
    capacity: int = 0
    layout: str = ""
    pool: str = ""


class Limits(_Fixed, frozen=True):
    """What the engine was told to keep; 0 means not told. ``tiers`` are blocks per tier, for each group."""

    pipeline: int = 0
    preempts: int = 0
    in_flight: int = 0
    tiers: dict[str, int] = {}


class Header(_Fixed, frozen=True, omit_defaults=False):
    """The first line.

    ``unit``: tokens that one of a request's ``ids`` stands for. ``alignment``: the unit of hits (0: the least common
    multiple of the groups' blocks). ``capabilities``: what the engine claims; see ``events.toml``. ``level``: what the
    events can see: L0 cache events, L1 calls of the cache manager, L2 steps and block tables, L3 bytes too.
    """

    schema: Literal["hybridkv.events/1"]
    engine: Engine = Engine()
    table_sha256: str | None = None
    model: str | None = None
    level: Level = "L2"
    unit: int = 0
    alignment: int = 0
    null: int = 0
    groups: tuple[GroupSpec, ...] = ()
    limits: Limits = Limits()
    capabilities: tuple[str, ...] = ()
    title: str = ""


def _snake(name: str) -> str:
    return "".join(f"_{c.lower()}" if c.isupper() else c for c in name).lstrip("_")


class EventRecord(_Record, tag_field="event", tag=_snake, kw_only=True):
    """Base of all events; ``instance`` tells the engines of one trace apart."""

    instance: str = ""


# ---- requests ------------------------------------------------------------------------------------------------------


class Arrive(EventRecord):
    """A request, or a new life of one. ``ids`` stand for ``unit`` tokens each: equal ids, equal tokens.

    ``domain`` names every other input that changes the values: adapter, salt, media.
    """

    req: str
    length: int
    ids: list[int] = []
    domain: dict[str, str] = {}
    grade: Literal["exact", "bounded"] = "exact"
    kernel: bool = True


class Admit(EventRecord):
    """The gate of admission or of staging: ``need`` of what there is, what was granted (``got``), or refused.

    ``sized``: what start-up sizing charges for it; ``usable``: all there is, the null block not counted; ``room``: free
    and evictable now; ``empty``: nothing else holds any of it. ``group`` and ``tier`` are for the reader.
    """

    req: str
    granted: bool
    need: int = 0
    got: int = -1
    sized: int = -1
    usable: int = -1
    room: int = -1
    empty: bool = False
    group: str = ""
    tier: Tier = DEVICE
    staging: bool = False


class Lookup(EventRecord):
    """A prefix lookup, of which ``used`` of ``matched`` tokens are taken.

    ``blocks``: per group from position 0 on, null where none is needed. ``limiting``: groups named as the limit of a
    hit below the match. ``tier``: where the blocks lie. ``outside``: tokens after the used ones that come from
    elsewhere before the request computes: it resumes at their end, and holds of the hit only what is needed there.
    """

    req: str
    used: int
    matched: int = -1
    blocks: dict[str, list[int]] = {}
    limiting: list[str] = []
    tier: Tier = DEVICE
    grade: Literal["exact", "bounded"] = "exact"
    outside: int = 0


class Preempt(EventRecord):
    """The request gives its memory back.

    ``need`` blocks were wanted while ``free`` were free and ``pending`` deferred.
    """

    req: str
    need: int = -1
    free: int = 0
    pending: int = 0


class Abort(EventRecord):
    """The client gave the request up."""

    req: str


class Finish(EventRecord):
    """The one terminal event of a request's life; ``reason`` is for the reader."""

    req: str
    reason: str = ""


# ---- blocks ----------------------------------------------------------------------------------------------------------


class Allocate(EventRecord):
    """Blocks for a request; the first one covers tokens from ``at`` on (-1: after the request's last one)."""

    req: str
    group: str
    blocks: list[int]
    at: int = -1


class Pin(EventRecord):
    """A reference: of a request to the blocks of its hit, or of any other holder (a lock, a store's lookup).

    A request pins all of its hit before it takes new blocks. What it pins later, or below the device, counts as another
    holder's, but for a block that holds the tokens of one of its own: it goes on with that one, and may free its own.
    """

    req: str
    group: str
    blocks: list[int]
    tier: Tier = DEVICE


class Unpin(EventRecord):
    """The reference of a holder ends that is no request, or that counts as one (see `Pin`)."""

    req: str
    group: str
    blocks: list[int]
    tier: Tier = DEVICE


class DeferFree(EventRecord):
    """The request's reference ends later, when ``on`` (a transfer, a step) has ended."""

    req: str
    group: str
    blocks: list[int]
    on: str = ""


class Free(EventRecord):
    """The request's reference ends, of whichever kind; what no entry names and nobody else holds goes to the pool.

    At the end of a life it follows `Finish`, `Abort` or `Preempt`; before, only what no later step needs is given back.
    """

    req: str
    group: str
    blocks: list[int]
    tier: Tier = DEVICE


class Evict(EventRecord):
    """The bytes of cached blocks go back to the pool."""

    group: str
    blocks: list[int]
    tier: Tier = DEVICE


class Reset(EventRecord):
    """Blocks are cleared (the null block before its use), or the whole cache of a group (``blocks`` left out)."""

    group: str
    blocks: list[int] = []


# ---- steps -------------------------------------------------------------------------------------------------------


class Span(_Record):
    """Positions [lo, hi) of one group in a step and the blocks that hold them.

    ``space`` is the type of the indices in ``blocks``, ``layout`` what the kernel reads by, ``window`` what it applies.
    """

    group: str
    blocks: list[int]
    lo: int = 0
    hi: int = 0
    space: Space = "group"
    layout: str = ""
    window: int = -1
    layer: int = -1
    unit: Space = "token"


class TableWrite(EventRecord):
    """A block table (or another metadata buffer) of a request is written.

    ``index`` is the first column of ``columns``, ``space`` the type of what is stored; ``version`` counts the writes;
    ``copied`` is false while the buffer waits to be copied.
    """

    req: str
    group: str
    blocks: list[int] = []
    index: int = 0
    columns: int = -1
    space: Space = "group"
    unit: int = -1
    at: int = -1
    version: int = -1
    copied: bool = True


class Dispatch(EventRecord):
    """A step of a request is handed to the device: what it reads and writes. It runs later."""

    step: str
    req: str
    reads: list[Span] = []
    writes: list[Span] = []
    starts: dict[str, int] = {}
    at: int = -1


class Complete(EventRecord):
    """A step is done, well (``ok``) or not; ``at`` is the position that its bookkeeping uses."""

    step: str
    ok: bool = True
    at: int = -1


class Draft(EventRecord):
    """The next ``tokens`` written tokens of the request are drafts."""

    req: str
    tokens: int


class Accept(EventRecord):
    """Tokens before ``to`` are accepted; ``ids`` go on where the request's ended."""

    req: str
    to: int
    ids: list[int] = []


class Reject(EventRecord):
    """Drafts from ``to`` on are given up; the request is at ``at`` afterwards (-1: not told).

    What was accepted stays: a sequence that is cut is told by `Position`, one that is reused by a new request's lookup.
    ``low``: the first row that ``group`` still holds, where the engine says so.
    """

    req: str
    to: int
    at: int = -1
    group: str = ""
    low: int = -1


class Position(EventRecord):
    """Positions as the engine reports them: of the request (``at``) and of each group.

    ``shift``: all positions move by so much; ``data``: by how much the stored data was transformed. ``asked``: where a
    truncation was to end. ``next``: position of the token that a state is to take next.
    """

    req: str
    at: int = -1
    groups: dict[str, int] = {}
    shift: int = 0
    data: int = 0
    asked: int = -1
    next: int = -1


# ---- the index ---------------------------------------------------------------------------------------------------


class KeyPublish(EventRecord):
    """Entries of the prefix index: one key per block, after the dispatch of its write (before, nothing is in it).

    ``parent``: the key that the first one continues; each further one continues the one before it.
    ``at``: the position that a state is labelled with. ``tokens``: [lo, hi) that the entry announces.
    """

    group: str
    keys: list[str]
    blocks: list[int] = []
    tier: Tier = DEVICE
    parent: str = ""
    at: int = -1
    tokens: tuple[int, int] | None = None


class KeyRemove(EventRecord):
    """Entries leave the index, one per key; ``blocks`` where the engine says which of several equal ones."""

    group: str
    keys: list[str]
    blocks: list[int] = []
    tier: Tier = DEVICE


class Measure(EventRecord):
    """A count that the engine reports.

    ``cached``: blocks of a group that it counts as cached; ``pool``: what is free, used and reserved of a capacity;
    ``rows``: rows that a windowed group holds for one request.
    """

    what: Literal["cached", "pool", "rows"]
    group: str = ""
    value: int = 0
    free: int = 0
    used: int = 0
    reserved: int = 0
    capacity: int = 0
    bound: int = -1


# ---- transfers ---------------------------------------------------------------------------------------------------


class Part(_Record):
    """Blocks of one group that move, one to one. ``keys``: what is asked for.

    ``at``: the first token of the first source block, where only the event knows it (a peer's). ``ratio`` and
    ``stride``: kernel blocks per group block, and the unit of the addresses, that the copy uses. ``saved``: one past
    the last token that the copy carries.
    """

    group: str
    source: list[int] = []
    target: list[int] = []
    keys: list[str] = []
    layout: str = ""
    target_layout: str = ""
    at: int = -1
    ratio: int = -1
    stride: int = -1
    saved: int = -1


class TransferBegin(EventRecord):
    """Bytes begin to move from tier ``source`` to ``target``: copies, offloads, loads, sends, receives.

    ``whole``: it is to carry all groups of the model; ``partial``: it does not, and says so. ``req``: who asked for it.
    ``peer`` and ``rank`` are for the reader.
    """

    xfer: str
    parts: list[Part]
    source: Tier = DEVICE
    target: Tier = DEVICE
    req: str = ""
    peer: str = ""
    rank: int = 0
    partial: bool = False
    whole: bool = False


class TransferPart(EventRecord):
    """Some blocks have arrived (``target`` block numbers). They may come late, when the transfer was cancelled."""

    xfer: str
    group: str
    blocks: list[int]


class TransferEnd(EventRecord):
    """All of it has arrived; ``life`` is the life of the request that the completion is for (-1: not told)."""

    xfer: str
    life: int = -1


class TransferFail(EventRecord):
    """It failed; with ``stopped`` no byte moves any more, and its targets are empty.

    A request that took them has them back to compute into; what nobody took goes back to its pool.
    """

    xfer: str
    stopped: bool = True


class TransferCancel(EventRecord):
    """Nobody wants it any more; bytes may still move until it ends or fails."""

    xfer: str


class Io(EventRecord):
    """One I/O call: byte address, file offset and length, the unit of direct I/O, and whether it was refused."""

    address: int
    offset: int = 0
    length: int = 0
    unit: int = 4096
    direct: bool = True
    refused: bool = False


# ---- ranks, waits, graphs, configuration -------------------------------------------------------------------------


class Vote(EventRecord):
    """A rank reports its own longest hit."""

    req: str
    rank: int
    hit: int


class Agree(EventRecord):
    """The hit that all ranks use."""

    req: str
    hit: int


class Decide(EventRecord):
    """A rank's ``seq``-th decision or collective: admission, eviction, loading."""

    rank: int
    seq: int
    what: str


class Wait(EventRecord):
    """``who`` waits for each of ``on``; ``ended`` when it no longer does. ``on`` empty: for nobody in particular."""

    who: str
    on: list[str] = []
    ended: bool = False


class Run(EventRecord):
    """A job of class ``work`` runs on ``pipeline``, which serves the classes ``serves``."""

    pipeline: str
    work: str
    serves: list[str]


class Capture(EventRecord):
    """A graph is captured, or captured again, with these side effects; ``null``: it wrote the null block.

    ``blocks``: per group, those that its warm-up wrote into.
    """

    graph: str
    effects: list[str] = []
    null: bool = False
    blocks: dict[str, list[int]] = {}


class Replay(EventRecord):
    """A graph is replayed for a step: ``live`` rows and ``padding``, the slots of the padded rows.

    ``versions``: of the tables that it reads, per group. ``written``: rows that it writes.
    """

    graph: str
    step: str = ""
    live: int = 0
    written: int = -1
    padding: list[int] = []
    versions: dict[str, int] = {}
    effects: list[str] = []


class Epoch(EventRecord):
    """Something shared becomes another version.

    ``model`` (weights), ``topology`` (an address, a shape), or an adapter.
    """

    what: str
    name: str = ""


class Register(EventRecord):
    """The engine declares something before it serves.

    ``unit``: the unit of hits; ``tier``: with so many ways back to the device (``value``), of the tier ``side``;
    ``pool``: slots against the least that its concurrency needs, and the units by which it is sized and addressed;
    ``window``: of a layer; ``stride``: of a group's blocks; ``address``: base plus offset, for the alignment ``least``.
    """

    what: Literal["unit", "tier", "pool", "window", "stride", "address"]
    group: str = ""
    side: str = ""
    value: int = 0
    refused: bool = False
    least: int = 0
    sized: int = 0
    addressed: int = 0
    layer: int = -1


class Drain(EventRecord):
    """Nothing runs and nothing waits: everything should be at rest."""


Event = (
    Arrive | Admit | Lookup | Preempt | Abort | Finish | Allocate | Pin | Unpin | DeferFree | Free | Evict | Reset
    | TableWrite | Dispatch | Complete | Draft | Accept | Reject | Position | KeyPublish | KeyRemove | Measure
    | TransferBegin | TransferPart | TransferEnd | TransferFail | TransferCancel | Io
    | Vote | Agree | Decide | Wait | Run | Capture | Replay | Epoch | Register | Drain
)  # fmt: skip


def tag(event: Event) -> str:
    """The name of an event's form, as in the trace."""
    return str(type(event).__struct_config__.tag)


def schema() -> dict[str, object]:
    """The JSON Schema of a line: a header or an event."""
    (header, event), components = msgspec.json.schema_components([Header, Event], ref_template="#/$defs/{name}")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "anyOf": [header, event], "$defs": components}
