"""Figures of the fact sheet, measured again on the decoder: HCA tails, rings, ties, rounding, grades."""

from unittest import mock

import msgspec
import pytest
import torch
from decoder_histories import Request, difference, planner, sequence, serve, truth, wrong
from decoder_switches import reject, ring_sizes, without

from hybridkv_ref import decoder, decoder_attention, decoder_state
from hybridkv_ref.decoder_geometry import Sizes
from hybridkv_ref.decoder_plan import IndexEncoding
from hybridkv_ref.decoder_reuse import Planner, Want
from hybridkv_ref.decoder_session import Session
from hybridkv_ref.decoder_state import row_bytes
from hybridkv_ref.decoder_store import MemoryStore, copy_object
from hybridkv_ref.kernels.topk_select import topk_select
from hybridkv_ref.models import load_model
from hybridkv_ref.recovery import from_model

BASE = Sizes()
LENGTH = 44


# ---- HCA tails -----------------------------------------------------------------------------------------------------

REAL = Sizes(layers=("window", "csa", "hca"), window=128, hca_ratio=128, hca_block=128, reach=400, max_step=32)
WHOLE_RING = "max(0, s - (ratio + halo))"


@pytest.mark.parametrize(("sizes", "fill", "end"), [(BASE, 29, 44), (REAL, 259, 400)], ids=["ratio 8", "ratio 128"])
def test_no_hca_tail_row_is_needed_at_a_multiple(sizes: Sizes, fill: int, end: int) -> None:
    """No HCA tail is ever stored.  A hit at the last multiple is exact past the next fold; a rule that asks for the
    whole state window, as vLLM's does, has no hit at all.
    """
    plan, text = planner(sizes), sequence(sizes, 1, end)
    store = MemoryStore(plan.decoder, 500, {"hca_tail": 0})
    serve(Session(plan, store, text[:fill]), Request(0, fill, (sizes.max_step,)), truth(plan, text))
    session = Session(plan, store, text, Want(alignment=1))
    assert session.hit.r == fill // sizes.hca_ratio * sizes.hca_ratio
    assert session.hit.limiting == ("hca_tail",)
    assert end > session.hit.r + sizes.hca_ratio
    assert difference(session, serve(session, Request(0, end), truth(plan, text)), truth(plan, text)) == 0.0
    strict = without("uncompressed_tail", "lo", WHOLE_RING, sizes)
    assert strict.find(store, text, Want(alignment=1)).hit.r == 0


def test_what_the_hit_gains_in_v4_flash() -> None:
    """At multiples of 128, 10 MiB of the 11.6 MiB of compressor state need neither be stored nor loaded."""
    model = load_model("deepseek-v4-flash")
    sizes = {group.name: group for group in model.groups}
    needed = {}
    for group in from_model(model):
        if sizes[group.name].shape == "ring":
            low, high, _ = group.need(12_800, 12_800)
            ring = sizes[group.name].ring_rows or 0
            row = sizes[group.name].layers * sizes[group.name].row_size(model.dtypes())
            needed[group.name] = ((high - low) * row, ring * row)
    assert needed["hca_tail"] == (0, 128 * 4096 * 20)
    assert sum(whole for _, whole in needed.values()) == pytest.approx(11.6 * 2**20, rel=0.01)
    assert sum(read for read, _ in needed.values()) == (8192 + 2048) * 4 * 21


