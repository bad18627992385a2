"""What the operations mean together, against formulas written down independently of the references."""

import math
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="the kernels compute with torch")

import kernel_cases
import torch
from torch import Tensor

from hybridkv_ref import layouts
from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels._lse import Lse
from hybridkv_ref.kernels.compress_pool_quant import compress_pool_quant
from hybridkv_ref.kernels.gather_dequant import gather_dequant
from hybridkv_ref.kernels.index_build import index_build
from hybridkv_ref.kernels.indexer_logits import indexer_logits
from hybridkv_ref.kernels.merge_lse import merge_lse
from hybridkv_ref.kernels.ring_gather import ring_gather
from hybridkv_ref.kernels.segment_decode import _constants, segment_decode
from hybridkv_ref.kernels.tail_append import tail_append
from hybridkv_ref.kernels.topk_select import topk_select

DOUBLE_EPS = 2.0**-53
DIM = 8


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def fp64_page(entries: int, name: str = "fp64", dim: int = DIM) -> layouts.Page:
    return layouts.load(name).page(entries, dim=dim)


@pytest.mark.parametrize(("ratio", "overlap"), [(4, 4), (128, 0)])
def test_compressed_entry_covers_the_tokens_it_says(ratio: int, overlap: int) -> None:
    """CSA entry i is of tokens [4i-4, 4i+3], HCA entry j of [128j, 128j+127]: a softmax over tokens in each column."""
    entries, branches = 3, 2 if overlap else 1
    tokens = entries * ratio
    kv, score, bias = (
        normal(tokens, branches * DIM),
        normal(tokens, branches * DIM, seed=1),
        normal(ratio, branches * DIM, seed=2),
    )
    state_page, page = fp64_page(tokens, "state_fp64", branches * DIM), fp64_page(4)
    state, cache = kernel_cases.arena_of(state_page, 1), kernel_cases.arena_of(page, 1)
    every = torch.arange(tokens)
    tail_append(kv, score, bias, every, every, state, state_page)
    rows = ratio * torch.arange(entries)[:, None] + torch.arange(-overlap, ratio)
    slots = torch.where(rows < 0, -1, rows)
    positions = ratio * torch.arange(entries)
    compress_pool_quant(state, slots, positions, None, None, torch.arange(entries), cache, state_page, page, overlap)

    stored = _pages.read_exact(cache, torch.arange(entries), page)[:, 0]
    for entry in range(entries):
        for column in range(DIM):
            weighted = total = 0.0
            for token in range(max(0, ratio * entry - overlap), ratio * (entry + 1)):
                current = token >= ratio * entry
                at = column + (DIM if overlap and current else 0)
                weight = math.exp(float(score[token, at] + bias[token % ratio, at]))
                weighted, total = weighted + weight * float(kv[token, at]), total + weight
            assert stored[entry, column].item() == pytest.approx(weighted / total, abs=8 * ratio * DOUBLE_EPS)


def test_rotary_and_norm_come_after_pooling() -> None:
    """One row, so pooling is the identity: the entry has unit root mean square, and turns by its position's angle."""
    state_page, page = fp64_page(1, "state_fp64"), fp64_page(1)
    state, cache = kernel_cases.arena_of(state_page, 1), kernel_cases.arena_of(page, 1)
    kv, zero = normal(1, DIM), torch.zeros(1, dtype=torch.int64)
    tail_append(kv, normal(1, DIM, seed=1), None, zero, zero, state, state_page)
    angles = torch.outer(torch.arange(6.0, dtype=torch.float64), torch.tensor([1.0, 0.1], dtype=torch.float64))
    rotary = torch.stack((angles.cos(), angles.sin()), dim=1)
    weight = normal(DIM, seed=3)
    compress_pool_quant(state, zero[None], 0 * zero + 5, weight, rotary, zero, cache, state_page, page, 0, eps=0.0)

    expected = kv[0] / kv[0].square().mean().sqrt() * weight
    for pair, angle in ((4, 5.0), (6, 0.5)):
        x, y = expected[pair].item(), expected[pair + 1].item()
        expected[pair] = x * math.cos(angle) - y * math.sin(angle)
        expected[pair + 1] = x * math.sin(angle) + y * math.cos(angle)
    stored = _pages.read_exact(cache, zero, page)[0, 0]
    assert torch.allclose(stored, expected, rtol=0, atol=32 * DOUBLE_EPS * expected.abs().max().item())


