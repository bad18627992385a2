"""Logits after any validated hit equal those from scratch, and so do the cached bytes: the decoder's main claim."""

import msgspec
import pytest
import torch
from decoder_histories import (
    FINE,
    FP8,
    LENGTH,
    QUANTISED,
    TOLERANCE,
    Event,
    Evict,
    Request,
    planner,
    play,
    sequence,
    truth,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv_ref.decoder_geometry import Layouts, Sizes
from hybridkv_ref.decoder_reuse import Mode, Want
from hybridkv_ref.decoder_session import Session
from hybridkv_ref.decoder_store import MemoryStore

COARSE = msgspec.structs.replace(FINE, window_block=4, csa_block=8, hca_block=16)
RING = msgspec.structs.replace(FINE, ring_windows=True)
OTHER_ORDER = msgspec.structs.replace(COARSE, layers=("hca", "recurrent", "csa", "window"), window=4, hca_ratio=16)
UNALIGNED = msgspec.structs.replace(OTHER_ORDER, window_block=1, csa_block=4)
SIZES = (FINE, COARSE, RING, OTHER_ORDER)


ANY_MODE: tuple[Mode, ...] = ("full", "full", "full", "zero-exact", "bounded")


@st.composite
def requests(draw: st.DrawFn, modes: tuple[Mode, ...] = ANY_MODE) -> Request:
    width = draw(st.integers(1, 5))
    mode = draw(st.sampled_from(modes))
    return Request(
        text=draw(st.integers(0, 1)),
        prompt=draw(st.integers(1, LENGTH - 6)),
        chunks=tuple(draw(st.lists(st.integers(1, 8), min_size=1, max_size=3))),
        drafts=((width, draw(st.integers(1, width))),) * draw(st.integers(0, 6)),
        want=Want(
            mode=mode,
            replay=draw(st.integers(1 if mode == "bounded" else 0, 9)),
            alignment=draw(st.sampled_from((1, 1, 4, None))),
        ),
        keep_every=draw(st.sampled_from((1, 1, 4))),
        abort=draw(st.none() | st.integers(0, 4)),
        padding=draw(st.sampled_from((0, 0, 3))),
    )


evictions = st.builds(Evict, first=st.integers(0, 40), stride=st.integers(1, 9))
events = requests() | requests() | evictions


def check(sizes: Sizes, shared: int, history: list[Event], capacity: int, layouts: Layouts | None = None) -> None:
    """Exact logits and bytes, bit for bit in fixed order; two texts that share their first tokens."""
    plan = planner(sizes, layouts=layouts)
    a, b = sequence(sizes, 1, LENGTH), sequence(sizes, 2, LENGTH)
    played = play(plan, (a, a[:shared] + b[shared:]), history, capacity)
    assert played.worst <= (0.0 if sizes.fixed_order else TOLERANCE)
    assert played.bytes_wrong == []


@pytest.mark.parametrize("fixed_order", [True, False])
@pytest.mark.parametrize("number", range(len(SIZES)))
@given(
    shared=st.sampled_from((0, 7, 16, 23)),
    history=st.lists(events, min_size=2, max_size=6),
    capacity=st.sampled_from((400, 400, 24)),
)
@settings(max_examples=7)
def test_any_history(number: int, fixed_order: bool, shared: int, history: list[Event], capacity: int) -> None:
    check(msgspec.structs.replace(SIZES[number], fixed_order=fixed_order), shared, history, capacity)


@given(
    shared=st.sampled_from((0, 7, 16, 23)),
    history=st.lists(events, min_size=2, max_size=6),
    capacity=st.sampled_from((400, 400, 24)),
)
@settings(max_examples=7)
def test_any_history_quantised(shared: int, history: list[Event], capacity: int) -> None:
    """Entries and window rows in fp8, the rest in fp32: still bit-equal, since what is stored is attended."""
    check(QUANTISED, shared, history, capacity, FP8)


@pytest.mark.deep
@pytest.mark.parametrize("fixed_order", [True, False])
@pytest.mark.parametrize("number", range(len(SIZES)))
@given(
    shared=st.integers(0, LENGTH),
    history=st.lists(events, min_size=2, max_size=9),
    capacity=st.sampled_from((400, 60, 24, 9)),
)
@settings(max_examples=150)
def test_any_history_deep(number: int, fixed_order: bool, shared: int, history: list[Event], capacity: int) -> None:
    check(msgspec.structs.replace(SIZES[number], fixed_order=fixed_order), shared, history, capacity)


def resume_and_pass_the_fold(sizes: Sizes, positions: range) -> None:
    """A, B, A: B between the two halves of A; the resumed half runs past the next fold of every compressor."""
    plan, period = planner(sizes), sizes.hca_ratio
    a, b = sequence(sizes, 1, sizes.reach), sequence(sizes, 2, sizes.reach)
    for r in positions:
        end = r + period + 2
        history = [Request(0, r, (7,)), Request(1, period + 3, (8,)), Request(0, end, (5,))]
        played = play(plan, (a[:end], b[:end]), history)
        assert (played.hits, played.worst, played.bytes_wrong) == ([0, 0, r], 0.0, [])
        assert played.compared == [r, period + 3, end - r]


@pytest.mark.parametrize("sizes", [FINE, RING], ids=["paged", "ring"])
def test_resume_at_every_position_of_the_big_ratio(sizes: Sizes) -> None:
    resume_and_pass_the_fold(sizes, range(2 * sizes.hca_ratio, 3 * sizes.hca_ratio))


def test_resume_with_layers_in_another_order() -> None:
    resume_and_pass_the_fold(UNALIGNED, range(2 * UNALIGNED.hca_ratio, 3 * UNALIGNED.hca_ratio + 1, 5))


@pytest.mark.deep
@pytest.mark.parametrize("sizes", [FINE, RING, UNALIGNED], ids=["paged", "ring", "other order"])
def test_resume_at_every_position(sizes: Sizes) -> None:
    resume_and_pass_the_fold(sizes, range(1, 4 * sizes.hca_ratio))


REAL = Sizes(
    layers=("window", "csa", "hca", "recurrent"),
    window=128,
    hca_ratio=128,
    hca_block=128,
    top_k=16,
    reach=448,
    max_step=32,
)


def resume_in_real_ratios(positions: range) -> None:
    """V4's own window and ratios: resumes at r and runs past the next HCA fold."""
    plan = planner(REAL)
    text = sequence(REAL, 1, REAL.reach)
    known, store = truth(plan, text), MemoryStore(plan.decoder, 500)
    first = Session(plan, store, text[: positions.stop])
    while first.position < positions.stop:
        first.prefill(32)
    for r in positions:
        session = Session(plan, store, text[: r + 1], Want(alignment=1))
        assert session.hit.r == r
        end = (r // 128 + 1) * 128 + 3
        while session.position < end:
            at = session.position
            logits = session.compute(text[at : min(at + 32, end)])
            assert torch.equal(logits, known.logits[at : at + len(logits)])
            session.commit(len(logits))


def test_the_histories_are_not_vacuous() -> None:
    """A plain chain of requests gets hits in every mode, its logits are compared wherever they are claimed to be exact,
    and more entries than top-k are visible.
    """
    plan = planner(FINE)
    a = sequence(FINE, 1, LENGTH)
    wants = (Want(alignment=1), Want(replay=4), Want(mode="zero-exact"), Want(mode="bounded", replay=8))
    played = play(plan, (a,), [Request(0, 30, (8,)), *(Request(0, 38, (3,), want=want) for want in wants)])
    assert all(hit > 0 for hit in played.hits[1:])
    assert all(played.compared[:4])
    assert played.compared[4] == 0
    assert LENGTH // FINE.csa_ratio > 3 * FINE.top_k


def test_resume_in_real_ratios() -> None:
    resume_in_real_ratios(range(254, 258))


@pytest.mark.deep
def test_resume_in_real_ratios_at_every_r() -> None:
    resume_in_real_ratios(range(129, 258))
