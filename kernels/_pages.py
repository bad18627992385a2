"""Entries of a page: reading and writing them by the layout descriptor, for references, torch and Triton.

A slot is `block * page.entries + index in the block`; slot -1 means "not there": it reads as zeros and is never
written. Block offsets are 64-bit: an arena may be larger than 4 GiB.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import _bits
from hybridkv_ref.kernels._triton import jit, power_of_two, tl
from hybridkv_ref.layouts import Page, Place, Vector

WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
PLAIN = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}


def empty_arena(page: Page, blocks: int, device: torch.device | str = "cpu") -> Tensor:
    """uint8 [blocks, page.stride] with the base address that the layout demands; contents undefined."""
    size, align = blocks * page.stride, page.layout.base_align
    memory = torch.empty(size + align, dtype=torch.uint8, device=device)
    start = -memory.data_ptr() % align
    return memory[start : start + size].view(blocks, page.stride)


def _field(arena: Tensor, page: Page, place: Place) -> Tensor:
    """uint8 view [blocks, entries, heads, bytes] of one field in an arena uint8 [blocks, page.stride]."""
    shape = (arena.shape[0], page.entries, page.heads, place.nbytes)
    strides = (arena.stride(0), place.entry_step, place.head_step, 1)
    return arena.as_strided(shape, strides, arena.storage_offset() + place.base)


def _fetch(arena: Tensor, at: tuple[Tensor, Tensor], page: Page, place: Place) -> Tensor:
    """uint8 [n, heads, bytes] of one field at blocks and indices [n].  Moved in the widest words that fit."""
    offsets = (place.base, place.entry_step, place.head_step, place.nbytes, page.stride)
    width = math.gcd(8, arena.data_ptr(), arena.storage_offset(), *offsets)
    words = arena.view(WORDS[width])
    shape = (arena.shape[0], page.entries, page.heads, place.nbytes // width)
    steps = (words.stride(0), place.entry_step // width, place.head_step // width, 1)
    field = words.as_strided(shape, steps, words.storage_offset() + place.base // width)
    return field[at].view(torch.uint8)


def _codes(packed: Tensor, place: Place) -> Tensor:
    """uint8 codes, one per element, of packed bytes: two e2m1 codes to a byte, low nibble first."""
    if place.dtype != "e2m1":
        return packed
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def _scales(stored: Tensor, place: Place) -> Tensor:
    """fp32 scales from the bytes of a scale field."""
    if place.dtype == "fp32":
        return stored.view(torch.float32)
    return (stored.int() << 23).view(torch.float32)


def _tiled(x: Tensor, tiles: int) -> Tensor:
    return x.view(*x.shape[:-1], tiles, x.shape[-1] // tiles)


def table_slots(block_table: Tensor, row: int, entries: Tensor, page: Page) -> Tensor:
    """int64 slots of `entries` of request `row`; -1 where the row, the entry or its block is not there."""
    if row < 0:
        return torch.full_like(entries, -1, dtype=torch.int64)
    at = entries.long().clamp(min=0)
    block = block_table[row].long()[at // page.entries]
    return torch.where((entries < 0) | (block < 0), -1, block * page.entries + at % page.entries)


def precision(page: Page) -> torch.dtype:
    """The dtype in which torch versions compute on this page: float64 if it stores fp64, else float32."""
    return torch.float64 if any(place.dtype == "fp64" for place in page.places.values()) else torch.float32


def read(arena: Tensor, slots: Tensor, page: Page, vector: str = "kv") -> Tensor:
    """[slots, heads, dim] in the page's precision of int64 `slots`; zeros where a slot is negative."""
    here = slots >= 0
    out = read_there(arena, slots.clamp(min=0), page, vector)
    return out if bool(here.all()) else out.masked_fill_(~here[:, None, None], 0.0)


