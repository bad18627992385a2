"""Prompts of a public trace for the benchmarks beside real engines."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from hybridkv_ref.request_traces import read_trace


def traced(path: Path, count: int) -> Iterator[tuple[list[int], int]]:
    """Token ids of the first requests, with the tokens that each decodes.

    Block ids of the trace stand for runs of tokens that nothing else has.
    """
    for request in itertools.islice(read_trace(path), count):
        width = request.block_tokens
        tokens = [block * width + at for block in request.block_ids for at in range(width)]
        yield tokens[: request.input_tokens], request.output_tokens
