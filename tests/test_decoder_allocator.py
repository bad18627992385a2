"""The decoder in the allocator's segments: logits and bytes after every hit equal those from scratch, and every step
is rows of the tables.
"""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from allocated_histories import A, B, Event, Restore, Spill, memory, play, prefill, wrong_bytes
from decoder_histories import FINE, FP8, LENGTH, QUANTISED, TOLERANCE, Request, sequence, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import COARSE, OTHER_ORDER, evictions, requests

from hybridkv_ref.allocator import NotAdmitted, demand, size_caps
from hybridkv_ref.decoder_allocator import prefetch
from hybridkv_ref.decoder_geometry import Layouts, Sizes
from hybridkv_ref.errors import InputError
from hybridkv_ref.machine import Refused

NO_STATE = msgspec.structs.replace(FINE, layers=("window", "csa", "window", "hca"))
spills = st.builds(Spill, first=st.integers(0, 40), stride=st.integers(1, 9))
events = requests(modes=("full",)) | requests(modes=("full",)) | evictions | spills | st.just(Restore())


def check(
    sizes: Sizes, shared: int, history: list[Event], room: int, replay: int, layouts: Layouts | None = None
) -> None:
    """Exact logits and bytes, bit for bit in fixed order; two texts that share their first tokens."""
    a, b = sequence(sizes, 1, LENGTH), sequence(sizes, 2, LENGTH)
    texts = (a, a[:shared] + b[shared:])
    here = memory(sizes, LENGTH, room, layouts, replay=replay)
    with here.allocator:
        played = play(here, texts, history)
        assert played.worst <= (0.0 if sizes.fixed_order else TOLERANCE)
        assert wrong_bytes(here, [truth(here.plan, text) for text in texts]) == []
        here.allocator.drain()
        assert here.faults() == []


@pytest.mark.parametrize("fixed_order", [True, False])
@pytest.mark.parametrize(
    "sizes", [FINE, COARSE, OTHER_ORDER, NO_STATE], ids=["fine", "coarse", "other order", "no state"]
)
@given(
    shared=st.sampled_from((0, 8, 16, 23)),
    history=st.lists(events, min_size=2, max_size=6),
    room=st.sampled_from((8, 1)),
    replay=st.sampled_from((0, 16)),
)
@settings(max_examples=7)
def test_any_history(
    sizes: Sizes, fixed_order: bool, shared: int, history: list[Event], room: int, replay: int
) -> None:
    check(msgspec.structs.replace(sizes, fixed_order=fixed_order), shared, history, room, replay)


@pytest.mark.deep
@pytest.mark.parametrize("fixed_order", [True, False])
@pytest.mark.parametrize(
    "sizes", [FINE, COARSE, OTHER_ORDER, NO_STATE], ids=["fine", "coarse", "other order", "no state"]
)
@given(
    shared=st.integers(0, LENGTH),
    history=st.lists(events, min_size=2, max_size=9),
    room=st.integers(1, 4),
    replay=st.sampled_from((0, 8, 16)),
)
@settings(max_examples=100)
def test_any_history_deep(
    sizes: Sizes, fixed_order: bool, shared: int, history: list[Event], room: int, replay: int
) -> None:
    check(msgspec.structs.replace(sizes, fixed_order=fixed_order), shared, history, room, replay)


@given(shared=st.sampled_from((0, 8, 16, 23)), history=st.lists(events, min_size=2, max_size=6))
@settings(max_examples=7)
def test_any_history_quantised(shared: int, history: list[Event]) -> None:
    """Entries and window rows in fp8, the rest in fp32."""
    check(QUANTISED, shared, history, 1, 0, FP8)


def test_the_histories_are_not_vacuous(tmp_path: Path) -> None:
    """Under pressure segments go to the host and to files and come back; hits are read, drafts are folded and refused,
    and every handoff between two segments fires.
    """
    drafts = ((5, 2), (5, 5), (3, 0), (6, 1))
    history: list[Event] = [
        Request(0, 33, (8,), drafts), Request(1, 38, (7,)), Restore(), Request(0, 40, (3,)), Restore(),
        Request(1, 40, (3,)),
    ]  # fmt: skip
    here = memory(FINE, LENGTH, 1, host_bytes=1 << 14, store=str(tmp_path), store_bytes=1 << 22)
    with here.allocator:
        played = play(here, (A, B), history)
        assert played.worst == 0.0
        assert played.hits[:2] == [0, 0]
        assert min(played.hits[2:]) > 0
        assert played.restored > 0
        assert {stored.medium for stored in here.allocator.tiers.objects} == {"HOST", "DISK"}
        assert wrong_bytes(here, [truth(here.plan, text) for text in (A, B)]) == []
        fired = {event.partition("[")[0].rpartition(".")[2] for event in here.shadow.counts}
        assert {"clone_end", "reopen", "fold_end", "unfold", "reject_drafts", "accept_tokens"} <= fired
        assert {"spill_end", "restore_part", "publish", "free", "dispatch", "complete"} <= fired
        here.allocator.drain()
        assert here.faults() == []


