"""Requests: their records in every lane, their end, and their end at any time.

An abort names no row.  The tables mark as fair the rows that always end a request, its leases and its copies; those
that are enabled are fired until the request is at rest, in the order in which the tables list them, waiting for copies
that run.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.ledger import Lane
from hybridkv_ref.allocator.records import Lease, Request
from hybridkv_ref.compile_py import attribute
from hybridkv_ref.errors import InputError


class Requests:
    """The requests of one allocator."""

    def __init__(self, book: Book, ahead: dict[str, int]) -> None:
        self.book, self.ledger, self.ahead = book, book.ledger, ahead
        ledger = self.ledger
        self.make = [ledger.maker(lane, "request") for lane in ledger.lanes]
        self.spare: list[tuple[Any, ...]] = []
        self.running: dict[int, Request] = {}
        self.count = 0
        # What a device or a tier ends, it ends itself; an abort waits for it.
        fair = [e for e in ledger.tables.events if e.fair and e.actor in ("request", "allocator")]
        self.ends = [e for e in fair if e.scope == "request" and not e.inputs]
        self.lease_ends: dict[tuple[str, str], list[str]] = {}  # rows by kind and stage of the lease
        for event in fair:
            if event.scope == "lease" and not event.inputs:
                for stage in event.edges.get("lease", (ledger.tables.stages["lease"], ""))[0]:
                    self.lease_ends.setdefault((event.kinds["self"], stage), []).append(event.row)
        self.idle, self.no_lease = (ledger.tables.stages[name][0] for name in ("request", "lease"))

    def new(self, length: int, keys: list[bytes], need_until: int, serves: bool, abi: Sequence[int]) -> Request:
        """A request's records, at rest; what is rigid while it runs is set now."""
        with self.ledger.lock:
            self.count += 1
            records = self.spare.pop() if self.spare else tuple(make() for make in self.make)
            for lane, record in zip(self.ledger.lanes, records, strict=True):
                self.describe(lane, record, length, need_until, serves, abi)
            request = Request(self.count, length, keys, records)
            self.running[request.number] = request
            return request

    def describe(self, lane: Lane, record: Any, length: int, need_until: int, serves: bool, abi: Sequence[int]) -> None:
        """Sets the rigid variables of one lane's record."""
        record.length, record.need_until, record.kernel, record.id = length, need_until, serves, self.count
        for group in self.book.geometry.groups:
            if self.ledger.lane_of[group.name] is lane:
                given = {
                    "uses": True,
                    "group": group.cache,
                    "abi": abi[group.index],
                    "ahead": self.ahead.get(group.name, 0),
                }
                for name, value in given.items():
                    setattr(record, attribute(f"{name}.{group.kind}"), value)

    def finish(self, request: Request) -> None:
        """The answer is complete: what it read is released, what it wrote stays cached.

        InputError for a request that has ended: its records may be another one's by now.
        """
        with request.ending:
            if self.running.get(request.number) is not request:
                raise InputError(f"finish:request: request {request.number} has ended")
            self.ledger.step(request.records, "finish")
            self.drain(request)

    def drain(self, request: Request) -> None:
        """Fires the fair rows of a request and of its leases until it is at rest; nothing for one that has ended.

        Of two threads that end one request the second waits for the first.
        """
        with request.ending:
            if self.running.get(request.number) is not request:
                return
            while request.stage != self.idle:
                moved = self.step(request)
                if request.stage != self.idle and not moved:
                    with self.ledger.changed:  # a copy that reads or writes one of its segments is still running
                        self.ledger.changed.wait(0.05)
            with self.ledger.lock:
                del self.running[request.number]
                self.spare.append(request.records)

    def step(self, request: Request) -> bool:
        """One round of fair rows; whether any fired."""
        moved = False
        for leases in (request.found, request.hits, request.writing, request.kept):
            for _, some in groupby(list(leases), key=lambda lease: (lease.segment.group.index, lease.stage)):
                moved = self.step_leases(leases, list(some)) or moved
        for event in self.ends:
            if self.ledger.can_step(request.records, event.row):
                self.ledger.step(request.records, event.row)
                return True
        return moved

    def step_leases(self, held: list[Lease], leases: list[Lease]) -> bool:
        """Fair rows of some leases of one group that are in one stage, in the order of the tables; whether any fired.

        What is let go of is taken from ``held``.
        """
        moved = False
        while leases:
            stage, kind = leases[0].stage, leases[0].segment.kind
            for row in self.lease_ends.get((kind, stage), ()):
                self.book.fire_each([lease for lease in leases if lease.stage == stage], row, True)
            leases = [lease for lease in leases if lease.stage != stage]
            moved = moved or bool(leases)
            for lease in [lease for lease in leases if lease.stage == self.no_lease]:
                leases.remove(lease)
                held.remove(lease)
                self.book.close_lease(lease)
        return moved
