"""Random cases of every operation, and the comparison of what a version wrote with its float64 reference.

What an operation only reads is filled with 0xFF (a NaN in every format) wherever it must not look; what it writes is
poisoned before every run, and bytes that are not its own must stay. Tolerances follow from the formats: EPS is the unit
roundoff of fp32, narrowing costs half a step of the narrow format.
"""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from hybridkv_ref import layouts
from hybridkv_ref.kernels import _bits, _pages
from hybridkv_ref.kernels._lse import LOG2_E, Lse
from hybridkv_ref.layouts import Page

EPS = 2.0**-24
Draw = Callable[[st.SearchStrategy[Any]], Any]


class Case(NamedTuple):
    """Arguments of an operation; `observed` reads what it wrote, `allowed` bounds the error of each observation."""

    arguments: dict[str, Any]
    outputs: tuple[str, ...]
    observed: Callable[[dict[str, Any]], tuple[Tensor, ...]]
    allowed: Callable[[tuple[Tensor, ...]], tuple[Tensor | float, ...]]
    owned: Mapping[str, Tensor] = MappingProxyType({})  # byte outputs: mask of the bytes that may change
    narrow: tuple[float, ...] = (0.0, 0.0)  # what operands narrowed to bf16 for tensor cores may add to each bound


def run(version: Callable[..., Any], case: Case, seed: int = 0) -> dict[str, Any]:
    """The arguments after `version` ran on poisoned outputs."""
    arguments = dict(case.arguments)
    generator = torch.Generator().manual_seed(seed)
    for name in case.outputs:
        poisoned = arguments[name].clone()
        if poisoned.dtype is torch.uint8:
            memory = torch.empty(poisoned.numel() + 512, dtype=torch.uint8)
            poisoned = memory[-memory.data_ptr() % 512 :][: poisoned.numel()].view(poisoned.shape)
            poisoned.random_(0, 256, generator=generator)
        else:
            poisoned.fill_(math.nan if poisoned.is_floating_point() else 0x5A5A5A5A)
        arguments[name] = poisoned
    before = {name: arguments[name].clone() for name in case.outputs}
    reads = {
        name: arguments[name].clone() for name in arguments if name not in case.outputs and _is_tensor(arguments[name])
    }
    version(**arguments)
    for name, mask in case.owned.items():
        changed = (arguments[name] != before[name]) & ~mask
        assert not changed.any(), f"{name}: {int(changed.sum())} bytes changed that are not the operation's"
    for name, value in reads.items():
        assert torch.equal(arguments[name].view(torch.uint8), value.view(torch.uint8)), f"{name} was written"
    return arguments


def _is_tensor(value: object) -> bool:
    return isinstance(value, Tensor)


def check(module: Any, version: Callable[..., Any], case: Case, tensor_cores: bool = False) -> None:
    """Run `version` of `module` on `case` and compare every observation with the reference."""
    arguments = run(version, case)
    expected = module.reference(**arguments | {name: case.arguments[name] for name in case.outputs})
    observed = case.observed(arguments)
    for got, want, bound, extra in zip(
        observed, expected, case.allowed(expected), case.narrow[: len(observed)], strict=True
    ):
        assert got.shape == want.shape
        finite = want.double().isfinite()
        assert torch.equal(got.double()[~finite], want.double()[~finite])
        error = (got.double() - want.double()).abs()
        limit = (torch.as_tensor(bound, dtype=torch.float64) + (extra if tensor_cores else 0.0)).expand_as(error)
        wrong = finite & ~(error <= limit)  # a NaN is wrong
        assert not wrong.any(), (
            f"{int(wrong.sum())} wrong, first {got[wrong][0]} for {want[wrong][0]} +- {limit[wrong][0]}"
        )


