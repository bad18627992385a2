"""A trace of requests, run through the table machines of every cache group of a model.

Every change of a segment is a row of the tables: what a request computes is admitted, appended and committed; what it
reuses is matched, pinned, checked in four layers, read and released; pressure retires and frees; a store is written to
and loaded from.  Bookkeeping is the prefix tree, the order of last use per kind and the simulated clock, no more.

What is simulated:

* A prompt's blocks become *positions* at which a hit may end: where a block ends, rounded down to the alignment.  *Matched*
  is the last of them that was seen before, min(block x common blocks, input length) rounded down.  The last token is always
  computed, so a hit on a whole prompt resumes one position earlier; ``hit_rate`` counts what was matched, the difference
  is in ``validation_pass_rate``.
* Segments are kept for the prompt; output tokens are not.  Bytes are those of entries, rows and states, without padding.
* ``full`` stores what every group needs to resume at any position (window rows of all tokens, rows of partial entries);
  what pressure took may be replaced by an exact replay.  ``bounded`` and ``zero-exact`` store neither windows nor partial
  entries and replay tokens instead: one window, or as many as make the rest exact.  A bounded replay is approximate; the
  simulation takes it that everybody asked for that grade, and so reuses what was computed after one.
* Requests run one after the other in the order of arrival and hold their segments while they run; time passes for loads
  only.  One load at a time has the whole bandwidth, the others queue; a request that waits is overtaken by later ones.
  Durable copies are written behind, at no time.
"""

from collections.abc import Callable, Iterable
from typing import Any

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import load_tables
from hybridkv_ref.models import Model
from hybridkv_ref.policy import Policy, load_policy
from hybridkv_ref.recovery import PREFILL, from_model
from hybridkv_ref.request_traces import Request
from hybridkv_ref.sim_cache import Cache
from hybridkv_ref.sim_drain import check_drained
from hybridkv_ref.sim_machine import GroupRows, Machines
from hybridkv_ref.sim_plan import Plan, Planner
from hybridkv_ref.sim_report import Report
from hybridkv_ref.sim_tree import Cell, Node, Tree, positions
from hybridkv_ref.tables import Tables

IO_BANDWIDTH = 25_000_000_000
"""Bytes per second of loads where none is given: about what one PCIe 4.0 x16 link carries (recall)."""


def simulate(
    requests: Iterable[Request],
    model: Model,
    gpu_memory: int,
    disk: int = 0,
    alignment: int | None = None,
    recovery: str = "full",
    io_bandwidth: float = IO_BANDWIDTH,
    policy: Policy | None = None,
) -> Report:
    """Runs ``requests`` (read once, in the order of arrival) and reports what they reused.

    ``gpu_memory`` and ``disk`` are bytes; ``alignment`` is tokens, a multiple of the model's own, which it is by default;
    ``recovery`` is full, bounded or zero-exact; ``io_bandwidth`` is bytes per second. InputError for an argument out of
    range, and what the trace, the tables or the policy raise. Refused, if the tables refuse a row that has to fire.
    """
    simulation = Simulation(model, gpu_memory, disk, alignment, recovery, io_bandwidth, policy)
    for request in requests:
        simulation.arrive(request)
    return simulation.finish()


