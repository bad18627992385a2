"""Triton kernels in Triton's interpreter. Not collected: test_kernel_interpreter.py runs it as a child session.

The interpreter must be chosen before the kernels are imported, and it must not leak into other tests; hence a process
of its own, with TRITON_INTERPRET=1. Sizes are small: a program takes milliseconds.
"""

import kernel_cases
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from launched import step_launches

from hybridkv_ref import layouts
from hybridkv_ref.gpu_check.inputs import VARIANTS, Variant, source
from hybridkv_ref.kernels import OPERATIONS, _pages, _triton, operation
from hybridkv_ref.kernels._lse import Lse
from hybridkv_ref.kernels.judged import JUDGES


def test_this_is_the_interpreter() -> None:
    assert _triton.INTERPRETED


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=12, phases=(Phase.explicit, Phase.generate))  # a failure is not shrunk: that takes minutes here
@given(data=st.data())
def test_operation(name: str, data: st.DataObject) -> None:
    module = operation(name)
    kernel_cases.check(module, module.triton_version, kernel_cases.build(name, data))


@pytest.mark.parametrize("layout", kernel_cases.ENTRY_LAYOUTS)
def test_stored_bytes_equal_those_of_torch(layout: str) -> None:
    """Not only close: one writer's bytes are the other's, or a block's checksum depends on who wrote it."""
    module = operation("index_build")
    description = layouts.load(layout)
    page = description.page(3, dim=64 if description.dim == "model" else None)
    generator = torch.Generator().manual_seed(1)
    random = torch.randn(9, page.dim, generator=generator) * torch.exp2(20 * torch.randn(9, 1, generator=generator))
    random[0] = 0.0  # amax = 0: the scale's exponent is clamped
    random[1, 1:] = 0.0
    random[2] = 1e-42  # subnormal in fp32
    keys = torch.cat((random, kernel_cases.edges(page)))
    slots = torch.arange(len(keys))
    arenas = [kernel_cases.arena_of(page, len(keys)) for _ in range(2)]
    module.torch_version(keys, slots, arenas[0], page)
    module.triton_version(keys, slots, arenas[1], page)
    assert torch.equal(*arenas)
    expected = module.reference(keys, slots, arenas[0], page)[0]
    slack = 2 * kernel_cases.EPS if description.scale_rule == "amax_div" else 0.0  # fp32 quotients; all else is exact
    error = (_pages.read_exact(arenas[0], slots, page)[:, 0] - expected).abs()
    assert bool((error <= slack * expected.abs()).all())


def test_topk_ties_across_chunks() -> None:
    """More scores than a program looks at in one go, with ties on both sides of the cut, in the last place too."""
    module = operation("topk_select")
    columns = 2 * module.CHUNK + 5
    logits = torch.randn(2, columns, generator=torch.Generator().manual_seed(3)).relu()
    logits[1] = 1.0
    visible = torch.tensor([columns, columns - 3], dtype=torch.int32)
    for k in (columns // 2 + 40, columns - 4):
        chosen = torch.full((2, k), -7, dtype=torch.int32)
        module.triton_version(logits, visible, chosen)
        assert torch.equal(chosen, module.reference(logits, visible, chosen)[0])


def test_blocks_lie_beyond_four_gib() -> None:
    """Block offsets are 64-bit: the last block of this arena starts after 2 ** 32 bytes. Untouched memory is free."""
    page = layouts.load("fp8_ds_mla_584").page(64)
    blocks = 2**32 // page.stride + 2
    cache = _pages.empty_arena(page, blocks)
    keys = torch.randn(2, page.dim, generator=torch.Generator().manual_seed(2))
    slots = torch.tensor([(blocks - 1) * 64 + 5, 7])
    operation("index_build").triton_version(keys, slots, cache, page)
    expected = operation("index_build").reference(keys, slots, cache, page)[0]
    assert torch.equal(_pages.read_exact(cache, slots, page)[:, 0], expected)

    out = torch.full((2, 1, page.dim), torch.nan)
    operation("gather_dequant").triton_version(cache, slots, out, page)
    assert torch.equal(out[:, 0].double(), expected)

    moved = torch.tensor([[blocks - 1, 0, 0, 0, page.stride]])
    target = torch.full((1, page.stride), 0xFF, dtype=torch.uint8)
    operation("copy_blocks").triton_version(cache, target, moved)
    assert torch.equal(target[0], cache[-1])

    table = torch.tensor([[blocks - 1]], dtype=torch.int32)
    one = torch.ones(1, dtype=torch.int32)
    partial, lse = torch.full((1, 1, 2, page.dim), torch.nan), torch.full((1, 1, 2), torch.nan)
    operation("segment_decode").triton_version(
        keys[:1, None].repeat(1, 2, 1).contiguous(), 0 * one, None, 5 * one, one, table, cache, partial, lse, page, 1.0,
        Lse.FLASHMLA,
    )  # fmt: skip
    assert torch.allclose(partial[0, 0, 0].double(), expected[0], rtol=2 * kernel_cases.EPS, atol=0)


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: f"{variant.operation}: {variant.name}")
def test_variant_of_the_gpu_check(variant: Variant) -> None:
    """As DeepSeek-V4 calls it: real head sizes and strides, few items."""
    arguments, _ = variant.build(source(torch.device("cpu")), variant.few)
    module = operation(variant.operation)
    kernel_cases.check(module, module.triton_version, JUDGES[variant.operation](arguments))


@pytest.mark.parametrize("tokens", [8, 14])
def test_every_launch_of_a_decode_step(tokens: int) -> None:
    """With the shapes, slots, gaps and padding that a batched step really has: one that folds, one that does not."""
    seen = set()
    for _, name, arguments in step_launches(tokens):
        seen.add(name)
        kernel_cases.check(operation(name), operation(name).triton_version, JUDGES[name](arguments))
    assert seen == set(OPERATIONS) - {"copy_blocks", "ring_gather"}
