"""A short service on the small decoder: requests that share prefixes, too little memory, and a proof per request.

Every request is run twice: in the reference allocator, reusing what is there, and from scratch.  The report says what
was matched, what the four layers of the validation said, which rows were read, who limited it, what came back from a
tier, and by how much the logits differ.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import torch

from hybridkv_ref.allocator import HeterogeneousAllocator
from hybridkv_ref.allocator.lockstep import keep_all
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_allocator import AllocatedSession, geometry_of, pool_bytes, prefetch
from hybridkv_ref.decoder_geometry import Sizes
from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One request.  Positions and lengths are tokens; ``reads``: rows [lo, hi) per group, by token position.

    ``verdicts``: of the four layers of the validation; ``refusals``: of longer hits that were tried before.
    ``restored``: durable copies brought back for it.  ``difference``: the largest of any logit from the run without
    cache; ``equal``: none differs in any bit.
    """

    number: int
    prompt: int
    generated: int
    matched: int
    start: int
    frontier: int
    verdicts: tuple[str, ...]
    refusals: tuple[str, ...]
    reads: tuple[str, ...]
    limiting: tuple[str, ...]
    restored: int
    difference: float
    equal: bool


class Conversation:
    """Texts that share prefixes: a few system prompts, each with conversations that grow by turns."""

    def __init__(self, seed: int, vocab: int, reach: int) -> None:
        self._random, self._vocab, self._reach = random.Random(seed), vocab, reach
        self._open: list[list[int]] = [self._tokens(reach // 4) for _ in range(2)]
        self._systems = len(self._open)

    def _tokens(self, count: int) -> list[int]:
        return [self._random.randrange(self._vocab) for _ in range(count)]

    def next_prompt(self) -> list[int]:
        """The next prompt: a conversation goes on, or a new one begins after a system prompt."""
        number = self._random.randrange(len(self._open))
        prompt = [*self._open[number], *self._tokens(self._random.randint(3, 9))]
        if len(prompt) > self._reach * 3 // 4:
            prompt = [*self._open[number % self._systems], *self._tokens(4)]
        self._open.append(prompt)
        return prompt


def run(requests: int, capacity: int, seed: int, spec: Path = SPEC_DIR) -> Iterator[Served]:
    """Serves ``requests`` requests in memory for ``capacity`` requests of full length, by the tables of ``spec``.

    What has to make way goes to as much host memory, and from there to files that are removed at the end.  InputError
    for fewer than 1 of either.
    """
    for name, value in (("requests", requests), ("capacity", capacity)):
        if value < 1:
            raise InputError(f"demo:{name}: expected at least 1, got {value}")
    return _in_tiers(Decoder(Sizes(), seed), requests, capacity, seed, spec)


def _in_tiers(decoder: Decoder, requests: int, capacity: int, seed: int, spec: Path) -> Iterator[Served]:
    geometry = geometry_of(decoder, keep_all(), spec)
    room = pool_bytes(geometry, decoder.sizes.reach, capacity)
    with (
        TemporaryDirectory() as folder,
        HeterogeneousAllocator(geometry, room, host_bytes=room, store=folder, store_bytes=1 << 30, spec=spec) as pools,
    ):
        yield from serve(decoder, pools, requests, seed)


def describe(served: Served) -> str:
    """What happened to one request, in a few lines."""
    computed = served.prompt + served.generated - served.start
    lines = [
        f"request {served.number}: {served.prompt} tokens of prompt, {served.generated} generated",
        f"  hit       {served.matched} matched, {served.start} reused, {computed} computed",
        *(f"  refused   {refusal}" for refusal in served.refusals),
        f"  validate  {', '.join(served.verdicts) or 'nothing to validate'}",
        f"  plan      read {', '.join(served.reads) or 'nothing'}",
    ]
    if served.limiting:
        lines.append(f"  limit     {', '.join(served.limiting)}")
    if served.restored:
        lines.append(f"  restored  {served.restored} segments from host memory or files")
    verdict = "equal, bit for bit" if served.equal else f"DIFFER by {served.difference:.3g}"
    return "\n".join([*lines, f"  logits    against a run without cache: {verdict}"])


def serve(
    decoder: Decoder, allocator: HeterogeneousAllocator, requests: int, seed: int, generate: int = 5
) -> Iterator[Served]:
    """Serves requests one after the other; yields what happened."""
    sizes = decoder.sizes
    texts, chunks = Conversation(seed, sizes.vocab, sizes.reach), random.Random(seed)
    for number in range(1, requests + 1):
        prompt = texts.next_prompt()
        restored = prefetch(decoder, allocator, prompt)
        session = AllocatedSession(decoder, allocator, prompt)
        logits = []
        while session.position < len(prompt):
            logits.append(session.prefill(min(chunks.randint(1, sizes.max_step), len(prompt) - session.position)))
        for _ in range(generate):
            logits.append(session.compute([int(logits[-1][-1].argmax())]))
            session.commit(1)
        session.finish()
        found, hit = torch.cat(logits), session.hit
        expected = decoder.from_scratch(session.tokens[: session.position])[0][hit.r :]
        yield Served(
            number=number,
            prompt=len(prompt),
            generated=generate,
            matched=session.lease.matched,
            start=hit.r,
            frontier=hit.frontier,
            verdicts=tuple(map(str, session.lease.verdicts)),
            refusals=tuple(session.refusals),
            reads=tuple(f"{read.group} [{read.lo}, {read.hi})" for read in hit.reads),
            limiting=hit.limiting,
            restored=restored,
            difference=(found - expected).abs().max().item(),
            equal=torch.equal(found, expected),
        )
