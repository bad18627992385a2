"""The loaded tables: typed records that the machine runs, the checks prove and the reports print.

Everything here is already expanded: one ``Event`` per row and kind (per pair of kinds for a handoff), with the guards
and effects of all its parts over the state *before* the step.  Roles name the entities of an event: ``self`` is the
segment, ``lease`` and ``req`` one reader or writer of it, ``src``, ``dst`` and ``copy`` the ends of a handoff and the
copy between them, ``graph`` a captured graph.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from hybridkv_ref.expr import TRUE, Expr, Ref, Type, refs

ROLES: dict[str, tuple[str, ...]] = {
    "global": (),
    "system": (),
    "segment": ("self",),
    "lease": ("self", "lease", "req"),
    "request": ("req",),
    "graph": ("graph",),
    "copy": ("src", "dst", "copy"),
    "pair": ("src", "dst"),
    "rank": ("req", "rank"),
    "transfer": ("xfer",),
    "shipment": ("src", "dst", "xfer", "shipment"),
}
CLASS_OF = {
    "self": "segment", "src": "segment", "dst": "segment", "lease": "lease", "req": "request", "rank": "rank",
    "copy": "copy", "xfer": "transfer", "shipment": "shipment", "graph": "graph",
}  # fmt: skip
# Classes whose entities point at others, and the roles through which they do.
LINKS: dict[str, tuple[str, ...]] = {
    "lease": ("self", "req"),
    "rank": ("req",),
    "copy": ("src", "dst"),
    "shipment": ("src", "dst", "xfer"),
}
HANDOFFS = ("copy", "shipment")  # links that run between two segments


@dataclass(frozen=True, eq=False)
class Sum:
    """What a variable adds up: ``terms`` per kind of segment ('' where kinds do not matter) over entities of ``cls``.

    ``via`` is the role through which those entities point at the owner ('' for a global).
    """

    cls: str
    via: str
    terms: Mapping[str, Expr]


@dataclass(frozen=True, eq=False)
class Var:
    """A variable of an entity class or a global; ``init`` is its first value."""

    name: str
    type: Type
    init: int | str
    rigid: bool = False
    at_least: int | None = None
    sums: tuple[Sum, ...] = ()
    durable: bool = False
    doc: str = ""


@dataclass(frozen=True, eq=False)
class Constant:
    """A symbolic constant with its value in finite instances, which meets every ``assume``."""

    name: str
    small: int
    assume: tuple[tuple[str, Expr], ...]
    doc: str
    file: str


@dataclass(frozen=True)
class Guard:
    """One conjunct: its text, tree, and where it stands (file, row, key) for messages and mutation."""

    text: str
    expr: Expr
    place: str


@dataclass(frozen=True)
class Effect:
    """One assignment; every right-hand side reads the state before the step."""

    target: Ref
    expr: Expr
    text: str
    place: str


@dataclass(frozen=True, eq=False)
class Event:
    """One thing that can happen, atomically.

    ``kinds`` maps the segment roles to their kinds; ``can`` holds limit cases in which it must be possible.
    """

    id: str
    row: str
    file: str
    scope: str
    kinds: Mapping[str, str]
    guards: tuple[Guard, ...]
    effects: tuple[Effect, ...]
    edges: Mapping[str, tuple[tuple[str, ...], str]]
    can: tuple[Guard, ...] = ()
    inputs: Mapping[str, Type] = field(default_factory=dict)
    actor: str = ""
    fair: bool = False
    intake: bool = False
    tags: tuple[str, ...] = ()
    rules: tuple[str, ...] = ()
    kernel: str = ""
    doc: str = ""

    @property
    def roles(self) -> tuple[str, ...]:
        """The entities that take part."""
        return ROLES[self.scope]


@dataclass(frozen=True, eq=False)
class Property:
    """An invariant, step property or witness; ``kinds`` restricts each segment role to the kinds it is stated for."""

    id: str
    form: str
    scope: str
    kinds: Mapping[str, str]
    expr: Expr
    text: str
    place: str
    role: str = "goal"
    on: str = ""
    choose: Expr = TRUE
    rules: tuple[str, ...] = ()
    doc: str = ""

    @cached_property
    def reads(self) -> frozenset[Ref]:
        """Every variable that the property reads."""
        return refs(self.expr)


@dataclass(frozen=True)
class Helpful:
    """Certain progress while ``when`` holds: a fair row, or ``count`` entities whose end the claims ``by...`` promise.

    For ``by == "another"`` the fair row is that of another segment with ``who``; ``probe`` fixes the arbitrary
    constant.
    """

    row: str
    by: str
    when: Expr
    count: Expr
    who: Expr
    probe: Expr
    text: str


@dataclass(frozen=True, eq=False)
class Response:
    """A liveness claim for one scope and kind: from ``start`` always eventually ``goal``, by the falling ``rank``."""

    id: str
    form: str
    scope: str
    kinds: Mapping[str, str]
    start: Expr
    goal: Expr
    given: Expr
    rank: tuple[Expr, ...]
    helpful: tuple[Helpful, ...]
    without: frozenset[str]
    also_fair: frozenset[str]
    rules: tuple[str, ...]
    text: str


@dataclass(frozen=True, eq=False)
class Kind:
    """One kind of segment."""

    name: str
    file: str
    title: str
    stages: tuple[str, ...]
    sets: Mapping[str, tuple[str, ...]]
    capabilities: frozenset[str]
    edges: frozenset[tuple[str, str]]
    vars: Mapping[str, Var]
    extensions: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Survivor:
    """What a crash leaves of a segment of ``kind`` in ``stages`` where all guards hold.

    Stage ``to`` and these variables.
    """

    id: str
    kind: str
    stages: tuple[str, ...]
    guards: tuple[Guard, ...]
    to: str
    keep: tuple[str, ...]
    rules: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Tables:
    """The whole spec, loaded."""

    kinds: Mapping[str, Kind]
    classes: Mapping[str, Mapping[str, Var]]
    stages: Mapping[str, tuple[str, ...]]
    sets: Mapping[str, Mapping[str, tuple[str, ...]]]
    constants: Mapping[str, Constant]
    globals: Mapping[str, Var]
    events: tuple[Event, ...]
    properties: tuple[Property, ...]
    responses: tuple[Response, ...]
    survivors: tuple[Survivor, ...]
    sha256: str

    def vars_of(self, cls: str, kind: str = "") -> Mapping[str, Var]:
        """The variables of an entity class; segments need their kind."""
        return self.kinds[kind].vars if cls == "segment" else self.classes[cls]

    @cached_property
    def by_id(self) -> Mapping[str, Event]:
        """The events by their ids."""
        return {event.id: event for event in self.events}

    def event(self, name: str) -> Event:
        """The event with this id; KeyError when there is none."""
        return self.by_id[name]

    def forms(self, form: str) -> tuple[Property, ...]:
        """The properties of one form: invariant, step or sometimes."""
        return tuple(p for p in self.properties if p.form == form)
