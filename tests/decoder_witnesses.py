"""Rules that are switched off one by one, each with a history that shows what the rule is for.

With the rule every logit equals that of a run from scratch.  Without it the same history gives other logits, or a kernel
refuses its arguments: nothing here asks the validator whether it was right.  Memory that nobody wrote holds zeros, the
kindest contents, so that no difference is owed to poison.  ``python tests/decoder_witnesses.py FILE`` writes the table.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import msgspec
import torch
from decoder_histories import (
    FP8,
    QUANTISED,
    Request,
    Truth,
    difference,
    fp8_layout,
    planner,
    sequence,
    serve,
    truth,
)
from helpers import copy_spec

from hybridkv_ref import decoder_attention, decoder_plan, decoder_state, decoder_store
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_geometry import Layouts, Sizes
from hybridkv_ref.decoder_plan import IndexEncoding
from hybridkv_ref.decoder_reuse import Planner, Want
from hybridkv_ref.decoder_session import Session
from hybridkv_ref.decoder_state import Rows
from hybridkv_ref.decoder_store import Descriptor, Key, MemoryStore, Ref, Slot
from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels.index_build import index_build
from hybridkv_ref.recovery import Hit, from_model

LENGTH = 44
BASE = Sizes()
RING = msgspec.structs.replace(BASE, ring_windows=True)
TEXT = sequence(BASE, 1, LENGTH)


@dataclass(frozen=True)
class Outcome:
    """``difference``: largest, from scratch, among logits that are claimed exact.  ``hit``: tokens that were reused."""

    difference: float
    hit: int
    refused: str = ""

    @property
    def harmless(self) -> bool:
        """Nothing went wrong."""
        return self.difference == 0.0 and not self.refused


@dataclass(frozen=True)
class Witness:
    """A rule, by its IDs; the history in words; ``run(True)`` with the rule, ``run(False)`` without it."""

    rule: str
    ids: tuple[str, ...]
    history: str
    run: Callable[[bool], Outcome]


WITNESSES: list[Witness] = []


def witness(rule: str, ids: str, history: str) -> Callable[[Callable[[bool], Outcome]], Callable[[bool], Outcome]]:
    """Enters a run under a rule."""

    def enter(run: Callable[[bool], Outcome]) -> Callable[[bool], Outcome]:
        WITNESSES.append(Witness(rule, tuple(f"HKV-{one}" for one in ids.split()), history, run))
        return run

    return enter


# ---- Running ------------------------------------------------------------------------------------------------------------

Change = Callable[[MemoryStore, Session], None]


@contextmanager
def zeros() -> Iterator[None]:
    """Memory that nobody wrote holds zeros."""
    with mock.patch.object(decoder_state, "POISON", 0), mock.patch.object(decoder_store, "POISON", 0):
        yield


def resume(
    plan: Planner, r: int, end: int = LENGTH, *, reader: Planner | None = None, want: Want | None = None,
    store_type: type[MemoryStore] = MemoryStore, writer_type: type[Session] = Session, reader_type: type[Session] = Session,
    first: Request | None = None, stored: Callable[[MemoryStore], None] | None = None, resumed: Change | None = None,
    chunks: tuple[int, ...] = (5,), padding: int = 0, text: tuple[int, ...] = TEXT, other: tuple[int, ...] = TEXT,
) -> Outcome:  # fmt: skip
    """One request over ``other[:r]``, then one over ``text[:end]``; the outcome of the second.

    ``stored`` acts on the store between the two, ``resumed`` on the second after its hit and before it computes.
    """
    with zeros():
        store = store_type(plan.decoder.stored, 400)
        first = first or Request(0, r, (7,))
        serve(writer_type(plan, store, other[: first.prompt], first.want), first, truth(plan, other))
        if stored is not None:
            stored(store)
        return outcome(reader or plan, store, end, want, reader_type, resumed, chunks, padding, text)


def outcome(
    plan: Planner, store: MemoryStore, end: int, want: Want | None = None, session_type: type[Session] = Session,
    resumed: Change | None = None, chunks: tuple[int, ...] = (5,), padding: int = 0, text: tuple[int, ...] = TEXT,
) -> Outcome:  # fmt: skip
    """A request over ``text[:end]`` that reuses what it finds."""
    request = Request(0, end, chunks, want=want or Want(alignment=1), padding=padding)
    session = session_type(plan, store, text[:end], request.want)
    if resumed is not None:
        resumed(store, session)
    known: Truth = truth(plan, text)
    return Outcome(difference(session, serve(session, request, known), known), session.hit.r)


@cache
def without(kind: str, key: str, text: str, sizes: Sizes = BASE) -> Planner:
    """A planner whose recovery.toml has another line: the rule stands in the table, and so does its absence."""
    with TemporaryDirectory() as folder:
        spec = copy_spec(Path(folder))
        path = spec / "recovery.toml"
        before, entry, after = path.read_text().partition(f"[need.{kind}]\n")
        lines = after.split("\n")
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{key} = "))
        lines[at] = f'{key} = "{text}"'
        path.write_text(before + entry + "\n".join(lines))
        decoder = Decoder(sizes)
        return Planner(decoder, from_model(decoder.model, spec))


def table_rule(kind: str, key: str, text: str, r: int, on: bool, want: Want | None = None, end: int = LENGTH) -> Outcome:
    """A resume at r, with the table as it stands or with one entry changed."""
    return resume(planner(BASE), r, end, reader=planner(BASE) if on else without(kind, key, text), want=want)


def patched(on: bool, target: Any, name: str, value: Any, run: Callable[[], Outcome]) -> Outcome:
    """``run`` as it is, or with one function of the decoder replaced."""
    if on:
        return run()
    with mock.patch.object(target, name, value):
        return run()


def overwrite(session: Session, shape: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the arenas of one shape of objects in a request's state, block by block."""
    for item in session.planner.decoder.stored:
        if item.shape == shape:
            rows = session.state.rows(item.layer, item.group)
            rows.arena[:] = change(rows.arena)


