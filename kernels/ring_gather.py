"""ring_gather: put the window that a ring holds into position order.

Theory. A ring of R entries keeps position p at index p mod R, so a window that passed the end is stored in two pieces.
Rotary embedding is at absolute positions: in a paged window nothing ever shifts, and shift and trim is needed only
here, when a ring becomes a page (to be cached, spilled or sent). Bytes move as they are. What the ring does not hold is
written as zeros, so the page has one content for one window.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import dispatch
from hybridkv_ref.kernels._triton import AotCase, cdiv, jit, power_of_two, tl
from hybridkv_ref.layouts import Page, Place, load

ROWS = 16
"""Entries that one program moves."""


def ring_gather(
    rings: Tensor, ring_ids: Tensor, starts: Tensor, lengths: Tensor, out: Tensor, ring: Page, page: Page
) -> Tensor:
    """Write positions [starts[i], starts[i] + lengths[i]) of ring `ring_ids[i]` to block i of `out`; return `out`.

    rings     uint8 [rings, ring.stride]; position p at index p mod ring.entries
    ring_ids  int64 [n]; -1 has no entries
    starts    int64 [n], first position, not negative
    lengths   int64 [n], at most min(ring.entries, page.entries)
    out       uint8 [n, page.stride]: entry k is position starts[i] + k; entries from lengths[i] on become zeros.
              Bytes after the last entry (page.nbytes) stay
    ring, page  one layout at two numbers of entries

    InputError: wrong dtype, shape, alignment or device, two layouts.
    """
    name, n = "ring_gather", len(ring_ids)
    if (ring.layout, ring.heads, ring.dim) != (page.layout, page.heads, page.dim):
        raise InputError(f"{name}:page: {page.layout.id} and {ring.layout.id} at other heads or dim")
    dispatch.expect_arena(name, "rings", rings, ring)
    for role, tensor in (("ring_ids", ring_ids), ("starts", starts), ("lengths", lengths)):
        dispatch.expect(name, role, tensor, (torch.int64,), (n,))
    dispatch.expect_arena(name, "out", out, page)
    if len(out) != n:
        raise InputError(f"{name}:out: {len(out)} blocks for {n} rings")
    run = dispatch.choose(name, torch_version, triton_version, rings, ring_ids, starts, lengths, out)
    return run(rings, ring_ids, starts, lengths, out, ring, page)


def reference(
    rings: Tensor, ring_ids: Tensor, starts: Tensor, lengths: Tensor, out: Tensor, ring: Page, page: Page
) -> tuple[Tensor, ...]:
    """uint8: what `out` must hold afterwards."""
    result = out.clone()
    result[:, : page.nbytes] = 0
    pairs = list(zip(ring.regions(), page.regions(), strict=True))
    for i, (ring_id, start, length) in enumerate(
        zip(ring_ids.tolist(), starts.tolist(), lengths.tolist(), strict=True)
    ):
        for k in range(length if ring_id >= 0 else 0):
            for head in range(page.heads):
                for old, new in pairs:
                    source = old.base + (start + k) % ring.entries * old.entry_step + head * old.head_step
                    target = new.base + k * new.entry_step + head * new.head_step
                    result[i, target : target + new.count] = rings[ring_id, source : source + old.count]
    return (result,)


def _view(arena: Tensor, page: Page, region: Place) -> Tensor:
    """uint8 [blocks, entries, heads, bytes] of a region."""
    shape = (len(arena), page.entries, page.heads, region.count)
    strides = (arena.stride(0), region.entry_step, region.head_step, 1)
    return arena.as_strided(shape, strides, arena.storage_offset() + region.base)


def torch_version(
    rings: Tensor, ring_ids: Tensor, starts: Tensor, lengths: Tensor, out: Tensor, ring: Page, page: Page
) -> Tensor:
    """`ring_gather` on any device that torch knows."""
    k = torch.arange(page.entries, device=out.device)
    index = (starts[:, None] + k) % ring.entries
    there = (k < lengths[:, None]) & (ring_ids >= 0)[:, None]
    for old, new in zip(ring.regions(), page.regions(), strict=True):
        moved = _view(rings, ring, old)[ring_ids.clamp(min=0)[:, None], index]
        _view(out, page, new).copy_(moved * there[:, :, None, None])
    return out


@jit
def _move_region(
    source: tl.tensor, target: tl.tensor, index: tl.tensor, k: tl.tensor, head: tl.tensor, there: tl.tensor,
    inside: tl.tensor, OLD: tl.constexpr, NEW: tl.constexpr,
) -> None:  # fmt: skip
    cols = tl.arange(0, NEW.width)[None, :]
    words = cols < NEW.size
    source += OLD.base + index * OLD.entry_step + head * OLD.head_step
    target += NEW.base + k * NEW.entry_step + head * NEW.head_step
    word = tl.load(source[:, None] + cols, mask=there[:, None] & words, other=0)
    tl.store(target[:, None] + cols, word, mask=inside[:, None] & words)


@jit
def _kernel(
    rings: tl.tensor, ring_ids: tl.tensor, starts: tl.tensor, lengths: tl.tensor, out: tl.tensor,
    OLD_0: tl.constexpr, NEW_0: tl.constexpr, OLD_1: tl.constexpr, NEW_1: tl.constexpr,
    ENTRIES: tl.constexpr, NEW_ENTRIES: tl.constexpr, STRIDE: tl.constexpr, NEW_STRIDE: tl.constexpr, N: tl.constexpr,
) -> None:  # fmt: skip
    item = tl.program_id(0).to(tl.int64)
    head = tl.program_id(2)
    k = tl.program_id(1) * N + tl.arange(0, N)
    ring_id = tl.load(ring_ids + item)
    there = (k < tl.load(lengths + item)) & (ring_id >= 0)
    index = (tl.load(starts + item) + k) % ENTRIES
    source = rings.to(tl.pointer_type(tl.int32), bitcast=True) + ring_id * (STRIDE // 4)
    target = out.to(tl.pointer_type(tl.int32), bitcast=True) + item * (NEW_STRIDE // 4)
    _move_region(source, target, index, k, head, there, k < NEW_ENTRIES, OLD_0, NEW_0)
    if NEW_1.size > 0:
        _move_region(source, target, index, k, head, there, k < NEW_ENTRIES, OLD_1, NEW_1)


class _Words(NamedTuple):
    """A region in words of 4 bytes; `width` is `size` as a power of two."""

    base: int
    entry_step: int
    head_step: int
    size: int
    width: int


def _words(page: Page) -> tuple[_Words, _Words]:
    """The page's regions, the second of size 0 if there is one only."""
    regions = page.regions()
    if len(regions) > 2 or any(v % 4 for r in regions for v in (r.base, r.entry_step, r.head_step, r.count)):
        raise InputError(f"ring_gather:page: {page.layout.id} is not one or two regions of 4-byte words")
    first, *rest = (
        _Words(r.base // 4, r.entry_step // 4, r.head_step // 4, r.count // 4, power_of_two(r.count // 4))
        for r in regions
    )
    return first, rest[0] if rest else _Words(0, 0, 0, 0, 1)


def _constants(ring: Page, page: Page) -> dict[str, Any]:
    (old_0, old_1), (new_0, new_1) = _words(ring), _words(page)
    return {
        "OLD_0": old_0, "NEW_0": new_0, "OLD_1": old_1, "NEW_1": new_1, "ENTRIES": ring.entries,
        "NEW_ENTRIES": page.entries, "STRIDE": ring.stride, "NEW_STRIDE": page.stride, "N": ROWS,
    }  # fmt: skip


def grid(
    rings: Tensor, ring_ids: Tensor, starts: Tensor, lengths: Tensor, out: Tensor, ring: Page, page: Page
) -> tuple[int, ...]:
    """Programs: rings, tiles of entries, heads."""
    return len(ring_ids), cdiv(page.entries, ROWS), page.heads


def triton_version(
    rings: Tensor, ring_ids: Tensor, starts: Tensor, lengths: Tensor, out: Tensor, ring: Page, page: Page
) -> Tensor:
    """`ring_gather` in Triton: one program moves ROWS entries of one head."""
    programs = grid(rings, ring_ids, starts, lengths, out, ring, page)
    _kernel[programs](rings, ring_ids, starts, lengths, out, **_constants(ring, page))
    return out


def aot_cases() -> tuple[AotCase, ...]:
    """A ring of 192 V4 entries into a page of 128."""
    ring, page = load("fp8_ds_mla_584").page(192), load("fp8_ds_mla_584").page(128)
    arguments = {"rings": "*u8", "out": "*u8", "ring_ids": "*i64", "starts": "*i64", "lengths": "*i64"}
    return (AotCase("ring_gather[window]", _kernel, arguments, _constants(ring, page), tuple(arguments)),)
