"""The writer's side: allocate, append, commit, and one grid unit of every group at once.

Memory is asked for by firing the row that admits a segment. Where a cap refuses it, the evictor makes room and the row
is fired again; any other refusal goes to the caller. A request that runs displaces whatever nobody holds, in the
policy's order: a request that fits an empty pool is never refused because of what is merely cached.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import sub

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
        self.writes, self.no_lease = self.ledger.sets("lease", "WRITES"), self.ledger.tables.stages["lease"][0]
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
        self.commit_each([self.lease_of(segment, request)], request)

    def commit_each(self, leases: Sequence[Lease], request: Request) -> None:
        """As ``commit`` for several segments of one group."""
        try:
            self.book.fire_each(leases, "commit")
        finally:
            done = [lease for lease in leases if lease.stage not in self.writes]
            request.writing = _without(request.writing, done)
            request.kept += done
            request.passing += [lease for lease in done if self.passes[lease.segment.group.index]]
            request.wrote += [(lease.segment, lease.segment.generation) for lease in done]

    def give_up(self, segment: CacheSegment, request: Request) -> None:
        """What is half written is freed."""
        lease = self.lease_of(segment, request)
        self.book.fire_lease(lease, "cancel")
        self.book.fire_lease(lease, "abort")
        request.writing.remove(lease)
        self.book.close_lease(lease)

    def give_up_all(self, request: Request) -> None:
        """As ``give_up``, for all that the request writes."""
        for lease in list(request.writing):
            self.give_up(lease.segment, request)

    def let_go_each(self, request: Request, leases: Sequence[Lease]) -> None:
        """The writer needs these segments of a group no more; they stay cached."""
        try:
            self.book.fire_each(leases, "let_go")
        finally:
            done = [lease for lease in leases if lease.stage == self.no_lease]
            request.kept = _without(request.kept, done)
            request.passing = _without(request.passing, done)
            for lease in done:
                self.book.close_lease(lease)

    def lease_of(self, segment: CacheSegment, request: Request) -> Lease:
        """The request's lease as the writer of a segment; InputError if it has none."""
        for lease in request.writing:
            if lease.segment is segment:
                return lease
        raise InputError(f"request {request.number}: does not write {segment!r}")

    def extend(self, request: Request, upto: int, fill: Fill | None = None) -> list[CacheSegment]:
        """Computes on to ``upto``, grid unit by grid unit: every group of a unit is written, or none.

        At the end of a unit its segments are committed, and what later positions do not need is let go of.  Gives the
        segments that were written.  Refused if memory cannot be had for the next unit, of which nothing is left behind;
        the request's position says how far it came.
        """
        unit, written = self.book.geometry.unit, list[CacheSegment]()
        if not request.position < upto:
            raise InputError(f"extend:upto: expected more than {request.position}, got {upto}")
        if upto > request.accepted:
            self.ledger.step(request.records, "confirm", lambda lane: {"to": upto})
        while (begin := request.position) < upto:
            whole = (upto - begin) // unit if begin % unit == 0 and fill is None and not request.writing else 0
            made = self.extend_together(request, whole) if whole > 1 else []
            written += made or self.extend_unit(request, min(begin - begin % unit + unit, upto), fill)
        return written

    def extend_unit(self, request: Request, upto: int, fill: Fill | None) -> list[CacheSegment]:
        """As ``extend``, within one unit."""
        unit = self.book.geometry.unit
        cut = request.position // unit * unit + unit
        key = self.key_of(request, cut)
        written = {lease.segment.group.index: lease.segment for lease in request.writing}
        made: list[CacheSegment] = []
        try:
            for group in self.book.geometry.groups:
                if group.index not in written and not (group.exact and upto < cut):
                    spans = self.spans(group, request, (cut,)).values()
                    made += [self.allocate(span, group, request, key=key) for span in spans]
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
        if upto == cut:
            for segment in written.values():
                self.accept([self.lease_of(segment, request)])
                self.commit(segment, request)
            self.let_go_before(request, upto)
        return list(written.values())

    def extend_together(self, request: Request, count: int) -> list[CacheSegment]:
        """``count`` whole units at once, each row for all segments of a group; none where that asks for evictions.

        Then nothing has changed.  More is held meanwhile than unit by unit, so nobody else fires a row in between.
        """
        unit, begin = self.book.geometry.unit, request.position
        cuts = range(begin + unit, begin + (count + 1) * unit, unit)
        groups = self.book.geometry.groups
        with self.ledger.atomic(self.ledger.event_id(groups[0].kind, "admit")):
            made: list[tuple[list[Lease], list[int]]] = []
            try:
                for group in groups:
                    spans = self.spans(group, request, cuts)
                    leases = self.allocate_each(group, request, spans)
                    if len(leases) < len(spans):
                        break
                    if leases:
                        made.append((leases, [group.extent(cut)[1] for cut in spans]))
                else:
                    return self.write_each(request, made, cuts[-1])
            except BaseException:
                self.give_up_all(request)
                raise
            self.give_up_all(request)
            return []

    def write_each(
        self, request: Request, made: Sequence[tuple[list[Lease], list[int]]], upto: int
    ) -> list[CacheSegment]:
        """Appends and commits what was allocated together: leases of one group, and where each is written up to."""
        for leases, ends in made:
            starts = [lease.segment.entity.end for lease in leases]
            self.book.fire_each(leases, "append", at=starts, n=map(sub, ends, starts))
        for leases, _ in made:
            self.accept(leases)
            self.commit_each(leases, request)
        request.position = upto
        self.let_go_before(request, upto)
        return [lease.segment for leases, _ in made for lease in leases]

    def allocate_each(
        self, group: GroupGeometry, request: Request, spans: Mapping[int, tuple[int, int]]
    ) -> list[Lease]:
        """Memory for the token ranges of a group's segments by grid position; none where they do not fit together."""
        if not spans:
            return []
        leases = [self.book.new_lease(self.book.new_segment(group), request) for _ in spans]
        ranges = list(spans.values())
        about = {
            "at": [lo for lo, _ in ranges],
            "meta": [self.mark(group, request, hi) for _, hi in ranges],
            "until": [FOREVER] * len(ranges),
            "known": [min(hi, request.accepted) for _, hi in ranges],
        }
        try:
            granted = self.book.grant_each(leases, ranges, "admit", **about)
        finally:
            for lease, cut in zip(leases, spans, strict=True):
                if lease.segment.slots is None:
                    self.book.spare[group.index].append(lease.segment)
                    self.book.close_lease(lease)
                else:
                    lease.segment.key = self.key_of(request, cut)
                    self.book.tick(lease.segment)
                    request.writing.append(lease)
        return leases if granted else []

    def spans(self, group: GroupGeometry, request: Request, cuts: Sequence[int]) -> dict[int, tuple[int, int]]:
        """The token ranges of the segments that a group gets for the units that end at these grid positions."""
        if not group.exact:
            return {cut: (cut - group.unit, cut) for cut in cuts}
        found = {cut: group.extent(cut) for cut in cuts if self.snapshot(group, request, cut)}
        return {cut: span for cut, span in found.items() if group.rows(*span)}

    def key_of(self, request: Request, cut: int) -> bytes | None:
        """The prefix key of the unit that ends at a grid position; None beyond what the request's tokens name."""
        at = cut // self.book.geometry.unit - 1
        return request.keys[at] if at < len(request.keys) else None

    @staticmethod
    def snapshot(group: GroupGeometry, request: Request, upto: int) -> bool:
        """Whether a group that resumes at exact positions is written at this one."""
        return group.every or upto in snapshots(group, max(request.length, upto), upto - 1)

    def accept(self, leases: Sequence[Lease]) -> None:
        """The tokens that were written in segments of one group are no drafts any more."""
        if leases and self.ledger.has(leases[0].segment.kind, "accept_tokens"):
            self.book.fire_each(leases, "accept_tokens", True, to=[lease.segment.entity.end for lease in leases])

    def let_go_before(self, request: Request, position: int) -> None:
        """Lets go of what computing on from a grid position does not need; it stays cached."""
        for group in self.book.geometry.groups:
            low = keeps_from(group, position)
            if group.exact:
                low = max(low, position - 1)
            passed = [
                lease for lease in request.passing if lease.segment.group is group and lease.segment.entity.end <= low
            ]
            self.let_go_each(request, passed)


def _without(leases: Sequence[Lease], gone: Iterable[Lease]) -> list[Lease]:
    left = set(gone)
    return [lease for lease in leases if lease not in left]
