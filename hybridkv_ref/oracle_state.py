"""What the oracle knows: blocks of each tier, requests, and the rows that may be fired for each event.

Every judgement is a row of the tables: ``State.fire`` and the compiled rows of a ``Bound``. This module keeps the
books: which entity an event means, what the slots hold. What it was not told it does not judge: a block or request of
which a row was refused is *lost*, and nothing about it is judged until it is taken anew.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hybridkv_ref.errors import InputError
from hybridkv_ref.event_map import load_event_map, row_name
from hybridkv_ref.events import DEVICE, GroupSpec, Header
from hybridkv_ref.models import load_model
from hybridkv_ref.oracle_choices import Choices
from hybridkv_ref.oracle_code import PART, code_of
from hybridkv_ref.oracle_entities import Makers, Record
from hybridkv_ref.oracle_records import (
    REMEMBERED,
    UNTOLD,
    Block,
    Bound,
    GroupState,
    Place,
    Refusal,
    Request,
)
from hybridkv_ref.oracle_row import Row
from hybridkv_ref.oracle_tables import kind_name, oracle_tables
from hybridkv_ref.oracle_tiers import Numbered, Tier
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import entries, group_of
from hybridkv_ref.tables import Tables


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


class State:
    """Everything that the oracle knows. ``hidden`` counts the rows of hidden steps."""

    # Slots, because the interpreter looks up methods of larger objects anew at every call.
    __slots__ = (
        "_part", "_record", "alignment", "books", "by_name", "choices", "claims", "code", "device", "ended", "epochs",
        "event", "failed", "groups", "header", "hidden", "holding", "index", "make", "map", "peak", "pool",
        "refusals", "requests", "skipped", "spec", "strides", "tables", "tiers", "uids", "unit",
    )  # fmt: skip

    def __init__(self, header: Header, spec: Path = SPEC_DIR) -> None:
        self.header, self.spec = header, spec
        self.index, self.event = 0, ""
        self.refusals: list[Refusal] = []
        self.failed: set[str] = set()
        self.hidden, self.peak, self.skipped = 0, 1, 0
        specs = group_specs(header, spec)
        self.tables: Tables = oracle_tables(specs, spec)
        self.map = load_event_map(spec)
        self.claims = frozenset(header.capabilities)
        for claim in sorted(self.claims.difference(self.map.capabilities)):
            raise InputError(
                f"header: capabilities: no capability '{claim}' (known: {', '.join(self.map.capabilities)})"
            )
        self.groups = [self._group(i, g) for i, g in enumerate(specs)]
        self.by_name = {g.spec.name: g for g in self.groups}
        self.choices = Choices()
        self.tiers: dict[str, Tier] = {}
        self.device = self.tier(DEVICE)
        self.pool = self.device.pool
        self.books = self.bound(self.map.books)
        self._record, part = self.code.maker("request", ("id", "length", "kernel")), "request" + PART
        self._part = self.code.maker(part, ("ahead", "group", "uses"))
        self.make: Makers = self.code.makers()
        lease_sets = self.tables.sets["lease"]
        self.holding = frozenset(lease_sets["HELD"]) | frozenset(lease_sets["WRITES"])
        self.requests: dict[str, Request] = {}
        self.ended: OrderedDict[str, int] = OrderedDict()
        self.epochs: Counter[tuple[str, str]] = Counter()
        self.uids = 0
        self.strides: dict[str, int] = {}
        units = [g.spec.block for g in self.groups if g.spec.reuse]
        self.alignment = self.header.alignment or math.lcm(*units)
        self.unit = self.header.unit or math.gcd(*units) or 1

    def _group(self, index: int, spec: GroupSpec) -> GroupState:
        if spec.block < 1:
            raise InputError(f"header: groups.{spec.name}.block: expected at least 1 token, got {spec.block}")
        need = group_of(spec, self.spec)
        rules = entries(self.spec)[1][spec.kind].rules
        return GroupState(index, spec, kind_name(spec.name), need, rules, need.exact and need.miss == "prefill")

    def tier(self, name: str) -> Tier:
        """The tier of this name; made with its caps when first named."""
        found = self.tiers.get(name)
        return self._tier(name) if found is None else found

    def _tier(self, name: str) -> Tier:
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
        code = code_of(self.tables, tuple(g.kind for g in self.groups), known)
        if name == DEVICE:
            self.code = code
        rows = list[Row]()
        for compiled in code.rows:
            if row_name(compiled.event) in self.map.needs:
                rows += [code.row(compiled, g.index, g.rules) for g in self.groups]
            else:
                rows.append(code.row(compiled, compiled.group))
        segment = code.maker("segment", ("group",))
        tier = self.tiers[name] = Tier(name, code.pool(), self.groups, segment, rows)
        if name != DEVICE:
            self.fire(self.books.other["same_weights"], self.pool.model_epoch, pool=tier.pool)
        return tier

    def bind(self, event: str, tier: str = DEVICE) -> Bound:
        """The rows that an event of this form may fire, and no others."""
        return self.bound(self.map.rows[event], tier)

    def bound(self, allowed: frozenset[str], tier: str = DEVICE) -> Bound:
        """The rows of these names, with the caps of a tier."""
        group: list[dict[str, Row]] = [{} for _ in self.groups]
        other: dict[str, Row] = {}
        for row in self.tier(tier).rows:
            if row.name in allowed:
                of = other if row.group < 0 else group[row.group]
                of[row.name] = row
        return Bound(group, other)

    # -- entities --------------------------------------------------------------------------------------------------

    def new_record(self, uid: int, length: int, kernel: bool = True) -> Record:
        """A request's record in its first stage."""
        record = self._record(id=uid, length=length, kernel=kernel)
        record.parts = [self._part(ahead=g.spec.ahead, group=g.index, uses=g.spec.reuse) for g in self.groups]
        return record

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

    def block(self, tier: Tier, group: GroupState, number: int, alive: bool | None = None) -> Block | None:
        """The block of this number, empty if it was never named; None if it is lost.

        ``alive``: which of both the event needs it to be, where a choice left that open.
        """
        if alive is not None and self.choices.of:
            self.choices.settle(tier, group, number, alive)
        held = tier.blocks[group.index]
        return held.get(number) or self.unnamed(held, number)

    def unnamed(self, held: Numbered, number: int) -> Block | None:
        """An empty block for a number that has none; None if it is lost."""
        if held.lost and number in held.lost:
            self.skipped += 1
            return None
        return held.new(number)

    def lose(self, tier: Tier, group: GroupState, block: Block) -> None:
        """Nothing about this block is judged any more until it is taken anew; nor is it charged to anybody."""
        held = tier.blocks[group.index]
        if held.pop(block.number) is not None:
            self.fire(self.books.group[group.index]["forget"], block.segment, pool=tier.pool)
        held.lost.add(block.number)

    def lose_number(self, tier: Tier, group: GroupState, number: int) -> None:
        """As ``lose``, for a number of which there may be no block."""
        held = tier.blocks[group.index]
        block = held.get(number)
        if block is None:
            held.lost.add(number)
        else:
            self.lose(tier, group, block)

    def lose_request(self, request: Request) -> None:
        """Nothing about this request is judged any more, nor about the blocks that it held and who else held them."""
        request.lost, request.running = True, False
        others: set[int] = set()
        for tier in self.tiers.values():
            for group in self.groups:
                for block in tier.blocks[group.index].values():
                    lease = block.lease_of(request.uid)
                    if lease is not None and lease.stage not in self.holding:
                        block.let(request.uid)
                    elif lease is not None or block.owner is request:
                        others |= {uid for uid, other in block.leases() if other.stage in self.holding}
                        self.lose(tier, group, block)
        for other in [r for r in self.requests.values() if r.uid in others and not r.lost]:
            self.lose_request(other)

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
        if (index := row.function(row, pool or self.pool, *arguments)) < 0:
            return True
        return self.refuse(row, index, arguments, segment, pool)

    def legal(self, row: Row, *arguments: Any, pool: Any = None) -> bool:
        """Whether a row may be fired; it is not."""
        return row.test(row, pool or self.pool, *arguments) < 0

    def fire_all(self, rows: Mapping[str, Row], checks: Iterable[tuple[str, tuple[int, ...]]], segment: Place) -> bool:
        """Fires each of these rows with its inputs, also after one was refused; whether all were legal."""
        results = [self.fire(rows[row], *values, segment=segment) for row, values in checks]
        return all(results)

    @property
    def rows(self) -> Iterator[Row]:
        """The rows of every tier, fired or not."""
        return (row for tier in self.tiers.values() for row in tier.rows)

    def refuse(self, row: Row, index: int, arguments: tuple[Any, ...], segment: Place, pool: Any = None) -> bool:
        """Notes a refusal, and gives False, which is what the row's firing comes to."""
        event, where = row.event, segment if isinstance(segment, str) else f"{segment[0]}:{segment[1]}"
        guard = event.guards[index]
        values = row.code.values(row, guard, self.pool if pool is None else pool, arguments)
        broken = (*self.map.broken(event, guard), *row.more)
        self.failed.update(broken)
        self.refusals.append(Refusal(self.index, self.event, event.id, broken, where, guard.text, values))
        return False
