"""The durable copies of a simulation and the loads that bring them back, each step a row of the tables.

One load at a time has the channel, and with it the whole bandwidth; the others wait in the order of their tickets. A
load takes the memory of its target before a byte moves; if none can be freed, it gives its turn up.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from hybridkv_ref.io_unit import BUFFERED
from hybridkv_ref.lanes import STORE, Maker, pressure
from hybridkv_ref.machine import Entity
from hybridkv_ref.sim_cache import Cache
from hybridkv_ref.sim_machine import MEDIUM, GroupRows
from hybridkv_ref.sim_tree import Cell, StoredObject


@dataclass(eq=False, slots=True)
class Load:
    """A durable copy on its way back into one new segment; ``then`` is called with the time when it ended, anyhow."""

    stored: StoredObject
    g: GroupRows
    segment: Any = None
    copy: Any = None
    then: list[Callable[[float], None]] = field(default_factory=list)


class Store:
    """The objects of one store, below one cache; ``bandwidth`` is bytes per second."""

    def __init__(self, cache: Cache, bandwidth: float) -> None:
        self.cache, self.bandwidth = cache, bandwidth
        self.machines, self.pool, self.rows = cache.machines, cache.pool, cache.machines.store_rows
        self.objects: OrderedDict[StoredObject, None] = OrderedDict()  # the least recently wanted first
        self.spare: list[list[Any]] = [[] for _ in cache.machines.groups]
        self.copies: list[Any] = []
        self.waiting: deque[Load] = deque()
        self.loads: dict[StoredObject, Load] = {}
        self.running: Load | None = None
        self.ends_at = math.inf
        self.spilled = self.reloaded = self.load_bytes = 0
        machine, name, tables = self.machines.world.machine, self.machines.store, self.machines.tables
        # An object is one group's for life.
        groups = self.machines.groups
        self.make = [Maker(machine, "segment", name, medium=MEDIUM, parts=1, group=g.index).make for g in groups]
        self.make_copy = Maker(machine, "copy").make
        self.pressed_open, self.pressed_load = (
            pressure(tables, tables.event(f"{name}.{row}")) for row in ("open_object", "load_begin")
        )
        self.pressed = [pressure(tables, g.events["restore_begin"]) for g in self.machines.groups]

    def fire(self, row: str, entity: Entity, **inputs: int) -> None:
        """Fires a row of an object that has to fire."""
        self.machines.fired += 1
        if self.rows[row](self.pool, entity, *inputs.values()) >= 0:
            self.machines.world.fire(f"{self.machines.store}.{row}", entity, **inputs)

    def copy(self, src: Any, dst: Any) -> Any:
        """A copy that does not move yet, from ``src`` to ``dst``."""
        copy = self.cache.take(self.copies, self.make_copy)
        copy.refs["src"], copy.refs["dst"] = src, dst
        return copy

    # -- objects -----------------------------------------------------------------------------------------------------
    def spill(self, cell: Cell, place: int) -> None:
        """Writes a durable copy of one segment, unless the medium has no room even after erasing what is not wanted."""
        g, segment = cell.rows, cell.segments[place]
        target = self.cache.take(self.spare[g.index], self.make[g.index])
        about = {"size": segment.mem, "lo": segment.start, "hi": segment.end, "meta": segment.mark}
        about |= {"made_in": segment.epoch, "layout": segment.abi, "until": segment.keep_until, **BUFFERED._asdict()}
        while (index := self.rows["open_object"](self.pool, target, *about.values())) >= 0:
            if self.pressed_open[index] != STORE:
                self.machines.world.fire(f"{self.machines.store}.open_object", target, **about)
            if not any(self.erase(o) for o in self.objects):
                self.spare[g.index].append(target)
                return
        self.machines.fired += 1
        copy = self.copy(segment, target)
        self.cache.fire(g, "spill_begin", segment, target, copy)
        self.cache.fire(g, "spill_end", segment, target, copy)
        self.copies.append(copy)
        self.fire("seal", target)
        cell.objects[place] = stored = StoredObject(target, cell)
        self.objects[stored] = None
        self.spilled += 1

    def erase(self, stored: StoredObject) -> bool:
        """Gives an object's space on the medium back, unless it is wanted."""
        if self.rows["retire"](self.pool, stored.entity) >= 0:
            return False
        self.machines.fired += 1
        self.fire("erase", stored.entity)
        self.spare[stored.entity.group].append(stored.entity)
        del self.objects[stored]
        for cell in stored.cells:
            cell.objects = [None if o is stored else o for o in cell.objects]
            if cell.queue is not None:
                self.cache.queue(cell)
        return True

    # -- loads -------------------------------------------------------------------------------------------------------
    def load(self, cell: Cell, place: int, start: bool, then: Callable[[float], None]) -> bool:
        """Asks for a durable copy back, or joins the load that is on its way; False if there will be none."""
        stored = cell.objects[place]
        if stored is None:
            return False
        load = self.loads.get(stored)
        if load is None:
            if not start or self.rows["want"](self.pool, stored.entity, 0) >= 0:
                return False
            self.machines.fired += 1
            load = self.loads[stored] = Load(stored, cell.rows)
            self.waiting.append(load)
            self.objects.move_to_end(stored)
        load.then.append(then)
        return True

    def pump(self, now: float) -> None:
        """Begins the load whose turn it is, if the channel is free; gives it up if no memory can be made for it."""
        while self.running is None and self.waiting:
            load = self.waiting.popleft()
            if self.begin(load):
                self.running, self.ends_at = load, now + load.segment.mem / self.bandwidth * 1000
            else:
                self.end(load, now)

    def begin(self, load: Load) -> bool:
        """Takes the I/O slot and the memory of a load and starts its copy; False if it had to give up."""
        g, source = load.g, load.stored.entity
        size, lo, hi = source.mem, source.start, source.end
        while (index := self.rows["load_begin"](self.pool, source, size, *BUFFERED)) >= 0:
            reason = self.pressed_load[index]
            if not reason:
                self.machines.world.fire(f"{self.machines.store}.load_begin", source, need=size, **BUFFERED._asdict())
            if not self.cache.make_room(reason, g):
                self.fire("skip", source)
                return False
        load.segment = self.cache.take(g.spare, g.make)
        load.copy = self.copy(source, load.segment)
        # The device's memory was promised to the load; only its kind's own pool may still have to make room.
        while (index := g.rows["restore_begin"](self.pool, source, load.segment, load.copy, size, lo, hi, 0)) >= 0:
            reason = self.pressed[g.index][index]
            if not reason or not self.cache.make_room(reason, g):
                g.lane.world.fire(
                    g.events["restore_begin"].id, source, load.segment, load.copy, size=size, lo=lo, hi=hi, off=0
                )  # fmt: skip
        self.machines.fired += 2
        return True

    def complete(self) -> None:
        """The running load ends: its part arrives, is verified, becomes readable and goes to its cells."""
        load, now = self.running, self.ends_at
        if load is None:
            return
        g, source, segment, copy = load.g, load.stored.entity, load.segment, load.copy
        self.cache.fire(g, "restore_part", source, segment, copy)
        self.fire("verify", source)
        self.cache.fire(g, "publish", source, segment, copy)
        self.fire("settle", source)
        self.copies.append(copy)
        self.reloaded += 1
        self.load_bytes += segment.mem
        self.place(load.stored, segment)
        self.running, self.ends_at = None, math.inf
        self.end(load, now)
        self.pump(now)

    def place(self, stored: StoredObject, segment: Any) -> None:
        """Gives the cells of an object their parts of the segment that was loaded from it, the last ones first."""
        cells = sorted(stored.cells, key=lambda cell: cell.node.start)
        for cell in reversed(cells):
            g, piece = cell.rows, segment
            if cell is not cells[0]:
                piece = self.cache.split_segment(g, segment, cell.node.start)
            place = cell.objects.index(stored)
            if cell.segments[place] is None:
                cell.segments[place] = piece
                self.cache.queue(cell)
            else:  # computed again in the meantime
                self.cache.fire(g, "retire", piece)
                self.cache.fire(g, "free", piece)
                g.spare.append(piece)

    def end(self, load: Load, now: float) -> None:
        """Tells everybody who waited for a load that it is over."""
        del self.loads[load.stored]
        for then in load.then:
            then(now)
