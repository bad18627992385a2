"""A working cache allocator for hybrid-attention models, whose every change of a segment is a row of the tables.

The life of a request::

    hit = allocator.match(tokens)          # a first signal: candidates and their generations
    lease = allocator.pin(hit)             # they are held from here on
    if allocator.validate(lease)[-1].accepted:
        allocator.read(lease)              # state_data_ptrs are presented; the bytes stay until the request finishes
    else:
        lease = allocator.retry(lease)     # a shorter hit, or none
    allocator.extend(hit.request, upto)    # allocate, append, commit: every group of a grid unit, or none
    allocator.finish(hit.request)          # or abort, at any time

A refused call changes nothing and raises ``machine.Refused`` with the row, the guard and the values, or
``NotAdmitted`` before anything was allocated; an ``extend`` over several grid units keeps those before the one refused.
Rows are atomic under one lock; copies, kernels and files run outside it, between a row that begins and a row that ends.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from hybridkv_ref.allocator.abi import unserved
from hybridkv_ref.allocator.admission import NotAdmitted, as_tokens, gate
from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.environment import Environment
from hybridkv_ref.allocator.eviction import Evictor
from hybridkv_ref.allocator.geometry import Geometry
from hybridkv_ref.allocator.handoffs import Handoffs
from hybridkv_ref.allocator.hits import Hits
from hybridkv_ref.allocator.index import Tokens
from hybridkv_ref.allocator.ledger import Ledger, Observer
from hybridkv_ref.allocator.media import Medium
from hybridkv_ref.allocator.media_choice import media_of
from hybridkv_ref.allocator.pipelines import Pipelines
from hybridkv_ref.allocator.prefetch import Prefetcher
from hybridkv_ref.allocator.records import (
    FOREVER,
    CacheSegment,
    Hit,
    HitLease,
    Lease,
    Request,
    StatePointer,
    StoredObject,
    Verdict,
)
from hybridkv_ref.allocator.requests import Requests
from hybridkv_ref.allocator.reshape import Reshape
from hybridkv_ref.allocator.tiers import Tiers
from hybridkv_ref.allocator.writer import Fill, Writer
from hybridkv_ref.errors import InputError
from hybridkv_ref.fast_hit import Finder
from hybridkv_ref.loader import load_tables
from hybridkv_ref.machine import Refused
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import Hit as RecoveryHit
from hybridkv_ref.tables import Tables


class HeterogeneousAllocator(Environment):
    """Segments of every cache group of one model, on one device, with tiers below it.

    geometry      pages, blocks and the grid (see ``geometry.build``)
    device_bytes  cap of all kinds together; ``kind_bytes`` caps single kinds (default: all of it). An arena has as many
                  slots as the caps of the kinds that use its page could fill, so give ``kind_bytes`` for large pools
    host_bytes, store_bytes, store  host memory for durable copies, bytes below the URL ``store`` (a folder, or anything
                  that fsspec opens)
    store_io      "buffered", or "direct": files of a local folder are written and read past the page cache
    io_slots      loads at once; ``most_waiting`` bounds the queue of loads; ``tries`` per object before it is given up
    max_tokens    longest prompt; ``preempts``: how often one request may be preempted
    replay        tokens that a hit may compute again to do without a stored tail
    ahead         per group, successor tokens that its keys need
    abi           per group, the reader's descriptor identifier (default: that of the group)
    device        "cpu" or "cuda"
    tables        other tables than those of ``spec``
    media         other media than those that ``host_bytes`` and ``store`` name, by the tables' name of the medium
    observer      told of every row
    poison        free slots are overwritten, so that a late read shows

    Rows of two segments, clones and folds, are fired with ``handoffs``; what moves, cuts, joins or turns a segment that
    nobody holds with ``reshape``.
    """

    def __init__(
        self,
        geometry: Geometry,
        device_bytes: int,
        *,
        kind_bytes: Mapping[str, int] | None = None,
        host_bytes: int = 0,
        store_bytes: int = 0,
        store: str | None = None,
        store_io: str = "buffered",
        io_slots: int = 2,
        most_waiting: int = 64,
        tries: int = 3,
        max_tokens: int = 1 << 20,
        preempts: int = 8,
        replay: int = 0,
        ahead: Mapping[str, int] | None = None,
        abi: Mapping[str, int] | None = None,
        device: str = "cpu",
        tables: Tables | None = None,
        spec: Path = SPEC_DIR,
        media: Mapping[str, Medium] | None = None,
        observer: Observer | None = None,
        poison: bool = True,
    ) -> None:
        if device_bytes < 1 or max_tokens < 1:
            raise InputError(f"allocator:device_bytes: expected at least 1, got {device_bytes} ({max_tokens} tokens)")
        self.geometry, self.max_tokens, self.device_bytes = geometry, max_tokens, device_bytes
        self.first_bytes = device_bytes
        tables = tables or load_tables(spec)
        self.caps = {g.kind: (kind_bytes or {}).get(g.kind, device_bytes) for g in geometry.groups}
        chosen = dict(media) if media is not None else media_of(host_bytes, store, store_io)
        self.reserve = int(geometry.policy.reserve * device_bytes) if chosen else 0
        constants = {f"{kind}.CAP": self.caps.get(kind, device_bytes) for kind in tables.kinds}
        constants |= {"GPU_CAP": device_bytes, "RESERVE": self.reserve, "IO_CAP": io_slots, "MAX_TRIES": tries}
        constants |= {"MAX_PREEMPTS": preempts}
        constants |= {f"{name}_CAP": 0 for name in ("HOST", "DISK", "OBJECT")}
        constants |= {f"{name}_CAP": host_bytes if name == "HOST" else store_bytes for name in chosen}
        self.ledger = Ledger(tables, geometry.groups, constants, observer)
        self.book = Book(self.ledger, geometry, self.caps, device, poison)
        self.evictor = Evictor(self.book, geometry.policy)
        self.writer = Writer(self.book, self.evictor)
        self.handoffs = Handoffs(self.book, self.evictor)
        self.reshape = Reshape(self.book, self.handoffs)
        finder = Finder([g.recovery for g in geometry.groups], dict(ahead or {}), spec)
        self.hits = Hits(self.book, self.evictor, finder, replay)
        self.requests = Requests(self.book, dict(ahead or {}))
        self.reader_abi = [(abi or {}).get(g.name, self.book.abi[g.index]) for g in geometry.groups]
        self.unserved = unserved(geometry.groups, torch.device(device).type)
        self.pipelines = Pipelines(io_slots + 1, 1)
        self.tiers = Tiers(self.book, self.evictor, self.pipelines, chosen, most_waiting)
        self.prefetcher = Prefetcher(self.hits, self.tiers)
        if chosen:
            self.evictor.before = self.tiers.write_first
        self.reopen()

    # -- a request -----------------------------------------------------------------------------------------------------
    def match(self, tokens: Any, *, need_until: int = 0, salt: bytes = b"") -> Hit:
        """Begins a request: the longest hit of its prompt (token ids, 1-D) on the device, as a first signal.

        ``need_until``: the time until which it expects to read.  ``salt`` tells prefixes apart that may not be shared.
        NotAdmitted, before anything is allocated, for a malformed or over-long prompt, one that would not fit an empty
        pool, and a combination of layouts that no kernel serves.
        """
        prompt = as_tokens(tokens, self.max_tokens)
        if not isinstance(need_until, int) or not isinstance(salt, bytes):
            raise NotAdmitted("HKV-S1-012", "need_until is an int and salt bytes", got=type(need_until).__name__)
        keys = self.keys(prompt, salt)
        request = self.requests.new(len(prompt), keys, need_until, self.unserved is None, self.reader_abi)
        try:
            return self.hits.match(request, lambda plan: self.admit(len(prompt), plan))
        except (NotAdmitted, Refused) as error:
            self.ledger.step(request.records, "reject")
            self.requests.drain(request)
            if isinstance(error, Refused) and self.unserved is not None:
                raise NotAdmitted("HKV-L2-002", f"{self.unserved}; refused by '{error.guard.text}'") from error
            raise

    def keys(self, prompt: Tokens, salt: bytes) -> list[bytes]:
        """One key per whole grid unit of a prompt, for segments in the layouts that this reader expects."""
        return self.book.index.keys(prompt, salt + repr(self.reader_abi).encode())

    def admit(self, length: int, plan: RecoveryHit) -> None:
        """The gate: NotAdmitted if the request would not fit even if nothing else were there."""
        gate(self.geometry, self.caps, self.device_bytes - self.reserve, length, plan.r, plan.frontier)

    def pin(self, hit: Hit) -> HitLease:
        """Holds the candidates; with a shorter hit, or none, where one is gone by now."""
        return self.hits.pin(hit)

    def validate(self, lease: HitLease) -> tuple[Verdict, Verdict, Verdict, Verdict]:
        """Four named verdicts, in order; the first refusal says which row, guard and values, the rest is not asked."""
        one, two, three, four = self.hits.validate(lease)
        return one, two, three, four

    def read(self, lease: HitLease, state_data_ptrs: Sequence[StatePointer] | None = None) -> Sequence[StatePointer]:
        """Presents the lease's descriptors and begins to read; Refused unless every layer has accepted."""
        return self.hits.read(lease, state_data_ptrs)

    def retry(self, lease: HitLease) -> HitLease:
        """After a refusal: lets the hit go and pins the longest shorter one, or none."""
        return self.hits.retry(lease)

    def release(self, lease: HitLease) -> None:
        """Lets a hit go that is not being read; the request computes everything."""
        self.hits.release(lease)

    def finish(self, request: Request) -> None:
        """The request is complete: what it read is released, what it wrote stays cached and is spilled if so asked."""
        self.requests.finish(request)
        if self.tiers.media:
            for segment, generation in request.wrote:
                spills = self.geometry.policy.kinds[segment.kind].spill and segment.stored is None
                if spills and segment.key is not None and segment.generation == generation:
                    self.tiers.spill([segment])

    def abort(self, request: Request) -> None:
        """Ends a request at any stage; copies that run are waited for."""
        self.requests.drain(request)

    # -- writing -------------------------------------------------------------------------------------------------------
    def allocate(
        self,
        token_range: tuple[int, int],
        kind: str,
        *,
        request: Request,
        group: str | None = None,
        until: int = FOREVER,
    ) -> CacheSegment:
        """Memory for the tokens [lo, hi) of the model's group of this kind, to be written by ``request``.

        ``group`` names the group where the model has several of the kind; ``until``: when the eviction schedule gives
        the segment up.  Refused with the guard and its values where a cap is reached and nothing can make way.
        """
        fitting = [g for g in self.geometry.groups if g.kind == kind and group in (None, g.name)]
        if len(fitting) != 1:
            named = ", ".join(g.name for g in fitting) or "none"
            raise InputError(f"allocate:kind: {self.geometry.model.name} has these groups of {kind!r}: {named}")
        hi = token_range[1]
        on_grid = fitting[0].extent(hi) == tuple(token_range) and hi % self.geometry.unit == 0
        at = hi // self.geometry.unit - 1
        key = request.keys[at] if on_grid and 0 <= at < len(request.keys) else None
        return self.writer.allocate(token_range, fitting[0], request, until, key)

    def append(self, segment: CacheSegment, count: int, *, request: Request, rows: Tensor | None = None) -> None:
        """``count`` tokens more at the segment's end; ``rows``: uint8 [layers, rows, bytes of one entry]."""
        self.writer.append(segment, request, count, rows)

    def commit(self, segment: CacheSegment, *, request: Request) -> None:
        """The segment is complete: it can be found, and its writer keeps it until it finishes."""
        self.writer.commit(segment, request)

    def confirm(self, request: Request, tokens: Any, *, salt: bytes = b"") -> None:
        """The request's tokens so far, beyond its prompt: they are no drafts, and what they end can be found.

        ``salt``: that of the match.
        """
        known = as_tokens(tokens, self.max_tokens)
        if len(known) > request.accepted:
            self.ledger.step(request.records, "confirm", lambda lane: {"to": len(known)})
            request.keys.extend(self.keys(known, salt)[len(request.keys) :])

    def extend(self, request: Request, upto: int, fill: Fill | None = None) -> list[CacheSegment]:
        """Computes on to ``upto``, grid unit by grid unit: every group of a unit is written and committed, or none.

        ``fill`` gives the rows to store.  Refused where memory cannot be had for a unit; those before it are written,
        and ``request.position`` says how far it came.
        """
        return self.writer.extend(request, upto, fill)

    def rows(self, segment: CacheSegment) -> Tensor:
        """uint8 [layers, rows, bytes of one entry]: what a segment holds."""
        count = segment.group.rows(*segment.token_range)
        return self.book.read_rows(segment, 0, count)

    # -- segments ------------------------------------------------------------------------------------------------------
    def transition(self, segment: CacheSegment, row: str, *, request: Request | None = None, **inputs: int) -> None:
        """Fires one row of a segment, or of a request's lease on it; Refused changes nothing."""
        if request is None:
            self.book.fire(segment, row, **inputs)
            return
        leases = (*request.found, *request.hits, *request.writing, *request.kept)
        lease = next((one for one in leases if one.segment is segment), None)
        if lease is None:
            raise InputError(f"transition:request: request {request.number} has no lease on {segment!r}")
        self.book.fire_lease(lease, row, **inputs)

    def deallocate(self, segment: CacheSegment) -> None:
        """Marks, tests again and frees; Refused while somebody holds it.

        The mark is taken back where it is pinned.  Where only a step in flight may still read it, it stays marked: no
        hit reads it from now on, and it goes when that step completes.
        """
        self.book.fire(segment, "retire")
        refused = self.evictor.finish(segment)
        if refused is not None:
            raise refused

    def dispatch(self, lease: HitLease) -> list[Lease]:
        """A step that reads a hit is handed to the device; pass what this gives to ``complete``.

        Refused, with nothing dispatched, where one segment takes no further step.
        """
        return self.hits.dispatch(lease)

    def complete(self, leases: Sequence[Lease]) -> None:
        """The step is done, also when its request is gone by now."""
        for lease in leases:
            self.book.complete(lease)
        self.evictor.sweep()

    def segments(self) -> list[CacheSegment]:
        """Every segment that holds memory."""
        with self.ledger.lock:
            return [segment for segment in self.book.segments if segment.slots is not None]

    # -- tiers ---------------------------------------------------------------------------------------------------------
    def spill(self, *segments: CacheSegment) -> "Future[StoredObject | None]":
        """Writes one durable copy of neighbouring segments of one group; its result is None where it failed."""
        if not segments or len({segment.group.index for segment in segments}) != 1:
            raise InputError("spill:segments: expected segments of one group")
        return self.tiers.spill(segments)

    def prefetch(self, tokens: Any, *, need_until: int = 0, salt: bytes = b"") -> "list[Future[bool]]":
        """Asks for the durable copies that a longer hit of this prompt needs, in the order of the policy's priority.

        Asynchronous and bounded: what does not fit the queue is not asked for.  Wait for the futures, then match.
        """
        prompt = as_tokens(tokens, self.max_tokens)
        return self.prefetcher.ask(self.keys(prompt, salt), len(prompt), need_until)

    # -- the end -------------------------------------------------------------------------------------------------------
    def drain(self) -> None:
        """Ends every request and frees every segment.  Durable copies stay.

        Waits for copies and for steps in flight, which outlive their request and still read its segments: whoever
        dispatched them completes them, before or from another thread.
        """
        for request in list(self.requests.running.values()):
            self.abort(request)
        with self.ledger.changed:
            while self.tiers.loads or self.tiers.spills or self.evictor.held():
                self.ledger.changed.wait(0.05)
        self.evictor.empty()
        self.evictor.sweep()

    def close(self) -> None:
        """Waits for what runs and ends the pipelines; memory goes with the object."""
        self.pipelines.close()

    def __enter__(self) -> "HeterogeneousAllocator":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
