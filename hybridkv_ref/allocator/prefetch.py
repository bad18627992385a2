"""Which durable copies a longer hit of a prompt needs, and asking for them."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future

from hybridkv_ref.allocator.hits import Hits
from hybridkv_ref.allocator.records import StoredObject
from hybridkv_ref.allocator.tiers import Tiers
from hybridkv_ref.fast_hit import Tier, plan_hit

DEVICE, STORED = "device", "stored"


class Prefetcher:
    """Plans hits over the device and the tiers below it, for one allocator."""

    def __init__(self, hits: Hits, tiers: Tiers) -> None:
        self.hits, self.tiers = hits, tiers
        self.geometry, self.index = hits.book.geometry, hits.book.index

    def ask(self, keys: Sequence[bytes], length: int, need_until: int) -> "list[Future[bool]]":
        """Asks for what is missing on the device, in the order of the policy's priority; what the queue takes."""
        with self.tiers.ledger.lock:
            wanted = sorted(self.missing(keys, length), key=self.priority)
        asked = [self.tiers.want(stored, need_until) for stored in dict.fromkeys(wanted)]
        return [future for future in asked if future is not None]

    def priority(self, stored: StoredObject) -> int:
        """The policy's rank for bringing an object back."""
        return self.geometry.policy.kinds[stored.group.kind].recover

    def missing(self, keys: Sequence[bytes], length: int) -> Iterator[StoredObject]:
        """The durable copies that the longest hit over all tiers reads, as its match would search for it."""
        path, unit = self.index.path(keys), self.geometry.unit
        tiers = [Tier(DEVICE, self.index.contents(path)), Tier(STORED, self.index.stored(path))]
        plan = plan_hit(self.hits.finder, tiers, len(path) * unit, length, unit, self.hits.replay)
        for part in plan.parts:
            if part.tier == STORED:
                group = self.geometry.group(part.group)
                found = (path[at].objects[group.index] for at in group.places(part.lo, part.hi))
                yield from (stored for stored in found if stored is not None)
