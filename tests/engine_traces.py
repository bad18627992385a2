"""Real request traces as events: what a prefix cache with LRU eviction does with them, block by block.

A plain engine of one device: every group stores the prompt in blocks of one hash of the trace, hits are what all
groups have, what nobody uses is evicted oldest first, tails before heads.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from hybridkv_ref.events import (
    Allocate,
    Arrive,
    Complete,
    Dispatch,
    Event,
    Finish,
    Free,
    GroupSpec,
    Header,
    KeyPublish,
    KeyRemove,
    Lookup,
    Pin,
    Span,
)
from hybridkv_ref.recovery import Group, cache_group
from hybridkv_ref.request_traces import Request


def header(unit: int, windows: tuple[int, ...] = (128,), capacity: int = 0) -> Header:
    """Full attention and some windows, all in blocks of ``unit`` tokens."""
    groups = [GroupSpec("full", "compressed_kv", unit, capacity=capacity)]
    groups += [
        GroupSpec(f"win{i}", "swa_window", unit, window=window, capacity=capacity) for i, window in enumerate(windows)
    ]
    claims = ("blocks", "reuse", "index", "steps")
    return Header("hybridkv.events/1", level="L2", unit=unit, groups=tuple(groups), capabilities=claims)


class _Pool:
    """The blocks of one group; ``idle`` holds cached blocks that nobody uses, oldest first."""

    def __init__(self, need: Group, count: int) -> None:
        self.need, self.name = need, need.name
        self.free = list(range(count, 0, -1))
        self.idle: OrderedDict[str, None] = OrderedDict()
        self.block: dict[str, int] = {}

    def take(self, count: int) -> tuple[list[int], list[str]]:
        gone: list[str] = []
        while len(self.free) < count and self.idle:
            key, _ = self.idle.popitem(last=False)
            gone.append(key)
            self.free.append(self.block.pop(key))
        return [self.free.pop() for _ in range(count)], gone


def events_of(requests: Iterable[Request], head: Header, capacity: int) -> Iterator[Event]:
    """The events of serving these requests one after the other with ``capacity`` blocks in each group."""
    unit = head.unit
    needs = [
        cache_group(g.name, g.kind, unit, {"ratio": 1} if not g.window else {"window": g.window}) for g in head.groups
    ]
    pools = [_Pool(need, capacity - 1) for need in needs]
    names: dict[tuple[str, int], str] = {}
    for number, request in enumerate(requests):
        name, ids = f"r{number}", list(request.block_ids)
        whole = min(request.input_tokens // unit, capacity - 1)
        length = request.input_tokens if whole == request.input_tokens // unit else whole * unit + 1
        keys, before = [], ""
        for place in range(whole):
            before = names.setdefault((before, ids[place]), f"k{len(names)}")
            keys.append(before)
        yield Arrive(name, length, ids=ids[:whole])
        matched = 0
        while matched < min(whole, (length - 1) // unit) and keys[matched] in pools[0].block:
            matched += 1
        used = next((n for n in range(matched, 0, -1) if all(_has(p, keys, n * unit, unit) for p in pools)), 0)
        blocks: dict[str, list[int]] = {}
        for pool in pools:
            first = pool.need.need(used * unit, used * unit)[0] // unit
            blocks[pool.name] = [pool.block[key] if i >= first else 0 for i, key in enumerate(keys[:used])]
        yield Lookup(name, used * unit, matched=matched * unit, blocks=blocks)
        spans, new = [], {}
        for pool in pools:
            held = [b for b in blocks[pool.name] if b]
            if held:
                yield Pin(name, pool.name, held)
            for key in keys[:used]:
                pool.idle.pop(key, None)
        for pool in pools:
            taken, gone = pool.take(whole - used)
            if gone:
                yield KeyRemove(pool.name, gone)
            new[pool.name] = taken
            if taken:
                yield Allocate(name, pool.name, taken)
                spans.append(Span(pool.name, taken, used * unit, whole * unit))
        reads = [Span(g, [b for b in held if b]) for g, held in blocks.items() if any(held)]
        yield Dispatch(f"s{number}", name, reads=reads, writes=spans)
        yield Complete(f"s{number}")
        for pool in pools:
            fresh = [(k, b) for k, b in zip(keys[used:], new[pool.name], strict=True) if k not in pool.block]
            pool.block.update(fresh)
            if fresh:
                yield KeyPublish(pool.name, [k for k, _ in fresh], [b for _, b in fresh])
        yield Finish(name)
        for pool in pools:
            held = [b for b in (*blocks[pool.name], *new[pool.name]) if b]
            if held:
                yield Free(name, pool.name, held[::-1])
            known = {pool.block[k]: k for k in keys if k in pool.block}
            pool.free += [b for b in new[pool.name] if b not in known]
            for key in reversed(keys):
                if key in pool.block:
                    pool.idle[key] = None
                    pool.idle.move_to_end(key)


def _has(pool: _Pool, keys: list[str], position: int, unit: int) -> bool:
    lo, hi, _ = pool.need.need(position, position)
    return all(keys[i] in pool.block for i in range(lo // unit, -(-hi // unit)))
