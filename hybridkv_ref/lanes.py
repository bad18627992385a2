"""Several groups of one kind on the machine's constants: lanes; and entities made in bulk.

RATIO, HALO, RING and W are constants of the tables, and a request record counts the leases of each *kind*.  A model may
have several groups of one kind, so its groups are dealt out to lanes: in one lane no kind comes twice, and all agree on
the constants.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hybridkv_ref.compile_py import attribute
from hybridkv_ref.expr import refs
from hybridkv_ref.machine import Machine
from hybridkv_ref.models import Group
from hybridkv_ref.tables import Event

DEVICE, STORE = "*", "+"
"""What a row asks for when a cap refuses it, besides room in the pool of a kind: room on the device, on the medium."""


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
        own = {name: value for name, value in given.items() if value is not None}
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


def pressure(event: Event) -> list[str]:
    """Per guard of an event, where a refusal asks for room: in a kind's pool (its name), DEVICE, STORE; "" for none."""
    found = []
    for guard in event.guards:
        read = {r.name for r in refs(guard.expr) if r.role == "global"}
        own = next((name.removesuffix(".used") for name in read if name.endswith(".used")), "")
        found.append(own or (DEVICE if "gpu_used" in read else STORE if "disk_used" in read else ""))
    return found
