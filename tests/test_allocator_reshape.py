"""Segments that are cut and joined without moving a byte, and clones, by the allocator's own model."""

import numpy as np
import pytest
import torch
from allocator_tools import check, cold, content, hit, make, prompt

from hybridkv_ref.allocator import CacheSegment, HeterogeneousAllocator
from hybridkv_ref.allocator.lockstep import UNIT
from hybridkv_ref.errors import InputError
from hybridkv_ref.machine import Refused

TOKENS = prompt("ab", 2 * UNIT)


def of(allocator: HeterogeneousAllocator, group: str, end: int) -> CacheSegment:
    """The cached segment of a group that ends there."""
    (found,) = (s for s in allocator.segments() if s.group.name == group and s.token_range[1] == end)
    return found


@pytest.mark.parametrize("group", ["window", "csa"])
def test_neighbours_are_joined_and_cut_again(group: str) -> None:
    """Each state holds the same bytes, and what is whole on the grid is found again."""
    with make(shadow=True) as allocator:
        request = cold(allocator, np.append(TOKENS, 1))
        first, second = of(allocator, group, UNIT), of(allocator, group, 2 * UNIT)
        key, charged = request.keys[0], allocator.ledger.pool.gpu_used
        allocator.reshape.join(first, second)
        assert first.token_range == (0, 2 * UNIT)
        assert second.slots is None
        assert torch.equal(allocator.rows(first), content(TOKENS, first.group, 0, 2 * UNIT))
        check(allocator)
        rest = allocator.reshape.split(first, UNIT, key)
        assert (first.token_range, rest.token_range) == ((0, UNIT), (UNIT, 2 * UNIT))
        assert allocator.ledger.pool.gpu_used == charged
        check(allocator)
        _, lease = hit(allocator, np.append(TOKENS, 1))
        assert lease.tokens == 2 * UNIT


def test_what_is_held_is_neither_cut_nor_joined_nor_moved() -> None:
    with make(shadow=True) as allocator:
        cold(allocator, np.append(TOKENS, 1))
        hit(allocator, np.append(TOKENS, 1))
        first, second = of(allocator, "window", UNIT), of(allocator, "window", 2 * UNIT)
        before = [segment.slots.tolist() for segment in (first, second) if segment.slots is not None]
        free = len(allocator.book.arena(first.group).free)
        for call in (
            lambda: allocator.reshape.join(first, second),
            lambda: allocator.reshape.split(second, UNIT + UNIT // 2),
            lambda: allocator.reshape.move(second),
        ):
            with pytest.raises(Refused, match="pins == 0"):
                call()
            check(allocator)
        assert [segment.slots.tolist() for segment in (first, second) if segment.slots is not None] == before
        assert len(allocator.book.arena(first.group).free) == free


def test_a_cut_lies_between_blocks() -> None:
    with make(shadow=True) as allocator:
        cold(allocator, np.append(TOKENS, 1))
        window = of(allocator, "window", UNIT)
        with pytest.raises(InputError, match="split:cut: 3 lies inside a block"):
            allocator.reshape.split(window, 3)
        with pytest.raises(Refused, match="cut < end"):
            allocator.reshape.split(window, UNIT)
        check(allocator)


@pytest.mark.parametrize("group", ["tail", "state"])
def test_a_clone_is_a_copy_of_its_own(group: str) -> None:
    """What is written on in it leaves the source as it was; a ring has the rows at other places."""
    with make(shadow=True) as allocator:
        cold(allocator, np.append(TOKENS, 1))
        source = of(allocator, group, 2 * UNIT)
        before = allocator.rows(source)
        request, _ = hit(allocator, np.append(TOKENS, 1))
        ring = 0 if source.group.whole else 8
        mine = allocator.handoffs.resume(source, request, ring)
        assert mine.token_range == source.token_range
        if not ring:
            assert torch.equal(allocator.rows(mine), before)
        allocator.append(mine, 1, request=request)
        allocator.book.write_rows(mine, 0, torch.zeros_like(before))
        assert torch.equal(allocator.rows(source), before)
        allocator.finish(request)
        check(allocator)