class Simulation:
    """One run: ``arrive`` each request, then ``finish``. Arguments as for `simulate`."""

    def __init__(
        self,
        model: Model,
        gpu_memory: int,
        disk: int = 0,
        alignment: int | None = None,
        recovery: str = "full",
        io_bandwidth: float = IO_BANDWIDTH,
        policy: Policy | None = None,
        tables: Tables | None = None,
    ) -> None:
        alignment = model.alignment if alignment is None else alignment
        _check_arguments(model, gpu_memory, disk, alignment, io_bandwidth)
        tables = tables or load_tables()
        needs = from_model(model)
        self.policy = policy or load_policy(device_kinds(tables))
        # Only `full` stores what a replay can make again.
        kept = {g.name for g in needs if recovery == "full" or g.miss == PREFILL}
        reserve = int(gpu_memory * self.policy.reserve) if disk else 0
        caps = {f"{kind}.CAP": max(gpu_memory, disk) for kind in tables.kinds}
        constants = {"GPU_CAP": gpu_memory, "RESERVE": reserve, "HOST_CAP": 0, "DISK_CAP": disk, "OBJECT_CAP": 0, "IO_CAP": 1}
        self.machines = Machines(tables, model, [g for g in model.groups if g.name in kept], {**constants, **caps})
        self.tree = Tree(self.machines.groups)
        self.planner = Planner(model, self.machines.groups, recovery, alignment)
        self.cache = Cache(self.machines, self.tree, self.policy, io_bandwidth, disk > 0)
        # What would be evicted last is written first, so that it is there when room gets short.
        self.order = sorted(self.machines.groups, key=lambda g: -self.policy.kinds[g.kind].evict)
        self.model, self.alignment, self.recovery = model, alignment, recovery
        self.gpu_memory, self.disk = gpu_memory, disk
        self.requests = self.input_tokens = self.matched = self.saved = 0
        self.wait_ms = 0.0
        self.limiting = dict.fromkeys((g.group.name for g in self.machines.groups), 0)

    # -- arrival and waiting ------------------------------------------------------------------------------------------------
    def arrive(self, request: Request) -> None:
        """Takes one request in: it runs at once, or when the durable copies that it can use are back."""
        while self.cache.ends_at <= request.arrival_ms:
            self.cache.complete()
        places = list(positions(request, self.alignment))
        keys, cuts = [key for key, _ in places], [cut for _, cut in places]
        common = sum(count for _, count in self.tree.walk(keys))
        matched = cuts[common - 1] if common else 0
        self.requests += 1
        self.input_tokens += request.input_tokens
        self.matched += matched
        self.attempt(_Running(request, keys, cuts, matched), request.arrival_ms, True)

    def attempt(self, running: "_Running", now: float, first: bool) -> None:
        """Runs a request, or asks for its loads (once) and for a call when they are over."""
        if self.disk:
            limit = min(running.matched, running.request.input_tokens - 1)
            left = 0

            def loaded(at: float) -> None:
                nonlocal left
                left -= 1
                if left == 0:
                    self.wait_ms += at - now
                    self.attempt(running, at, False)

            wanted = self.planner.wanted(self.tree.walk(running.keys), limit)
            wanted.sort(key=lambda found: self.policy.kinds[found[0].rows.kind].recover)
            left = sum(self.cache.load(cell, place, first, loaded) for cell, place in wanted)
            if left:
                self.cache.pump(now)
                return
        self.run(running)

    # -- one request ----------------------------------------------------------------------------------------------------------
    def run(self, running: "_Running") -> None:
        """A request from its match to its end."""
        request, keys, cuts = running.request, running.keys, running.cuts
        path = self.tree.walk(keys)
        plan = self.planner.plan(path, min(running.matched, request.input_tokens - 1))
        path = self.cut(path, keys, plan)
        self.saved += plan.s
        for name in plan.limiting:
            self.limiting[name] += 1
        hits = self.begin(request, path, plan)
        common = sum(count for _, count in path)
        if common < len(keys):
            parent = path[-1][0] if path else self.tree.root
            node = self.tree.add(parent, keys[common:], cuts[common:])
            path.append((node, len(node.keys)))
        self.write(path, plan)
        self.end(hits)
        self.cache.touch(path)
        self.cache.measure()

    def cut(self, path: list[tuple[Node, int]], keys: list[int], plan: Plan) -> list[tuple[Node, int]]:
        """Cuts the nodes in which this prompt branches off or its hit ends, and gives the path again."""
        done = 0
        ends = []
        for node, count in path:
            done += count
            if count < len(node.keys) and done < len(keys):
                ends.append((node, count))
            if node.start < plan.frontier < node.cuts[-1]:
                ends.append((node, node.cuts.index(plan.frontier) + 1))
        for node, count in sorted(ends, key=lambda end: -end[1]):
            if count < len(node.keys):
                self.cache.split(node, count)
        return self.tree.walk(keys) if ends else path

    def begin(self, request: Request, path: list[tuple[Node, int]], plan: Plan) -> list[tuple[GroupRows, Any, Any]]:
        """Matches, validates in four layers and reads what the plan names; gives the leases of the hit."""
        if not plan.top:
            self.step("start_cold", request, plan)
            return []
        first = plan.s if plan.frontier == plan.top else plan.top
        self.positions("match", request, plan, first, plan.top)
        if plan.frontier < plan.top:
            self.step("shorten")
            if not plan.frontier:
                self.step("give_up")
                return []
            self.positions("retry", request, plan, plan.s, plan.frontier)
        hits = [(g, segment, self.cache.lease(segment, g.lane.request)) for g, segment in self.pins(path, plan)]
        self.leases(hits, "find", "pin")
        self.step("check")
        self.leases(hits, "pass_l1", "pass_l2")
        self.step("join")
        self.leases(hits, "pass_l4")
        self.step("validate")
        self.leases(hits, "read")
        self.step("start_hit")
        return hits
