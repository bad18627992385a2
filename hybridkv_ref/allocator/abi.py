"""Layers 2 and 4: what writer and reader of a segment must agree on, and which kernels serve it.

A descriptor is compared as a whole, by an identifier over all of its fields, so that no field can be forgotten.  One
that lacks a field that its role needs is declared only in part: it gets an identifier of its own, which equals no
other, not even that of the same declaration made again.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence

import msgspec

from hybridkv_ref.allocator.geometry import ROLES, GroupGeometry
from hybridkv_ref.kernels.segment_decode import MOST_COLUMNS
from hybridkv_ref.layouts import Layout

DECLARED: Mapping[str, Mapping[str, str]] = {
    "kv": {"rope": "absolute", "lse": "natural"},
    "index": {"rotation": "hadamard"},
    "state": {"bias": "included"},
}
"""Per role of a layout the fields that no byte of the page shows, as this project's kernels write them."""

_undeclared = itertools.count(1)


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """The ABI of one group's segments: layout with all its fields, sizes, and what its role declares besides."""

    layout: Layout
    entries: int
    heads: int
    dim: int
    stride: int
    layers: int
    ratio: int | None
    halo: int | None
    span: int | None
    declared: Mapping[str, str]

    def missing(self) -> list[str]:
        """The fields that its role needs and that it does not declare."""
        return sorted(DECLARED[self.layout.role].keys() - self.declared.keys())

    def identifier(self) -> int:
        """A number that two descriptors share only if every field is equal; negative and unique for a partial one."""
        if self.missing():
            return -next(_undeclared)
        data = msgspec.json.encode(msgspec.to_builtins(self), order="sorted")
        return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big")


def describe(group: GroupGeometry, declared: Mapping[str, str] | None = None) -> Descriptor:
    """The descriptor of a group; ``declared`` replaces what this project's kernels declare."""
    page, shape = group.page, group.group
    return Descriptor(
        layout=page.layout,
        entries=page.entries,
        heads=page.heads,
        dim=page.dim,
        stride=page.stride,
        layers=group.layers,
        ratio=shape.ratio,
        halo=shape.halo,
        span=shape.span,
        declared=DECLARED[page.layout.role] if declared is None else declared,
    )


def unserved(groups: Sequence[GroupGeometry], device: str) -> str | None:
    """Why no kernel serves these groups together on ``device``, None if kernels do.

    Each is served by the operation of its role.  Outputs of groups that attend in the same layer are merged, so their
    heads have one size.  Triton kernels hold at most ``MOST_COLUMNS`` columns and take no fp64 fields.
    """
    for group in groups:
        role = group.page.layout.role
        # A state of one row is read and written as one vector: any layout will do that has it.
        fits = group.whole or (role == "state") == (ROLES[group.group.shape] == "state")
        if not fits or (role == "index") > (group.group.dtype_of == "index"):
            return f"group {group.name}: layout {group.page.layout.id} stores no {group.group.shape}"
        vectors = {field.vector for field in group.page.layout.fields}
        needed = {"kv", "score"} if role == "state" else {"kv"}
        if not needed <= vectors:
            found = ", ".join(sorted(vectors))
            return f"group {group.name}: no kernel reads layout {group.page.layout.id} with the vectors {found}"
        if device != "cpu" and any(place.dtype == "fp64" for place in group.page.places.values()):
            return f"group {group.name}: layout {group.page.layout.id} has fp64 fields, which run on the CPU only"
        if device != "cpu" and role == "kv" and group.page.dim > MOST_COLUMNS:
            return f"group {group.name}: {group.page.dim} columns, the kernel holds {MOST_COLUMNS} at most"
    attended = [
        g for g in groups if g.page.layout.role == "kv" and not g.whole and g.group.dtype_of != "index"
    ]  # index keys are scored, states are read whole: neither has an output of its own to merge
    for one, other in itertools.combinations(attended, 2):
        if one.page.dim != other.page.dim and _share_a_layer(one, other):
            sizes = f"{one.page.dim} and {other.page.dim}"
            return f"groups {one.name} and {other.name}: outputs of heads of {sizes} elements cannot be merged"
    return None


def _share_a_layer(one: GroupGeometry, other: GroupGeometry) -> bool:
    mine, theirs = one.group.layer_ids, other.group.layer_ids
    return mine is not None and theirs is not None and not set(mine).isdisjoint(theirs)
