"""Planted faults in the reference allocator and its engine, and the table of what finds each.

``python tests/conformance_mutants.py`` writes ``tests/data/conformance_mutants.md``: fault, rule, histories needed,
seconds, for each of the adapter's parameters.  A fault is planted in code by a patch, or in a copy of the tables from
which a guard or an effect is taken, so that the allocator does what it may not.
"""

import dataclasses
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hybridkv_ref.allocator import CacheSegment, writer
from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.hits import Hits
from hybridkv_ref.allocator.index import PrefixIndex
from hybridkv_ref.allocator.requests import Requests
from hybridkv_ref.allocator.tiers import Tiers
from hybridkv_ref.conformance import gate
from hybridkv_ref.conformance.capabilities import Profile
from hybridkv_ref.conformance.lockstep import Lockstep, full_header
from hybridkv_ref.conformance.machine import run_histories
from hybridkv_ref.conformance.reference import ReferenceEngine
from hybridkv_ref.events import Complete, Event, Finish, Free, KeyPublish, KeyRemove
from hybridkv_ref.loader import load_tables
from hybridkv_ref.recovery import Hit as RecoveryHit
from hybridkv_ref.tables import Tables

TABLES = load_tables()
PROFILE = Profile("", examples=25, steps=25, minimise=0, derandomise=True)
PARAMETERS: dict[str, dict[str, int]] = {
    "small": {"device_bytes": 9_000, "host_bytes": 20_000},
    "tight": {"device_bytes": 5_000, "host_bytes": 5_000},
    "roomy": {"device_bytes": 40_000, "host_bytes": 60_000},
}
PATIENCE = 8
"""Seconds after which an engine with a fault is said to hang."""

REPORT = Path(__file__).with_name("data") / "conformance_mutants.md"


Named = list[tuple[CacheSegment, bytes | None]]
"""What a hit names: segments and the keys under which they were found."""


class Found(BaseException):
    """Something was refused: the history so far is enough, and Hypothesis need not run it again."""


@dataclasses.dataclass(frozen=True)
class Mutant:
    """A fault.  ``rule`` is one of those that the first refused event has to name.

    ``plant`` patches, ``tables`` are as they are then.  ``quiet``: the engine claims nothing of the length of its hits,
    so that the first refusal is about what they hold.
    """

    rule: str
    plant: Callable[[ExitStack], None] = lambda stack: None
    tables: Callable[[], Tables] = lambda: TABLES
    quiet: bool = False


# ---- helpers -------------------------------------------------------------------------------------------------------


def without(rows: str, *guards: str) -> Tables:
    """The tables without guards of these rows that contain one of the texts; all guards of them without a text."""
    events = []
    for event in TABLES.events:
        mine = event.row in rows.split()
        kept = tuple(g for g in event.guards if not mine or (guards and not any(text in g.text for text in guards)))
        events.append(dataclasses.replace(event, guards=kept))
    return dataclasses.replace(TABLES, events=tuple(events))


def without_effect(row: str, target: str) -> Tables:
    """The tables without the effects of a row on one variable."""
    events = []
    for event in TABLES.events:
        kept = tuple(e for e in event.effects if event.row != row or target not in str(e.target))
        events.append(dataclasses.replace(event, effects=kept))
    return dataclasses.replace(TABLES, events=tuple(events))


