"""From a store to a request's state: what is there, how far it reaches, and bringing back exactly what is demanded.

No rule of recovery stands here.  What a resume needs, and so which rows are copied, comes from ``recovery.toml``
through ``hybridkv_ref.recovery`` and ``hybridkv_ref.exact_start``; every other row of the request's state stays
poisoned.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_geometry import Stored
from hybridkv_ref.decoder_state import PrivateState
from hybridkv_ref.decoder_store import Key, MemoryStore, Ref, copy_object
from hybridkv_ref.exact_start import Replay, Stack, layer_stack, zero_exact_hit
from hybridkv_ref.recovery import Contents, Group, Hit, Read, bounded_hit, from_model, longest_hit

Mode = Literal["full", "zero-exact", "bounded"]


class Want(msgspec.Struct, frozen=True, kw_only=True):
    """What reuse a request asks for.

    ``full``: stored windows and tails, with up to ``replay`` tokens computed again before the frontier.  ``zero-
    exact``: no stored window or tail.  ``bounded``: approximate, ``replay`` tokens, at least 1, see a truncated
    window.  ``alignment``: a hit is a multiple of it; None: of the least common multiple of the groups' blocks.
    """

    mode: Mode = "full"
    replay: int = 0
    alignment: int | None = None


@dataclass(frozen=True)
class Match:
    """A hit and the objects that it rests on, with the generations that they had when they were found.

    ``refs``: by layer, group and the position at which the object ends.
    ``exact_from``: logits from here on equal those of a run from scratch (None: never, the grade is bounded).
    ``replay``: where every layer begins, and from where on what it makes is exact.
    """

    hit: Hit
    matched: int
    refs: Mapping[tuple[int, str, int], Ref]
    exact_from: int | None
    replay: Replay


class Planner:
    """The recovery groups of one decoder, and what each of its layers stores.  ``groups``: default, the model's."""

    def __init__(self, decoder: Decoder, groups: Sequence[Group] | None = None) -> None:
        self.decoder = decoder
        self.groups = {group.name: group for group in groups or from_model(decoder.model)}
        self.stack: Stack = layer_stack(decoder.model, tuple(self.groups.values()))
        self.objects: dict[str, tuple[Stored, ...]] = {
            name: tuple(item for item in decoder.stored if item.group == name) for name in self.groups
        }
        self.descriptors = {(item.layer, item.group): decoder.descriptor(item) for item in decoder.stored}

    def key(self, tokens: tuple[int, ...], grade: str) -> Key:
        """The key of an object that ends with ``tokens``."""
        return Key(self.decoder.identity, grade, tokens)

    def first_row(self, group: Group, end: int) -> int:
        """Position of the first row of the object, a block, a tail or a snapshot, that ends at ``end``."""
        return group.need(end, end)[0] if group.exact else end - group.unit

    def find(self, store: MemoryStore, tokens: tuple[int, ...], want: Want) -> Match:
        """The longest reuse of what the store has for these tokens."""
        grades = ("exact", "bounded") if want.mode == "bounded" else ("exact",)
        refs: dict[tuple[int, str, int], Ref] = {}
        contents = {name: self._contents(store, group, tokens, grades, refs) for name, group in self.groups.items()}
        matched = max((end for _, _, end in refs), default=0)
        length, groups = len(tokens), tuple(self.groups.values())
        match want.mode:
            case "full":
                hit = longest_hit(groups, contents, matched, length, want.alignment, want.replay)
            case "zero-exact":
                zero = zero_exact_hit(self.stack, contents, matched, length, want.alignment)
                return Match(zero, matched, refs, zero.exact_from, zero.replay)
            case "bounded":
                hit = bounded_hit(groups, contents, matched, length, want.replay, want.alignment)
        everywhere = (hit.r,) * len(self.stack)
        return Match(hit, matched, refs, None if hit.grade == "bounded" else hit.r, Replay(everywhere, everywhere, ()))

    def _contents(
        self, store: MemoryStore, group: Group, tokens: tuple[int, ...], grades: Sequence[str],
        refs: dict[tuple[int, str, int], Ref],
    ) -> Contents:  # fmt: skip
        """What all layers of a group hold: an object counts only if every one of them has it."""
        found = []
        step = 1 if group.exact else group.unit
        for end in range(step, len(tokens) + 1, step):
            here: dict[tuple[int, str, int], Ref] = {}
            for item in self.objects[group.name]:
                for grade in grades:
                    reader = self.descriptors[item.layer, item.group]
                    ref = store.find(item.layer, item.group, self.key(tokens[:end], grade), reader)
                    if ref is not None:
                        here[item.layer, item.group, end] = ref
                        break
            if len(here) == len(self.objects[group.name]):
                refs |= here
                found.append(end)
        if group.exact:
            return Contents(ends=frozenset(found))
        return Contents(blocks=sum(1 << end // group.unit - 1 for end in found))

    def reads(self, match: Match) -> Iterator[tuple[Stored, Read]]:
        """What every object reads.  Of several snapshots a layer reads the one that it takes up, and no other: in a
        ring two may have one place.
        """
        for read in match.hit.reads:
            for item in self.objects[read.group]:
                if item.shape != "state" or read.hi == match.replay.begins[item.layer]:
                    yield item, read

    def restore(self, store: MemoryStore, match: Match, state: PrivateState) -> bool:
        """Copies the rows that the hit reads; False, with the state spoilt, if an object has gone meanwhile."""
        return all(
            self._restore(store, match, state, self.groups[read.group], item, read.lo, read.hi)
            for item, read in self.reads(match)
        )

    def _restore(
        self, store: MemoryStore, match: Match, state: PrivateState, group: Group, item: Stored, low: int, high: int
    ) -> bool:
        unit = group.unit
        for end in (high,) if group.exact else range((low // unit + 1) * unit, high + unit, unit):
            rows = store.rows(match.refs[item.layer, item.group, end])
            if rows is None:
                return False
            start = self.first_row(group, end)
            first, last = max(low, start), min(high, end)
            copy_object(
                rows, (first - start) // item.ratio, state.rows(item.layer, item.group), first // item.ratio,
                (last - first) // item.ratio,
            )  # fmt: skip
        return True
