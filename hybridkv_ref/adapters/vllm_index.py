"""The prefix index of a vLLM manager, as its published events tell of it: entries with the blocks that they name.

An event says hashes, not blocks: which ones they are is found in the block table of the request that was served, or,
where a call serves none, anywhere in the pool.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

from hybridkv_ref import events as ev
from hybridkv_ref.events import Event, Header


class WatchedIndex:
    """``taken``: the events that the engine published since they were last cleared. ``parts``: entries not told."""

    def __init__(
        self, pool: Any, header: Header, take: Callable[[], list[Any]], sink: Callable[[Event], object]
    ) -> None:
        from vllm.v1.core.kv_cache_utils import get_block_hash, maybe_convert_block_hash

        self.pool, self.header, self.take, self.sink = pool, header, take, sink
        self.key: Callable[[Any], str] = lambda found: _text(maybe_convert_block_hash(get_block_hash(found)))
        # One block mostly, so no list is made for it: collecting garbage would walk all of them.
        self.entries: list[dict[str, int | list[int]]] = [{} for _ in header.groups]
        self.partial: Counter[tuple[int, str]] = Counter()
        self.taken: list[Any] = []
        self.parts = 0

    def leave(self, reused: Set[int] = frozenset()) -> list[Any]:
        """Tells entries that left the index, of blocks ``reused`` anew first; gives the events of those that came."""
        fresh, stored = self.take(), []
        self.taken += fresh
        gone: dict[int, list[Any]] = {}
        for event in fresh:
            form = type(event).__name__
            if form == "BlockRemoved":
                gone.setdefault(event.group_idx or 0, []).extend(event.block_hashes)
            elif form == "BlockStored":
                stored.append(event)
            else:
                self._removed(gone, reused)
                gone.clear()
                for known in self.entries:
                    known.clear()
                self.partial.clear()
                for group in self.header.groups:
                    self.sink(ev.Reset(group.name))
        self._removed(gone, reused)
        return stored

    def _name(self, index: int) -> str:
        """A group by its index, which is its name where the configuration has none such."""
        return self.header.groups[index].name if index < len(self.header.groups) else str(index)

    def _removed(self, gone: dict[int, list[Any]], reused: Set[int]) -> None:
        """Entries that left, together per group: the engine says one by one of each block that it takes."""
        for index, hashes in gone.items():
            entries = self.entries[index] if index < len(self.entries) else {}
            keys, numbers = list[str](), list[int]()
            for key in map(_text, hashes):
                if self.partial and self.partial[index, key]:
                    self.partial[index, key] -= 1
                    continue
                number = entries.pop(key, None)
                if number is None:
                    self.sink(ev.KeyRemove(self._name(index), [key]))
                    continue
                if isinstance(number, list):
                    # A block may be taken and published under the same key again by one call.
                    left = [n for n in number if n in reused or (index, key) not in self._hashes(n)] or number
                    number.remove(left[0])
                    entries[key] = number if len(number) > 1 else number[0]
                    number = left[0]
                keys.append(key)
                numbers.append(number)
            if keys:
                self.sink(ev.KeyRemove(self._name(index), keys, numbers))

    def _hashes(self, number: int) -> set[tuple[int, str]]:
        from vllm.v1.core.kv_cache_utils import get_group_id

        found = self.pool.blocks[number].block_hash
        more = getattr(self.pool, "cached_block_hashes_by_block", {}).get(number, ())
        return {(get_group_id(h), self.key(h)) for h in (*((found,) if found is not None else ()), *more)}

    def come(self, events: Iterable[Any], tables: Sequence[list[int]] = (), stored: list[int] | None = None) -> None:
        """Tells entries that came: of a request's tables, from the index ``stored`` per group on, which moves along."""
        for event in events:
            index = event.group_idx or 0
            keys = [_text(h) for h in event.block_hashes]
            if index >= len(self.header.groups):
                self.sink(ev.KeyPublish(self._name(index), keys))
                continue
            if event.block_size % self.header.groups[index].block:
                self.partial.update((index, key) for key in keys)
                self.parts += len(keys)
                continue
            if stored is None:
                blocks = self._searched(index, keys, range(self.pool.num_gpu_blocks)) or [self.header.null] * len(keys)
            else:
                span = tables[index][stored[index] :]
                blocks = self._found(index, keys, span[: len(event.token_ids) // event.block_size])
                blocks = blocks or self._found(index, keys, span) or self._searched(index, keys, span)
                if blocks and blocks[-1] in span:
                    stored[index] = tables[index].index(blocks[-1], stored[index]) + 1
            entries, null = self.entries[index], self.header.null
            for key, number in zip(keys, blocks, strict=False):
                if number != null:
                    live = entries.get(key)
                    if live is None:
                        entries[key] = number
                    elif isinstance(live, int):
                        entries[key] = [live, number]
                    else:
                        live.append(number)
            self.sink(ev.KeyPublish(self.header.groups[index].name, keys, blocks))

    def _found(self, index: int, keys: list[str], span: list[int]) -> list[int]:
        """The cached blocks of a span, where they are as many as the keys and both ends agree."""
        all_blocks, null = self.pool.blocks, self.header.null
        found = [n for n in span if n != null and all_blocks[n].block_hash is not None]
        if len(found) != len(keys):
            return []
        agree = all((index, keys[i]) in self._hashes(found[i]) for i in (0, -1) if keys)
        return found if agree else []

    def _searched(self, index: int, keys: list[str], span: Iterable[int]) -> list[int]:
        """The blocks of the span that have these keys, null where none has one; empty where none has any."""
        null = self.header.null
        known = {key: n for n in span if n != null for group, key in self._hashes(n) if group == index}
        return [known.get(key, null) for key in keys] if known.keys() & set(keys) else []


def _text(key: bytes | int) -> str:
    return key.hex() if isinstance(key, bytes) else str(key)
