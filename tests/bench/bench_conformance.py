"""The conformance suite on the engines in the box: ``python tests/bench/bench_conformance.py``.

Each line states histories, operations, events and rows fired; the last columns are seconds of the whole run, of
the engine's own operations replayed without an oracle, and of an oracle that is fed the same events without the engine.
"""

import time
from collections.abc import Callable

from hybridkv_ref.conformance.capabilities import load_suite
from hybridkv_ref.conformance.engine import AnyOperation, Engine, perform
from hybridkv_ref.conformance.engines import aware, reference
from hybridkv_ref.conformance.lockstep import Lockstep, full_header
from hybridkv_ref.conformance.machine import run_histories
from hybridkv_ref.events import Event
from hybridkv_ref.oracle import Oracle


def measure(name: str, profile: str) -> str:
    """One engine under one profile."""
    engines: dict[str, Callable[[], Engine]] = {"aware": aware, "reference": reference}
    engine = engines[name]()
    histories: list[list[AnyOperation]] = []
    traces: list[list[Event]] = []
    rows = 0

    def ended(history: Lockstep) -> None:
        nonlocal rows
        histories.append(history.history)
        traces.append(history.events)
        rows += history.oracle.coverage().rows_fired

    begun = time.perf_counter()
    run_histories(engine, full_header(engine), load_suite().profiles[profile], ended)
    whole = time.perf_counter() - begun
    begun = time.perf_counter()
    for history in histories:
        engine.reset()
        for operation in history:
            perform(engine, operation)
            engine.drain()
    alone = time.perf_counter() - begun
    begun = time.perf_counter()
    for trace in traces:
        Oracle(full_header(engine)).feed_all(trace)
    judged = time.perf_counter() - begun
    events = sum(map(len, traces))
    operations = sum(map(len, histories))
    return (
        f"{name} {profile}: {len(histories)} histories, {operations:,} operations, {events:,} events, {rows:,} rows, "
        f"{whole:.1f} s, engine {alone:.2f} s, oracle {judged:.2f} s"
    )


if __name__ == "__main__":
    for name in ("aware", "reference"):
        print(measure(name, "quick"), flush=True)
