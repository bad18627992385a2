"""What SGLang's drivers have in common: the models and their sizes, prompts by chance, hits judged.

The requests share prefixes and come again; the pools are so small that they take pages from each other.
"""

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from hybridkv_ref.adapters.sglang import Attached
from hybridkv_ref.adapters.sglang_build import with_states
from hybridkv_ref.adapters.sglang_tree import FULL, WINDOW
from hybridkv_ref.errors import InputError
from hybridkv_ref.models import Model, load_model
from hybridkv_ref.oracle import Oracle

MODELS = (
    "gpt-oss-20b:9@1",
    "gpt-oss-20b:9@4",
    "gpt-oss-20b:4@2",
    "gpt-oss-20b@16",
    "gemma-3-27b@64",
    "qwen3-next-80b-a3b@1",
)
"""After a colon: another window than the model's. After @: tokens of a page."""


def geometry(name: str) -> tuple[Model, int, int]:
    """A model, with another window where the name says so; the window; tokens of a page.

    InputError where a number is none, and for groups that the cache does not have.
    """
    base, at, page = name.partition("@")
    base, colon, given = base.partition(":")
    for mark, said in ((colon, given), (at, page)):
        if mark and not (said.isdecimal() and int(said)):
            raise InputError(f"--model {name}: expected a number of tokens above 0 after '{mark}'")
    model = load_model(base)
    if with_states(model, int(page or 1)) and given:
        raise InputError(f"--model {name}: no group of it has a window")
    window = int(given) if given else max(g.span or 1 for g in model.groups)
    groups = [msgspec.structs.replace(g, window=window) if g.span else g for g in model.groups]
    return msgspec.structs.replace(model, groups=tuple(groups)), window, int(page or 1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the pools, in pages; ``room``: tokens that the smaller one holds, ``longest``: tokens of a request at most."""

    pages: int
    window_pages: int
    room: int
    longest: int


def sizes(window: int, page: int, pages: int = 0, window_pages: int = 0) -> Sizes:
    """Room for a few requests of a model with such a window, where nothing else is wanted."""
    span = -(-window // page)
    pages, window_pages = pages or 110 + 6 * span, window_pages or 45 + 5 * span
    if page > 1:
        pages, window_pages = pages // 2, window_pages * 3 // 4
    room = min(pages, window_pages) * page
    return Sizes(pages, window_pages, room, room + 2 * window + 100)


class Prompts:
    """Tokens by chance: of ``room`` tokens half at most; ``scale`` stretches their ends, which none shares."""

    def __init__(self, chance: random.Random, room: int, scale: int) -> None:
        self.chance, self.room, self.scale = chance, room, scale
        self.stems = [self._fresh(room) for _ in range(3)]
        self.past: list[list[int]] = []

    def _fresh(self, count: int) -> list[int]:
        return [self.chance.randrange(1 << 16) for _ in range(count)]

    def draw(self) -> list[int]:
        """A prompt that came before, a part of one, or a new end after a shared beginning."""
        c = self.chance
        if self.past and c.random() < 0.4:
            tokens = list(c.choice(self.past))
            if c.random() < 0.4:
                tokens = tokens[: c.randint(1, len(tokens))]
            if c.random() < 0.4:
                tokens += self._fresh(c.randint(1, 12 * self.scale))
        else:
            stem = c.choice(self.stems)
            cut = c.randint(0, self.room // 3)
            tokens = stem[:cut] + self._fresh(c.randint(1, 12 * self.scale))
        tokens = tokens[: self.room // 2]
        self.past = [*self.past[-5:], tokens]
        return tokens


def judge(oracle: Oracle, attached: Attached, req: Any, used: int, stats: Counter[str], lost: Counter[str]) -> None:
    """The engine's hit against the longest one; tokens that it gives up go by the group that ends its hit."""
    known = oracle.state.requests.get(req.rid)
    if known is None or known.lost:
        return
    best = oracle.expected_hit(req.rid).r
    stats["lookups"] += 1
    stats["hit_tokens"] += used
    stats["best_tokens"] += best
    if used > best:
        stats["longer"] += 1
    elif used < best:
        stats["shorter"] += 1
        stats["lost_tokens"] += best - used
        lost[blamed(attached, req, best)] += best - used


def blamed(attached: Attached, req: Any, best: int) -> str:
    """The group that ends a hit before the longest one: full attention, where the tree does not name all its pages."""
    tokens = [*req.origin_input_ids, *req.output_ids][:best]
    whole = attached.tree.reach(attached.named[FULL], tokens, (req.extra_key, req.cache_salt)) >= best
    return attached.names[WINDOW if whole else FULL]
