"""The ledger of assumptions: each comes with a configuration that violates it, and that must fail.

An assumption without which nothing breaks would be idle, and a proof that needs none of them would prove nothing
about the engines that keep them.  Data: ``spec/assumptions.toml``.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.loader import build
from hybridkv_ref.model_checks.explore import explore
from hybridkv_ref.model_checks.fair_cycles import fair_cycles
from hybridkv_ref.model_checks.instances import FILE as INSTANCES
from hybridkv_ref.model_checks.instances import read_instances
from hybridkv_ref.model_checks.interleave import run as run_threads
from hybridkv_ref.model_checks.obligations import Search
from hybridkv_ref.spec_files import Record, Spec, read_spec, read_toml
from hybridkv_ref.tables import Tables

FILE = "assumptions.toml"


class UnfairSpec(Record, frozen=True):
    """A row that is no longer fair, and the claim that then has a lasso in this instance."""

    row: str
    instance: str
    claim: str


class AssumptionSpec(Record, frozen=True):
    """One assumption with the configurations that violate it."""

    statement: str
    unfair: list[UnfairSpec] = []
    threads: list[str] = []


class LedgerSpec(Record, frozen=True):
    """The file."""

    title: str
    assumption: dict[str, AssumptionSpec]


def read_ledger(directory: Path) -> LedgerSpec:
    """The ledger; InputError for an entry that violates nothing."""
    try:
        ledger = msgspec.convert(read_toml(directory / FILE, FILE), LedgerSpec)
    except msgspec.ValidationError as error:
        raise InputError(f"{FILE}: {error}") from None
    for name, entry in ledger.assumption.items():
        if not entry.unfair and not entry.threads:
            raise InputError(f"{FILE}: assumption.{name}: names no configuration that violates it")
    return ledger


def without_fairness(spec: Spec, row: str) -> Tables:
    """The tables with one row no longer fair."""
    files = dict(spec.files)
    found = False
    for label, file in spec.files.items():
        for section in ("rows", "handoffs"):
            entries = dict(getattr(file, section))
            if row in entries:
                found = True
                entries[row] = msgspec.structs.replace(entries[row], fair=False)
                files[label] = msgspec.structs.replace(files[label], **{section: entries})
    if not found:
        raise InputError(f"{FILE}: no row '{row}'")
    return build(msgspec.structs.replace(spec, files=files))


def violated(tables: Tables, directory: Path) -> Iterator[Search]:
    """One record per violating configuration; ``passed`` means that it failed, as it must."""
    ledger, spec = read_ledger(directory), read_spec(directory)
    threads = {r.name: r for r in run_threads(tables, directory)}
    for name, entry in ledger.assumption.items():
        for case in entry.unfair:
            changed = without_fairness(spec, case.row)
            instances = {i.name: i for i in read_instances(changed, directory / INSTANCES)[0]}
            if case.instance not in instances:
                raise InputError(f"{FILE}: assumption.{name}: no instance '{case.instance}'")
            lassos = {c.claim for c in fair_cycles(explore(changed, instances[case.instance])).lassos}
            status = "fails" if case.claim in lassos else "holds"
            label = f"{name}: {case.row} unfair"
            detail = f"{case.claim} {'has a lasso' if case.claim in lassos else 'still holds'}"
            yield Search(label, "assumption", status, case.claim in lassos, case.instance, detail=detail)
        for variant in entry.threads:
            if variant not in threads:
                raise InputError(f"{FILE}: assumption.{name}: no interleaving '{variant}'")
            result = threads[variant]
            broken = result.got == "fails" and result.ok
            yield Search(
                f"{name}: {variant}", "assumption", result.got, broken, "one slot", -1, result.states, result.broken
            )
