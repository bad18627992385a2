"""The segments of a simulation: writing, eviction, cuts, durable copies and loads, each done by rows of the tables.

Whether something may happen is asked of the tables: a row is fired and either happens or is refused. A refusal by a
cap evicts what the policy names and asks again; any other refusal of a row that has to fire is a fault and raises
Refused.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from hybridkv_ref.policy import Policy
from hybridkv_ref.sim_machine import DEVICE, MEDIUM, STORE, GroupRows, Machines, Maker, pressure
from hybridkv_ref.sim_tree import Cell, Node, StoredObject, Tree

Hole = tuple[Cell, int, int, int, int]
"""(cell, place, first position, end, boundary) of a segment to be written"""

_OBJECT = ("size", "lo", "hi", "meta", "made_in", "layout", "until")


@dataclass(eq=False, slots=True)
class Load:
    """A durable copy on its way back into one new segment; ``then`` is called with the time when it ended, well or not."""

    stored: StoredObject
    g: GroupRows
    segment: Any = None
    copy: Any = None
    then: list[Callable[[float], None]] = field(default_factory=list)


class Cache:
    """All segments of a model on one device, and the objects of one store."""

    def __init__(self, machines: Machines, tree: Tree, policy: Policy, bandwidth: float, spills: bool) -> None:
        self.machines, self.tree, self.policy = machines, tree, policy
        self.pool, self.store = machines.pool, machines.store_rows
        self.bandwidth, self.spills = bandwidth, spills
        ranks = sorted({rank for own in policy.kinds.values() for rank in (own.evict, own.evict_durable)})
        self.queues: dict[int, OrderedDict[Cell, None]] = {rank: OrderedDict() for rank in ranks}
        self.kinds = {g.kind for g in machines.groups}
        self.peak = dict.fromkeys(self.kinds, 0)
        self.evictions = dict.fromkeys(self.kinds, 0)
        self.spilled = self.reloaded = self.load_bytes = 0
        self.leases: list[Any] = []
        self.kept: list[tuple[GroupRows, Any, Any]] = []
        self.objects: OrderedDict[StoredObject, None] = OrderedDict()
        self.spare_objects: list[Any] = []
        self.copies: list[Any] = []
        machine = machines.world.machine
        self.make_lease, self.make_copy = Maker(machine, "lease").make, Maker(machine, "copy").make
        self.make_object = Maker(machine, "segment", machines.store, medium=MEDIUM, parts=1).make
        self.made: list[Any] = []  # every segment, lease, copy and object: what must be at rest in the end
        self.waiting: deque[Load] = deque()
        self.loads: dict[StoredObject, Load] = {}
        self.running: Load | None = None
        self.ends_at = math.inf
        self.pressed = {
            (g.index, row): pressure(g.events[row]) for g in machines.groups for row in ("admit", "restore_begin")
        }
        self.pressed_load = pressure(machines.tables.event(f"{machines.store}.load_begin"))
        self.pressed_open = pressure(machines.tables.event(f"{machines.store}.open_object"))

    # -- records -----------------------------------------------------------------------------------------------------
    def take(self, free: list[Any], make: Callable[[], Any]) -> Any:
        """A record that is at rest, or a new one."""
        if free:
            return free.pop()
        made = make()
        self.made.append(made)
        return made

    def lease(self, segment: Any, request: Any) -> Any:
        """A lease of nothing yet, that of ``request`` on ``segment`` from now on."""
        lease = self.take(self.leases, self.make_lease)
        lease.refs["self"], lease.refs["req"] = segment, request
        return lease

    def copy(self, src: Any, dst: Any) -> Any:
        """A copy that does not move yet, from ``src`` to ``dst``."""
        copy = self.take(self.copies, self.make_copy)
        copy.refs["src"], copy.refs["dst"] = src, dst
        return copy

    def must(self, g: GroupRows, row: str, index: int, *entities: Any, **inputs: int) -> None:
        """Counts a row that fired (``index`` -1); raises Refused, with the values, for one that did not."""
        self.machines.fired += 1
        if index >= 0:
            g.lane.world.fire(g.events[row].id, *entities, **inputs)

    # -- order of eviction -------------------------------------------------------------------------------------------
    def queue(self, cell: Cell) -> None:
        """Puts a cell at the recent end of the order that fits what it holds; out of all if that is nothing."""
        target = None
        if cell.segments.count(None) < len(cell.segments):
            durable = all(o is not None for s, o in zip(cell.segments, cell.objects, strict=True) if s is not None)
            own = self.policy.kinds[cell.rows.kind]
            target = self.queues[own.evict_durable if durable else own.evict]
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

    def make_room(self, reason: str, g: GroupRows) -> bool:
        """Evicts one segment for one of this group: of the kind whose cap was reached, or of any on the device.

        Nothing makes way for what the policy would evict before it.
        """
        self.measure()
        own = self.policy.kinds[g.kind].evict
        for rank, queue in self.queues.items():
            if rank > own:
                break
            for cell in queue:
                if reason in (DEVICE, cell.rows.kind):
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
        if cell.segments.count(None) == len(cell.segments):
            self.queue(cell)
        return True

    def empty(self) -> None:
        """Evicts and erases all that nobody holds, without writing durable copies."""
        self.spills = False
        for queue in self.queues.values():
            for cell in list(queue):
                for place, segment in enumerate(cell.segments):
                    if segment is not None:
                        self.evict(cell, place)
        for stored in list(self.objects):
            self.erase(stored)

    # -- writing -----------------------------------------------------------------------------------------------------
    def write(self, g: GroupRows, holes: Iterable[Hole]) -> None:
        """The running request computes and keeps what fills these places, until no room can be made for one of them."""
        pool, request, kept = self.pool, g.lane.request, self.kept
        admit, append, commit = g.rows["admit"], g.rows["append"], g.rows["commit"]
        for cell, place, lo, hi, boundary in holes:
            size = g.size(lo, hi)
            segment = self.take(g.spare, g.make)
            lease = self.lease(segment, request)
            while (index := admit(pool, segment, lease, request, lo, size, boundary, 0, 0)) >= 0:
                reason = self.pressed[g.index, "admit"][index]
                if not reason:
                    g.lane.world.fire(
                        g.events["admit"].id, segment, lease, request, at=lo, size=size, meta=boundary, off=0, until=0
                    )  # fmt: skip
                if not self.make_room(reason, g):
                    g.spare.append(segment)
                    self.leases.append(lease)
                    return
            if append(pool, segment, lease, request, lo, hi - lo) >= 0:
                g.lane.world.fire(g.events["append"].id, segment, lease, request, at=lo, n=hi - lo)
            if commit(pool, segment, lease, request) >= 0:
                g.lane.world.fire(g.events["commit"].id, segment, lease, request)
            self.machines.fired += 3
            cell.segments[place] = segment
            kept.append((g, segment, lease))
            if cell.queue is None:
                self.queue(cell)

    def let_go(self) -> None:
        """The request that ends lets go of what it wrote."""
        for g, segment, lease in self.kept:
            if g.let_go(self.pool, segment, lease, g.lane.request) >= 0:
                g.lane.world.fire(g.events["let_go"].id, segment, lease, g.lane.request)
            self.leases.append(lease)
        self.machines.fired += len(self.kept)
        self.kept.clear()

    def split(self, node: Node, keys: int) -> None:
        """Cuts a node and every segment that covers it; no byte moves."""
        rest = self.tree.cut(node, keys)
        for cell, moved in zip(node.cells, rest.cells, strict=True):
            g = cell.rows
            if g.ranged:
                segment, stored = cell.segments[0], cell.objects[0]
                if segment is not None:
                    moved.segments[0] = self.split_segment(g, segment, rest.start)
                if stored is not None:
                    stored.cells.append(moved)
                    moved.objects[0] = stored
            for stored in () if g.ranged else moved.objects:
                if stored is not None:
                    stored.cells = [moved]
            if cell.queue is not None:
                self.queue(moved)
                self.queue(cell)

    def split_segment(self, g: GroupRows, segment: Any, cut: int) -> Any:
        """Cuts one segment at a position; gives the segment that begins there."""
        piece, size = self.take(g.spare, g.make), g.size(cut, segment.end)
        index = g.rows["split"](self.pool, segment, piece, cut, size, 0)
        self.must(g, "split", index, segment, piece, cut=cut, size=size, off=0)
        return piece

    # -- durable copies ----------------------------------------------------------------------------------------------
    def spill(self, cell: Cell, place: int) -> bool:
        """Writes a durable copy of one segment; False when the store has no room for it."""
        g, segment, pool = cell.rows, cell.segments[place], self.pool
        target = self.take(self.spare_objects, self.make_object)
        about = (segment.mem, segment.start, segment.end, segment.mark, segment.epoch, segment.abi, 0)
        while (index := self.store["open_object"](pool, target, *about)) >= 0:
            if self.pressed_open[index] != STORE:
                inputs = dict(zip(_OBJECT, about, strict=True))
                self.machines.world.fire(f"{self.machines.store}.open_object", target, **inputs)
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
        load = self.loads.get(stored)
        if load is None:
            if not start or self.store["want"](self.pool, stored.entity, 0) >= 0:
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
        while (index := self.store["load_begin"](self.pool, source, size)) >= 0:
            reason = self.pressed_load[index]
            if not reason:
                self.machines.world.fire(f"{self.machines.store}.load_begin", source, need=size)
            if not self.make_room(reason, g):
                self.fire_store("skip", source)
                return False
        load.segment = self.take(g.spare, g.make)
        load.copy = self.copy(source, load.segment)
        # The device's memory was promised to the load; only its kind's own pool may still have to make room.
        while (index := g.rows["restore_begin"](self.pool, source, load.segment, load.copy, size, lo, hi, 0)) >= 0:
            reason = self.pressed[g.index, "restore_begin"][index]
            if not reason or not self.make_room(reason, g):
                g.lane.world.fire(
                    g.events["restore_begin"].id, source, load.segment, load.copy, size=size, lo=lo, hi=hi, off=0
                )  # fmt: skip
        self.machines.fired += 2
        return True

    def complete(self) -> None:
        """The running load ends: its part has arrived, is verified, becomes readable and goes where the tree wants it."""
        load, now = self.running, self.ends_at
        if load is None:
            return
        g, source, segment, copy = load.g, load.stored.entity, load.segment, load.copy
        self.must(g, "restore_part", g.rows["restore_part"](self.pool, source, segment, copy), source, segment, copy)
        self.fire_store("verify", source)
        self.must(g, "publish", g.rows["publish"](self.pool, source, segment, copy), source, segment, copy)
        self.fire_store("settle", source)
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
                piece = self.split_segment(g, segment, cell.node.start)
            place = cell.objects.index(stored)
            if cell.segments[place] is None:
                cell.segments[place] = piece
                self.queue(cell)
            else:  # computed again in the meantime
                self.must(g, "retire", g.rows["retire"](self.pool, piece), piece)
                self.must(g, "free", g.rows["free"](self.pool, piece), piece)
                g.spare.append(piece)

    def end(self, load: Load, now: float) -> None:
        """Tells everybody who waited for a load that it is over."""
        del self.loads[load.stored]
        for then in load.then:
            then(now)
