"""A prefix cache as engines have one: blocks by reference counts, found by the hash of all tokens before their end."""

from collections import Counter
from collections.abc import Callable, Sequence


class BlockManager:
    """``size`` tokens a block, numbers from 1; ``on_evict`` is told key and number of each entry that goes."""

    def __init__(self, blocks: int, size: int, on_evict: Callable[[str, int], None]) -> None:
        self.size, self.on_evict = size, on_evict
        self.free = list(range(1, blocks + 1))
        self.refs: Counter[int] = Counter()
        self.key_of: dict[int, str] = {}
        self.found: dict[str, int] = {}

    def key(self, tokens: Sequence[int], salt: str) -> str:
        return f"{salt}/{','.join(map(str, tokens))}"

    def match(self, tokens: Sequence[int], salt: str) -> list[int]:
        """The cached blocks of a prompt, held from here on; the last token is always computed."""
        hit: list[int] = []
        while (end := (len(hit) + 1) * self.size) < len(tokens):
            block = self.found.get(self.key(tokens[:end], salt))
            if block is None:
                break
            hit.append(block)
        self.refs.update(hit)
        return hit

    def take(self, count: int) -> list[int] | None:
        """Empty blocks, held from here on; None if there are too few."""
        self.evict(count - len(self.free))
        if count > len(self.free):
            return None
        taken, self.free = self.free[: max(count, 0)], self.free[max(count, 0) :]
        self.refs.update(taken)
        return taken

    def publish(self, block: int, tokens: Sequence[int], salt: str) -> str:
        """A block that holds the end of these tokens can be found; its key, or "" if it has one."""
        if block in self.key_of:
            return ""
        key = self.key_of[block] = self.key(tokens, salt)
        self.found.setdefault(key, block)
        return key

    def release(self, blocks: Sequence[int]) -> None:
        self.refs.subtract(blocks)
        self.free += [b for b in blocks if not self.refs[b] and b not in self.key_of]

    def evict(self, count: int) -> None:
        for block in [b for b in self.key_of if not self.refs[b]][: max(count, 0)]:
            key = self.key_of.pop(block)
            if self.found.get(key) == block:
                del self.found[key]
            self.on_evict(key, block)
            self.free.append(block)
