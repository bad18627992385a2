"""A trace of requests on real memory: ``hybridkv simulate --memory real``.

Each request is served one after the other by the allocator: durable copies are asked for, the longest hit is validated
and read, the rest is computed unit by unit (no kernel runs), and the request finishes.  Time is that of this machine.
"""

import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

import msgspec
import numpy as np

from hybridkv_ref.allocator.admission import NotAdmitted
from hybridkv_ref.allocator.allocator import HeterogeneousAllocator
from hybridkv_ref.allocator.geometry import build
from hybridkv_ref.allocator.index import Tokens
from hybridkv_ref.errors import InputError
from hybridkv_ref.machine import Refused
from hybridkv_ref.models import Model
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.request_traces import Request


class MemoryReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a trace did on real memory.  ``refused``: at the gate; ``cut_short``: memory ran out while computing."""

    model: str
    segment_tokens: int
    requests: int
    refused: int
    cut_short: int
    input_tokens: int
    saved_tokens: int
    rows: int
    seconds: float
    peak_bytes: int
    evictions: dict[str, int]
    tiers: dict[str, int]


def tokens_of(request: Request, number: int) -> Tokens:
    """A prompt that shares exactly the blocks that the trace says; without ids, one that shares nothing."""
    if not request.block_ids:
        return -np.arange(request.input_tokens, dtype=np.int64) - 1 - (number << 32)
    ids = np.array(request.block_ids, dtype=np.int64)
    whole = (ids[:, None] * request.block_tokens + np.arange(request.block_tokens)).reshape(-1)[: request.input_tokens]
    rest = -np.arange(request.input_tokens - len(whole), dtype=np.int64) - 1 - (number << 32)
    return np.concatenate([whole, rest])


def replay(
    requests: Iterable[Request],
    model: Model,
    gpu_memory: int,
    disk: int = 0,
    segment_tokens: int | None = None,
    spec: Path = SPEC_DIR,
) -> MemoryReport:
    """Serves the requests with arenas of ``gpu_memory`` bytes in this machine's memory and a store of ``disk`` bytes.

    InputError for an argument out of range, and what the trace or the spec raise.
    """
    if gpu_memory < 1 or disk < 0:
        raise InputError(
            f"simulate:gpu_memory: expected at least 1 byte and a disk of at least 0, got {gpu_memory}, {disk}"
        )
    geometry = build(model, segment_tokens, spec=spec)
    count = refused = cut = tokens_in = saved = peak = 0
    begin = time.perf_counter()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="hybridkv-")) if disk else None
        allocator = stack.enter_context(
            HeterogeneousAllocator(geometry, gpu_memory, poison=False, spec=spec, store=folder, store_bytes=disk)
        )
        for request in requests:
            prompt = tokens_of(request, count)
            count, tokens_in = count + 1, tokens_in + len(prompt)
            for load in allocator.prefetch(prompt) if disk else ():
                load.result()
            try:
                lease = allocator.pin(allocator.match(prompt))
            except NotAdmitted:
                refused += 1
                continue
            while lease.tokens and not allocator.validate(lease)[-1].accepted:
                lease = allocator.retry(lease)
            if lease.tokens:
                allocator.read(lease)
            saved += lease.tokens
            at = lease.request.position
            try:
                while at < len(prompt):
                    at = min(at // geometry.unit * geometry.unit + geometry.unit, len(prompt))
                    allocator.extend(lease.request, at)
                    peak = max(peak, allocator.ledger.pool.gpu_used)
            except Refused:
                cut += 1
                allocator.abort(lease.request)
            else:
                allocator.finish(lease.request)
        allocator.drain()
        rows, evicted, outcomes = (
            allocator.ledger.fired,
            dict(allocator.evictor.evicted),
            dict(allocator.tiers.outcomes),
        )
    return MemoryReport(
        model=model.name,
        segment_tokens=geometry.unit,
        requests=count,
        refused=refused,
        cut_short=cut,
        input_tokens=tokens_in,
        saved_tokens=saved,
        rows=rows,
        seconds=time.perf_counter() - begin,
        peak_bytes=peak,
        evictions=evicted,
        tiers=outcomes,
    )
