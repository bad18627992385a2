"""The kernel ABI, switched off field by field; precision, epoch and alignment of what is stored."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import msgspec
import torch
from decoder_histories import (
    FP8,
    QUANTISED,
    fp8_layout,
    planner,
    sequence,
    truth,
)
from decoder_switches import BASE, LENGTH, TEXT, Outcome, Witness, Witnesses, outcome, patched, resume

from hybridkv_ref import decoder_attention, decoder_state
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_geometry import Descriptor, Layouts, Sizes
from hybridkv_ref.decoder_plan import IndexEncoding
from hybridkv_ref.decoder_reuse import Planner
from hybridkv_ref.decoder_state import Rows
from hybridkv_ref.decoder_store import Key, MemoryStore
from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels._lse import Lse
from hybridkv_ref.kernels.index_build import index_build
from hybridkv_ref.kernels.segment_decode import segment_decode

WITNESSES = Witnesses()


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
                store._pools[layer, group].slots[
                    store._pools[layer, group].by_key[key]
                ].writer = msgspec.structs.replace(plan.descriptors[layer, group], **{field: value})

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
    source = plan.key(TEXT[: 2 * len(key.tokens)], "exact")
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
                abi,
                _field,
                _value,
                _shape,
                _rewrite,
                sizes=_sizes,
                r=24 if _shape == "entries" else 22,
                layouts=_layouts,
            ),
        )
    )


@WITNESSES.of("tail rows stay at full precision", "TAIL-007", "fill 22, narrow the stored tails to bf16, resume at 22")
def _(on: bool) -> Outcome:
    plan = planner(BASE)

    def narrow(store: MemoryStore) -> None:
        for layer, group, key in list(store.objects()):
            if group.endswith("tail"):
                bf16_rows(plan, store, layer, group, key)

    return resume(plan, 22, stored=None if on else narrow)


@WITNESSES.of(
    "stored bytes are attended, also by the step that makes them",
    "CKV-008",
    "fp8 rows; the same tokens in steps of 8 and 1",
)
def _(on: bool) -> Outcome:
    class Late(Decoder):
        """Attends what it just computed in fp32, and narrows it to fp8 afterwards."""

        def forward(
            self, tokens: Sequence[int], start: int, frontier: int, state: Any, padding: int = 0
        ) -> torch.Tensor:
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
    return outcome(plan, MemoryStore(plan.decoder, 400), LENGTH, chunks=(1,), text=sequence(QUANTISED, 1, LENGTH))


@WITNESSES.of("kernel ABI: epoch", "IDX-001 IDX-002", "fill 24 with index keys of epoch 0, resume with epoch 1")
def _(on: bool) -> Outcome:
    class Lax(MemoryStore):
        """Does not compare the epoch."""

        def _agree(self, reader: Descriptor, writer: Descriptor) -> bool:
            return reader == msgspec.structs.replace(writer, epoch=reader.epoch)

    plan = planner(BASE)
    reader = Planner(Decoder(BASE, encoding=IndexEncoding(1)))
    return resume(plan, 24, reader=reader, store_type=MemoryStore if on else Lax)


@WITNESSES.of(
    "kernel ABI: convention of the log-sum-exp", "L2-001", "fill 22, resume at 22; parts in base 2, merged as natural"
)
def _(on: bool) -> Outcome:
    def base2(*arguments: Any) -> Any:
        before = arguments[:-1]
        other: Any = segment_decode
        return other(*before, Lse.FLASHINFER)

    truth(planner(BASE), TEXT)  # made under the rule
    return patched(on, decoder_attention, "segment_decode", base2, lambda: resume(planner(BASE), 22))


@WITNESSES.of(
    "byte alignment of source and target", "L4-001", "fill 22, resume into an arena that begins 4 bytes later"
)
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
