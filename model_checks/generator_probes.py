"""Probes of the proof generator: checks that pass on the generator as it is, and that a fault in it makes fail.

* ``Proves``: the obligations of some rows are all proved, and can all be met;
* ``Refutes``, ``RefutesClaim``, ``RefutesFirst``: a row, a liveness claim or an invariant with a known fault of its own
  fails, and in a named obligation, so that it is seen where it should be;
* ``Agrees``: Z3's terms and the machine give the same guards and values in random states;
* ``InOrder``: a handoff does what its rows do when they are fired one after the other (see ``handoff_order``).
"""

import dataclasses
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from hybridkv_ref.expr import BOOL, Op
from hybridkv_ref.loader import build_events
from hybridkv_ref.model_checks.agreement import PythonRows, Z3Rows, agree
from hybridkv_ref.model_checks.base import Base
from hybridkv_ref.model_checks.frames import Assumptions
from hybridkv_ref.model_checks.handoff_order import first_difference
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.liveness import Claim
from hybridkv_ref.model_checks.mutants import Mutant
from hybridkv_ref.model_checks.obligations import Obligation
from hybridkv_ref.spec_files import Spec
from hybridkv_ref.tables import Response, Tables


class Probe(Protocol):
    """A check of the generator; ``passes`` is asked with and without a fault."""

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Whether everything is as it should be; ``tables`` are those of ``spec``, built without a fault."""
        ...


@dataclass(frozen=True)
class Proves:
    """Every obligation of these rows (event ids) and, if asked, of the first state is proved."""

    rows: tuple[str, ...]
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


@dataclass(frozen=True)
class Refutes:
    """With one change to a row, ``event`` fails in an obligation whose name contains each of ``marks``."""

    mutant: Mutant
    event: str
    marks: tuple[str, ...]

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Looks for the failed obligation."""
        bent = next(e for e in build_events(self.mutant.apply(spec)) if e.id == self.event)
        return _fails(Task(tables, bent, Assumptions(tables)).run().obligations, self.marks)


@dataclass(frozen=True)
class RefutesClaim:
    """A liveness claim with one wrong part fails in an obligation whose name contains each of ``marks``."""

    claim: str
    bend: Callable[[Response], Response]
    marks: tuple[str, ...]

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Looks for the failed obligation."""
        bent = self.bend(next(c for c in tables.responses if c.id == self.claim))
        return _fails(Claim(tables, bent, Assumptions(tables)).run().obligations, self.marks)


@dataclass(frozen=True)
class RefutesFirst:
    """The opposite of an invariant that the first state has fails in the first state."""

    property: str

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Looks for the failed obligation."""
        asked, found = Base(tables, Assumptions(tables)), next(p for p in tables.properties if p.id == self.property)
        asked.initially(dataclasses.replace(found, expr=Op("not", (found.expr,), BOOL)))
        return _fails(asked.out.obligations, ("init/",))


def _fails(found: Iterable[Obligation], marks: tuple[str, ...]) -> bool:
    return any(o.status == "failed" and all(m in o.id for m in marks) for o in found)


@dataclass(frozen=True)
class Agrees:
    """Z3's terms and the machine agree in this many random states of all rows."""

    states: int

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Compares them."""
        return not agree(tables, self.states, 1, [PythonRows(tables), Z3Rows(tables)]).disagreements


@dataclass(frozen=True)
class InOrder:
    """Handoffs do what their rows do one after the other."""

    names: tuple[str, ...]

    def passes(self, spec: Spec, tables: Tables) -> bool:
        """Compares them."""
        return not any(first_difference(spec, tables, name) for name in self.names)
