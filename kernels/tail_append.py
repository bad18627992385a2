"""tail_append: store compressor state rows (kv, score) of fresh tokens.

Theory. The uncompressed tail is positional state, not cache: rows stay in fp32 until the fold, because a narrowed row
would make the entry depend on where a chunk ended. Whether the stored score includes the positional bias is part of
the kernel ABI: with `bias` it does. A token's row is written once, by the only holder of the tail.
"""

import torch
from torch import Tensor

from hybridkv_ref.kernels import _pages, dispatch
from hybridkv_ref.kernels._triton import AotCase, cdiv, jit, power_of_two, tl
from hybridkv_ref.layouts import Page, load

store_rows = _pages.store_rows
TILE = 4096
"""Elements of kv, and as many of score, that one program stores."""


def tail_append(
    kv: Tensor, score: Tensor, bias: Tensor | None, positions: Tensor, slots: Tensor, state: Tensor, page: Page
) -> Tensor:
    """Store one state row per token in `state` and return it.

    kv, score  fp32 [n, page.dim] (float64 for state_fp64); page.dim counts both branches of an overlapping compressor
    bias       same dtype [ratio, page.dim], added to the score of position p from row p mod ratio; None adds nothing
    positions  int64 [n], the tokens' absolute positions
    slots      int64 [n]: block * page.entries + index, all different; -1 skips the token
    state      uint8 [blocks, page.stride] of a state layout, written in place; other rows stay

    InputError: wrong dtype, shape, alignment or device.
    """
    name, wide, n = "tail_append", _pages.precision(page), len(slots)
    dispatch.expect(name, "kv", kv, (wide,), (n, page.dim))
    dispatch.expect(name, "score", score, (wide,), (n, page.dim))
    if bias is not None:
        dispatch.expect(name, "bias", bias, (wide,), (None, page.dim))
    dispatch.expect(name, "positions", positions, (torch.int64,), (n,))
    dispatch.expect(name, "slots", slots, (torch.int64,), (n,))
    dispatch.expect_arena(name, "state", state, page)
    run = dispatch.choose(name, torch_version, triton_version, kv, score, bias, positions, slots, state)
    return run(kv, score, bias, positions, slots, state, page)


def reference(
    kv: Tensor, score: Tensor, bias: Tensor | None, positions: Tensor, slots: Tensor, state: Tensor, page: Page
) -> tuple[Tensor, ...]:
    """float64 [n, dim] twice: the kv and the score that each row must hold (rows of negative slots too)."""
    total = score.double()
    if bias is not None:
        total = total + torch.stack([bias[int(p) % len(bias)].double() for p in positions])
    return kv.double(), total


def torch_version(
    kv: Tensor, score: Tensor, bias: Tensor | None, positions: Tensor, slots: Tensor, state: Tensor, page: Page
) -> Tensor:
    """`tail_append` on any device that torch knows."""
    total = score if bias is None else score + bias[positions % len(bias)]
    _pages.write(state, slots, kv[:, None], page, "kv")
    _pages.write(state, slots, total[:, None], page, "score")
    return state


@jit
def _kernel(
    kv: tl.tensor, score: tl.tensor, bias: tl.tensor, positions: tl.tensor, slots: tl.tensor, state: tl.tensor,
    n: tl.tensor, K: tl.constexpr, S: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * N + tl.arange(0, N)
    slot = tl.load(slots + rows, mask=rows < n, other=-1)
    ok = slot >= 0
    cols = tl.arange(0, K.width)[None, :]
    there = ok[:, None] & (cols < K.dim)
    at = rows.to(tl.int64)[:, None] * K.dim + cols
    block, index = slot // K.entries, slot % K.entries
    store_rows(state, block, index, ok, tl.load(kv + at, mask=there, other=0.0), K)
    total = tl.load(score + at, mask=there, other=0.0)
    if RATIO > 0:
        phase = tl.load(positions + rows, mask=ok, other=0) % RATIO
        total += tl.load(bias + phase[:, None] * K.dim + cols, mask=there, other=0.0)
    store_rows(state, block, index, ok, total, S)


def _rows(dim: int) -> int:
    """State rows that one program stores."""
    return max(1, TILE // power_of_two(dim))


def grid(
    kv: Tensor, score: Tensor, bias: Tensor | None, positions: Tensor, slots: Tensor, state: Tensor, page: Page
) -> tuple[int, ...]:
    """Programs: tiles of rows."""
    return (cdiv(len(slots), _rows(page.dim)),)


def triton_version(
    kv: Tensor, score: Tensor, bias: Tensor | None, positions: Tensor, slots: Tensor, state: Tensor, page: Page
) -> Tensor:
    """`tail_append` in Triton: one program stores a few rows."""
    k, s = _pages.codec("tail_append", page, "kv"), _pages.codec("tail_append", page, "score")
    unused, ratio = (kv, 0) if bias is None else (bias, len(bias))
    programs = grid(kv, score, bias, positions, slots, state, page)
    _kernel[programs](kv, score, unused, positions, slots, state, len(slots), k, s, _rows(k.dim), ratio)
    return state


def aot_cases() -> tuple[AotCase, ...]:
    """V4's three compressors: CSA and its indexer (two branches, ratio 4), HCA (one branch, ratio 128)."""
    cases = []
    for kind, dim, ratio in (("csa", 1024, 4), ("indexer", 256, 4), ("hca", 512, 128)):
        page = load("state_fp32").page(8, dim=dim)
        k, s = _pages.codec("tail_append", page, "kv"), _pages.codec("tail_append", page, "score")
        floats = dict.fromkeys(("kv", "score", "bias"), "*fp32")
        arguments = floats | {"positions": "*i64", "slots": "*i64", "state": "*u8", "n": "i32"}
        constants = {"K": k, "S": s, "N": _rows(k.dim), "RATIO": ratio}
        aligned = ("kv", "score", "bias", "positions", "slots", "state")
        cases.append(AotCase(f"tail_append[{kind}]", _kernel, arguments, constants, aligned))
    return tuple(cases)
