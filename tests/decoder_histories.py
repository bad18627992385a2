"""Histories of requests on the small decoder, and what they are measured against: runs from scratch.

A history is data: requests with their chunks, drafts and aborts, and evictions.  ``play`` runs one and
compares every logit that is claimed to be exact, and every byte that is cached, with the run from scratch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_allocator import AllocatedSession
from hybridkv_ref.decoder_geometry import Layouts, Sizes
from hybridkv_ref.decoder_reuse import Planner, Want
from hybridkv_ref.decoder_session import Session
from hybridkv_ref.decoder_state import PrivateState, row_bytes
from hybridkv_ref.decoder_store import MemoryStore, Ref
from hybridkv_ref.layouts import Field, Layout, load

TOLERANCE = 1e-9
LENGTH = 44  # tokens of a text: past five folds of the larger ratio
FINE = Sizes()
torch.set_num_threads(1)


def _field(name: str, role: Any, dtype: Any, count: int, region: int) -> Field:
    return Field(name=name, role=role, dtype=dtype, count=count, region=region)


def fp8_layout(tile: int = 4) -> Layout:
    """A small entry as V4's are: 8 columns in e4m3 with a power-of-two scale per tile, 8 in bf16, padding."""
    tiles = 8 // tile
    return Layout(
        id=f"small_fp8_tile_{tile}", role="kv", summary="", source="", confidence="defined here", heads=1, dim=16,
        order="NHD", entry_bytes=32, stride_multiple=16, base_align=16, scale_rule="pow2_ceil", tile=tile,
        min_exponent=-16,
        fields=(
            _field("values", "quantised", "e4m3", 8, 0), _field("rope", "plain", "bf16", 8, 0),
            _field("scale", "scale", "ue8m0", tiles, 1), _field("pad", "pad", "u8", 8 - tiles, 1),
        ),
    )  # fmt: skip


QUANTISED = Sizes(head_dim=16)
FP8 = Layouts(fp8_layout(), load("fp32"), load("state_fp32"), load("fp32"))


@lru_cache(maxsize=32)
def planner(sizes: Sizes, seed: int = 0, layouts: Layouts | None = None) -> Planner:
    """The decoder of these sizes with its recovery groups, made once."""
    return Planner(Decoder(sizes, seed, layouts))


def sequence(sizes: Sizes, seed: int, length: int) -> tuple[int, ...]:
    """Random tokens."""
    source = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, sizes.vocab, (length,), generator=source).tolist())


@dataclass
class Truth:
    """The run from scratch: logits [n, vocab], and a state in which every row of every object is still there."""

    tokens: tuple[int, ...]
    logits: torch.Tensor
    state: PrivateState


@lru_cache(maxsize=64)
def truth(plan: Planner, tokens: tuple[int, ...]) -> Truth:
    """``tokens`` from position 0 on, with nothing reused."""
    return Truth(tokens, *plan.decoder.from_scratch(tokens))


@dataclass(frozen=True)
class Request:
    """One request over the first tokens of sequence ``text``.

    ``prompt``: tokens of the prompt.  ``chunks``: sizes of its prefill steps, used in turn.  ``drafts``: after the
    prompt, (tokens computed, of which accepted) per step: 1 and 1 is plain decoding.  ``abort``: steps after which it
    ends; the last one is computed and never committed.  ``padding``: rows that every step has besides.
    """

    text: int
    prompt: int
    chunks: tuple[int, ...] = (8,)
    drafts: tuple[tuple[int, int], ...] = ()
    want: Want = field(default_factory=lambda: Want(alignment=1))
    keep_every: int = 1
    abort: int | None = None
    padding: int = 0


@dataclass(frozen=True)
class Evict:
    """Every ``stride``-th object from ``first`` on goes, by the order in which they came."""

    first: int
    stride: int


Event = Request | Evict


def steps(request: Request, start: int, length: int) -> Iterator[tuple[int, int]]:
    """(tokens computed, accepted) of every step from position ``start`` on, within ``length`` tokens."""
    at, number = start, 0
    while at < min(request.prompt, length):
        size = min(request.chunks[number % len(request.chunks)], min(request.prompt, length) - at)
        yield size, size
        at, number = at + size, number + 1
    for computed, accepted in request.drafts:
        if at + computed > length:
            return
        yield computed, accepted
        at += accepted