def read_there(arena: Tensor, slots: Tensor, page: Page, vector: str = "kv") -> Tensor:
    """`read` of slots of which none is negative; nothing in it waits for the device."""
    parts, at = page.vector(vector), (slots // page.entries, slots % page.entries)
    split = parts.quantised.count if parts.quantised is not None else 0
    out = torch.empty(len(slots), page.heads, parts.dim, dtype=precision(page), device=arena.device)
    if parts.quantised is not None:
        codes = _codes(_fetch(arena, at, page, parts.quantised), parts.quantised)
        values = _bits.widen(codes, parts.quantised.dtype)
        if parts.scale is None:
            out[..., :split] = values
        else:
            scales = _scales(_fetch(arena, at, page, parts.scale), parts.scale).unsqueeze(-1)
            torch.mul(_tiled(values, parts.scale.count), scales, out=_tiled(out[..., :split], parts.scale.count))
    if parts.plain is not None:
        out[..., split:] = _fetch(arena, at, page, parts.plain).view(PLAIN[parts.plain.dtype])
    return out


def write(arena: Tensor, slots: Tensor, values: Tensor, page: Page, vector: str = "kv") -> None:
    """Narrow and store `values` [slots, heads, dim] at int64 `slots`; negative slots are skipped."""
    kept = (slots >= 0).nonzero()[:, 0]
    at, x = slots[kept], values[kept]
    parts = page.vector(vector)

    def put(place: Place, stored: Tensor) -> None:
        _field(arena, page, place)[at // page.entries, at % page.entries] = stored

    split = parts.quantised.count if parts.quantised is not None else 0
    if parts.quantised is not None:
        place, rule, low = parts.quantised, page.layout.scale_rule, x[..., :split].float()
        if parts.scale is not None:
            tiles = _tiled(low, parts.scale.count)
            scales = _bits.scale_of(tiles.abs().amax(-1), place.dtype, rule, page.layout.min_exponent)
            low = (tiles / scales.unsqueeze(-1)).flatten(-2)
            exponents = (scales.view(torch.int32) >> 23).to(torch.uint8)
            put(parts.scale, exponents if parts.scale.dtype == "ue8m0" else scales.view(torch.uint8))
        codes = _bits.narrow(low, place.dtype)
        put(place, codes if place.dtype != "e2m1" else codes[..., 0::2] | (codes[..., 1::2] << 4))
    if parts.plain is not None:
        put(parts.plain, x[..., split:].to(PLAIN[parts.plain.dtype]).contiguous().view(torch.uint8))
    if parts.pad is not None:
        put(parts.pad, torch.zeros(parts.pad.nbytes, dtype=torch.uint8, device=arena.device))


def read_exact(arena: Tensor, slots: Tensor, page: Page, vector: str = "kv") -> Tensor:
    """float64 [slots, heads, dim]: `read` from the formats' definitions, one element at a time. For references."""
    parts = page.vector(vector)
    out = torch.zeros(len(slots), page.heads, parts.dim, dtype=torch.float64)
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        block, index = divmod(slot, page.entries)
        for head in range(page.heads):
            out[row, head] = _read_one(arena[block], index, head, parts)
    return out.to(arena.device)


def _read_one(block: Tensor, index: int, head: int, parts: Vector) -> Tensor:
    def stored(place: Place) -> Tensor:
        start = place.base + index * place.entry_step + head * place.head_step
        return block[start : start + place.nbytes].cpu().contiguous()

    out = []
    if parts.quantised is not None:
        values = _bits.code_values(parts.quantised.dtype)[_codes(stored(parts.quantised), parts.quantised).long()]
        if parts.scale is not None:
            raw = stored(parts.scale)
            scale = raw.view(torch.float32).double() if parts.scale.dtype == "fp32" else torch.exp2(raw.double() - 127)
            values = (_tiled(values, parts.scale.count) * scale[:, None]).flatten()
        out.append(values)
    if parts.plain is not None:
        out.append(stored(parts.plain).view(PLAIN[parts.plain.dtype]).double())
    return torch.cat(out)


def narrowed_exact(values: Tensor, page: Page, vector: str = "kv") -> Tensor:
    """float64: what `values` [..., dim] read as after they were stored in the page. For references."""
    parts = page.vector(vector)
    split = parts.quantised.count if parts.quantised is not None else 0
    low, high = values[..., :split].double(), values[..., split:]
    if parts.quantised is not None and parts.scale is not None:
        tiles = _tiled(low, parts.scale.count)
        scale = _bits.exact_scale(
            tiles.abs().amax(-1, keepdim=True), parts.quantised.dtype, page.layout.scale_rule, page.layout.min_exponent
        )
        low = (_bits.nearest(tiles / scale, parts.quantised.dtype) * scale).flatten(-2)
    elif parts.quantised is not None:
        low = _bits.nearest(low, parts.quantised.dtype)
    if parts.plain is not None:
        high = high.to(PLAIN[parts.plain.dtype])
    return torch.cat((low, high.double()), dim=-1)


class Codec(NamedTuple):
    """What a Triton kernel knows of one vector in a page: compile-time constants, all in bytes but the counts."""

    stride: int
    entries: int
    dim: int
    width: int  # dim, rounded up to a power of two: a kernel's tile
    element: str
    q_base: int
    q_entry: int
    q_head: int
    q_count: int
    mantissa: int
    bias: int
    top: int
    nan: bool
    top_exponent: int
    top_mantissa: int
    maximum: float
    rule: str
    least: int
    scale: str
    s_base: int
    s_entry: int
    s_head: int
    s_count: int
    s_stored: int  # scales and the padding right behind them
    tile: int
    plain: str
    p_base: int
    p_entry: int
    p_head: int


def codec(operation: str, page: Page, vector: str = "kv") -> Codec:
    """The constants of `vector` in `page`. InputError: fp64 fields, which no Triton kernel takes."""
    parts = page.vector(vector)
    if precision(page) is torch.float64:
        raise InputError(f"{operation}:page: layout {page.layout.id} has fp64 fields, which run in torch only")
    none = Place("u8", 0, 0, 0, 0)
    q, s, p = parts.quantised or none, parts.scale or none, parts.plain or none
    element = _bits.ELEMENTS.get(q.dtype, _bits.ELEMENTS["e4m3"])
    stored = s.count + (parts.pad.count if parts.pad is not None and parts.pad.base == s.base + s.nbytes else 0)
    return Codec(
        stride=page.stride, entries=page.entries, dim=parts.dim, width=power_of_two(parts.dim),
        element=q.dtype if parts.quantised else "", q_base=q.base, q_entry=q.entry_step, q_head=q.head_step,
        q_count=q.count, mantissa=element.mantissa, bias=element.bias, top=element.top, nan=element.nan,
        top_exponent=element.top_exponent, top_mantissa=element.top_mantissa, maximum=element.maximum,
        rule=page.layout.scale_rule, least=page.layout.min_exponent,
        scale=s.dtype if parts.scale else "", s_base=s.base, s_entry=s.entry_step, s_head=s.head_step,
        s_count=s.count, s_stored=stored, tile=page.layout.tile,
        plain=p.dtype if parts.plain else "", p_base=p.base, p_entry=p.entry_step, p_head=p.head_step,
    )  # fmt: skip


@jit
def load_rows(
    arena: tl.tensor, block: tl.tensor, index: tl.tensor, head: tl.tensor, ok: tl.tensor, C: tl.constexpr,
    BF16: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """[N, C.width] of entries (block, index) [N] int64 and one head; zeros where not `ok`, and beyond C.dim.

    fp32, or bf16 if BF16: narrowed before the parts are put together, which halves what they need of a program's
    registers and shared memory. Power-of-two scales lose nothing by it.
    """
    N: tl.constexpr = block.shape[0]
    start = arena + block * C.stride
    cols = tl.arange(0, C.width)[None, :]
    if C.element != "":
        row = start + (C.q_base + index * C.q_entry + head * C.q_head)
        if C.element == "e2m1":
            pairs = tl.arange(0, C.width // 2)[None, :]
            packed = tl.load(row[:, None] + pairs, mask=ok[:, None] & (pairs < C.q_count // 2), other=0)
            value = widen_e2m1(tl.reshape(tl.join(packed & 0xF, packed >> 4), (N, C.width)))
        else:
            value = widen_e4m3(tl.load(row[:, None] + cols, mask=ok[:, None] & (cols < C.q_count), other=0))
        if C.scale != "":
            T: tl.constexpr = C.width // C.tile
            tiles = tl.arange(0, T)[None, :]
            row = start + (C.s_base + index * C.s_entry + head * C.s_head)
            stored = ok[:, None] & (tiles < C.s_count)
            if C.scale == "ue8m0":
                exponent = tl.load(row[:, None] + tiles, mask=stored, other=0)
                scale = (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)
            else:
                at = row.to(tl.pointer_type(tl.float32), bitcast=True)
                scale = tl.load(at[:, None] + tiles, mask=stored, other=0.0)
            value = tl.reshape(tl.reshape(value, (N, T, C.tile)) * scale[:, :, None], (N, C.width))
        if BF16:
            value = value.to(tl.bfloat16)
    if C.plain != "":
        row = start + (C.p_base + index * C.p_entry + head * C.p_head)
        there = ok[:, None] & (cols >= C.q_count) & (cols < C.dim)
        if C.plain == "bf16":
            at = row.to(tl.pointer_type(tl.int16), bitcast=True)[:, None] + (cols - C.q_count)
            bits = tl.load(at, mask=there, other=0)
            plain = bits.to(tl.bfloat16, bitcast=True) if BF16 else widen_bf16(bits)
        else:
            at = row.to(tl.pointer_type(tl.float32), bitcast=True)[:, None] + (cols - C.q_count)
            exact = tl.load(at, mask=there, other=0.0)
            plain = exact.to(tl.bfloat16) if BF16 else exact
        value = tl.where(cols < C.q_count, value, plain) if C.element != "" else plain
    return value


@jit
def store_rows(
    arena: tl.tensor, block: tl.tensor, index: tl.tensor, ok: tl.tensor, x: tl.tensor, C: tl.constexpr
) -> None:
    """Narrow fp32 `x` [N, C.width] and store it at entries (block, index) [N] int64 where `ok`; one head."""
    N: tl.constexpr = x.shape[0]
    start = arena + block * C.stride
    cols = tl.arange(0, C.width)[None, :]
    if C.element != "":
        low = x
        if C.scale != "":
            T: tl.constexpr = C.width // C.tile
            tiles = tl.arange(0, T)[None, :]
            grouped = tl.reshape(x, (N, T, C.tile))
            amax = tl.max(tl.abs(grouped), axis=2)
            row = start + (C.s_base + index * C.s_entry)
            if C.rule == "pow2_ceil":
                power = scale_power(amax, C.top_exponent, C.top_mantissa, C.least)
                scale = power_of_two_bits(power)
                low = tl.reshape(grouped * power_of_two_bits(-power)[:, :, None], (N, C.width))
            else:
                scale = tl.maximum(tl.div_rn(amax, C.maximum), 2.0**C.least)
                wide = tl.broadcast_to(scale[:, :, None], (N, T, C.tile))
                low = tl.reshape(tl.div_rn(grouped, wide), (N, C.width))
            if C.scale == "ue8m0":
                exponent = tl.where(tiles < C.s_count, (scale.to(tl.int32, bitcast=True) >> 23), 0).to(tl.uint8)
                tl.store(row[:, None] + tiles, exponent, mask=ok[:, None] & (tiles < C.s_stored))
            else:
                at = row.to(tl.pointer_type(tl.float32), bitcast=True)[:, None] + tiles
                tl.store(at, scale, mask=ok[:, None] & (tiles < C.s_count))
        code = narrow_small(low, C.mantissa, C.bias, C.top, C.nan)
        row = start + (C.q_base + index * C.q_entry)
        if C.element == "e2m1":
            code = code | (sign_bit(low) << 3)
            first, second = tl.split(tl.reshape(code, (N, C.width // 2, 2)))
            pairs = tl.arange(0, C.width // 2)[None, :]
            packed = (first | (second << 4)).to(tl.uint8)
            tl.store(row[:, None] + pairs, packed, mask=ok[:, None] & (pairs < C.q_count // 2))
        else:
            code = (code | (sign_bit(low) << 7)).to(tl.uint8)
            tl.store(row[:, None] + cols, code, mask=ok[:, None] & (cols < C.q_count))
    if C.plain != "":
        row = start + (C.p_base + index * C.p_entry)
        there = ok[:, None] & (cols >= C.q_count) & (cols < C.dim)
        if C.plain == "bf16":
            at = row.to(tl.pointer_type(tl.int16), bitcast=True)[:, None] + (cols - C.q_count)
            tl.store(at, narrow_bf16(x), mask=there)
        else:
            at = row.to(tl.pointer_type(tl.float32), bitcast=True)[:, None] + (cols - C.q_count)
            tl.store(at, x, mask=there)


widen_e4m3, widen_e2m1, widen_bf16 = _bits.widen_e4m3, _bits.widen_e2m1, _bits.widen_bf16
narrow_small, narrow_bf16, sign_bit = _bits.narrow_small, _bits.narrow_bf16, _bits.sign_bit
scale_power, power_of_two_bits = _bits.scale_power, _bits.power_of_two