# ---- recovery.toml -----------------------------------------------------------------------------------------------------

NO_HALO = partial(table_rule, "uncompressed_tail", "lo", "floor_to(F, ratio)")


@witness("halo rows at a multiple of the small ratio", "TAIL-002 TAIL-005", "fill 20, resume at 20 (a multiple of 4)")
def _(on: bool) -> Outcome:
    return NO_HALO(20, on)


@witness("halo rows at a multiple of both ratios", "TAIL-002 TAIL-005", "fill 24, resume at 24 (a multiple of 4 and 8)")
def _(on: bool) -> Outcome:
    return NO_HALO(24, on)


@witness("tail rows between multiples", "TAIL-002", "fill 23, resume at 23 without the rows after the halo's start")
def _(on: bool) -> Outcome:
    return table_rule("uncompressed_tail", "lo", "s", 23, on)


@witness("W - 1 window rows before the start", "SWA-001", "fill 22, resume at 22 with W - 2 rows")
def _(on: bool) -> Outcome:
    return table_rule("swa_window", "lo", "max(0, s - (window - 2))", 22, on)


@witness(
    "the window lies before the start, not before the match's end", "SWA-001",
    "fill 24 and drop tails after 22; start at 22 with frontier 24, window rows counted back from 24",
)  # fmt: skip
def _(on: bool) -> Outcome:
    plan = planner(BASE) if on else without("swa_window", "lo", "max(0, F - (window - 1))")

    def drop(store: MemoryStore) -> None:
        for layer, group, key in list(store.objects()):
            if planner(BASE).groups[group].exact and len(key.tokens) > 22:
                store.evict(layer, group, key)

    return resume(planner(BASE), 24, reader=plan, want=Want(alignment=8, replay=6), stored=drop)


@witness("every whole entry before the frontier", "CKV-001", "fill 24, resume at 24 without the last entries")
def _(on: bool) -> Outcome:
    return table_rule("compressed_kv", "hi", "max(0, floor_to(F, ratio) - ratio)", 24, on)


@witness("an index key for every entry", "IDX-001 IDX-006", "fill 24, resume at 24 without the last index key")
def _(on: bool) -> Outcome:
    return table_rule("indexer_state", "hi", "max(0, floor_to(F, ratio) - ratio)", 24, on)