def swap(
    owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Callable[[ExitStack], None]:
    """Plants ``make(original)`` in place of a method or function."""
    return lambda stack: stack.enter_context(patch.object(owner, name, make(getattr(owner, name)))) and None


def every(*plants: Callable[[ExitStack], None]) -> Callable[[ExitStack], None]:
    """Several patches that make one fault."""

    def plant(stack: ExitStack) -> None:
        for one in plants:
            one(stack)

    return plant


def saying(change: Callable[[Event], Sequence[Event]]) -> Callable[[ExitStack], None]:
    """The engine says something else than what happened."""

    def make(original: Callable[..., None]) -> Callable[..., None]:
        def say(self: ReferenceEngine, *events: Event) -> None:
            later, self.later = self.later, []
            self.events += [one for event in (*events, *later) for one in change(event)]

        return say

    return swap(ReferenceEngine, "say", make)


# ---- hits ----------------------------------------------------------------------------------------------------------


def forgets_group(name: str) -> Mutant:
    def make(original: Callable[..., Named]) -> Callable[..., Named]:
        return lambda self, plan, path: [one for one in original(self, plan, path) if one[0].group.name != name]

    rules = {"window": "HKV-SWA-001", "csa": "HKV-CKV-001", "hca": "HKV-CKV-001", "index": "HKV-IDX-001"}
    rules |= {"tail": "HKV-TAIL-002", "state": "HKV-REC-001"}
    return Mutant(rules[name], swap(Hits, "named", make), lambda: without("join"))


def one_unit_before(name: str) -> Callable[[ExitStack], None]:
    """A hit takes a group's segment of the unit before the last."""

    def make(original: Callable[..., Named]) -> Callable[..., Named]:
        def named(self: Hits, plan: RecoveryHit, path: Sequence[Any]) -> Named:
            found = original(self, plan, path)
            unit = self.book.geometry.unit
            for at, (segment, _) in enumerate(found):
                other = path[plan.frontier // unit - 2].segments[segment.group.index] if plan.frontier > unit else None
                if segment.group.name == name and other is not None:
                    found[at] = (other, other.key)
            return found

        return named

    return swap(Hits, "named", make)


def first_group_decides(original: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Hits, request: Any, below: int | None = None) -> tuple[RecoveryHit, Named]:
        path = self.book.index.path(request.keys)
        unit = self.book.geometry.unit
        full = next(g.index for g in self.book.geometry.groups if g.kind == "compressed_kv")
        there = len(list(itertools.takewhile(lambda node: node.segments[full] is not None, path)))
        frontier = min(there * unit, (request.length - 1) // unit * unit)
        request.matched = len(path) * unit
        plan = RecoveryHit(frontier, frontier, "exact", (), (), 0)
        found = []
        for group in self.book.geometry.groups:
            lo, hi, exact = group.recovery.need(frontier, frontier)
            for at in range(hi // unit - 1 if exact else lo // unit, -(-hi // unit)) if lo < hi else ():
                if (segment := path[at].segments[group.index]) is not None:
                    found.append((segment, segment.key))
        return plan, found

    return look


def changes_plan(change: Callable[[Hits, Any, RecoveryHit], RecoveryHit]) -> Callable[[ExitStack], None]:
    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def look(self: Hits, request: Any, below: int | None = None) -> tuple[RecoveryHit, Named]:
            plan, _ = original(self, request, below)
            plan = change(self, request, plan)
            path = self.book.index.path(request.keys)
            return plan, self.named(plan, path) if plan.frontier else []

        return look

    return swap(Hits, "look", make)


def shorter(self: Hits, request: Any, plan: RecoveryHit) -> RecoveryHit:
    unit = self.book.geometry.unit
    path = self.book.index.path(request.keys)
    contents = self.book.index.contents(path)
    least = max(plan.frontier - unit, 0)
    return self.finder.longest_hit(contents, min(least, request.length - 1), request.length, unit, 0, request.matched)


def no_limits(self: Hits, request: Any, plan: RecoveryHit) -> RecoveryHit:
    return dataclasses.replace(plan, limiting=())


def all_limits(self: Hits, request: Any, plan: RecoveryHit) -> RecoveryHit:
    return dataclasses.replace(plan, limiting=tuple(g.name for g in self.book.geometry.groups))


def forgets_match(original: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Hits, request: Any, below: int | None = None) -> Any:
        found = original(self, request, below)
        request.matched = found[0].frontier
        return found

    return look


def takes_whole_prompt(original: Callable[..., Any]) -> Callable[..., Any]:
    def look(self: Hits, request: Any, below: int | None = None) -> Any:
        request.length += 1
        try:
            return original(self, request, below)
        finally:
            request.length -= 1

    return look


def remembers_hits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Hits are kept by prompt, and their segments used again, whatever they hold by now."""

    def look(self: Hits, request: Any, below: int | None = None) -> Any:
        known: dict[Any, Any] = self.__dict__.setdefault("known", {})
        found = original(self, request, below)
        if found[0].frontier:
            known.setdefault(tuple(request.keys), (found, request.matched))
        elif tuple(request.keys) in known:
            found, request.matched = known[tuple(request.keys)]
        return found

    return look


def lets_go_at_once(original: Callable[..., Any]) -> Callable[..., Any]:
    """The hit is released when reading begins."""

    def read(self: Hits, lease: Any, pointers: Any) -> Any:
        found = original(self, lease, pointers)
        for one in list(lease.request.hits):
            self.book.fire_lease(one, "release")
            lease.request.hits.remove(one)
            self.book.close_lease(one)
        return found

    return read


def pins_too_late(original: Callable[..., Any]) -> Callable[..., Any]:
    """Memory is wanted between the match and the pin, and the match records nothing to notice it by."""

    def pin(self: Hits, hit: Any) -> Any:
        self.evictor.empty()
        for lease in hit.request.found:
            lease.entity.seen = lease.segment.generation
        return original(self, hit)

    return pin


# ---- the index -----------------------------------------------------------------------------------------------------


def keys_of(make: Callable[[list[bytes], bytes, list[Any]], list[bytes]]) -> Callable[[ExitStack], None]:
    def swapped(original: Callable[..., list[bytes]]) -> Callable[..., list[bytes]]:
        return lambda self, tokens, salt: make(original(self, tokens, salt), salt, [self, tokens, original])

    return swap(PrefixIndex, "keys", swapped)


def no_salt(keys: list[bytes], salt: bytes, about: list[Any]) -> list[bytes]:
    index, tokens, original = about
    found: list[bytes] = original(index, tokens, b"")
    return found


def unit_only(keys: list[bytes], salt: bytes, about: list[Any]) -> list[bytes]:
    index, tokens, original = about
    unit = index.geometry.unit
    return [original(index, tokens[at : at + unit], salt)[0] for at in range(0, len(keys) * unit, unit)]


def keeps_entries(original: Callable[..., None]) -> Callable[..., None]:
    return lambda self, segment: None


def replaces_entries(original: Callable[..., bool]) -> Callable[..., bool]:
    """The newer of two equal segments takes the entry over, and the older one stays announced."""

    def put(self: PrefixIndex, segment: CacheSegment) -> bool:
        done = original(self, segment)
        if segment.key is not None:
            self.nodes[segment.key].segments[segment.group.index] = segment
        return done or segment.key is not None

    return put


# ---- the writer ----------------------------------------------------------------------------------------------------


def commits_early(original: Callable[..., None]) -> Callable[..., None]:
    """The last token of a segment is left out."""

    def append(self: Any, segment: CacheSegment, request: Any, count: int, rows: Any = None) -> None:
        whole = segment.group.whole or request.position % self.book.geometry.unit or count < 2
        original(self, segment, request, count if whole else count - 1, rows)

    return append


def lets_go_early(units: int) -> Callable[[ExitStack], None]:
    def make(original: Callable[..., int]) -> Callable[..., int]:
        def keeps_from(group: Any, position: int) -> int:
            if units:
                return original(group, position) + units * group.unit if group.group.span else 0
            return position

        return keeps_from

    return swap(writer, "keeps_from", make)


def takes_used_records(original: Callable[..., CacheSegment]) -> Callable[..., CacheSegment]:
    """A record that is in use is handed out again."""

    def settle(self: Book, segment: CacheSegment) -> Any:
        empty = segment.stage in self.empty[segment.group.index] and segment.slots is not None
        original(self, segment)
        if empty:
            self.spare[segment.group.index].append(segment)

    return settle


def grants_anything(original: Callable[..., None]) -> Callable[..., None]:
    def grant(self: Book, segment: CacheSegment, lo: int, hi: int, row: str, fire: Callable[[int, int], None]) -> None:
        if segment.slots is not None:
            segment.entity.stage = self.ledger.tables.kinds[segment.kind].sets["EMPTY"][0]
            self.arena(segment.group).give(segment.slots)
            segment.slots = None
        original(self, segment, lo, hi, row, fire)

    return grant


def appends_twice(original: Callable[..., None]) -> Callable[..., None]:
    def fire_lease(self: Book, lease: Any, row: str, **inputs: Any) -> None:
        for _ in range(2 if row == "append" else 1):
            original(self, lease, row, **inputs)

    return fire_lease


# ---- the end of a request --------------------------------------------------------------------------------------------


def forgets_leases(which: str) -> Callable[[ExitStack], None]:
    """One lease of a request is never let go of."""

    def make(original: Callable[..., bool]) -> Callable[..., bool]:
        def step(self: Requests, request: Any) -> bool:
            leases = getattr(request, which)
            if leases:
                leases.pop()
            return original(self, request)

        return step

    return swap(Requests, "step", make)


# ---- tiers -----------------------------------------------------------------------------------------------------------


def frees_moving(original: Callable[..., bool]) -> Callable[..., bool]:
    """The client gives up while a load runs: its targets are freed although their bytes still move."""

    def abort(self: ReferenceEngine, req: str) -> bool:
        if req not in self.serving:
            for load in list(self.cache.tiers.loads.values()):
                if load.targets:
                    self.cache.tiers.fail(load, "aborted")
        return original(self, req)

    return abort


def publishes_while_loading(original: Callable[..., bool]) -> Callable[..., bool]:
    def attach(self: Tiers, load: Any) -> bool:
        done = original(self, load)
        for segment, _ in load.targets:
            self.book.index.put(segment)
        return done

    return attach


def mistakes_keys(original: Callable[..., bool]) -> Callable[..., bool]:
    """What was loaded is found under the key of another prefix."""

    def attach(self: Tiers, load: Any) -> bool:
        done = original(self, load)
        nodes = self.book.index.nodes
        for segment, _ in load.targets:
            at = segment.group.index
            segment.key = next((k for k, n in nodes.items() if n.segments[at] is None and k != segment.key), bytes(16))
        return done

    return attach


def ignores_failure(original: Callable[..., Any]) -> Callable[..., Any]:
    """A read that failed counts as one that arrived."""

    def read(self: Any, name: str) -> Any:
        try:
            return original(self, name)
        except gate.MediumError:
            return self.held[name][0]

    return read


def ignores_failed_write(original: Callable[..., Any]) -> Callable[..., Any]:
    def write(self: Any, name: str, parts: Any, about: Any) -> None:
        try:
            original(self, name, parts, about)
        except gate.MediumError:
            gate.HostMemory.write(self, name, parts, about)

    return write


def loses_ends(original: Callable[..., None]) -> Callable[..., None]:
    """A load that arrived is never ended."""
    return lambda self, load: None


def off_by_one(original: Callable[..., int]) -> Callable[..., int]:
    return lambda self, group, entity: original(self, group, entity) - 1


MUTANTS: dict[str, Mutant] = {
    **{
        f"a hit forgets the group {name}": forgets_group(name)
        for name in ("window", "csa", "hca", "index", "tail", "state")
    },
    "the window of the unit before is used": Mutant("HKV-SWA-001", one_unit_before("window"), lambda: without("join")),
    "the tail of another position is used": Mutant(
        "HKV-TAIL-001", one_unit_before("tail"), lambda: without("join pin pass_l1")
    ),
    "the state of another position is used": Mutant("HKV-REC-001", one_unit_before("state"), lambda: without("join")),
    "one group decides for all": Mutant(
        "HKV-L3-001", swap(Hits, "look", first_group_decides), lambda: without("join pin"), quiet=True
    ),
    "a shorter hit than there is": Mutant("HKV-L3-002", changes_plan(shorter)),
    "a short hit names no group": Mutant("HKV-MISS-001", changes_plan(no_limits)),
    "a hit names every group as its limit": Mutant("HKV-MISS-001", changes_plan(all_limits)),
    "the match is forgotten": Mutant("HKV-MISS-002", swap(Hits, "look", forgets_match)),
    "the whole prompt is reused": Mutant(
        "HKV-L1-006", swap(Hits, "look", takes_whole_prompt), lambda: without("match", "req.length")
    ),
    "hits are remembered by prompt": Mutant(
        "HKV-L3-001", swap(Hits, "look", remembers_hits), lambda: without("find pin join pass_l1"), quiet=True
    ),
    "the hit is let go when reading begins": Mutant(
        "HKV-L3-001", swap(Hits, "read", lets_go_at_once), lambda: without("release", "req.stage")
    ),
    "evicted between match and pin": Mutant(
        "HKV-S3-011",
        swap(Hits, "pin", pins_too_late),
        lambda: without("pin join pass_l1 pass_l2 pass_l4 read"),
        quiet=True,
    ),
    "keys leave out the salt": Mutant("HKV-KEY-002", keys_of(no_salt), quiet=True),
    "a key stands for its own unit only": Mutant(
        "HKV-KEY-001",
        every(keys_of(unit_only), changes_plan(no_limits)),
        lambda: without("find pin join pass_l1"),
        quiet=True,
    ),
    "keys are a byte long": Mutant(
        "HKV-KEY-001", keys_of(lambda keys, salt, about: [bytes([k[0] % 4]) for k in keys]), quiet=True
    ),
    "entries stay when memory goes": Mutant("HKV-ACC-001", swap(PrefixIndex, "drop", keeps_entries)),
    "a newer equal segment takes the entry over": Mutant("HKV-ACC-001", swap(PrefixIndex, "put", replaces_entries)),
    "a segment is published without its last token": Mutant("HKV-L1-003", swap(writer.Writer, "append", commits_early)),
    "everything written is let go at once": Mutant("HKV-SWA-003", lets_go_early(0)),
    "the window slides a unit too far": Mutant("HKV-SWA-003", lets_go_early(1)),
    "a record is handed out twice": Mutant(
        "HKV-ALIAS-001",
        every(swap(Book, "settle", takes_used_records), swap(Book, "grant", grants_anything)),
        lambda: without("admit", "stage"),
    ),
    "tokens are written twice": Mutant(
        "HKV-S3-003", swap(Book, "fire_lease", appends_twice), lambda: without("append", "at == end")
    ),
    "the release of a read segment is skipped": Mutant(
        "HKV-REF-005", forgets_leases("hits"), lambda: without("close retry"), quiet=True
    ),
    "the release of a written segment is skipped": Mutant(
        "HKV-REF-005", forgets_leases("kept"), lambda: without("close")
    ),
    "what was half written stays": Mutant("HKV-REF-005", forgets_leases("writing"), lambda: without("close")),
    "held segments are evicted": Mutant("HKV-S3-004", tables=lambda: without("free", "pins == 0")),
    "segments are evicted under a running step": Mutant("HKV-S3-016", tables=lambda: without("free", "steps == 0")),
    "the source of a copy is evicted": Mutant("HKV-S3-009", tables=lambda: without("retire", "holds == 0")),
    "memory is given back and stays charged": Mutant("HKV-ACC-001", tables=lambda: without_effect("free", "used")),
    "what was half written stays charged": Mutant("HKV-ACC-001", tables=lambda: without_effect("abort", "used")),
    "memory is taken and not charged": Mutant("HKV-ACC-001", tables=lambda: without_effect("admit", "used")),
    "free on abort during a load": Mutant("HKV-ALIAS-001", swap(ReferenceEngine, "abort", frees_moving)),
    "a load can be found before it has arrived": Mutant("HKV-S3-011", swap(Tiers, "attach", publishes_while_loading)),
    "a load is kept under another key": Mutant("HKV-ALIAS-001", swap(Tiers, "attach", mistakes_keys)),
    "a failed read counts as data": Mutant("HKV-ERR-002", swap(gate.GatedMemory, "read", ignores_failure)),
    "a failed write counts as a copy": Mutant("HKV-ERR-002", swap(gate.GatedMemory, "write", ignores_failed_write)),
    "a load never ends": Mutant("HKV-LIVE-003", swap(Tiers, "carry_out", loses_ends)),
    "the completion of a step is lost": Mutant(
        "HKV-S3-016", saying(lambda e: [] if isinstance(e, Complete) and e.step[0] == "r" else [e])
    ),
    "a request ends twice": Mutant("HKV-REF-005", saying(lambda e: [e, e] if isinstance(e, Finish) else [e])),
    "a removal is announced twice": Mutant(
        "HKV-OBS-001", saying(lambda e: [e, e] if isinstance(e, KeyRemove) else [e])
    ),
    "the null block is published": Mutant("HKV-S4-007", swap(ReferenceEngine, "copy_number", off_by_one)),
    "a free is announced twice": Mutant("HKV-REF-005", saying(lambda e: [e, e] if isinstance(e, Free) else [e])),
    "entries come before their data": Mutant(
        "HKV-S3-011",
        saying(lambda e: [KeyPublish(e.group, ["early"], e.blocks), e] if type(e).__name__ == "Allocate" else [e]),
    ),
}


@dataclasses.dataclass
class Outcome:
    """What found a fault: the rules of the first refusal (or what broke), histories, seconds."""

    rules: tuple[str, ...]
    message: str
    examples: int
    seconds: float


def _hangs(number: int, frame: object) -> None:
    raise TimeoutError(f"hangs for {PATIENCE} s")


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """The fault is there."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(gate, "PATIENCE", 2.0))
        stack.callback(signal.signal, signal.SIGALRM, signal.signal(signal.SIGALRM, _hangs))
        stack.callback(signal.setitimer, signal.ITIMER_REAL, 0)
        signal.setitimer(signal.ITIMER_REAL, PATIENCE, 1)
        mutant.plant(stack)
        yield


def hunt(mutant: Mutant, parameters: dict[str, int]) -> Outcome | None:
    """Runs the quick profile until something is refused; None if nothing is."""
    begun, count = time.monotonic(), 0
    found: list[Outcome] = []

    def ended(history: Lockstep) -> None:
        nonlocal count
        count += 1
        taken = time.monotonic() - begun
        if history.refused:
            rules = dict.fromkeys(rule for one in history.refused for rule in one.refusal.rules)
            found.append(Outcome(tuple(rules), str(history.refused[0].refusal), count, taken))
        elif history.broken:
            found.append(Outcome((), history.broken, count, taken))
        if found:
            raise Found

    with planted(mutant):
        engine = ReferenceEngine(**parameters, tables=mutant.tables())  # type: ignore[arg-type]
        if mutant.quiet:
            engine.capabilities = tuple(c for c in engine.capabilities if c not in ("longest", "limits", "announced"))
        try:
            run_histories(engine, full_header(engine), PROFILE, ended)
        except Found:
            pass
        finally:
            engine.close()
    return found[0] if found else None


def table() -> Iterator[str]:
    """The report, line by line, as Markdown."""
    yield "# Faults planted in the reference allocator, and what finds them\n"
    yield "Written by `python tests/conformance_mutants.py`: the quick profile, derandomised, up to the first refusal."
    shown = "; ".join(f"{n}: {', '.join(f'{k}={v}' for k, v in p.items())}" for n, p in PARAMETERS.items())
    yield f"Per parameter of the adapter ({shown}): histories and seconds until then.\n"
    yield f"| fault | rules of the first refusal | {' | '.join(PARAMETERS)} |"
    yield "|---|---|" + "---|" * len(PARAMETERS)
    for name, mutant in MUTANTS.items():
        cells, named = [], "-"
        for parameters in PARAMETERS.values():
            found = hunt(mutant, parameters)
            cells.append("not found" if found is None else f"{found.examples}, {found.seconds:.1f} s")
            if found is not None and mutant.rule in found.rules and named == "-":
                named = ", ".join(found.rules)
        yield f"| {name} | {named} | {' | '.join(cells)} |"


if __name__ == "__main__":
    lines = []
    for line in table():
        print(line, flush=True)
        lines.append(line)
    REPORT.write_text("\n".join(lines) + "\n")
