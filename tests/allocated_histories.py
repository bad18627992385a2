"""Histories of requests on the decoder in the allocator: the same requests as on the plain store, and its checks."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from allocator_tools import idle
from decoder_histories import FINE, LENGTH, TOLERANCE, Evict, Request, Truth, differences, sequence, serve, truth
from decoder_histories import planner as planner_of

from hybridkv_ref.allocator import CacheSegment, HeterogeneousAllocator
from hybridkv_ref.allocator.lockstep import keep_all
from hybridkv_ref.allocator.refinement import Shadow
from hybridkv_ref.allocator.refinement import differences as faults
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_allocator import AllocatedSession, geometry_of, pool_bytes, prefetch
from hybridkv_ref.decoder_geometry import Layouts, Sizes
from hybridkv_ref.decoder_reuse import Planner
from hybridkv_ref.decoder_state import Rows, row_bytes
from hybridkv_ref.loader import load_tables
from hybridkv_ref.paths import SPEC_DIR

A, B = sequence(FINE, 1, LENGTH), sequence(FINE, 2, LENGTH)


class Spill(Evict):
    """Goes, like what a cap makes go: after a durable copy."""


@dataclass(frozen=True)
class Restore:
    """The next request asks for its durable copies first."""


Event = Request | Evict | Restore


@dataclass
class Memory:
    """An allocator for one decoder, watched by a second machine."""

    plan: Planner
    allocator: HeterogeneousAllocator
    shadow: Shadow

    @property
    def decoder(self) -> Decoder:
        return self.plan.decoder

    def session(self, tokens: Sequence[int]) -> AllocatedSession:
        """A request."""
        return AllocatedSession(self.decoder, self.allocator, tokens)

    def faults(self) -> list[str]:
        """Rows, memory and records that differ from the tables."""
        return [*self.shadow.faults, *faults(self.allocator)]


def memory(
    sizes: Sizes, length: int, requests: int, layouts: Layouts | None = None, spec: Path = SPEC_DIR, **options: Any
) -> Memory:
    """Memory for so many requests of ``length`` tokens at once, and a host tier for the rest, by the rules of ``spec``.

    The second machine goes by the same rules.
    """
    plan, tables = planner_of(sizes, layouts=layouts), load_tables(spec)
    geometry, shadow = geometry_of(plan.decoder, keep_all(), spec), Shadow(tables)
    given: dict[str, Any] = {"spec": spec, "tables": tables, "host_bytes": 1 << 22, "observer": shadow} | options
    given.setdefault("device_bytes", pool_bytes(geometry, length, requests))
    allocator = HeterogeneousAllocator(geometry, **given)
    shadow.attach(allocator.ledger.lanes, allocator.ledger.made)
    return Memory(plan, allocator, shadow)


def wrong_bytes(here: Memory, known: Sequence[Truth]) -> list[str]:
    """Segments that can be found whose bytes differ from those of the run from scratch."""
    found: dict[str, None] = {}
    for one in known:
        keys = here.allocator.keys(torch.tensor(one.tokens).numpy(), here.decoder.identity.encode())
        for key in keys:
            node = here.allocator.book.index.nodes.get(key)
            for segment in [] if node is None else node.segments:
                if segment is not None and not same(here, segment, one):
                    found[repr(segment)] = None
    return list(found)


def same(here: Memory, segment: CacheSegment, known: Truth) -> bool:
    """Whether every layer's rows are those of the run from scratch."""
    group, (lo, hi) = segment.group, segment.token_range
    if segment.slots is None:
        return False
    count, first = group.rows(lo, hi), hi - 1 if group.whole else group.rows(0, lo)
    arena = here.allocator.book.arena(group).bytes
    for layer, slots in zip(group.group.layer_ids or (), torch.from_numpy(segment.slots).int(), strict=True):
        stored = row_bytes(Rows(arena, group.page, slots[None]), range(count))
        expected = row_bytes(known.state.rows(layer, group.name), range(first, first + count))
        if here.decoder.sizes.fixed_order:
            equal = torch.equal(stored, expected)
        else:
            equal = torch.allclose(stored.view(torch.float64), expected.view(torch.float64), rtol=0, atol=TOLERANCE)
        if not equal:
            return False
    return True


@dataclass
class Played:
    """What a history came to; lists are per request.  ``restored``: segments that came back from the host."""

    worst: float = 0.0
    compared: list[int] = field(default_factory=list)
    hits: list[int] = field(default_factory=list)
    restored: int = 0


def play(here: Memory, texts: Sequence[tuple[int, ...]], history: Sequence[Event]) -> Played:
    """Runs a history."""
    known, played, restore = [truth(here.plan, text) for text in texts], Played(), False
    for event in history:
        match event:
            case Request():
                text = known[event.text % len(known)]
                prompt = text.tokens[: event.prompt]
                played.restored += prefetch(here.decoder, here.allocator, prompt) if restore else 0
                session, restore = here.session(prompt), False
                apart = differences(session, serve(session, event, text), text)
                session.finish() if event.abort is None else session.abort()
                played.worst = max(played.worst, apart.max().item()) if len(apart) else played.worst
                played.compared.append(len(apart))
                played.hits.append(session.hit.r)
            case Evict():
                idle(here.allocator)
                for segment in here.allocator.segments()[event.first :: event.stride]:
                    if isinstance(event, Spill):
                        here.allocator.evictor.evict(segment)
                    else:
                        here.allocator.deallocate(segment)
            case Restore():
                restore = True
    return played


def prefill(session: AllocatedSession, upto: int) -> torch.Tensor:
    """Logits of the prompt up to ``upto``, in steps of 5."""
    made = []
    while session.position < upto:
        made.append(session.prefill(min(5, upto - session.position)))
    return torch.cat(made)


def serve_all(here: Memory, text: tuple[int, ...]) -> None:
    """One request, computed and finished."""
    session = here.session(text)
    prefill(session, LENGTH)
    session.finish()