def wrong(token: int, vocab: int) -> int:
    """Another token: a draft that will be rejected."""
    return (token + 1) % vocab


def serve(session: Session | AllocatedSession, request: Request, known: Truth) -> torch.Tensor:
    """Runs a request; the logits [n, vocab] of its committed tokens, from the session's first position on."""
    sizes, made = session.decoder.sizes, []
    for number, (computed, accepted) in enumerate(steps(request, session.position, len(known.tokens))):
        at = session.position
        right = known.tokens[at : at + accepted]
        rejected = [wrong(token, sizes.vocab) for token in known.tokens[at + accepted : at + computed]]
        logits = session.compute([*right, *rejected], min(request.padding, sizes.max_step - computed))
        if request.abort == number:
            break
        made.append(logits[:accepted])
        session.commit(accepted)
    return torch.cat(made) if made else known.logits[:0]


def differences(session: Session | AllocatedSession, logits: torch.Tensor, known: Truth) -> torch.Tensor:
    """[n, vocab] from scratch of the logits that are claimed to be exact, perhaps none; NaN counts as infinite."""
    if session.exact_from is None:
        return known.logits[:0]
    first = max(session.exact_from - session.hit.r, 0)
    expected = known.logits[session.hit.r + first : session.hit.r + len(logits)]
    return torch.nan_to_num((logits[first:] - expected).abs(), nan=torch.inf)


def difference(session: Session, logits: torch.Tensor, known: Truth) -> float:
    """The largest of ``differences``; ValueError where nothing is compared."""
    found = differences(session, logits, known)
    if not len(found):
        raise ValueError("no logits are claimed to be exact")
    return found.max().item()


def wrong_bytes(plan: Planner, store: MemoryStore, known: Sequence[Truth]) -> list[str]:
    """Cached objects of the exact grade whose bytes differ from those of the run from scratch."""
    found = []
    for layer, name, key in store.objects():
        end = len(key.tokens)
        same = [one for one in known if one.tokens[:end] == key.tokens]
        ref = store.find(layer, name, key, plan.descriptors[layer, name])
        if key.grade == "exact" and same and ref is not None and not _same(plan, store, ref, end, same[0]):
            found.append(f"{name} of layer {layer} up to {end}")
    return found


def _same(plan: Planner, store: MemoryStore, ref: Ref, end: int, known: Truth) -> bool:
    group = plan.groups[ref.group]
    item = next(one for one in plan.objects[ref.group] if one.layer == ref.layer)
    first = plan.first_row(group, end)
    rows = store.rows(ref)
    if rows is None:
        return False
    count = (end - first) // item.ratio
    stored = row_bytes(rows, range(count))
    expected = row_bytes(
        known.state.rows(ref.layer, ref.group), range(first // item.ratio, first // item.ratio + count)
    )
    if plan.decoder.sizes.fixed_order:
        return torch.equal(stored, expected)
    return torch.allclose(stored.view(torch.float64), expected.view(torch.float64), rtol=0, atol=TOLERANCE)


@dataclass
class Played:
    """What a history came to.

    ``worst``: the largest difference; ``compared``: per request, the tokens whose logits were compared;
    ``bytes_wrong``: the objects with wrong bytes; ``hits``: each request's.
    """

    worst: float
    compared: list[int]
    bytes_wrong: list[str]
    hits: list[int]


def play(plan: Planner, texts: Sequence[tuple[int, ...]], history: Sequence[Event], capacity: int = 400) -> Played:
    """Runs a history over one store."""
    store = MemoryStore(plan.decoder, capacity)
    known = [truth(plan, text) for text in texts]
    worst, hits, compared = 0.0, [], []
    for event in history:
        match event:
            case Request():
                text = known[event.text % len(known)]
                session = Session(plan, store, text.tokens[: event.prompt], event.want, event.keep_every)
                apart = differences(session, serve(session, event, text), text)
                worst = max(worst, apart.max().item()) if len(apart) else worst
                compared.append(len(apart))
                hits.append(session.hit.r)
            case Evict():
                for layer, name, key in list(store.objects())[event.first :: event.stride]:
                    store.evict(layer, name, key)
    return Played(worst, compared, wrong_bytes(plan, store, known), hits)
