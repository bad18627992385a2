"""Part: moving blocks between device and pinned host memory, by descriptor size.

Two paths: the copy engine, a descriptor per block; and a gather into a staging arena on the device by the kernel, then
one copy.  Which one is faster depends on the descriptor's size; bytes are compared after each.
"""

import torch
from torch import Tensor

from hybridkv_ref.gpu_check.bench import Bench
from hybridkv_ref.gpu_check.inputs import STRIDES, source
from hybridkv_ref.kernels.copy_blocks import copy_blocks

SIZES = (4_096, 8_192, 16_384, STRIDES[0], 65_536, 262_144, 1_048_576)
"""Bytes of one descriptor; among them V4's block."""
TOTAL = 1 << 27


def run(bench: Bench) -> None:
    """Figures and checks of both paths and directions for each size."""
    for size in SIZES[:2] if bench.tiny else SIZES:
        _size(bench, size, 4 if bench.tiny else max(8, TOTAL // size))


def moves_of(sources: Tensor, targets: Tensor, size: int) -> Tensor:
    """Whole blocks from each of one list to each of the other."""
    moves = torch.zeros(len(sources), 5, dtype=torch.int64)
    moves[:, 0], moves[:, 2], moves[:, 4] = sources, targets, size
    return moves


def _size(bench: Bench, size: int, count: int) -> None:
    if bench.out_of_time():
        bench.check(f"offload of {size:,} B", lambda: "")
        return
    cuda = bench.device.type == "cuda"
    blocks = source(bench.device).integers(0, 256, 2 * count, size, dtype=torch.uint8)
    host, staging = torch.empty(count, size, dtype=torch.uint8, pin_memory=cuda), torch.empty_like(blocks[:count])
    scattered, packed = 2 * torch.arange(count), torch.arange(count)  # every other block: no two are neighbours
    out, back = moves_of(scattered, packed, size), moves_of(packed, scattered + 1, size)
    out_there, back_there = out.to(bench.device), back.to(bench.device)

    def gathered() -> None:
        copy_blocks(blocks, staging, out_there)
        host.copy_(staging, non_blocking=True)

    def spread() -> None:
        staging.copy_(host, non_blocking=True)
        copy_blocks(staging, blocks, back_there)

    paths = (
        ("engine", lambda: copy_blocks(blocks, host, out), lambda: copy_blocks(host, blocks, back)),
        ("gathered", gathered, spread),
    )
    for path, spill, restore in paths:
        host.zero_()
        blocks[1::2] = 0
        bench.measure(f"spill {size:,} B, {path}", "GB/s", count * size / 1e9, spill)
        bench.measure(f"restore {size:,} B, {path}", "GB/s", count * size / 1e9, restore)
        bench.check(f"spill and restore of {size:,} B, {path}", lambda: _same(blocks))


def _same(blocks: Tensor) -> str:
    if not torch.equal(blocks[0::2], blocks[1::2]):
        raise ValueError("what came back is not what went out")
    return f"{len(blocks) // 2} blocks"
