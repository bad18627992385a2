"""The faults themselves: what stands in for a method of the reference allocator or of its engine."""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from conformance_planting import Mutant, swap, without

from hybridkv_ref.allocator import CacheSegment, writer
from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.hits import Found, Hits
from hybridkv_ref.allocator.index import PrefixIndex
from hybridkv_ref.allocator.media import HostMemory, MediumError
from hybridkv_ref.allocator.requests import Requests
from hybridkv_ref.allocator.tiers import Tiers
from hybridkv_ref.conformance.reference import ReferenceEngine
from hybridkv_ref.events import Allocate, Event, KeyPublish
from hybridkv_ref.recovery import Hit as RecoveryHit

Named = list[tuple[CacheSegment, bytes | None]]
"""What a hit names: segments and the keys under which they were found."""


# ---- hits ----------------------------------------------------------------------------------------------------------


def forgets_group(name: str) -> Mutant:
    def make(original: Callable[..., Named]) -> Callable[..., Named]:
        return lambda self, plan, path: [one for one in original(self, plan, path) if one[0].group.name != name]

    rules = {"window": "HKV-SWA-001", "csa": "HKV-CKV-001", "hca": "HKV-CKV-001", "index": "HKV-IDX-001"}
    rules |= {"tail": "HKV-TAIL-002", "state": "HKV-REC-001"}
    return Mutant(rules[name], swap(Hits, "named", make), lambda: without("join"))


