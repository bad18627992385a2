"""The decoder in the allocator's segments: logits and bytes after every hit equal those from scratch, and every step
is rows of the tables.
"""

from pathlib import Path

import msgspec
import pytest
from allocated_histories import memory, play, wrong_bytes
from decoder_histories import FP8, QUANTISED, TOLERANCE, Event, Request, Restore, sequence, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import COARSE, FINE, LENGTH, OTHER_ORDER, evictions, requests

from hybridkv_ref.decoder_geometry import Layouts, Sizes

events = requests(modes=("full",)) | requests(modes=("full",)) | evictions | st.builds(Restore, stride=st.just(1))


def check(sizes: Sizes, shared: int, history: list[Event], room: int, layouts: Layouts | None = None) -> None:
    """Exact logits and bytes, bit for bit in fixed order; two texts that share their first tokens."""
    a, b = sequence(sizes, 1, LENGTH), sequence(sizes, 2, LENGTH)
    texts = (a, a[:shared] + b[shared:])
    here = memory(sizes, LENGTH, room, layouts)
    with here.allocator:
        played = play(here, texts, history)
        assert played.worst <= (0.0 if sizes.fixed_order else TOLERANCE)
        assert wrong_bytes(here, [truth(here.plan, text) for text in texts]) == []
        here.allocator.drain()
        assert here.faults() == []


@pytest.mark.parametrize("fixed_order", [True, False])
@pytest.mark.parametrize("sizes", [FINE, COARSE, OTHER_ORDER], ids=["fine", "coarse", "other order"])
@given(
    shared=st.sampled_from((0, 8, 16, 23)),
    history=st.lists(events, min_size=2, max_size=6),
    room=st.sampled_from((8, 1)),
)
@settings(max_examples=7)
def test_any_history(sizes: Sizes, fixed_order: bool, shared: int, history: list[Event], room: int) -> None:
    check(msgspec.structs.replace(sizes, fixed_order=fixed_order), shared, history, room)


@given(shared=st.sampled_from((0, 8, 16, 23)), history=st.lists(events, min_size=2, max_size=6))
@settings(max_examples=7)
def test_any_history_quantised(shared: int, history: list[Event]) -> None:
    """Entries and window rows in fp8, the rest in fp32."""
    check(QUANTISED, shared, history, 1, FP8)


def test_the_histories_are_not_vacuous(tmp_path: Path) -> None:
    """Under pressure segments go to the host and to files and come back; hits are read, drafts are folded and refused,
    and every handoff between two segments fires.
    """
    a, b = sequence(FINE, 1, LENGTH), sequence(FINE, 2, LENGTH)
    drafts = ((5, 2), (5, 5), (3, 0), (6, 1))
    history: list[Event] = [
        Request(0, 33, (8,), drafts), Request(1, 38, (7,)), Restore(1), Request(0, 40, (3,)), Restore(1),
        Request(1, 40, (3,)),
    ]  # fmt: skip
    here = memory(FINE, LENGTH, 1, host_bytes=1 << 14, store=str(tmp_path), store_bytes=1 << 22)
    with here.allocator:
        played = play(here, (a, b), history)
        assert played.worst == 0.0
        assert played.hits[:2] == [0, 0]
        assert min(played.hits[2:]) > 0
        assert played.restored > 0
        assert {stored.medium for stored in here.allocator.tiers.objects} == {"HOST", "DISK"}
        assert wrong_bytes(here, [truth(here.plan, text) for text in (a, b)]) == []
        fired = {event.partition("[")[0].rpartition(".")[2] for event in here.shadow.counts}
        assert {"clone_end", "reopen", "fold_end", "unfold", "reject_drafts", "accept_tokens"} <= fired
        assert {"spill_end", "restore_part", "publish", "free", "dispatch", "complete"} <= fired
        here.allocator.drain()
        assert here.faults() == []
