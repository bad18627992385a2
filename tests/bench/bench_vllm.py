"""What watching vLLM's manager costs: requests per second of CPU time bare, watched, and judged in lock step.

    HF_HUB_OFFLINE=1 VLLM_TARGET_DEVICE=cpu PYTHONPATH=CHECKOUT ENGINE_PYTHON tests/bench/bench_vllm.py [MODEL ...]

Runs in the engine's own environment. The three forms take turns in one process, on the same requests and with events
on in each; the table gives the median of the rounds and the ratio to the bare rate of the same round, with blocks
of the pool and rows fired per request.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.table import Table
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.request import Request, RequestStatus

from hybridkv_ref import Oracle
from hybridkv_ref.adapters.vllm import Attached
from hybridkv_ref.adapters.vllm_build import build
from hybridkv_ref.events import Event
from hybridkv_ref.models import load_model

FORMS = ("bare", "watched", "judged")
PROMPT, SHARED, STEMS, DECODE, ROUNDS = 4096, 2048, 8, 16, 5


def prompts(count: int) -> list[list[int]]:
    """Half of each prompt is one of a few stems; the rest is its own."""
    return [[t + (i % STEMS) * SHARED for t in range(SHARED)] + [10**6 + i * SHARED + t for t in range(SHARED)]
            for i in range(count)]  # fmt: skip


def serve(manager: Any, requests: list[Any]) -> float:
    """CPU seconds of lookups, one prefill, some decoding and the frees."""
    begun = time.process_time()
    for request in requests:
        manager.new_step_starts()
        blocks, used, _ = manager.get_computed_blocks(request)
        manager.allocate_slots(request, request.num_tokens - used, used, blocks)
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
        for token in range(DECODE):
            request.append_output_token_ids(token)
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        request.status = RequestStatus.FINISHED_STOPPED
        manager.free(request)
        manager.take_events()
    return time.process_time() - begun


def round_of(model: str, form: str, count: int, blocks: int) -> tuple[float, int, int]:
    """Requests per second, events and rows of one form."""
    manager, header = build(load_model(model), blocks, 1 << 14)
    oracle, events = Oracle(header), 0

    def judge(event: Event) -> None:
        nonlocal events
        events += 1
        verdict = oracle.feed(event)
        if verdict.refusals:
            raise SystemExit(f"{model}: {verdict.refusals[0]}")

    sinks: dict[str, Callable[[Event], object]] = {"watched": lambda event: None, "judged": judge}
    if form in sinks:
        Attached(manager, header, sinks[form])
    hasher = get_request_block_hasher(header.unit, sha256)
    requests = [
        Request(f"r{i}", tokens, SamplingParams(max_tokens=DECODE), None, block_hasher=hasher)
        for i, tokens in enumerate(prompts(count))
    ]
    gc.collect()
    return count / serve(manager, requests), events, sum(row.count for row in oracle.state.rows)


def main() -> None:
    """Prints one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=["gpt-oss-20b", "deepseek-v4-flash"])
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--blocks", type=int, default=8000)
    args = parser.parse_args()
    table = Table("model", "blocks", "form", "req/s", "of bare", "events/req", "rows/req")
    for model in args.models:
        rounds = [[round_of(model, form, args.requests, args.blocks) for form in FORMS] for _ in range(ROUNDS)]
        for place, form in enumerate(FORMS):
            rate = statistics.median(r[place][0] for r in rounds)
            ratio = statistics.median(r[place][0] / r[0][0] for r in rounds)
            events, rows = rounds[0][place][1:]
            cells = (f"{rate:.0f}", f"{ratio:.2f}", f"{events / args.requests:.0f}", f"{rows / args.requests:.0f}")
            table.add_row(model, str(args.blocks), form, *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
