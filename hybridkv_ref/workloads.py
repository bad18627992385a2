"""Made-up request streams, so that a cache can be simulated without a recorded trace.

A workload is a stream of *sessions*. Each session sends a shared system prompt and an opening, then, turn by turn, all
that was said before, the last output included, and a message more. The three workloads differ in their figures only:

============  ===================================================  ===============================================
workload      what it stands for                                   where its figures come from
============  ===================================================  ===============================================
conversation  many users of a few assistants: short messages and   made up
              time to read between turns
agent         a long prompt of tools, then about 15 calls of the   medians of 16 kv-cache-tester conversations:
              model, 16 s apart, each with a tool's result         prompt of tools, calls, gap, result and output;
                                                                   opening, spread and rate of sessions made up
retrieval     one question over documents that nobody else asks    made up
              about: little to reuse but the system prompt
mixed         all three at once                                    made up
============  ===================================================  ===============================================

The same name, number and seed give the same requests.
"""

import difflib
import heapq
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.request_traces import Request

BLOCK_TOKENS = 64
"""Tokens per block id, as in kv-cache-tester traces."""

MAX_INPUT_TOKENS = 1 << 20
"""Longest input, 1 Mi: what the acceptance figures of DeepSeek-V4 are given for. A session that would pass it ends."""


class Profile(msgspec.Struct, frozen=True):
    """Figures of one workload: lengths in tokens are medians (log-normal), times are means in ms (exponential)."""

    system_prompts: int
    system_tokens: int
    opening_tokens: int
    message_tokens: int
    output_tokens: int
    turns: float  # mean (geometric)
    spread: float  # sigma of the logarithm of each length
    session_gap_ms: float
    turn_gap_ms: float


_PROFILES = {
    "conversation": Profile(
        system_prompts=4,
        system_tokens=1024,
        opening_tokens=200,
        message_tokens=100,
        output_tokens=300,
        turns=5,
        spread=1.0,
        session_gap_ms=500,
        turn_gap_ms=30_000,
    ),
    "agent": Profile(
        system_prompts=1,
        system_tokens=15_168,
        opening_tokens=4_000,
        message_tokens=261,
        output_tokens=231,
        turns=15,
        spread=1.0,
        session_gap_ms=5_000,
        turn_gap_ms=16_000,
    ),
    "retrieval": Profile(
        system_prompts=1,
        system_tokens=512,
        opening_tokens=6_000,
        message_tokens=100,
        output_tokens=200,
        turns=1,
        spread=0.5,
        session_gap_ms=1_000,
        turn_gap_ms=30_000,
    ),
}

WORKLOADS = (*_PROFILES, "mixed")
"""Names that `generate` knows."""

DEFAULT_WORKLOAD = "mixed"
"""The workload where none is named."""


def generate(name: str = DEFAULT_WORKLOAD, requests: int = 1000, seed: int = 0) -> Iterator[Request]:
    """``requests`` requests of the workload ``name``, in the order of arrival, block ids of `BLOCK_TOKENS` tokens.

    Sessions still open at the end are cut. InputError for an unknown name or fewer than 1 request.
    """
    if name not in WORKLOADS:
        close = difflib.get_close_matches(name, WORKLOADS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(WORKLOADS)}"
        raise InputError(f"workload:name: no workload named {name!r} ({hint})")
    if requests < 1:
        raise InputError(f"workload:requests: expected at least 1, got {requests}")
    ids = itertools.count()
    # One generator of random numbers per workload, so that the sessions of one do not depend on the others.
    streams = [
        _stream(profile, random.Random(f"{part}-{seed}"), ids)
        for part, profile in _PROFILES.items()
        if name in (part, "mixed")
    ]
    return itertools.islice(heapq.merge(*streams, key=lambda request: request.arrival_ms), requests)


@dataclass
class _Session:
    """A conversation so far: its tokens, the ids of the blocks that they fill, and the turns left."""

    block_ids: list[int]
    tokens: int
    turns: int


def _stream(profile: Profile, rng: random.Random, ids: Iterator[int]) -> Iterator[Request]:
    """Requests of sessions that start at random for ever."""
    system_blocks = profile.system_tokens // BLOCK_TOKENS
    system_ids = [list(itertools.islice(ids, system_blocks)) for _ in range(profile.system_prompts)]

    def length(median: int) -> int:
        return max(1, round(rng.lognormvariate(math.log(median), profile.spread)))

    def start() -> _Session:
        turns = 1
        while rng.random() < 1 - 1 / profile.turns:
            turns += 1
        system = rng.choice(system_ids)
        tokens = len(system) * BLOCK_TOKENS + length(profile.opening_tokens)
        return _Session(system.copy(), min(tokens, MAX_INPUT_TOKENS), turns)

    # (time, number, session): the number keeps sessions out of the comparison when two times are equal.
    waiting: list[tuple[float, int, _Session]] = []
    next_start = 0.0
    for number in itertools.count():
        if not waiting or next_start <= waiting[0][0]:
            session = start()
            arrival = next_start
            next_start += rng.expovariate(1 / profile.session_gap_ms)
        else:
            arrival, _, session = heapq.heappop(waiting)
        session.block_ids += itertools.islice(ids, session.tokens // BLOCK_TOKENS - len(session.block_ids))
        output = length(profile.output_tokens)
        yield Request(arrival, session.tokens, output, BLOCK_TOKENS, tuple(session.block_ids))
        session.turns -= 1
        session.tokens += output + length(profile.message_tokens)
        if session.turns > 0 and session.tokens <= MAX_INPUT_TOKENS:
            heapq.heappush(waiting, (arrival + rng.expovariate(1 / profile.turn_gap_ms), number, session))
