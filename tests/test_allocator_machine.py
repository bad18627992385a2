"""Any history of requests, evictions, spills and loads: memory, files and records equal the table state throughout."""

import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from allocator_tools import check, check_bytes, content, filler, make, prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from hybridkv_ref.allocator import HeterogeneousAllocator, HitLease, NotAdmitted, Request
from hybridkv_ref.allocator.lockstep import UNIT
from hybridkv_ref.compile_py import attribute
from hybridkv_ref.errors import InputError
from hybridkv_ref.machine import Refused

PICKS = st.lists(st.integers(0, 59), min_size=40, max_size=40)
"""Every choice of a rule, drawn at once: what the other threads have done by then must not change what is drawn."""

FAMILIES = ("AAAA", "AAAB", "AABB", "ABBB", "BBBB", "BA")


class Running:
    """One request of the history, and what it knows."""

    def __init__(self, request: Request, tokens: Any, lease: HitLease) -> None:
        self.request, self.tokens, self.lease = request, tokens, lease
        self.looking = lease.tokens > 0
        self.reading = False
        self.late: list[Any] = []


class Histories(RuleBasedStateMachine):
    """Shared prefixes in any order; abort at any point; finish during transfers; disk faults; caps that press."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="hybridkv-"))
        self.running: list[Running] = []
        self.late: list[Any] = []
        self.allocator: HeterogeneousAllocator

    @initialize(device=st.sampled_from((4_000, 9_000)), disk=st.sampled_from((1_500, 100_000)))
    def begin(self, device: int, disk: int) -> None:
        self.allocator = make(self.folder, shadow=True, device_bytes=device, store_bytes=disk, io_slots=1)
        self.after()

    def after(self) -> None:
        check(self.allocator)

    @rule(family=st.sampled_from(FAMILIES), length=st.integers(1, 4 * UNIT + 3))
    def start(self, family: str, length: int) -> None:
        tokens = prompt(family, length)
        try:
            hit = self.allocator.match(tokens)
        except NotAdmitted as refused:
            self.refused_by_a_cap(f"{refused.rule} of a CAP")
        else:
            self.running.append(Running(hit.request, tokens, self.allocator.pin(hit)))
        self.after()

    @rule(
        family=st.sampled_from(FAMILIES), length=st.integers(UNIT, 4 * UNIT + 3), steps=st.integers(2, 9), picks=PICKS
    )
    def serve(self, family: str, length: int, steps: int, picks: list[int]) -> None:
        """A request that gets some way, most often to its end."""
        before = len(self.running)
        self.start(family, length)
        if len(self.running) == before:
            return
        one = self.running[-1]
        for _ in range(steps):
            if one.request.position < length:
                self.advance(one, picks)
        if one.request.position >= length and picks.pop() % 4:
            self.running.remove(one)
            self.late += one.late
            self.allocator.finish(one.request)
        self.after()

    @staticmethod
    def refused_by_a_cap(text: str) -> None:
        assert "CAP" in text

    @rule(picks=PICKS)
    def go_on(self, picks: list[int]) -> None:
        """Validate, read or compute, whatever comes next."""
        if self.running:
            self.advance(self.running[picks.pop() % len(self.running)], picks)

    def advance(self, one: Running, picks: list[int]) -> None:
        if one.looking:
            if self.allocator.validate(one.lease)[-1].accepted:
                self.allocator.read(one.lease)
                check_bytes(self.allocator, one.lease, one.tokens)
                one.looking, one.reading = False, True
            else:
                one.lease = self.allocator.retry(one.lease)
                one.looking = one.lease.tokens > 0
        elif one.reading and picks.pop() % 4 == 0:
            with contextlib.suppress(Refused):  # the pipeline is full
                one.late += self.allocator.dispatch(one.lease)
        else:
            at = one.request.position
            upto = min(at // UNIT * UNIT + UNIT, len(one.tokens) + 3)
            whole = (len(one.tokens) - at) // UNIT if at % UNIT == 0 and not one.request.writing else 0
            if whole and picks.pop() % 2:
                # Whole units at once, and their bytes after them.
                for segment in self.allocator.writer.extend_together(one.request, 1 + picks.pop() % whole):
                    rows = content(one.tokens, segment.group, *segment.token_range)
                    self.allocator.book.write_rows(segment, 0, rows)
            elif at < upto:
                try:
                    to = upto if picks.pop() % 4 else at + 1 + picks.pop() % (upto - at)
                    self.allocator.extend(one.request, to, filler(one.tokens))
                except Refused as refused:
                    self.refused_by_a_cap(refused.guard.text)
        if one.reading:
            check_bytes(self.allocator, one.lease, one.tokens)
        self.after()

    @rule(picks=PICKS)
    def end(self, picks: list[int]) -> None:
        """Finish or abort, at whatever point the request is."""
        if not self.running:
            return
        one = self.running.pop(picks.pop() % len(self.running))
        self.late += one.late
        if one.request.stage in ("READING", "RECOMPUTE") and picks.pop() % 2:
            self.allocator.finish(one.request)
        else:
            self.allocator.abort(one.request)
        self.after()

    @rule()
    def complete(self) -> None:
        """Steps of requests that are gone complete late."""
        self.allocator.complete(self.late)
        self.late = []
        self.after()

    @rule(picks=PICKS, what=st.sampled_from(("evict", "evict", "deallocate", "spill")))
    def press(self, picks: list[int], what: str) -> None:
        """One segment goes, or is copied to disk."""
        segments = self.allocator.segments()
        if not segments:
            return
        segment = segments[picks.pop() % len(segments)]
        entity = segment.entity
        if what == "evict":
            self.allocator.evictor.evict(segment)
        elif what == "spill":
            self.allocator.spill(segment).result()
        else:
            quiet = segment.stage in self.allocator.ledger.sets(segment.kind, "QUIET")
            held = segment.ref_count or entity.holds or entity.steps or entity.incoming
            try:
                self.allocator.deallocate(segment)
            except Refused:
                assert held or not quiet
            else:
                assert not segment.ref_count
        self.after()

    @rule(family=st.sampled_from(FAMILIES), length=st.integers(UNIT, 4 * UNIT), wait=st.booleans(), empty=st.booleans())
    def prefetch(self, family: str, length: int, wait: bool, empty: bool) -> None:
        """Durable copies come back, after everything that nobody holds was evicted, or beside it."""
        if empty:
            self.allocator.evictor.empty()
        loads = self.allocator.prefetch(prompt(family, length))
        if wait:
            for load in loads:
                load.result()
        self.after()

    @rule(picks=PICKS, what=st.sampled_from(("flip", "cut", "gone", "cap", "cap", "new_model", "timer", "timer")))
    def outside(self, picks: list[int], what: str) -> None:
        """What comes from outside: faults of the disk, a load that takes too long, another cap, other weights."""
        if what == "cap":
            share = 1 + picks.pop() % 3
            with contextlib.suppress(InputError):  # too little for what is held
                self.allocator.limit(max(1_500, self.allocator.first_bytes * share // 3))
        elif what == "new_model":
            if picks.pop() % 5 == 0:
                self.allocator.system(what)
        elif what == "timer":
            for stored in list(self.allocator.tiers.loads):
                self.allocator.tiers.timer(stored)
        else:
            files = sorted(self.folder.glob("*.safetensors"))
            if files:
                self.rot(files[picks.pop() % len(files)], what)
                return
        self.after()

    def rot(self, path: Path, fault: str) -> None:
        """A file changes, is cut or is deleted behind the allocator's back; the tables have a row for it."""
        if fault == "gone":
            path.unlink(missing_ok=True)
        else:
            with contextlib.suppress(FileNotFoundError):
                spoil(path, fault)
        for stored in list(self.allocator.tiers.objects):
            if stored.name == path.stem and self.allocator.tiers.can(stored.entity, "rot"):
                self.allocator.tiers.fire(stored.entity, "rot")

    def teardown(self) -> None:
        if not hasattr(self, "allocator"):
            return
        allocator = self.allocator
        allocator.complete(self.late)
        for one in self.running:
            allocator.complete(one.late)
        allocator.drain()
        check(allocator)
        pool = allocator.ledger.pool
        for name in ("gpu_used", "gpu_reserved", "io_used", "cpu_used", "replays", "waiting_ticket"):
            assert getattr(pool, name) == 0
        assert all(getattr(pool, attribute(f"{kind}.used")) == 0 for kind in allocator.caps)
        assert allocator.segments() == []
        allocator.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def spoil(path: Path, fault: str) -> None:
    """One byte of the payload changes, or the last ones are missing."""
    data = bytearray(path.read_bytes())
    if fault == "flip":
        data[-1] ^= 0x10
    path.write_bytes(data if fault == "flip" else data[:-5])


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=10, stateful_step_count=20, deadline=None)


@pytest.mark.deep
def test_long_histories() -> None:
    run_state_machine_as_test(Histories, settings=settings(max_examples=400, stateful_step_count=60, deadline=None))
