"""The reader's side: match, pin, validate in four layers, read, release.

The match names candidates and records their generations, pinning holds them, validation asks the tables layer by layer,
the read presents the descriptors.  Between any two rows another thread may evict or write; a candidate that is gone by
then is refused by its row, and the request goes on with a shorter hit or none.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.eviction import Evictor
from hybridkv_ref.allocator.records import CacheSegment, Hit, HitLease, Lease, Request, StatePointer, Verdict
from hybridkv_ref.errors import InputError
from hybridkv_ref.fast_hit import Finder
from hybridkv_ref.machine import Refused
from hybridkv_ref.recovery import Hit as RecoveryHit

Candidate = tuple[CacheSegment, bytes | None]
"""A segment and the key under which the index named it."""


class Found(NamedTuple):
    """What a look finds: the plan, the candidates that it names, the tokens of the prompt that the index knows."""

    plan: RecoveryHit
    segments: list[Candidate]
    matched: int


LAYERS = ("L1", "L2", "L3", "L4")


class Hits:
    """Rows that look for, hold and read what is cached, for one allocator."""

    def __init__(self, book: Book, evictor: Evictor, finder: Finder, replay: int) -> None:
        self.book, self.ledger, self.evictor = book, book.ledger, evictor
        self.finder, self.replay = finder, replay

    # -- match ---------------------------------------------------------------------------------------------------------
    def look(self, request: Request, below: int | None = None) -> Found:
        """The longest hit of what is readable now, ending before ``below``, and the candidates that it names."""
        geometry, index = self.book.geometry, self.book.index
        with self.ledger.lock:
            path = index.path(request.keys)
            contents = index.contents(path)
            matched = len(path) * geometry.unit
            most = min(matched, request.length - 1) if below is None else min(matched, below - 1)
            plan = self.finder.longest_hit(contents, most, request.length, geometry.unit, self.replay, matched)
            return Found(plan, self.named(plan, path) if plan.frontier else [], matched)

    def named(self, plan: RecoveryHit, path: Sequence[Any]) -> list[Candidate]:
        """The segments that a plan reads and the keys under which they were found, by group and position."""
        found = []
        for read in plan.reads:
            group = self.book.geometry.group(read.group)
            for at in group.places(read.lo, read.hi):
                segment = path[at].segments[group.index]
                if segment is None:
                    raise LookupError(f"{group.name}: the plan reads grid unit {at}, which the index lacks")
                found.append((segment, segment.key))
        return found

    def match(self, request: Request, admit: Callable[[RecoveryHit], None]) -> Hit:
        """Names the candidates of the longest hit and records their generations; ``admit`` may refuse the request."""
        plan, segments, matched = self.look(request)
        admit(plan)
        if not plan.frontier:
            self.ledger.step(request.records, "start_cold")
            return Hit(request, plan, matched)
        at = self.positions(plan.r, plan.frontier)
        self.ledger.step(request.records, "match", lambda lane: {**at(lane), "matched": matched})
        self.find(request, segments)
        return Hit(request, plan, matched)

    def positions(self, start: int, frontier: int) -> Callable[[Any], dict[str, int]]:
        """The inputs of a row that sets a request's two positions, by lane."""

        def inputs(lane: Any) -> dict[str, int]:
            return {"s": start, "f": frontier, "bound": frontier - frontier % lane.constants["RATIO"]}

        return inputs

    def find(self, request: Request, candidates: Sequence[Candidate]) -> None:
        """Records the generations of the candidates; one that is gone is left out, and a later layer notices.

        A record may have been used again for another prefix since the index named it: its key is compared in the same
        atomic step in which its generation is recorded.
        """
        for segment, key in candidates:
            lease = self.book.new_lease(segment, request)
            try:
                with self.ledger.atomic(self.ledger.event_id(segment.kind, "find")):
                    if segment.key == key:
                        self.book.fire_lease(lease, "find")
                        request.found.append(lease)
                        continue
            except Refused:
                pass
            self.book.close_lease(lease)

    # -- pin -----------------------------------------------------------------------------------------------------------
    def pin(self, hit: Hit) -> HitLease:
        """Holds every candidate; where one cannot be held, the request goes on with a shorter hit, or none."""
        lease = HitLease(hit.request, hit.plan, hit.matched)
        while hit.request.found or lease.plan.frontier:
            refused = self.pin_all(hit.request)
            if refused is None:
                break
            lease.refusals.append(str(refused))
            if not self.shorten(lease):
                break
        lease.pointers = tuple(self.book.pointer(one) for one in hit.request.hits)
        hit.request.position = lease.plan.frontier
        return lease

    def pin_all(self, request: Request) -> Refused | None:
        """Pins the candidates in order; the first refusal, with the rest dropped."""
        refused = None
        for lease in list(request.found):
            request.found.remove(lease)
            if refused is None:
                try:
                    self.book.fire_lease(lease, "pin")
                except Refused as error:
                    refused = error
                else:
                    request.hits.append(lease)
                    self.evictor.touch(lease.segment)
                    continue
            self.book.fire_lease(lease, "drop")
            self.book.close_lease(lease)
        return refused

    def shorten(self, lease: HitLease) -> bool:
        """Lets the hit go and names the candidates of a shorter one; False if the request recomputes everything."""
        request = lease.request
        self.ledger.step(request.records, "shorten")
        self.let_go(request)
        plan, segments, matched = self.look(request, below=lease.plan.frontier)
        lease.plan, lease.matched, lease.verdicts, lease.pointers = plan, matched, (), ()
        if not plan.frontier:
            self.ledger.step(request.records, "give_up")
            return False
        self.ledger.step(request.records, "retry", self.positions(plan.r, plan.frontier))
        self.find(request, segments)
        return True

    def retry(self, lease: HitLease) -> HitLease:
        """After a refusal: the longest shorter hit, pinned; or none, and the request computes everything."""
        if not self.shorten(lease):
            lease.request.position = 0
            return lease
        shorter = self.pin(Hit(lease.request, lease.plan, lease.matched))
        shorter.refusals[:0] = lease.refusals
        return shorter

    # -- validate ------------------------------------------------------------------------------------------------------
    def validate(self, lease: HitLease) -> tuple[Verdict, ...]:
        """The four layers in order; the first that refuses is named, later ones are not asked."""
        request = lease.request
        steps: Mapping[str, Callable[[], None]] = {
            "L1": lambda: self.each(request, "pass_l1"),
            "L2": lambda: self.each(request, "pass_l2"),
            "L3": lambda: self.ledger.step(request.records, "join"),
            "L4": lambda: self.each(request, "pass_l4"),
        }
        self.ledger.step(request.records, "check")
        verdicts: list[Verdict] = []
        for layer in LAYERS:
            if verdicts and not verdicts[-1].accepted:
                verdicts.append(Verdict(layer, False, asked=False))
                continue
            try:
                steps[layer]()
            except Refused as refused:
                verdicts.append(self.verdict(layer, request, refused))
            else:
                verdicts.append(Verdict(layer, True))
        if verdicts[-1].accepted:
            self.ledger.step(request.records, "validate")
        lease.verdicts = tuple(verdicts)
        return lease.verdicts

    def each(self, request: Request, row: str) -> None:
        """A row of every lease of a hit."""
        for lease in request.hits:
            self.book.fire_lease(lease, row)

    def verdict(self, layer: str, request: Request, refused: Refused) -> Verdict:
        """A refusal, with the segment that it was about: the first lease that did not get on."""
        behind = [one.stage for one in request.hits]
        at = next((i for i, stage in enumerate(behind) if stage != behind[0]), 0)
        segment = repr(request.hits[at].segment) if request.hits and layer != "L3" else f"request {request.number}"
        return Verdict(
            layer,
            False,
            event=refused.event.id,
            guard=refused.guard.text,
            values=refused.values,
            rules=refused.event.rules,
            segment=segment,
        )

    # -- read and release ----------------------------------------------------------------------------------------------
    def read(self, lease: HitLease, pointers: Sequence[StatePointer] | None) -> Sequence[StatePointer]:
        """Presents the descriptors; from here on the bytes are read.  InputError for descriptors of another life."""
        request = lease.request
        presented = lease.pointers if pointers is None else pointers
        current = [self.book.pointer(one) for one in request.hits]
        if [_identity(p) for p in presented] != [_identity(p) for p in current]:
            raise InputError(
                f"read:state_data_ptrs: request {request.number} presents descriptors that are not its own"
            )
        self.each(request, "read")
        self.ledger.step(request.records, "start_hit")
        return presented

    def dispatch(self, lease: HitLease) -> list[Lease]:
        """A step that reads a hit is handed to the device, on every segment of it that a step attends, or on none."""
        attended = [one for one in lease.request.hits if self.ledger.has(one.segment.kind, "dispatch")]
        self.book.dispatch(attended)
        return attended

    def release(self, lease: HitLease) -> None:
        """Lets a hit go that is not being read, and computes everything; what is read is released when it finishes."""
        request = lease.request
        self.ledger.step(request.records, "recompute")
        self.let_go(request)
        lease.pointers, lease.plan = (), _nothing(lease.plan)
        request.position = 0

    def let_go(self, request: Request) -> None:
        """Drops candidates and releases what is held."""
        for lease in list(request.found):
            self.book.fire_lease(lease, "drop")
            request.found.remove(lease)
            self.book.close_lease(lease)
        for lease in list(request.hits):
            self.book.fire_lease(lease, "release")
            request.hits.remove(lease)
            self.book.close_lease(lease)


def _identity(pointer: StatePointer) -> tuple[str, int, bytes, int, int]:
    return pointer.group, pointer.base, pointer.offset.tobytes(), pointer.bytes, pointer.generation


def _nothing(plan: RecoveryHit) -> RecoveryHit:
    return RecoveryHit(0, 0, "exact", (), plan.limiting, plan.recompute + plan.r)
