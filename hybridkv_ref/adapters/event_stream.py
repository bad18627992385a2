"""Published KV-cache event streams of engines as events of a trace, judged as they come.

A stream is batches of BlockStored, BlockRemoved and AllBlocksCleared. Three forms are read: JSON Lines (a batch or an
event per line), frames (each batch in MessagePack after its length, 4 bytes, big endian), and live from a ZMQ address,
where a message is (topic, sequence number of 8 bytes, batch). Only the index can be seen there (level L0): entries come
and go as a multiset, and a span of tokens is covered by the blocks that announce it. Groups are learned as they are
announced, so each gets an oracle of its own.

Who joins late, or lost a batch, does not know every entry: from there on removals of unknown entries are not told.
Nobody is told of groups otherwise than by their entries: without one, a removal in a whole stream cannot be read.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Engine, Event, GroupSpec, Header, KeyPublish, KeyRemove, Reset
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_records import Refusal
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import group_of
from hybridkv_ref.spec_files import read_toml

FOLDER = "engines"
LONGEST = 1 << 28
"""Bytes of one frame; a longer one is taken for a file that is none of frames."""


class _Event(msgspec.Struct):
    """The fields of the published events that are read; others may stand beside them."""

    block_hashes: list[Any] = []
    parent_block_hash: Any = None
    token_ids: list[int] = []
    block_size: int = 0
    medium: str | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


_POSITIONS = {
    "BlockStored": ("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium"),
    "BlockRemoved": ("block_hashes", "medium"),
    "AllBlocksCleared": (),
}
"""Fields by position, of releases that publish events as arrays."""


def formats(spec: Path = SPEC_DIR) -> list[str]:
    """The engines whose events can be read: each has a file that maps its words."""
    return sorted(path.stem for path in (spec / FOLDER).glob("*.toml"))


def _rank(value: Any, place: str) -> str:
    """The instance of a data-parallel rank; rank 0 is one, no rank is none."""
    if not isinstance(value, int | None):
        raise InputError(f"{place}: data_parallel_rank: expected a number, got {value!r}")
    return "" if value is None else str(value)


def _key(value: Any, place: str) -> str:
    if not isinstance(value, bytes | int | str):
        raise InputError(f"{place}: block_hashes: expected bytes, a number or a text, got {value!r}")
    return value.hex() if isinstance(value, bytes) else str(value)


@dataclass
class EventStream:
    """Turns batches into events. ``groups``: those announced so far, by index; ``untold``: removals left out."""

    form: str
    spec: Path = SPEC_DIR
    groups: dict[int, GroupSpec] = field(default_factory=dict)
    untold: int = 0
    gaps: int = 0

    def __post_init__(self) -> None:
        if self.form not in (known := formats(self.spec)):
            raise InputError(f"--format {self.form}: no such format (known: {', '.join(known)})")
        self.file = f"{FOLDER}/{self.form}.toml"
        self.maps: Any = read_toml(self.spec / self.file, self.file)
        self.live: Counter[tuple[str, int, str, str]] = Counter()
        self.next: dict[str, int] = {}
        self.partly: set[str] = set()

    def batch(self, batch: Any, place: str, seq: int = -1) -> Iterator[Event]:
        """The events of one decoded batch, or of one event; ``seq``: its number in a live stream."""
        rank, events = "", [batch]
        if isinstance(batch, list) and len(batch) >= 2 and isinstance(batch[1], list) and not isinstance(batch[0], str):
            events, rank = batch[1], _rank(batch[2] if len(batch) > 2 else None, place)
        elif isinstance(batch, dict) and "events" in batch:
            events, rank = batch["events"], _rank(batch.get("data_parallel_rank"), place)
        if seq >= 0:
            if seq != self.next.get(rank, 0):
                self.gaps += 1
                self.partly.add(rank)
            self.next[rank] = seq + 1
        if not isinstance(events, list):
            raise InputError(f"{place}: events: expected a list")
        for event in events:
            yield from self.event(event, rank, place)

    def event(self, raw: Any, rank: str, place: str) -> Iterator[Event]:
        """What one published event stands for."""
        if isinstance(raw, list) and raw and raw[0] in _POSITIONS:
            raw = {"type": raw[0], **dict(zip(_POSITIONS[raw[0]], raw[1:], strict=False))}
        name = raw.get("type") if isinstance(raw, dict) else None
        if name not in _POSITIONS:
            raise InputError(f"{place}: type: expected one of {', '.join(_POSITIONS)}, got {name!r}")
        try:
            e = msgspec.convert(raw, _Event)
        except msgspec.ValidationError as error:
            raise InputError(f"{place}: {name}: {error}") from None
        if name == "AllBlocksCleared":
            self.partly.discard(rank)
            for index, group in self.groups.items():
                for entry in [k for k in self.live if k[:2] == (rank, index)]:
                    del self.live[entry]
                yield Reset(group.name, instance=rank)
            return
        index, tier = e.group_idx or 0, self.maps["media"].get(e.medium or "", (e.medium or "").lower())
        keys = [_key(h, place) for h in e.block_hashes]
        if name == "BlockStored":
            group = self._group(index, e, place)
            self.live.update((rank, index, tier, key) for key in keys)
            parent = "" if e.parent_block_hash is None else _key(e.parent_block_hash, place)
            tokens = (0, len(e.token_ids)) if e.token_ids else None
            yield KeyPublish(group.name, keys, tier=tier, parent=parent, tokens=tokens, instance=rank)
            return
        for key in keys:
            known = self.live[rank, index, tier, key]
            if known > 1:
                self.live[rank, index, tier, key] = known - 1
            else:
                del self.live[rank, index, tier, key]
            if not known and rank in self.partly:
                self.untold += 1
            elif index not in self.groups:
                raise InputError(f"{place}: {name}: group_idx: no entry of group {index} was ever stored")
            else:
                yield KeyRemove(self.groups[index].name, [key], tier=tier, instance=rank)

    def _group(self, index: int, e: _Event, place: str) -> GroupSpec:
        if index not in self.groups:
            if e.block_size < 1:
                raise InputError(f"{place}: block_size: expected at least 1 token, got {e.block_size}")
            kinds, said = self.maps["announced"], e.kv_cache_spec_kind or ""
            if said not in kinds:
                known = ", ".join(filter(None, kinds))
                raise InputError(f"{place}: kv_cache_spec_kind: '{said}' is none of {self.file} (known: {known})")
            group = GroupSpec(
                f"group{index}", kinds[said], e.block_size, window=e.kv_cache_spec_sliding_window or 0
            )  # fmt: skip
            try:
                group_of(group, self.spec)
            except InputError as error:
                raise InputError(f"{place}: BlockStored: {error}") from None
            self.groups[index] = group
        return self.groups[index]

    def header(self, groups: Iterable[GroupSpec]) -> Header:
        """The header of a trace of these groups."""
        claims = ("index",)
        return Header("hybridkv.events/1", Engine(self.form), level="L0", groups=tuple(groups), capabilities=claims)


@dataclass
class StreamJudge:
    """One oracle per engine instance and group; ``refusals`` with their places in the stream."""

    stream: EventStream
    events: int = 0
    refusals: list[tuple[str, Refusal]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.oracles: dict[tuple[str, str], Oracle] = {}

    def feed(self, event: Event, place: str) -> None:
        """Judges one event of the stream."""
        name = getattr(event, "group", "")
        oracle = self.oracles.get((event.instance, name))
        if oracle is None:
            groups = [g for g in self.stream.groups.values() if g.name == name]
            oracle = self.oracles[event.instance, name] = Oracle(self.stream.header(groups), spec=self.stream.spec)
        self.events += 1
        self.refusals += [(place, refusal) for refusal in oracle.feed(event).refusals]


def read_batches(path: Path) -> Iterator[tuple[Any, str]]:
    """Batches of a file with their places: JSON Lines, or frames. InputError for anything else."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path}:1: {error.strerror}") from None
    if data.lstrip()[:1] in (b"{", b"["):
        for number, line in enumerate(data.splitlines(), 1):
            if line.strip():
                try:
                    yield msgspec.json.decode(line), f"{path}:{number}"
                except msgspec.DecodeError as error:
                    raise InputError(f"{path}:{number}: {error}") from None
        return
    at = number = 0
    while at < len(data):
        number += 1
        size = int.from_bytes(data[at : at + 4], "big")
        if size > LONGEST or at + 4 + size > len(data):
            raise InputError(f"{path}:frame {number}: {size} bytes announced, {max(len(data) - at - 4, 0)} there")
        yield decode(data[at + 4 : at + 4 + size], f"{path}:frame {number}"), f"{path}:frame {number}"
        at += 4 + size


def decode(payload: bytes, place: str) -> Any:
    """A batch in MessagePack."""
    try:
        return msgspec.msgpack.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{place}: {error}") from None


def live_batches(address: str, idle: float) -> Iterator[tuple[Any, str, int]]:
    """(batch, place, sequence number) from a ZMQ publisher, until nothing came for ``idle`` seconds."""
    try:
        import zmq
    except ImportError:
        raise InputError(f"{address}: reading live needs pyzmq") from None
    context = zmq.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt_string(zmq.SUBSCRIBE, "")
    try:
        socket.connect(address)
        while socket.poll(int(idle * 1000)):
            frames = socket.recv_multipart()
            if len(frames) != 3 or len(frames[1]) != 8:
                raise InputError(f"{address}: expected (topic, sequence number, batch), got {len(frames)} frames")
            seq = int.from_bytes(frames[1], "big")
            yield decode(frames[2], f"{address}:{seq}"), f"{address}:{seq}", seq
    except zmq.ZMQError as error:
        raise InputError(f"{address}: {error}") from None
    finally:
        socket.close(0)
        context.term()
