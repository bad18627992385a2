"""The tables decide what the decoder reads: a table with a fault shows in its logits, or another table refuses it; and
the operation that a row names is the one that runs.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from allocated_histories import A, B, Memory, Restore, memory, play, prefill, serve_all
from decoder_histories import FINE, LENGTH, Request, truth
from helpers import copy_spec
from test_decoder import COARSE

from hybridkv_ref.allocator import CacheSegment
from hybridkv_ref.allocator.reshape import slots_of
from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_allocator import AllocatedSession
from hybridkv_ref.decoder_geometry import Sizes
from hybridkv_ref.decoder_plan import IndexEncoding
from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import compress_pool_quant as pooling
from hybridkv_ref.kernels import copy_blocks as copying
from hybridkv_ref.machine import Refused

# ---- Operations and needs --------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    ("file", "kernel"),
    [
        ("protocols/handoffs", "compress_pool_quant"),
        ("common", "index_build"),
        ("kinds/uncompressed_tail", "tail_append"),
    ],
)
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
