"""Safeguard 1: what a request needs, by one formula that sizes the pools and guards the gate.

``peak`` is the most bytes that a request of ``length`` tokens holds at once in one group, when it resumes from a hit
and is extended one grid unit after another: what its hit pins, what it wrote and still needs, and the unit that it
writes.  Of a window it keeps what the next position sees; of a group that resumes at exact positions, the state that
it computes from and the one that it writes.  The rest of what it wrote stays cached and makes way when memory is
needed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from hybridkv_ref.allocator.geometry import Geometry, GroupGeometry
from hybridkv_ref.allocator.index import Tokens


class NotAdmitted(Exception):
    """A request is refused before anything is allocated.  ``rule`` and ``values`` say why."""

    def __init__(self, rule: str, reason: str, **values: int | str) -> None:
        self.rule, self.values = rule, values
        shown = ", ".join(f"{name}={value}" for name, value in values.items())
        super().__init__(f"request: refused, {reason}{' with ' if shown else ''}{shown} ({rule})")


def as_tokens(tokens: Any, most: int) -> Tokens:
    """A prompt as int64; NotAdmitted, in time that does not depend on its length, for what is none or is too long."""
    try:
        length = len(tokens)
    except TypeError:
        raise NotAdmitted("HKV-S1-012", "a prompt is a sequence of token ids", got=type(tokens).__name__) from None
    if not 1 <= length <= most:
        raise NotAdmitted("HKV-S1-012", "the length of a prompt is out of range", length=length, most=most)
    if isinstance(tokens, str | bytes):
        raise NotAdmitted("HKV-S1-012", "a prompt is a sequence of token ids", got=type(tokens).__name__)
    try:
        made = np.asarray(tokens)
    except (TypeError, ValueError):
        raise NotAdmitted("HKV-S1-012", "a prompt is a sequence of token ids", got="a ragged sequence") from None
    if made.ndim != 1 or made.dtype.kind not in "iu":
        raise NotAdmitted("HKV-S1-012", "a prompt is a sequence of token ids", got=f"{made.dtype} {list(made.shape)}")
    return made.astype(np.int64, copy=False)


def held(group: GroupGeometry, start: int, frontier: int) -> list[tuple[int, int]]:
    """The segments of a group that a hit at (start, frontier) pins, as token ranges."""
    lo, hi, _ = group.recovery.need(start, frontier)
    return [group.extent((at + 1) * group.unit) for at in group.places(lo, hi)]


def keeps_from(group: GroupGeometry, position: int) -> int:
    """Where the segments begin that a request keeps of what it wrote, to compute on from a grid position."""
    lo, hi, _ = group.recovery.need(position, position)
    return (lo if lo < hi else position) // group.unit * group.unit


def snapshots(group: GroupGeometry, length: int, frontier: int) -> list[int]:
    """The last two grid positions, at most, at which a group that resumes at exact positions is written."""
    last = length // group.unit * group.unit
    cuts = (last - group.unit, last) if group.every else (last,)
    return [cut for cut in cuts if cut > frontier]


def peak(group: GroupGeometry, length: int, start: int = 0, frontier: int = 0) -> int:
    """The most bytes of this group that a request of ``length`` tokens holds at once after a hit."""
    pinned = sum(group.size(*span) for span in held(group, start, frontier))
    if group.exact:
        going_on = -(-group.running // group.page.entries) * group.block_bytes
        return pinned + going_on + sum(group.size(*group.extent(cut)) for cut in snapshots(group, length, frontier))
    unit = group.unit
    at = (length - 1) // unit * unit  # where the last unit begins, which is taken whole
    before = max(0, at - max(frontier, keeps_from(group, at)))
    return pinned + (before // unit + (1 if length > frontier else 0)) * group.size(0, unit)


def demand(geometry: Geometry, length: int, start: int = 0, frontier: int = 0) -> dict[str, int]:
    """The most bytes per kind that a request of ``length`` tokens holds at once after a hit."""
    found: dict[str, int] = {}
    for group in geometry.groups:
        found[group.kind] = found.get(group.kind, 0) + peak(group, length, start, frontier)
    return found


def size_caps(geometry: Geometry, length: int, requests: int = 1) -> dict[str, int]:
    """Bytes per kind that let ``requests`` requests of ``length`` tokens run at once, whatever they find cached.

    The formula is the gate's: a request that fits an empty pool of this size is admitted.
    """
    unit = geometry.unit
    last = (length - 1) // unit
    far = max((-(-g.group.span // unit) for g in geometry.groups if g.group.span), default=0) + 3
    worst: dict[str, int] = {}
    for at in {*range(min(last, far) + 1), *range(max(0, last - far), last + 1)}:
        for kind, amount in demand(geometry, length, at * unit, at * unit).items():
            worst[kind] = max(worst.get(kind, 0), amount)
    return {kind: max(1, amount * requests) for kind, amount in worst.items()}


def gate(
    geometry: Geometry, caps: Mapping[str, int], device: int, length: int, start: int = 0, frontier: int = 0
) -> None:
    """NotAdmitted for a request that would not fit even if nothing else were there."""
    needed = demand(geometry, length, start, frontier)
    for kind, amount in needed.items():
        if amount > caps[kind]:
            raise NotAdmitted("HKV-S1-011", "it does not fit its kind's pool", kind=kind, needs=amount, cap=caps[kind])
    if sum(needed.values()) > device:
        raise NotAdmitted("HKV-S1-011", "it does not fit the device", needs=sum(needed.values()), cap=device)
