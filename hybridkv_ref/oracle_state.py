"""What the oracle knows: blocks of each tier, requests, and the rows that may be fired for each event.

Every judgement is a row of the tables: ``State.fire`` and the compiled rows of a ``Bound``. This module keeps the
books: which entity an event means, what the slots hold. What it was not told it does not judge: a block or request of
which a row was refused is *lost*, and nothing about it is judged until it is taken anew.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from hybridkv_ref.compile_py import attribute
from hybridkv_ref.errors import InputError
from hybridkv_ref.event_map import load_event_map, row_name
from hybridkv_ref.events import DEVICE, GroupSpec, Header
from hybridkv_ref.machine import Compiled, Machine, Value, World
from hybridkv_ref.models import load_model
from hybridkv_ref.oracle_tables import kind_name, oracle_tables
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import Group, cache_group, entries
from hybridkv_ref.tables import Tables

UNTOLD = 1 << 60
"""The value of a limit that nobody told."""

Place = str | tuple[str, int | str]
"""What a row was about, for a message: a name, or a group and a block, put together only when it is needed."""

SPARE = 4096
"""How many records of empty blocks are kept to be used again, per group and tier."""

REMEMBERED = 65536
"""How many ended requests are remembered, to see that none ends twice."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """A row that the tables refuse: event (1 is the first after the header), row, false guard, the values it saw."""

    index: int
    event: str
    row: str
    rules: tuple[str, ...]
    segment: str
    guard: str
    values: Mapping[str, Value]

    def __str__(self) -> str:
        shown = ", ".join(f"{n}={v}" for n, v in self.values.items())
        where = f" {self.segment}" if self.segment else ""
        return f"event {self.index} ({self.event}){where}: {self.row} refused by '{self.guard}' with {shown}"


@lru_cache(maxsize=64)
def machine_of(tables: Tables, constants: tuple[tuple[str, int], ...]) -> Machine:
    """The tables compiled for these constants, once: worlds of one machine share its code."""
    return Machine(tables, dict(constants))


@lru_cache(maxsize=1024)
def maker(machine: Machine, cls: str, kind: str, rigid: tuple[str, ...] = ()) -> Callable[..., Any]:
    """A function that makes entities in their first stage, outside any list, by straight-line code.

    Its keyword arguments are the rigid variables that it sets.
    """
    variables = machine.tables.vars_of(cls, kind)
    first: dict[str, Any] = {"cls": cls, "kind": kind, "name": kind or cls}
    first |= {attribute(n): v.init for n, v in variables.items()}
    names = {attribute(n) for n in rigid}
    lines = [f"def make({', '.join(sorted(names))}):", " e = new()", " e.refs = nothing"]
    lines += [f" e.{n} = {n if n in names else repr(v)}" for n, v in first.items()]
    space: dict[str, Any] = {"new": machine.types[cls, kind], "nothing": {}}
    exec("\n".join([*lines, " return e"]), space)
    made: Callable[..., Any] = space["make"]
    return made


class Block:
    """A block of one group in one tier: its segment, what its slots were last written with, who refers to it.

    ``tokens`` and ``domain`` identify the content (0: not told): equal numbers, equal prefix and equal other inputs.
    """

    __slots__ = ("domain", "key", "leases", "number", "owner", "segment", "tokens", "writer")

    def __init__(self, number: int, segment: Any) -> None:
        self.number, self.segment = number, segment
        self.tokens = self.domain = 0
        self.leases: dict[int, Any] = {}
        self.writer: Request | None = None
        self.owner: Request | None = None
        self.key = ""


class Request:
    """A request's life: its record in the tables, the identity of its tokens, where it is."""

    __slots__ = (
        "at", "chain", "domain", "drafts", "grade", "held", "length", "life", "lost", "name", "positions",
        "record", "running", "table_versions", "uid", "unit", "votes",
    )  # fmt: skip

    def __init__(self, name: str, uid: int, record: Any, length: int, unit: int) -> None:
        self.name, self.uid, self.record, self.length, self.unit = name, uid, record, length, unit
        self.chain: list[int] = []
        self.domain = self.drafts = self.at = self.life = self.held = 0
        self.lost = self.running = False
        self.grade = "exact"
        self.votes: dict[int, int] = {}
        self.table_versions: dict[str, tuple[int, bool]] = {}
        self.positions: dict[str, int] = {}

    def extend(self, ids: list[int]) -> None:
        """Goes on with these ids: each hash stands for everything up to its end."""
        before = self.chain[-1] if self.chain else 0
        for number in ids:
            before = hash((before, number)) or 1
            self.chain.append(before)

    def content(self, end: int) -> int:
        """What stands for the tokens [0, end); own to this request where it was not told; 0 if nothing was told."""
        if not self.chain:
            return 0
        count = -(-end // self.unit)
        if count > len(self.chain):
            return hash((self.uid, end, "own")) or 1
        last = self.chain[count - 1]
        return last if end == count * self.unit else hash((last, end)) or 1


@dataclass(slots=True)
class GroupState:
    """One cache group: its description, kind in the tables, what it needs to resume, and rows by event and name."""

    index: int
    spec: GroupSpec
    kind: str
    need: Group
    covers: str
    states: bool

    def low(self, position: int) -> int:
        """First position that computing from ``position`` on still needs."""
        return self.need.need(position, position)[0]


class Row:
    """A compiled row as the oracle fires it: ``call(pool, *entities, *inputs)``, and how often it was fired."""

    __slots__ = ("call", "count", "event", "name")

    def __init__(self, compiled: Compiled) -> None:
        self.call, self.event, self.name, self.count = compiled.call, compiled.event, row_name(compiled.event), 0


@dataclass(slots=True)
class Tier:
    """One tier: its machine (for its caps), pool, blocks of each group by number, and numbers that are lost."""

    name: str
    machine: Machine
    pool: Any
    blocks: list[dict[int, Block]]
    lost: list[set[int]]
    segment: list[Any]
    spare: list[list[Block]]
    rows: list[tuple[str, Row]]


@dataclass(slots=True)
class Bound:
    """The rows that one event may fire: of each group's blocks, of everything else, by row name."""

    group: list[dict[str, Row]]
    other: dict[str, Row]


def group_specs(header: Header, spec: Path = SPEC_DIR) -> tuple[GroupSpec, ...]:
    """The groups of a trace: those of its header, else those of its model; InputError where neither says any."""
    if header.groups:
        return header.groups
    if header.model is None:
        raise InputError("header: neither groups nor a model")
    model = load_model(header.model, spec)
    return tuple(
        GroupSpec(g.name, g.kind, g.block_tokens or model.alignment, g.ratio or 1, g.halo or 0, g.span or 0)
        for g in model.groups
    )


@dataclass
class State:
    """Everything that the oracle knows. ``hidden`` counts the rows of hidden steps."""

    header: Header
    spec: Path = SPEC_DIR
    index: int = 0
    event: str = ""
    refusals: list[Refusal] = field(default_factory=list)
    failed: set[str] = field(default_factory=set)
    hidden: int = 0
    peak: int = 1
    skipped: int = 0

    def __post_init__(self) -> None:
        specs = group_specs(self.header, self.spec)
        self.tables: Tables = oracle_tables(specs, self.spec)
        self.map = load_event_map(self.spec)
        self.claims = frozenset(self.header.capabilities)
        for claim in self.claims - self.map.capabilities.keys():
            raise InputError(
                f"header: capabilities: no capability '{claim}' (known: {', '.join(self.map.capabilities)})"
            )
        rows = {e.row for e in self.tables.events}
        needs = entries(self.spec)[1]
        self.groups = [
            self._group(i, g, rows, needs[g.kind].params if g.kind in needs else ()) for i, g in enumerate(specs)
        ]
        self.by_name = {g.spec.name: g for g in self.groups}
        self.tiers: dict[str, Tier] = {}
        self.device = self.tier(DEVICE)
        self.machine, self.pool = self.device.machine, self.device.pool
        per_kind = [f"{n}.{g.kind}" for g in self.groups for n in ("group", "ahead", "abi", "uses")]
        self._record = maker(self.machine, "request", "", ("id", "length", "kernel", *per_kind))
        self._rigid = {attribute(n): 0 for n in per_kind}
        for g in self.groups:
            self._rigid |= {attribute(f"group.{g.kind}"): g.index, attribute(f"ahead.{g.kind}"): g.spec.ahead}
            self._rigid[attribute(f"uses.{g.kind}")] = g.spec.reuse
        self.lease = maker(self.machine, "lease", "")
        self.requests: dict[str, Request] = {}
        self.ended: OrderedDict[str, int] = OrderedDict()
        self.epochs: Counter[tuple[str, str]] = Counter()
        self.uids = 0
        self.strides: dict[str, int] = {}
        units = [g.spec.block for g in self.groups if g.spec.reuse]
        self.alignment = self.header.alignment or math.lcm(*units)
        self.unit = self.header.unit or math.gcd(*units) or 1
        self.names = World(self.machine)
        self.names.pool = self.pool

    def _group(self, index: int, spec: GroupSpec, rows: set[str], params: tuple[str, ...]) -> GroupState:
        if spec.block < 1:
            raise InputError(f"header: groups.{spec.name}.block: expected at least 1 token, got {spec.block}")
        geometry = {"ratio": spec.ratio, "halo": spec.halo, "window": spec.window}
        need = cache_group(spec.name, spec.kind, spec.block, {p: geometry[p] for p in params}, self.spec)
        covers = f"covers_{spec.kind}" if f"covers_{spec.kind}" in rows else "covers"
        return GroupState(index, spec, kind_name(spec.name), need, covers, need.exact and need.miss == "prefill")

    def tier(self, name: str) -> Tier:
        """The tier of this name; made with its caps when first named."""
        if name not in self.tiers:
            limits, constants = self.header.limits, dict.fromkeys(self.tables.constants, UNTOLD)
            constants |= {"RESERVE": 0, "RATIO": 1, "HALO": 0, "PROBE": -1}
            constants |= {"IN_ORDER": int("in_order" in self.claims)}
            if limits.pipeline:
                constants["PIPELINE"] = limits.pipeline
            if limits.preempts:
                constants["MAX_PREEMPTS"] = limits.preempts
            for g in self.groups:
                cap = g.spec.capacity - 1 if name == DEVICE and g.spec.capacity else limits.tiers.get(name, 0)
                constants[f"{g.kind}.CAP"] = cap or UNTOLD
                constants[f"{g.kind}.UNIT"], constants[f"{g.kind}.ENTRY"] = g.spec.block, int(not g.states)
            known = tuple((n, v) for n, v in constants.items() if n in self.tables.constants)
            machine = machine_of(self.tables, known)
            made = [maker(machine, "segment", g.kind, ("group",)) for g in self.groups]
            pool = World(machine).pool
            if name != DEVICE:
                pool.model_epoch = self.pool.model_epoch
            rows = [
                (c.event.kinds.get("self") or c.event.kinds.get("dst", ""), Row(c)) for c in machine.events.values()
            ]
            self.tiers[name] = Tier(
                name, machine, pool, [{} for _ in made], [set() for _ in made], made, [[] for _ in made], rows
            )
        return self.tiers[name]

    def bind(self, event: str, tier: str = DEVICE) -> Bound:
        """The rows that an event of this form may fire, and no others."""
        allowed = self.map.rows[event]
        group: list[dict[str, Row]] = [{} for _ in self.groups]
        other: dict[str, Row] = {}
        kinds = {g.kind: g.index for g in self.groups}
        for kind, row in self.tier(tier).rows:
            if row.name in allowed:
                if kind:
                    group[kinds[kind]][row.name] = row
                else:
                    other[row.name] = row
        return Bound(group, other)

    # -- entities --------------------------------------------------------------------------------------------------

    def new_record(self, uid: int, length: int, kernel: bool = True) -> Any:
        """A request's record in its first stage."""
        return self._record(id=uid, length=length, kernel=kernel, **self._rigid)

    def request(self, name: str) -> Request:
        """The request of this name; one that never arrived is of unknown tokens and unknown length."""
        found = self.requests.get(name)
        return found if found is not None else self.arrive(name, UNTOLD)

    def arrive(self, name: str, length: int, kernel: bool = True) -> Request:
        """A new life of this name."""
        self.uids += 1
        made = Request(name, self.uids, self.new_record(self.uids, length, kernel), length, self.unit)
        made.life = self.ended.pop(name, -1) + 1
        self.requests[name] = made
        return made

    def forget(self, request: Request) -> None:
        """A life is over and holds nothing."""
        del self.requests[request.name]
        self.ended[request.name] = request.life
        if len(self.ended) > REMEMBERED:
            self.ended.popitem(last=False)

    def block(self, tier: Tier, group: GroupState, number: int) -> Block | None:
        """The block of this number, empty if it was never named; None if it is lost."""
        found = tier.blocks[group.index].get(number)
        if found is None:
            if number in tier.lost[group.index]:
                self.skipped += 1
                return None
            spare = tier.spare[group.index]
            if spare:
                found = spare.pop()
                found.number = number
            else:
                found = Block(number, tier.segment[group.index](group=group.index))
            tier.blocks[group.index][number] = found
        return found

    def rest(self, tier: Tier, group: GroupState, block: Block) -> None:
        """An empty block of which nobody knows: its record may stand for another one."""
        if tier.blocks[group.index].pop(block.number, None) is block and len(tier.spare[group.index]) < SPARE:
            block.tokens = block.domain = 0
            block.key = ""
            tier.spare[group.index].append(block)

    def lose(self, tier: Tier, group: GroupState, block: Block) -> None:
        """Nothing about this block is judged any more until it is taken anew."""
        tier.blocks[group.index].pop(block.number, None)
        tier.lost[group.index].add(block.number)

    def named(self, name: str) -> GroupState:
        """The group of this name; InputError where the header has none."""
        try:
            return self.by_name[name]
        except KeyError:
            raise InputError(f"no group '{name}' in the header (known: {', '.join(self.by_name)})") from None

    # -- judging ---------------------------------------------------------------------------------------------------

    def fire(self, row: Row, *arguments: Any, segment: Place = "", pool: Any = None) -> bool:
        """Fires a row; False, with a refusal noted, where a guard is false."""
        row.count += 1
        index = row.call(self.pool if pool is None else pool, *arguments)
        if index < 0:
            return True
        self.refuse(row, index, arguments, segment, pool)
        return False

    def fire_all(self, rows: Mapping[str, Row], checks: Iterable[tuple[str, tuple[int, ...]]], segment: Place) -> bool:
        """Fires each of these rows with its inputs, also after one was refused; whether all were legal."""
        results = [self.fire(rows[row], *values, segment=segment) for row, values in checks]
        return all(results)

    def fired(self) -> Counter[str]:
        """How often each row was fired, by name."""
        found: Counter[str] = Counter()
        for tier in self.tiers.values():
            for _, row in tier.rows:
                if row.count:
                    found[row.name] += row.count
        return found

    def refuse(self, row: Row, index: int, arguments: tuple[Any, ...], segment: Place, pool: Any = None) -> None:
        """Notes a refusal."""
        event, where = row.event, segment if isinstance(segment, str) else f"{segment[0]}:{segment[1]}"
        guard, count = event.guards[index], len(event.roles)
        inputs = dict(zip(event.inputs, arguments[count:], strict=True))
        self.names.pool = self.pool if pool is None else pool
        values = self.names.values(guard.expr, event, arguments[:count], inputs)
        self.failed.update(self.map.broken(event, guard))
        self.refusals.append(
            Refusal(self.index, self.event, event.id, self.map.broken(event, guard), where, guard.text, values)
        )
