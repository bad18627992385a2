"""A builder of traces of rows, in the notation of the tables' searches: ``c.q`` is the lease of ``q`` on ``c``."""

from collections.abc import Iterable
from typing import Any

from hybridkv_ref.row_traces import Add, Fire, Line, Scalar

CONSTANTS = {
    "RATIO": 4, "HALO": 4, "RING": 11, "W": 4, "GPU_CAP": 140, "RESERVE": 8, "PIPELINE": 2, "MAX_PREEMPTS": 2,
    "HOST_CAP": 8, "DISK_CAP": 64, "OBJECT_CAP": 64, "IO_CAP": 1, "MAX_TRIES": 2, "CPU_CAP": 1, "PROBE": 5, "TICKET": 1,
    "RANK": 1, "compressed_kv.CAP": 40, "indexer_state.CAP": 40, "recurrent_state.CAP": 24, "swa_window.CAP": 40,
    "uncompressed_tail.CAP": 40, "on_disk_prefix.CAP": 64,
}  # fmt: skip

ENTRIES, TAIL, STATE = "compressed_kv", "uncompressed_tail", "recurrent_state"
KEYS, WINDOW, STORE = "indexer_state", "swa_window", "on_disk_prefix"
GROUP = {ENTRIES: 1, TAIL: 1, WINDOW: 2, KEYS: 3, STATE: 4}  # a tail is of the group that it feeds
READS: dict[str, Any] = {f"group.{kind}": group for kind, group in GROUP.items()}
USES = {f"uses.{kind}": True for kind in GROUP}
WHOLE = ("c", "t2", "w2", "i", "s3")  # the same after the neighbours were joined
LIFE = 100


class Script:
    """The lines so far. Leases, copies and shipments are made when they are first named: ``c.q``, ``c>o``, ``c=>d``."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.kinds: dict[str, str] = {}
        self.made: set[str] = set()
        self.requests = 0

    def add(self, cls: str, name: str, *of: str, kind: str = "", **rigid: Scalar) -> None:
        self.made.add(name)
        self.lines.append(Add(cls, name, kind, of, rigid))

    def segment(self, name: str, kind: str, **rigid: Scalar) -> None:
        self.kinds[name] = kind
        self.add("segment", name, kind=kind, **rigid)

    def request(self, name: str, **rigid: Any) -> None:
        self.requests += 1
        self.add("request", name, id=self.requests, kernel=True, **READS, **rigid)

    def fire(self, event: str, *on: str, **inputs: Scalar) -> None:
        self.lines.append(Fire(event, on, inputs))

    def segments(self, row: str, names: Iterable[str], **inputs: Scalar) -> None:
        for name in names:
            self.fire(f"{self.kinds[name]}.{row}", name, **inputs)

    def lease(self, row: str, segment: str, request: str, **inputs: Scalar) -> None:
        name = f"{segment}.{request}"
        if name not in self.made:
            self.add("lease", name, segment, request)
        self.fire(f"{self.kinds[segment]}.{row}", segment, name, request, **inputs)

    def leases(self, row: str, segments: Iterable[str], request: str, **inputs: Scalar) -> None:
        for segment in segments:
            self.lease(row, segment, request, **inputs)

    def ask(self, request: str, *rows: str, **inputs: Scalar) -> None:
        for row in rows:
            self.fire(f"request.{row}", request, **inputs)

    def pair(self, row: str, src: str, dst: str, **inputs: Scalar) -> None:
        self.fire(f"{row}[{self.kinds[src]}>{self.kinds[dst]}]", src, dst, **inputs)

    def copy(self, row: str, src: str, dst: str, **inputs: Scalar) -> None:
        name = f"{src}>{dst}"
        if name not in self.made:
            self.add("copy", name, src, dst)
        self.fire(f"{row}[{self.kinds[src]}>{self.kinds[dst]}]", src, dst, name, **inputs)

    def ship(self, row: str, src: str, dst: str, transfer: str, **inputs: Scalar) -> None:
        name = f"{src}=>{dst}"
        if name not in self.made:
            part, group = WHOLE.index(src), GROUP[self.kinds[src]]
            self.add("shipment", name, src, dst, transfer, part=part, group=group)
        self.fire(f"{row}[{self.kinds[src]}>{self.kinds[dst]}]", src, dst, transfer, name, **inputs)

    # -- what happens again and again --------------------------------------------------------------------------------
    def admit(self, segment: str, request: str, at: int, size: int, known: int, meta: int = 0) -> None:
        self.lease("admit", segment, request, at=at, size=size, meta=meta, off=0, until=LIFE, known=known)

    def fold(self, tail: str, target: str) -> None:
        self.copy("fold_begin", tail, target)
        self.copy("fold_end", tail, target)

    def pin(self, request: str, at: int, segments: Iterable[str], row: str = "match", *ranks: str) -> None:
        self.ask(request, row, s=at, f=at, bound=at - at % CONSTANTS["RATIO"], matched=at + 1)
        found = tuple(segments)
        self.leases("find", found, request)
        self.leases("pin", found, request)
        for rank in ranks:
            self.fire("rank.vote", request, rank, hit=at)

    def hit(self, request: str, at: int, segments: Iterable[str], row: str = "match", *ranks: str) -> None:
        """A joint hit: matched, pinned, agreed, checked in four layers, read."""
        found = tuple(segments)
        self.pin(request, at, found, row, *ranks)
        self.ask(request, "check")
        for segment in found:
            self.lease("pass_l1", segment, request)
            self.lease("pass_l2", segment, request)
        self.ask(request, "join")
        self.leases("pass_l4", found, request)
        self.ask(request, "validate")
        self.leases("read", found, request)
        self.ask(request, "start_hit")

    def step(self, segments: Iterable[str], request: str, upto: int) -> None:
        """A step that attends these segments is dispatched and completes."""
        attended = [s for s in segments if self.kinds[s] != TAIL]
        self.leases("dispatch", attended, request, upto=upto)
        self.leases("complete", attended, request)

    def end(self, request: str, segments: Iterable[str], row: str = "release") -> None:
        self.ask(request, "finish")
        self.leases(row, segments, request)
        self.ask(request, "close")

    def evict(self, segments: Iterable[str]) -> None:
        for segment in segments:
            self.segments("retire", [segment])
            self.segments("free", [segment])
