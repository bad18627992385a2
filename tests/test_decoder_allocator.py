"""The decoder in the allocator's segments: logits and bytes after every hit equal those from scratch, and every step
is rows of the tables.
"""

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from allocated_histories import Event, Memory, Restore, Spill, memory, play, wrong_bytes
from decoder_histories import FP8, QUANTISED, TOLERANCE, Request, sequence, truth
from helpers import copy_spec
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import COARSE, FINE, LENGTH, OTHER_ORDER, evictions, requests

from hybridkv_ref.allocator import CacheSegment, NotAdmitted, demand, size_caps
from hybridkv_ref.allocator.reshape import slots_of
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_allocator import AllocatedSession, prefetch
from hybridkv_ref.decoder_geometry import Layouts, Sizes
from hybridkv_ref.decoder_plan import IndexEncoding
from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import compress_pool_quant as pooling
from hybridkv_ref.kernels import copy_blocks as copying
from hybridkv_ref.machine import Refused

NO_STATE = msgspec.structs.replace(FINE, layers=("window", "csa", "window", "hca"))
A, B = sequence(FINE, 1, LENGTH), sequence(FINE, 2, LENGTH)
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


def prefill(session: AllocatedSession, upto: int) -> torch.Tensor:
    """Logits of the prompt up to ``upto``, in steps of 5."""
    made = []
    while session.position < upto:
        made.append(session.prefill(min(5, upto - session.position)))
    return torch.cat(made)


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


# ---- The tables decide -----------------------------------------------------------------------------------------------


def test_the_kernel_of_a_fold_runs_between_its_rows() -> None:
    """While rows are pooled the tables show tail and entries in the middle of a fold."""
    here, seen = memory(FINE, LENGTH, 1), []
    pool = pooling.compress_pool_quant

    def watched(*arguments: Any) -> torch.Tensor:
        made = [s for s in here.allocator.segments() if s.kind == "uncompressed_tail" and s.stage == "FOLDING"]
        seen.append(len(made))
        return pool(*arguments)

    with here.allocator, mock.patch.object(pooling, "compress_pool_quant", watched):
        prefill(here.session(A), 16)
    # CSA and its indexer fold at 4, 8, 12, 16, HCA at 8 and 16.
    assert seen == [2, 2, 3, 3, 3, 2, 2, 3, 3, 3]


@pytest.mark.parametrize(("file", "kernel"), [("protocols/handoffs", "compress_pool_quant"), ("common", "tail_append")])
def test_another_kernel_in_the_table_is_what_runs(file: str, kernel: str, tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / f"{file}.toml", f'kernel = "{kernel}"', 'kernel = "no_such_operation"')
    here = memory(FINE, LENGTH, 1, spec=spec)
    with here.allocator:
        with pytest.raises(InputError, match="there is no operation 'no_such_operation'"):
            prefill(here.session(A), 8)
        assert here.allocator.segments() == []
        assert here.faults() == []


