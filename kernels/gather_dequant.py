"""gather_dequant: read entries by slot and widen them.

Theory. A compressed entry is attended as it is; "decompress" means nothing more than this gather. Slots are contents:
the same launch serves any mix of requests, and a slot of -1 (null block, padding) gives zeros, never stale bytes.
"""

import torch
from torch import Tensor

from hybridkv_ref.kernels import _bits, _pages, dispatch
from hybridkv_ref.kernels._triton import AotCase, cdiv, jit, power_of_two, tl
from hybridkv_ref.layouts import Page, load

load_rows, narrow_bf16 = _pages.load_rows, _bits.narrow_bf16
TILE = 4096
"""Elements that one program widens."""


def gather_dequant(cache: Tensor, slots: Tensor, out: Tensor, page: Page, vector: str = "kv") -> Tensor:
    """Write entries `slots` of `cache` to `out` and return it.

    cache   uint8 [blocks, page.stride]
    slots   int64 [n]: block * page.entries + index; -1 gives zeros
    out     fp32 or bf16 [n, heads, dim] (float64 for fp64 layouts), overwritten
    vector  which vector of the layout: "kv", or "k", "v", "score" where the layout keeps them apart

    InputError: wrong dtype, shape, alignment or device, no such vector.
    """
    name, parts = "gather_dequant", page.vector(vector)
    wide = _pages.precision(page)
    dispatch.expect_arena(name, "cache", cache, page)
    dispatch.expect(name, "slots", slots, (torch.int64,), (None,))
    dispatch.expect(name, "out", out, (wide, torch.bfloat16), (len(slots), page.heads, parts.dim))
    return dispatch.choose(name, torch_version, triton_version, cache, slots, out)(cache, slots, out, page, vector)


def reference(cache: Tensor, slots: Tensor, out: Tensor, page: Page, vector: str = "kv") -> tuple[Tensor, ...]:
    """float64 [n, heads, dim] of the stored entries."""
    return (_pages.read_exact(cache, slots, page, vector),)


def torch_version(cache: Tensor, slots: Tensor, out: Tensor, page: Page, vector: str = "kv") -> Tensor:
    """`gather_dequant` on any device that torch knows."""
    return out.copy_(_pages.read(cache, slots, page, vector))


@jit
def _kernel(
    cache: tl.tensor, slots: tl.tensor, out: tl.tensor, n: tl.tensor,
    C: tl.constexpr, N: tl.constexpr, HEADS: tl.constexpr, BF16: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * N + tl.arange(0, N)
    head = tl.program_id(1)
    slot = tl.load(slots + rows, mask=rows < n, other=-1)
    ok = slot >= 0
    x = load_rows(cache, slot // C.entries, slot % C.entries, head, ok, C, False)
    cols = tl.arange(0, C.width)[None, :]
    at = (rows.to(tl.int64)[:, None] * HEADS + head) * C.dim + cols
    inside = (rows < n)[:, None] & (cols < C.dim)
    if BF16:
        tl.store(out.to(tl.pointer_type(tl.int16), bitcast=True) + at, narrow_bf16(x), mask=inside)
    else:
        tl.store(out + at, x, mask=inside)


def _rows(dim: int) -> int:
    """Entries that one program widens."""
    return max(1, TILE // power_of_two(dim))


def grid(cache: Tensor, slots: Tensor, out: Tensor, page: Page, vector: str = "kv") -> tuple[int, ...]:
    """Programs: tiles of entries, heads."""
    return cdiv(len(slots), _rows(page.vector(vector).dim)), page.heads


def triton_version(cache: Tensor, slots: Tensor, out: Tensor, page: Page, vector: str = "kv") -> Tensor:
    """`gather_dequant` in Triton: one program widens up to TILE elements of one head."""
    codec = _pages.codec("gather_dequant", page, vector)
    _kernel[grid(cache, slots, out, page, vector)](
        cache, slots, out, len(slots), codec, _rows(codec.dim), page.heads, out.dtype is torch.bfloat16
    )
    return out


def aot_cases() -> tuple[AotCase, ...]:
    """Entries of V4 and V3.2, and V4's index keys."""
    cases = []
    for layout in ("fp8_ds_mla_584", "dsv32_656", "uniform_fp8_512", "index_fp8_132", "index_fp4_68"):
        codec = _pages.codec("gather_dequant", load(layout).page(64))
        arguments = {"cache": "*u8", "slots": "*i64", "out": "*bf16", "n": "i32"}
        constants = {"C": codec, "N": _rows(codec.dim), "HEADS": 1, "BF16": True}
        aligned = ("cache", "slots", "out")
        cases.append(AotCase(f"gather_dequant[{layout}]", _kernel, arguments, constants, aligned))
    return tuple(cases)
