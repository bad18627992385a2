"""The allocator in lock step with the tables: ``hybridkv check --lockstep SECONDS``.

Random requests with shared prefixes, aborts, evictions, spills and loads on a small hybrid model with a disk tier.
After every step each row has fired a second time in a machine of its own, and memory, block tables and files are
compared with the table state; each read is compared with what was written.
"""

import hashlib
import math
import random
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from hybridkv_ref.allocator.admission import NotAdmitted
from hybridkv_ref.allocator.allocator import HeterogeneousAllocator
from hybridkv_ref.allocator.geometry import build
from hybridkv_ref.allocator.records import CacheSegment, HitLease
from hybridkv_ref.allocator.refinement import Shadow, differences
from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import load_tables
from hybridkv_ref.machine import Refused
from hybridkv_ref.models import Group, Model
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.policy import Policy, load_policy
from hybridkv_ref.recovery import entries

UNIT = 8
"""Tokens of a grid unit of the small model."""
STEPS = 150  # of one history


def small_model() -> Model:
    """Window 6, entries of ratio 4 with indexer and tail, entries of ratio 8, a recurrent layer; a grid of 8 tokens."""
    sizes = {"bf16": 16}
    groups = (
        Group(name="window", kind="swa_window", layers=2, window=6, entry_bytes=sizes, block_tokens=4),
        Group(name="csa", kind="compressed_kv", layers=2, ratio=4, entry_bytes=sizes, block_tokens=8),
        Group(
            name="index", kind="indexer_state", layers=1, ratio=4, dtype_of="index", entry_bytes=sizes, block_tokens=8
        ),
        Group(name="hca", kind="compressed_kv", layers=1, ratio=8, entry_bytes=sizes, block_tokens=8),
        Group(
            name="tail", kind="uncompressed_tail", layers=2, feeds="csa", ratio=4, halo=4, row_bytes=32, ring_rows=8,
            block_tokens=4,
        ),
        Group(name="state", kind="recurrent_state", layers=1, state_bytes=48),
    )  # fmt: skip
    return Model(name="small", source="made up", confidence="made up", note="", alignment=UNIT, groups=groups)


def keep_all(spec: Path = SPEC_DIR) -> Policy:
    """Durable copies of every kind, snapshots at every position: what lets each prefix come back from a tier."""
    policy = load_policy({kind: need.exact for kind, need in entries(spec)[1].items()}, spec)
    own = {
        kind: msgspec.structs.replace(one, spill=True, snapshots="every" if one.snapshots else None)
        for kind, one in policy.kinds.items()
    }
    return msgspec.structs.replace(policy, kinds=own)


@dataclass(slots=True)
class Outcome:
    """What was done, and every difference: none as it should be."""

    steps: int = 0
    rows: int = 0
    requests: int = 0
    hits: int = 0
    events: int = 0
    faults: list[str] = field(default_factory=list)


def pattern(tokens: Any, lo: int) -> int:
    """The byte that a unit's segments are filled with: a function of the prefix up to the unit's end."""
    end = lo // UNIT * UNIT + UNIT
    return hashlib.blake2b(np.asarray(tokens[:end], dtype=np.int64).tobytes(), digest_size=1).digest()[0] % 200


