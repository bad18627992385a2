"""A trace of requests, run through the table machines of every cache group of a model.

Every change of a segment is a row of the tables: what a request computes is admitted, appended and committed; what it
reuses is matched, pinned, checked in four layers, read and released; pressure retires and frees; a store is written to
and loaded from. Bookkeeping is the prefix tree, the order of last use and the simulated clock, no more.

What is simulated:

* A prompt's blocks become *positions* at which a hit may end: where a block ends, rounded down to the alignment.
  *Matched* is the last of them that was seen before: min(block x common blocks, input length), rounded down. The last
  token is always computed, so a hit on a whole prompt resumes one position earlier; ``hit_rate`` counts what was
  matched, the difference is in ``validation_pass_rate``.
* Segments are kept for the prompt; output tokens are not. Bytes are those of entries, rows and states, unpadded.
* ``full`` stores what every group needs to resume at any position: window rows of all tokens, rows of partial entries;
  what pressure took, an exact replay may replace. ``bounded`` and ``zero-exact`` store neither windows nor partial
  entries and replay tokens instead: one window, or as many as make the rest exact. A bounded replay is approximate;
  here everybody is taken to ask for that grade, so that what was computed after one is reused.
* Requests run one after the other in the order of arrival and hold their segments while they run; time passes for loads
  only. One load at a time has the whole bandwidth, the others queue; a request that waits is overtaken by later ones.
  Durable copies are written behind, at no time.
* A range of tokens is kept as a whole or not at all; what finds no room is not kept, and the request runs on.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from hybridkv_ref.collector import collector_paused
from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import load_tables
from hybridkv_ref.models import Model
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.policy import Policy, load_policy
from hybridkv_ref.recovery import PREFILL, entries, from_model
from hybridkv_ref.request_traces import Request
from hybridkv_ref.sim_cache import Cache, Hole
from hybridkv_ref.sim_drain import check_drained
from hybridkv_ref.sim_machine import GroupRows, Machines
from hybridkv_ref.sim_plan import Plan, Planner
from hybridkv_ref.sim_report import Report
from hybridkv_ref.sim_request import HitProtocol
from hybridkv_ref.sim_store import Store
from hybridkv_ref.sim_tree import Node, Tree, positions

IO_BANDWIDTH = 25_000_000_000
"""Bytes per second of loads where none is given: about what one PCIe 4.0 x16 link carries (recall)."""


@dataclass(frozen=True, slots=True)
class _Running:
    """A request that arrived: its positions by key, and how many tokens of it had been seen before then."""

    request: Request
    keys: list[int]
    cuts: list[int]
    matched: int


def simulate(
    requests: Iterable[Request],
    model: Model,
    gpu_memory: int,
    disk: int = 0,
    alignment: int | None = None,
    recovery: str = "full",
    io_bandwidth: float = IO_BANDWIDTH,
    policy: Policy | None = None,
    spec: Path = SPEC_DIR,
) -> Report:
    """Runs ``requests`` (read once, in the order of arrival) and reports what they reused.

    ``gpu_memory`` and ``disk`` are bytes; ``alignment`` is tokens, a multiple of the model's own, which is the default;
    ``recovery`` is full, bounded or zero-exact; ``io_bandwidth`` is bytes per second. ``spec`` is the folder of tables,
    recovery.toml and, unless ``policy`` is given, policy.toml. InputError for an argument out of range, and what the
    trace or the spec raise; Refused if the tables refuse a row that has to fire; NotDrainedError if something is not at
    rest in the end.
    """
    simulation = Simulation(model, gpu_memory, disk, alignment, recovery, io_bandwidth, policy, spec)
    with collector_paused():
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
        spec: Path = SPEC_DIR,
    ) -> None:
        alignment = model.alignment if alignment is None else alignment
        _check_arguments(model, gpu_memory, disk, alignment, io_bandwidth)
        tables, needs = load_tables(spec), from_model(model, spec)
        self.policy = policy or load_policy(device_kinds(spec), spec)
        # Only `full` stores what a replay can make again.
        kept = {g.name for g in needs if recovery == "full" or g.miss == PREFILL}
        reserve = int(gpu_memory * self.policy.reserve) if disk else 0
        caps = {f"{kind}.CAP": max(gpu_memory, disk) for kind in tables.kinds}
        media = {"HOST_CAP": 0, "DISK_CAP": disk, "OBJECT_CAP": 0}
        constants = {"GPU_CAP": gpu_memory, "RESERVE": reserve, "IO_CAP": 1, **media, **caps}
        self.machines = Machines(tables, model, needs, [g for g in model.groups if g.name in kept], constants)
        self.tree = Tree(self.machines.groups)
        self.planner = Planner(model, needs, self.machines.groups, recovery, alignment)
        self.cache = Cache(self.machines, self.tree, self.policy)
        self.protocol = HitProtocol(self.cache)
        self.store = Store(self.cache, io_bandwidth)
        self.cache.spill = self.store.spill if disk else None
        # What would be evicted last is written first: nothing that comes later displaces it.
        self.order = sorted(self.machines.groups, key=lambda g: -self.policy.kinds[g.kind].evict)
        self.model, self.alignment, self.recovery = model, alignment, recovery
        self.gpu_memory, self.disk = gpu_memory, disk
        self.requests = self.input_tokens = self.matched = self.saved = 0
        self.wait_ms = 0.0
        self.limiting = dict.fromkeys((g.group.name for g in self.machines.groups), 0)

    # -- arrival and waiting -----------------------------------------------------------------------------------------
    def arrive(self, request: Request) -> None:
        """Takes one request in: it runs at once, or when the durable copies that it can use are back."""
        while self.store.ends_at <= request.arrival_ms:
            self.store.complete()
        places = list(positions(request, self.alignment))
        keys, cuts = [key for key, _ in places], [cut for _, cut in places]
        common = sum(count for _, count in self.tree.walk(keys))
        matched = cuts[common - 1] if common else 0
        self.requests += 1
        self.input_tokens += request.input_tokens
        self.matched += matched
        self.attempt(_Running(request, keys, cuts, matched), request.arrival_ms, True)

    def attempt(self, running: _Running, now: float, first: bool) -> None:
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
            left = sum(self.store.load(cell, place, first, loaded) for cell, place in wanted)
            if left:
                self.store.pump(now)
                return
        self.run(running)

    # -- one request -------------------------------------------------------------------------------------------------
    def run(self, running: _Running) -> None:
        """A request from its match to its end."""
        request, keys, cuts = running.request, running.keys, running.cuts
        path = self.tree.walk(keys)
        plan = self.planner.plan(path, min(running.matched, request.input_tokens - 1))
        path = self.cut(path, keys, plan)
        self.saved += plan.s
        for name in plan.limiting:
            self.limiting[name] += 1
        hits = self.protocol.begin(request.input_tokens, running.matched, path, plan)
        common = sum(count for _, count in path)
        if common < len(keys):
            parent = path[-1][0] if path else self.tree.root
            node = self.tree.add(parent, keys[common:], cuts[common:])
            path.append((node, len(node.keys)))
        self.cache.touch(path)
        # A group stops when room is short; the others go on, in the order in which the policy holds on to them.
        for g in self.order:
            self.cache.write(g, self.holes(g, path, plan.frontier))
        self.protocol.end(hits)
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

    def holes(self, g: GroupRows, path: list[tuple[Node, int]], frontier: int) -> Iterator[Hole]:
        """Places of one group on a path, from the frontier on, that hold nothing and should."""
        every = self.policy.kinds[g.kind].snapshots == "every"
        for node, count in path:
            cell, last = node.cells[g.index], len(node.keys) - 1
            if node.cuts[-1] < frontier or count <= last:
                continue
            if g.ranged:
                if node.start >= frontier and cell.segments[0] is None:
                    yield cell, 0, node.start, node.cuts[-1], 0
                continue
            for place in range(0 if every else last, count):
                cut = node.cuts[place]
                if cut >= frontier and cell.segments[place] is None:
                    lo, boundary = g.extent(cut)
                    if lo < cut:
                        yield cell, place, lo, cut, boundary

    # -- the end of the run ------------------------------------------------------------------------------------------
    def finish(self) -> Report:
        """Ends all loads, checks that everything is at rest, empties the cache by rows and reports."""
        while self.store.running:
            self.store.complete()
        report = self.report()
        check_drained(self.cache, self.store)
        return report

    def report(self) -> Report:
        """The figures so far."""
        cache, store, matched, inputs = self.cache, self.store, self.matched, self.input_tokens
        hit_rate = matched / inputs if inputs else 0.0
        pass_rate = self.saved / matched if matched else 1.0
        return Report(
            model=self.model.name,
            recovery=self.recovery,
            alignment=self.alignment,
            gpu_memory=self.gpu_memory,
            disk=self.disk,
            requests=self.requests,
            input_tokens=inputs,
            hit_tokens=matched,
            saved_tokens=self.saved,
            recomputed_tokens=matched - self.saved,
            hit_rate=hit_rate,
            validation_pass_rate=pass_rate,
            composite=hit_rate * pass_rate,
            load_bytes=store.load_bytes,
            load_wait_ms=self.wait_ms,
            limiting={name: count for name, count in self.limiting.items() if count},
            peak_bytes=dict(cache.peak),
            evictions=dict(cache.evictions),
            spills=store.spilled,
            reloads=store.reloaded,
            rows_fired=self.machines.fired,
        )


def device_kinds(spec: Path = SPEC_DIR) -> dict[str, bool]:
    """The kinds with device copies, and whether each resumes at exact positions only: what a policy has to rank."""
    needs = entries(spec)[1]
    return {k: needs[k].exact for k, kind in load_tables(spec).kinds.items() if "device" in kind.capabilities}


def _check_arguments(model: Model, gpu_memory: int, disk: int, alignment: int, io_bandwidth: float) -> None:
    if gpu_memory < 1:
        raise InputError(f"simulate:gpu_memory: expected at least 1 byte, got {gpu_memory}")
    if disk < 0:
        raise InputError(f"simulate:disk: expected at least 0 bytes, got {disk}")
    if not io_bandwidth > 0:
        raise InputError(f"simulate:io_bandwidth: expected more than 0 bytes per second, got {io_bandwidth}")
    if alignment < 1 or alignment % model.alignment:
        reason = f"expected a multiple of the {model.alignment} tokens of {model.name}, got {alignment}"
        raise InputError(f"simulate:alignment: {reason}")
