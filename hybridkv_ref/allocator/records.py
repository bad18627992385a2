"""What the allocator hands out: segments, leases, hits, verdicts, descriptors.

A segment's record is used again after its memory was freed, as a slot of a real cache is; its generation tells the
lives apart.  Whatever a record shows of its stage, range or counts is read from the table state, never kept beside it.
"""

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hybridkv_ref.allocator.arena import Slots
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.recovery import Hit as RecoveryHit

FOREVER = 1 << 60
"""A time at which no eviction schedule arrives."""


@dataclass(eq=False, slots=True)
class StoredObject:
    """A durable copy of neighbouring segments of one group.  ``keys`` and ``spans``: prefix and tokens of each part."""

    group: GroupGeometry
    entity: Any
    medium: str
    name: str
    location: str
    keys: tuple[bytes, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def stage(self) -> str:
        """Its stage, as the tables name it."""
        stage: str = self.entity.stage
        return stage


@dataclass(eq=False, slots=True)
class CacheSegment:
    """One group's range of whole blocks on the device.

    ``slots``: int64 [layers, blocks], the block table; None while it holds no memory.  ``key``: the prefix that it
    belongs to, None if it is not to be found.  ``stored``: its durable copy.  ``ring``: the row of position p lies at p
    mod ring; 0: rows lie in order from the start on.  ``settled``: the stage and the bytes charged that its memory was
    last brought in line with.
    """

    group: GroupGeometry
    entity: Any
    slots: Slots | None = None
    key: bytes | None = None
    stored: StoredObject | None = None
    last_accessed: int = 0
    ring: int = 0
    settled: tuple[str, int] = ("", 0)

    @property
    def kind(self) -> str:
        """Its kind, for life."""
        return self.group.kind

    @property
    def stage(self) -> str:
        """Its stage, as the tables name it."""
        stage: str = self.entity.stage
        return stage

    @property
    def token_range(self) -> tuple[int, int]:
        """[start, end) in tokens."""
        return self.entity.start, self.entity.end

    @property
    def ref_count(self) -> int:
        """Leases that hold or write it."""
        count: int = self.entity.pins + self.entity.writers
        return count

    @property
    def generation(self) -> int:
        """Moves whenever its bytes or their range change."""
        value: int = self.entity.generation
        return value

    @property
    def nbytes(self) -> int:
        """Bytes charged."""
        value: int = self.entity.mem
        return value

    @property
    def disk_location(self) -> str | None:
        """Where its durable copy lies."""
        return None if self.stored is None else self.stored.location

    def __repr__(self) -> str:
        start, end = self.token_range
        return f"{self.group.name}[{start}, {end}) {self.stage} generation {self.generation}"


@dataclass(eq=False, slots=True)
class Lease:
    """One reader or writer of one segment.  ``closed``: its request has let go of it; steps in flight may go on."""

    segment: CacheSegment
    request: "Request"
    entity: Any
    closed: bool = False

    @property
    def stage(self) -> str:
        """Its stage, as the tables name it."""
        stage: str = self.entity.stage
        return stage


@dataclass(frozen=True, eq=False, slots=True)
class StatePointer:
    """One entry of ``state_data_ptrs``: where the bytes of one leased segment are.

    ``offset``: int64 [layers, blocks], bytes from ``base``; ``bytes``: used bytes of each block; ``generation``: of the
    segment when it was pinned.
    """

    group: str
    base: int
    offset: NDArray[np.int64]
    bytes: int
    generation: int


@dataclass(frozen=True, slots=True)
class Verdict:
    """What one layer of the validation said: accepted, or which row refused by which guard with which values."""

    layer: str
    accepted: bool
    asked: bool = True
    event: str = ""
    guard: str = ""
    values: dict[str, int | str] = field(default_factory=dict)
    rules: tuple[str, ...] = ()
    segment: str = ""

    def __str__(self) -> str:
        if not self.asked:
            return f"{self.layer}: not asked"
        if self.accepted:
            return f"{self.layer}: accepted"
        shown = ", ".join(f"{n}={v}" for n, v in self.values.items())
        rules = ", ".join(self.rules)
        return f"{self.layer}: {self.event} refused {self.segment} by '{self.guard}' with {shown} ({rules})"


@dataclass(eq=False, slots=True)
class Request:
    """One request: its prompt, its prefix keys per grid unit, its records in every lane, and what it holds.

    ``position``: tokens before it are computed or read from the cache.  ``hits``: leases as a reader of a hit,
    ``found``: candidates that are not pinned; ``writing``: segments being written, ``kept``: those it wrote and keeps,
    ``passing``: those of them that computing on may leave behind.
    ``ending``: held by the thread that ends it.
    """

    number: int
    length: int
    keys: list[bytes]
    records: tuple[Any, ...]
    position: int = 0
    found: list[Lease] = field(default_factory=list)
    hits: list[Lease] = field(default_factory=list)
    writing: list[Lease] = field(default_factory=list)
    kept: list[Lease] = field(default_factory=list)
    passing: list[Lease] = field(default_factory=list)
    wrote: list[tuple[CacheSegment, int]] = field(default_factory=list)
    ending: threading.RLock = field(default_factory=threading.RLock)

    @property
    def stage(self) -> str:
        """Its stage, the same in every lane between two steps."""
        stage: str = self.records[0].stage
        return stage

    @property
    def accepted(self) -> int:
        """Tokens that are confirmed, the same in every lane between two steps."""
        count: int = self.records[0].accepted
        return count


@dataclass(eq=False, slots=True)
class Hit:
    """What a match found: a first signal.  ``plan.r`` tokens can be saved if the segments pass all layers.

    ``matched``: tokens of the prompt that the index knew.
    """

    request: Request
    plan: RecoveryHit
    matched: int

    @property
    def tokens(self) -> int:
        """Tokens saved if it is read."""
        return self.plan.r


@dataclass(eq=False, slots=True)
class HitLease:
    """The pinned segments of one request's hit, the verdicts on them, and what it took to get here.

    ``matched``: tokens of the prompt that the index knew when the plan was made.
    """

    request: Request
    plan: RecoveryHit
    matched: int
    verdicts: tuple[Verdict, ...] = ()
    refusals: list[str] = field(default_factory=list)
    pointers: Sequence[StatePointer] = ()

    @property
    def tokens(self) -> int:
        """Tokens that need not be computed."""
        return self.plan.r

    @property
    def segments(self) -> list[CacheSegment]:
        """The segments that it holds, by group and position."""
        return [lease.segment for lease in self.request.hits]

    @property
    def state_data_ptrs(self) -> Sequence[StatePointer]:
        """One entry per leased segment; valid until release."""
        return self.pointers
