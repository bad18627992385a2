"""What recovery.toml demands is what the decoder needs, found by brute force: no row less, no row more.

Every cached row of a run from scratch is there; one row at a time is poisoned, and a resumed run past the next folds
says whether it was needed.  Poison is NaN: a row that is read shows, however small its weight.
"""

from collections.abc import Mapping

import msgspec
import pytest
import torch
from decoder_histories import planner, sequence, truth

from hybridkv_ref.decoder_geometry import Sizes, Stored
from hybridkv_ref.decoder_reuse import Planner
from hybridkv_ref.decoder_state import POISON, PrivateState

# As many entries as may be chosen: an index key whose entry would not be chosen is not needed by that query.
ALL = Sizes(top_k=64)
OTHER = Sizes(
    top_k=64, layers=("hca", "recurrent", "csa", "window"), window=4, csa_ratio=2, hca_ratio=6, csa_block=2, hca_block=6
)
Place = tuple[int, str]


def ends(item: Stored, row: int) -> int:
    """Position after the last token of a row."""
    return (row + 1) * item.ratio


def cached(plan: Planner, s: int, frontier: int) -> dict[Place, set[int]]:
    """Every row that could be cached: of entries those up to the frontier, of the others those before the start."""
    limit = {item: frontier if item.shape == "entries" else s for item in plan.decoder.stored}
    return {(i.layer, i.group): {row for row in range(top) if ends(i, row) <= top} for i, top in limit.items()}


def demanded(plan: Planner, s: int, frontier: int) -> dict[Place, set[int]]:
    """The rows that recovery.toml asks for."""
    rows = {}
    for item in plan.decoder.stored:
        low, high, _ = plan.groups[item.group].need(s, frontier)
        rows[item.layer, item.group] = set(range(low // item.ratio, max(high, low) // item.ratio))
    return rows


def state_with(plan: Planner, text: tuple[int, ...], there: Mapping[Place, set[int]]) -> PrivateState:
    """The state of the run from scratch with these rows and no others."""
    source, state = truth(plan, text).state, plan.decoder.state(keep_all=True)
    for (layer, group), listed in there.items():
        old, new = source.rows(layer, group), state.rows(layer, group)
        slots = old.slots(torch.tensor(sorted(listed), dtype=torch.int64))
        for region in old.page.regions():
            at = slots // old.page.entries, slots % old.page.entries
            strides = (old.arena.stride(0), region.entry_step, 1)
            shape = (len(old.arena), old.page.entries, region.count)
            views = [r.arena.as_strided(shape, strides, r.arena.storage_offset() + region.base) for r in (old, new)]
            views[1][at] = views[0][at]
    return state


def differs(plan: Planner, text: tuple[int, ...], s: int, frontier: int, state: PrivateState) -> bool:
    """Whether a run from ``s`` to the end of ``text`` gives any other bit than the run from scratch."""
    known, at = truth(plan, text), s
    while at < len(text):
        tokens = text[at : at + (2 if at < s + 4 else 8)]
        if not torch.equal(plan.decoder.forward(tokens, at, frontier, state), known.logits[at : at + len(tokens)]):
            return True
        at += len(tokens)
    return False


def check(sizes: Sizes, s: int, frontier: int) -> None:
    plan = planner(sizes)
    period = max(sizes.hca_ratio, 2 * sizes.csa_ratio)
    text = sequence(sizes, 3, (frontier // period + 2) * period + 2)
    everything, needed = cached(plan, s, frontier), demanded(plan, s, frontier)
    assert not differs(plan, text, s, frontier, state_with(plan, text, needed)), "what is demanded is not enough"
    for place, rows in everything.items():
        assert needed[place] <= rows
        found = {
            row
            for row in needed[place]
            if differs(plan, text, s, frontier, state_with(plan, text, everything | {place: rows - {row}}))
        }
        # none of the others is needed, since the run with the demanded rows alone was right
        assert found == needed[place], (place, s, frontier)


@pytest.mark.parametrize("r", range(16, 24))
def test_rows_needed_at_a_plain_hit(r: int) -> None:
    check(ALL, r, r)


@pytest.mark.parametrize(
    ("s", "frontier"), [(0, 5), (1, 1), (3, 3), (5, 8), (9, 12), (11, 17), (13, 16), (14, 15), (15, 23)]
)
def test_rows_needed_with_two_positions(s: int, frontier: int) -> None:
    check(ALL, s, frontier)


@pytest.mark.parametrize("r", [6, 11, 12])
def test_rows_needed_in_another_model(r: int) -> None:
    check(OTHER, r, r)


@pytest.mark.deep
@pytest.mark.parametrize("s", range(26))
@pytest.mark.parametrize("sizes", [ALL, OTHER], ids=["all", "other"])
def test_rows_needed_at_every_pair(sizes: Sizes, s: int) -> None:
    for frontier in range(s, s + 10):
        check(sizes, s, frontier)


@pytest.mark.deep
@pytest.mark.parametrize("r", [255, 256, 259])
def test_rows_needed_in_real_ratios(r: int) -> None:
    check(msgspec.structs.replace(ALL, layers=("csa", "hca"), hca_ratio=128, hca_block=128, reach=520, window=24), r, r)


# ---- Halves of a halo row --------------------------------------------------------------------------------------------


def poison_half(state: PrivateState, layer: int, group: str, row: int, half: int) -> None:
    """Poisons one branch (0: previous, 1: current) of a tail row, in kv and in score."""
    rows = state.rows(layer, group)
    slot = int(rows.slots(torch.tensor([row])))
    block, index = divmod(slot, rows.page.entries)
    for place in rows.page.places.values():
        start = place.base + index * place.entry_step + half * place.nbytes // 2
        rows.arena[block, start : start + place.nbytes // 2] = POISON


@pytest.mark.parametrize("r", range(16, 20))
def test_of_a_halo_row_only_the_previous_branch_is_read(r: int) -> None:
    """FACTS section 1: half the bytes of a halo row would do; of the rows after the boundary both halves are needed."""
    plan = planner(ALL)
    text = sequence(ALL, 3, 34)
    everything = cached(plan, r, r)
    boundary = r // ALL.csa_ratio * ALL.csa_ratio
    overlapping = [
        item for item in plan.decoder.stored if item.shape == "ring" and plan.descriptors[item.layer, item.group].halo
    ]
    assert {item.group for item in overlapping} == {"csa_tail", "csa_index_tail"}
    for item in overlapping:
        for row in demanded(plan, r, r)[item.layer, item.group]:
            halves = []
            for half in (0, 1):
                state = state_with(plan, text, everything)
                poison_half(state, item.layer, item.group, row, half)
                halves.append(differs(plan, text, r, r, state))
            assert halves == [True, row >= boundary], row