def one_unit_before(name: str) -> Callable[[ExitStack], None]:
    """A hit takes a group's segment of the unit before the last."""

    def make(original: Callable[..., Named]) -> Callable[..., Named]:
        def named(self: Hits, plan: RecoveryHit, path: Sequence[Any]) -> Named:
            found = original(self, plan, path)
            unit = self.book.geometry.unit
            for at, (segment, _) in enumerate(found):
                other = path[plan.frontier // unit - 2].segments[segment.group.index] if plan.frontier > unit else None
                if segment.group.name == name and other is not None:
                    found[at] = (other, other.key)
            return found

        return named

    return swap(Hits, "named", make)


def first_group_decides(original: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Hits, request: Any, below: int | None = None) -> Found:
        path = self.book.index.path(request.keys)
        unit = self.book.geometry.unit
        full = next(g.index for g in self.book.geometry.groups if g.kind == "compressed_kv")
        there = len(list(itertools.takewhile(lambda node: node.segments[full] is not None, path)))
        frontier = min(there * unit, (request.length - 1) // unit * unit)
        plan = RecoveryHit(frontier, frontier, "exact", (), (), 0)
        found = []
        for group in self.book.geometry.groups:
            lo, hi, exact = group.recovery.need(frontier, frontier)
            for at in range(hi // unit - 1 if exact else lo // unit, -(-hi // unit)) if lo < hi else ():
                if (segment := path[at].segments[group.index]) is not None:
                    found.append((segment, segment.key))
        return Found(plan, found, len(path) * unit)

    return look


def changes_plan(change: Callable[[Hits, Any, RecoveryHit], RecoveryHit]) -> Callable[[ExitStack], None]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def look(self: Hits, request: Any, below: int | None = None) -> Found:
            plan, _, matched = original(self, request, below)
            plan = change(self, request, plan)
            path = self.book.index.path(request.keys)
            return Found(plan, self.named(plan, path) if plan.frontier else [], matched)

        return look

    return swap(Hits, "look", make)


def shorter(self: Hits, request: Any, plan: RecoveryHit) -> RecoveryHit:
    unit = self.book.geometry.unit
    path = self.book.index.path(request.keys)
    contents = self.book.index.contents(path)
    least = max(plan.frontier - unit, 0)
    return self.finder.longest_hit(contents, min(least, request.length - 1), request.length, unit, 0, len(path) * unit)


def no_limits(self: Hits, request: Any, plan: RecoveryHit) -> RecoveryHit:
    return dataclasses.replace(plan, limiting=())


def all_limits(self: Hits, request: Any, plan: RecoveryHit) -> RecoveryHit:
    return dataclasses.replace(plan, limiting=tuple(g.name for g in self.book.geometry.groups))


def forgets_match(original: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Hits, request: Any, below: int | None = None) -> Any:
        found = original(self, request, below)
        return found._replace(matched=found.plan.frontier)

    return look


def takes_whole_prompt(original: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Hits, request: Any, below: int | None = None) -> Any:
        request.length += 1
        try:
            return original(self, request, below)
        finally:
            request.length -= 1

    return look


def remembers_hits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hits are kept by prompt, and their segments used again, whatever they hold by now."""

    def look(self: Hits, request: Any, below: int | None = None) -> Any:
        known: dict[Any, Any] = self.__dict__.setdefault("known", {})
        found = original(self, request, below)
        if found[0].frontier:
            known.setdefault(tuple(request.keys), found)
        return known.get(tuple(request.keys), found) if not found[0].frontier else found

    return look


def lets_go_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hit is released when reading begins."""

    def read(self: Hits, lease: Any, pointers: Any) -> Any:
        found = original(self, lease, pointers)
        for one in list(lease.request.hits):
            self.book.fire_lease(one, "release")
            lease.request.hits.remove(one)
            self.book.close_lease(one)
        return found

    return read


def pins_too_late(original: Callable[..., Any]) -> Callable[..., Any]:
    """Memory is wanted between the match and the pin, and the match records nothing to notice it by."""

    def pin(self: Hits, hit: Any) -> Any:
        self.evictor.empty()
        for lease in hit.request.found:
            lease.entity.seen = lease.segment.generation
        return original(self, hit)

    return pin


# ---- the index -----------------------------------------------------------------------------------------------------


def keys_of(make: Callable[[list[bytes], bytes, list[Any]], list[bytes]]) -> Callable[[ExitStack], None]:
    def swapped(original: Callable[..., list[bytes]]) -> Callable[..., list[bytes]]:
        return lambda self, tokens, salt: make(original(self, tokens, salt), salt, [self, tokens, original])

    return swap(PrefixIndex, "keys", swapped)


def no_salt(keys: list[bytes], salt: bytes, about: list[Any]) -> list[bytes]:
    index, tokens, original = about
    found: list[bytes] = original(index, tokens, b"")
    return found


def unit_only(keys: list[bytes], salt: bytes, about: list[Any]) -> list[bytes]:
    index, tokens, original = about
    unit = index.geometry.unit
    return [original(index, tokens[at : at + unit], salt)[0] for at in range(0, len(keys) * unit, unit)]


def keeps_entries(original: Callable[..., None]) -> Callable[..., None]:
    return lambda self, segment: None


def replaces_entries(original: Callable[..., bool]) -> Callable[..., bool]:
    """The newer of two equal segments takes the entry over, and the older one stays announced."""

    def put(self: PrefixIndex, segment: CacheSegment) -> bool:
        done = original(self, segment)
        if segment.key is not None:
            self.nodes[segment.key].segments[segment.group.index] = segment
        return done or segment.key is not None

    return put


# ---- the writer ----------------------------------------------------------------------------------------------------


def commits_early(original: Callable[..., None]) -> Callable[..., None]:
    """The last token of a segment is left out."""

    def append(self: Any, segment: CacheSegment, request: Any, count: int, rows: Any = None) -> None:
        whole = segment.group.whole or request.position % self.book.geometry.unit or count < 2
        original(self, segment, request, count if whole else count - 1, rows)

    return append


def lets_go_early(units: int) -> Callable[[ExitStack], None]:
    def make(original: Callable[..., int]) -> Callable[..., int]:
        def keeps_from(group: Any, position: int) -> int:
            if units:
                return original(group, position) + units * group.unit if group.group.span else 0
            return position

        return keeps_from

    return swap(writer, "keeps_from", make)


def takes_used_records(original: Callable[..., CacheSegment]) -> Callable[..., CacheSegment]:
    """A record that is in use is handed out again."""

    def settle(self: Book, segment: CacheSegment) -> Any:
        empty = segment.stage in self.empty[segment.group.index] and segment.slots is not None
        original(self, segment)
        if empty:
            self.spare[segment.group.index].append(segment)

    return settle


def grants_anything(original: Callable[..., None]) -> Callable[..., None]:
    def grant(self: Book, segment: CacheSegment, *where: Any, **inputs: Any) -> None:
        if segment.slots is not None:
            segment.entity.stage = self.ledger.tables.kinds[segment.kind].sets["EMPTY"][0]
            self.arena(segment.group).give(segment.slots)
            segment.slots = None
        original(self, segment, *where, **inputs)

    return grant


def appends_twice(original: Callable[..., None]) -> Callable[..., None]:
    def fire_lease(self: Book, lease: Any, row: str, **inputs: Any) -> None:
        for _ in range(2 if row == "append" else 1):
            original(self, lease, row, **inputs)

    return fire_lease


# ---- the end of a request --------------------------------------------------------------------------------------------


def forgets_leases(which: str) -> Callable[[ExitStack], None]:
    """One lease of a request is never let go of."""

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def step(self: Requests, request: Any) -> bool:
            leases = getattr(request, which)
            if leases:
                leases.pop()
            return original(self, request)

        return step

    return swap(Requests, "step", make)


# ---- tiers -----------------------------------------------------------------------------------------------------------


def frees_moving(original: Callable[..., bool]) -> Callable[..., bool]:
    """The client gives up while a load runs: its targets are freed although their bytes still move."""

    def abort(self: ReferenceEngine, req: str) -> bool:
        if req not in self.serving:
            for load in list(self.cache.tiers.loads.values()):
                if load.targets:
                    self.cache.tiers.fail(load, "aborted")
        return original(self, req)

    return abort


def publishes_while_loading(original: Callable[..., bool]) -> Callable[..., bool]:
    def attach(self: Tiers, load: Any) -> bool:
        done = original(self, load)
        for segment, _ in load.targets:
            self.book.index.put(segment)
        return done

    return attach


def mistakes_keys(original: Callable[..., bool]) -> Callable[..., bool]:
    """What was loaded is found under the key of another prefix."""

    def attach(self: Tiers, load: Any) -> bool:
        done = original(self, load)
        nodes = self.book.index.nodes
        for segment, _ in load.targets:
            at = segment.group.index
            segment.key = next((k for k, n in nodes.items() if n.segments[at] is None and k != segment.key), bytes(16))
        return done

    return attach


def ignores_failure(original: Callable[..., Any]) -> Callable[..., Any]:
    """A read that failed counts as one that arrived."""

    def read(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except MediumError:
            return self.held[name][0]

    return read


def ignores_failed_write(original: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Any, name: str, parts: Any, about: Any) -> None:
        try:
            original(self, name, parts, about)
        except MediumError:
            HostMemory.write(self, name, parts, about)

    return write


def loses_ends(original: Callable[..., None]) -> Callable[..., None]:
    """A load that arrived is never ended."""
    return lambda self, load: None


def off_by_one(original: Callable[..., int]) -> Callable[..., int]:
    return lambda self, group, entity: original(self, group, entity) - 1


def publishes_first(event: Event) -> Sequence[Event]:
    """An entry for each block as soon as it is taken."""
    if isinstance(event, Allocate):
        return [event, KeyPublish(event.group, ["early"] * len(event.blocks), event.blocks)]
    return [event]
