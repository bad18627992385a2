"""How long the longest hit of a very long request takes from stored bitmaps: run it as a script.

One request of 1,048,576 tokens in DeepSeek-V4-Flash's geometry, every group cached at the granularity of its blocks:
all of it, without the tails of the second half, with one hole, and without every second block of the window. The plain
definition is timed beside it.
"""

import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace

import msgspec
import numpy as np

from hybridkv_ref.allocator import CacheSegment, build
from hybridkv_ref.allocator.index import Node, PrefixIndex
from hybridkv_ref.fast_hit import Finder
from hybridkv_ref.models import load_model
from hybridkv_ref.recovery import Contents, Hit, from_model, longest_hit

TOKENS = 1_048_576


def milliseconds(action: Callable[[], object], rounds: int) -> str:
    """Median and slowest of some rounds."""
    times = []
    for _ in range(rounds):
        begin = time.perf_counter()
        action()
        times.append((time.perf_counter() - begin) * 1e3)
    return f"{statistics.median(times):9.3f} ms median, {max(times):9.3f} ms slowest of {rounds}"


def main() -> None:
    """Prints one line per case: blocks stored, hit, time."""
    model = load_model("deepseek-v4-flash")
    groups = from_model(model)
    finder = Finder(groups)
    ends = frozenset(range(0, TOKENS + 1, model.alignment))
    whole = {g.name: Contents((1 << TOKENS // g.unit) - 1, ends if g.exact else frozenset()) for g in groups}
    no_tail = {**whole, "csa_tail": Contents(whole["csa_tail"].blocks, frozenset(e for e in ends if e < TOKENS // 2))}
    csa = whole["csa"].blocks
    hole = {**whole, "csa": Contents(csa & ~(1 << 2048))}
    comb = {**whole, "window": Contents(sum(1 << i for i in range(0, TOKENS // 64, 2)))}
    for name, contents in (
        ("all cached", whole),
        ("tails of the first half", no_tail),
        ("a hole", hole),
        ("comb", comb),
    ):
        blocks = sum(c.blocks.bit_count() for c in contents.values())
        hit = finder.longest_hit(contents, TOKENS, TOKENS + 1, model.alignment)
        timed = milliseconds(lambda c=contents: finder.longest_hit(c, TOKENS, TOKENS + 1, model.alignment), 30)  # type: ignore[misc]
        print(f"{name:24} {blocks:9,} blocks, hit {hit.r:9,}: fast  {timed}")
        plain = milliseconds(lambda c=contents: longest_hit(groups, c, TOKENS, TOKENS + 1, model.alignment), 1)  # type: ignore[misc]
        print(f"{'':57}plain {plain}")
    from_keys(finder)


def from_keys(finder: Finder) -> None:
    """From block keys instead of stored bitmaps: the index is asked for each key, then the search runs."""
    model = load_model("deepseek-v4-flash")
    groups = tuple(msgspec.structs.replace(g, layers=1, layer_ids=None) for g in model.groups)
    geometry = build(msgspec.structs.replace(model, groups=groups))
    index = PrefixIndex(geometry, [{"READY"} for _ in geometry.groups])
    tokens = np.arange(TOKENS)
    keys = index.keys(tokens, b"")
    cached = CacheSegment(geometry.groups[0], SimpleNamespace(stage="READY"))
    for key in keys:
        node = index.nodes[key] = Node(len(geometry.groups))
        node.segments = [cached] * len(geometry.groups)
    search = Finder([g.recovery for g in geometry.groups])

    def look() -> Hit:
        path = index.path(keys)
        return search.longest_hit(index.contents(path), TOKENS, TOKENS + 1, geometry.unit)

    print(f"from {len(keys):,} keys of {geometry.unit} tokens, hit {look().r:9,}: {milliseconds(look, 30)}")
    print(f"hashing the tokens into keys: {milliseconds(lambda: index.keys(tokens, b''), 5)}")


if __name__ == "__main__":
    main()
