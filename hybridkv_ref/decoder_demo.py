"""A short service on the small decoder: requests that share prefixes, too little memory, and a proof per request.

Every request is run twice: over the store, reusing what is there, and from scratch.  The report says what was matched,
what could be resumed, which rows were read, who limited it, and by how much the logits differ.
"""

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_geometry import Sizes
from hybridkv_ref.decoder_reuse import Planner, Want
from hybridkv_ref.decoder_session import Session
from hybridkv_ref.decoder_store import MemoryStore
from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import from_model


class Served(msgspec.Struct, frozen=True, kw_only=True):
    """One request.  Positions and lengths are tokens; ``reads``: rows [lo, hi) per group, by token position.

    ``restored``: objects brought back from the host for it.  ``difference``: the largest of any logit from the run
    without cache; ``equal``: none differs in any bit.
    """

    number: int
    prompt: int
    generated: int
    matched: int
    start: int
    frontier: int
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


def bring_back(store: MemoryStore, tokens: Sequence[int]) -> int:
    """Restores the host's objects of these tokens; how many came."""
    prompt = tuple(tokens)
    wanted = [place for place in store.spilled() if place[2].tokens == prompt[: len(place[2].tokens)]]
    return sum(store.restore(*place) for place in wanted)


def run(requests: int, capacity: int, seed: int, spec: Path = SPEC_DIR) -> Iterator[Served]:
    """Serves ``requests`` requests over a store of ``capacity`` objects per layer and group, by the rules of ``spec``.

    InputError for fewer than 1 of either.
    """
    for name, value in (("requests", requests), ("capacity", capacity)):
        if value < 1:
            raise InputError(f"demo:{name}: expected at least 1, got {value}")
    decoder = Decoder(Sizes(), seed)
    planner = Planner(decoder, from_model(decoder.model, spec))
    return serve(planner, MemoryStore(decoder, capacity, spill=True), requests, seed)


def describe(served: Served) -> str:
    """What happened to one request, in a few lines."""
    computed = served.prompt + served.generated - served.start
    lines = [
        f"request {served.number}: {served.prompt} tokens of prompt, {served.generated} generated",
        f"  hit       {served.matched} matched, {served.start} reused, {computed} computed",
        f"  plan      read {', '.join(served.reads) or 'nothing'}",
    ]
    if served.limiting:
        lines.append(f"  limit     {', '.join(served.limiting)}")
    if served.restored:
        lines.append(f"  restored  {served.restored} objects from the host")
    verdict = "equal, bit for bit" if served.equal else f"DIFFER by {served.difference:.3g}"
    return "\n".join([*lines, f"  logits    against a run without cache: {verdict}"])


def serve(planner: Planner, store: MemoryStore, requests: int, seed: int, generate: int = 5) -> Iterator[Served]:
    """Serves requests one after the other; yields what happened."""
    sizes = planner.decoder.sizes
    texts, chunks = Conversation(seed, sizes.vocab, sizes.reach), random.Random(seed)
    for number in range(1, requests + 1):
        prompt = texts.next_prompt()
        restored = bring_back(store, prompt)
        session = Session(planner, store, prompt, Want(alignment=1))
        logits = []
        while session.position < len(prompt):
            logits.append(session.prefill(min(chunks.randint(1, sizes.max_step), len(prompt) - session.position)))
        for _ in range(generate):
            logits.append(session.compute([int(logits[-1][-1].argmax())]))
            session.commit(1)
        found = torch.cat(logits)
        expected = planner.decoder.from_scratch(session.tokens[: session.position])[0][session.hit.r :]
        yield Served(
            number=number,
            prompt=len(prompt),
            generated=generate,
            matched=session.match.matched,
            start=session.hit.r,
            frontier=session.hit.frontier,
            reads=tuple(f"{read.group} [{read.lo}, {read.hi})" for read in session.hit.reads),
            limiting=session.hit.limiting,
            restored=restored,
            difference=(found - expected).abs().max().item(),
            equal=torch.equal(found, expected),
        )
