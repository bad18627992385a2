"""Threads stepped at row boundaries: a reader never sees bytes of another life, and without the pin it does.

Each thread is a real one; before every row, and where a reader touches bytes, it waits until the schedule lets it on.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from allocator_tools import TABLES, content, make, prompt, run
from hypothesis import given, settings
from hypothesis import strategies as st
from test_allocator_rules import without

from hybridkv_ref.allocator import HeterogeneousAllocator, HitLease, NotAdmitted
from hybridkv_ref.allocator.lockstep import UNIT
from hybridkv_ref.allocator.refinement import differences
from hybridkv_ref.allocator.segment_bytes import move_rows
from hybridkv_ref.errors import InputError
from hybridkv_ref.machine import Refused
from hybridkv_ref.tables import Tables


class Torn(Exception):
    """A reader saw bytes that its lease does not stand for."""


class Schedule:
    """An observer that lets one thread on at a time, from one row to the next."""

    def __init__(self, choices: Sequence[int]) -> None:
        self.choices = list(choices)
        self.turns: dict[int, threading.Event] = {}
        self.parked = threading.Semaphore(0)
        self.faults: list[BaseException] = []
        self.steps = self.touches = 0

    def limits(self, constants: Any) -> None:
        """Never."""

    def after(self, event_id: str, lane: int, entities: Any, inputs: Any) -> None:
        """Nothing."""

    def before(self, event_id: str) -> None:
        turn = self.turns.get(threading.get_ident())
        if turn is not None:
            self.parked.release()
            turn.wait()
            turn.clear()

    def run(self, programs: Sequence[Callable[[], None]]) -> None:
        """Runs programs to their ends, in the order that the choices say."""
        alive: list[tuple[threading.Thread, threading.Event]] = []

        def body(program: Callable[[], None], turn: threading.Event) -> None:
            self.turns[threading.get_ident()] = turn
            self.before("start")
            try:
                program()
            except BaseException as fault:
                self.faults.append(fault)
            del self.turns[threading.get_ident()]
            self.parked.release()

        for program in programs:
            turn = threading.Event()
            thread = threading.Thread(target=body, args=(program, turn), daemon=True)
            thread.start()
            assert self.parked.acquire(timeout=30)
            alive.append((thread, turn))
        while alive:
            at = (self.choices.pop() if self.choices else self.steps) % len(alive)
            thread, turn = alive[at]
            self.steps += 1
            turn.set()
            assert self.parked.acquire(timeout=30), "a thread neither parks nor ends"
            if not self.turns.values() or turn not in self.turns.values():
                thread.join(30)
                alive.pop(at)


def touch(allocator: HeterogeneousAllocator, lease: HitLease, tokens: Any) -> None:
    """Reads every byte of a hit through its descriptors."""
    for lease_of, pointer in zip(lease.request.hits, lease.state_data_ptrs, strict=True):
        segment = lease_of.segment
        arena = allocator.book.arena(segment.group)
        slots = (pointer.base - arena.base + pointer.offset) // segment.group.page.stride
        expected = content(tokens, segment.group, *segment.token_range)
        found = torch.empty_like(expected)
        move_rows(arena, slots, 0, found, store=False)
        if not torch.equal(found, expected):
            raise Torn(repr(segment))


def reader(allocator: HeterogeneousAllocator, schedule: Schedule, family: str, times: int) -> Callable[[], None]:
    def program() -> None:
        tokens = prompt(family, len(family) * UNIT + 1)
        for _ in range(times):
            lease = allocator.pin(allocator.match(tokens))
            while lease.tokens and not allocator.validate(lease)[-1].accepted:
                lease = allocator.retry(lease)
            if lease.tokens:
                allocator.read(lease)
                for _ in range(8):
                    schedule.touches += 1
                    touch(allocator, lease, tokens)
                    schedule.before("touch")
            try:
                run(allocator, lease.request, tokens)
            except Refused:
                allocator.abort(lease.request)
            else:
                schedule.before("touch")
                if lease.tokens:
                    touch(allocator, lease, tokens)
                allocator.finish(lease.request)

    return program


def evictor(allocator: HeterogeneousAllocator, schedule: Schedule, targets: Sequence[int]) -> Callable[[], None]:
    """Evicts one segment, or lets a turn pass, for each target."""

    def program() -> None:
        for target in targets:
            segments = allocator.segments()
            if target > 40 or not segments:
                schedule.before("wait")
            else:
                allocator.evictor.evict(segments[target % len(segments)])

    return program


def play(
    choices: Sequence[int], targets: Sequence[int], tables: Tables, families: Sequence[str]
) -> tuple[Schedule, HeterogeneousAllocator]:
    """Two readers that also write, on memory for not much more than one, and an evictor that is let on now and then."""
    schedule = Schedule([len(families) if choice == 0 else choice % len(families) for choice in choices])
    allocator = make(tables=tables, observer=schedule, device_bytes=4_000)
    tokens = prompt(families[0], len(families[0]) * UNIT + 1)
    request = allocator.match(tokens).request
    run(allocator, request, tokens)
    allocator.finish(request)
    programs = [reader(allocator, schedule, family, 2) for family in families]
    schedule.run([*programs, evictor(allocator, schedule, targets)])
    return schedule, allocator


CHOICES = st.lists(st.integers(0, 6), max_size=500)
TARGETS = st.lists(st.integers(0, 200), max_size=60)


@given(choices=CHOICES, targets=TARGETS, other=st.sampled_from(("AB", "AA", "BB")))
@settings(max_examples=40)
def test_no_schedule_shows_a_reader_the_bytes_of_another_life(
    choices: list[int], targets: list[int], other: str
) -> None:
    schedule, allocator = play(choices, targets, TABLES, ("AA", other))
    assert schedule.faults == []
    assert targets or schedule.touches
    assert differences(allocator) == []
    allocator.drain()
    assert allocator.ledger.pool.gpu_used == 0
    allocator.close()


@pytest.mark.deep
@given(choices=CHOICES, targets=TARGETS, other=st.sampled_from(("AB", "AA", "BB", "BC")))
@settings(max_examples=2_000)
def test_no_schedule_shows_a_reader_the_bytes_of_another_life_at_length(
    choices: list[int], targets: list[int], other: str
) -> None:
    schedule, allocator = play(choices, targets, TABLES, ("AA", other))
    assert schedule.faults == []
    allocator.close()


def caught(tables: Tables, tries: int = 60) -> BaseException | None:
    """What the first schedule that goes wrong shows."""
    for seed in range(tries):
        drawn = random.Random(seed)
        choices = [drawn.randrange(7) for _ in range(500)]
        schedule, allocator = play(choices, [drawn.randrange(200) for _ in range(60)], tables, ("AA", "BB"))
        allocator.close()
        wrong = [f for f in schedule.faults if isinstance(f, Torn)]
        if wrong:
            return wrong[0]
    return None


def test_without_the_pin_a_schedule_shows_torn_bytes() -> None:
    """The evictor does not look at the pins: the variant that must fail."""
    assert isinstance(caught(without("free", "pins == 0")), Torn)


def test_without_the_generation_a_schedule_reads_another_prefix() -> None:
    """Pinned, but not compared with what the match found."""
    allocator = make(tables=without("pass_l1", "lease.seen == generation"))
    tokens = prompt("A", UNIT + 1)
    request = allocator.match(tokens).request
    run(allocator, request, tokens)
    allocator.finish(request)
    hit = allocator.match(prompt("AX", UNIT + 2))
    allocator.evictor.empty()
    other = prompt("B", UNIT + 1)
    request = allocator.match(other).request
    run(allocator, request, other)
    lease = allocator.pin(hit)
    assert allocator.validate(lease)[-1].accepted
    with pytest.raises(Torn):
        touch(allocator, lease, tokens)
    allocator.close()


def nothing() -> None:
    """What is to happen when nothing is."""


class Between:
    """An observer that lets something happen once, just before a row of this name."""

    def __init__(self, row: str) -> None:
        self.row = row
        self.action: Callable[[], None] = nothing

    def limits(self, constants: Any) -> None:
        """Never."""

    def after(self, event_id: str, lane: int, entities: Any, inputs: Any) -> None:
        """Nothing."""

    def before(self, event_id: str) -> None:
        if event_id.endswith(self.row):
            action, self.action = self.action, nothing
            action()


@pytest.mark.parametrize("row", [".find", ".match", ".pin", ".check", ".pass_l1"])
def test_a_record_that_is_used_again_under_a_request_is_never_read_as_the_old_one(row: str) -> None:
    """Between any two rows the matched segments are evicted and written again with another prefix."""
    between = Between(row)
    allocator = make(observer=between)
    tokens, other = prompt("A", UNIT + 1), prompt("B", UNIT + 1)

    def serve(prompted: Any) -> None:
        request = allocator.match(prompted).request
        run(allocator, request, prompted)
        allocator.finish(request)

    def take_over() -> None:
        allocator.evictor.empty()
        serve(other)

    serve(tokens)
    between.action = take_over
    lease = allocator.pin(allocator.match(prompt("AX", UNIT + 2)))
    while lease.tokens and not allocator.validate(lease)[-1].accepted:
        lease = allocator.retry(lease)
    if lease.tokens:
        allocator.read(lease)
        touch(allocator, lease, tokens)
    assert (lease.tokens > 0) == (row in (".check", ".pass_l1"))  # pinned by then: nobody can take it over
    allocator.abort(lease.request)
    allocator.drain()
    assert allocator.ledger.pool.gpu_used == 0
    allocator.close()


def test_errors_of_a_program_are_not_lost() -> None:
    def fails() -> None:
        raise InputError("x:y: z")

    schedule = Schedule([])
    schedule.run([fails])
    assert [type(fault) for fault in schedule.faults] == [InputError]
    assert not isinstance(schedule.faults[0], NotAdmitted)
