"""The decoder on the reference allocator: its pools, and requests whose every byte lies in segments.

What is reused is what ``match``, ``pin``, ``validate`` and ``read`` say; nothing is copied but tails and recurrent
states, which go on being written.  Hits end on the allocator's grid, the least common multiple of all groups' blocks.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hybridkv_ref.allocator import Geometry, HeterogeneousAllocator, build, size_caps
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_segments import Segments
from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.policy import Policy


def geometry_of(decoder: Decoder, policy: Policy | None = None, spec: Path = SPEC_DIR) -> Geometry:
    """The decoder's groups on the allocator's grid, in the pages that its kernels read.

    A request holds besides: its tails' rings, its recurrent state, and one for each token of a step of drafts.
    """
    pages = {item.group: item.page for item in decoder.stored}
    rings = {group.name: group.ring_rows or 0 for group in decoder.model.groups if group.shape == "ring"}
    states = {group.name: decoder.sizes.max_step + 1 for group in decoder.model.groups if group.shape == "state"}
    return build(decoder.model, pages=pages, policy=policy, spec=spec, running=rings | states)


def pool_bytes(geometry: Geometry, length: int, requests: int = 1) -> int:
    """Device bytes that let so many requests of ``length`` tokens run at once, whatever they find cached.

    What admission leaves to loads comes on top.
    """
    return math.ceil(sum(size_caps(geometry, length, requests).values()) / (1 - geometry.policy.reserve)) + 1


def prefetch(decoder: Decoder, allocator: HeterogeneousAllocator, tokens: Sequence[int]) -> int:
    """Brings back the durable copies that a longer hit of these tokens needs; how many came."""
    loads = allocator.prefetch(tokens, salt=decoder.identity.encode())
    return sum(load.result() for load in loads)


class AllocatedSession:
    """A request over ``tokens`` (its prompt).

    ``hit``: what is reused; ``lease``: with the verdicts on it; ``refusals``: of longer hits, why not.  ``position``:
    tokens committed.  ``exact_from``: logits from here on equal those of a run from scratch.
    """

    def __init__(self, decoder: Decoder, allocator: HeterogeneousAllocator, tokens: Sequence[int]) -> None:
        self.decoder, self.allocator, self.tokens = decoder, allocator, tuple(tokens)
        found = allocator.match(self.tokens, salt=decoder.identity.encode())
        self.lease, self.request = allocator.pin(found), found.request
        self.refusals: list[str] = []
        while self.lease.tokens and not allocator.validate(self.lease)[-1].accepted:
            self.refusals += [str(verdict) for verdict in self.lease.verdicts if verdict.asked and not verdict.accepted]
            self.lease = allocator.retry(self.lease)
        if self.lease.tokens:
            allocator.read(self.lease)
        self.hit, self.exact_from = self.lease.plan, self.lease.plan.r
        self.position = self.pending = self.hit.r
        try:
            self.state = Segments(decoder, allocator, self.request, self.hit.r, self.hit.frontier)
        except BaseException:
            self.abort()
            raise

    def prefill(self, count: int) -> Tensor:
        """Logits [n, vocab] of the next ``count`` tokens of the prompt, which are committed."""
        logits = self.compute(self.tokens[self.position : self.position + count])
        self.commit(len(logits))
        return logits

    def compute(self, tokens: Sequence[int], padding: int = 0) -> Tensor:
        """Logits [n, vocab] of ``tokens`` after the committed position; those beyond the confirmed ones are drafts.

        Refused where memory is needed and nothing can make way: the request is then aborted.
        """
        at, end = self.position, self.position + len(tokens)
        if self.pending != at:
            raise InputError(f"session:compute: {self.pending - at} tokens wait to be committed")
        self.tokens = (*self.tokens[:at], *tokens, *self.tokens[end:])
        drafts, made = end > self.request.accepted, []
        try:
            if drafts:
                self.state.branch(len(tokens))
            while at < end:
                to = min(end, self.state.next_cut(at))
                made.append(self._step(at, to, padding))
                if not drafts:
                    self.state.settle(self.tokens[:to])
                at = to
        except BaseException:
            self.abort()
            raise
        self.pending = end
        return torch.cat(made)

    def _step(self, at: int, to: int, padding: int) -> Tensor:
        begun = self.state.begin(at, to)
        try:
            logits = self.decoder.forward(self.tokens[at:to], at, self.hit.frontier, self.state, padding)
        except BaseException:
            self.state.end(begun, failed=True)
            raise
        self.state.end(begun)
        return logits

    def commit(self, accepted: int) -> None:
        """Keeps the first ``accepted`` tokens of the last step; the rest is rejected.  A prompt's are all kept."""
        computed = self.pending - self.position
        least = max(0, min(self.request.accepted, self.pending) - self.position)
        if not least <= accepted <= computed:
            raise InputError(f"session:accepted: {accepted} of {computed} computed tokens, {least} of them confirmed")
        end, self.position = self.pending, self.position + accepted
        self.pending = self.position
        if self.state.position < self.position or end > self.position:
            self.state.settle(self.tokens[: self.position])

    def finish(self) -> None:
        """The answer is complete: what was written stays cached."""
        self.allocator.finish(self.request)

    def abort(self) -> None:
        """Ends the request at any stage; what is half written is freed."""
        self.allocator.abort(self.request)
