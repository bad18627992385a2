"""Two engines that differ in one function: how long a hit is.

``SimpleBlockEngine`` does what a prefix cache of plain attention does: the first block that the prefix hash does not
find ends the hit, and what holds for one group is taken to hold for all.  ``GroupAwareEngine`` asks every group what it
needs to resume.  Both keep reference counts, share blocks by prefix and evict what was used least recently, for each
group by itself.
"""

from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hybridkv_ref.conformance.engine import Pool, Recorder
from hybridkv_ref.events import (
    Accept,
    Allocate,
    Complete,
    Dispatch,
    Draft,
    Finish,
    Free,
    GroupSpec,
    Header,
    KeyPublish,
    KeyRemove,
    Lookup,
    Pin,
    Preempt,
    Reject,
    Span,
)
from hybridkv_ref.recovery import Contents, can_resume, group_of

NULL = 0


@dataclass
class Running:
    """A request: token ids, salt, blocks per group from position 0 on, what is dispatched and done."""

    tokens: list[int]
    salt: str
    blocks: dict[str, list[int]]
    sent: int
    done: int
    steps: list[tuple[str, int, int]] = field(default_factory=list)
    gone: bool = False


class SimpleBlockEngine(Recorder):
    """A prefix-hash cache that treats all groups alike.

    All groups have blocks of ``size`` tokens; ``groups`` describes them, capacities included.
    """

    version = "1"

    def __init__(self, groups: Sequence[GroupSpec]) -> None:
        super().__init__()
        self.name = type(self).__name__
        self.size = groups[0].block
        self.groups = {g.name: g for g in groups}
        self.needs = {g.name: group_of(g) for g in groups}
        states = any(need.exact for need in self.needs.values())
        drafts = () if states else ("drafts",)  # a state cannot be taken back
        self.capabilities = ("blocks", "reuse", "index", "steps", "preemption", "salts", *drafts)
        self.header = Header("hybridkv.events/1", level="L2", unit=self.size, groups=tuple(groups))
        self.reset()

    def reset(self) -> None:
        """See ``Engine``."""
        self.events.clear()
        self.free = {n: list(range(1, g.capacity)) for n, g in self.groups.items()}
        self.refs: dict[str, Counter[int]] = {n: Counter() for n in self.groups}
        self.key_of: dict[str, OrderedDict[int, str]] = {n: OrderedDict() for n in self.groups}
        self.found: dict[str, dict[str, int]] = {n: {} for n in self.groups}
        self.running: dict[str, Running] = {}
        self.steps = 0

    def snapshot(self) -> Mapping[str, Pool]:
        """See ``Engine``."""
        return {n: Pool(g.capacity - 1, len(self.free[n])) for n, g in self.groups.items()}

    # -- memory --------------------------------------------------------------------------------------------------------

    def idle(self, group: str) -> list[int]:
        """Cached blocks that nobody holds, the least recently used first."""
        return [b for b in self.key_of[group] if not self.refs[group][b]]

    def take(self, group: str, count: int) -> list[int]:
        """Empty blocks; the caller has seen to it that there is room."""
        for block in self.idle(group)[: max(count - len(self.free[group]), 0)]:
            self.forget(group, block)
        taken = [self.free[group].pop(0) for _ in range(count)]
        self.refs[group].update(taken)
        return taken

    def forget(self, group: str, block: int) -> None:
        """A cached block is found no more and free."""
        key = self.key_of[group].pop(block)
        if self.found[group].get(key) == block:
            del self.found[group][key]
        self.events.append(KeyRemove(group, [key], blocks=[block]))
        self.free[group].append(block)

    def release(self, req: str, group: str, blocks: Sequence[int]) -> None:
        """The request lets go of blocks; what has no key is free."""
        held = [b for b in blocks if b != NULL]
        if held:
            self.events.append(Free(req, group, held))
        for block in held:
            self.refs[group][block] -= 1
            if block in self.key_of[group]:
                self.key_of[group].move_to_end(block)
            elif not self.refs[group][block]:
                self.free[group].append(block)

    def evict(self, group: str, blocks: int) -> bool:
        """See ``Engine``."""
        for name in [group] if group else self.groups:
            for block in self.idle(name)[:blocks]:
                self.forget(name, block)
        return True

    # -- the hit -------------------------------------------------------------------------------------------------------

    def key(self, tokens: Sequence[int], salt: str, index: int) -> str:
        """Stands for all tokens up to the end of a block."""
        return f"{salt}/{','.join(map(str, tokens[: (index + 1) * self.size]))}"

    def hit(self, tokens: Sequence[int], salt: str) -> tuple[int, int]:
        """(blocks that are used, blocks that match)."""
        first = next(iter(self.groups))
        count = 0
        while count < (len(tokens) - 1) // self.size and self.key(tokens, salt, count) in self.found[first]:
            count += 1
        return count, count

    def begin(self, req: str, tokens: Sequence[int], salt: str) -> int | None:
        """See ``Engine``."""
        count, matched = self.hit(tokens, salt)
        used = count * self.size
        blocks: dict[str, list[int]] = {}
        for group, need in self.needs.items():
            lo, hi, exact = need.need(used, used)
            first = count - 1 if exact else lo // self.size
            wanted = range(first if lo < hi else count, count)
            blocks[group] = [
                self.found[group].get(self.key(tokens, salt, i), NULL) if i in wanted else NULL for i in range(count)
            ]
        named = {g: list(b) for g, b in blocks.items()}
        self.events.append(Lookup(req, used, matched=matched * self.size, blocks=named))
        for group in self.groups:
            self.refs[group].update(b for b in blocks[group] if b != NULL)
        more = -(-len(tokens) // self.size) - count
        if any(len(self.free[g]) + len(self.idle(g)) < more for g in self.groups):
            for group in self.groups:
                self.refs[group].subtract(b for b in blocks[group] if b != NULL)
            return None
        for group in self.groups:
            if held := [b for b in blocks[group] if b != NULL]:
                self.events.append(Pin(req, group, held))
        self.running[req] = Running(list(tokens), salt, blocks, used, used)
        self.grow(req, len(tokens))
        return used

    def grow(self, req: str, upto: int) -> bool:
        """Blocks up to a position; False if there is no room."""
        request = self.running[req]
        more = {g: -(-upto // self.size) - len(b) for g, b in request.blocks.items()}
        if any(len(self.free[g]) + len(self.idle(g)) < count for g, count in more.items()):
            return False
        for group, count in more.items():
            if count > 0:
                taken = self.take(group, count)
                self.events.append(Allocate(req, group, taken, at=len(request.blocks[group]) * self.size))
                request.blocks[group] += taken
        return True

    # -- steps ---------------------------------------------------------------------------------------------------------

    def schedule(self, req: str, count: int, new: Sequence[int], drafts: int) -> bool:
        """See ``Engine``."""
        request = self.running[req]
        lo, hi = request.sent, request.sent + count
        if not self.grow(req, hi):
            return False
        request.tokens += new
        self.steps += 1
        step, touched = f"s{self.steps}", range(lo // self.size, -(-hi // self.size))
        if drafts:
            self.events.append(Draft(req, drafts))
        writes = [Span(g, [b[i] for i in touched], lo, hi) for g, b in request.blocks.items()]
        reads = [
            Span(g, held)
            for g, b in request.blocks.items()
            if not self.needs[g].exact and (held := [n for n in b[: lo // self.size] if n != NULL])
        ]
        self.events.append(Dispatch(step, req, reads=reads, writes=writes))
        request.steps.append((step, hi, drafts))
        request.sent = hi
        return True

    def complete(self, req: str, accepted: int) -> bool:
        """See ``Engine``."""
        request = self.running[req]
        step, hi, drafts = request.steps.pop(0)
        self.events.append(Complete(step))
        if request.gone:
            self.leave(req)
            return True
        if drafts:
            upto = hi - drafts + accepted
            self.events.append(Accept(req, upto))
            if upto < hi:
                self.events.append(Reject(req, upto, at=upto))
                del request.tokens[upto:]
            hi = request.sent = upto
        request.done = hi
        self.publish(req)
        return True

    def publish(self, req: str) -> None:
        """Whole blocks that are done can be found."""
        request = self.running[req]
        for group, blocks in request.blocks.items():
            for index in range(request.done // self.size):
                block = blocks[index]
                if block != NULL and block not in self.key_of[group]:
                    key = self.key(request.tokens, request.salt, index)
                    self.key_of[group][block] = key
                    self.found[group].setdefault(key, block)
                    self.events.append(KeyPublish(group, [key], [block]))

    # -- the end -------------------------------------------------------------------------------------------------------

    def finish(self, req: str) -> bool:
        """See ``Engine``."""
        self.events.append(Finish(req))
        self.leave(req)
        return True

    def abort(self, req: str) -> bool:
        """See ``Engine``."""
        if req in self.running:
            self.running[req].gone = True
            self.leave(req)
        return True

    def preempt(self, req: str) -> bool:
        """See ``Engine``."""
        self.events.append(Preempt(req))
        self.leave(req)
        return True

    def leave(self, req: str) -> None:
        """Gives everything back once no step runs."""
        request = self.running[req]
        if not request.steps:
            for group, blocks in request.blocks.items():
                self.release(req, group, blocks[::-1])
            del self.running[req]


class GroupAwareEngine(SimpleBlockEngine):
    """The same cache, which asks every group for what it needs to resume."""

    def hit(self, tokens: Sequence[int], salt: str) -> tuple[int, int]:
        """The largest count at which every group can resume."""
        most = (len(tokens) - 1) // self.size
        held = {g: [self.key(tokens, salt, i) in self.found[g] for i in range(most)] for g in self.groups}
        contents = {
            group: Contents(
                sum(1 << i for i, there in enumerate(has) if there),
                frozenset((i + 1) * self.size for i, there in enumerate(has) if there),
            )
            for group, has in held.items()
        }
        matched = max(next((i for i, there in enumerate(has) if not there), most) for has in held.values())
        for count in range(most, 0, -1):
            at = count * self.size
            if all(can_resume(need, contents[group], at, at) for group, need in self.needs.items()):
                return count, max(matched, count)
        return 0, matched
