"""A small hybrid model with every kind of group, and what the tests of the allocator share."""

import hashlib
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from hybridkv_ref.allocator import CacheSegment, Geometry, HeterogeneousAllocator, HitLease, Request, build
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.lockstep import UNIT, keep_all, small_model
from hybridkv_ref.allocator.media_direct import DirectFiles, aligned
from hybridkv_ref.allocator.refinement import Shadow, differences
from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import load_tables

GEOMETRY: Geometry = build(small_model(), policy=keep_all())
TABLES = load_tables()


def prompt(family: str, length: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Tokens of a family: two families that begin with the same letters share so many grid units."""
    tokens: list[int] = []
    for letter in family:
        tokens += [ord(letter) * 1000 + i for i in range(UNIT)]
    tokens += [ord(family[-1]) * 1000 + 500 + i for i in range(max(0, length - len(tokens)))]
    return np.array(tokens[:length], dtype=np.int64)


@lru_cache(maxsize=50_000)
def row_content(prefix: bytes, name: str, layers: int, width: int) -> Tensor:
    """uint8 [layers, width] of the row that ends with this prefix."""
    seed = hashlib.blake2b(prefix + name.encode(), digest_size=8).digest()
    generator = np.random.default_rng(int.from_bytes(seed, "little"))
    return torch.from_numpy(generator.integers(0, 200, (layers, width), dtype=np.uint8))


def content(tokens: Any, group: GroupGeometry, lo: int, hi: int) -> Tensor:
    """What [lo, hi) of a group holds for these tokens: each row a function of the prefix that it ends."""
    width = sum(place.nbytes * group.page.heads for place in group.page.regions())
    step = group.group.ratio if group.group.shape == "entries" and group.group.ratio else 1
    first = lo // step
    ends = [hi] if group.whole else [(first + row + 1) * step for row in range(group.rows(lo, hi))]
    data = [bytes(np.asarray(tokens[:end], dtype=np.int64)) for end in ends]
    rows = [row_content(prefix, group.name, group.layers, width) for prefix in data]
    return torch.stack(rows, dim=1) if rows else torch.zeros((group.layers, 0, width), dtype=torch.uint8)


def filler(tokens: Any) -> Callable[[CacheSegment, int, int], Tensor]:
    """Computes the rows of a request's segments."""
    return lambda segment, lo, hi: content(tokens, segment.group, lo, hi)


def make(tmp: Path | None = None, shadow: bool = False, **options: Any) -> HeterogeneousAllocator:
    """An allocator of the small model; with ``tmp``, a disk tier there."""
    settings: dict[str, Any] = {"device_bytes": 40_000, "tables": TABLES}
    if tmp is not None:
        settings |= {"store": str(tmp), "store_bytes": 100_000}
    beside = Shadow(TABLES) if shadow else None
    settings |= {"observer": beside} | options
    allocator = HeterogeneousAllocator(settings.pop("geometry", GEOMETRY), **settings)
    if beside is not None:
        beside.attach(allocator.ledger.lanes, allocator.ledger.made)
    return allocator


def direct(folder: Path, files: type[DirectFiles] = DirectFiles) -> DirectFiles:
    """A store for direct I/O, of a class of its own if need be; skips where the file system has none."""
    try:
        return files(str(folder))
    except InputError as error:
        pytest.skip(str(error))


class OffByEight(DirectFiles):
    """Its buffers begin 8 bytes after a multiple of the unit, once it is opened."""

    off = 0

    def prove(self, url: str) -> None:
        super().prove(url)
        self.off = 8

    def buffer(self) -> memoryview:
        return aligned(2 * self.unit, self.unit)[self.off :][: self.unit]


def cold(allocator: HeterogeneousAllocator, tokens: Any, finish: bool = True) -> Request:
    """A request that computes its prompt from wherever its hit ends."""
    request, lease = hit(allocator, tokens)
    run(allocator, request, tokens)
    if finish:
        allocator.finish(request)
    del lease
    return request


def hit(allocator: HeterogeneousAllocator, tokens: Any, **options: Any) -> tuple[Request, HitLease]:
    """Match, pin, validate, read; what is read is compared with what was written."""
    found = allocator.match(tokens, **options)
    lease = allocator.pin(found)
    while lease.tokens and not allocator.validate(lease)[-1].accepted:
        lease = allocator.retry(lease)
    if lease.tokens:
        allocator.read(lease)
        check_bytes(allocator, lease, tokens)
    return found.request, lease


def check_bytes(allocator: HeterogeneousAllocator, lease: HitLease, tokens: Any) -> None:
    """Every leased segment holds the bytes of this prefix."""
    for segment in lease.segments:
        lo, hi = segment.token_range
        assert torch.equal(allocator.rows(segment), content(tokens, segment.group, lo, hi)), repr(segment)


def run(allocator: HeterogeneousAllocator, request: Request, tokens: Any) -> None:
    """Computes the rest of a prompt."""
    at = request.position
    while at < len(tokens):
        at = min(at // UNIT * UNIT + UNIT, len(tokens))
        allocator.extend(request, at, filler(tokens))


def check(allocator: HeterogeneousAllocator) -> None:
    """Memory, files and records say what the tables say, and every step was a row."""
    assert differences(allocator) == []
    observer = allocator.ledger.observer
    if isinstance(observer, Shadow):
        assert observer.faults == []


def idle(allocator: HeterogeneousAllocator) -> None:
    """Waits for the copies that run."""
    with allocator.ledger.changed:
        while allocator.tiers.spills or allocator.tiers.loads:
            allocator.ledger.changed.wait(0.05)
