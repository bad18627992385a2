"""The end of a simulation: everything is at rest, every sum is what its terms add up to, and all memory comes back."""

from typing import Any

from hybridkv_ref.compile_py import attribute
from hybridkv_ref.sim_cache import Cache
from hybridkv_ref.sim_machine import Machines
from hybridkv_ref.sim_store import Store


class NotDrainedError(Exception):
    """A run ended with a lease, copy or request that is not at rest, or with memory that is charged and not held."""


def check_drained(cache: Cache, store: Store) -> None:
    """Checks rest, adds up all sums of the tables, then evicts and erases everything by rows and checks for zero."""
    machines = cache.machines
    requests = [lane.request for lane in machines.lanes]
    for record in (*requests, *(e for e in cache.made if e.cls in ("lease", "copy"))):
        first = machines.tables.vars_of(record.cls)["stage"].init
        if record.stage != first:
            raise NotDrainedError(f"{record.name} ended in stage {record.stage}, not {first}")
    segments = [e for e in cache.made if e.cls == "segment"]
    check_counts(machines, [*requests, *segments])
    check_sums(machines, segments)
    cache.empty()
    for stored in list(store.objects):
        store.erase(stored)
    for name, var in machines.tables.globals.items():
        if var.sums and getattr(machines.pool, attribute(name)):
            raise NotDrainedError(f"{name} is {getattr(machines.pool, attribute(name))} when all is freed, not 0")


def check_counts(machines: Machines, records: list[Any]) -> None:
    """Whether every count of leases or copies is 0, all of these being at rest."""
    counts: dict[tuple[str, str], list[str]] = {}
    for record in records:
        names = counts.get((record.cls, record.kind))
        if names is None:
            variables = machines.tables.vars_of(record.cls, record.kind)
            names = [attribute(name) for name, var in variables.items() if var.sums]
            counts[record.cls, record.kind] = names
        for name in names:
            if getattr(record, name):
                raise NotDrainedError(f"{record.name} ended with {name} = {getattr(record, name)}, not 0")


def check_sums(machines: Machines, segments: list[Any]) -> None:
    """Whether each pool variable that the tables define as a sum over segments is that sum."""
    for name, var in machines.tables.globals.items():
        if not var.sums or any(share.cls != "segment" for share in var.sums):
            continue
        total = 0
        for share in var.sums:
            terms = {k: machines.world.machine.predicate(term, "segment") for k, term in share.terms.items()}
            total += sum(int(terms[s.kind](machines.pool, s)) for s in segments if s.kind in terms)
        stored = getattr(machines.pool, attribute(name))
        if total != stored:
            raise NotDrainedError(f"{name} is {stored}, its segments add up to {total}")
