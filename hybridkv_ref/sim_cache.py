"""The device copies of a simulation: writing, eviction and cuts, each done by rows of the tables.

Whether something may happen is asked of the tables: a row is fired and either happens or is refused. A refusal by a
cap evicts what the policy names and asks again; any other refusal of a row that has to fire is a fault and raises
Refused.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

from hybridkv_ref.lanes import DEVICE, Maker, pressure
from hybridkv_ref.policy import Policy
from hybridkv_ref.sim_machine import GroupRows, Machines
from hybridkv_ref.sim_tree import Cell, Node, Tree

Hole = tuple[Cell, int, int, int, int]
"""(cell, place, first position, end, boundary) of a segment to be written"""


class Cache:
    """All segments of a model on one device.

    ``spill`` is called with the cell and place of a segment of which no durable copy exists, before it is evicted; None
    where there is nothing to spill to.  ``evicted`` is told the cell and place of each segment that is gone.
    """

    spill: Callable[[Cell, int], None] | None = None
    evicted: Callable[[Cell, int], None] | None = None

    def __init__(self, machines: Machines, tree: Tree, policy: Policy) -> None:
        self.machines, self.tree, self.policy, self.pool = machines, tree, policy, machines.pool
        ranks = sorted({rank for own in policy.kinds.values() for rank in (own.evict, own.evict_durable)})
        self.queues: dict[int, OrderedDict[Cell, None]] = {rank: OrderedDict() for rank in ranks}
        self.kinds = list(dict.fromkeys(g.kind for g in machines.groups))
        self.peak = dict.fromkeys(self.kinds, 0)
        self.evictions = dict.fromkeys(self.kinds, 0)
        self.leases: list[Any] = []
        self.kept: list[tuple[GroupRows, Any, Any]] = []
        self.made: list[Any] = []  # every segment, lease, copy and object: what must be at rest in the end
        self.make_lease = Maker(machines.world.machine, "lease").make
        self.pressed = [pressure(machines.tables, g.events["admit"]) for g in machines.groups]

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

    def fire(self, g: GroupRows, row: str, *entities: Any, **inputs: int) -> None:
        """Fires a row that has to, its inputs in the tables' order; raises Refused, with the values, if it does not."""
        self.machines.fired += 1
        if g.rows[row](self.pool, *entities, *inputs.values()) >= 0:
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

        ``reason`` is as in `pressure`; False where nothing is asked for or nothing may go. Nothing makes way for what
        the policy would evict before it.
        """
        if not reason:
            return False
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
        if self.spill and segment.pins == 0 and self.policy.kinds[g.kind].spill and cell.objects[place] is None:
            self.spill(cell, place)
        if g.rows["retire"](self.pool, segment) >= 0:
            return False
        self.machines.fired += 2
        if g.rows["free"](self.pool, segment) >= 0:
            self.fire(g, "unmark", segment)
            return False
        g.spare.append(segment)
        cell.segments[place] = None
        self.evictions[g.kind] += 1
        if self.evicted:
            self.evicted(cell, place)
        if cell.segments.count(None) == len(cell.segments):
            self.queue(cell)
        return True

    def empty(self) -> None:
        """Frees everything that nobody holds; neither counted as evictions nor written to a store."""
        for queue in self.queues.values():
            for cell in list(queue):
                g = cell.rows
                retire, free = g.rows["retire"], g.rows["free"]
                for place, segment in enumerate(cell.segments):
                    if segment is not None and retire(self.pool, segment) < 0 and free(self.pool, segment) < 0:
                        self.machines.fired += 2
                        cell.segments[place] = None
                        g.spare.append(segment)
                self.queue(cell)

    # -- writing -----------------------------------------------------------------------------------------------------
    def write(self, g: GroupRows, holes: Iterable[Hole]) -> None:
        """The running request computes and keeps what fills these places, until no room can be made for one of them."""
        pool, request, kept, written = self.pool, g.lane.request, self.kept, len(self.kept)
        admit, append, commit = g.rows["admit"], g.rows["append"], g.rows["commit"]
        for cell, place, lo, hi, boundary in holes:
            size = g.size(lo, hi)
            segment = self.take(g.spare, g.make)
            lease = self.lease(segment, request)
            index = admit(pool, segment, lease, request, lo, size, boundary, 0, 0, hi)
            while index >= 0 and self.make_room(self.pressed[g.index][index], g):
                index = admit(pool, segment, lease, request, lo, size, boundary, 0, 0, hi)
            if index >= 0:
                if not self.pressed[g.index][index]:
                    inputs = {"at": lo, "size": size, "meta": boundary, "off": 0, "until": 0, "known": hi}
                    g.lane.world.fire(g.events["admit"].id, segment, lease, request, **inputs)
                g.spare.append(segment)
                self.leases.append(lease)
                break
            if append(pool, segment, lease, request, lo, hi - lo) >= 0:
                g.lane.world.fire(g.events["append"].id, segment, lease, request, at=lo, n=hi - lo)
            if commit(pool, segment, lease, request) >= 0:
                g.lane.world.fire(g.events["commit"].id, segment, lease, request)
            cell.segments[place] = segment
            kept.append((g, segment, lease))
            if cell.queue is None:
                self.queue(cell)
        self.machines.fired += 3 * (len(kept) - written)

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
        self.fire(g, "split", segment, piece, cut=cut, size=size, off=0)
        return piece
