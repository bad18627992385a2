"""Events per second of `hybridkv validate`: the conversation trace served block by block, read from a file.

Run as a script; the trace is looked for in $HYBRIDKV_DATA, or in shared/data beside the checkout. The events of a plain
prefix cache and those of `simulate` for two models with 80 GiB, each in two shapes: with the blocks of a call in one
event, and with one event per block. Prints, per shape: events and rows per second of processor time (reading included,
tables loaded before), events, blocks and rows, and the peak memory.
"""

import itertools
import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from engine_traces import events_of, header
from trace_variants import split

from hybridkv_ref.events import Event, Header
from hybridkv_ref.models import load_model
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.request_traces import Request, read_trace
from hybridkv_ref.sim_events import Telling
from hybridkv_ref.trace_reader import encode_trace
from hybridkv_ref.validate import validate

CHECKOUT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("HYBRIDKV_DATA") or CHECKOUT.parent / "shared" / "data")
TRACE = DATA / "traces" / "mooncake_conversation_trace.jsonl"
CAPACITY = 20_000
MODELS, MEMORY = ("deepseek-v4-flash", "gemma-3-27b"), 80 << 30


def write(path: Path, head: Header, events: Iterable[Event]) -> tuple[int, int]:
    """Writes a trace; gives its events and the blocks that they name."""
    count = blocks = 0
    with path.open("wb") as file:
        file.write(encode_trace(head, []))
        for event in events:
            file.write(encode_trace(head, [event]).split(b"\n", 1)[1])
            count += 1
            numbers = getattr(event, "blocks", ())
            blocks += sum(map(len, numbers.values())) if isinstance(numbers, dict) else len(numbers)
    return count, blocks


def simulated(model: str, requests: Iterable[Request]) -> tuple[Header, Iterator[Event]]:
    """The events of `simulate` with 80 GiB, as it goes."""
    simulation = Telling(load_model(model), MEMORY, 512)

    def events() -> Iterator[Event]:
        for request in requests:
            simulation.arrive(request)
            yield from simulation.events
            simulation.events.clear()

    return simulation.header, events()


def main() -> None:
    """Runs every shape on the first requests of the trace (all, or as many as the first argument says)."""
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 12_031
    plain = header(512, capacity=CAPACITY)
    Oracle(plain)
    with tempfile.TemporaryDirectory() as folder:
        for source, each in itertools.product(("", *MODELS), (False, True)):
            path = Path(folder, "trace.jsonl")
            chosen = itertools.islice(read_trace(TRACE), requests)
            head, events = simulated(source, chosen) if source else (plain, events_of(chosen, plain, CAPACITY))
            shaped = (e for one in events for _, e in split([(0, one)])) if each else events
            name = f"{f'simulate {source}' if source else 'plain'}, {'one event per block' if each else 'together'}"
            count, blocks = write(path, head, shaped)
            start = time.process_time()
            report = validate(str(path))
            seconds = time.process_time() - start
            rows, peak = report.coverage.rows_fired, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{name}: {count / seconds:,.0f} events/s, {rows / seconds:,.0f} rows/s; {count:,} events, "
                f"{blocks:,} blocks, {rows:,} rows, {seconds:.1f} s, {report.refusals} refused, peak {peak:.0f} MiB"
            )


if __name__ == "__main__":
    main()
