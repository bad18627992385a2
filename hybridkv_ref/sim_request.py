"""One request's way through the rows of the hit protocol, in all lanes of the model in step."""

from collections.abc import Iterator
from typing import Any

from hybridkv_ref.compile_py import attribute
from hybridkv_ref.sim_cache import Cache
from hybridkv_ref.sim_machine import GroupRows
from hybridkv_ref.sim_plan import Path, Plan

Lease = tuple[GroupRows, Any, Any]
"""(group, segment, lease)"""


class HitProtocol:
    """Fires the rows of the request records and of their leases; raises Refused for one that does not fire."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.machines = cache, cache.machines

    def begin(self, length: int, matched: int, path: Path, plan: Plan) -> list[Lease]:
        """Runs the hit of a prompt of ``length`` tokens, ``matched`` of them known; gives the leases of what is read.

        The hit is validated in four layers; then the step that reads it is dispatched.
        """
        for g in self.machines.groups:
            # A request record at rest is a new request: what is rigid while it runs is set now.
            g.lane.request.length = length
            setattr(g.lane.request, attribute(f"uses.{g.kind}"), plan.plain or g.prefill)
        if not plan.top:
            self.step("start_cold")
            return []
        self.at("match", plan.s if plan.frontier == plan.top else plan.top, plan.top, matched=matched)
        if plan.frontier < plan.top:
            self.step("shorten")
            if not plan.frontier:
                self.step("give_up")
                return []
            self.at("retry", plan.s, plan.frontier)
        hits = [(g, segment, self.cache.lease(segment, g.lane.request)) for g, segment in self.pins(path, plan)]
        self.leases(hits, "find", "pin")
        self.step("check")
        self.leases(hits, "pass_l1", "pass_l2")
        self.step("join")
        self.leases(hits, "pass_l4")
        self.step("validate")
        self.leases(hits, "read")
        self.step("start_hit")
        self.steps(hits, True)
        return hits

    def pins(self, path: Path, plan: Plan) -> Iterator[tuple[GroupRows, Any]]:
        """The segments that a hit reads, in the order of their positions."""
        for g in self.machines.groups:
            if not (plan.plain or g.prefill):
                continue
            lo, hi, _ = g.need(plan.s, plan.frontier)
            for node, _ in path if lo < hi else ():
                if node.start >= hi:
                    break
                if g.ranged and node.cuts[-1] > lo:
                    yield g, node.cells[g.index].segments[0]
                elif not g.ranged and node.cuts[-1] >= hi:
                    yield g, node.cells[g.index].segments[node.cuts.index(hi)]

    def end(self, hits: list[Lease]) -> None:
        """A request is done: its step has completed, it lets go of what it wrote and read, and closes."""
        self.steps(hits, False)
        self.step("finish")
        self.cache.let_go()
        self.leases(hits, "release")
        self.cache.leases += [lease for _, _, lease in hits]
        self.step("close")

    def step(self, row: str) -> None:
        """Fires one row of the request in every lane."""
        for lane in self.machines.lanes:
            if lane.rows[row](self.machines.pool, lane.request) >= 0:
                self.machines.refuse(lane, f"request.{row}", lane.request)
        self.machines.fired += len(self.machines.lanes)

    def at(self, row: str, s: int, frontier: int, **more: int) -> None:
        """Fires a row that sets the request's two positions, in every lane; ``more`` in the tables' order."""
        for lane in self.machines.lanes:
            bound = frontier - frontier % lane.world.machine.constants["RATIO"]
            if lane.rows[row](self.machines.pool, lane.request, s, frontier, bound, *more.values()) >= 0:
                self.machines.refuse(lane, f"request.{row}", lane.request, s=s, f=frontier, bound=bound, **more)
        self.machines.fired += len(self.machines.lanes)

    def leases(self, hits: list[Lease], *rows: str) -> None:
        """Fires rows of every lease of a hit, one lease after the other."""
        pool = self.machines.pool
        for g, segment, lease in hits:
            for row in rows:
                if g.rows[row](pool, segment, lease, g.lane.request) >= 0:
                    self.machines.refuse(g.lane, g.events[row].id, segment, lease, g.lane.request)
        self.machines.fired += len(hits) * len(rows)

    def steps(self, hits: list[Lease], begins: bool) -> None:
        """The step that reads a hit is dispatched, or completes, on every segment that a step attends."""
        pool = self.machines.pool
        for g, segment, lease in hits:
            row = g.rows.get("dispatch" if begins else "complete")
            if row is None:
                continue
            inputs = {"upto": segment.end} if begins else {}
            if row(pool, segment, lease, g.lane.request, *inputs.values()) >= 0:
                event = g.events["dispatch" if begins else "complete"]
                self.machines.refuse(g.lane, event.id, segment, lease, g.lane.request, **inputs)
            self.machines.fired += 1