# ---- Two positions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "start"), [(FINE, 24), (NO_STATE, 28), (OTHER_ORDER, 16)], ids=["snapshot", "inside a unit", "coarse"]
)
def test_a_replay_stands_in_for_tails(sizes: Sizes, start: int) -> None:
    """No CSA tail is cached: computing begins before the frontier, and everything from there on is exact."""
    here, text = memory(sizes, LENGTH, 4, replay=16, host_bytes=0), sequence(sizes, 1, LENGTH)
    known = truth(here.plan, text)
    with here.allocator:
        first = here.session(text[:34])
        prefill(first, 34)
        first.finish()
        for segment in here.allocator.segments():
            if segment.group.name in ("csa_tail", "csa_index_tail"):
                here.allocator.deallocate(segment)
        session = here.session(text)
        assert (session.hit.r, session.hit.frontier) == (start, 32)
        assert torch.equal(prefill(session, LENGTH), known.logits[start:])
        session.finish()
        assert wrong_bytes(here, [known]) == []
        again = here.session(text)
        assert (
            again.hit.r == again.hit.frontier == LENGTH // here.allocator.geometry.unit * here.allocator.geometry.unit
        )
        again.abort()
        here.allocator.drain()
        assert here.faults() == []


# ---- Requests side by side -------------------------------------------------------------------------------------------


def test_requests_side_by_side() -> None:
    """A, B, A: the first writes on after the second has taken memory and finished; a third reads what both wrote."""
    here = memory(FINE, LENGTH, 2)
    known = truth(here.plan, A).logits
    with here.allocator:
        first, second = here.session(A), here.session(B)
        halves = [prefill(first, 21)]
        assert torch.equal(prefill(second, 30), truth(here.plan, B).logits[:30])
        second.finish()
        assert torch.equal(torch.cat([*halves, prefill(first, LENGTH)]), known)
        third = here.session(A)
        assert third.hit.r == 40
        assert torch.equal(prefill(third, LENGTH), known[40:])
        first.abort()
        third.finish()
        here.allocator.drain()
        assert here.faults() == []


def test_a_request_that_does_not_fit_is_aborted_whole() -> None:
    """Two requests where memory is for one: the second is refused by a cap, and nothing of it stays."""
    here = memory(FINE, LENGTH, 1, host_bytes=0)
    with here.allocator:
        first = here.session(A)
        prefill(first, LENGTH)
        with pytest.raises(Refused, match="gpu_used"):
            prefill(here.session(B), LENGTH)
        assert len(here.allocator.requests.running) == 1
        assert here.faults() == []


@pytest.mark.parametrize("sizes", [FINE, OTHER_ORDER], ids=["fine", "other order"])
@pytest.mark.parametrize("length", [9, 16, 33, LENGTH])
def test_what_the_gate_admits_runs(sizes: Sizes, length: int) -> None:
    """In memory for one request of this length and a step of drafts it runs to its end, whatever it finds; where the
    prompt alone does not fit, the gate refuses it.
    """
    text = sequence(sizes, 1, LENGTH)
    geometry = memory(sizes, length, 1).allocator.geometry
    drafts = sizes.max_step
    exactly = sum(size_caps(geometry, length + drafts).values())
    cold = sum(demand(geometry, length).values())
    here = memory(sizes, length, 1, host_bytes=0, device_bytes=exactly)
    with here.allocator:
        known = truth(here.plan, text).logits
        for _ in range(3):
            session = here.session(text[:length])
            assert torch.equal(prefill(session, length), known[session.hit.r : length])
            session.compute(text[:drafts])
            session.commit(0)
            session.finish()
        assert session.hit.r == (length - 1) // geometry.unit * geometry.unit
    short = memory(sizes, length, 1, host_bytes=0, device_bytes=cold - 1)
    with short.allocator, pytest.raises(NotAdmitted, match="HKV-S1-011"):
        short.session(text[:length])


def test_tokens_of_the_prompt_are_not_refused() -> None:
    here = memory(FINE, LENGTH, 1)
    with here.allocator:
        session = here.session(A[:10])
        session.compute(A[:5])
        with pytest.raises(InputError, match="0 of 5 computed tokens, 5 of them confirmed"):
            session.commit(0)
        with pytest.raises(InputError, match="5 tokens wait to be committed"):
            session.compute(A[5:7])


# ---- Threads ---------------------------------------------------------------------------------------------------------


def test_requests_in_threads() -> None:
    """Four threads, memory for four requests, prefixes that are shared and a tier: every logit is right."""
    here = memory(FINE, LENGTH, 4)
    texts = (A, A[:16] + B[16:], B, A[:24] + B[:20])
    known = {text: truth(here.plan, text).logits for text in texts}

    def run(number: int) -> list[tuple[int, bool]]:
        found = []
        for turn in range(4):
            text = texts[(number + turn) % len(texts)]
            prefetch(here.decoder, here.allocator, text)
            session = here.session(text)
            logits = prefill(session, LENGTH)
            found.append((session.hit.r, torch.equal(logits, known[text][session.hit.r : session.position])))
            session.finish()
        return found

    with here.allocator, ThreadPoolExecutor(4) as pool:
        served = [one for done in pool.map(run, range(4)) for one in done]
        assert all(equal for _, equal in served)
        assert any(hit for hit, _ in served)
        here.allocator.drain()
        assert here.faults() == []
