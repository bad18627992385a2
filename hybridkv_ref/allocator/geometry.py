"""What each cache group of a model takes in memory: pages, blocks, bytes; and the grid on which segments begin and end.

All groups share one grid of ``unit`` tokens, a multiple of every group's block and of the model's alignment.  A
segment of a group that covers ranges holds the entries of one grid unit; a group that resumes at exact positions has
one segment per grid position.  So a hit never ends inside a segment.  The amount that the tables charge is the bytes
that the blocks take in the arenas, padding included: the same number for the gate and for the memory.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hybridkv_ref.errors import InputError
from hybridkv_ref.lanes import is_whole, tokens_per_row
from hybridkv_ref.layouts import Page, load, names
from hybridkv_ref.models import Dtypes, Group, Model
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.policy import Policy, load_policy
from hybridkv_ref.recovery import Group as CacheGroup
from hybridkv_ref.recovery import cache_group, entries, from_model

ROLES = {"entries": "kv", "window": "kv", "ring": "state", "state": "state"}
"""Which role of a layout holds what a group of this shape stores; index keys have their own."""


@dataclass(frozen=True, eq=False)
class GroupGeometry:
    """One group: its model entry, its recovery entry on the grid, and the page of one layer's block.

    ``exact``: each segment holds what resuming at one position needs; it is written at ``every`` grid position, or
    only at the last one of a prompt.  ``whole``: it is one state, however many tokens it sums up.  Sizes are bytes of
    all layers, counts of blocks and rows are per layer.  ``cache``: the index of the group that a tail feeds, of any
    other group its own: folds stay within it.  ``running``: the most rows that a request holds besides, in segments
    that go on while it runs: a tail's ring, states of drafts.
    """

    index: int
    cache: int
    group: Group
    recovery: CacheGroup
    page: Page
    unit: int
    every: bool = False
    running: int = 0

    @cached_property
    def name(self) -> str:
        """The group's name in the model."""
        return self.group.name

    @cached_property
    def kind(self) -> str:
        """The kind whose table its segments follow."""
        return self.group.kind

    @cached_property
    def exact(self) -> bool:
        """Whether a segment serves one resume position only."""
        return self.recovery.exact

    @cached_property
    def whole(self) -> bool:
        """Whether a segment is one state of fixed size."""
        return is_whole(self.group)

    @cached_property
    def layers(self) -> int:
        """Layers that store it."""
        return self.group.layers

    @cached_property
    def block_bytes(self) -> int:
        """Bytes of one block in the arena, all layers."""
        return self.layers * self.page.stride

    @cached_property
    def per_row(self) -> int:
        """Tokens that one row stands for, of a group that stores rows."""
        return tokens_per_row(self.group)

    def rows(self, lo: int, hi: int) -> int:
        """Entries, rows or states that the positions [lo, hi) take in one layer."""
        if self.whole:
            return 1 if hi > lo else 0
        return hi // self.per_row - lo // self.per_row

    def blocks(self, lo: int, hi: int) -> int:
        """Blocks that the positions [lo, hi) take in one layer."""
        return -(-self.rows(lo, hi) // self.page.entries)

    def size(self, lo: int, hi: int) -> int:
        """Bytes charged for the positions [lo, hi)."""
        return self.blocks(lo, hi) * self.block_bytes

    def places(self, lo: int, hi: int) -> Sequence[int]:
        """The grid units whose segments hold the positions [lo, hi), by index."""
        if lo >= hi:
            return range(0)
        end = -(-hi // self.unit)
        return range(hi // self.unit - 1 if self.exact else lo // self.unit, end)

    def boundary(self, cut: int) -> int:
        """The end of the last whole entry at or before ``cut``."""
        return cut - cut % (self.group.ratio or 1)

    def extent(self, cut: int) -> tuple[int, int]:
        """[lo, hi) of the segment by which the group is written up to ``cut``, from the grid position before it on."""
        if self.exact:
            return (0 if self.whole else self.recovery.need(cut, cut)[0]), cut
        lo = (cut - 1) // self.unit * self.unit
        return lo, (self.boundary(cut) if self.group.shape == "entries" else cut)


@dataclass(frozen=True, eq=False, slots=True)
class Geometry:
    """All groups of a model on one grid."""

    model: Model
    groups: tuple[GroupGeometry, ...]
    unit: int
    policy: Policy

    def group(self, name: str) -> GroupGeometry:
        """The group of this name; InputError where there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise InputError(f"{self.model.name}:groups: no group named {name!r}")


def default_page(group: Group, dtypes: Dtypes) -> Page:
    """The page of a group's block from the model's sizes: the layout of that role and size that ``spec/layouts`` has.

    InputError where none fits.
    """
    role = "index" if group.dtype_of == "index" and group.shape in ("entries", "window") else ROLES[group.shape]
    row = group.row_size(dtypes)
    entries = 1 if group.block_tokens is None else max(1, group.block_tokens // (group.ratio or 1))
    if group.shape in ("ring", "window") and group.block_tokens:
        entries = group.block_tokens
    given = group.page_bytes.get(group.dtype(dtypes))
    for name in names():
        layout = load(name)
        if layout.role != role or layout.entry_bytes != row:
            continue
        least = layout.page(entries).nbytes
        return layout.page(
            entries, stride=given if given and given >= least and not given % layout.stride_multiple else None
        )
    if role == "state":
        layout, width = load("state_fp32"), 8
    else:
        layout, width = load("bf16"), 2
    if row % width:
        raise InputError(f"{group.name}:entry_bytes: no layout stores entries of {row} bytes")
    heads = 1 if layout.heads == 1 else None
    return layout.page(entries, heads=heads, dim=row // width)


def build(
    model: Model,
    segment_tokens: int | None = None,
    dtypes: Dtypes | None = None,
    pages: Mapping[str, Page] | None = None,
    policy: Policy | None = None,
    spec: Path = SPEC_DIR,
    running: Mapping[str, int] | None = None,
) -> Geometry:
    """The geometry of a model.

    ``segment_tokens`` is the grid's unit (default: the least that every group and the alignment divide); ``pages``
    gives a group another page than the model's sizes say; ``policy`` stands in for the file of ``spec``;
    ``running`` gives rows per group that a request holds besides its cached segments.  InputError for a unit that does
    not fit, an unknown group, a page of another size than the group's block.
    """
    formats = dtypes or model.default_dtypes
    own = {group.name: group for group in from_model(model, spec)}
    ranged = [g.block_tokens or 1 for g in model.groups if not own[g.name].exact]
    least = math.lcm(model.alignment, *ranged)
    unit = least if segment_tokens is None else segment_tokens
    if unit < 1 or unit % least:
        raise InputError(f"{model.name}:segment_tokens: {unit} is not a multiple of {least}, which all groups divide")
    besides = running or {}
    for name in (*(pages or {}), *besides):
        model.group(name)
    exact = {kind: need.exact for kind, need in entries(spec)[1].items()}
    policy = policy or load_policy(exact, spec)
    made = []
    at = {group.name: index for index, group in enumerate(model.groups)}
    for index, group in enumerate(model.groups):
        page = (pages or {}).get(group.name) or default_page(group, formats)
        on_grid = own[group.name]
        on_grid = cache_group(group.name, group.kind, unit, on_grid.params, spec)
        every = policy.kinds[group.kind].snapshots == "every"
        cache = at.get(group.feeds or "", index)
        made.append(GroupGeometry(index, cache, group, on_grid, page, unit, every, besides.get(group.name, 0)))
    return Geometry(model, tuple(made), unit, policy)
