"""Several groups of one kind on the machine's constants: lanes; and entities made in bulk.

RATIO, HALO, RING and W are constants of the tables, and a request record counts the leases of each *kind*.  A model may
have several groups of one kind, so its groups are dealt out to lanes: in one lane no kind comes twice, and all agree on
the constants.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from hybridkv_ref.compile_py import attribute
from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import Ref, refs
from hybridkv_ref.machine import Machine, World
from hybridkv_ref.models import Group
from hybridkv_ref.tables import Event, Tables

DEVICE, STORE = "*", "+"
"""What a row asks for when a cap refuses it, besides room in the pool of a kind: room on the device, on a medium."""

CHARGED = "mem"
"""The variable of a segment that counts the bytes charged for it: a sum of it is a pool, any other sum is none."""


class Maker:
    """Makes entities in their first stage, outside any list: a simulation needs hundreds of thousands of them."""

    def __init__(self, machine: Machine, cls: str, kind: str = "", /, **rigid: int | str) -> None:
        first: dict[str, int | str] = {"cls": cls, "kind": kind, "name": kind or cls}
        for name, var in machine.tables.vars_of(cls, kind).items():
            first[attribute(name)] = rigid.get(name, var.init)
        # Straight-line code takes half the time of a loop over names.
        lines = [
            "def make():",
            " e = new()",
            f" e.refs = {'nothing' if cls == 'segment' else '{}'}",
            *(f" e.{name} = {value!r}" for name, value in first.items()),
            " return e",
        ]
        space: dict[str, Any] = {"new": machine.types[cls, kind], "nothing": {}}
        exec("\n".join(lines), space)
        self.make: Callable[[], Any] = space["make"]


def deal(groups: Sequence[Group]) -> list[tuple[list[Group], dict[str, int]]]:
    """Deals groups out to lanes: (groups, constants) each, as few as first fit gives."""
    lanes: list[tuple[list[Group], dict[str, int]]] = []
    for group in groups:
        given = {"RATIO": group.ratio, "HALO": group.halo, "RING": group.ring_rows, "W": group.span}
        own = {name: value for name, value in given.items() if value is not None} | group.constants
        for members, constants in lanes:
            agree = all(constants.get(name, value) == value for name, value in own.items())
            if agree and group.kind not in {g.kind for g in members}:
                members.append(group)
                constants |= own
                break
        else:
            lanes.append(([group], own))
    for _, constants in lanes:
        for name, value in {"RATIO": 1, "HALO": 0, "W": 1}.items():
            constants.setdefault(name, value)
        constants.setdefault("RING", constants["RATIO"] + constants["HALO"])
    return lanes


def worlds(machines: Iterable[Machine]) -> list[World]:
    """One world per machine, all on the pool of the first, so that every cap is that of the whole device."""
    found = [machine.world() for machine in machines]
    for world in found:
        world.pool = found[0].pool
    return found


def only_store(tables: Tables) -> str:
    """The one kind whose segments are durable copies; InputError where the tables have none or several."""
    stores = [name for name, kind in tables.kinds.items() if "store" in kind.capabilities]
    if len(stores) != 1:
        raise InputError(f"kinds: expected one kind with the capability 'store', found {len(stores)}")
    return stores[0]


def is_whole(group: Group) -> bool:
    """Whether a segment of this group is one state, however many tokens it sums up."""
    return group.shape == "state"


def tokens_per_row(group: Group) -> int:
    """Tokens that one row of a group's segments stands for, of a group that stores rows."""
    return group.ratio if group.shape == "entries" and group.ratio else 1


def pressure(tables: Tables, event: Event) -> list[str]:
    """Per guard of an event, where a refusal asks for room: in a kind's pool (its name), DEVICE, STORE; "" for none.

    A guard asks for room if it reads a pool variable that adds up the bytes charged: of several kinds it is the
    device's, of one its kind's, of durable copies their medium's.
    """
    pools = {name: pool for name in tables.globals if (pool := _pool(tables, name))}
    found = []
    for guard in event.guards:
        asked = {pools[r.name] for r in refs(guard.expr) if r.role == "global" and r.name in pools}
        found.append(min(asked - {DEVICE}, default=DEVICE if asked else ""))
    return found


def _pool(tables: Tables, name: str) -> str:
    """What a pool variable has room for; "" if it counts something else than bytes charged."""
    terms = {k: t for share in tables.globals[name].sums if share.cls == "segment" for k, t in share.terms.items()}
    kinds = [kind for kind, term in terms.items() if any(_charges(ref) for ref in refs(term))]
    if not kinds:
        return ""
    return DEVICE if len(kinds) > 1 else STORE if "store" in tables.kinds[kinds[0]].capabilities else kinds[0]


def _charges(ref: Ref) -> bool:
    return ref.role == "self" and ref.name == CHARGED
