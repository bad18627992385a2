"""The allocator beside vLLM's `KVCacheManager`: requests per second of processor time on the conversation trace.

    HYBRIDKV_VLLM_PYTHON=ENGINE_PYTHON python tests/bench/bench_managers.py [REQUESTS] [MODEL] [SEGMENT_TOKENS]

Both serve the same prompts one after the other, in processes of their own that take turns: look up, one prefill, end.
No kernel runs, nothing is ever evicted, so that both save the same tokens; groups and block sizes are the model's, with
one layer each for the allocator, whose books are kept per segment: of one grid unit, or of as many tokens as the third
argument says, on whose multiples its hits then end. Each is timed with its events on and off. Prints the median of the
rounds, the ratio to the engine in the same round, and per request blocks, segments and rows fired.
"""

import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("HYBRIDKV_DATA") or CHECKOUT.parent / "shared" / "data")
TRACE = DATA / "traces" / "mooncake_conversation_trace.jsonl"
ROUNDS = 3

sys.path.insert(0, str(CHECKOUT))

from traced import traced  # noqa: E402

from hybridkv_ref.models import load_model  # noqa: E402


def prompts(count: int) -> Iterable[list[int]]:
    """Token ids of the trace's first requests."""
    return (tokens for tokens, _ in traced(TRACE, count))


def ours(count: int, model: str, events: bool, segment: int) -> dict[str, float]:
    """The reference allocator."""
    import numpy as np
    from bench_allocator import thin

    from hybridkv_ref.allocator import HeterogeneousAllocator, build, demand
    from hybridkv_ref.conformance.reference_events import AllocatorEvents
    from hybridkv_ref.loader import load_tables

    geometry, tables = thin(build(load_model(model), segment or None)), load_tables()
    asked = [np.array(tokens, dtype=np.int64) for tokens in prompts(count)]
    caps: dict[str, int] = {}
    for tokens in asked:
        for kind, amount in demand(geometry, len(tokens)).items():
            caps[kind] = caps.get(kind, 0) + amount
    # Every window and state of a prompt stays too, which the demand of a running request does not count.
    caps = {kind: amount + sum(map(len, asked)) // geometry.unit * 2 * max(
        g.block_bytes * g.blocks(*g.extent(geometry.unit)) for g in geometry.groups if g.kind == kind)
        for kind, amount in caps.items()}  # fmt: skip
    told = AllocatorEvents(geometry, tables) if events else None
    cache = HeterogeneousAllocator(
        geometry, sum(caps.values()), kind_bytes=caps, tables=tables, poison=False, observer=told
    )
    if told is not None:
        told.allocator = cache
        told.watch_index()
    saved = tokens_in = told_events = 0
    gc.collect()
    gc.freeze()  # as the engine does once it has started
    begun = time.process_time()
    for tokens in asked:
        lease = cache.pin(cache.match(tokens))
        if lease.tokens and cache.validate(lease)[-1].accepted:
            cache.read(lease)
        saved, tokens_in, at = saved + lease.tokens, tokens_in + len(tokens), lease.request.position
        if at < len(tokens):
            cache.extend(lease.request, len(tokens))
        cache.finish(lease.request)
        if told is not None:
            told_events += sum(len(getattr(event, "blocks", ())) for event in told.drain())
    seconds = time.process_time() - begun
    blocks, segments = sum(s.slots.shape[1] for s in cache.segments() if s.slots is not None), len(cache.segments())
    rows = cache.ledger.fired
    cache.close()
    return {"rate": count / seconds, "saved": saved, "tokens": tokens_in, "blocks": blocks / count,
            "segments": segments / count, "rows": rows / count, "events": told_events / count}  # fmt: skip


