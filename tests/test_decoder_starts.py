"""Starts without stored windows, measured: how late one may be, and from where on its rows may be published."""

import msgspec
import pytest
import torch
from decoder_histories import Request, difference, planner, sequence, serve, truth
from test_decoder_needs import state_with

from hybridkv_ref.decoder_geometry import LayerType, Sizes
from hybridkv_ref.decoder_reuse import Planner, Want
from hybridkv_ref.decoder_session import Session
from hybridkv_ref.decoder_state import row_bytes
from hybridkv_ref.decoder_store import MemoryStore
from hybridkv_ref.exact_start import exact_start, replay
from hybridkv_ref.recovery import Contents

BASE = Sizes()
LENGTH = 44


ORDERS: tuple[tuple[LayerType, ...], ...] = (
    ("window", "window", "csa", "hca"),
    ("hca", "csa", "window"),
    ("csa", "window", "hca", "csa"),
)


def without_windows(
    plan: Planner, text: tuple[int, ...], s: int, position: int, frontier: int, snapshots: tuple[int, ...] = ()
) -> bool:
    """Whether computing from ``s`` over cached entries and snapshots alone gives exact logits from ``position`` on."""
    contents = {"gated_delta": Contents(ends=frozenset(snapshots))}
    there = {
        (item.layer, item.group): set(range(frontier // item.ratio))
        if item.shape == "entries"
        else {end - 1 for end in snapshots}
        for item in plan.decoder.stored
        if item.shape in ("entries", "state")
    }
    state = state_with(plan, text, there)
    for layer, begins in enumerate(replay(plan.stack, s, contents).begins):
        state.begin_at(layer, begins)
    step, known = plan.decoder.sizes.max_step, truth(plan, text).logits
    runs = [
        plan.decoder.forward(text[at : min(at + step, len(text))], at, frontier, state)
        for at in range(s, len(text), step)
    ]
    return torch.equal(torch.cat(runs)[position - s :], known[position:])


@pytest.mark.parametrize("layers", ORDERS, ids="-".join)
def test_the_exact_start_is_the_latest(layers: tuple[LayerType, ...]) -> None:
    """Exact at s*, inexact one token later: the formula of exact_start, measured, also with P > F."""
    plan = planner(msgspec.structs.replace(BASE, layers=layers, window=4))
    for frontier in (24, 26):
        for position in (frontier, frontier + 5):
            text = sequence(BASE, 5, frontier + 20)
            s = exact_start(plan.stack, position, frontier, {})
            assert 0 < s < frontier
            assert without_windows(plan, text, s, position, frontier)
            assert not without_windows(plan, text, s + 1, position, frontier)


RECURRENT: tuple[tuple[LayerType, ...], ...] = (
    ("window", "csa", "recurrent", "hca"),
    ("csa", "recurrent", "window"),
    ("recurrent", "csa", "recurrent", "window"),
)


@pytest.mark.parametrize("layers", RECURRENT, ids="-".join)
def test_the_exact_start_with_snapshots_is_the_latest(layers: tuple[LayerType, ...]) -> None:
    """A recurrent layer takes a snapshot at or before what the layers above need; no later start is exact."""
    plan, snapshots = planner(msgspec.structs.replace(BASE, layers=layers, window=4)), (10, 15, 19, 22)
    text, contents = sequence(BASE, 5, 42), {"gated_delta": Contents(ends=frozenset(snapshots))}
    for position in (24, 27):
        s = exact_start(plan.stack, position, 24, contents)
        assert 0 < s < 24
        exact = [at for at in range(s, 25) if without_windows(plan, text, at, position, 24, snapshots)]
        assert exact == [s]


@pytest.mark.parametrize("layers", ORDERS, ids="-".join)
def test_a_replay_makes_rows_exactly_as_far_as_it_says(layers: tuple[LayerType, ...]) -> None:
    """Layer l's window rows (l = 1..L) are exact from s + (l-1)(W-1) on, and not one token before."""
    sizes = msgspec.structs.replace(BASE, layers=layers)
    plan, text = planner(sizes), sequence(sizes, 5, LENGTH)
    s = exact_start(plan.stack, 32, 32, {})
    entries = [item for item in plan.decoder.stored if item.shape == "entries"]
    state = state_with(plan, text, {(i.layer, i.group): set(range(32 // i.ratio)) for i in entries})
    for layer in range(len(layers)):
        state.begin_at(layer, s)
    for at in range(s, LENGTH, sizes.max_step):
        plan.decoder.forward(text[at : at + sizes.max_step], at, 32, state)
    measured = []
    for layer in range(len(layers)):
        made, known = state.rows(layer, "window"), truth(plan, text).state.rows(layer, "window")
        same = [torch.equal(row_bytes(made, [row]), row_bytes(known, [row])) for row in range(s, LENGTH)]
        measured.append(s + len(same) - same[::-1].index(False) if False in same else s)
    assert tuple(measured) == replay(plan.stack, s, {}).rows_from
    assert measured == [s + layer * (sizes.window - 1) for layer in range(len(layers))]


@pytest.mark.parametrize("apart", [8, 9, 10])
def test_two_layers_take_up_two_snapshots(apart: int) -> None:
    """The upper layer's input is exact later, so it takes a later snapshot; 9 apart both have one place in a ring."""
    plan = planner(msgspec.structs.replace(BASE, layers=("recurrent", "window", "recurrent")))
    text, store = sequence(BASE, 1, 60), MemoryStore(plan.decoder, 400)
    serve(Session(plan, store, text[:50], keep_every=apart), Request(0, 50), truth(plan, text))
    session = Session(plan, store, text, Want(mode="zero-exact", alignment=1))
    lower, _, upper = session.match.replay.begins
    assert upper - lower == apart
    assert len([read for read in session.hit.reads if read.group == "gated_delta"]) == 2
    assert difference(session, serve(session, Request(0, 60), truth(plan, text)), truth(plan, text)) == 0.0


def test_a_replay_of_one_fold_stands_in_for_the_halo() -> None:
    """No CSA tail is stored: a hit at B reads window rows before B - m and computes m tokens again."""
    plan, text = planner(BASE), sequence(BASE, 1, LENGTH)
    store = MemoryStore(plan.decoder, 400, {"csa_tail": 0, "csa_index_tail": 0})
    fill = Request(0, 34, (8,))
    serve(Session(plan, store, text[:34]), fill, truth(plan, text))
    assert Session(plan, store, text, Want(alignment=8)).hit.r == 0
    session = Session(plan, store, text, Want(alignment=8, replay=BASE.csa_ratio))
    assert (session.hit.r, session.hit.frontier) == (28, 32)
    assert [(r.lo, r.hi) for r in session.hit.reads if r.group == "window"] == [(28 - (BASE.window - 1), 28)]
    assert difference(session, serve(session, Request(0, LENGTH), truth(plan, text)), truth(plan, text)) == 0.0
