"""The records of the oracle: refusals, blocks, requests, tiers, groups, and rows as it fires them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from typing import Any

from hybridkv_ref.compile_py import attribute
from hybridkv_ref.event_map import row_name
from hybridkv_ref.events import GroupSpec
from hybridkv_ref.machine import Compiled, Machine, Value
from hybridkv_ref.recovery import Group
from hybridkv_ref.tables import Tables

UNTOLD = 1 << 60
"""The value of a limit that nobody told."""

Place = str | tuple[str, int | str]
"""What a row was about, for a message: a name, or a group and a block, put together only when it is needed."""

SPARE = 4096
"""How many records of empty blocks are kept to be used again, per group and tier."""

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


def digest(*parts: object) -> int:
    """A number that stands for these values, the same in every run, and never 0."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest()) or 1


_BITS = (1 << 64) - 1
_PARTIAL = 0xC2B2AE3D27D4EB4F


def mixed(before: int, number: int) -> int:
    """A number of 64 bits that stands for what came before and what follows, the same in every run, and never 0."""
    bits = ((before ^ number) + 0x632BE59BD9B4E019) * 0x9E3779B97F4A7C15 & _BITS
    bits = (bits ^ bits >> 29) * 0xBF58476D1CE4E5B9 & _BITS
    return bits ^ bits >> 32 or 1


@lru_cache(maxsize=64)
def machine_of(tables: Tables, constants: tuple[tuple[str, int], ...]) -> Machine:
    """The tables compiled for these constants, once: worlds of one machine share its code."""
    return Machine(tables, dict(constants))


@lru_cache(maxsize=1024)
def _type_of(cls: str, variables: tuple[str, ...]) -> type:
    """Records of nothing but variables; one type for blocks of all groups, which the interpreter then reads alike."""
    return type(cls, (), {"__slots__": variables})


@lru_cache(maxsize=1024)
def maker(machine: Machine, cls: str, kind: str, rigid: tuple[str, ...] = ()) -> Callable[..., Any]:
    """A function that makes records of entities in their first stage, by straight-line code.

    Its keyword arguments are the rigid variables that it sets.
    """
    variables = machine.tables.vars_of(cls, kind)
    names = {attribute(n) for n in rigid}
    first = {attribute(n): repr(v.init) for n, v in variables.items()}
    lines = [f"def make({', '.join(sorted(names))}):", " e = new()"]
    lines += [f" e.{n} = {n if n in names else v}" for n, v in first.items()]
    space: dict[str, Any] = {"new": _type_of(cls, tuple(first))}
    exec("\n".join([*lines, " return e"]), space)
    made: Callable[..., Any] = space["make"]
    return made


class Block:
    """A block of one group in one tier: its segment, what its slots were last written with, who refers to it.

    ``tokens`` and ``domain`` identify the content (0: not told): equal numbers, equal prefix and equal other inputs;
    ``content`` stands for both.
    """

    __slots__ = ("content", "domain", "key", "leases", "number", "owner", "segment", "tokens", "writer")

    def __init__(self, number: int, segment: Any) -> None:
        self.number, self.segment = number, segment
        self.tokens = self.domain = self.content = 0
        self.leases: dict[int, Any] = {}
        self.writer: Request | None = None
        self.owner: Request | None = None
        self.key = ""


class Request:
    """A request's life: its record in the tables, the identity of its tokens, where it is."""

    __slots__ = (
        "adopted", "at", "chain", "cold", "domain", "drafts", "grade", "held", "length", "life", "lost", "name",
        "outside", "positions", "record", "refused", "rough", "roughly", "running", "table_versions", "uid", "unit",
    )  # fmt: skip

    def __init__(self, name: str, uid: int, record: Any, length: int, unit: int) -> None:
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
        before = self.chain[-1] if self.chain else 0
        for number in ids:
            before = mixed(before, number)
            self.chain.append(before)

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


@dataclass(slots=True)
class GroupState:
    """One cache group: its description, kind in the tables, what it needs to resume, and the rules of that need."""

    index: int
    spec: GroupSpec
    kind: str
    need: Group
    rules: tuple[str, ...]
    states: bool

    def low(self, position: int) -> int:
        """First position that computing from ``position`` on still needs."""
        return self.need.need(position, position)[0]


class Row:
    """A compiled row as the oracle fires it: ``call(pool, *entities, *inputs)``, and how often it was fired.

    ``test`` takes the same and only asks whether it may be fired. ``more``: the rules that it stands for besides its
    own, where it is about the need of one group.
    """

    __slots__ = ("call", "count", "event", "more", "name", "test")

    def __init__(self, compiled: Compiled, more: tuple[str, ...] = ()) -> None:
        self.call, self.test, self.event, self.more = compiled.call, compiled.test, compiled.event, more
        self.name, self.count = row_name(compiled.event), 0

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that the row stands for."""
        return (*self.event.rules, *self.more)


@dataclass(slots=True)
class Tier:
    """One tier: its machine (for its caps), pool, blocks of each group by number, and numbers that are lost."""

    name: str
    machine: Machine
    pool: Any
    blocks: list[dict[int, Block]]
    lost: list[set[int]]
    segment: list[Any]
    spare: list[list[Block]]
    rows: list[tuple[str, Row]]


@dataclass(slots=True)
class Bound:
    """The rows that one event may fire: of each group's blocks, of everything else, by row name."""

    group: list[dict[str, Row]]
    other: dict[str, Row]
