"""Seconds to count the states of a composed instance, ours, Spin's and Rumur's, beside those of the unbounded proofs.

Run as a script.  Each explorer runs once, in one thread, and all must find the same states and transitions; Spin and
Rumur are quoted with and without the time to make and compile their verifiers.  Prints the machine, its load and one
line per figure: seconds of wall time, and of processor time in brackets.
"""

import os
import platform
import time
from pathlib import Path

from hybridkv_ref.loader import load_tables
from hybridkv_ref.model_checks.check import run_task
from hybridkv_ref.model_checks.explore import explore
from hybridkv_ref.model_checks.explorers import EXPLORERS, MOST_STATES
from hybridkv_ref.model_checks.instances import Instance, read_instances
from hybridkv_ref.model_checks.space import Compiled
from hybridkv_ref.model_checks.tasks import proof_names
from hybridkv_ref.model_checks.verifiers import Run
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.tables import Tables

QUESTIONS = (
    "These answer different questions: an explorer counts what one finite instance can reach; the proofs say for any "
    "number of entities that no row breaks a property, and count nothing."
)


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def explorers(tables: Tables, instance: Instance) -> None:
    """Counts one instance with every explorer there is."""
    compiled = Compiled(tables)
    begun, used = time.perf_counter(), time.process_time()
    graph = explore(tables, instance, MOST_STATES, compiled)
    seconds, processor = time.perf_counter() - begun, time.process_time() - used
    models = [(tool, tool.model(graph), tool.wanted(graph)) for tool in EXPLORERS]
    found = f"{graph.states:,} states, {graph.edges:,} transitions"
    print(f"{instance.name}: ours: {found} in {seconds:.1f} s ({processor:.1f})")
    del graph  # the others need the memory
    for tool, model, size in models:
        if absent := tool.missing():
            print(f"{instance.name}: {tool.name} is {absent}")
        else:
            quote(f"{instance.name}: {tool.name}", tool.count(model.source), len(model.asserted), size)


def quote(label: str, run: Run, asserted: int, size: tuple[int, int]) -> None:
    """Prints a run, and ends if it found other counts than it should."""
    print(
        f"{label}: {run.states:,} states, {run.transitions:,} transitions in {run.run:.1f} s ({run.processor:.1f}), "
        f"{run.generate + run.compile + run.run:.1f} s with the {run.generate:.1f} s of making its verifier and the "
        f"{run.compile:.1f} s of compiling it; {run.state_bytes} bytes per state, {asserted} assertions"
    )
    if (run.states, run.transitions) != size or run.error:
        raise SystemExit(f"{label}: it should have found {size[0]:,} and {size[1]:,}; {run.error}")


def proofs(tables: Tables) -> None:
    """Every obligation of every row and claim, in this process."""
    begun, used = time.perf_counter(), time.process_time()
    obligations = [o for n in proof_names(tables) for o in run_task(str(SPEC_DIR), n).obligations]
    seconds, processor = time.perf_counter() - begun, time.process_time() - used
    failed = sum(1 for o in obligations if o.status != "proved")
    print(
        f"unbounded proofs: {len(obligations):,} obligations in {seconds:.1f} s ({processor:.1f}), {failed} not proved"
    )


def main() -> None:
    """Runs everything once."""
    tables = load_tables()
    machine = f"{cpu_name()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    print(f"{machine}; load {os.getloadavg()[0]:.1f} before the first run")
    for instance in read_instances(tables, SPEC_DIR / "instances_deep.toml")[0]:
        explorers(tables, instance)
    proofs(tables)
    print(QUESTIONS)


if __name__ == "__main__":
    main()
