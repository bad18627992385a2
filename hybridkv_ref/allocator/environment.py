"""What changes under all requests at once: weights, index encodings, addresses of pools, captured graphs, caps."""

from concurrent.futures import Future
from typing import Any

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.eviction import Evictor
from hybridkv_ref.allocator.geometry import Geometry
from hybridkv_ref.allocator.ledger import Ledger
from hybridkv_ref.allocator.pipelines import Pipelines
from hybridkv_ref.allocator.rebuild import Encode, outdated, rebuild
from hybridkv_ref.allocator.tiers import Tiers
from hybridkv_ref.compile_py import attribute
from hybridkv_ref.errors import InputError
from hybridkv_ref.lanes import DEVICE


class Environment:
    """The part of an allocator that is of no single request."""

    geometry: Geometry
    ledger: Ledger
    book: Book
    evictor: Evictor
    pipelines: Pipelines
    tiers: Tiers
    device_bytes: int
    first_bytes: int

    def system(self, row: str) -> None:
        """A row that is of no entity: new weights, a new index encoding, a pool that moves.

        Media keep the counters before it fires.  MediumError, and it has not fired, if one cannot; a new process takes
        the largest, and passes over what was written before.
        """
        event = self.ledger.event_id("system", row)
        with self.ledger.atomic(event):
            after, _ = self.ledger.rehearse(self.ledger.lanes[0], [(event, ())])
            counters = {name: getattr(after, attribute(name)) for name in self.counters}
            for medium in self.tiers.media.values():
                medium.remember(counters)
            self.ledger.fire(self.ledger.lanes[0], event)

    @property
    def counters(self) -> list[str]:
        """The counters of the pool that outlive a process."""
        return sorted(name for name, var in self.ledger.tables.globals.items() if var.durable)

    def reopen(self) -> None:
        """Finds what earlier processes left: of each counter the largest value, every sealed object."""
        for medium in self.tiers.media.values():
            for name, value in medium.recall(self.counters).items():
                at = attribute(name)
                setattr(self.ledger.pool, at, max(value, getattr(self.ledger.pool, at)))
        for name in self.tiers.media:
            self.tiers.reopen(name, self.geometry.group)

    def graph(self) -> Any:
        """A record of a captured graph; its rows are fired with ``graph_row``."""
        return self.ledger.maker(self.ledger.lanes[0], "graph")()

    def graph_row(self, graph: Any, row: str, **inputs: int | bool) -> None:
        """A row of a captured graph; Refused where its topology has moved on."""
        self.ledger.fire(self.ledger.lanes[0], self.ledger.event_id("graph", row), graph, **inputs)

    def rebuild(self, encode: Encode) -> "list[Future[None]]":
        """Encodes the stored keys anew of every index segment that is out of date, on the CPU pipeline."""
        return [self.pipelines.submit("cpu", rebuild, self.book, s, encode) for s in outdated(self.book)]

    def limit(self, device_bytes: int) -> None:
        """Another cap of the device, at most that of the start: what no longer fits is evicted first.

        InputError if what is held does not fit; then nothing has changed but what was evicted.
        """
        if not 1 <= device_bytes <= self.first_bytes:
            raise InputError(f"limit:device_bytes: expected 1 to {self.first_bytes}, got {device_bytes}")
        pool = self.ledger.pool
        while broken := self.ledger.change({"GPU_CAP": device_bytes}):
            if not self.evictor.make_room(DEVICE, None):
                held = f"{pool.gpu_used} bytes are held, {pool.gpu_reserved} promised"
                raise InputError(f"limit:device_bytes: {device_bytes} is too little for '{broken}', {held}")
        self.device_bytes = device_bytes