@pytest.mark.parametrize("r", range(16, 23))
def test_a_tail_that_ends_later_holds_the_rows_too(r: int) -> None:
    """recovery.toml asks for a tail that ends at r.  The decoder does not: rows are positional, so a tail that ends
    later and begins early enough resumes as exactly.  The table is sound here, and asks for more than is needed.
    """
    plan, text = planner(BASE), sequence(BASE, 1, LENGTH)
    store = MemoryStore(plan.decoder, 400)
    serve(Session(plan, store, text[:24]), Request(0, 24, (8,)), truth(plan, text))
    session = Session(plan, store, text[: r + 1], Want(alignment=1))
    assert session.hit.r == r
    for item in plan.decoder.stored:
        if item.shape != "ring":
            continue
        group, target = plan.groups[item.group], session.state.rows(item.layer, item.group)
        low = group.need(r, r)[0]
        later = [end for end in range(r + 1, 24) if group.need(end, end)[0] <= low]
        if low < r and later:
            key, reader = plan.key(text[: later[-1]], "exact"), plan.descriptors[item.layer, item.group]
            rows = store.rows(found) if (found := store.find(item.layer, item.group, key, reader)) else None
            assert rows is not None
            target.arena.fill_(decoder_state.POISON)
            copy_object(rows, low - group.need(later[-1], later[-1])[0], target, low, r - low)
    assert difference(session, serve(session, Request(0, LENGTH), truth(plan, text)), truth(plan, text)) == 0.0


# ---- Rings -----------------------------------------------------------------------------------------------------------


def rejects(group: str, ring: int, drafts: int, start: int) -> bool:
    """Whether all logits of committed tokens, computed one by one, stay exact when all of ``drafts`` tokens are
    rejected at ``start``, with ``group`` in rings of ``ring`` rows.
    """
    plan = planner(msgspec.structs.replace(BASE, layers=("csa", "hca"), ring_windows=True, max_step=12))
    with ring_sizes(lambda item: ring if item.group == group else None):
        return reject(plan, sequence(plan.decoder.sizes, 1, 34), start, drafts) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("group", "ring", "most"),
    [("csa_tail", 8, 1), ("csa_tail", 16, 9), ("hca_tail", 8, 1), ("hca_tail", 16, 9), ("window", 5, 1)],
)
def test_rollback_inside_a_ring(group: str, ring: int, most: int) -> None:
    """In the worst phase a ring of R rows allows R less the rows that a position needs: CSA 8: 1, 16: 9; window: 1."""
    starts = range(16 + (BASE.hca_ratio if group == "hca_tail" else BASE.csa_ratio) - 1, 15, -1)  # worst phase first
    assert all(rejects(group, ring, most, start) for start in starts)
    assert not all(rejects(group, ring, most + 1, start) for start in starts)


# ---- Ties and rounding -----------------------------------------------------------------------------------------------


