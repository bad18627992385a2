"""The decoder in the allocator's segments: logits and bytes after every hit equal those from scratch, and every step
is rows of the tables.
"""

import msgspec
import pytest
from allocated_histories import memory, play, wrong_bytes
from decoder_histories import FP8, QUANTISED, TOLERANCE, Event, Request, Restore, sequence, truth
from hypothesis import given, settings
from hypothesis import strategies as st
from test_decoder import COARSE, FINE, LENGTH, OTHER_ORDER, evictions, requests

from hybridkv_ref.decoder_geometry import Layouts, Sizes

events = requests(modes=("full",)) | requests(modes=("full",)) | evictions | st.builds(Restore, stride=st.just(1))


def check(sizes: Sizes, shared: int, history: list[Event], room: float, layouts: Layouts | None = None) -> None:
    """Exact logits and bytes, bit for bit in fixed order; two texts that share their first tokens."""
    a, b = sequence(sizes, 1, LENGTH), sequence(sizes, 2, LENGTH)
    texts = (a, a[:shared] + b[shared:])
    here = memory(sizes, room, layouts)
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
    room=st.sampled_from((8.0, 1.0)),
)
@settings(max_examples=7)
def test_any_history(sizes: Sizes, fixed_order: bool, shared: int, history: list[Event], room: float) -> None:
    check(msgspec.structs.replace(sizes, fixed_order=fixed_order), shared, history, room)


@given(shared=st.sampled_from((0, 8, 16, 23)), history=st.lists(events, min_size=2, max_size=6))
@settings(max_examples=7)
def test_any_history_quantised(shared: int, history: list[Event]) -> None:
    """Entries and window rows in fp8, the rest in fp32."""
    check(QUANTISED, shared, history, 2.0, FP8)