def drop_group(name: str, r: int, on: bool) -> Outcome:
    """A resume by all groups but one, which has been evicted."""

    class Blind(Planner):
        """Does not ask for one group."""

        def __init__(self) -> None:
            super().__init__(planner(BASE).decoder)
            self.groups = {key: group for key, group in self.groups.items() if key != name}

    def drop(store: MemoryStore) -> None:
        for layer, group, key in list(store.objects()):
            if group == name:
                store.evict(layer, group, key)

    return resume(planner(BASE), r, reader=planner(BASE) if on else Blind(), stored=drop)


for _name in planner(BASE).groups:
    WITNESSES.append(
        Witness(
            f"group intersection: {_name} too",
            ("HKV-L3-001", "HKV-L3-003"),
            f"fill 23, evict {_name}, resume by the other groups",
            partial(drop_group, _name, 23),
        )
    )


# ---- Positions ------------------------------------------------------------------------------------------------------------


@witness("a start without windows lies at or before s*", "L3-007", "no recurrent layer; fill 40, start at s* + 1")
def _(on: bool) -> Outcome:
    sizes = msgspec.structs.replace(BASE, layers=("window", "window", "csa", "hca"))
    import hybridkv_ref.decoder_reuse as reuse

    found = reuse.zero_exact_hit

    def late(*args: Any) -> Hit:
        hit = found(*args)
        return replace(hit, r=hit.r + 1)

    return patched(
        on, reuse, "zero_exact_hit", late, lambda: resume(planner(sizes), 40, want=Want(mode="zero-exact"))
    )


def other_snapshot(offset: int) -> Change:
    """Brings back the recurrent snapshot of another position, in the place of the right one."""

    def change(store: MemoryStore, session: Session) -> None:
        plan, r = session.planner, session.hit.r
        for item in plan.decoder.stored:
            if item.shape == "state":
                key = plan.key(session.tokens[: r + offset], "exact")
                ref = store.find(item.layer, item.group, key, plan.descriptors[item.layer, item.group])
                rows = store.rows(ref) if ref is not None else None
                if rows is not None:
                    decoder_store.copy_object(rows, 0, session.state.rows(item.layer, item.group), r - 1, 1)

    return change


@witness("a snapshot's position is the start exactly", "REC-001 POS-001", "fill 22, resume at 22 from the state at 21")
def _(on: bool) -> Outcome:
    return resume(planner(BASE), 22, resumed=None if on else other_snapshot(-1))


@witness("each token is applied once", "REC-006 REC-005", "fill 24, start at 23 from the state at 24")
def _(on: bool) -> Outcome:
    def drop(store: MemoryStore) -> None:
        for layer, group, key in list(store.objects()):
            if group.endswith("tail") and len(key.tokens) == 24:
                store.evict(layer, group, key)

    return resume(
        planner(BASE), 24, want=Want(alignment=8, replay=6), stored=drop, resumed=None if on else other_snapshot(1)
    )


@witness("a snapshot has the convolution's last inputs", "REC-002", "fill 22, resume at 22 with these set to zero")
def _(on: bool) -> Outcome:
    def cut(arena: torch.Tensor) -> torch.Tensor:
        split = 8 * BASE.delta_heads * BASE.delta_dim**2
        return torch.cat((arena[:, :split], torch.zeros_like(arena[:, split:])), dim=1)

    return resume(planner(BASE), 22, resumed=None if on else lambda _, session: overwrite(session, "state", cut))


def move_frontier(_: MemoryStore, session: Session) -> None:
    """The request takes entries for cached that end one ratio later than they do."""
    session.hit = replace(session.hit, frontier=session.hit.frontier + BASE.csa_ratio)


@witness("the splice has no gap", "TAIL-001 L4-003", "fill 24, resume at 24 as if entries reached 28")
def _(on: bool) -> Outcome:
    return resume(planner(BASE), 24, resumed=None if on else move_frontier)


