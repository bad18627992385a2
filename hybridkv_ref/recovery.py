"""The longest sound reuse of a matched prefix, by its plain definition.

A matched prefix is a first-level signal only.  What counts is whether *every* group of the model can resume: for
compute start ``s`` and cached frontier ``F >= s``, each group must hold the positions that its kind's entry in
``recovery.toml`` asks for.  No kind is known here; a new kind needs its entry and nothing else.

``longest_hit`` is the definition itself: it tries candidates from the largest down.  The good positions are not
downward closed (a window or a snapshot may be there for 64 and not for 48), so nothing shorter than trying them is
right without proof; a faster search must give the same answer.  ``bounded_hit`` is approximate by design and must be
asked for.  A start without any stored window rows depends on the order of the layers: see ``exact_start``.

All positions and lengths are tokens, counted from 0; ranges are half open.
"""

import math
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Literal

from hybridkv_ref.errors import InputError
from hybridkv_ref.events import GroupSpec
from hybridkv_ref.loader import load_tables
from hybridkv_ref.models import Model
from hybridkv_ref.need_functions import NeedFunction, check_params, compile_form, runtime_form
from hybridkv_ref.needs import FILE, Need, RecoverySpec, read_needs
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import read_spec

PREFILL = "prefill"
"""The ``miss`` of a kind that no bounded replay can make again; the others come back by computing a few tokens."""

Grade = Literal["exact", "bounded"]


@lru_cache(maxsize=8)
def entries(spec: Path = SPEC_DIR) -> tuple[RecoverySpec, Mapping[str, Need]]:
    """The recovery entries of a spec directory, by kind; InputError for what cannot be read."""
    return read_needs(read_spec(spec).recovery)


def need_function(kind: str, params: Mapping[str, int], spec: Path = SPEC_DIR) -> NeedFunction:
    """The entry of ``kind`` as a function (s, F) -> (lo, hi, exact), compiled once per set of parameters.

    InputError for a kind without an entry, and for parameters that the tables' constants exclude.
    """
    return _need_function(kind, tuple(sorted(params.items())), spec)


@lru_cache(maxsize=1024)
def _need_function(kind: str, params: tuple[tuple[str, int], ...], spec: Path) -> NeedFunction:
    need = _entry(kind, spec)
    check_params(entries(spec)[0], need, dict(params), load_tables(spec).constants)
    return compile_form(runtime_form(need, dict(params)), need.exact)


def _entry(kind: str, spec: Path) -> Need:
    needs = entries(spec)[1]
    if kind not in needs:
        raise InputError(f"{FILE}: need.{kind}: no such entry (known: {', '.join(needs)})")
    return needs[kind]


@dataclass(frozen=True, slots=True)
class Group:
    """A cache group: layers that store the same object.  Made by ``cache_group`` or ``from_model``.

    ``unit`` is the number of tokens of one cacheable block.  ``miss`` and ``exact`` are the entry's, ``need`` is its
    compiled form.
    """

    name: str
    kind: str
    unit: int
    params: Mapping[str, int] = field(hash=False)
    miss: str
    exact: bool
    need: NeedFunction = field(compare=False, repr=False)


def cache_group(name: str, kind: str, unit: int, params: Mapping[str, int], spec: Path = SPEC_DIR) -> Group:
    """A group of a kind that has a recovery entry; InputError for a bad unit, kind or parameter."""
    if unit < 1:
        raise InputError(f"{name}:unit: expected at least 1 token, got {unit}")
    entry = _entry(kind, spec)
    return Group(name, kind, unit, dict(params), entry.miss, entry.exact, need_function(kind, params, spec))


def group_of(group: GroupSpec, spec: Path = SPEC_DIR) -> Group:
    """The group that the header of a trace describes; InputError as ``cache_group``."""
    geometry = {"ratio": group.ratio, "halo": group.halo, "window": group.window}
    params = {name: geometry[name] for name in _entry(group.kind, spec).params}
    return cache_group(group.name, group.kind, group.block, params, spec)


def from_model(model: Model, spec: Path = SPEC_DIR) -> tuple[Group, ...]:
    """The groups of a model, each with its block as unit and the entry's parameters from its geometry.

    Chunked attention stands as a window of the chunk's size: that asks for a few positions more than a chunk reads,
    never for less.  InputError where the geometry lacks a parameter.
    """
    groups = []
    for group in model.groups:
        geometry = {"ratio": group.ratio, "halo": group.halo, "window": group.span}
        params = {}
        for name in _entry(group.kind, spec).params:
            value = geometry.get(name)
            if value is None:
                raise InputError(f"{model.name}:groups.{group.name}: {FILE} asks for '{name}', which the model lacks")
            params[name] = value
        groups.append(cache_group(group.name, group.kind, group.block_tokens or 1, params, spec))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class Contents:
    """What one group has cached and readable for the matched prefix.

    ``blocks`` is a bitmap: bit i is block [i * unit, (i + 1) * unit).  ``ends`` are the positions at which the group
    has a segment that ends exactly there and holds what a resume at that position needs: tails and snapshots, the
    kinds whose entry is ``exact``.  A group reads the one that its kind's entry asks for.
    """

    blocks: int = 0
    ends: Set[int] = frozenset()


NOTHING = Contents()


