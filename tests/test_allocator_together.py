"""A prefill of several grid units in one call: the rows of unit after unit, whatever room there is."""

from typing import Any

import pytest
from allocator_tools import GEOMETRY, check, cold, make, prompt

from hybridkv_ref.allocator import HeterogeneousAllocator, Request, demand
from hybridkv_ref.allocator.lockstep import UNIT
from hybridkv_ref.errors import InputError
from hybridkv_ref.machine import Refused

UNITS = 4
TOKENS = prompt("ABAB", UNITS * UNIT + 3)


class Counting:
    """An observer that counts the rows of each event."""

    def __init__(self) -> None:
        self.fired: dict[str, int] = {}

    def before(self, event_id: str) -> None:
        """Nothing."""

    def after(self, event_id: str, lane: int, entities: Any, inputs: Any) -> None:
        """One more."""
        self.fired[event_id] = self.fired.get(event_id, 0) + 1

    def limits(self, constants: Any) -> None:
        """Nothing."""


def computed(allocator: HeterogeneousAllocator, steps: list[int]) -> Request:
    """A request that computes the prompt in these steps."""
    request = allocator.match(TOKENS).request
    for upto in steps:
        allocator.extend(request, upto)
    return request


def shown(allocator: HeterogeneousAllocator) -> list[tuple[object, ...]]:
    """What is there, but for slots and the order of records."""
    return sorted((s.group.name, s.token_range, s.stage, s.ref_count, s.nbytes, s.key) for s in allocator.segments())


@pytest.mark.parametrize("end", [UNITS * UNIT, UNITS * UNIT + 3])
def test_several_units_at_once_fire_the_rows_of_unit_after_unit(end: int) -> None:
    found = []
    for steps in ([end], [*range(UNIT, UNITS * UNIT, UNIT), end], [UNIT, end], [3, end]):
        told = Counting()
        allocator = make(observer=told)
        request = computed(allocator, steps)
        check(allocator)
        assert request.position == end
        found.append((shown(allocator), told.fired if steps[0] != 3 else None, allocator.ledger.pool.gpu_used))
        allocator.finish(request)
        assert {s.ref_count for s in allocator.segments()} == {0}
        lease = allocator.pin(allocator.match(TOKENS))
        assert lease.tokens == UNITS * UNIT
        allocator.abort(lease.request)
        allocator.close()
    assert found[0] == found[1] == found[2]
    assert (found[3][0], found[3][2]) == (found[0][0], found[0][2])


def test_a_pool_that_is_full_makes_room_unit_by_unit() -> None:
    allocator = make(shadow=True, device_bytes=6_000)
    for name in "CDE":
        cold(allocator, prompt(name, 2 * UNIT))
    before = sum(allocator.evictor.evicted.values())
    request = allocator.match(TOKENS).request
    assert allocator.writer.extend_together(request, UNITS) == []
    assert (request.position, request.writing) == (0, [])
    check(allocator)
    allocator.extend(request, len(TOKENS))
    check(allocator)
    assert request.position == len(TOKENS)
    assert sum(allocator.evictor.evicted.values()) > before
    allocator.close()


def test_a_refusal_leaves_whole_units_and_says_how_far_it_came() -> None:
    enough = sum(demand(GEOMETRY, len(TOKENS)).values())
    allocator = make(shadow=True, device_bytes=enough)
    holder = allocator.match(prompt("C", 2 * UNIT)).request
    allocator.extend(holder, 2 * UNIT)
    request = allocator.match(TOKENS).request
    with pytest.raises(Refused) as refused:
        allocator.extend(request, len(TOKENS))
    assert allocator.ledger.pressure(refused.value)
    assert request.position % UNIT == 0
    assert 0 < request.position < len(TOKENS)
    assert request.writing == []
    check(allocator)
    allocator.finish(holder)
    allocator.extend(request, len(TOKENS))
    assert request.position == len(TOKENS)
    check(allocator)
    allocator.close()


def test_a_row_that_refuses_midway_gives_up_what_was_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second segment of a group is refused by its row, although the row says that all fit."""
    allocator = make(shadow=True)
    request = allocator.match(TOKENS).request
    spans = allocator.writer.spans

    def early(group: Any, one: Request, cuts: Any) -> dict[int, tuple[int, int]]:
        found = spans(group, one, cuts)
        return {cut: (-1, hi) if at == 1 else (lo, hi) for at, (cut, (lo, hi)) in enumerate(found.items())}

    monkeypatch.setattr(allocator.writer, "spans", early)
    with pytest.raises(Refused, match="at >= 0"):
        allocator.writer.extend_together(request, UNITS)
    assert (request.position, request.writing, allocator.segments()) == (0, [], [])
    assert allocator.ledger.pool.gpu_used == 0
    check(allocator)
    allocator.close()


def test_a_position_behind_is_an_error() -> None:
    allocator = make()
    request = computed(allocator, [UNIT])
    with pytest.raises(InputError, match=rf"extend:upto: expected more than {UNIT}, got {UNIT}"):
        allocator.extend(request, UNIT)
    allocator.close()
