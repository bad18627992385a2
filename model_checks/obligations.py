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
    """One query.

    ``status`` is proved, failed or unknown.  ``milliseconds`` is the solver's time when it was proved,
    its share where several were asked at once.
    """

    id: str
    table: str
    row: str
    property: str
    method: str
    status: str
    milliseconds: float
    rules: tuple[str, ...] = ()
    cached: bool = False


class Search(msgspec.Struct):
    """The outcome of one search that is no solver query: a witness, an exploration, an interleaving, a fair cycle.

    ``status`` is found, missing, holds, fails or differs; ``passed`` says whether that is as it should be.  ``bound``
    names the finite instance: a search says nothing beyond it.
    """

    id: str
    method: str
    status: str
    passed: bool
    bound: str = ""
    depth: int = -1
    states: int = 0
    detail: str = ""
    rules: tuple[str, ...] = ()


class TaskResult(msgspec.Struct):
    """Everything that one task produced."""

    obligations: list[Obligation] = []
    counterexamples: list[Counterexample] = []
    searches: list[Search] = []
