"""The prefix index of a vLLM manager, as its published events tell of it: entries with the blocks that they name.

An event says hashes, not blocks: which ones they are is found in the block table of the request that was served, or,
where a call serves none, anywhere in the pool.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any

from hybridkv_ref import events as ev
from hybridkv_ref.adapters.vllm_tables import Life
from hybridkv_ref.events import Event, Header

Key = bytes | int
"""A hash as the engine publishes it."""


class WatchedIndex:
    """``taken``: the events that the engine published since they were last cleared. ``parts``: entries not told."""

    def __init__(
        self, pool: Any, header: Header, take: Callable[[], list[Any]], sink: Callable[[Event], object]
    ) -> None:
        from vllm.distributed.kv_events import BlockRemoved, BlockStored
        from vllm.v1.core import kv_cache_utils as engine

        self.removal, self.store = BlockRemoved, BlockStored
        self.pool, self.header, self.take, self.sink = pool, header, take, sink
        self.group: Callable[[Any], int] = engine.get_group_id
        self.key: Callable[[Any], Key] = lambda found: engine.maybe_convert_block_hash(engine.get_block_hash(found))
        # The field behind the property, where there is one: it is asked of every block of a table.
        self.hashed = attrgetter("_block_hash" if hasattr(pool.null_block, "_block_hash") else "block_hash")
        # One block mostly, so no list is made for it: collecting garbage would walk all of them.
        self.entries: list[dict[Key, int | list[int]]] = [{} for _ in header.groups]
        self.partial: list[Counter[Key]] = [Counter() for _ in header.groups]
        self.taken: list[Any] = []
        self.parts = 0

    def leave(self, reused: Iterable[list[int]] = ()) -> list[Any]:
        """Tells entries that left the index, of blocks ``reused`` anew first; gives the events of those that came."""
        fresh = self.take()
        if not fresh:
            return []
        self.taken += fresh
        stored: list[Any] = []
        gone: defaultdict[int, list[Any]] = defaultdict(list)
        for event in fresh:
            if isinstance(event, self.removal):
                gone[event.group_idx or 0] += event.block_hashes
            elif isinstance(event, self.store):
                stored.append(event)
            else:
                self._removed(gone, reused)
                gone.clear()
                self._cleared()
        self._removed(gone, reused)
        return stored

    def _cleared(self) -> None:
        """The engine forgot everything."""
        for index, group in enumerate(self.header.groups):
            self.entries[index].clear()
            self.partial[index].clear()
            self.sink(ev.Reset(group.name))

    def _name(self, index: int) -> str:
        """A group by its index, which is its name where the configuration has none such."""
        return self.header.groups[index].name if index < len(self.header.groups) else str(index)

    def _removed(self, gone: dict[int, list[Key]], reused: Iterable[list[int]]) -> None:
        """Entries that left, together per group: the engine says one by one of each block that it takes."""
        for index, keys in gone.items():
            if index < len(self.entries) and self.partial[index].keys().isdisjoint(keys):
                entries = self.entries[index]
                numbers = list(map(entries.pop, keys, repeat(None)))
                known = [n for n in numbers if isinstance(n, int)]
                if len(known) == len(keys):
                    self.sink(ev.KeyRemove(self.header.groups[index].name, _texts(keys), known))
                    continue
                entries.update((k, n) for k, n in zip(keys, numbers, strict=True) if n is not None)
            self._removed_apart(index, keys, reused)

    def _removed_apart(self, index: int, keys: list[Key], reused: Iterable[list[int]]) -> None:
        """The same where a key has several blocks, none that is known, or stands for a part of a block."""
        named = index < len(self.entries)
        entries, partial = (self.entries[index], self.partial[index]) if named else ({}, Counter[Key]())
        taken = {n for blocks in reused for n in blocks}
        told: list[Key] = []
        numbers: list[int] = []
        for key in keys:
            if key in partial:
                partial[key] -= 1
                if not partial[key]:
                    del partial[key]
                continue
            number = entries.pop(key, None)
            if number is None:
                self.sink(ev.KeyRemove(self._name(index), _texts([key])))
                continue
            if isinstance(number, list):
                # A block may be taken and published under the same key again by one call.
                left = [n for n in number if n in taken] or [n for n in number if (index, key) not in self._hashes(n)]
                gone = left[0] if left else number[0]
                number.remove(gone)
                entries[key] = number if len(number) > 1 else number[0]
                number = gone
            told.append(key)
            numbers.append(number)
        if told:
            self.sink(ev.KeyRemove(self._name(index), _texts(told), numbers))

    def _hashes(self, number: int) -> set[tuple[int, Key]]:
        found = self.pool.blocks[number].block_hash
        more = getattr(self.pool, "cached_block_hashes_by_block", {}).get(number, ())
        return {(self.group(h), self.key(h)) for h in (*((found,) if found is not None else ()), *more)}

    def come(self, events: Iterable[Any], life: Life | None = None) -> None:
        """Tells entries that came: of a request's tables, per group from its ``stored`` on, which moves along."""
        for event in events:
            index, keys = event.group_idx or 0, event.block_hashes
            if index >= len(self.header.groups):
                self.sink(ev.KeyPublish(self._name(index), _texts(keys)))
                continue
            if event.block_size % self.header.groups[index].block:
                self.partial[index].update(keys)
                self.parts += len(keys)
                continue
            if life is None:
                blocks = self._searched(index, keys, range(self.pool.num_gpu_blocks)) or [self.header.null] * len(keys)
            else:
                at, count = life.stored[index], len(event.token_ids) // event.block_size
                span, own = life.tables[index][at:], life.blocks[index][at:]
                blocks = span[:count]
                # Mostly every block is cached.
                whole = len(blocks) == len(keys) and None not in map(self.hashed, own[:count])
                if not (whole and self._ends(index, keys, blocks)):
                    blocks = self._found(index, keys, blocks, own)
                    if not blocks and count < len(span):
                        blocks = self._found(index, keys, span, own)
                    blocks = blocks or self._searched(index, keys, span)
                if blocks and blocks[-1] in span:
                    life.stored[index] += span.index(blocks[-1]) + 1
            self._enter(index, keys, blocks)
            self.sink(ev.KeyPublish(self.header.groups[index].name, _texts(keys), blocks))

    def _enter(self, index: int, keys: list[Key], blocks: list[int]) -> None:
        """What the index holds now."""
        entries, null = self.entries[index], self.header.null
        if len(keys) == len(blocks) and null not in blocks and entries.keys().isdisjoint(keys):
            before = len(entries)
            entries.update(zip(keys, blocks, strict=True))
            if len(entries) == before + len(keys):
                return
            for key in set(keys):
                del entries[key]
        for key, number in zip(keys, blocks, strict=False):
            if number != null:
                live = entries.get(key)
                if live is None:
                    entries[key] = number
                elif isinstance(live, int):
                    entries[key] = [live, number]
                else:
                    live.append(number)

    def _found(self, index: int, keys: list[Key], span: list[int], own: list[Any]) -> list[int]:
        """The cached ones of a span (``own``: the engine's), where they are as many as the keys and both ends agree."""
        found = list(compress(span, map(is_not, map(self.hashed, own), repeat(None))))
        return found if len(found) == len(keys) and self._ends(index, keys, found) else []

    def _ends(self, index: int, keys: list[Key], blocks: list[int]) -> bool:
        """Whether the first and the last of so many blocks have the first and the last of these keys."""
        if not keys:
            return True
        return self._named(index, keys[0], blocks[0]) and self._named(index, keys[-1], blocks[-1])

    def _named(self, index: int, key: Key, number: int) -> bool:
        """Whether a cached block has this key."""
        first = self.pool.blocks[number].block_hash
        return (self.key(first) == key and self.group(first) == index) or (index, key) in self._hashes(number)

    def _searched(self, index: int, keys: list[Key], span: Iterable[int]) -> list[int]:
        """The blocks of the span that have these keys, null where none has one; empty where none has any."""
        null = self.header.null
        known = {key: n for n in span if n != null for group, key in self._hashes(n) if group == index}
        return [known.get(key, null) for key in keys] if known.keys() & set(keys) else []


def _texts(keys: Sequence[Any]) -> list[str]:
    return list(map(bytes.hex if keys and isinstance(keys[0], bytes) else str, keys))