def test_a_step_that_cannot_begin_leaves_nothing() -> None:
    """Its folds have begun when the device refuses it: they fail, and the request ends."""
    here = memory(FINE, LENGTH, 1)
    with here.allocator:
        session = here.session(A)
        prefill(session, 7)
        with (
            mock.patch.object(here.allocator.book, "dispatch", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            session.prefill(1)
        assert {"fold_fail[uncompressed_tail>compressed_kv]"} <= here.shadow.counts.keys()
        assert here.allocator.segments() == []
        assert here.faults() == []


def test_the_kernel_of_a_spill_and_of_a_load_runs_between_their_rows(tmp_path: Path) -> None:
    """Bytes go to host memory and to files, and back, while the tables show a copy that moves."""
    copy, moving = copying.copy_blocks, []

    def watched(source: torch.Tensor, target: torch.Tensor, moves: torch.Tensor, unit: int) -> torch.Tensor:
        moving.append([e.stage for e in here.allocator.ledger.made if e.cls == "copy"].count("MOVING"))
        return copy(source, target, moves, unit)

    with mock.patch.object(copying, "copy_blocks", watched):
        here = memory(FINE, LENGTH, 1, host_bytes=1 << 14, store=str(tmp_path), store_bytes=1 << 22)
        with here.allocator:
            played = play(here, (A, B), [Request(0, LENGTH), Request(1, LENGTH), Restore(), Request(0, LENGTH)])
            outcomes = here.allocator.tiers.outcomes
    assert played.restored
    assert len(moving) >= outcomes["spilled"] + outcomes["loaded"]
    assert all(moving)


@pytest.mark.parametrize("row", ["spill_begin", "restore_begin"])
def test_a_copy_without_an_operation_is_refused_before_anything_runs(row: str, tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    path = spec / "protocols/handoffs.toml"
    before, entry, after = path.read_text().partition(f"[handoffs.{row}]\n")
    path.write_text(before + entry + after.replace('kernel = "copy_blocks"', 'kernel = "teleport"', 1))
    with pytest.raises(InputError, match=f"{row}.*:kernel: there is no operation 'teleport'"):
        memory(FINE, LENGTH, 1, spec=spec)


def edit(path: Path, old: str, new: str) -> None:
    """Changes one place of a table."""
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


NEEDS = {
    "no window rows": ("swa_window", r'lo = "max\(0, s - \(window - 1\)\)"', 'lo = "s"'),
    "entries but for the last grid unit": ("compressed_kv", r'hi = ".*"', 'hi = "max(0, floor_to(F, ratio) - 8)"'),
    "keys but for the last grid unit": ("indexer_state", r'hi = ".*"', 'hi = "max(0, floor_to(F, ratio) - 8)"'),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_wrong_need_shows_in_the_logits(name: str, tmp_path: Path) -> None:
    """With another entry in recovery.toml, the hit that every layer of the validation accepts gives other logits."""
    kind, old, new = NEEDS[name]
    spec = copy_spec(tmp_path)
    path = spec / "recovery.toml"
    before, entry, after = path.read_text().partition(f"[need.{kind}]\n")
    path.write_text(before + entry + re.sub(old, new, after, count=1))
    for changed, here in ((False, memory(FINE, LENGTH, 4)), (True, memory(FINE, LENGTH, 4, spec=spec))):
        with here.allocator:
            played = play(here, (A,), [Request(0, 33), Request(0, LENGTH)])
            assert played.hits == [0, 32]
            assert (played.worst > 1e-3) == changed


def test_a_tail_without_halo_is_refused_by_its_own_table(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "recovery.toml", 'lo = "max(0, floor_to(F, ratio) - halo)"', 'lo = "floor_to(F, ratio)"')
    here = memory(FINE, LENGTH, 4, spec=spec)
    with here.allocator, pytest.raises(Refused, match="HKV-TAIL-001"):
        play(here, (A,), [Request(0, 33), Request(0, LENGTH)])


def interrupted(here: Memory) -> tuple[AllocatedSession, torch.Tensor]:
    """Between the match and the pin of a request over A, A's windows go and B takes their records and slots."""
    pin: Callable[..., Any] = here.allocator.pin

    def late(hit: Any) -> Any:
        here.allocator.pin = pin  # type: ignore[method-assign]
        windows = [segment for segment in here.allocator.segments() if segment.kind == "swa_window"]
        for segment in sorted(windows, key=lambda s: s.token_range, reverse=True):
            here.allocator.deallocate(segment)
        serve_all(here, B)
        return pin(hit)

    serve_all(here, A)
    here.allocator.pin = late  # type: ignore[method-assign]
    session = here.session(A)
    return session, prefill(session, LENGTH)


def serve_all(here: Memory, text: tuple[int, ...]) -> None:
    """One request, computed and finished."""
    session = here.session(text)
    prefill(session, LENGTH)
    session.finish()


def test_without_the_generation_in_the_table_another_prefix_is_read(tmp_path: Path) -> None:
    """L1 refuses segments that were written anew since the match; without that guard B's bytes are read for A's."""
    here = memory(FINE, LENGTH, 4, host_bytes=0)
    with here.allocator:
        session, logits = interrupted(here)
        assert session.hit.r == 0
        assert any("lease.seen == generation" in refused for refused in session.refusals)
        assert torch.equal(logits, truth(here.plan, A).logits)
    spec = copy_spec(tmp_path)
    edit(spec / "protocols/prefix_hit.toml", '"lease.seen == generation", ', "")
    here = memory(FINE, LENGTH, 4, spec=spec, host_bytes=0)
    with here.allocator:
        session, logits = interrupted(here)
        assert session.hit.r == 40
        assert (logits - truth(here.plan, A).logits[40:]).abs().max() > 1e-3


# ---- Index keys ------------------------------------------------------------------------------------------------------


def of_the_next_epoch(here: Memory) -> tuple[Decoder, AllocatedSession]:
    """Keys are encoded otherwise from now on: a request by a decoder that does, over what one wrote that did not."""
    serve_all(here, A)
    here.allocator.system("new_index")
    decoder = Decoder(FINE, encoding=IndexEncoding(1))
    return decoder, AllocatedSession(decoder, here.allocator, A)


def test_stale_index_keys_are_refused_until_they_are_rebuilt() -> None:
    """L1 refuses them, so everything is computed; re-encoded by the CPU pipeline they serve the whole hit."""
    here = memory(FINE, LENGTH, 4, host_bytes=0)
    with here.allocator:
        decoder, session = of_the_next_epoch(here)
        known = decoder.from_scratch(A)[0]
        assert session.hit.r == 0
        assert all("mark == req.version" in refused for refused in session.refusals)
        assert torch.equal(prefill(session, LENGTH), known)
        session.finish()

        def encode(keys: torch.Tensor) -> torch.Tensor:
            return IndexEncoding(1).encode(IndexEncoding(0).decode(keys))

        rebuilds = here.allocator.rebuild(encode)
        assert len(rebuilds) == LENGTH // here.allocator.geometry.unit
        for rebuilt in rebuilds:
            rebuilt.result()
        again = AllocatedSession(decoder, here.allocator, A)
        assert again.hit.r == 40
        assert torch.equal(prefill(again, LENGTH), known[40:])
        again.finish()
        here.allocator.drain()
        assert here.faults() == []


def test_without_the_version_in_the_table_stale_keys_choose_other_entries(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "kinds/indexer_state.toml", 'when = ["mark == req.version", ', "when = [")
    here = memory(FINE, LENGTH, 4, spec=spec, host_bytes=0)
    with here.allocator:
        decoder, session = of_the_next_epoch(here)
        assert session.hit.r == 40
        assert (prefill(session, LENGTH) - decoder.from_scratch(A)[0][40:]).abs().max() > 1e-3


# ---- Segments that change without a request --------------------------------------------------------------------------


def hit_of_all(here: Memory) -> bool:
    """Whether a request over A, which is cached, reads all of it and gives the right logits."""
    session = here.session(A)
    logits = prefill(session, LENGTH)
    session.finish()
    assert session.hit.r == 40
    return torch.equal(logits, truth(here.plan, A).logits[40:])


def test_segments_may_move() -> None:
    """Defragmented, every segment lies elsewhere, and a hit reads the same bytes."""
    here = memory(FINE, LENGTH, 4, host_bytes=0)
    with here.allocator:
        serve_all(here, A)
        before = {id(segment): slots_of(segment).tolist() for segment in here.allocator.segments()}
        for segment in here.allocator.segments():
            here.allocator.reshape.move(segment)
        after = {id(segment): slots_of(segment).tolist() for segment in here.allocator.segments()}
        assert all(before[one] != after[one] for one in before)
        assert hit_of_all(here)
        assert here.faults() == []


def skew(here: Memory, phase: int) -> CacheSegment:
    """A is cached, and the last of its windows lies as in a ring that begins ``phase`` rows later."""
    serve_all(here, A)
    last = LENGTH // here.allocator.geometry.unit * here.allocator.geometry.unit
    (window,) = (s for s in here.allocator.segments() if s.kind == "swa_window" and s.token_range[1] == last)
    here.allocator.book.write_rows(window, 0, here.allocator.rows(window).roll(phase, dims=1))
    here.allocator.transition(window, "skew", phase=phase)
    return window


@pytest.mark.parametrize("sizes", [FINE, COARSE], ids=["rows", "blocks of rows"])
def test_a_skewed_window_is_read_after_it_is_realigned(sizes: Sizes) -> None:
    """Until then a hit ends before it."""
    here = memory(sizes, LENGTH, 4, host_bytes=0)
    with here.allocator:
        window = skew(here, 3)
        before = here.session(A)
        assert before.hit.r == window.token_range[0]
        before.abort()
        here.allocator.reshape.realign(window)
        after = here.session(A)
        assert after.hit.r == window.token_range[1]
        assert torch.equal(prefill(after, LENGTH), truth(here.plan, A).logits[after.hit.r :])
        assert here.faults() == []


def test_a_skewed_window_that_the_table_lets_pass_gives_other_logits(tmp_path: Path) -> None:
    spec = copy_spec(tmp_path)
    edit(spec / "kinds/swa_window.toml", 'READABLE = ["READY"]', 'READABLE = ["READY", "MISALIGNED"]')
    here = memory(FINE, LENGTH, 4, spec=spec, host_bytes=0)
    with here.allocator:
        skew(here, 3)
        assert not hit_of_all(here)


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