class Driver:
    """One run: a random walk over what an engine may do."""

    def __init__(self, allocator: HeterogeneousAllocator, seed: int) -> None:
        self.allocator, self.random = allocator, random.Random(seed)
        self.running: list[tuple[HitLease, Any]] = []
        self.outcome = Outcome()

    def prompt(self) -> Any:
        """Three letters at most, so that prefixes are shared."""
        letters = [self.random.randrange(3) for _ in range(self.random.randint(1, 4))]
        tokens = [letter * 1000 + at for letter in letters for at in range(UNIT)]
        return np.array(tokens + list(range(self.random.randrange(UNIT))), dtype=np.int64)

    def rows(self, tokens: Any) -> Any:
        """Fills segments."""

        def fill(segment: CacheSegment, lo: int, hi: int) -> Tensor:
            group = segment.group
            count = group.rows(lo, hi)
            width = sum(place.nbytes * group.page.heads for place in group.page.regions())
            return torch.full((group.layers, count, width), pattern(tokens, hi - 1), dtype=torch.uint8)

        return fill

    def step(self) -> None:
        """One thing, whatever comes."""
        choice = self.random.random()
        if choice < 0.3 or not self.running:
            self.start()
        elif choice < 0.7:
            self.advance(self.random.choice(self.running))
        elif choice < 0.85:
            lease, _ = self.running.pop(self.random.randrange(len(self.running)))
            if lease.request.stage in self.allocator.ledger.sets("request", "RUNNING") and self.random.random() < 0.7:
                self.allocator.finish(lease.request)
            else:
                self.allocator.abort(lease.request)
        elif choice < 0.93:
            segments = self.allocator.segments()
            if segments:
                self.allocator.evictor.evict(self.random.choice(segments))
        elif choice < 0.99:
            if self.random.random() < 0.3:
                self.allocator.evictor.empty()
            self.allocator.prefetch(self.prompt())
        else:
            for stored in list(self.allocator.tiers.loads):
                self.allocator.tiers.timer(stored)
        self.outcome.steps += 1
        self.outcome.faults += differences(self.allocator)

    def start(self) -> None:
        """A new request, pinned."""
        tokens = self.prompt()
        try:
            hit = self.allocator.match(tokens)
        except NotAdmitted:
            return
        self.outcome.requests += 1
        self.running.append((self.allocator.pin(hit), tokens))

    def advance(self, one: tuple[HitLease, Any]) -> None:
        """Validates and reads a hit, or computes a unit."""
        lease, tokens = one
        if lease.tokens and lease.request.stage not in self.allocator.ledger.sets("request", "RUNNING"):
            if self.allocator.validate(lease)[-1].accepted:
                self.allocator.read(lease)
                self.outcome.hits += 1
                for segment in lease.segments:
                    wanted = pattern(tokens, segment.token_range[1] - 1)
                    if not bool((self.allocator.rows(segment) == wanted).all()):
                        self.outcome.faults.append(f"{segment!r} holds other bytes than were written")
            else:
                self.allocator.retry(lease)
            return
        at, fill = lease.request.position, self.rows(tokens)
        whole = (len(tokens) - at) // UNIT if at % UNIT == 0 and not lease.request.writing else 0
        if whole > 1 and self.random.random() < 0.5:
            for segment in self.allocator.writer.extend_together(lease.request, whole):
                self.allocator.book.write_rows(segment, 0, fill(segment, *segment.token_range))
        elif at < len(tokens):
            try:
                self.allocator.extend(lease.request, min(at // UNIT * UNIT + UNIT, len(tokens)), fill)
            except Refused as refused:
                if not self.allocator.ledger.pressure(refused):
                    self.outcome.faults.append(f"extend: {refused}")

    def end(self) -> None:
        """Drains: everything at zero."""
        self.allocator.drain()
        self.outcome.faults += differences(self.allocator)
        if self.allocator.ledger.pool.gpu_used or self.allocator.segments():
            self.outcome.faults.append("memory is held after the drain")


def lockstep(seconds: float = math.inf, seed: int = 0, spec: Path = SPEC_DIR, histories: int = 0) -> Outcome:
    """Drives an allocator through so many histories, or for so many seconds, or until something differs.

    ``histories``: their number (0: as many as the time allows, at least one); InputError without either bound.
    """
    if math.isinf(seconds) and histories < 1:
        raise InputError(f"lockstep:histories: expected at least 1 where no time is given, got {histories}")
    tables = load_tables(spec)
    geometry = build(small_model(), policy=keep_all(spec), spec=spec)
    total, end, count = Outcome(), time.monotonic() + seconds, 0
    events: set[str] = set()
    while (not count or time.monotonic() < end) and not (histories and count >= histories) and not total.faults:
        shadow = Shadow(tables)
        with tempfile.TemporaryDirectory(prefix="hybridkv-") as folder:
            device = (5_000, 9_000, 40_000)[seed % 3]
            allocator = HeterogeneousAllocator(
                geometry, device, store=folder, store_bytes=20_000, tables=tables, observer=shadow, spec=spec
            )
            with allocator:
                shadow.attach(allocator.ledger.lanes, allocator.ledger.made)
                driver = Driver(allocator, seed)
                for _ in range(STEPS):
                    if (not count or time.monotonic() < end) and not driver.outcome.faults and not shadow.faults:
                        driver.step()
                if not driver.outcome.faults and not shadow.faults:  # a state that is wrong need not drain
                    driver.end()
        seed, count = seed + 1, count + 1
        events |= shadow.counts.keys()
        total.faults += driver.outcome.faults + shadow.faults
        total.rows += shadow.rows
        for name in ("steps", "requests", "hits"):
            setattr(total, name, getattr(total, name) + getattr(driver.outcome, name))
    total.events = len(events)
    return total
