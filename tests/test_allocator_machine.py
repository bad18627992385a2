"""Any history of requests, evictions, spills and loads: memory, files and records equal the table state at each step."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from allocator_tools import TABLES, UNIT, check, check_bytes, filler, make, prompt
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from hybridkv_ref.allocator import HeterogeneousAllocator, HitLease, NotAdmitted, Request
from hybridkv_ref.compile_py import attribute
from hybridkv_ref.machine import Refused

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

    @initialize(device=st.sampled_from((2_500, 4_000, 20_000)), disk=st.sampled_from((1_000, 6_000, 100_000)))
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
            assert refused.rule == "HKV-S1-011"
        else:
            self.running.append(Running(hit.request, tokens, self.allocator.pin(hit)))
        self.after()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """Validate, read or compute, whatever comes next."""
        one = data.draw(st.sampled_from(self.running))
        if one.looking:
            if self.allocator.validate(one.lease)[-1].accepted:
                self.allocator.read(one.lease)
                check_bytes(self.allocator, one.lease, one.tokens)
                one.looking, one.reading = False, True
            else:
                one.lease = self.allocator.retry(one.lease)
                one.looking = one.lease.tokens > 0
        elif one.reading and data.draw(st.integers(0, 3)) == 0:
            try:
                one.late += self.allocator.dispatch(one.lease)
            except Refused:
                pass
        else:
            at = one.request.position
            upto = min(at // UNIT * UNIT + UNIT, len(one.tokens) + 3)
            if at < upto:
                try:
                    self.allocator.extend(one.request, data.draw(st.integers(at + 1, upto)), filler(one.tokens))
                except Refused as refused:
                    assert "CAP" in refused.guard.text
        if one.reading:
            check_bytes(self.allocator, one.lease, one.tokens)
        self.after()

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        """Finish or abort, at whatever point the request is."""
        one = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        self.late += one.late
        if one.request.stage in ("READING", "RECOMPUTE") and data.draw(st.booleans()):
            self.allocator.finish(one.request)
        else:
            self.allocator.abort(one.request)
        self.after()

    @precondition(lambda self: self.late)
    @rule()
    def complete(self) -> None:
        """Steps of requests that are gone complete late."""
        self.allocator.complete(self.late)
        self.late = []
        self.after()

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        segments = self.allocator.segments()
        if segments:
            self.allocator.evictor.evict(data.draw(st.sampled_from(segments)))
        self.after()

    @rule(data=st.data())
    def deallocate(self, data: st.DataObject) -> None:
        segments = self.allocator.segments()
        if segments:
            segment = data.draw(st.sampled_from(segments))
            held = segment.ref_count
            try:
                self.allocator.deallocate(segment)
            except Refused:
                assert held or segment.entity.holds or segment.entity.steps or segment.entity.incoming or not (
                    segment.stage in self.allocator.ledger.sets(segment.kind, "QUIET")
                )
        self.after()

    @rule(data=st.data())
    def spill(self, data: st.DataObject) -> None:
        segments = self.allocator.segments()
        if segments:
            self.allocator.spill(data.draw(st.sampled_from(segments))).result()
        self.after()

    @rule(family=st.sampled_from(FAMILIES), length=st.integers(UNIT, 4 * UNIT), wait=st.booleans())
    def prefetch(self, family: str, length: int, wait: bool) -> None:
        loads = self.allocator.prefetch(prompt(family, length))
        if wait:
            for load in loads:
                load.result()
        self.after()

    @rule(data=st.data(), fault=st.sampled_from(("flip", "cut", "gone")))
    def rot(self, data: st.DataObject, fault: str) -> None:
        """A file changes, is cut or is deleted behind the allocator's back."""
        files = sorted(self.folder.glob("*.safetensors"))
        if not files:
            return
        path = data.draw(st.sampled_from(files))
        if fault == "gone":
            path.unlink(missing_ok=True)
        else:
            self.allocator.pipelines.submit("cpu", spoil, path, fault).result()
        for stored in list(self.allocator.tiers.objects):
            if stored.name == path.stem and stored.entity.intact:
                # What the environment did, told to the tables as the row that stands for it.
                self.allocator.tiers.fire(stored.entity, "rot")

    @rule()
    def new_weights(self) -> None:
        self.allocator.system("new_model")
        self.after()

    @rule(share=st.sampled_from((1, 2, 3)))
    def other_cap(self, share: int) -> None:
        self.allocator.limit(max(1_500, self.allocator.first_bytes * share // 3))
        self.after()

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
TestHistories.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


@pytest.mark.deep
class TestLongHistories(Histories.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=400, stateful_step_count=60, deadline=None)


def test_the_tables_are_those_that_are_proved() -> None:
    assert TABLES.sha256
