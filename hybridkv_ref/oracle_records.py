"""The records of the oracle: refusals, blocks, requests, groups, and the rows that an event may fire."""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

from hybridkv_ref.events import GroupSpec
from hybridkv_ref.machine import Value
from hybridkv_ref.oracle_entities import Lease, Record, Segment
from hybridkv_ref.oracle_row import Row
from hybridkv_ref.recovery import Group

UNTOLD: Final = 1 << 60
"""The value of a limit that nobody told."""

Place = str | tuple[str, int | str]
"""What a row was about, for a message: a name, or a group and a block, put together only when it is needed."""

REMEMBERED = 65536
"""How many ended requests are remembered, to see that none ends twice."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that the tables refuse: event (1 is the first after the header), row, false guard, the values it saw."""

    index: int
    event: str
    row: str
    rules: tuple[str, ...]
    segment: str
    guard: str
    values: Mapping[str, Value]

    @property
    def fault(self) -> tuple[str, str, tuple[str, ...]]:
        """What makes two refusals the same fault: the row, its guard, and the rules that are broken."""
        return self.row, self.guard, self.rules

    def __str__(self) -> str:
        shown = ", ".join(f"{n}={v}" for n, v in self.values.items())
        where = f" {self.segment}" if self.segment else ""
        return f"event {self.index} ({self.event}){where}: {self.row} refused by '{self.guard}' with {shown}"


# What stands for contents is kept below the size at which a compiled oracle has to keep an int as an object.
_BITS: Final = (1 << 61) - 1
_LOW: Final = (1 << 60) - 1
_PARTIAL: Final = 0x12B2AE3D27D4EB4F


def digest(*parts: object) -> int:
    """A number of 61 bits that stands for these values, the same in every run, and never 0."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) & _BITS or 1


def mixed(before: int, number: int) -> int:
    """A number of 61 bits and a sign: what came before and what follows, the same in every run, and never 0.

    Python's hash of a tuple of ints is the same in every run, and takes an int modulo 2 ** 61 - 1 and -1 as -2: what is
    not itself then goes in parts. Such hashes are chained, never added: sums of them are equal where two ids change
    places.
    """
    own = -_BITS < number < _BITS and number != -1
    parts = (before, number) if own else (before, (number >> 60) + 64, number & _LOW)
    # A hash of the hash is short enough to stay a machine's int in a compiled oracle.
    return hash(hash(parts)) or 1


class Block:
    """A block of one group in one tier: its segment, what its slots were last written with, who refers to it.

    ``tokens`` and ``domain`` identify the content (0: not told): equal numbers, equal prefix and equal other inputs;
    ``content`` stands for both.
    """

    __slots__ = (
        "content", "domain", "key", "lease", "number", "others", "owner", "segment", "tokens", "uid", "writer",
    )  # fmt: skip

    def __init__(self, number: int, segment: Segment) -> None:
        self.number, self.segment = number, segment
        self.tokens = self.domain = self.content = 0
        # Most blocks have one lease at a time, of the request ``uid`` (0: none); ``others`` are of other requests.
        self.uid = 0
        self.lease: Lease | None = None
        self.others: dict[int, Lease] | None = None
        self.writer: Request | None = None
        self.owner: Request | None = None
        self.key = ""

    def lease_of(self, uid: int) -> Lease | None:
        """The lease of this request."""
        return self.lease if uid == self.uid else None if self.others is None else self.others.get(uid)

    def hold(self, uid: int, lease: Lease) -> None:
        """A request has this lease from here on."""
        others = self.others
        if self.uid == uid or not (self.uid or (others is not None and uid in others)):
            self.uid, self.lease = uid, lease
        elif others is None:
            self.others = {uid: lease}
        else:
            others[uid] = lease

    def let(self, uid: int) -> None:
        """A request has no lease any more."""
        if uid == self.uid:
            self.uid, self.lease = 0, None
        elif self.others is not None and self.others.pop(uid, None) is not None and not self.others:
            self.others = None

    def leases(self) -> list[tuple[int, Lease]]:
        """Every lease with the request that has it."""
        first = [(self.uid, self.lease)] if self.lease is not None else []
        return [*first, *self.others.items()] if self.others is not None else first


class Request:
    """A request's life: its record in the tables, the identity of its tokens, where it is."""

    __slots__ = (
        "adopted", "at", "chain", "cold", "domain", "drafts", "grade", "held", "length", "life", "lost", "name",
        "outside", "positions", "record", "refused", "rough", "roughly", "running", "table_versions", "uid", "unit",
    )  # fmt: skip

    def __init__(self, name: str, uid: int, record: Record, length: int, unit: int) -> None:
        self.name, self.uid, self.record, self.length, self.unit = name, uid, record, length, unit
        self.chain: list[int] = []
        # ``domain``: the other inputs of what it asks for and writes; ``rough``: the same after a bounded recovery, if
        # it takes that too.
        self.domain = self.rough = self.drafts = self.at = self.life = self.held = 0
        # ``cold``: it found a hit and pinned nothing of it, and has not computed yet.
        # ``roughly``: the hit that it found is a bounded one.
        self.lost = self.running = self.cold = self.roughly = False
        # Tokens after the hit that come from elsewhere before it computes.
        self.outside = 0
        self.grade = "exact"
        # Per group, the version of this request's table, and whether it was copied.
        self.table_versions: dict[str, tuple[int, bool]] = {}
        self.positions: dict[str, int] = {}
        # The gates, of admission (False) and of staging (True), whose last word was no.
        self.refused: set[bool] = set()
        # Per group and position, the cached block that it took in place of one of its own.
        self.adopted: dict[tuple[int, int], Block] = {}

    def extend(self, ids: list[int]) -> None:
        """Goes on with these ids: each hash stands for everything up to its end."""
        chain = self.chain
        before = chain[-1] if chain else 0
        for number in ids:
            before = mixed(before, number)
            chain.append(before)

    @property
    def known(self) -> int:
        """Tokens of which it was told what they are: of the prompt, and what this request has computed itself."""
        return max(0, min(self.length, max(len(self.chain) * self.unit, self.at))) if self.chain else 0

    def content(self, end: int) -> int:
        """What stands for the tokens [0, end); own to this request where it was not told; 0 if nothing was told."""
        if not self.chain:
            return 0
        count = -(-end // self.unit)
        if count > len(self.chain):
            return digest(self.uid, end)
        last = self.chain[count - 1]
        return last if end == count * self.unit else mixed(last ^ _PARTIAL, end)


class GroupState:
    """One cache group: its description, kind in the tables, what it needs to resume, and the rules of that need."""

    __slots__ = ("block", "index", "kind", "layout", "name", "need", "ratio", "reuse", "rules", "spec", "states")

    def __init__(
        self, index: int, spec: GroupSpec, kind: str, need: Group, rules: tuple[str, ...], states: bool
    ) -> None:
        self.index, self.spec, self.kind, self.need, self.rules, self.states = index, spec, kind, need, rules, states
        # What of the description is asked for block after block.
        self.name, self.block, self.ratio, self.reuse = spec.name, spec.block, spec.ratio, spec.reuse
        self.layout = spec.layout

    def low(self, position: int) -> int:
        """First position that computing from ``position`` on still needs."""
        return self.need.need(position, position)[0]


class Bound:
    """The rows that one event may fire: of each group's blocks, of everything else, by row name."""

    __slots__ = ("group", "other")

    def __init__(self, group: list[dict[str, Row]], other: dict[str, Row]) -> None:
        self.group, self.other = group, other
