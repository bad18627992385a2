"""Seconds to count the states of a composed instance, ours and Spin's, beside the seconds of the unbounded proofs.

Run as a script.  Each explorer runs once, in one process, and both must find the same states and transitions; Spin is
quoted with and without the time to make and compile its verifier.  Prints the machine, its load and one line per
figure: seconds of wall time, and of processor time in brackets.
"""

import os
import platform
import time
from pathlib import Path

from hybridkv_ref.loader import load_tables
from hybridkv_ref.model_checks import promela, spin
from hybridkv_ref.model_checks.check import run_task
from hybridkv_ref.model_checks.explore import explore
from hybridkv_ref.model_checks.instances import Instance, read_instances
from hybridkv_ref.model_checks.space import Compiled
from hybridkv_ref.model_checks.tasks import proof_names
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.tables import Tables

LIMIT = 20_000_000
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
    """Counts one instance twice."""
    compiled = Compiled(tables)
    begun, used = time.perf_counter(), time.process_time()
    graph = explore(tables, instance, LIMIT, compiled)
    seconds, processor = time.perf_counter() - begun, time.process_time() - used
    size, written = promela.size(graph), promela.model(graph)
    found = f"{graph.states:,} states, {graph.edges:,} transitions"
    print(f"{instance.name}: ours: {found} in {seconds:.1f} s ({processor:.1f})")
    del graph  # Spin needs the memory
    if spin.missing():
        print(f"{instance.name}: Spin is {spin.missing()}")
        return
    run = spin.check(written.source, memory_mb=12_000, depth=10_000_000, table_bits=24)
    build, found = run.generate + run.compile, f"{run.states:,} states, {run.transitions:,} transitions"
    print(
        f"{instance.name}: Spin: {found} in {run.run:.1f} s ({run.processor:.1f}), "
        f"{run.run + build:.1f} s with the {build:.1f} s of making and compiling its verifier; "
        f"{run.state_bytes} bytes per state, {len(written.asserted)} assertions"
    )
    if (run.states, run.transitions) != size or run.error:
        raise SystemExit(f"{instance.name}: Spin should have found {size[0]:,} and {size[1]:,}; {run.error}")


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
