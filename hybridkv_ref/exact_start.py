"""Exact starts without stored windows: how far back computing must begin, by the order of the layers.

Without its W - 1 stored rows a windowed layer is exact at position x only if its input is exact from x - (W - 1) on;
that input is the output of the layer below, and so on down.  So the start is found layer by layer from the top: from
the position from which the layer's output must be exact to that from which its input must be.  Entries up to the
frontier are cached; those after it are made of rows that must be exact too.  What each group needs comes from
``recovery.toml``.

For L windowed layers of width W and an aligned hit the start lies L (W - 1) tokens before it (FACTS: measured on a
float64 model of DeepSeek-V4's shape, exact there and inexact one token later).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hybridkv_ref.errors import InputError
from hybridkv_ref.models import Model
from hybridkv_ref.recovery import (
    NOTHING,
    PREFILL,
    Contents,
    Group,
    Hit,
    Read,
    can_resume,
    candidate_frontiers,
    make_hit,
)

Stack = tuple[tuple[Group, ...], ...]
"""The layers, lowest first, each with the groups that it stores."""

_FAR = 1 << 40  # a position that no request reaches: needs are not cut off at 0 there


def layer_stack(model: Model, groups: Sequence[Group]) -> Stack:
    """The model's layers in order; InputError where no source gives the layers of one of its groups."""
    by_name = {group.name: group for group in groups}
    layers: dict[int, list[Group]] = {}
    for geometry in model.groups:
        if geometry.layer_ids is None:
            reason = "no source gives the order of these layers, on which an exact start without stored windows depends"
            raise InputError(f"{model.name}:groups.{geometry.name}.layer_ids: {reason}")
        if geometry.name not in by_name:
            raise InputError(f"{model.name}:groups.{geometry.name}: missing among the groups given")
        for layer in geometry.layer_ids:
            layers.setdefault(layer, []).append(by_name[geometry.name])
    return tuple(tuple(layers[layer]) for layer in sorted(layers))


def exact_start(stack: Stack, position: int, frontier: int, contents: Mapping[str, Contents]) -> int:
    """The latest start from which everything from ``position`` on comes out exact, without stored window or tail rows.

    Entries are cached up to ``frontier <= position``; of ``contents`` only the snapshots (``ends``) of kinds that no
    replay can make are used.  Starting earlier is exact as well.  InputError if ``0 <= frontier <= position`` does
    not hold.
    """
    if not 0 <= frontier <= position:
        raise InputError(f"exact_start: frontier: expected 0 to {position}, got {frontier}")
    exact_from = position
    for layer in reversed(stack):
        starts = (_input_from(g, contents.get(g.name, NOTHING), exact_from, frontier) for g in layer)
        exact_from = min(starts, default=exact_from)
    return exact_from


def _input_from(group: Group, contents: Contents, output_from: int, frontier: int) -> int:
    """From where on the layer's input must be exact, for its output to be so from ``output_from`` on."""
    if group.exact and group.miss == PREFILL:
        return max((end for end in contents.ends if end <= output_from), default=0)
    lo, hi, _ = group.need(output_from, frontier)
    return min(output_from, hi if group.miss == PREFILL else lo)


@dataclass(frozen=True, slots=True)
class Replay:
    """What computing from a start on makes exactly.

    ``rows_from``: per layer, lowest first, the first token whose rows are exact; earlier ones must not be cached.
    ``begins``: per layer, the first token that it computes: the start, or where the snapshot that it takes up ends.
    ``snapshots``: what is read on the way, by groups that no replay can make.
    """

    rows_from: tuple[int, ...]
    begins: tuple[int, ...]
    snapshots: tuple[Read, ...]


@dataclass(frozen=True, slots=True)
class ZeroExactHit(Hit):
    """A hit that reads no window or tail row.

    ``exact_from``: the position from which everything comes out exact; what is computed before only serves it.
    ``replay``: what computing from ``r`` on makes exactly.
    """

    exact_from: int
    replay: Replay


def replay(stack: Stack, start: int, contents: Mapping[str, Contents]) -> Replay:
    """The exact rows of a replay from ``start``, at or before ``exact_start``, without stored window or tail rows.

    A layer whose input is exact from some position on takes up its first snapshot from there on; without one it
    computes nothing that any request reaches.
    """
    rows_from: list[int] = []
    begins: list[int] = []
    snapshots: dict[Read, None] = {}  # in the order of the layers, each once
    exact_from = start
    for layer in stack:
        rows_from.append(exact_from)
        outputs = [_output_from(group, contents.get(group.name, NOTHING), exact_from) for group in layer]
        taken = [(g, end) for g, end in zip(layer, outputs, strict=True) if g.exact and g.miss == PREFILL]
        begins.append(max((end for _, end in taken), default=start))
        snapshots |= dict.fromkeys(Read(g.name, *g.need(end, end)[:2]) for g, end in taken if end)
        exact_from = max(outputs, default=exact_from)
    return Replay(tuple(rows_from), tuple(begins), tuple(snapshots))


def _output_from(group: Group, contents: Contents, input_from: int) -> int:
    """From where on the layer's output is exact, when its input is from ``input_from`` on."""
    if input_from == 0:
        return 0
    if group.miss == PREFILL:
        return min((end for end in contents.ends if end >= input_from), default=_FAR) if group.exact else input_from
    if group.exact:
        return input_from  # rows that only later entries are made of
    lo, hi, _ = group.need(_FAR, _FAR)
    return input_from + hi - lo


def zero_exact_hit(
    stack: Stack,
    contents: Mapping[str, Contents],
    matched: int,
    length: int,
    alignment: int | None = None,
) -> ZeroExactHit:
    """The longest exact reuse when no window or tail row is stored: entries up to the frontier, computing from s* on.

    The frontier is the largest candidate (as for ``longest_hit``) up to which every kind that only prefill can make is
    cached; the start is ``exact_start`` for the end of the match, the last token excepted.  It is not rounded.
    """
    groups = tuple({group.name: group for layer in stack for group in layer}.values())
    candidates = candidate_frontiers(groups, contents, matched, length, alignment)
    entries = [group for group in groups if group.miss == PREFILL and not group.exact]
    start = best = exact_from = 0
    for frontier in candidates:
        if all(can_resume(group, contents.get(group.name, NOTHING), frontier, frontier) for group in entries):
            position = min(matched, length - 1)
            start = min(frontier, exact_start(stack, position, frontier, contents))
            if start:
                best, exact_from = frontier, position
            break
    hit = make_hit(groups, contents, matched, candidates, (start, best), entries if start else ())
    made = replay(stack, start, contents)
    reads = (*hit.reads, *made.snapshots)
    return ZeroExactHit(start, best, hit.grade, reads, hit.limiting, hit.recompute, exact_from, made)
