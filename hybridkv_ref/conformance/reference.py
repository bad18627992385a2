"""The reference allocator as an engine under test: its rows and its index, told as events.

What the allocator fires is reduced to events as any engine's calls would be; nothing is taken from what it should do.
A group block is one segment record; the blocks of the host tier are durable copies.  Copies between the tiers stop in
the middle until ``transfer`` lets them go on, so that everything else may happen meanwhile.
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from hybridkv_ref.allocator import CacheSegment, Geometry, HeterogeneousAllocator, HitLease, Lease, NotAdmitted, build
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.lockstep import keep_all, small_model
from hybridkv_ref.allocator.records import StoredObject
from hybridkv_ref.compile_py import attribute
from hybridkv_ref.conformance.engine import Pool, Recorder
from hybridkv_ref.conformance.gate import WORKERS, Gate, GatedMemory, GatedPipelines
from hybridkv_ref.events import (
    Allocate,
    Complete,
    Dispatch,
    Event,
    Evict,
    Finish,
    Free,
    GroupSpec,
    Header,
    KeyPublish,
    KeyRemove,
    Lookup,
    Part,
    Pin,
    Span,
    TransferBegin,
    TransferEnd,
    TransferFail,
)
from hybridkv_ref.loader import load_tables
from hybridkv_ref.machine import Refused
from hybridkv_ref.tables import Tables

HOST = "host"
MOST_SPILLS = WORKERS // 2
MEDIUM = "HOST"
"""The tables' name of the medium below the device."""


@dataclass
class Serving:
    """A request of the allocator under the suite's name, what is to be computed, steps in flight that read its hit."""

    lease: HitLease
    target: int
    steps: list[tuple[str, list[Lease]]] = field(default_factory=list)
    gone: bool = False


