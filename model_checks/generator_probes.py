"""Probes of the proof generator: checks that pass on the generator as it is, and that a fault in it makes fail.

* ``Proves``: the obligations of some rows are all proved, and can all be met;
* ``Refutes``, ``RefutesClaim``, ``RefutesFirst``: a row, a liveness claim or an invariant with a known fault of its own
  fails, and in a named obligation, so that it is seen where it should be;
* ``Agrees``: Z3's terms and the machine give the same guards and values in random states;
* ``InOrder``: a handoff does what its rows do when they are fired one after the other (see ``handoff_order``).

Data: ``spec/planted_faults.toml`` names the probe that must see each fault of ``planted_faults``.
"""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Protocol

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, Lit, Op
from hybridkv_ref.loader import build_events
from hybridkv_ref.model_checks.agreement import PythonRows, Z3Rows, agree
from hybridkv_ref.model_checks.base import Base
from hybridkv_ref.model_checks.frames import Assumptions
from hybridkv_ref.model_checks.handoff_order import first_difference
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.liveness import Claim
from hybridkv_ref.model_checks.mutants import Mutant, mutants
from hybridkv_ref.model_checks.obligations import Obligation
from hybridkv_ref.spec_files import Record, Spec, read_toml
from hybridkv_ref.tables import Response, Tables

FILE = "planted_faults.toml"


class Probe(Protocol):
    """A check of the generator; ``passes`` is asked with and without a fault."""

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Whether everything is as it should be; ``tables`` are those of ``spec``, built without a fault."""
        ...


class Proves(Record, frozen=True):
    """Every obligation of these rows (event ids) and, if asked, of the first state is proved."""

    rows: list[str] = []
    first_state: bool = False

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Proves them."""
        terms = Assumptions(tables)
        found = [o for name in self.rows for o in Task(tables, tables.event(name), terms).run().obligations]
        if self.first_state:
            asked = Base(tables, terms)
            for prop in tables.forms("invariant"):
                asked.initially(prop)
            found += asked.out.obligations
        return bool(found) and all(o.status == "proved" for o in found)


class Refutes(Record, frozen=True):
    """With ``text`` dropped from a row (or ``instead`` in its place), ``event`` fails in an obligation whose name
    contains each of ``marks``.
    """

    file: str
    row: str
    text: str
    event: str
    marks: list[str]
    instead: str = ""

    def mutant(self, spec: Spec, tables: Tables) -> Mutant:
        """The changed row; InputError if there is no such text."""
        wanted = (self.file, self.row, self.text, "")
        found = [m for m in mutants(spec, tables) if (m.file, m.row, m.before, m.after) == wanted]
        if len(found) != 1:
            raise InputError(f"{FILE}: {self.file}: rows.{self.row}: has '{self.text}' {len(found)} times")
        return dataclasses.replace(found[0], after=self.instead)

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Looks for the failed obligation."""
        bent = next(e for e in build_events(self.mutant(spec, tables).apply(spec)) if e.id == self.event)
        return _fails(Task(tables, bent, Assumptions(tables)).run().obligations, self.marks)


class RefutesClaim(Record, frozen=True):
    """A liveness claim with one wrong part fails in an obligation whose name contains each of ``marks``.

    The wrong part: a ``flat_rank``, every helping claim always taken for enough (``helped_by_nobody``), or another
    row in the place of each helpful one (``helper``).
    """

    id: str
    marks: list[str]
    flat_rank: bool = False
    helped_by_nobody: bool = False
    helper: str = ""

    def bent(self, claim: Response) -> Response:
        """The wrong claim."""
        if self.flat_rank:
            return dataclasses.replace(claim, rank=(Lit(0, claim.rank[0].type),))
        if self.helper:
            wrong = tuple(dataclasses.replace(h, row=self.helper) for h in claim.helpful)
        else:
            wrong = tuple(dataclasses.replace(h, who=Lit(1, BOOL)) if h.by else h for h in claim.helpful)
        return dataclasses.replace(claim, helpful=wrong)

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Looks for the failed obligation."""
        bent = self.bent(next(c for c in tables.responses if c.id == self.id))
        return _fails(Claim(tables, bent, Assumptions(tables)).run().obligations, self.marks)


class RefutesFirst(Record, frozen=True):
    """The opposite of an invariant that the first state has fails in the first state."""

    property: str

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Looks for the failed obligation."""
        asked, found = Base(tables, Assumptions(tables)), next(p for p in tables.properties if p.id == self.property)
        asked.initially(dataclasses.replace(found, expr=Op("not", (found.expr,), BOOL)))
        return _fails(asked.out.obligations, ["init/"])


def _fails(found: Iterable[Obligation], marks: list[str]) -> bool:
    return any(o.status == "failed" and all(m in o.id for m in marks) for o in found)


class Agrees(Record, frozen=True):
    """Z3's terms and the machine agree in this many random states of all rows."""

    states: int

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Compares them."""
        return not agree(tables, self.states, 1, [PythonRows(tables), Z3Rows(tables)]).disagreements


class InOrder(Record, frozen=True):
    """Handoffs do what their rows do one after the other."""

    handoffs: list[str]

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Compares them."""
        return not any(first_difference(spec, tables, name) for name in self.handoffs)


class _FaultSpec(Record, frozen=True):
    """One entry: exactly one probe."""

    proves: Proves | None = None
    refutes: Refutes | None = None
    refutes_claim: RefutesClaim | None = None
    refutes_first: RefutesFirst | None = None
    agrees: Agrees | None = None
    in_order: InOrder | None = None


class _FaultsSpec(Record, frozen=True):
    title: str
    fault: dict[str, _FaultSpec]


def read_probes(directory: Path) -> Mapping[str, Probe]:
    """The probe of each fault; InputError for an entry that has not exactly one."""
    try:
        spec = msgspec.convert(read_toml(directory / FILE, FILE), _FaultsSpec)
    except msgspec.ValidationError as error:
        raise InputError(f"{FILE}: {error}") from None
    probes: dict[str, Probe] = {}
    for name, entry in spec.fault.items():
        given: list[Probe] = [p for f in _FaultSpec.__struct_fields__ if (p := getattr(entry, f)) is not None]
        if len(given) != 1:
            raise InputError(f"{FILE}: fault.{name}: has {len(given)} probes, expected one")
        probes[name] = given[0]
    return probes