@dataclass(frozen=True, slots=True)
class Read:
    """Positions [lo, hi) that one group reads from its cache."""

    group: str
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest reuse found.

    ``r``: computing starts here; the tokens before it are saved.  ``frontier``: every group's entries are read up to
    here; equal to ``r`` unless tokens in [r, frontier) are computed again.  ``reads``: what is read, groups that read
    nothing left out.  ``limiting``: when ``r`` is below the largest candidate, the groups that cannot resume there.
    ``recompute``: matched tokens that are computed again.
    """

    r: int
    frontier: int
    grade: Grade
    reads: tuple[Read, ...]
    limiting: tuple[str, ...]
    recompute: int


def can_resume(group: Group, contents: Contents, s: int, frontier: int) -> bool:
    """Whether this group holds what computing from ``s`` on needs, with entries read up to ``frontier >= s``."""
    lo, hi, exact = group.need(s, frontier)
    if lo >= hi:
        return True
    if exact:
        return hi in contents.ends and group.need(hi, hi)[0] <= lo
    first = lo // group.unit
    mask = (1 << (-(-hi // group.unit) - first)) - 1
    return (contents.blocks >> first) & mask == mask


def longest_hit(
    groups: Sequence[Group],
    contents: Mapping[str, Contents],
    matched: int,
    length: int,
    alignment: int | None = None,
    replay: int = 0,
) -> Hit:
    """The largest position at which every group can resume, exactly.

    ``matched`` tokens of a request of ``length`` tokens are known to the index; the last token is always computed.  The
    candidates for the frontier are the multiples of ``alignment`` (default: the least common multiple of the groups'
    units).  With ``replay`` 0 computing starts at the frontier.  With more it may start up to ``replay`` tokens before:
    computing a few tokens again can stand in for a stored tail.  A group that ``contents`` does not name holds nothing.
    InputError for arguments out of range or an unknown group.
    """
    candidates = candidate_frontiers(groups, contents, matched, length, alignment)
    if replay < 0:
        raise InputError(f"longest_hit: replay: expected at least 0 tokens, got {replay}")
    start = best = 0
    for frontier in candidates:
        if frontier <= start:
            break
        for s in range(frontier, max(frontier - replay, start + 1) - 1, -1):
            if all(can_resume(group, contents.get(group.name, NOTHING), s, frontier) for group in groups):
                start, best = s, frontier
                break
    return make_hit(groups, contents, matched, candidates, (start, best), read_from=groups)


def bounded_hit(
    groups: Sequence[Group],
    contents: Mapping[str, Contents],
    matched: int,
    length: int,
    replay: int,
    alignment: int | None = None,
) -> Hit:
    """The longest reuse that replays ``replay`` tokens instead of reading stored windows, by design approximate.

    The replayed tokens see a truncated window, so what is computed after them depends on the position of the hit: it
    must carry the grade ``bounded`` in its key or not be published.  Engines replay the window (vLLM and DeepSeek-V4.1:
    min(W, n) tokens).  Rows that must end at an exact position (tails) are always replayed in full, however small
    ``replay`` is, because a later entry is made of them; kinds that only prefill can make must be there.  Without any
    window nothing is truncated and the grade is ``exact``.  Arguments as for ``longest_hit``.
    """
    candidates = candidate_frontiers(groups, contents, matched, length, alignment)
    if replay < 1:
        raise InputError(f"bounded_hit: replay: expected at least 1 token, got {replay}")
    stored = [group for group in groups if group.miss == PREFILL]
    truncated = any(group.miss != PREFILL and not group.exact for group in groups)
    for frontier in candidates:
        start = max(0, min((frontier - replay if truncated else frontier, *_tail_starts(groups, frontier))))
        if start == 0:
            break
        if all(can_resume(group, contents.get(group.name, NOTHING), start, frontier) for group in stored):
            grade: Grade = "bounded" if truncated else "exact"
            return make_hit(groups, contents, matched, candidates, (start, frontier), stored, grade)
    return make_hit(groups, contents, matched, candidates, (0, 0), ())


def _tail_starts(groups: Sequence[Group], frontier: int) -> Iterator[int]:
    for group in groups:
        if group.exact and group.miss != PREFILL:
            yield group.need(frontier, frontier)[0]


def candidate_frontiers(
    groups: Sequence[Group], contents: Mapping[str, Contents], matched: int, length: int, alignment: int | None
) -> range:
    """The positions to try, largest first; 0 is left out, since nothing need be cached to start there."""
    if length < 1:
        raise InputError(f"hit: length: expected at least 1 token, got {length}")
    if not 0 <= matched <= length:
        raise InputError(f"hit: matched: expected 0 to {length} tokens, got {matched}")
    if alignment is not None and alignment < 1:
        raise InputError(f"hit: alignment: expected at least 1 token, got {alignment}")
    names = {group.name for group in groups}
    if len(names) != len(groups):
        raise InputError("hit: groups: two groups have the same name")
    for name in contents:
        if name not in names:
            raise InputError(f"hit: contents: no group is named {name!r}")
    step = alignment or math.lcm(*(group.unit for group in groups))
    top = min(matched, length - 1)
    return range(top - top % step, 0, -step)


def make_hit(
    groups: Sequence[Group],
    contents: Mapping[str, Contents],
    matched: int,
    candidates: range,
    found: tuple[int, int],
    read_from: Sequence[Group],
    grade: Grade = "exact",
) -> Hit:
    """The Hit of the found (start, frontier), with what ``read_from`` read and who limited it."""
    start, frontier = found
    needs = [(group.name, *group.need(start, frontier)) for group in read_from]
    reads = tuple(Read(name, lo, hi) for name, lo, hi, _ in needs if lo < hi)
    limiting: tuple[str, ...] = ()
    if candidates and start < (top := candidates[0]):
        limiting = tuple(g.name for g in groups if not can_resume(g, contents.get(g.name, NOTHING), top, top))
    return Hit(start, frontier, grade, reads, limiting, matched - start)
