"""copy_blocks: move byte ranges between arenas: offload, restore, defragment, splice.

Theory. Bytes move as they are; no format is read. A whole block is one move; a splice (the entries of a block up to the
boundary with the tail) is one move per region of the layout. Two paths: within a device the kernel, one program per
chunk of a move; between host and device torch's copies, that is the copy engine, one copy per run of neighbouring
whole blocks. The engine is slow for descriptors under about 28 KiB (published): gather small ones into a staging arena
on the device first, which is this operation again. Device stride and file stride may differ.
"""

import torch
from torch import Tensor

from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import dispatch
from hybridkv_ref.kernels._triton import AotCase, cdiv, jit, tl

CHUNK = 16_384
"""Bytes that one program moves."""


def copy_blocks(source: Tensor, target: Tensor, moves: Tensor, unit: int = 16) -> Tensor:
    """Copy the ranges that `moves` lists from `source` to `target`; return `target`.

    source, target  uint8 [blocks, stride], strides may differ; on one device, or one on the host (pinned, if the copy
                    is to overlap with compute: it is queued on the current stream and not waited for)
    moves           int64 [n, 5]: source block, source offset, target block, target offset, bytes. Offsets are in bytes
                    from the block's start and lie inside it; a source block of -1 skips the move. Target ranges are
                    disjoint from each other and from every source range. On the device, or on the host between devices
    unit            8 or 16: strides, offsets and sizes are multiples of it, in bytes

    InputError: wrong dtype, shape, device or unit, base address or stride that is not a multiple of the unit. What is
    in `moves` is not checked: it may live on the device.
    """
    name = "copy_blocks"
    if unit not in (8, 16):
        raise InputError(f"{name}:unit: {unit} is neither 8 nor 16")
    for role, arena in (("source", source), ("target", target)):
        dispatch.expect(name, role, arena, (torch.uint8,), (None, None))
        if arena.data_ptr() % unit or arena.stride(0) % unit:
            raise InputError(f"{name}:{role}: base address or stride {arena.stride(0)} is not a multiple of {unit}")
    dispatch.expect(name, "moves", moves, (torch.int64,), (None, 5))
    if source.device != target.device:
        return torch_version(source, target, moves, unit)
    return dispatch.choose(name, torch_version, triton_version, source, target, moves)(source, target, moves, unit)


def reference(source: Tensor, target: Tensor, moves: Tensor, unit: int = 16) -> tuple[Tensor, ...]:
    """uint8: what `target` must hold afterwards."""
    out = target.clone()
    for source_block, source_offset, target_block, target_offset, size in moves.tolist():
        for byte in range(size if source_block >= 0 else 0):
            out[target_block, target_offset + byte] = source[source_block, source_offset + byte]
    return (out,)


def torch_version(source: Tensor, target: Tensor, moves: Tensor, unit: int = 16) -> Tensor:
    """`copy_blocks` with torch's copies, between any two devices."""
    runs: list[list[int]] = []  # moves, and how many neighbouring blocks each one takes
    for move in moves.tolist():
        if move[0] < 0:
            continue
        previous = runs[-1] if runs else None
        if previous is not None and move == [
            previous[0] + previous[5], previous[1], previous[2] + previous[5], previous[3], previous[4]
        ]:  # fmt: skip
            previous[5] += 1
        else:
            runs.append([*move, 1])
    for source_block, source_offset, target_block, target_offset, size, count in runs:
        target[target_block : target_block + count, target_offset : target_offset + size].copy_(
            source[source_block : source_block + count, source_offset : source_offset + size], non_blocking=True
        )
    return target


@jit
def _kernel(
    source: tl.tensor, target: tl.tensor, moves: tl.tensor,
    SOURCE: tl.constexpr, TARGET: tl.constexpr, UNIT: tl.constexpr, N: tl.constexpr,
) -> None:  # fmt: skip
    move = moves + tl.program_id(0).to(tl.int64) * 5
    block = tl.load(move)
    units = tl.where(block < 0, 0, tl.load(move + 4) // UNIT)
    words: tl.constexpr = UNIT // 8
    start = tl.load(move + 1) // UNIT * words + block * (SOURCE // 8)
    goal = tl.load(move + 3) // UNIT * words + tl.load(move + 2) * (TARGET // 8)
    at = tl.program_id(1) * N + tl.arange(0, N)
    there = at < units * words
    word = tl.load(source.to(tl.pointer_type(tl.int64), bitcast=True) + start + at, mask=there, other=0)
    tl.store(target.to(tl.pointer_type(tl.int64), bitcast=True) + goal + at, word, mask=there)


def grid(source: Tensor, target: Tensor, moves: Tensor, unit: int = 16) -> tuple[int, ...]:
    """Programs: moves, chunks of a move as long as the shorter stride."""
    return len(moves), cdiv(min(source.stride(0), target.stride(0)), CHUNK)


def triton_version(source: Tensor, target: Tensor, moves: Tensor, unit: int = 16) -> Tensor:
    """`copy_blocks` in Triton: one program per chunk; moves shorter than the grid allows leave programs idle."""
    programs = grid(source, target, moves, unit)
    _kernel[programs](source, target, moves, source.stride(0), target.stride(0), unit, CHUNK // 8)
    return target


def aot_cases() -> tuple[AotCase, ...]:
    """V4 pages from the device stride to a file stride."""
    return (aot_case("v4_page"),)


def aot_case(kind: str, unit: int = 16, aligned: tuple[str, ...] = ("source", "target", "moves")) -> AotCase:
    """Pages of 64 V4 entries; without the arenas in `aligned` the compiler knows nothing of their base address."""
    arguments = {"source": "*u8", "target": "*u8", "moves": "*i64"}
    constants = {"SOURCE": 37_440, "TARGET": 40_960, "UNIT": unit, "N": CHUNK // 8}
    return AotCase(f"copy_blocks[{kind}]", _kernel, arguments, constants, aligned)