def engine(count: int, model: str, events: bool, segment: int) -> dict[str, float]:
    """vLLM's manager, in the engine's environment."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request, RequestStatus

    from hybridkv_ref.adapters.vllm_build import build

    shape, asked = load_model(model), list(prompts(count))
    tokens_in = sum(map(len, asked))
    blocks = 1000 + sum(2 * tokens_in // (g.block_tokens or shape.alignment) for g in shape.groups)
    manager, header = build(shape, blocks, 1 << 20, enable_kv_cache_events=events)
    hasher = get_request_block_hasher(header.unit, sha256)
    requests = [
        Request(f"r{i}", tokens, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        for i, tokens in enumerate(asked)
    ]
    saved = used = told = 0
    gc.collect()
    gc.freeze()  # as the engine does once it has started
    begun = time.process_time()
    for request in requests:
        manager.new_step_starts()
        found, hit, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - hit, hit, found) is None:
            raise SystemExit("the pool is too small: something would have been evicted")
        saved += hit
        used += sum(map(len, manager.get_block_ids(request.request_id)))
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.FINISHED_STOPPED
        manager.free(request)
        told += sum(len(getattr(e, "block_hashes", ())) for e in manager.take_events())
    seconds = time.process_time() - begun
    return {"rate": count / seconds, "saved": saved, "tokens": tokens_in, "blocks": used / count,
            "segments": 0, "rows": 0, "events": told / count}  # fmt: skip


def lookup(count: int, model: str, events: bool, segment: int) -> dict[str, float]:
    """vLLM's lookup of so many tokens that are all cached, in the engine's environment; events do not matter to it."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher
    from vllm.v1.request import Request, RequestStatus

    from hybridkv_ref.adapters.vllm_build import build

    shape = load_model(model)
    blocks = 1000 + sum(2 * count // (g.block_tokens or shape.alignment) for g in shape.groups)
    manager, header = build(shape, blocks, 2 * count, enable_kv_cache_events=events)
    hasher = get_request_block_hasher(header.unit, sha256)
    first, again = (
        Request(name, list(range(count + 1)), SamplingParams(max_tokens=1), None, block_hasher=hasher) for name in "ab"
    )
    manager.new_step_starts()
    if manager.allocate_slots(first, count + 1) is None:
        raise SystemExit("the pool is too small")
    first.num_computed_tokens, first.status = first.num_tokens, RequestStatus.FINISHED_STOPPED
    manager.free(first)
    times = []
    for _ in range(10):
        manager.new_step_starts()
        begun = time.perf_counter()
        hit = manager.get_computed_blocks(again)[1]
        times.append((time.perf_counter() - begun) * 1e3)
    return {"hit": hit, "ms": statistics.median(times)}


SIDES: dict[str, Any] = {"allocator": ours, "vLLM": engine}
LONG = 1_048_576


def run(python: str, side: str, count: int, model: str, events: bool, segment: int) -> dict[str, float]:
    """One measurement in a process of its own."""
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
    command = [python, str(Path(__file__).resolve()), "--side", side, str(count), model, str(int(events)), str(segment)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{side}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    """Prints one line per side and setting."""
    if sys.argv[1:2] == ["--side"]:
        side, wanted, name, told, tokens = sys.argv[2:]
        print(json.dumps((SIDES | {"lookup": lookup})[side](int(wanted), name, told == "1", int(tokens))))
        return
    python = os.environ.get("HYBRIDKV_VLLM_PYTHON")
    if python is None:
        raise SystemExit("HYBRIDKV_VLLM_PYTHON names no interpreter with vLLM")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    model = sys.argv[2] if len(sys.argv) > 2 else "deepseek-v4-flash"
    segment = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    for events in (True, False):
        rounds = [
            {
                side: run(python if side == "vLLM" else sys.executable, side, count, model, events, segment)
                for side in SIDES
            }
            for _ in range(ROUNDS)
        ]
        for side in SIDES:
            rate = statistics.median(one[side]["rate"] for one in rounds)
            ratio = statistics.median(one[side]["rate"] / one["vLLM"]["rate"] for one in rounds)
            first = rounds[0][side]
            print(
                f"{model}, events {'on' if events else 'off'}, {side}: {rate:.0f} requests/s, {ratio:.2f} of vLLM; "
                f"{count} requests, {first['saved'] / first['tokens']:.2%} saved, per request {first['blocks']:.0f} "
                f"blocks, {first['segments']:.0f} segments, {first['rows']:.0f} rows, {first['events']:.0f} events"
            )
    long = run(python, "lookup", LONG, model, False, 0)
    print(f"{model}: vLLM's get_computed_blocks of {long['hit']:,.0f} cached tokens: {long['ms']:.2f} ms median of 10;")
    print("`bench_longest_hit.py` times the same from this project's keys")


if __name__ == "__main__":
    main()
