"""The tree of an SGLang radix cache as it can be seen: pages by key and group, locks on the way to the root.

Two forms of nodes are known: one with a field for each of two groups, and one with a list of components.
"""

from dataclasses import dataclass
from typing import Any

from hybridkv_ref.errors import InputError

FULL, WINDOW, STATE = 0, 1, 1
"""The groups, as indices of a header's groups: full attention, and either a window or states."""

COMPONENT = {"window": 1, "state": 2}
"""The second group's index among a node's components."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A page of one group that the tree names: its key, how many pages lie before it, the page, the key before it."""

    key: int
    depth: int
    page: int
    parent: int


class Tree:
    """Reads one cache. Pages are numbers of whole pages, 0 where there is none; a state stands at its last token."""

    def __init__(self, cache: Any, page: int, states: bool) -> None:
        self.cache, self.page, self.states = cache, page, states
        self.second = COMPONENT["state" if states else "window"]
        self.slots = cache.token_to_kv_pool_allocator
        self.core = core = getattr(cache, "tree_core", cache)
        try:
            root = core.root_node
        except (AttributeError, NotImplementedError) as error:
            kind = f"{type(core).__module__}.{type(core).__qualname__}"
            raise InputError(f"{kind}: its nodes cannot be seen: {error}") from None
        self.many = hasattr(root, "component_data")

    def paged(self, slots: Any) -> list[int]:
        """The pages of slots that begin a page."""
        return [s // self.page for s in slots[:: self.page].tolist()]

    def window(self, slots: Any) -> list[int]:
        """The window's pages that stand beside these slots of full attention."""
        return [s // self.page for s in self.slots.full_to_swa_index_mapping[slots[:: self.page]].tolist()]

    def pages(self, node: Any) -> tuple[list[int], list[int]]:
        """A node's pages by group; zeros where the group has none."""
        count = -(-len(node.key) // self.page)
        if not self.many:
            full = self.paged(node.value)
            if self.states:
                return full, self._at_end(node.mamba_value, count)
            return full, [0] * count if node.swa_tombstone else self.window(node.value)
        found = []
        for index in (FULL, self.second):
            value = node.component_data[index].value
            if index == COMPONENT["state"]:
                found.append(self._at_end(value, count))
            else:
                found.append([0] * count if value is None else self.paged(value))
        return found[0], found[1]

    @staticmethod
    def _at_end(value: Any, count: int) -> list[int]:
        return [*[0] * (count - 1), 0 if value is None else int(value[0])]

    def locks(self, node: Any) -> tuple[int, int]:
        """How often a node is locked, by group."""
        if not self.many:
            return node.full_lock_ref, node.mamba_lock_ref if self.states else node.swa_lock_ref
        return node.component_data[FULL].lock_ref, node.component_data[self.second].lock_ref

    def way(self, handle: Any) -> list[Any]:
        """The nodes from a handle up to the root, which is left out."""
        node, found = self.cache.resolve_node_handle(handle), []
        while node is not None and node is not self.core.root_node:
            found.append(node)
            node = node.parent
        return found

    def entries(self) -> list[dict[int, Entry]]:
        """All that the tree names, by group and key: a key stands for all tokens up to the page's end."""
        found: list[dict[int, Entry]] = [{}, {}]
        todo: list[tuple[Any, int, int]] = [(child, 0, 0) for child in self.core.root_node.children.values()]
        while todo:
            node, above, depth = todo.pop()
            tokens, pages = node.key.raw_token_ids(), self.pages(node)
            space: tuple[Any, ...] = () if above else (node.key.extra_key, node.key.cache_salt)
            for place, at in enumerate(range(0, len(tokens), self.page)):
                key = hash((above, tuple(tokens[at : at + self.page]), *space))
                for group in (FULL, WINDOW):
                    if page := pages[group][place]:
                        found[group][key] = Entry(key, depth, page, above)
                above, space, depth = key, (), depth + 1
            todo += [(child, above, depth) for child in node.children.values()]
        return found

    def reach(self, named: dict[int, Entry], tokens: list[int], space: tuple[Any, ...]) -> int:
        """How many of these tokens the entries of one group hold from the first on."""
        above = 0
        for at in range(0, len(tokens), self.page):
            above = hash((above, tuple(tokens[at : at + self.page]), *(() if at else space)))
            if above not in named:
                return at
        return len(tokens)

    def free(self) -> list[list[int]]:
        """The free pages of each group's pool, as often as they are free."""
        if self.states:
            pool = self.cache.req_to_token_pool.mamba_allocator
            return [self.slots.free_pages.tolist(), pool.free_slots.tolist()]
        pools = (self.slots.full_attn_allocator, self.slots.swa_attn_allocator)
        return [(pool.get_all_free_pages() if self.page > 1 else pool.free_pages).tolist() for pool in pools]