class ReferenceEngine(Recorder):
    """A small hybrid model with all kinds of groups on ``device_bytes``; a host tier of ``host_bytes`` (0: none)."""

    name = "HeterogeneousAllocator"
    version = "1"

    def __init__(
        self,
        device_bytes: int = 9_000,
        host_bytes: int = 20_000,
        geometry: Geometry | None = None,
        tables: Tables | None = None,
    ) -> None:
        super().__init__()
        self.device_bytes, self.host_bytes = device_bytes, host_bytes
        self.geometry = geometry or build(small_model(), policy=_no_spills())
        self.tables = tables or load_tables()
        self.rows = {event.id: event.row for event in self.tables.events}
        tiers = ("transfers",) if host_bytes else ()
        self.capabilities = ("blocks", "reuse", "index", "announced", "limits", "longest", "steps", "salts", *tiers)
        unit = self.geometry.unit
        specs = tuple(self.spec(group) for group in self.geometry.groups)
        self.header = Header("hybridkv.events/1", level="L2", unit=unit, alignment=unit, groups=specs)
        self.allocator: HeterogeneousAllocator | None = None
        self.gate = Gate()

    def spec(self, group: GroupGeometry) -> GroupSpec:
        """A group as events describe it."""
        about = group.group
        return GroupSpec(
            group.name, group.kind, self.block(group), about.ratio or 1, about.halo or 0, about.span or 0
        )  # fmt: skip

    def block(self, group: GroupGeometry) -> int:
        """Tokens of one block: the segment at a grid position; a state stands for the unit that it ends."""
        lo, hi = group.extent(self.geometry.unit)
        return self.geometry.unit if group.whole else hi - lo

    @property
    def cache(self) -> HeterogeneousAllocator:
        """The allocator of this life."""
        if self.allocator is None:
            raise RuntimeError("reset() comes first")
        return self.allocator

    # -- a new life ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """See ``Engine``."""
        self.close()
        self.events.clear()
        self.later: list[Event] = []
        self.serving: dict[str, Serving] = {}
        self.names: dict[int, str] = {}
        self.numbers: dict[tuple[int, int], int] = {}
        self.counts: dict[int, int] = {}
        self.pinned: list[CacheSegment] = []
        self.copies: dict[int, str] = {}
        self.wanted = ""
        self.upto = 0
        self.count = 0
        self.gate = Gate()
        media = {MEDIUM: GatedMemory(self.gate)} if self.host_bytes else {}
        self.allocator = HeterogeneousAllocator(
            self.geometry,
            self.device_bytes,
            host_bytes=self.host_bytes,
            io_slots=1,
            tables=self.tables,
            media=media,
            observer=self,
        )
        self.cache.pipelines.close()
        self.cache.pipelines = self.cache.tiers.pipelines = GatedPipelines(self.cache.book.device, self.gate)
        self.watch_index()

    def close(self) -> None:
        """Ends the allocator's threads."""
        if self.allocator is not None:
            self.gate.open()
            self.allocator.close()
            self.allocator = None

    def watch_index(self) -> None:
        """Each entry that comes or goes is an event, after that of the row that it belongs to."""
        index = self.cache.book.index
        put, drop, put_object, drop_object = index.put, index.drop, index.put_object, index.drop_object

        def found(segment: CacheSegment) -> bool:
            node = index.nodes.get(segment.key) if segment.key is not None else None
            return node is not None and node.segments[segment.group.index] is segment

        def watched_put(segment: CacheSegment) -> bool:
            before, done = found(segment), put(segment)
            if not before and found(segment) and segment.key is not None:
                self.later.append(KeyPublish(segment.group.name, [segment.key.hex()], [self.number(segment)]))
            return done

        def watched_drop(segment: CacheSegment) -> None:
            before, key = found(segment), segment.key
            drop(segment)
            if before and not found(segment) and key is not None:
                self.later.append(KeyRemove(segment.group.name, [key.hex()], [self.number(segment)]))

        def watched_object(stored: StoredObject) -> None:
            put_object(stored)
            numbers = [self.copy_number(stored.group, stored.entity)] * len(stored.keys)
            self.say(KeyPublish(stored.group.name, [k.hex() for k in stored.keys], numbers, tier=HOST))

        def watched_loss(stored: StoredObject) -> None:
            drop_object(stored)
            numbers = [self.copy_number(stored.group, stored.entity)] * len(stored.keys)
            self.say(KeyRemove(stored.group.name, [k.hex() for k in stored.keys], numbers, tier=HOST))

        hooks: dict[str, Callable[..., Any]] = {
            "put": watched_put, "drop": watched_drop, "put_object": watched_object, "drop_object": watched_loss,
        }  # fmt: skip
        for name, hook in hooks.items():
            setattr(index, name, hook)

    # -- what the allocator fires, told as events ----------------------------------------------------------------------

    def say(self, *events: Event) -> None:
        """These events, and the index's that belong to them."""
        self.events += [*events, *self.later]
        self.later.clear()

    def number(self, segment: CacheSegment) -> int:
        """The block number of a segment's record."""
        return self.copy_number(segment.group, segment.entity)

    def copy_number(self, group: GroupGeometry, entity: Any) -> int:
        """The block number of a record of one group, on the device or below it."""
        key = (group.index, id(entity))
        if key not in self.numbers:
            self.counts[group.index] = self.numbers[key] = self.counts.get(group.index, 0) + 1
        return self.numbers[key]

    def before(self, event_id: str) -> None:
        """Nothing: only what has fired counts."""

    def limits(self, constants: Mapping[int, Mapping[str, int]]) -> None:
        """Nothing: events do not tell of caps."""

    def after(self, event_id: str, lane: int, entities: Sequence[Any], inputs: Mapping[str, int | str]) -> None:
        """One row: the events that tell of it."""
        row = self.rows[event_id]
        if entities and entities[-1].cls == "copy":
            self.copied(row, entities)
        elif len(entities) == 3 and entities[1].cls == "lease" and self.allocator is not None:
            segment = self.cache.book.by_entity.get(id(entities[0]))
            if segment is not None:
                self.leased(row, segment, self.names.get(id(entities[2]), ""), inputs)
        self.say()
        if row == "free" and (entities[0].pins or entities[0].steps or entities[0].holds):
            # Without an entry and a holder a block is free already; this one is not.
            segment = self.cache.book.by_entity[id(entities[0])]
            self.say(Evict(segment.group.name, [self.number(segment)]))

    def leased(self, row: str, segment: CacheSegment, req: str, inputs: Mapping[str, int | str]) -> None:
        """A row of a request's lease."""
        group, number = segment.group, self.number(segment)
        match row:
            case "admit":
                at = self.upto - self.block(group) if group.whole else int(inputs["at"])
                self.say(Allocate(req, group.name, [number], at=at))
            case "append":
                at, hi = int(inputs["at"]), int(inputs["at"]) + int(inputs["n"])
                self.count += 1
                span = Span(group.name, [number], hi - self.block(group) if group.whole else at, hi)
                self.say(Dispatch(f"w{self.count}", req, writes=[span]), Complete(f"w{self.count}"))
            case "pin":
                self.pinned.append(segment)
            case "release" if segment in self.pinned:
                self.pinned.remove(segment)
            case "release" | "let_go" | "abort":
                self.say(Free(req, group.name, [number]))

    def copied(self, row: str, entities: Sequence[Any]) -> None:
        """A row of a copy between device and host."""
        source, target, copy = entities[0], entities[1], entities[2]
        name = self.copies.get(id(copy), "")
        match row:
            case "spill_begin" | "restore_begin":
                self.gate.begin()
                self.count += 1
                name = self.copies[id(copy)] = f"x{self.count}"
                down = row == "spill_begin"
                group = self.geometry.groups[source.group]
                keys = [] if down else self.keys_of(source)
                part = Part(group.name, [self.copy_number(group, source)], [self.copy_number(group, target)], keys)
                self.say(
                    TransferBegin(name, [part], target=HOST)
                    if down
                    else TransferBegin(name, [part], source=HOST, req=self.wanted)
                )
            case "spill_end" | "spill_fail" | "publish" | "discard":
                arrived = self.gate.fate()
                if arrived is None:
                    self.say(TransferFail(name, stopped=False))
                else:
                    self.say(TransferEnd(name) if arrived else TransferFail(name))

    def keys_of(self, entity: Any) -> list[str]:
        """The keys that a durable copy is kept under."""
        return [key.hex() for stored in self.cache.tiers.objects if stored.entity is entity for key in stored.keys]

    # -- operations ----------------------------------------------------------------------------------------------------

    def begin(self, req: str, tokens: Sequence[int], salt: str) -> int | None:
        """See ``Engine``."""
        self.pinned.clear()
        try:
            hit = self.cache.match(list(tokens), salt=salt.encode())
        except (NotAdmitted, Refused):
            return None
        for record in hit.request.records:
            self.names[id(record)] = req
        lease = self.cache.pin(hit)
        while lease.tokens and not self.cache.validate(lease)[-1].accepted:
            lease = self.cache.retry(lease)
        if lease.tokens:
            self.cache.read(lease)
        self.say(self.looked_up(req, lease), *(Pin(req, s.group.name, [self.number(s)]) for s in self.pinned))
        self.pinned.clear()
        self.serving[req] = Serving(lease, lease.plan.frontier)
        return lease.plan.frontier

    def looked_up(self, req: str, lease: HitLease) -> Lookup:
        """The hit that the request goes on with."""
        blocks: dict[str, list[int]] = {}
        for segment in lease.segments:
            size, held = self.block(segment.group), blocks.setdefault(segment.group.name, [])
            at = (segment.token_range[1] - 1) // size
            held += [0] * (at + 1 - len(held))
            held[at] = self.number(segment)
        plan = lease.plan
        return Lookup(req, plan.frontier, lease.request.matched, blocks, limiting=list(plan.limiting))

    def schedule(self, req: str, count: int, new: Sequence[int], drafts: int) -> bool:
        """See ``Engine``."""
        one, unit = self.serving[req], self.geometry.unit
        request, target = one.lease.request, one.target + count
        while request.position < target:
            self.upto = min(request.position // unit * unit + unit, target)
            try:
                self.cache.extend(request, self.upto)
            except Refused:
                return False
        one.target = target
        self.count += 1
        leases = self.cache.dispatch(one.lease) if one.lease.tokens else []
        reads = [Span(lease.segment.group.name, [self.number(lease.segment)]) for lease in leases]
        self.say(Dispatch(f"r{self.count}", req, reads=reads))
        one.steps.append((f"r{self.count}", leases))
        return True

    def complete(self, req: str, accepted: int) -> bool:
        """See ``Engine``."""
        step, leases = self.serving[req].steps.pop(0)
        self.say(Complete(step))
        self.cache.complete(leases)
        return True

    def finish(self, req: str) -> bool:
        """See ``Engine``."""
        self.say(Finish(req))
        self.cache.finish(self.serving[req].lease.request)
        return True

    def abort(self, req: str) -> bool:
        """See ``Engine``."""
        one = self.serving.get(req)
        if one is not None and not one.gone:
            one.gone = True
            self.cache.abort(one.lease.request)
        return True

    def evict(self, group: str, blocks: int) -> bool:
        """See ``Engine``."""
        idle = sorted(self.cache.evictor.place, key=lambda s: s.last_accessed)
        for name in [group] if group else [g.name for g in self.geometry.groups]:
            for segment in [s for s in idle if s.group.name == name][:blocks]:
                self.cache.evictor.evict(segment)
        return True

    def store(self) -> bool:
        """See ``Transferring``."""
        spills = self.cache.tiers.spills
        for segment in self.cache.segments() if len(spills) < MOST_SPILLS else ():
            cached = segment.key is not None and segment.stored is None and segment not in spills
            if cached and self.gate.held(partial(self.cache.spill, segment)):
                return True
        return False

    def load(self, req: str, tokens: Sequence[int], salt: str) -> bool:
        """See ``Transferring``."""
        self.wanted = req

        def ask() -> list[Future[bool]]:
            return self.cache.prefetch(list(tokens), salt=salt.encode())

        return self.gate.held(ask)

    def transfer(self, ok: bool) -> bool:
        """See ``Transferring``."""
        return self.gate.release(ok)

    def snapshot(self) -> Mapping[str, Pool]:
        """See ``Engine``: of groups that are alone in their kind, whose pools are counted in bytes."""
        kinds = [group.kind for group in self.geometry.groups]
        found: dict[str, Pool] = {}
        for group in self.geometry.groups:
            if kinds.count(group.kind) == 1:
                size = group.size(*group.extent(self.geometry.unit))
                capacity = self.cache.caps[group.kind] // size
                used: int = getattr(self.cache.ledger.pool, attribute(f"{group.kind}.used"))
                found[group.name] = Pool(capacity, capacity - used // size + self.idle(group))
        return found

    def idle(self, group: GroupGeometry) -> int:
        """Segments that hold memory which nobody holds and nobody can find."""
        mine = [s for s in self.cache.segments() if s.group is group]
        return sum(1 for s in mine if s.key is None and not s.ref_count)


def _no_spills() -> Any:
    """Snapshots at every position; durable copies only where the suite asks for them."""
    policy = keep_all()
    kinds = {kind: msgspec.structs.replace(one, spill=False) for kind, one in policy.kinds.items()}
    return msgspec.structs.replace(policy, kinds=kinds)
