"""A small engine that does everything right, driven by chance: it leaves legal traces of events.

It knows nothing of the oracle or the tables. Blocks of two or three groups are shared by prefix; steps are in flight
while others are scheduled; windows slide, drafts are refused, requests are preempted and aborted, cached blocks go to
a host tier and come back, transfers are cancelled and end late, equal prefixes are computed twice and published
twice.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from hybridkv_ref.events import (
    Abort,
    Accept,
    Allocate,
    Arrive,
    Complete,
    DeferFree,
    Dispatch,
    Draft,
    Drain,
    Event,
    Finish,
    Free,
    GroupSpec,
    Header,
    KeyPublish,
    KeyRemove,
    Lookup,
    Part,
    Pin,
    Preempt,
    Reject,
    Span,
    TransferBegin,
    TransferCancel,
    TransferEnd,
    TransferFail,
    TransferPart,
)

SIZE, WINDOW, HOST = 4, 8, "host"
CLAIMS = ("blocks", "reuse", "index", "limits", "longest", "steps")


@dataclass
class Running:
    """A request: its ids, tokens dispatched and done, blocks per group from position 0 on (0: none)."""

    name: str
    ids: list[int]
    length: int
    blocks: dict[str, list[int]]
    sent: int = 0
    done: int = 0
    steps: list[tuple[str, int]] = field(default_factory=list)
    published: dict[str, int] = field(default_factory=dict)
    gone: str = ""
    load: str = ""


class Driver:
    """An engine; ``events`` is the trace so far. ``recurrent`` adds a group of states, which excludes drafts.

    By chance it says which block loses its key, or leaves that open where several have the same."""

    def __init__(
        self, chance: random.Random, recurrent: bool = False, capacity: int = 40, in_order: bool = False
    ) -> None:
        self.chance, self.recurrent, self.exact = chance, recurrent, chance.random() < 0.5
        self.in_order = in_order
        self.groups = ["full", "win", *(["rec"] if recurrent else [])]
        specs = [GroupSpec("full", "compressed_kv", SIZE, capacity=capacity)]
        specs.append(GroupSpec("win", "swa_window", SIZE, window=WINDOW, capacity=capacity))
        specs += [GroupSpec("rec", "recurrent_state", SIZE, capacity=capacity)] if recurrent else []
        claims = (*CLAIMS, *(("in_order",) if in_order else ()))
        self.header = Header("hybridkv.events/1", level="L2", unit=SIZE, groups=tuple(specs), capabilities=claims)
        self.events: list[Event] = []
        self.free = {g: list(range(1, capacity)) for g in self.groups}
        self.refs: dict[tuple[str, int], int] = {}
        self.cached: dict[tuple[str, str], list[int]] = {}
        self.key_of: dict[tuple[str, int], str] = {}
        self.copying: set[tuple[str, int]] = set()
        self.stored: dict[str, int] = {}
        self.host, self.names, self.steps = 100, 0, 0
        self.running: list[Running] = []
        self.stores: dict[str, tuple[str, int, bool]] = {}

    def say(self, event: Event) -> None:
        self.events.append(event)

    # -- memory ----------------------------------------------------------------------------------------------------

    def evictable(self, group: str) -> list[int]:
        return [b for (g, b) in self.key_of if g == group and not self.refs.get((g, b)) and (g, b) not in self.copying]

    def room(self, group: str, count: int) -> bool:
        return len(self.free[group]) + len(self.evictable(group)) >= count

    def take(self, group: str, count: int) -> list[int]:
        while len(self.free[group]) < count:
            victim = self.evictable(group)[0]
            self.forget(group, victim)
            self.free[group].append(victim)
        taken = [self.free[group].pop(0) for _ in range(count)]
        for number in taken:
            self.refs[group, number] = 1
        return taken

    def forget(self, group: str, number: int) -> None:
        key = self.key_of.pop((group, number))
        self.cached[group, key].remove(number)
        self.say(KeyRemove(group, [key], blocks=[number] if self.exact else []))

    def let_go(self, request: Running, group: str, numbers: list[int]) -> None:
        held = [n for n in numbers if n]
        if not held:
            return
        self.say(Free(request.name, group, held))
        for number in held:
            self.refs[group, number] -= 1
            if not self.refs[group, number] and (group, number) not in self.key_of:
                self.free[group].append(number)

    # -- requests --------------------------------------------------------------------------------------------------

    def key(self, request: Running, index: int) -> str:
        return ".".join(map(str, request.ids[: index + 1]))

    def hit(self, request: Running) -> tuple[int, int, list[str]]:
        """(hit, match, groups that cannot resume at the match)."""

        def has(group: str, index: int) -> bool:
            return bool(self.cached.get((group, self.key(request, index))))

        most = (request.length - 1) // SIZE
        matched = 0
        while matched < most and has("full", matched):
            matched += 1
        able: dict[str, Callable[[int], bool]] = {
            "full": lambda n: n <= matched,
            "win": lambda n: all(has("win", i) for i in range(max(0, n * SIZE - WINDOW + 1) // SIZE, n)),
            "rec": lambda n: has("rec", n - 1),
        }
        limits = [g for g in self.groups if matched and not able[g](matched)]
        for count in range(matched, 0, -1):
            if all(able[g](count) for g in self.groups):
                return count, matched, limits
        return 0, matched, limits

    def begin(self) -> None:
        """A prompt that shares a prefix with others is looked up and, if there is room, begins."""
        count = self.chance.randint(1, 7)
        ids = [self.chance.choice((1, 1, 1, 2)) for _ in range(count)]
        self.names += 1
        request = Running(f"r{self.names}", ids, count * SIZE - self.chance.choice((0, 0, 1, 2)), {})
        whole = request.length // SIZE
        self.say(Arrive(request.name, request.length, ids=ids[:whole]))
        request.ids = [*ids[:whole], *(1000 * self.names + i for i in range(40))]
        self.start(request)

    def start(self, request: Running) -> None:
        used, matched, limits = self.hit(request)
        first = {
            "full": 0,
            "win": max(0, used * SIZE - WINDOW + 1) // SIZE,
            "rec": max(used - 1, 0),
        }
        blocks = {
            g: [self.cached[g, self.key(request, i)][0] if i >= first[g] else 0 for i in range(used)]
            for g in self.groups
        }
        named, copies = limits if used < matched else [], {g: list(b) for g, b in blocks.items()}
        self.say(Lookup(request.name, used * SIZE, matched=matched * SIZE, blocks=copies, limiting=named))
        need = -(-request.length // SIZE) - used
        for g in self.groups:
            for b in blocks[g]:
                if b:
                    self.refs[g, b] = self.refs.get((g, b), 0) + 1
        if not all(self.room(g, need) for g in self.groups) or len(self.running) > 3:
            for g in self.groups:
                for b in blocks[g]:
                    if b:
                        self.refs[g, b] -= 1
            self.say(Finish(request.name, "rejected")) if request.gone != "preempted" else self.say(Abort(request.name))
            return
        for g in self.groups:
            if any(blocks[g]):
                self.say(Pin(request.name, g, [b for b in blocks[g] if b]))
        request.sent = request.done = used * SIZE
        request.gone = ""
        request.published = dict.fromkeys(self.groups, used)
        request.blocks = blocks
        for g in self.groups:
            fresh = self.take(g, need)
            self.say(Allocate(request.name, g, fresh))
            blocks[g] += fresh
        self.running.append(request)

    def dispatch(self, request: Running) -> None:
        """A chunk of the prompt, or some tokens after it."""
        if request.gone or request.load:
            return
        if request.sent >= request.length:
            self.decode(request)
            return
        hi = min(request.sent + self.chance.randint(1, 2 * SIZE), request.length)
        self.send(request, hi)

    def send(self, request: Running, hi: int, drafts: int = 0) -> None:
        self.steps += 1
        step, lo = f"s{self.steps}", request.sent
        touched = range(lo // SIZE, -(-hi // SIZE))
        writes = [Span(g, [request.blocks[g][i] for i in touched], lo, hi) for g in self.groups]
        reads = [Span(g, [b for b in request.blocks[g][: lo // SIZE] if b]) for g in self.groups if g != "rec"]
        self.say(Dispatch(step, request.name, reads=[r for r in reads if r.blocks], writes=writes))
        request.sent = hi
        request.steps.append((step, hi))
        if self.in_order and not drafts:
            self.publish(request, hi)

    def grow(self, request: Running, hi: int) -> bool:
        for g in self.groups:
            need = -(-hi // SIZE) - len(request.blocks[g])
            if need > 0:
                if not self.room(g, need):
                    return False
                fresh = self.take(g, need)
                self.say(Allocate(request.name, g, fresh))
                request.blocks[g] += fresh
        return True

    def decode(self, request: Running) -> None:
        drafts = 0 if self.recurrent or request.steps else self.chance.choice((0, 0, 2, 3))
        if not self.grow(request, request.sent + 1 + drafts):
            return
        if not drafts:
            self.send(request, request.sent + 1)
            return
        before = request.sent
        self.say(Draft(request.name, drafts))
        self.send(request, before + 1 + drafts, drafts)
        step, _ = request.steps.pop()
        self.say(Complete(step))
        accepted = before + 1 + self.chance.randint(0, drafts)
        self.say(Accept(request.name, accepted))
        if accepted < before + 1 + drafts:
            self.say(Reject(request.name, accepted, at=accepted))
        request.sent = request.done = accepted
        self.after(request)

    def complete(self, request: Running) -> None:
        """The oldest step is done, also of a request that was aborted."""
        if not request.steps:
            return
        step, hi = request.steps.pop(0)
        self.say(Complete(step))
        if request.gone:
            self.leave(request)
            return
        request.done = hi
        self.after(request)

    def after(self, request: Running) -> None:
        """Whole blocks are published; the window lets go of what no step reads and no later one needs."""
        self.publish(request, request.done)
        if not request.steps:
            low = max(0, request.done - WINDOW + 1) // SIZE
            self.let_go(request, "win", request.blocks["win"][:low])
            request.blocks["win"][:low] = [0] * low

    def publish(self, request: Running, done: int) -> None:
        """Whole blocks can be found: once they are written, or with their write where the device keeps the order."""
        for g in self.groups:
            whole, first = done // SIZE, request.published[g]
            for index in range(first, whole):
                number = request.blocks[g][index]
                if number and (g, number) not in self.key_of:
                    key = self.key(request, index)
                    self.say(KeyPublish(g, [key], [number]))
                    self.key_of[g, number] = key
                    self.cached.setdefault((g, key), []).append(number)
            request.published[g] = max(first, whole)

    def end(self, request: Running, how: str) -> None:
        if request.gone or request.load:
            return
        if how == "finish" and (request.steps or request.done < request.length):
            return
        match how:
            case "finish":
                self.say(Finish(request.name))
            case "abort":
                self.say(Abort(request.name))
            case _:
                if request.steps:
                    return
                self.say(Preempt(request.name))
                request.length = max(request.length, request.done)
        request.gone = how
        if request.steps:
            self.say(DeferFree(request.name, "full", [b for b in request.blocks["full"] if b], on=request.steps[0][0]))
        self.leave(request)

    def leave(self, request: Running) -> None:
        if request.steps:
            return
        for g in self.groups:
            self.let_go(request, g, list(reversed(request.blocks[g])))
        self.running.remove(request)
        if request.gone == "preempted":
            self.start(request)
        elif self.chance.random() < 0.3:
            self.say(Abort(request.name))

    # -- the host --------------------------------------------------------------------------------------------------

    def store(self) -> None:
        """A cached block is copied to the host; the copy may be cancelled and end late."""
        written = {
            b for r in self.running for b in r.blocks["full"][r.done // SIZE :]
        }  # published with a write that is not done: not to be copied on another stream
        chosen = [(g, b) for (g, b) in self.key_of if g == "full" and (g, b) not in self.copying and b not in written]
        if not chosen:
            return
        group, number = self.chance.choice(chosen)
        self.host += 1
        name = f"x{self.host}"
        self.copying.add((group, number))
        self.stores[name] = (self.key_of[group, number], number, False)
        self.say(TransferBegin(name, [Part(group, [number], [self.host])], target=HOST))

    def stored_one(self) -> None:
        if not self.stores:
            return
        name = self.chance.choice(list(self.stores))
        key, number, cancelled = self.stores.pop(name)
        target = int(name[1:])
        if not cancelled and self.chance.random() < 0.3:
            self.say(TransferCancel(name))
            self.stores[name] = (key, number, True)
            return
        if self.chance.random() < 0.5:
            self.say(TransferPart(name, "full", [target]))
        self.say(TransferEnd(name))
        self.copying.discard(("full", number))
        if not cancelled:
            self.say(KeyPublish("full", [key], [target], tier=HOST))
            self.stored[key] = target

    def drop_stored(self) -> None:
        loading = {request.load for request in self.running}
        free = [k for k in self.stored if k not in loading]
        if free:
            key = self.chance.choice(free)
            self.say(KeyRemove("full", [key], blocks=[self.stored.pop(key)], tier=HOST))

    def prefetch(self) -> None:
        """A stored block comes back to the device before anybody asks for it; the copy may fail."""
        if not self.stored or not self.room("full", 1):
            return
        key = self.chance.choice(list(self.stored))
        (target,) = self.take("full", 1)
        name = f"p{self.names}-{len(self.events)}"
        self.say(TransferBegin(name, [Part("full", [self.stored[key]], [target], keys=[key])], source=HOST))
        self.refs["full", target] = 0
        if self.chance.random() < 0.3:
            self.say(TransferFail(name))
            self.free["full"].append(target)
            return
        self.say(TransferEnd(name))
        self.say(KeyPublish("full", [key], [target]))
        self.key_of["full", target] = key
        self.cached.setdefault(("full", key), []).append(target)

    # -- all of it -------------------------------------------------------------------------------------------------

    def run(self, turns: int) -> list[Event]:
        """So many turns, then everything ends and the engine is at rest."""
        for _ in range(turns):
            request = self.chance.choice(self.running) if self.running else None
            match self.chance.randint(0, 12):
                case 0 | 1:
                    self.begin()
                case 2 | 3 | 4 if request:
                    self.dispatch(request)
                case 5 | 6 | 7 if request:
                    self.complete(request)
                case 8 if request:
                    self.end(request, self.chance.choice(("finish", "finish", "abort", "preempted")))
                case 9:
                    self.store()
                case 10:
                    self.stored_one()
                case 11:
                    self.drop_stored()
                case 12:
                    self.prefetch()
        while self.stores:
            self.stored_one()
        for request in list(self.running):
            while request.steps:
                self.complete(request)
            if request in self.running:
                self.end(request, "abort")
        self.say(Drain())
        return self.events
