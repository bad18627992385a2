"""What watching vLLM's manager costs: requests per second of CPU time bare, watched, and judged in lock step.

    HYBRIDKV_NATIVE=1 PYTHONPATH=CHECKOUT ENGINE_PYTHON tests/bench/bench_vllm.py [MODEL ...] [--trace FILE]

Runs in the engine's own environment (HF_HUB_OFFLINE=1, VLLM_TARGET_DEVICE=cpu). The three forms take turns in one
process, on the same requests and with events on in each: prompts of 4,096 tokens, half of them shared, and 16 tokens of
decoding; or those of a public trace, with all the tokens that it says were decoded. As many requests are served untimed
before. The table gives the median of the rounds and the ratio to the bare rate of the same round, with blocks of the
pool and rows fired per request; and says whether the oracle was compiled (``hybridkv native``).
"""

import argparse
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forms import FORMS, Round, compared
from rich.console import Console
from rich.table import Table
from traced import traced
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from hybridkv_ref import Oracle, native
from hybridkv_ref.adapters.vllm import Attached
from hybridkv_ref.adapters.vllm_build import build
from hybridkv_ref.events import Event
from hybridkv_ref.models import load_model

SHARED, STEMS, DECODE, ROUNDS = 2048, 8, 16, 5


def prompts(count: int) -> list[tuple[list[int], int]]:
    """Half of each prompt is one of a few stems; the rest is its own. Each with the tokens that are decoded."""
    stems = [[t + i * SHARED for t in range(SHARED)] for i in range(STEMS)]
    return [(stems[i % STEMS] + [10**6 + i * SHARED + t for t in range(SHARED)], DECODE) for i in range(count)]


def serve(manager: Any, requests: list[Any]) -> float:
    """CPU seconds of lookups, one prefill, some decoding and the frees."""
    begun = time.process_time()
    for request in requests:
        manager.new_step_starts()
        blocks, used, _ = manager.get_computed_blocks(request)
        if manager.allocate_slots(request, request.num_tokens - used, used, blocks) is None:
            raise SystemExit(f"{request.request_id}: the pool is too small")
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
        for token in range(request.max_tokens):
            request.append_output_token_ids(token)
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        request.status = RequestStatus.FINISHED_STOPPED
        manager.free(request)
        manager.take_events()
    return time.process_time() - begun


def round_of(model: str, form: str, asked: list[tuple[list[int], int]], blocks: int) -> Round:
    """Requests per second, events and rows of one form, for the second half of what is asked."""
    count = len(asked) // 2
    manager, header = build(load_model(model), blocks, max(len(tokens) + decode for tokens, decode in asked) + 1)
    oracle = Oracle(header, "strict")
    sinks: dict[str, Callable[[Event], object]] = {"watched": lambda event: None, "judged": oracle.feed}
    if form in sinks:
        Attached(manager, header, sinks[form])
    hasher = get_request_block_hasher(header.unit, sha256)
    requests = [
        Request(f"r{i}", tokens, SamplingParams(max_tokens=decode), None, block_hasher=hasher)
        for i, (tokens, decode) in enumerate(asked)
    ]
    # Half of the requests fill the pool, so that the others find it as in an engine that has run for a while. What
    # lives by then is frozen, as the engine does when it starts.
    serve(manager, requests[:count])
    gc.collect()
    gc.freeze()
    before = oracle.seen, sum(row.count for row in oracle.state.rows)
    rate = count / serve(manager, requests[count:])
    gc.unfreeze()
    return rate, oracle.seen - before[0], sum(row.count for row in oracle.state.rows) - before[1]


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["gpt-oss-20b", "deepseek-v4-flash"])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=8000)
    parser.add_argument("--trace", type=Path, metavar="FILE")
    args = parser.parse_args()
    asked = list(traced(args.trace, 2 * args.requests)) if args.trace else prompts(2 * args.requests)
    table = Table(
        "model", "blocks", "form", "req/s", "of bare", "events/req", "rows/req", title=f"oracle {native.made()}"
    )
    for model in args.models:
        rounds = [[round_of(model, form, asked, args.blocks) for form in FORMS] for _ in range(ROUNDS)]
        for cells in compared(rounds, args.requests):
            table.add_row(model, str(args.blocks), *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