def test_equal_scores_occur_at_the_border_of_the_selection() -> None:
    """The tie rule is exercised: some query sees equal scores inside and outside of its choice."""
    ties = []
    choose = topk_select

    def counting(logits: torch.Tensor, visible: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        result = choose(logits, visible, chosen)
        for scores, seen, taken in zip(logits, visible.tolist(), result.tolist(), strict=True):
            inside = {float(scores[i]) for i in taken if i >= 0}
            outside = {float(scores[i]) for i in range(seen) if i not in taken}
            ties.append(bool(inside & outside))
        return result

    plan = Planner(decoder.Decoder(BASE))
    with mock.patch.object(decoder_attention, "topk_select", counting):
        truth(plan, sequence(BASE, 1, LENGTH))
    assert 0 < sum(ties) < len(ties)


@pytest.mark.parametrize("top_k", [3, 64])
def test_wrong_index_keys_show_only_beyond_top_k(top_k: int) -> None:
    """A wrong key gives no NaN, only another selection; while all visible entries are chosen, nothing at all."""
    sizes = msgspec.structs.replace(BASE, top_k=top_k)
    plan, text = planner(sizes), sequence(sizes, 1, LENGTH)
    store = MemoryStore(plan.decoder, 400)
    serve(Session(plan, store, text[:22]), Request(0, 22), truth(plan, text))
    session = Session(plan, store, text, Want(alignment=1))
    for item in plan.decoder.stored:
        if item.group == "csa_index":
            keys = session.state.rows(item.layer, item.group).arena[:5]  # the five that are cached at 22
            keys.copy_(keys.roll(1, 0))
    logits = serve(session, Request(0, LENGTH), truth(plan, text))
    assert logits.isfinite().all()
    assert (difference(session, logits, truth(plan, text)) == 0.0) == (top_k == 64)


def test_a_rebuild_re_encodes_stored_keys_exactly() -> None:
    """Keys of epoch 0, re-encoded, are bit for bit those that a decoder of epoch 1 makes."""
    old, new = planner(BASE), Planner(decoder.Decoder(BASE, encoding=IndexEncoding(1)))
    text = sequence(BASE, 1, LENGTH)
    for item in old.decoder.stored:
        if item.group == "csa_index":
            rows = torch.arange(LENGTH // item.ratio)
            keys = old.decoder.state(keep_all=True).rows(item.layer, item.group)
            copy_object(truth(old, text).state.rows(item.layer, item.group), 0, keys, 0, len(rows))
            made = row_bytes(truth(new, text).state.rows(item.layer, item.group), rows.tolist())
            assert not torch.equal(row_bytes(keys, rows.tolist()), made)
            decoder_attention.reencode(keys, rows, IndexEncoding(0), IndexEncoding(1))
            assert torch.equal(row_bytes(keys, rows.tolist()), made)


@pytest.mark.parametrize("replayed", [1, 8])
def test_a_bounded_start_is_labelled_and_differs(replayed: int) -> None:
    """What a truncated window gives is finite, is not what a run from scratch gives, and claims no exact position."""
    plan, text = planner(BASE), sequence(BASE, 1, LENGTH)
    store = MemoryStore(plan.decoder, 400)
    serve(Session(plan, store, text[:40]), Request(0, 40), truth(plan, text))
    session = Session(plan, store, text, Want(mode="bounded", replay=replayed))
    logits = serve(session, Request(0, LENGTH), truth(plan, text))
    assert (session.exact_from, session.grade) == (None, "bounded")
    assert logits.isfinite().all()
    assert (logits - truth(plan, text).logits[session.hit.r :]).abs().max() > 1e-3
    assert {key.grade for _, _, key in store.objects()} == {"exact", "bounded"}
    exact = Session(plan, store, text, Want(alignment=1))
    assert (exact.hit.grade, exact.hit.r) == ("exact", 40)


@pytest.mark.parametrize("fixed_order", [True, False])
def test_chunkings_differ_by_rounding_unless_the_order_is_fixed(fixed_order: bool) -> None:
    sizes = msgspec.structs.replace(BASE, fixed_order=fixed_order)
    plan, text = planner(sizes), sequence(sizes, 1, LENGTH)
    state = plan.decoder.state()
    one_by_one = torch.cat([plan.decoder.forward([token], at, 0, state) for at, token in enumerate(text)])
    difference = (one_by_one - truth(plan, text).logits).abs().max().item()
    assert difference == 0.0 if fixed_order else 0.0 < difference < 1e-12


def test_rows_of_rejected_drafts_are_exact_for_the_drafts() -> None:
    """In a store that copies, drafts that were published under their own tokens are sound: the rule that nothing past
    the committed position is published protects other keys, and blocks that are written again (see the witnesses).
    """

    class Eager(Session):
        """Publishes what is computed, whether or not it will be accepted."""

        def _publishable(self) -> int:
            return self.pending

    plan, text = planner(BASE), sequence(BASE, 1, LENGTH)
    store = MemoryStore(plan.decoder, 500)
    session = Eager(plan, store, text[:20])
    while session.position < 20:
        session.prefill(5)
    drafts = [wrong(token, BASE.vocab) for token in text[20:28]]
    session.compute(drafts)
    session.commit(0)
    known = truth(plan, (*text[:20], *drafts, *text[28:]))
    again = Session(plan, store, known.tokens, Want(alignment=1))
    assert again.hit.r == 28
    assert difference(again, serve(again, Request(0, LENGTH), known), known) == 0.0
