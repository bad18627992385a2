"""How long the allocator's bookkeeping takes: `python tests/bench/bench_allocator.py`; no kernels run.

1. Four-layer validation of a pinned hit of 50 segments that hold 1,000 blocks per layer.
2. Matching, and serving requests of 4,096 tokens with shared prefixes, in DeepSeek-V4-Flash's geometry.
Each line says segments, blocks and rows fired.
"""

import statistics
import time

import msgspec
import numpy as np

from hybridkv_ref.allocator import Geometry, HeterogeneousAllocator, build, demand, size_caps
from hybridkv_ref.models import Group, Model, load_model


def thin(geometry: Geometry) -> Geometry:
    """The same groups with one layer each: the books are kept per segment, and memory stays small."""
    groups = tuple(msgspec.structs.replace(g, layers=1, layer_ids=None) for g in geometry.model.groups)
    return build(msgspec.structs.replace(geometry.model, groups=groups), geometry.unit)


def validation() -> None:
    """A hit of 50 segments of 20 blocks each."""
    group = Group(name="full", kind="compressed_kv", layers=1, ratio=1, entry_bytes={"bf16": 64}, block_tokens=16)
    model = Model(
        name="full", source="made up", confidence="made up", note="", alignment=16, groups=(group,)
    )  # fmt: skip
    geometry = build(model, 320)
    tokens = np.arange(50 * 320 + 1)
    caps = {kind: 2 * amount for kind, amount in demand(geometry, len(tokens)).items()}
    allocator = HeterogeneousAllocator(geometry, sum(caps.values()), kind_bytes=caps)
    request = allocator.match(tokens).request
    for upto in (*range(320, len(tokens), 320), len(tokens)):
        allocator.extend(request, upto)
    allocator.finish(request)
    times = []
    for _ in range(200):
        lease = allocator.pin(allocator.match(tokens))
        fired = allocator.ledger.fired
        begin = time.perf_counter()
        verdicts = allocator.validate(lease)
        times.append((time.perf_counter() - begin) * 1e3)
        fired = allocator.ledger.fired - fired
        if not verdicts[-1].accepted:
            raise SystemExit(f"refused: {verdicts}")
        blocks = sum(pointer.offset.size for pointer in lease.state_data_ptrs)
        count = len(lease.segments)
        allocator.abort(lease.request)
    print(
        f"validation: {count} segments, {blocks} blocks, {fired} rows: {statistics.median(times):.3f} ms median, "
        f"{statistics.quantiles(times, n=20)[-1]:.3f} ms 95th percentile of {len(times)}"
    )
    allocator.close()


def serving(unit: int, requests: int = 200) -> None:
    """Prompts of 4,096 tokens that share a prefix of any length with one of 8 families."""
    geometry = thin(build(load_model("deepseek-v4-flash"), unit))
    caps = {kind: 40 * amount for kind, amount in size_caps(geometry, 4096).items()}
    allocator = HeterogeneousAllocator(geometry, sum(caps.values()), kind_bytes=caps, poison=False)
    rng = np.random.default_rng(0)
    families = rng.integers(0, 50_000, (8, 4096))
    prompts = []
    for _ in range(requests):
        tokens = families[rng.integers(0, 8)].copy()
        cut = int(rng.integers(0, 4096))
        tokens[cut:] = rng.integers(0, 50_000, 4096 - cut)
        prompts.append(tokens)
    fired, saved, begin = allocator.ledger.fired, 0, time.perf_counter()
    for tokens in prompts:
        lease = allocator.pin(allocator.match(tokens))
        if lease.tokens and allocator.validate(lease)[-1].accepted:
            allocator.read(lease)
            saved += lease.tokens
        at = lease.request.position
        while at < len(tokens):
            at = min(at + geometry.unit, len(tokens))
            allocator.extend(lease.request, at)
        allocator.finish(lease.request)
    wall = time.perf_counter() - begin
    rows = allocator.ledger.fired - fired
    print(
        f"serving, segments of {unit} tokens: {requests} requests of 4,096 tokens, "
        f"{saved / (requests * 4096):.1%} saved, {rows:,} rows, {len(allocator.segments())} segments at the end: "
        f"{requests / wall:.0f} requests/s, {wall / rows * 1e6:.1f} us per row"
    )
    allocator.close()


if __name__ == "__main__":
    validation()
    for tokens in (256, 512, 1024):
        serving(tokens)
