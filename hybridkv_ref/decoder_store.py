"""The cached objects that requests share: found by what they were computed from, read by generation.

A block of rows, a tail or a snapshot is one *object* of one layer.  Its key says what its values depend on: the
weights, the grade and every token up to its end.  Its slot has a generation that moves whenever the slot is given to
another object, and its writer's descriptor.  An object is found only when its bytes are complete.  Slot 0 is the null
slot.

The store has no grid, so a hit may end at any position: what ``recovery.toml`` says is measured here for every one of
them.  On the reference allocator, where every change is a row of the tables, runs ``decoder_allocator``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from hybridkv_ref.decoder import Decoder
from hybridkv_ref.decoder_geometry import Descriptor
from hybridkv_ref.decoder_state import POISON, PrivateState, Rows, copy_rows, poisoned
from hybridkv_ref.layouts import Page


class Key(NamedTuple):
    """What an object's values depend on.  ``tokens``: all from position 0 to the object's end."""

    model: str
    grade: str
    tokens: tuple[int, ...]


class Ref(NamedTuple):
    """One object as it was found: its slot, and the generation that the slot had."""

    layer: int
    group: str
    slot: int
    generation: int


@dataclass
class Slot:
    """One object's place.  ``used``: the store's clock when it was last found or written."""

    generation: int = 0
    key: Key | None = None
    writer: Descriptor | None = None
    ready: bool = False
    used: int = 0


@dataclass
class _Pool:
    page: Page
    arena: torch.Tensor
    slots: list[Slot] = field(default_factory=list)
    by_key: dict[Key, int] = field(default_factory=dict)


class MemoryStore:
    """Byte arenas, one per layer and group, of ``capacity`` objects each; ``capacities``: of single groups.

    For a new object the least recently used one goes.
    """

    def __init__(self, decoder: Decoder, capacity: int, capacities: Mapping[str, int] | None = None) -> None:
        self._decoder, self._clock = decoder, 0
        self._pools: dict[tuple[int, str], _Pool] = {}
        for item in decoder.stored:
            count = (capacities or {}).get(item.group, capacity)
            rows = item.keep if item.shape in ("ring", "state") else item.page.entries
            page = item.page.resized(rows)
            slots = [Slot() for _ in range(count + 1)]
            self._pools[item.layer, item.group] = _Pool(page, poisoned(page, count + 1), slots)

    def running(self) -> PrivateState:
        """An empty state for one request."""
        return self._decoder.state()

    def find(self, layer: int, group: str, key: Key, reader: Descriptor) -> Ref | None:
        """The complete object of this key that the reader can read; None if there is none."""
        pool = self._pools[layer, group]
        number = pool.by_key.get(key)
        if number is None:
            return None
        slot = pool.slots[number]
        if not self._complete(slot) or slot.writer is None or not self._agree(reader, slot.writer):
            return None
        self._touch(slot)
        return Ref(layer, group, number, slot.generation)

    def rows(self, ref: Ref) -> Rows | None:
        """The object's rows; None if its slot holds another object by now."""
        pool = self._pools[ref.layer, ref.group]
        if not self._same_generation(pool.slots[ref.slot], ref):
            return None
        return Rows(pool.arena, pool.page, torch.tensor([[ref.slot]], dtype=torch.int32))

    def begin(self, layer: int, group: str, key: Key, writer: Descriptor) -> Ref | None:
        """A slot for a new object; the least recently used one goes if there is no free one."""
        pool = self._pools[layer, group]
        if key in pool.by_key:
            return None
        free = [number for number, slot in enumerate(pool.slots) if number and slot.key is None]
        if not free:
            quiet = [number for number, slot in enumerate(pool.slots) if number and slot.ready]
            if not quiet:
                return None
            free = [min(quiet, key=lambda number: pool.slots[number].used)]
            self._evict(pool, free[0])
        slot = pool.slots[free[0]]
        slot.key, slot.writer, slot.ready = key, writer, False
        slot.generation += 1
        pool.by_key[key] = free[0]
        self._touch(slot)
        return Ref(layer, group, free[0], slot.generation)

    def finish(self, ref: Ref) -> None:
        """The object's bytes are complete: it can be found."""
        self._pools[ref.layer, ref.group].slots[ref.slot].ready = True

    def objects(self) -> Iterator[tuple[int, str, Key]]:
        """Every complete object on the device: layer, group, key; in the order in which they came."""
        for (layer, group), pool in self._pools.items():
            yield from ((layer, group, key) for key, number in pool.by_key.items() if pool.slots[number].ready)

    def evict(self, layer: int, group: str, key: Key) -> None:
        """Frees an object's slot."""
        pool = self._pools[layer, group]
        self._evict(pool, pool.by_key[key])

    @staticmethod
    def _evict(pool: _Pool, number: int) -> None:
        slot = pool.slots[number]
        if slot.key is not None:
            del pool.by_key[slot.key]
        slot.key, slot.writer, slot.ready = None, None, False
        slot.generation += 1
        pool.arena[number] = POISON

    def _touch(self, slot: Slot) -> None:
        self._clock += 1
        slot.used = self._clock

    # What a find or a read is refused for: one rule each, so that a test can do without any one of them.

    def _complete(self, slot: Slot) -> bool:
        return slot.ready

    def _agree(self, reader: Descriptor, writer: Descriptor) -> bool:
        return reader == writer

    def _same_generation(self, slot: Slot, ref: Ref) -> bool:
        return slot.generation == ref.generation


def copy_object(source: Rows, first: int, target: Rows, target_first: int, count: int) -> None:
    """Moves ``count`` rows from row ``first`` of one object to row ``target_first`` of another."""
    copy_rows(source, range(first, first + count), target, range(target_first, target_first + count))
