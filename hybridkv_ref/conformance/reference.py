"""The reference allocator as an engine under test.

``reference_events`` says how its rows become events.  Copies between the tiers stop in the middle until ``transfer``
lets them go on, so that everything else may happen meanwhile.
"""

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec

from hybridkv_ref.allocator import Geometry, HeterogeneousAllocator, HitLease, Lease, NotAdmitted, build
from hybridkv_ref.allocator.geometry import GroupGeometry
from hybridkv_ref.allocator.lockstep import keep_all, small_model
from hybridkv_ref.compile_py import attribute
from hybridkv_ref.conformance.engine import Pool
from hybridkv_ref.conformance.gate import WORKERS, GatedMemory, GatedPipelines
from hybridkv_ref.conformance.reference_events import AllocatorEvents
from hybridkv_ref.events import (
    Complete,
    Dispatch,
    Finish,
    GroupSpec,
    Header,
    Lookup,
    Pin,
    Span,
)
from hybridkv_ref.loader import load_tables
from hybridkv_ref.machine import Refused
from hybridkv_ref.tables import Tables

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


class ReferenceEngine(AllocatorEvents):
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
        super().__init__(geometry or build(small_model(), policy=_no_spills()), tables or load_tables())
        self.device_bytes, self.host_bytes = device_bytes, host_bytes
        tiers = ("transfers",) if host_bytes else ()
        self.capabilities = ("blocks", "reuse", "index", "announced", "limits", "longest", "steps", "salts", *tiers)
        unit = self.geometry.unit
        specs = tuple(self.spec(group) for group in self.geometry.groups)
        self.header = Header("hybridkv.events/1", level="L2", unit=unit, alignment=unit, groups=specs)

    def spec(self, group: GroupGeometry) -> GroupSpec:
        """A group as events describe it."""
        about = group.group
        return GroupSpec(
            group.name, group.kind, self.block(group), about.ratio or 1, about.halo or 0, about.span or 0
        )  # fmt: skip

    # -- a new life ----------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """See ``Engine``."""
        self.close()
        self.forget()
        self.serving: dict[str, Serving] = {}
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
        self.cache.pipelines = self.cache.tiers.pipelines = GatedPipelines(self.gate)
        self.watch_index()

    def close(self) -> None:
        """Ends the allocator's threads."""
        if self.allocator is not None:
            self.gate.open()
            self.allocator.close()
            self.allocator = None

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
        return Lookup(req, plan.frontier, lease.matched, blocks, limiting=list(plan.limiting))

    def schedule(self, req: str, count: int, new: Sequence[int], drafts: int) -> bool:
        """See ``Engine``."""
        one = self.serving[req]
        request, target = one.lease.request, one.target + count
        if request.position < target:
            try:
                self.cache.extend(request, target)
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
        """Segments with memory that nobody holds and nobody can find; the allocator keeps them until it evicts."""
        mine = [s for s in self.cache.segments() if s.group is group]
        return sum(1 for s in mine if s.key is None and not s.ref_count)


def _no_spills() -> Any:
    """Snapshots at every position; durable copies only where the suite asks for them."""
    policy = keep_all()
    kinds = {kind: msgspec.structs.replace(one, spill=False) for kind, one in policy.kinds.items()}
    return msgspec.structs.replace(policy, kinds=kinds)
