"""index_build: narrow fp32 rows into cache pages.

Theory. Quantise, then attend: an entry is only ever seen through its stored bytes, also by the step that made it.
Building the index is this for the lightning-indexer keys (one per compressed entry); a rebuild after a change of epoch
is the same with rows that gather_dequant read from the old pages. Window entries and full-attention latents are
written by the same kernel: the page's layout is the only difference.
"""

import torch
from torch import Tensor

from hybridkv_ref.kernels import _pages, dispatch
from hybridkv_ref.kernels._triton import AotCase, cdiv, jit, power_of_two, tl
from hybridkv_ref.layouts import Page, load

load_rows, store_rows = _pages.load_rows, _pages.store_rows
TILE = 4096
"""Elements that one program narrows."""


def index_build(keys: Tensor, slots: Tensor, cache: Tensor, page: Page) -> Tensor:
    """Narrow `keys` and store them at `slots` of `cache`; returns `cache`.

    keys   fp32 [n, dim] (float64 for fp64 layouts), finite; `dim` is the page's
    slots  int64 [n]: block * page.entries + index, all different; -1 skips the row
    cache  uint8 [blocks, page.stride], written in place; bytes of other entries stay
    page   any layout with one head and the vector "kv": entries, index keys

    InputError: wrong dtype, shape, alignment or device.
    """
    name, wide = "index_build", _pages.precision(page)
    dispatch.expect(name, "keys", keys, (wide,), (None, page.dim))
    dispatch.expect(name, "slots", slots, (torch.int64,), (keys.shape[0],))
    dispatch.expect_arena(name, "cache", cache, page)
    return dispatch.choose(name, torch_version, triton_version, keys, slots, cache)(keys, slots, cache, page)


def reference(keys: Tensor, slots: Tensor, cache: Tensor, page: Page) -> tuple[Tensor, ...]:
    """float64 [n, dim]: what each row reads as once stored (rows of negative slots too)."""
    return (_pages.narrowed_exact(keys, page),)


def torch_version(keys: Tensor, slots: Tensor, cache: Tensor, page: Page) -> Tensor:
    """`index_build` on any device that torch knows."""
    _pages.write(cache, slots, keys[:, None], page)
    return cache


@jit
def _kernel(
    keys: tl.tensor, slots: tl.tensor, cache: tl.tensor, n: tl.tensor, C: tl.constexpr, N: tl.constexpr
) -> None:
    rows = tl.program_id(0) * N + tl.arange(0, N)
    slot = tl.load(slots + rows, mask=rows < n, other=-1)
    ok = slot >= 0
    cols = tl.arange(0, C.width)[None, :]
    at = keys + rows.to(tl.int64)[:, None] * C.dim + cols
    x = tl.load(at, mask=ok[:, None] & (cols < C.dim), other=0.0)
    store_rows(cache, slot // C.entries, slot % C.entries, ok, x, C)


def _rows(dim: int) -> int:
    """Rows that one program narrows."""
    return max(1, TILE // power_of_two(dim))


def grid(keys: Tensor, slots: Tensor, cache: Tensor, page: Page) -> tuple[int, ...]:
    """Programs: tiles of rows."""
    return (cdiv(len(keys), _rows(page.dim)),)


def triton_version(keys: Tensor, slots: Tensor, cache: Tensor, page: Page) -> Tensor:
    """`index_build` in Triton: one program narrows up to TILE elements."""
    codec = _pages.codec("index_build", page)
    _kernel[grid(keys, slots, cache, page)](keys, slots, cache, len(keys), codec, _rows(codec.dim))
    return cache


def aot_cases() -> tuple[AotCase, ...]:
    """V4's index keys in fp8 and fp4, and its entries."""
    cases = []
    for layout in ("index_fp8_132", "index_fp4_68", "fp8_ds_mla_584"):
        codec = _pages.codec("index_build", load(layout).page(64))
        arguments = {"keys": "*fp32", "slots": "*i64", "cache": "*u8", "n": "i32"}
        constants = {"C": codec, "N": _rows(codec.dim)}
        cases.append(AotCase(f"index_build[{layout}]", _kernel, arguments, constants, ("keys", "slots", "cache")))
    return tuple(cases)
