"""The segments of a simulation: writing, eviction, cuts, durable copies and loads, each done by rows of the tables.

Whether something may happen is asked of the tables: a row is fired and either happens or is refused.  A refusal by a cap
evicts what the policy names and asks again; any other refusal of a row that has to fire is a fault and raises Refused.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from hybridkv_ref.policy import Policy
from hybridkv_ref.sim_machine import DEVICE, MEDIUM, STORE, GroupRows, Machines, entity, pressure
from hybridkv_ref.sim_tree import Cell, Node, StoredObject, Tree


_OBJECT = ("size", "lo", "hi", "meta", "made_in", "layout", "until")


@dataclass(eq=False, slots=True)
class Load:
    """A durable copy on its way back to one place of one cell; ``then`` is called when it ended, well or not."""

    stored: StoredObject
    cell: Cell
    place: int
    size: int
    segment: Any = None
    then: list[Callable[[float], None]] = field(default_factory=list)


class Cache:
    """All segments of a model on one device, and the objects of one store."""

    def __init__(self, machines: Machines, tree: Tree, policy: Policy, bandwidth: float, spills: bool) -> None:
        self.machines, self.tree, self.policy = machines, tree, policy
        self.pool, self.store = machines.pool, machines.store_rows
        self.bandwidth, self.spills = bandwidth, spills
        self.queues: dict[tuple[str, bool], OrderedDict[Cell, None]] = {
            key: OrderedDict() for key in policy.eviction_order()
        }
        self.order = list(self.queues.items())
        self.kinds = {g.kind for g in machines.groups}
        self.peak = dict.fromkeys(self.kinds, 0)
        self.evictions = dict.fromkeys(self.kinds, 0)
        self.spilled = self.reloaded = self.load_bytes = 0
        self.leases: list[Any] = []
        self.kept: list[tuple[GroupRows, Any, Any]] = []
        self.objects: OrderedDict[StoredObject, None] = OrderedDict()
        self.spare_objects: list[Any] = []
        self.copies: list[Any] = []
        self.made: list[Any] = []  # every segment, lease, copy and object: what must be at rest in the end
        self.waiting: deque[Load] = deque()
        self.running: Load | None = None
        self.ends_at = math.inf
        self.pressed = {
            (g.index, row): pressure(g.events[row]) for g in machines.groups for row in ("admit", "restore_begin")
        }
        self.pressed_load = pressure(machines.tables.event(f"{machines.store}.load_begin"))
        self.pressed_open = pressure(machines.tables.event(f"{machines.store}.open_object"))

    # -- records ----------------------------------------------------------------------------------------------------------
    def take(self, free: list[Any], cls: str, kind: str = "", **rigid: int | str) -> Any:
        """A record that is at rest, or a new one."""
        if free:
            return free.pop()
        made = entity(self.machines.world.machine, cls, kind, **rigid)
        self.made.append(made)
        return made

    def lease(self, segment: Any, request: Any) -> Any:
        """A lease of nothing yet, that of ``request`` on ``segment`` from now on."""
        lease = self.take(self.leases, "lease")
        lease.refs = {"self": segment, "req": request}
        return lease

    def copy(self, src: Any, dst: Any) -> Any:
        """A copy that does not move yet, from ``src`` to ``dst``."""
        copy = self.take(self.copies, "copy")
        copy.refs = {"src": src, "dst": dst}
        return copy

    def must(self, g: GroupRows, row: str, index: int, *entities: Any, **inputs: int) -> None:
        """Counts a row that fired (``index`` -1); raises Refused, with the values, for one that did not."""
        self.machines.fired += 1
        if index >= 0:
            g.lane.world.fire(g.events[row].id, *entities, **inputs)

    # -- order of eviction --------------------------------------------------------------------------------------------------
    def queue(self, cell: Cell) -> None:
        """Puts a cell at the recent end of the eviction order that fits what it holds; out of all if that is nothing."""
        held = [o for s, o in zip(cell.segments, cell.objects, strict=True) if s is not None]
        target = self.queues[cell.rows.kind, all(o is not None for o in held)] if held else None
        if cell.queue is not None and cell.queue is not target:
            del cell.queue[cell]
        cell.queue = target
        if target is not None:
            target[cell] = None
            target.move_to_end(cell)

    def touch(self, path: list[tuple[Node, int]]) -> None:
        """Marks what lies on a path as used now, the deepest first, so that a prefix outlives what continues it."""
        for node, _ in reversed(path):
            for cell in node.cells:
                if cell.queue is not None:
                    cell.queue.move_to_end(cell)

    def measure(self) -> None:
        """Keeps the highest use of each kind's pool; called before memory is given back."""
        for kind in self.kinds:
            used: int = getattr(self.pool, f"{kind}__used")
            if used > self.peak[kind]:
                self.peak[kind] = used

    def make_room(self, reason: str) -> bool:
        """Evicts one segment, of the kind whose cap was reached or of the kind that the policy names first."""
        self.measure()
        for (kind, _), queue in self.order:
            if reason in (DEVICE, kind):
                for cell in queue:
                    for place, segment in enumerate(cell.segments):
                        if segment is not None and self.evict(cell, place):
                            return True
        return False

    def evict(self, cell: Cell, place: int) -> bool:
        """Gives a segment's memory back, after a durable copy was written where the policy asks for one."""
        g, segment = cell.rows, cell.segments[place]
        if segment.pins == 0 and self.spills and self.policy.kinds[g.kind].spill and cell.objects[place] is None:
            self.spill(cell, place)
        if g.rows["retire"](self.pool, segment) >= 0:
            return False
        self.machines.fired += 2
        if g.rows["free"](self.pool, segment) >= 0:
            self.must(g, "unmark", g.rows["unmark"](self.pool, segment), segment)
            return False
        g.spare.append(segment)
        cell.segments[place] = None
        self.evictions[g.kind] += 1
        if not any(s is not None for s in cell.segments):
            self.queue(cell)
        return True

    # -- writing ------------------------------------------------------------------------------------------------------------
    def write(self, cell: Cell, place: int) -> bool:
        """The running request computes and keeps one segment; False when no room could be made for it."""
        g = cell.rows
        rows, request, pool = g.rows, g.lane.request, self.pool
        lo, hi, boundary = cell.extent(place)
        size = g.size(lo, hi)
        segment = self.take(g.spare, "segment", g.kind)
        lease = self.lease(segment, request)
        while (index := rows["admit"](pool, segment, lease, request, lo, size, boundary, 0, 0)) >= 0:
            reason = self.pressed[g.index, "admit"][index]
            if not reason:
                self.must(
                    g, "admit", index, segment, lease, request, at=lo, size=size, meta=boundary, off=0, until=0
                )  # fmt: skip
            if not self.make_room(reason):
                g.spare.append(segment)
                self.leases.append(lease)
                return False
        index = rows["append"](pool, segment, lease, request, lo, hi - lo)
        if index >= 0:
            self.must(g, "append", index, segment, lease, request, at=lo, n=hi - lo)
        index = rows["commit"](pool, segment, lease, request)
        if index >= 0:
            self.must(g, "commit", index, segment, lease, request)
        self.machines.fired += 3
        cell.segments[place] = segment
        self.kept.append((g, segment, lease))
        return True

    def let_go(self) -> None:
        """The request that ends lets go of what it wrote."""
        for g, segment, lease in self.kept:
            self.must(g, "let_go", g.rows["let_go"](self.pool, segment, lease, g.lane.request), segment, lease, g.lane.request)
            self.leases.append(lease)
        self.kept.clear()

    def split(self, node: Node, keys: int) -> None:
        """Cuts a node and every segment that covers it; no byte moves."""
        rest = self.tree.cut(node, keys)
        for cell, moved in zip(node.cells, rest.cells, strict=True):
            g = cell.rows
            if g.ranged:
                segment, stored = cell.segments[0], cell.objects[0]
                if segment is not None:
                    piece = self.take(g.spare, "segment", g.kind)
                    cut, size = rest.start, g.size(rest.start, rest.cuts[-1])
                    index = g.rows["split"](self.pool, segment, piece, cut, size, 0)
                    self.must(g, "split", index, segment, piece, cut=cut, size=size, off=0)
                    moved.segments[0] = piece
                if stored is not None:
                    stored.cells.append(moved)
                    moved.objects[0] = stored
            for stored in () if g.ranged else moved.objects:
                if stored is not None:
                    stored.cells = [moved]
            if cell.queue is not None:
                self.queue(moved)
                self.queue(cell)

    # -- durable copies -----------------------------------------------------------------------------------------------------
    def spill(self, cell: Cell, place: int) -> bool:
        """Writes a durable copy of one segment; False when the store has no room for it."""
        g, segment, pool = cell.rows, cell.segments[place], self.pool
        target = self.take(self.spare_objects, "segment", self.machines.store, medium=MEDIUM, parts=1)
        about = (segment.mem, segment.start, segment.end, segment.mark, segment.epoch, segment.abi, 0)
        while (index := self.store["open_object"](pool, target, *about)) >= 0:
            if self.pressed_open[index] != STORE:
                self.machines.world.fire(f"{self.machines.store}.open_object", target, **dict(zip(_OBJECT, about, strict=True)))
            if not any(self.erase(o) for o in self.objects):
                self.spare_objects.append(target)
                return False
        copy = self.copy(segment, target)
        for row in ("spill_begin", "spill_end"):
            self.must(g, row, g.rows[row](pool, segment, target, copy), segment, target, copy)
        self.copies.append(copy)
        self.fire_store("seal", target)
        self.machines.fired += 1
        stored = StoredObject(target, cell)
        cell.objects[place] = stored
        self.objects[stored] = None
        self.spilled += 1
        return True

    def fire_store(self, row: str, target: Any, **inputs: int) -> None:
        """Fires a row of the store that has to fire."""
        self.machines.fired += 1
        if self.store[row](self.pool, target, *inputs.values()) >= 0:
            self.machines.world.fire(f"{self.machines.store}.{row}", target, **inputs)

    def erase(self, stored: StoredObject) -> bool:
        """Gives an object's space on the medium back, unless it is wanted."""
        if self.store["retire"](self.pool, stored.entity) >= 0:
            return False
        self.machines.fired += 1
        self.fire_store("erase", stored.entity)
        self.spare_objects.append(stored.entity)
        del self.objects[stored]
        for cell in stored.cells:
            cell.objects = [None if o is stored else o for o in cell.objects]
            if cell.queue is not None:
                self.queue(cell)
        return True

    def load(self, cell: Cell, place: int, start: bool, then: Callable[[float], None]) -> bool:
        """Asks for a durable copy back, or joins the load that is on its way; False if there will be none."""
        stored = cell.objects[place]
        if stored is None:
            return False
        if stored.load is None:
            if not start or self.store["want"](self.pool, stored.entity, 0) >= 0:
                return False
            self.machines.fired += 1
            lo, hi, _ = cell.extent(place)
            stored.load = Load(stored, cell, place, cell.rows.size(lo, hi))
            self.waiting.append(stored.load)
            self.objects.move_to_end(stored)
        stored.load.then.append(then)
        return True

    def pump(self, now: float) -> None:
        """Begins the load whose turn it is, if the channel is free; gives it up if no memory can be made for it."""
        while self.running is None and self.waiting:
            load = self.waiting.popleft()
            if self.begin(load):
                self.running, self.ends_at = load, now + load.size / self.bandwidth * 1000
            else:
                self.end(load, now)

    def begin(self, load: Load) -> bool:
        """Takes the I/O slot and the memory of a load and starts its copy; False if it had to give up."""
        g, source, size = load.cell.rows, load.stored.entity, load.size
        while (index := self.store["load_begin"](self.pool, source, size)) >= 0:
            reason = self.pressed_load[index]
            if not reason:
                self.machines.world.fire(f"{self.machines.store}.load_begin", source, need=size)
            if not self.make_room(reason):
                self.fire_store("skip", source)
                return False
        self.machines.fired += 1
        load.segment = self.take(g.spare, "segment", g.kind)
        copy = self.copy(source, load.segment)
        lo, hi, _ = load.cell.extent(load.place)
        while (index := g.rows["restore_begin"](self.pool, source, load.segment, copy, size, lo, hi, 0)) >= 0:
            reason = self.pressed[g.index, "restore_begin"][index]
            if not reason or not self.make_room(reason):
                self.must(g, "restore_begin", index, source, load.segment, copy, size=size, lo=lo, hi=hi, off=0)
        self.machines.fired += 1
        load.segment.refs = {"copy": copy}
        return True

    def complete(self) -> None:
        """The running load ends: its part has arrived, is verified and becomes readable."""
        load, now = self.running, self.ends_at
        if load is None:
            return
        g, source, segment = load.cell.rows, load.stored.entity, load.segment
        copy = segment.refs.pop("copy")
        self.must(g, "restore_part", g.rows["restore_part"](self.pool, source, segment, copy), source, segment, copy)
        self.fire_store("verify", source)
        self.must(g, "publish", g.rows["publish"](self.pool, source, segment, copy), source, segment, copy)
        self.fire_store("settle", source)
        self.copies.append(copy)
        load.cell.segments[load.place] = segment
        self.queue(load.cell)
        self.reloaded += 1
        self.load_bytes += load.size
        self.running, self.ends_at = None, math.inf
        self.end(load, now)
        self.pump(now)

    @staticmethod
    def end(load: Load, now: float) -> None:
        """Tells everybody who waited for a load that it is over."""
        load.stored.load = None
        for then in load.then:
            then(now)