@witness("a replay writes no entry before the frontier", "L3-006", "fill 24, start at 20 with frontier 24, fold again")
def _(on: bool) -> Outcome:
    def drop(store: MemoryStore) -> None:
        for layer, group, key in list(store.objects()):
            if group.endswith("tail") and len(key.tokens) > 18:
                store.evict(layer, group, key)

    def refold(_: MemoryStore, session: Session) -> None:
        session.hit = replace(session.hit, frontier=session.hit.r)

    return resume(
        planner(BASE), 24, want=Want(alignment=8, replay=6), stored=drop, resumed=None if on else refold
    )


@witness("ring phase: position p at index p mod ring", "POS-004 SWA-006", "fill 22, resume at 22 into a ring, one off")
def _(on: bool) -> Outcome:
    def turn(_: MemoryStore, session: Session) -> None:
        overwrite(session, "window", lambda arena: arena.roll(1, 0))

    return resume(planner(RING), 22, resumed=None if on else turn)


@witness("ring phase of tails", "POS-004 TAIL-008", "fill 22, resume at 22 with the tails' rings one off")
def _(on: bool) -> Outcome:
    def turn(_: MemoryStore, session: Session) -> None:
        overwrite(session, "ring", lambda arena: arena.roll(1, 0))

    return resume(planner(RING), 22, resumed=None if on else turn)


# ---- Drafts, padding, visibility -----------------------------------------------------------------------------------------


@witness(
    "a ring keeps the rows that a rejection needs again", "TAIL-009 POS-003 SWA-007",
    "4 tokens per draft step of which 1 is accepted, rings without a margin",
)  # fmt: skip
def _(on: bool) -> Outcome:
    plan = planner(RING)

    class Tight(decoder_state.PrivateState):
        """Rings of just the rows that one position needs, and one."""

        def _place(self, item: Any) -> decoder_state.Rows:
            rows = super()._place(item)
            if not rows.ring or item.shape == "state":
                return rows
            return replace(rows, ring=item.keep + 1)

    def run() -> Outcome:
        with zeros():
            store, known = MemoryStore(plan.decoder.stored, 400), truth(plan, TEXT)
            request = Request(0, 3, (1,), drafts=((4, 1),) * 30)
            session = Session(plan, store, TEXT[:3], request.want)
            return Outcome(difference(session, serve(session, request, known), known), session.hit.r)

    import hybridkv_ref.decoder as module

    return patched(on, module, "PrivateState", Tight, run)


@witness("padding rows have the null slot", "S4-006 SWA-004", "steps of 2 tokens and 3 of padding; padding at position 0")
def _(on: bool) -> Outcome:
    def first_slot(step: decoder_plan.Step) -> torch.Tensor:
        return torch.cat((torch.arange(step.start, step.end), torch.zeros(step.padding, dtype=torch.int64)))

    return patched(
        on, decoder_plan.Step, "positions", property(first_slot),
        lambda: resume(planner(RING), 3, chunks=(2,), padding=3),
    )  # fmt: skip


