"""What a proof run produces: one record per obligation, and a counterexample where one fails."""

import msgspec


class Change(msgspec.Struct, frozen=True):
    """One field in a counterexample: its value before and after the step."""

    entity: str
    field: str
    before: int | str | bool
    after: int | str | bool


class Counterexample(msgspec.Struct, frozen=True):
    """A step that breaks a property.  ``reachable`` is True only for traces of a search: a counterexample to induction
    may start in a state that no run reaches, and then a helper invariant is missing.
    """

    obligation: str
    event: str
    property: str
    rules: tuple[str, ...]
    text: str
    changes: tuple[Change, ...]
    reachable: bool = False


class Obligation(msgspec.Struct):
    """One query: ``status`` is proved, failed or unknown.  ``milliseconds`` is the solver's time, 0 when taken from cache."""

    id: str
    table: str
    row: str
    property: str
    method: str
    status: str
    milliseconds: float
    rules: tuple[str, ...] = ()
    cached: bool = False


class Proofs(msgspec.Struct):
    """The outcome of one task (an event, or the initial state)."""

    obligations: list[Obligation]
    counterexamples: list[Counterexample]