def randn(draw: Draw, *shape: int) -> Tensor:
    """fp32, normal; with a drawn seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 2**16))))


def integers(draw: Draw, low: int, high: int) -> int:
    return int(draw(st.integers(low, high)))


def slots_with_gaps(draw: Draw, n: int, blocks: int, page: Page) -> Tensor:
    """int64 [n] different slots, the second one -1 where there are two."""
    order = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    slots = torch.randperm(blocks * page.entries, generator=order)[:n]
    if len(slots) > 1:
        slots[1] = -1
    return slots


def arena_of(page: Page, blocks: int) -> Tensor:
    """A fresh arena, NaN in every format."""
    return _pages.empty_arena(page, blocks).fill_(0xFF)


def owned_bytes(page: Page, blocks: int, slots: Tensor) -> Tensor:
    """bool [blocks, stride]: the bytes of the entries `slots`."""
    mask = torch.zeros(blocks, page.stride, dtype=torch.uint8)
    kept = slots[slots >= 0]
    for place in page.places.values():
        _pages._field(mask, page, place)[kept // page.entries, kept % page.entries] = 1
    return mask.bool()


def narrowing(values: Tensor, page: Page, slack: Tensor | float = 0.0) -> Tensor:
    """Half a step of the stored format around float64 `values` [..., dim] that are themselves off by `slack`."""
    parts = page.vector("kv")
    split = parts.quantised.count if parts.quantised else 0
    low, high = values[..., :split].abs() + slack, values[..., split:].abs() + slack
    bounds = []
    if parts.quantised:
        element = _bits.ELEMENTS[parts.quantised.dtype]
        scale: Tensor | float = 1.0
        if parts.scale:
            tiles = low.reshape(*low.shape[:-1], parts.scale.count, -1)
            scale = (2 * tiles.amax(-1, keepdim=True) / element.maximum).expand_as(tiles).flatten(-2)
        bounds.append(
            torch.maximum(
                low * 2.0 ** -(element.mantissa + 1), scale * 2.0 ** -(element.bias + element.mantissa) + 0 * low
            )
        )
    if parts.plain:
        bounds.append(high * {"bf16": 2.0**-8, "fp32": EPS, "fp64": 0.0}[parts.plain.dtype])
    return torch.cat(bounds, dim=-1) + slack


def edges(page: Page) -> Tensor:
    """fp32 [n, page.dim]: rows where rounding is decided by the last bit.

    Under a scale of 1, every value of the stored format, every midpoint between neighbours (ties to even) and the fp32
    next to each; then tiles whose amax is the largest value times a power of two, and the fp32 next to it: there the
    rule of the scale changes.
    """
    parts = page.vector("kv")
    if parts.quantised is None:
        around = torch.tensor([1.0, -3.0, 640.0])  # ties in bf16: half an ulp above an even and an odd mantissa
        points = torch.cat((around * (1 + 2.0**-8), around * (1 + 3 * 2.0**-8)))
        points = torch.stack([points.nextafter(toward) for toward in (points, points - 1, points + 1)]).flatten()
        return points.repeat(-(-page.dim // len(points)))[None, : page.dim]
    grid = _bits.code_values(parts.quantised.dtype).float()
    grid = grid[grid.isfinite()].sort().values
    points = torch.cat((grid, (grid[1:] + grid[:-1]) / 2))
    points = torch.cat([points.nextafter(toward) for toward in (points, points - 1, points + 1)])
    points = points[points.abs() <= grid.max()]
    tile = page.layout.tile or parts.quantised.count
    per_tile = [points[start : start + tile - 1] for start in range(0, len(points), tile - 1)]
    rows = torch.zeros(len(per_tile) + 6, page.dim)
    for row, values in zip(rows, per_tile, strict=False):
        for start in range(0, parts.quantised.count, tile):
            row[start] = grid.max()  # holds the scale at 1
            row[start + 1 : start + 1 + len(values)] = values
    for row, power in zip(rows[-6:].view(2, 3, -1), (-3.0, 5.0), strict=True):
        largest = torch.tensor(float(grid.max()) * 2.0**power)
        for line, toward in zip(row, (largest, torch.tensor(0.0), torch.tensor(math.inf)), strict=True):
            line[:] = largest.nextafter(toward)
    return rows


def entry_page(draw: Draw, names: tuple[str, ...], dim: int, entries: int = 5, least: int = 1) -> Page:
    layout = layouts.load(draw(st.sampled_from(names)))
    heads = 2 if layout.heads == "model" else None
    return layout.page(integers(draw, least, entries), heads=heads, dim=dim if layout.dim == "model" else None)


ENTRY_LAYOUTS = ("fp8_ds_mla_584", "dsv32_656", "uniform_fp8_512", "bf16", "fp32", "index_fp8_132", "index_fp4_68")
INDEX_LAYOUTS = ("index_fp8_132", "index_fp4_68", "bf16")
DECODE_LAYOUTS = ("fp8_ds_mla_584", "bf16", "fp32", "bf16_nhd", "bf16_hnd", "uniform_fp8_512")


def filled(draw: Draw, page: Page, blocks: int, slots: Tensor) -> Tensor:
    """An arena with random entries at `slots` and NaN elsewhere."""
    cache = arena_of(page, blocks)
    for vector in dict.fromkeys(field.vector for field in page.layout.fields):
        values = randn(draw, len(slots), page.heads, page.vector(vector).dim)
        _pages.write(cache, slots, values * torch.exp2(randn(draw, len(slots), 1, 1)), page, vector)
    return cache


def index_build(draw: Draw) -> Case:
    page, blocks, n = entry_page(draw, ENTRY_LAYOUTS, 24), 4, integers(draw, 1, 4)
    slots = slots_with_gaps(draw, n, blocks, page)
    keys = randn(draw, len(slots), page.dim) * torch.exp2(8 * randn(draw, len(slots), 1))
    return Case(
        {"keys": keys, "slots": slots, "cache": arena_of(page, blocks), "page": page},
        ("cache",),
        lambda a: (
            torch.where(
                (slots >= 0)[:, None],
                _pages.read_exact(a["cache"], slots, page)[:, 0],
                _pages.narrowed_exact(keys, page),
            ),
        ),
        lambda want: (want[0].abs() * (2 * EPS if page.layout.scale_rule == "amax_div" else 0.0),),
        {"cache": owned_bytes(page, blocks, slots)},
    )


def gather_dequant(draw: Draw) -> Case:
    page, blocks = entry_page(draw, (*ENTRY_LAYOUTS, "bf16_nhd", "bf16_hnd"), 24), 4
    slots = slots_with_gaps(draw, integers(draw, 1, 6), blocks, page)
    vector = draw(st.sampled_from(("k", "v"))) if "k" in page.places else "kv"
    dtype = draw(st.sampled_from((torch.float32, torch.bfloat16)))
    out = torch.empty(len(slots), page.heads, page.vector(vector).dim, dtype=dtype)
    step = 2.0**-8 if dtype is torch.bfloat16 else EPS if page.layout.scale_rule == "amax_div" else 0.0
    return Case(
        {"cache": filled(draw, page, blocks, slots), "slots": slots, "out": out, "page": page, "vector": vector},
        ("out",),
        lambda a: (a["out"],),
        lambda want: (want[0].abs() * step,),
    )


def tail_append(draw: Draw) -> Case:
    page, blocks, n = layouts.load("state_fp32").page(integers(draw, 1, 8), dim=12), 3, integers(draw, 1, 6)
    slots = slots_with_gaps(draw, n, blocks, page)
    kv, score = randn(draw, len(slots), page.dim), randn(draw, len(slots), page.dim)
    bias = draw(st.sampled_from((None, randn(draw, 4, page.dim))))
    positions = torch.arange(len(slots)) + integers(draw, 0, 9)
    arguments = {"kv": kv, "score": score, "bias": bias, "positions": positions, "slots": slots, "page": page}
    there = (slots >= 0)[:, None]

    def observed(a: dict[str, Any]) -> tuple[Tensor, ...]:
        total = score.double() if bias is None else score.double() + bias[positions % 4].double()
        stored = [_pages.read_exact(a["state"], slots, page, name)[:, 0] for name in ("kv", "score")]
        return torch.where(there, stored[0], kv.double()), torch.where(there, stored[1], total)

    return Case(
        arguments | {"state": arena_of(page, blocks)},
        ("state",),
        observed,
        lambda want: (0.0, want[1].abs() * EPS),
        {"state": owned_bytes(page, blocks, slots)},
    )


def compress_pool_quant(draw: Draw) -> Case:
    ratio, overlap = draw(st.sampled_from(((4, 4), (6, 0), (2, 2))))
    page, blocks, n = entry_page(draw, ("fp8_ds_mla_584", "bf16", "fp32", "index_fp8_132", "index_fp4_68"), 32), 3, 3
    state_page = layouts.load("state_fp32").page(4, dim=page.dim * (2 if overlap else 1))
    rows = overlap + ratio
    row_slots = torch.arange(n * rows).view(n, rows)
    state = filled(draw, state_page, -(-n * rows // 4), row_slots.flatten())
    row_slots[0, : overlap or 1] = -1  # before the sequence's start
    weight = draw(st.sampled_from((None, 1.0 + 0.1 * randn(draw, page.dim))))
    angles = randn(draw, 40, 1, 8)
    rotary = draw(st.sampled_from((None, torch.cat((angles.cos(), angles.sin()), dim=1))))
    out_slots = slots_with_gaps(draw, n, blocks, page)
    n = len(out_slots)
    arguments = {
        "state": state, "row_slots": row_slots[:n].contiguous(), "positions": torch.arange(n) * ratio, "weight": weight,
        "rotary": rotary, "out_slots": out_slots, "cache": arena_of(page, blocks), "state_page": state_page,
        "page": page, "overlap": overlap,
    }  # fmt: skip

    def allowed(want: tuple[Tensor, ...]) -> tuple[Tensor | float, ...]:
        # a sum of `rows` products, exp and the norm: a few roundings per row of the largest kv, scaled by the norm
        largest = _pages.read_exact(state, row_slots.flatten(), state_page, "kv").abs().max()
        pooled = want[0] if weight is None else want[0] / weight.abs().max()
        norm = 1.0 if weight is None else weight.abs().max() / _smallest_rms(arguments)
        return (narrowing(want[0], page, 4 * (rows + 8) * EPS * torch.maximum(largest * norm, pooled.abs().max())),)

    return Case(
        arguments,
        ("cache",),
        lambda a: (_pages.read_exact(a["cache"], out_slots, page)[:, 0],),
        allowed,
        {"cache": owned_bytes(page, blocks, out_slots)},
    )


def _smallest_rms(arguments: dict[str, Any]) -> Tensor:
    """The least root mean square of a pooled row that the norm divides by."""
    from hybridkv_ref.kernels import compress_pool_quant as module

    pooled = module.reference(**arguments | {"weight": None, "rotary": None})[0]
    rms = pooled.square().mean(-1).sqrt()
    return rms[rms > 0].min()


def copy_blocks(draw: Draw) -> Case:
    unit = draw(st.sampled_from((8, 16)))
    strides = [integers(draw, 4, 20) * unit for _ in range(2)]
    source, target = (torch.randint(0, 256, (5, stride), dtype=torch.uint8) for stride in strides)
    moves, mask = [], torch.zeros(5, strides[1], dtype=torch.bool)
    for target_block in range(integers(draw, 1, 5)):
        size = integers(draw, 1, min(strides) // unit)
        start, goal = integers(draw, 0, strides[0] // unit - size), integers(draw, 0, strides[1] // unit - size)
        block = integers(draw, 0, 4) if target_block != 1 else -1
        moves.append([block, start * unit, target_block, goal * unit, size * unit])
        if block >= 0:
            mask[target_block, goal * unit : (goal + size) * unit] = True
    arguments = {"source": source, "moves": torch.tensor(moves), "unit": unit}
    return Case(
        arguments | {"target": target},
        ("target",),
        lambda a: (torch.where(mask, a["target"], target),),
        lambda want: (0.0,),
        {"target": mask},
    )


def ring_gather(draw: Draw) -> Case:
    ring = entry_page(draw, ("fp8_ds_mla_584", "index_fp8_132", "bf16", "bf16_hnd", "bf16_nhd"), 6, entries=9)
    dim = ring.dim if ring.layout.dim == "model" else None
    page = ring.layout.page(integers(draw, 1, 9), heads=ring.heads if ring.layout.heads == "model" else None, dim=dim)
    n, rings = 3, 4
    most = min(ring.entries, page.entries)
    used = torch.zeros(n, page.stride, dtype=torch.bool)
    used[:, : page.nbytes] = True
    arguments = {
        "rings": torch.randint(0, 256, (rings, ring.stride), dtype=torch.uint8),
        "ring_ids": torch.tensor([integers(draw, 0, rings - 1), -1, integers(draw, 0, rings - 1)]),
        "starts": torch.tensor([integers(draw, 0, 40) for _ in range(n)]),
        "lengths": torch.tensor([integers(draw, 1, most), most, integers(draw, 0, most)]),
        "ring": ring, "page": page,
    }  # fmt: skip
    out = torch.zeros(n, page.stride, dtype=torch.uint8)
    return Case(
        arguments | {"out": out}, ("out",), lambda a: (torch.where(used, a["out"], out),), lambda want: (0.0,),
        {"out": used},
    )  # fmt: skip


def _paged(draw: Draw, page: Page, requests: int, width: int) -> tuple[Tensor, Tensor]:
    """A cache and a block table [requests, width] with one block missing; blocks outside the table are NaN."""
    blocks = requests * width + 1
    order = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    table = (torch.randperm(blocks, generator=order)[1:].view(requests, width)).to(torch.int32)
    slots = (table.long()[:, :, None] * page.entries + torch.arange(page.entries)).flatten()
    cache = filled(draw, page, blocks, slots)
    missing = int(table[-1, -1])
    cache[missing] = 0xFF
    table[-1, -1] = -1
    return cache, table


def indexer_logits(draw: Draw) -> Case:
    page = entry_page(draw, INDEX_LAYOUTS, 32, entries=6)
    cache, table = _paged(draw, page, 2, 3)
    heads, columns = integers(draw, 1, 5), integers(draw, 1, 3 * page.entries)
    rows = torch.tensor([1, 0, -1, 1], dtype=torch.int32)
    visible = torch.tensor(
        [columns, integers(draw, 0, columns), columns, integers(draw, 0, columns)], dtype=torch.int32
    )
    q = randn(draw, 4, heads, page.dim).to(draw(st.sampled_from((torch.float32, torch.bfloat16))))
    weights = randn(draw, 4, heads)
    largest = _pages.read_exact(cache, torch.arange(len(cache) * page.entries), page).nan_to_num().abs().max()
    size = weights.abs().sum(1).max() * q.double().abs().sum(-1).max() * largest
    arguments = {
        "q": q, "weights": weights, "rows": rows, "visible": visible, "block_table": table, "cache": cache,
        "logits": torch.empty(4, columns), "page": page,
    }  # fmt: skip
    return Case(
        arguments, ("logits",), lambda a: (a["logits"],), lambda want: ((page.dim + heads) * EPS * size,)
    )  # fmt: skip


def topk_select(draw: Draw) -> Case:
    queries, columns, k = integers(draw, 1, 3), integers(draw, 1, 40), integers(draw, 1, 24)
    logits = randn(draw, queries, columns).relu()  # half of them tie at zero
    logits[:, ::3] = torch.round(logits[:, ::3])
    logits[:, ::5] *= -1.0  # -0.0 among them
    logits[:, 7::11] = -math.inf
    logits[:, 9::13] = math.nan
    visible = torch.tensor([integers(draw, 0, columns) for _ in range(queries)], dtype=torch.int32)
    return Case(
        {"logits": logits, "visible": visible, "chosen": torch.empty(queries, k, dtype=torch.int32)},
        ("chosen",),
        lambda a: (a["chosen"],),
        lambda want: (0.0,),
    )


def segment_decode(draw: Draw) -> Case:
    page = entry_page(draw, DECODE_LAYOUTS, 16, entries=12, least=6)  # more entries than a program holds at a time
    cache, table = _paged(draw, page, 2, 3)
    reach, heads, splits = 3 * page.entries, page.heads * integers(draw, 1, 3), integers(draw, 1, 3)
    rows = torch.tensor([1, 0, -1], dtype=torch.int32)
    entries = first = None
    if draw(st.booleans()):
        entries = torch.stack([torch.randperm(reach) for _ in range(3)]).to(torch.int32)
        entries[:, 1::4] = -1
        count = torch.tensor([reach, integers(draw, 0, reach), reach], dtype=torch.int32)
    else:
        first = torch.tensor([integers(draw, 0, reach - 1) for _ in range(3)], dtype=torch.int32)
        count = torch.tensor([integers(draw, 0, reach - int(start)) for start in first], dtype=torch.int32)
    q = randn(draw, 3, heads, page.dim).to(draw(st.sampled_from((torch.float32, torch.bfloat16))))
    scale = page.dim**-0.5
    convention = draw(st.sampled_from(tuple(Lse)))
    out = torch.empty(splits, 3, heads, page.dim)
    arguments = {
        "q": q, "rows": rows, "entries": entries, "first": first, "count": count, "block_table": table,
        "cache": cache, "out": out, "lse": torch.empty(splits, 3, heads), "page": page, "scale": scale,
        "convention": convention,
    }  # fmt: skip
    vectors = ("k", "v") if "k" in page.places else ("kv",)
    every = torch.arange(len(cache) * page.entries)
    largest = max(float(_pages.read_exact(cache, every, page, name).nan_to_num().abs().max()) for name in vectors)
    # an error of the scores moves every weight by as much; then a sum of `reach` products
    scores = (page.dim + 4) * EPS * scale * float(q.double().abs().sum(-1).max()) * largest
    weights = 2 * scores + 4 * (reach + 8) * EPS

    def allowed(want: tuple[Tensor, ...]) -> tuple[Tensor | float, ...]:
        logs = torch.where(want[1].isfinite(), want[1].abs(), 0.0)
        return 2 * weights * largest, LOG2_E * weights + 8 * EPS * logs

    # bf16 weights and values, and keys where the page holds more than bf16
    keys = 2.0**-8 * scale * float(q.double().abs().sum(-1).max()) * largest if page.layout.id == "fp32" else 0.0
    narrow = ((2 * keys + 2.0**-7) * largest, LOG2_E * keys)
    return Case(arguments, ("out", "lse"), lambda a: (a["out"], a["lse"]), allowed, narrow=narrow)


def merge_lse(draw: Draw) -> Case:
    parts, queries, heads, dim = (integers(draw, 1, most) for most in (4, 3, 6, 24))
    convention = draw(st.sampled_from(tuple(Lse)))
    partials, natural = randn(draw, parts, queries, heads, dim), 10 * randn(draw, parts, queries, heads)
    empty = randn(draw, parts, queries, heads) > 0.7
    empty[:, 0, 0] = True  # nothing at all for one head
    natural[empty] = -math.inf
    partials[empty] = math.nan
    sink = draw(st.sampled_from((None, randn(draw, heads))))
    out = torch.empty(queries, heads, dim, dtype=draw(st.sampled_from((torch.float32, torch.bfloat16))))
    arguments = {
        "partials": partials, "partial_lse": convention.from_natural(natural), "sink": sink, "out": out,
        "lse": torch.empty(queries, heads), "convention": convention,
    }  # fmt: skip
    # weights are exponentials of differences of numbers up to 50 (in base 2 up to 72): that many roundings
    weights = 4 * (parts + 2 * 72) * EPS
    largest = float(partials.nan_to_num().abs().max())

    def allowed(want: tuple[Tensor, ...]) -> tuple[Tensor | float, ...]:
        logs = torch.where(want[1].isfinite(), want[1].abs(), 0.0)
        step = 2.0**-8 if out.dtype is torch.bfloat16 else 0.0
        return weights * largest + want[0].abs() * step, weights + 8 * EPS * logs

    return Case(arguments, ("out", "lse"), lambda a: (a["out"], a["lse"]), allowed)


BUILDERS: dict[str, Callable[[Draw], Case]] = {
    builder.__name__: builder
    for builder in (
        compress_pool_quant, gather_dequant, tail_append, copy_blocks, ring_gather, index_build, indexer_logits,
        topk_select, segment_decode, merge_lse,
    )
}  # fmt: skip