@pytest.mark.parametrize("convention", list(Lse))
@pytest.mark.parametrize("with_sink", [True, False])
def test_segments_and_splits_merge_to_one_softmax(convention: Lse, with_sink: bool) -> None:
    """A range, a list with gaps, an empty segment and several splits: one softmax over all, the sink counted once."""
    page, heads, scale = fp64_page(16), 3, DIM**-0.5
    cache = kernel_cases.arena_of(page, 6)
    values, slots = normal(80, DIM), torch.arange(16, 96)
    index_build(values, slots, cache, page)
    table = torch.tensor([[1, 2, 3, 4, 5]], dtype=torch.int32)  # entry e of the request is row e of values
    q, sink = normal(1, heads, DIM, seed=1), normal(heads, seed=2)
    chosen = int32(*range(41, 80, 2), -1, 7)[None]
    partials, logs = (
        torch.full((6, 1, heads, DIM), torch.nan, dtype=torch.float64),
        torch.empty(6, 1, heads, dtype=torch.float64),
    )
    row = int32(0)
    for part, entries, first, count in (
        (slice(0, 3), None, int32(3), int32(38)),
        (slice(3, 5), chosen, None, int32(chosen.shape[1] - 1)),
        (slice(5, 6), None, int32(0), int32(0)),
    ):
        segment_decode(q, row, entries, first, count, table, cache, partials[part], logs[part], page, scale, convention)
    assert logs[5].eq(convention.empty).all()
    assert partials[5].eq(0.0).all()
    out, lse = torch.full((1, heads, DIM), torch.nan, dtype=torch.float64), torch.empty(1, heads, dtype=torch.float64)
    merge_lse(partials, logs, sink if with_sink else None, out, lse, convention)

    seen = values[[*range(3, 41), *range(41, 80, 2)]]
    weights = (scale * q[0] @ seen.T).exp()
    total = weights.sum(1) + (sink.exp() if with_sink else 0.0)
    assert torch.allclose(out[0], weights @ seen / total[:, None], rtol=0, atol=200 * DOUBLE_EPS)
    log = total.log2() if convention is Lse.FLASHINFER else total.log()
    assert torch.allclose(lse[0], log, rtol=0, atol=200 * DOUBLE_EPS)


@pytest.mark.parametrize("convention", list(Lse))
def test_nothing_but_a_sink(convention: Lse) -> None:
    empty = torch.full((2, 1, 1), convention.empty)
    out, lse = torch.full((1, 1, 4), torch.nan), torch.full((1, 1), torch.nan)
    merge_lse(torch.full((2, 1, 1, 4), torch.nan), empty, torch.tensor([0.75]), out, lse, convention)
    assert out.eq(0.0).all()
    assert lse.item() == pytest.approx(0.75 / (math.log(2) if convention is Lse.FLASHINFER else 1.0), rel=2**-22)


def test_indexer_and_topk_choose_by_score_then_position() -> None:
    page = fp64_page(4)
    cache, table = kernel_cases.arena_of(page, 2), torch.tensor([[1, 0]], dtype=torch.int32)
    keys = torch.zeros(7, DIM, dtype=torch.float64)
    keys[:, 0] = torch.tensor([-1.0, 2.0, -3.0, 1.0, -1.0, 2.0, 9.0])
    index_build(keys, torch.tensor([4, 5, 6, 7, 0, 1, 2]), cache, page)
    q = torch.zeros(1, 1, DIM, dtype=torch.float64)
    q[0, 0, 0] = 1.0
    logits = torch.full((1, 8), torch.nan, dtype=torch.float64)
    seen = int32(6)  # entry 6 scores most and is not visible
    indexer_logits(q, torch.ones(1, 1, dtype=torch.float64), int32(0), seen, table, cache, logits, page)
    assert logits[0].tolist() == [0.0, 2.0, 0.0, 1.0, 0.0, 2.0, -math.inf, -math.inf]
    for k, best in ((1, [1]), (2, [1, 5]), (4, [0, 1, 3, 5]), (7, [0, 1, 2, 3, 4, 5, -1])):
        chosen = torch.full((1, k), 99, dtype=torch.int32)
        assert topk_select(logits, seen, chosen)[0].tolist() == best


def test_ring_is_read_in_position_order() -> None:
    ring, page = fp64_page(5, dim=1), fp64_page(4, dim=1)
    rings, out = kernel_cases.arena_of(ring, 1), kernel_cases.arena_of(page, 1)
    positions = torch.arange(8, 13)
    index_build(positions.double()[:, None], positions % 5, rings, ring)
    ring_gather(rings, torch.tensor([0]), torch.tensor([9]), torch.tensor([3]), out, ring, page)
    assert _pages.read_exact(out, torch.arange(4), page).flatten().tolist() == [9.0, 10.0, 11.0, 0.0]


