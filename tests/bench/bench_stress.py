"""Eight threads on one allocator for a time: `python tests/bench/bench_stress.py [SECONDS]`; a reader must see its
bytes.

Each thread serves prompts of a few families that share prefixes, on memory for a fraction of them, with a disk tier
below; one more evicts, prefetches and cancels loads. At the end the state is compared with memory and files, and
drained. Then the same without the guard that looks at the pins: it has to be caught.
"""

import random
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from allocator_tools import TABLES, make, prompt, run
from test_allocator_rules import without
from test_allocator_threads import Torn, touch

from hybridkv_ref.allocator import NotAdmitted
from hybridkv_ref.allocator.lockstep import UNIT
from hybridkv_ref.allocator.refinement import differences
from hybridkv_ref.machine import Refused


class Count:
    """What the threads did."""

    def __init__(self) -> None:
        self.requests = self.hits = self.reads = self.refused = 0
        self.torn: list[str] = []
        self.faults: list[str] = []


def serve(allocator: Any, seed: int, end: float, count: Count) -> None:
    """Requests one after another until the time is over, or somebody saw torn bytes."""
    drawn = random.Random(seed)
    while time.monotonic() < end and not count.torn and not count.faults:
        family = "".join(drawn.choice("ABC") for _ in range(drawn.randint(1, 4)))
        tokens = prompt(family, len(family) * UNIT + drawn.randint(0, 5))
        try:
            lease = allocator.pin(allocator.match(tokens))
        except NotAdmitted:
            continue
        request = lease.request
        count.requests += 1
        try:
            while lease.tokens and not allocator.validate(lease)[-1].accepted:
                lease = allocator.retry(lease)
            if lease.tokens:
                allocator.read(lease)
                count.hits += 1
                for _ in range(drawn.randint(1, 3)):
                    touch(allocator, lease, tokens)
                    count.reads += len(lease.segments)
            run(allocator, request, tokens)
            if lease.tokens:
                touch(allocator, lease, tokens)
        except Torn as torn:
            count.torn.append(str(torn))
            return
        except Refused as refused:
            if "CAP" not in refused.guard.text:
                count.faults.append(str(refused))
            count.refused += 1
        if drawn.random() < 0.2 or request.position < len(tokens):
            allocator.abort(request)
        else:
            allocator.finish(request)


def press(allocator: Any, end: float, count: Count) -> None:
    """Evicts, prefetches, cancels loads."""
    drawn = random.Random(99)
    while time.monotonic() < end and not count.torn and not count.faults:
        segments = allocator.segments()
        if segments and drawn.random() < 0.5:
            allocator.evictor.evict(drawn.choice(segments))
        else:
            allocator.prefetch(prompt("".join(drawn.choice("ABC") for _ in range(3)), 3 * UNIT))
        for stored in list(allocator.tiers.loads)[:1]:
            if drawn.random() < 0.1:
                allocator.tiers.timer(stored)


def guarded(work: Any, *args: Any) -> None:
    """Anything that a thread raises is a fault."""
    count = args[-1]
    try:
        work(*args)
    except BaseException as error:
        count.faults.append(f"{type(error).__name__}: {error}")


def stress(seconds: float, tables: Any, threads: int = 8) -> Count:
    """Runs the threads; what they did and saw."""
    count = Count()
    with tempfile.TemporaryDirectory() as folder:
        allocator = make(Path(folder), tables=tables, device_bytes=30_000)
        end = time.monotonic() + seconds
        work = [threading.Thread(target=guarded, args=(serve, allocator, i, end, count)) for i in range(threads)]
        work.append(threading.Thread(target=guarded, args=(press, allocator, end, count)))
        for thread in work:
            thread.start()
        for thread in work:
            thread.join()
        if not count.torn and not count.faults:
            with allocator.ledger.changed:
                while allocator.tiers.spills or allocator.tiers.loads:
                    allocator.ledger.changed.wait(0.05)
            count.faults += differences(allocator)
            allocator.drain()
            count.faults += differences(allocator)
            if allocator.ledger.pool.gpu_used:
                count.faults.append(f"{allocator.ledger.pool.gpu_used} bytes are left")
        rows, outcomes = allocator.ledger.fired, allocator.tiers.outcomes
        allocator.close()
    print(
        f"{threads} threads, {seconds:g} s: {count.requests:,} requests, {count.hits:,} hits, "
        f"{count.reads:,} segment reads, {rows:,} rows, {count.refused} refused by a cap, "
        f"tiers {outcomes}: {len(count.torn)} torn reads, "
        f"{len(count.faults)} other violations {(count.torn + count.faults)[:2]}",
        flush=True,
    )
    return count


def main() -> None:
    """The tables as they are, then without the pin."""
    seconds = float(sys.argv[1]) if len(sys.argv) > 1 else 30.0
    whole = stress(seconds, TABLES)
    torn = stress(seconds, without("free", "pins == 0"))
    if whole.torn or whole.faults or not (torn.torn or torn.faults):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
