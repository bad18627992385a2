"""The table machines of a simulation: one shared pool, one request record per lane, the rows of each group.

RATIO, HALO, RING and W are constants of the tables, and a request record counts the leases of each *kind*. A model
may have several groups of one kind (DeepSeek-V4: entries of ratio 4 and 128). So its groups are dealt out to *lanes*:
in one lane no kind comes twice and all agree on the constants. Each lane has a request record and a machine compiled
for its constants; all machines work on one pool object, so that every cap is that of the whole device. A request goes
through its stages in all lanes in step: no lane validates before every lane has joined.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hybridkv_ref.errors import InputError
from hybridkv_ref.io_unit import Transfer
from hybridkv_ref.lanes import Maker, deal, is_whole, only_store, tokens_per_row, worlds
from hybridkv_ref.machine import Entity, Machine, World
from hybridkv_ref.models import Group, Model
from hybridkv_ref.need_functions import NeedFunction
from hybridkv_ref.recovery import PREFILL
from hybridkv_ref.recovery import Group as CacheGroup
from hybridkv_ref.tables import Event, Tables

Row = Callable[..., int]
"""A compiled row: ``row(pool, *entities, *inputs)`` gives -1 when it fired, else the index of the false guard."""

MEDIUM = "DISK"
"""The medium of the stored objects that a simulation writes."""


@dataclass(eq=False, slots=True)
class Lane:
    """A request record and the machine that runs it."""

    world: World
    kinds: set[str] = field(default_factory=set)
    request: Any = None
    rows: Mapping[str, Row] = field(default_factory=dict)


@dataclass(eq=False, slots=True)
class GroupRows:
    """One group of the model: what it needs to resume, its sizes, and its kind's rows in its lane.

    ``ranged``: one segment covers a range of the prefix tree; else each holds what resuming at one position needs.
    ``prefill``: only prefill makes again what it stores; for what the others store, a replay can stand in.
    ``whole``: a segment is one state of ``row_bytes`` bytes; else it has that many bytes per ``per_row`` tokens.
    """

    index: int
    group: Group
    lane: Lane
    need: NeedFunction
    ranged: bool
    prefill: bool
    whole: bool
    per_row: int
    row_bytes: int
    rows: Mapping[str, Row]
    events: Mapping[str, Event]
    make: Callable[[], Any]
    let_go: Row
    spare: list[Any] = field(default_factory=list)

    @property
    def kind(self) -> str:
        """The kind whose table the group's segments follow."""
        return self.group.kind

    def size(self, lo: int, hi: int) -> int:
        """Unpadded bytes of the positions [lo, hi), all layers; additive where a range is cut between entries."""
        return self.row_bytes if self.whole else self.row_bytes * (hi // self.per_row - lo // self.per_row)

    def extent(self, cut: int) -> tuple[int, int]:
        """(first position, boundary) of the segment by which a group that is not ranged resumes at ``cut``.

        A state is made of the whole history; rows of partial entries begin where ``recovery.toml`` asks for them.
        """
        return (0, 0) if self.whole else (self.need(cut, cut)[0], cut - cut % (self.group.ratio or 1))


class Machines:
    """All lanes of a model, the pool they share, and the count of rows fired."""

    def __init__(
        self,
        tables: Tables,
        model: Model,
        needs: Sequence[CacheGroup],
        groups: Sequence[Group],
        constants: Mapping[str, int],
    ) -> None:
        self.tables = tables
        self.store = only_store(tables)
        by_name = {need.name: need for need in needs}
        self.lanes: list[Lane] = []
        self.groups: list[GroupRows] = []
        self.fired = 0
        dealt = deal(groups)
        made = worlds(Machine(tables, {**constants, **own}) for _, own in dealt)
        for world, (members, _) in zip(made, dealt, strict=True):
            lane = Lane(world, {g.kind for g in members})
            rigid: dict[str, int | str] = {f"group.{g.kind}": groups.index(g) for g in members}
            lane.request = Maker(world.machine, "request", **rigid, kernel=True).make()
            lane.rows = self.rows(world.machine, "request.")
            self.lanes.append(lane)
            for group in members:
                self.groups.append(self.group_rows(group, by_name[group.name], lane, groups.index(group), model))
        self.groups.sort(key=lambda g: g.index)
        self.world = self.lanes[0].world
        self.pool: Any = self.world.pool
        self.store_rows = self.rows(self.world.machine, f"{self.store}.")
        for event_id, inputs in _SIGNATURES.items():
            for event in tables.events:
                if event.row == event_id and tuple(event.inputs) != inputs:
                    raise InputError(f"{event.file}: rows.{event.row}: a simulation passes {', '.join(inputs)}")

    def group_rows(self, group: Group, need: CacheGroup, lane: Lane, index: int, model: Model) -> GroupRows:
        """One group's rows in its lane."""
        machine = lane.world.machine
        events = {e.row: e for e in self.tables.events if self.is_of(e, group.kind)}
        rows = {name: machine.events[e.id].call for name, e in events.items()}
        return GroupRows(
            index=index,
            group=group,
            lane=lane,
            need=need.need,
            ranged=not need.need(0, 0)[2],
            prefill=need.miss == PREFILL,
            whole=is_whole(group),
            per_row=tokens_per_row(group),
            row_bytes=group.layers * group.row_size(model.default_dtypes),
            rows=rows,
            events=events,
            make=Maker(machine, "segment", group.kind, group=index).make,
            let_go=rows["let_go"],
        )

    def is_of(self, event: Event, kind: str) -> bool:
        """Whether an event is about segments of this kind alone, or of this kind and the store."""
        ends = set(event.kinds.values())
        return kind in ends and ends <= {kind, self.store}

    @staticmethod
    def rows(machine: Machine, prefix: str) -> dict[str, Row]:
        """The rows whose event id starts with ``prefix``, by row name."""
        return {c.event.row: c.call for e, c in machine.events.items() if e.startswith(prefix)}

    def refuse(self, lane: Lane, event_id: str, *entities: Entity, **inputs: int) -> None:
        """Fires a row that has to fire, or has just been refused: raises Refused with the guard and the values."""
        lane.world.fire(event_id, *entities, **inputs)
        self.fired += 1


# Inputs are passed by position for speed, so their order is compared with the tables once.
_SIGNATURES: dict[str, tuple[str, ...]] = {
    "match": ("s", "f", "bound", "matched"),
    "retry": ("s", "f", "bound"),
    "admit": ("at", "size", "meta", "off", "until", "known"),
    "append": ("at", "n"),
    "dispatch": ("upto",),
    "split": ("cut", "size", "off"),
    "open_object": ("size", "lo", "hi", "meta", "made_in", "layout", "until", *Transfer._fields),
    "want": ("need_until",),
    "load_begin": ("need", *Transfer._fields),
    "restore_begin": ("size", "lo", "hi", "off"),
}