@witness("an entry is visible from its last token on", "CKV-007", "the same tokens in steps of 1 and of 8, one token early")
def _(on: bool) -> Outcome:
    def early(step: decoder_plan.Step, ratio: int) -> torch.Tensor:
        return ((step.positions + 2) // ratio).int()

    def run() -> Outcome:
        plan = Planner(Decoder(BASE))  # its run from scratch, in steps of 8, is made under the same rule
        return resume(plan, 20, chunks=(1,))

    return patched(on, decoder_plan.Step, "visible", early, run)


@witness("equal scores by index", "IDX-008", "the same tokens in steps of 1 and of 8; torch.topk over what the step sees")
def _(on: bool) -> Outcome:
    def arbitrary(logits: torch.Tensor, visible: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        width = max(int(visible.max()), 1)
        scores = logits[:, :width].masked_fill(torch.arange(width) >= visible[:, None], -torch.inf)
        best = scores.topk(min(width, chosen.shape[1]), dim=1)
        index = torch.where(best.values > -torch.inf, best.indices, width).sort(dim=1).values
        chosen.fill_(-1)
        chosen[:, : index.shape[1]] = torch.where(index < width, index, -1).int()
        return chosen

    worst = Outcome(0.0, 0)
    for seed in range(8):  # not every text has a tie at the border that the two orders decide differently
        text = sequence(BASE, seed, BASE.reach)
        run = partial(_in_two_chunkings, text)
        worst = max(worst, patched(on, decoder_attention, "topk_select", arbitrary, run), key=lambda o: o.difference)
    return worst


def _in_two_chunkings(text: tuple[int, ...]) -> Outcome:
    plan = Planner(Decoder(BASE))
    return outcome(plan, MemoryStore(plan.decoder.stored, 400), len(text), chunks=(1,), text=text)


# ---- Publishing ------------------------------------------------------------------------------------------------------------


@witness("nothing past the committed position is published", "POS-002 S3-011", "20 of 30 prompt tokens computed, 30 published")
def _(on: bool) -> Outcome:
    class Eager(Session):
        """Publishes what is scheduled."""

        def _publishable(self) -> int:
            return 30

    first = Request(0, 30, (10,), abort=2)
    sizes = msgspec.structs.replace(BASE, max_step=10)
    return resume(planner(sizes), 30, writer_type=Session if on else Eager, first=first)


@witness("rows before the replay's exact ones are not published", "L3-006", "fill 40 without windows; zero-exact; plain hit")
def _(on: bool) -> Outcome:
    class Eager(Session):
        """Publishes every row."""

        def _exact(self, item: object, first: int) -> bool:
            return True

    plan = planner(BASE)
    with zeros():
        store, known = MemoryStore(plan.decoder.stored, 400), truth(plan, TEXT)
        fill = Request(0, 40, (8,))
        serve(Session(plan, store, TEXT[:40]), fill, known)
        for layer, group, key in list(store.objects()):
            if plan.groups[group].miss == "replay":
                store.evict(layer, group, key)
        again = Request(0, 40, (8,), want=Want(mode="zero-exact"))
        serve((Session if on else Eager)(plan, store, TEXT[:40], again.want), again, known)
        return max((outcome(plan, store, end) for end in range(22, 41)), key=lambda o: o.difference)


@witness("the grade is part of the key", "L3-008 KEY-002", "fill 40; a bounded request from 32 on to 44; a plain hit")
def _(on: bool) -> Outcome:
    class Unlabelled(Session):
        """Publishes bounded rows as exact ones."""

        def _grade(self) -> str:
            return "exact"

    plan = planner(BASE)
    with zeros():
        store, known = MemoryStore(plan.decoder.stored, 400), truth(plan, TEXT)
        serve(Session(plan, store, TEXT[:32]), Request(0, 32, (8,)), known)
        bounded = Request(0, 40, (8,), want=Want(mode="bounded", replay=8))
        serve((Session if on else Unlabelled)(plan, store, TEXT[:40], bounded.want), bounded, known)
        return outcome(plan, store, LENGTH)


@witness("an object is found only when it is complete", "S3-011 S3-012", "objects begun and not written; a second request")
def _(on: bool) -> Outcome:
    class Hasty(MemoryStore):
        """Finds objects from the moment that they are begun."""

        def _complete(self, slot: Slot) -> bool:
            return True

    class Slow(Session):
        """Its copies have not happened yet."""

        def _write(self, item: Any, key: Key, first: int, count: int) -> None:
            self.store.begin(item.layer, item.group, key, self.planner.descriptors[item.layer, item.group])

    plan = planner(BASE)
    return resume(plan, 22, store_type=MemoryStore if on else Hasty, writer_type=Slow)


@witness("a lease names the generation", "S3-002 S3-003 L1-004", "fill A 22; B matches it; A goes, C takes its slots; B reads")
def _(on: bool) -> Outcome:
    class Trusting(MemoryStore):
        """Reads whatever lies in the slot."""

        def _same_generation(self, slot: Slot, ref: Ref) -> bool:
            return True

    plan, other = planner(BASE), sequence(BASE, 9, LENGTH)

    class Interrupted(Planner):
        """Between the match and the read, another request takes the slots, once."""

        done = False

        def restore(self, store: Any, match: Any, state: Any) -> bool:
            if not self.done and match.hit.r:
                self.done = True
                for layer, group, key in list(store.objects()):
                    store.evict(layer, group, key)
                serve(Session(plan, store, other[:22]), Request(0, 22, (8,)), truth(plan, other))
            return super().restore(store, match, state)

    return resume(plan, 22, store_type=MemoryStore if on else Trusting, reader=Interrupted(plan.decoder))


@witness("a key covers every token from position 0 on", "KEY-001", "A and B differ in their first token only; B hits A")
def _(on: bool) -> Outcome:
    class Short(Planner):
        """Keys of the length and the last two tokens."""

        def key(self, tokens: tuple[int, ...], grade: str) -> Key:
            return Key(self.decoder.identity, grade, (len(tokens), *tokens[-2:]))

    plan = planner(BASE) if on else Short(planner(BASE).decoder)
    return resume(plan, 22, other=((TEXT[0] + 1) % BASE.vocab, *TEXT[1:]))


@witness("a key names the weights", "KEY-002", "fill with seed 0, resume with seed 1")
def _(on: bool) -> Outcome:
    def nameless(self: Decoder) -> str:
        return "any"

    def run() -> Outcome:
        return resume(planner(BASE), 22, reader=planner(BASE, 1))

    return patched(on, Decoder, "identity", property(nameless), run)


# ---- Kernel ABI ------------------------------------------------------------------------------------------------------------

Rewrite = Callable[[Planner, MemoryStore, int, str, Key], None]


def abi(
    field: str, value: Any, shape: str, rewrite: Rewrite, on: bool, sizes: Sizes = BASE, r: int = 22,
    layouts: Layouts | None = None,
) -> Outcome:  # fmt: skip
    """Objects of another writer, whose descriptor differs in one field and whose bytes differ accordingly."""

    class Lax(MemoryStore):
        """Does not compare one field."""

        def _agree(self, reader: Descriptor, writer: Descriptor) -> bool:
            return reader == msgspec.structs.replace(writer, **{field: getattr(reader, field)})

    plan = planner(sizes, layouts=layouts)
    text = sequence(sizes, 1, LENGTH)

    def convert(store: MemoryStore) -> None:
        shapes = {(item.layer, item.group): item.shape for item in plan.decoder.stored}
        for layer, group, key in list(store.objects()):
            if shapes[layer, group] == shape:
                rewrite(plan, store, layer, group, key)
                store._pools[layer, group].slots[store._pools[layer, group].by_key[key]].writer = msgspec.structs.replace(
                    plan.descriptors[layer, group], **{field: value}
                )

    return resume(plan, r, store_type=MemoryStore if on else Lax, stored=convert, text=text, other=text)


def object_values(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> torch.Tensor:
    """float64 view [bytes / 8] of an object's slot."""
    return object_rows(plan, store, layer, group, key)[0].view(torch.float64)


def object_rows(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> tuple[torch.Tensor, Rows]:
    """uint8 [bytes] of an object's slot, and the object's rows."""
    ref = store.find(layer, group, key, plan.descriptors[layer, group])
    rows = store.rows(ref) if ref is not None else None
    if ref is None or rows is None:
        raise InputError(f"{group}: no such object")
    return rows.arena[ref.slot], rows


def bias_apart(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> None:
    """Scores without the positional bias."""
    values = object_values(plan, store, layer, group, key)
    attention = plan.decoder.weights.layers[layer].mixer
    folded = attention.indexer.compressor if "index" in group else attention.compressor  # type: ignore[union-attr]
    bias = folded.bias  # type: ignore[union-attr]
    first = plan.first_row(plan.groups[group], len(key.tokens))
    for number, position in enumerate(range(first, len(key.tokens))):
        score = values.view(-1, 2, bias.shape[1])[number, 1]
        score -= bias[position % len(bias)]


def score_first(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> None:
    """A layout with the score before the kv."""
    values = object_values(plan, store, layer, group, key)
    pairs = values.view(-1, 2, plan.descriptors[layer, group].dim)
    pairs.copy_(pairs.flip(1))


def bf16_rows(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> None:
    """Tail rows that were narrowed to bf16 on their way."""
    values = object_values(plan, store, layer, group, key)
    values.copy_(values.bfloat16().double())


def halves(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> None:
    """Rotary pairs as two halves of the columns instead of neighbours."""
    values = object_values(plan, store, layer, group, key).view(-1, plan.decoder.sizes.head_dim)
    turned = values[:, -plan.decoder.sizes.rotary :]
    turned.copy_(torch.cat((turned[:, 0::2], turned[:, 1::2]), dim=1))


def later_entry(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> None:
    """Row i of a writer with twice the ratio covers the tokens of rows 2i and 2i + 1."""
    unit, number = plan.groups[group].unit, len(key.tokens) // plan.groups[group].unit - 1
    source = plan.key(TEXT[: (2 * number + 2) * unit], "exact")
    if store.find(layer, group, source, plan.descriptors[layer, group]) is not None:
        object_values(plan, store, layer, group, key).copy_(object_values(plan, store, layer, group, source))


def no_halo(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> None:
    """A tail that starts at the boundary: its first row lies where the reader expects the halo."""
    halo = plan.descriptors[layer, group].halo
    values = object_values(plan, store, layer, group, key).view(-1, 2 * plan.descriptors[layer, group].dim)
    values.copy_(torch.cat((values[halo:], torch.zeros_like(values[:halo]))))


def wider_rows(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> None:
    """Rows of one more column: the second begins later."""
    values = object_values(plan, store, layer, group, key)
    dim = plan.descriptors[layer, group].dim
    values[dim:] = torch.cat((values.new_zeros(1), values[dim:-1]))


def wide_tile(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> None:
    """One scale for two tiles: where the reader expects the second tile's there is padding."""
    _, rows = object_rows(plan, store, layer, group, key)
    slots = rows.slots(torch.arange(rows.page.entries))
    page = fp8_layout(tile=8).page(rows.page.entries, stride=rows.page.stride)
    index_build(_pages.read(rows.arena, slots, rows.page)[:, 0], slots, rows.arena, page)


def floor_scale(plan: Planner, store: MemoryStore, layer: int, group: str, key: Key) -> None:
    """Scales of 2 ** floor(log2(amax / 448)): what lies above their range is cut off."""
    _, rows = object_rows(plan, store, layer, group, key)
    slots = rows.slots(torch.arange(rows.page.entries))
    values = _pages.read(rows.arena, slots, rows.page)[:, 0]
    tiles = values[:, :8].view(-1, 2, 4)
    top = 448 * torch.exp2((tiles.abs().amax(-1, keepdim=True) / 448).log2().floor())
    values[:, :8] = tiles.clamp(-top, top).view(-1, 8)
    index_build(values, slots, rows.arena, rows.page)


TWO_ROWS = msgspec.structs.replace(BASE, csa_block=8)
ABI: tuple[tuple[str, Any, str, Rewrite, Sizes, Layouts | None, str], ...] = (
    ("bias_in_score", False, "ring", bias_apart, BASE, None, "tails whose scores lack the positional bias"),
    ("layout", "score, then kv", "ring", score_first, BASE, None, "tails with the score before the kv"),
    ("rope", "halves", "window", halves, BASE, None, "window rows whose rotary pairs are halves of the columns"),
    ("ratio", 8, "entries", later_entry, BASE, None, "entries of twice as many tokens"),
    ("halo", 0, "ring", no_halo, BASE, None, "tails that start at the boundary"),
    ("dim", 9, "entries", wider_rows, TWO_ROWS, None, "rows of one more column, two to a block"),
    ("tile", 8, "window", wide_tile, QUANTISED, FP8, "fp8 rows with one scale for two tiles"),
    ("scale_rule", "pow2_floor", "window", floor_scale, QUANTISED, FP8, "fp8 rows whose scales were rounded down"),
)
for _field, _value, _shape, _rewrite, _sizes, _layouts, _how in ABI:
    WITNESSES.append(
        Witness(
            f"kernel ABI: {_field}",
            ("HKV-L2-001", "HKV-L2-004"),
            f"fill 22 or 24, resume on {_how}",
            partial(
                abi, _field, _value, _shape, _rewrite, sizes=_sizes, r=24 if _shape == "entries" else 22, layouts=_layouts
            ),
        )
    )


@witness("tail rows stay at full precision", "TAIL-007", "fill 22, narrow the stored tails to bf16, resume at 22")
def _(on: bool) -> Outcome:
    plan = planner(BASE)

    def narrow(store: MemoryStore) -> None:
        for layer, group, key in list(store.objects()):
            if group.endswith("tail"):
                bf16_rows(plan, store, layer, group, key)

    return resume(plan, 22, stored=None if on else narrow)


@witness("stored bytes are attended, also by the step that makes them", "CKV-008", "fp8 rows; the same tokens in steps of 8 and 1")
def _(on: bool) -> Outcome:
    class Late(Decoder):
        """Attends what it just computed in fp32, and narrows it to fp8 afterwards."""

        def forward(self, tokens: Sequence[int], start: int, frontier: int, state: Any, padding: int = 0) -> torch.Tensor:
            logits = super().forward(tokens, start, frontier, state, padding)
            end = start + len(tokens)
            for item in self.stored:
                if item.shape in ("window", "entries") and item.dim == 16:
                    rows = state.rows(item.layer, item.group)
                    slots = rows.slots(torch.arange(start // item.ratio, end // item.ratio))
                    narrow = _pages.narrowed_exact(_pages.read(rows.arena, slots, rows.page), FP8.kv.page(1))
                    index_build(narrow[:, 0].float().contiguous(), slots, rows.arena, rows.page)
            return logits

    plan = planner(QUANTISED, layouts=FP8)
    if not on:
        plan = Planner(Late(QUANTISED, layouts=msgspec.structs.replace(FP8, kv=FP8.index)))
    return outcome(plan, MemoryStore(plan.decoder.stored, 400), LENGTH, chunks=(1,), text=sequence(QUANTISED, 1, LENGTH))


@witness("index keys of the prefix's epoch", "IDX-001 IDX-002", "fill 24 with keys of epoch 0, resume with epoch 1")
def _(on: bool) -> Outcome:
    class Lax(MemoryStore):
        """Does not compare the epoch."""

        def _agree(self, reader: Descriptor, writer: Descriptor) -> bool:
            return reader == msgspec.structs.replace(writer, epoch=reader.epoch)

    plan = planner(BASE)
    reader = Planner(Decoder(BASE, encoding=IndexEncoding(1)))
    return resume(plan, 24, reader=reader, store_type=MemoryStore if on else Lax)


@witness("byte alignment of source and target", "L4-001", "fill 22, resume into an arena that begins 4 bytes later")
def _(on: bool) -> Outcome:
    def shift(item: Any, blocks: int) -> torch.Tensor:
        memory = torch.zeros(blocks * item.stride + 32, dtype=torch.uint8)
        start = (-memory.data_ptr() % 16) + (0 if on else 4)
        return memory[start : start + blocks * item.stride].view(blocks, item.stride)

    with mock.patch.object(decoder_state, "poisoned", shift):
        try:
            return resume(Planner(Decoder(BASE)), 22)
        except InputError as error:
            return Outcome(0.0, 0, str(error))


# ---- The table -------------------------------------------------------------------------------------------------------------


def table(found: Mapping[str, tuple[Outcome, Outcome]]) -> str:
    """Markdown: rule, IDs, history, hits and differences with and without the rule."""
    lines = [
        "# Every recovery rule of the decoder, switched off",
        "",
        "Written by `python tests/decoder_witnesses.py FILE`; `tests/test_decoder_necessity.py` runs the same table.",
        "The difference is the largest of any logit from the run from scratch (float64, fixed order, memory of zeros);",
        "with the rule it is exactly 0. Hits are tokens reused.",
        "",
        "| rule | IDs | history | hit with | hit without | without the rule |",
        "|---|---|---|---|---|---|",
    ]
    for one in WITNESSES:
        kept, lost = found[one.rule]
        what = f"refused: {lost.refused}" if lost.refused else f"logits differ by {lost.difference:.2g}"
        lines.append(f"| {one.rule} | {', '.join(one.ids)} | {one.history} | {kept.hit} | {lost.hit} | {what} |")
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Runs every witness and writes the table."""
    found = {one.rule: (one.run(True), one.run(False)) for one in WITNESSES}
    Path(arguments[0]).write_text(table(found))
    return 0 if all(kept.harmless and not lost.harmless for kept, lost in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
