"""The writer's side: allocate, append, commit, and one grid unit of every group at once.

Memory is asked for by firing the row that admits a segment. Where a cap refuses it, the evictor makes room and the row
is fired again; any other refusal goes to the caller. A request that runs displaces whatever nobody holds, in the
policy's order: a request that fits an empty pool is never refused because of what is merely cached.
"""

from collections.abc import Callable

from torch import Tensor

from hybridkv_ref.allocator.admission import keeps_from, snapshots
from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.eviction import Evictor
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.records import FOREVER, CacheSegment, Lease, Request
from hybridkv_ref.errors import InputError

Fill = Callable[[CacheSegment, int, int], Tensor | None]
"""(segment, first token, one past the last) -> uint8 [layers, rows, bytes of one entry]; None stores nothing."""


class Writer:
    """Rows that write, for one allocator."""

    def __init__(self, book: Book, evictor: Evictor) -> None:
        self.book, self.ledger, self.evictor = book, book.ledger, evictor
        # Groups whose segments a request may leave behind: those that do not keep all from the start on.
        self.passes = [g.exact or keeps_from(g, FOREVER - FOREVER % g.unit) > 0 for g in book.geometry.groups]

    def mark(self, group: GroupGeometry, request: Request, hi: int) -> int:
        """What the kind's ``mark`` is for a segment written up to ``hi``: a boundary, a version, or nothing."""
        if group.group.shape == "ring":
            return group.boundary(hi)
        if "rebuilds" in self.ledger.tables.kinds[group.kind].capabilities:
            version: int = request.records[self.ledger.lane_of[group.name].index].version
            return version
        return 0

    def allocate(
        self,
        token_range: tuple[int, int],
        group: GroupGeometry,
        request: Request,
        until: int = FOREVER,
        key: bytes | None = None,
        ring: int = 0,
    ) -> CacheSegment:
        """Memory for [lo, hi) of one group, to be written by ``request``; Refused with the guard and its values.

        ``ring``: memory for so many rows instead, which the segment's range moves through.
        """
        lo, hi = token_range
        if not 0 <= lo < hi:
            raise InputError(f"allocate:token_range: expected 0 <= start < end, got {token_range}")
        segment = self.book.new_segment(group)
        lease = self.book.new_lease(segment, request)
        entities = self.book.entities_of(lease)
        about = {"at": lo, "meta": self.mark(group, request, hi), "until": until, "known": min(hi, request.accepted)}
        try:
            self.evictor.grant(segment, (0, ring) if ring else token_range, "admit", entities, **about)
        except BaseException:
            with self.ledger.lock:
                self.book.spare[group.index].append(segment)
                self.book.close_lease(lease)
            raise
        segment.key, segment.ring = key, ring
        self.book.tick(segment)
        request.writing.append(lease)
        return segment

    def append(self, segment: CacheSegment, request: Request, count: int, rows: Tensor | None = None) -> None:
        """``count`` tokens more, with the rows that they add (uint8 [layers, rows, bytes of one entry])."""
        lease = self.lease_of(segment, request)
        start, end = segment.token_range
        group = segment.group
        with self.ledger.atomic(self.ledger.event_id(segment.kind, "append")):
            if rows is not None and self.book.lease_allows(lease, "append", at=end, n=count):
                first = 0 if group.whole else group.rows(start, end)
                expected = group.rows(start, end + count) - first
                capacity = (0 if segment.slots is None else segment.slots.shape[1]) * group.page.entries
                if rows.shape[:2] != (group.layers, expected) or first + expected > capacity:
                    wanted = f"[{group.layers}, {expected}, bytes] within {capacity} rows"
                    raise InputError(f"append:rows: expected {wanted}, got {list(rows.shape)}")
                self.book.write_rows(segment, first, rows)
            self.book.fire_lease(lease, "append", at=end, n=count)

    def commit(self, segment: CacheSegment, request: Request) -> None:
        """The segment is complete and can be found; its writer keeps it as a reader."""
        lease = self.lease_of(segment, request)
        self.book.fire_lease(lease, "commit")
        request.writing.remove(lease)
        request.kept.append(lease)
        if self.passes[segment.group.index]:
            request.passing.append(lease)
        request.wrote.append((segment, segment.generation))

    def give_up(self, segment: CacheSegment, request: Request) -> None:
        """What is half written is freed."""
        lease = self.lease_of(segment, request)
        self.book.fire_lease(lease, "cancel")
        self.book.fire_lease(lease, "abort")
        request.writing.remove(lease)
        self.book.close_lease(lease)

    def let_go(self, lease: Lease) -> None:
        """The writer needs a segment no more; it stays cached."""
        self.book.fire_lease(lease, "let_go")
        lease.request.kept.remove(lease)
        if lease in lease.request.passing:
            lease.request.passing.remove(lease)
        self.book.close_lease(lease)

    def lease_of(self, segment: CacheSegment, request: Request) -> Lease:
        """The request's lease as the writer of a segment; InputError if it has none."""
        for lease in request.writing:
            if lease.segment is segment:
                return lease
        raise InputError(f"request {request.number}: does not write {segment!r}")

    def extend(self, request: Request, upto: int, fill: Fill | None = None) -> list[CacheSegment]:
        """Computes on to ``upto``, at most to the end of the grid unit: every group is written, or none.

        At the end of the unit its segments are committed, and what later positions do not need is let go of.  Gives the
        segments that were written.  Refused, with nothing left behind, if memory cannot be had.
        """
        unit = self.book.geometry.unit
        begin = request.position
        first = begin // unit * unit
        if not begin < upto <= first + unit:
            raise InputError(f"extend:upto: expected more than {begin} and at most {first + unit}, got {upto}")
        if upto > request.accepted:
            self.ledger.step(request.records, "confirm", lambda lane: {"to": upto})
        whole = upto == first + unit
        key = request.keys[first // unit] if first // unit < len(request.keys) else None
        written = {lease.segment.group.index: lease.segment for lease in request.writing}
        made: list[CacheSegment] = []
        try:
            for group in self.book.geometry.groups:
                if group.index in written or (group.exact and not (whole and self.snapshot(group, request, upto))):
                    continue
                span = group.extent(upto) if group.exact else (first, first + unit)
                if group.rows(*span):
                    made.append(self.allocate(span, group, request, key=key))
        except BaseException:
            for segment in made:
                self.give_up(segment, request)
            raise
        written |= {segment.group.index: segment for segment in made}
        for segment in written.values():
            end, hi = segment.token_range[1], segment.group.extent(upto)[1]
            if hi > end:
                self.append(segment, request, hi - end, None if fill is None else fill(segment, end, hi))
        request.position = upto
        if whole:
            for segment in written.values():
                self.accept(segment, request)
                self.commit(segment, request)
            self.let_go_before(request, upto)
        return list(written.values())

    @staticmethod
    def snapshot(group: GroupGeometry, request: Request, upto: int) -> bool:
        """Whether a group that resumes at exact positions is written at this one."""
        return group.every or upto in snapshots(group, max(request.length, upto), upto - 1)

    def accept(self, segment: CacheSegment, request: Request) -> None:
        """The tokens of a segment are no drafts any more."""
        lease, end = self.lease_of(segment, request), segment.token_range[1]
        drafts = self.ledger.has(segment.kind, "accept_tokens")
        if drafts and self.book.lease_allows(lease, "accept_tokens", to=end):
            self.book.fire_lease(lease, "accept_tokens", to=end)

    def let_go_before(self, request: Request, position: int) -> None:
        """Lets go of what computing on from a grid position does not need; it stays cached."""
        for lease in list(request.passing):
            group, hi = lease.segment.group, lease.segment.entity.end
            if (group.exact and hi < position) or hi <= keeps_from(group, position):
                self.let_go(lease)