def test_no_rows_is_no_work() -> None:
    page = layouts.load("fp8_ds_mla_584").page(2)
    cache, none = kernel_cases.arena_of(page, 1), torch.zeros(0, dtype=torch.int64)
    assert index_build(torch.zeros(0, 512), none, cache, page).eq(0xFF).all()
    assert gather_dequant(cache, none, torch.zeros(0, 1, 512), page).numel() == 0


def test_triton_refuses_fp64() -> None:
    with pytest.raises(InputError, match=r"^index_build:page: layout fp64 has fp64 fields"):
        _pages.codec("index_build", fp64_page(2))


def test_triton_decode_refuses_more_columns_than_it_holds() -> None:
    page = layouts.load("dsv32_656").page(2)
    with pytest.raises(InputError, match=r"^segment_decode:page: 576 columns"):
        _constants(page, 16, Lse.FLASHMLA, listed=False, major=9)


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    """Torch with that many threads: with more, work is cut in other places."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("dim", [8, 12, 64])
@pytest.mark.parametrize(("ratio", "overlap"), [(4, 4), (128, 0)])
def test_no_entry_depends_on_the_batch(precision: str, dim: int, ratio: int, overlap: int) -> None:
    """Bit for bit: an entry is the same whether it is folded alone or in a chunk of 37."""
    n, branches = 37, 2 if overlap else 1
    state_page, page = fp64_page(64, f"state_{precision}", branches * dim), fp64_page(n, precision, dim)
    dtype = _pages.precision(state_page)
    state = kernel_cases.arena_of(state_page, -(-n * ratio // 64))
    every = torch.arange(n * ratio)
    kv, score = (normal(n * ratio, branches * dim, seed=seed).to(dtype) for seed in (0, 1))
    tail_append(kv, score, None, every, every, state, state_page)
    rows = ratio * torch.arange(n)[:, None] + torch.arange(-overlap, ratio)
    slots = torch.where(rows < 0, -1, rows)
    angles = normal(n, 1, 4, seed=2).to(dtype)
    rotary, weight = torch.cat((angles.cos(), angles.sin()), dim=1), normal(dim, seed=3).to(dtype)

    def fold(chunks: list[tuple[int, int]]) -> Tensor:
        cache = kernel_cases.arena_of(page, 1)
        for low, high in chunks:
            at = torch.arange(low, high)
            compress_pool_quant(state, slots[low:high], at, weight, rotary, at, cache, state_page, page, overlap)
        return cache

    together = fold([(0, n)])
    assert torch.equal(together, fold([(0, 1), (1, 3), (3, 10), (10, 11), (11, n)]))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dim", [8, 12, 64])
def test_no_merge_depends_on_the_batch(dim: int) -> None:
    parts, logs, sink = normal(3, 37, 5, dim), normal(3, 37, 5, seed=1), normal(5, seed=2)
    out, lse = torch.empty(37, 5, dim, dtype=torch.float64), torch.empty(37, 5, dtype=torch.float64)
    merge_lse(parts, logs, sink, out, lse, Lse.FLASHMLA)
    for one in range(37):
        alone = merge_lse(
            parts[:, one : one + 1].contiguous(), logs[:, one : one + 1].contiguous(), sink,
            torch.empty(1, 5, dim, dtype=torch.float64), torch.empty(1, 5, dtype=torch.float64), Lse.FLASHMLA,
        )  # fmt: skip
        assert torch.equal(alone[0][0], out[one])
        assert torch.equal(alone[1][0], lse[one])


@pytest.mark.usefixtures("threads")
def test_no_query_depends_on_the_batch() -> None:
    """Bit for bit: a query gives the same output alone and among others."""
    page = layouts.load("fp8_ds_mla_584").page(16)
    cache = kernel_cases.arena_of(page, 3)
    index_build(normal(48, 512).float(), torch.arange(48), cache, page)
    table, q = torch.tensor([[2, 0, 1]], dtype=torch.int32), normal(5, 4, 512, seed=1).float()
    count = int32(3, 20, 33, 47, 48)

    def decode(rows: slice) -> tuple[Tensor, Tensor]:
        n = len(count[rows])
        return segment_decode(
            q[rows], 0 * count[rows], None, 0 * count[rows], count[rows], table, cache, torch.empty(1, n, 4, 512),
            torch.empty(1, n, 4), page, 0.05, Lse.FLASHMLA,
        )  # fmt: skip

    together = decode(slice(0, 5))
    for one in range(5):
        alone = decode(slice(one, one + 1))
        assert all(torch.equal(a[0, 0], b[0, one]) for a, b in zip(alone, together, strict=True))
