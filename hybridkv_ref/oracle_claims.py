"""What events claim outright: tables, positions, ranks, waits, graphs, declarations, admission, rest."""

from typing import Any

from hybridkv_ref.events import (
    Admit,
    Capture,
    Decide,
    Drain,
    Epoch,
    Position,
    Register,
    Replay,
    Run,
    TableWrite,
    Wait,
)
from hybridkv_ref.oracle_state import State
from hybridkv_ref.oracle_steps import Steps

DECISIONS = 4096
"""Places of the ranks' sequences at which a first decision is remembered; a rank does not lag behind further."""


class Claims:
    """Events whose judgement is one row over what the event itself says, and what the oracle noted before."""

    def __init__(self, state: State, steps: Steps) -> None:
        self.state, self.steps = state, steps
        names = (
            "table_write",
            "position",
            "decide",
            "wait",
            "run",
            "capture",
            "replay",
            "epoch",
            "register",
            "admit",
            "drain",
        )
        self.on = {name: state.bind(name) for name in names}
        self.graphs: dict[str, Any] = {}
        self.effects: dict[str, frozenset[str]] = {}
        self.decisions: dict[int, Decide] = {}
        self.waits: dict[str, set[str]] = {}
        self.dirty_null = False
        self.new_graph = state.code.maker("graph")

    def table_write(self, e: TableWrite) -> None:
        """A block table: the type of its indices, its columns, whether its buffer is free, the window's outside."""
        state, other, g = self.state, self.on["table_write"].other, self.state.named(e.group)
        request = state.request(e.req)
        kind = (e.space == "group", e.space == "kernel", g.spec.kernel_blocks)
        state.fire(other["column_type"], *kind, segment=e.group)
        if e.unit >= 0:
            state.fire(other["column_unit"], e.unit, g.spec.block, segment=e.group)
        if e.columns >= 0:
            state.fire(other["index_inside"], e.index + max(len(e.blocks), 1) - 1, e.columns, segment=e.group)
        last, idle = request.table_versions.get(e.group, (-1, True))
        state.fire(other["table_idle"], e.version, last, int(not idle), segment=e.group)
        if e.version >= 0:
            request.table_versions[e.group] = (e.version, e.copied)
        if e.at >= 0 and g.spec.window:
            low = g.low(e.at)
            for place, number in enumerate(e.blocks):
                upto, null = (e.index + place + 1) * g.spec.block, number == state.header.null
                state.fire(other["outside_is_null"], upto, low, null, segment=(e.group, number))

    def position(self, e: Position) -> None:
        """Positions of groups against that of the request, truncations, shifts, what a state takes next."""
        state, other = self.state, self.on["position"].other
        for name, at in e.groups.items():
            if e.next >= 0:
                state.fire(other["applied_once"], e.next, at, segment=(name, e.req))
            elif e.at >= 0:
                state.fire(other["same_position"], e.at, at, segment=(name, e.req))
        if e.next >= 0 and e.at >= 0 and not e.groups:
            state.fire(other["applied_once"], e.next, e.at, segment=e.req)
        if e.asked >= 0 and e.at >= 0:
            state.fire(other["truncated"], e.at, e.asked, segment=e.req)
        if e.shift or e.data:
            state.fire(other["shifted"], e.shift, e.data, segment=e.req)

    def decide(self, e: Decide) -> None:
        """The first rank's decision at a place is everybody's."""
        first = self.decisions.setdefault(e.seq, e)
        if first is not e:
            self.state.fire(self.on["decide"].other["same_decision"], first.what == e.what, segment=f"rank {e.rank}")
        if len(self.decisions) > DECISIONS:
            del self.decisions[next(iter(self.decisions))]

    def wait(self, e: Wait) -> None:
        """Who waits for whom: never for nobody, never in a circle."""
        if e.ended:
            self.waits.pop(e.who, None)
            return
        other = self.on["wait"].other
        gone = [name for name in e.on if name in self.state.ended]
        if not self.state.fire(other["someone_moves"], len(e.on) - len(gone), segment=e.who):
            return
        self.waits[e.who] = set(e.on)
        seen, todo = set[str](), list(e.on)
        while todo:
            name = todo.pop()
            if name not in seen:
                seen.add(name)
                todo += self.waits.get(name, ())
        if not self.state.fire(other["no_circle"], e.who in seen, segment=e.who):
            del self.waits[e.who]

    def run(self, e: Run) -> None:
        """A job on the pipeline of its kind."""
        self.state.fire(self.on["run"].other["own_pipeline"], e.work in e.serves, segment=e.pipeline)

    def graph(self, name: str) -> Any:
        """The graph of this name, which nobody captured if it was never named."""
        if name not in self.graphs:
            self.graphs[name] = self.new_graph()
        return self.graphs[name]

    def capture(self, e: Capture) -> None:
        """Topology is frozen; what an older capture froze is gone."""
        state, other = self.state, self.on["capture"].other
        graph = self.graph(e.graph)
        for row in ("invalidate", "discard_graph"):
            if state.legal(other[row], graph):
                state.fire(other[row], graph, segment=e.graph)
        state.fire(other["capture" if state.legal(other["capture"], graph) else "recapture"], graph, segment=e.graph)
        self.effects[e.graph] = frozenset(e.effects)
        self.dirty_null = self.dirty_null or e.null
        for name, numbers in e.blocks.items():
            g = state.named(name)
            warm_up = self.on["capture"].group[g.index]["warm_up"]
            for number in numbers:
                block = state.block(state.device, g, number) if number != state.header.null else None
                if block is not None and not state.fire(warm_up, block.segment, segment=(name, number)):
                    state.lose(state.device, g, block)

    def replay(self, e: Replay) -> None:
        """Contents are set, then the graph runs, with padding at the null slot, current tables and captured effects."""
        state, other = self.state, self.on["replay"].other
        graph = self.graph(e.graph)
        state.fire(other["null_clean"], self.dirty_null, segment=e.graph)
        missing = frozenset(e.effects) - self.effects.get(e.graph, frozenset())
        state.fire(other["effects_captured"], len(missing), segment=e.graph)
        if e.written >= 0:
            state.fire(other["rows_written"], e.written, e.live + len(e.padding), segment=e.graph)
        for name, version in e.versions.items():
            # Which requests the replay serves is not told: any one's table will do.
            held = [r.table_versions[name][0] for r in state.requests.values() if name in r.table_versions]
            if held:
                current = version if version in held else max(held)
                state.fire(other["tables_current"], version, current, segment=name)
        padded = all(slot == state.header.null for slot in e.padding)
        if state.legal(other["set_contents"], graph, padded):
            state.fire(other["set_contents"], graph, padded, segment=e.graph)
        if state.fire(other["replay"], graph, segment=e.graph):
            if e.step:
                self.steps.replays.setdefault(e.step, []).append(graph)
            else:
                state.fire(other["replayed"], graph, segment=e.graph)

    def epoch(self, e: Epoch) -> None:
        """Weights, topology, or an adapter under its old name."""
        state, other = self.state, self.on["epoch"].other
        match e.what:
            case "model":
                for tier in state.tiers.values():
                    state.fire(other["new_model"], pool=tier.pool)
            case "topology":
                state.fire(other["rebase"], segment="topology")
            case _:
                state.epochs[e.what, e.name] += 1

    def register(self, e: Register) -> None:
        """Declarations before serving."""
        state, other = self.state, self.on["register"].other
        match e.what:
            case "unit":
                units = [g.spec.block for g in state.groups if g.spec.reuse]
                rest = sum(1 for unit in units if not e.value or e.value % unit)
                state.fire(other["unit_not_refused" if e.refused else "common_unit"], rest)
            case "tier":
                if not e.refused:
                    state.fire(other["has_path"], e.value, segment=e.side)
            case "pool":
                state.fire(other["pool_serves"], e.value, e.least, segment=e.group)
                if e.sized or e.addressed:
                    state.fire(other["sized_as_addressed"], e.sized, e.addressed, segment=e.group)
            case "window":
                self.steps.windows[e.layer] = e.value
            case "stride":
                state.strides[e.group] = e.value
            case "address":
                state.fire(other["aligned_address"], e.value % max(e.least, 1), segment=e.side)

    def admit(self, e: Admit) -> None:
        """The gate against the sizing, an empty pool, the null block, and all-or-nothing staging."""
        state, other = self.state, self.on["admit"].other
        request = state.request(e.req)
        request.refused.discard(e.staging)
        if not e.granted:
            request.refused.add(e.staging)
        if e.sized >= 0:
            state.fire(other["one_formula"], e.need, e.sized, segment=e.req)
        if e.usable >= 0:
            state.fire(other["fits_at_all"], e.granted, e.need, e.usable, segment=e.req)
            if e.empty:
                state.fire(other["fits_empty"], e.granted, e.need, e.usable, segment=e.req)
        if e.got >= 0:
            state.fire(other["all_or_nothing"], e.got, e.need, segment=e.req)
        if e.room >= 0 and e.staging:
            state.fire(other["room_counts"], e.granted, e.need, e.room, segment=e.req)

    def drain(self, e: Drain) -> None:
        """Every block of every tier is at rest."""
        state = self.state
        for tier in state.tiers.values():
            for g in state.groups:
                row = self.on["drain"].group[g.index]["at_rest"]
                for block in tier.blocks[g.index].values():
                    if not state.fire(
                        row, block.segment, segment=f"{tier.name}:{g.spec.name}:{block.number}", pool=tier.pool
                    ):
                        state.lose(tier, g, block)
