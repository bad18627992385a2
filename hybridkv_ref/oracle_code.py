"""The oracle's rows as source, and the records that they are fired on.

A variable that each kind has of its own (a request's ``hits.full``, a pool's ``full.used``) lies in a *part* of the
record, one per group; constants lie beside the row. A row over blocks of one group reaches both through its group's
number, so its text is the same for all groups of all engines, and so is the class that is made of it: when an oracle is
made, or ahead of time (``native``). Rows over several groups name their parts outright.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from hybridkv_ref.compile_py import attribute, role_name
from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, Ref, refs
from hybridkv_ref.machine import Value, event_lines, named_values
from hybridkv_ref.oracle_compiled import ROWS
from hybridkv_ref.oracle_entities import CLASSES, Constants, Makers, Pool
from hybridkv_ref.oracle_row import FORMS, Row
from hybridkv_ref.tables import Event, Guard, Tables, Var

POOL, PART, MAKERS = "pool", "_part", "makers"
"""The class of a pool's record, what is added to a class's name for its parts, and the class that makes records."""

_SUBJECTS = {"lease": "lease", "segment": "seg", "request": "req", "system": "sys"}
"""How the name of a form begins, by the scope of its rows."""


class Compiled(NamedTuple):
    """A row as code: the class of its rows, what fires it, what only asks, and the group of its blocks (-1: none)."""

    event: Event
    form: type[Row]
    function: Callable[..., int]
    test: Callable[..., int]
    group: int


def split(name: str, kinds: tuple[str, ...], first: bool) -> tuple[int, str]:
    """The number of the kind to which a variable belongs, -1 for none, and its name without it.

    ``first``: the kind comes first, as in the names of constants and of a pool's variables.
    """
    left, _, right = name.partition(".") if first else name.rpartition(".")
    kind, bare = (left, right) if first else (right, left)
    return (kinds.index(kind), bare) if kind in kinds and bare else (-1, name)


def layout(tables: Tables, kinds: tuple[str, ...]) -> dict[str, dict[str, Var]]:
    """The variables of every record, by class; of a class with parts, those of one part stand under its own name."""
    found: dict[str, dict[str, Var]] = {"segment": dict(tables.vars_of("segment", kinds[0]))}
    for cls, variables in (*tables.classes.items(), (POOL, tables.globals)):
        for name, var in variables.items():
            group, bare = split(name, kinds, cls == POOL)
            found.setdefault(cls if group < 0 else cls + PART, {})[attribute(bare)] = var
    return {cls: {attribute(n): v for n, v in variables.items()} for cls, variables in found.items()}


def first_value(var: Var) -> Value:
    """The first value of a variable."""
    return bool(var.init) if var.type == BOOL else var.init


@dataclass(frozen=True, slots=True)
class Text:
    """A row as text: the form under which it is called, its arguments, and its lines."""

    form: str
    arguments: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def source(self) -> str:
        """The text as a method."""
        return "\n".join([f"def {self.form}({', '.join(('self', *self.arguments))}):", *self.lines])


def _part(ref: Ref, kinds: tuple[str, ...]) -> tuple[int, str]:
    return split(ref.name, kinds, ref.role in ("const", "global"))


def text_of(event: Event, kinds: tuple[str, ...], constants: Mapping[str, int], effects: bool = True) -> Text:
    """A row's text; of one group's blocks the same for every group and every choice of constants."""
    own = kinds.index(event.kinds["self"]) if set(event.kinds) == {"self"} else -1
    used = {r for g in event.guards for r in refs(g.expr)}
    used |= {r for e in event.effects for r in (e.target, *refs(e.expr))}
    parts = {_part(r, kinds)[0] for r in used if r.role != "input"}
    general = own >= 0 and parts <= {own, -1}

    def name(ref: Ref) -> str:
        if ref.role == "input":
            return f"in_{ref.name}"
        group, bare = _part(ref, kinds)
        if ref.role == "const":
            return f"C.{attribute(bare)}" if general else repr(constants[ref.name])
        owner = "G" if ref.role == "global" else role_name(ref.role)
        if group < 0:
            return f"{owner}.{attribute(bare)}"
        return f"{owner}_part.{attribute(bare)}" if general else f"{owner}.parts[{group}].{attribute(bare)}"

    lines = event_lines(event, name, effects)
    whole = "\n".join(lines)
    heads = [f"    {o}_part = {o}.parts[self.group]" for o in ("G", "req") if f"{o}_part." in whole]
    heads += ["    C = self.constants"] if "C." in whole else []
    arguments = ("G", *map(role_name, event.roles), *(f"in_{i}" for i in event.inputs))
    form = f"{_SUBJECTS.get(event.scope, '')}{len(event.inputs)}"
    plain = all(t.number or t == BOOL for t in event.inputs.values())
    return Text(form if plain and form in FORMS else "fire", arguments, (*heads, *lines))


@lru_cache(maxsize=4096)
def _function(source: str, form: str) -> Callable[..., int]:
    space: dict[str, Any] = {}
    exec(compile(source, "<tables>", "exec"), space)
    made: Callable[..., int] = space[form]
    return made


@lru_cache(maxsize=4096)
def row_class(text: Text) -> tuple[type[Row], Callable[..., int]]:
    """The class for a row's text, and the function that fires it: the compiled one if there is one."""
    known = ROWS.get(text.source)
    if known is not None:
        return known, vars(known)[text.form]
    function = _function(text.source, text.form)
    if ROWS or text.form == "fire":
        return Row, function
    return type("Row", (Row,), {"__slots__": (), text.form: function}), function


@lru_cache(maxsize=1024)
def _entity_class(cls: str, variables: tuple[str, ...], parts: bool) -> type:
    """Records of nothing but variables; one type for blocks of all groups, which the interpreter then reads alike."""
    if cls in CLASSES:
        made, known = CLASSES[cls]
        if known != variables:
            raise InputError(f"{cls}: the compiled oracle is of other tables; use the interpreted one")
        return made
    return type(cls, (), {"__slots__": (*variables, "parts") if parts else variables})


def makers_source(lease: Mapping[str, Var], typed: bool) -> str:
    """The class that makes leases: one that is done is made new again, so that there is no garbage to collect."""
    returned, taken, spare = (" -> Lease", ": Lease", ": list[Lease]") if typed else ("", "", "")
    lines = [
        "class Makers:",
        f"    def __init__(self){' -> None' if typed else ''}:",
        f"        self.spare{spare} = []",
        f"    def lease(self){returned}:",
        "        return self.spare.pop() if self.spare else Lease()",
        f"    def done(self, lease{taken}){' -> None' if typed else ''}:",
        *(f"        lease.{name} = {first_value(var)!r}" for name, var in lease.items()),
        "        self.spare.append(lease)",
    ]
    return "\n".join(lines)


@lru_cache(maxsize=64)
def code_of(tables: Tables, kinds: tuple[str, ...], constants: tuple[tuple[str, int], ...]) -> "Code":
    """The tables as code for these kinds and constants, once."""
    return Code(tables, kinds, dict(constants))


class Code:
    """The tables as code: rows of every event, and makers of records in their first stage."""

    def __init__(self, tables: Tables, kinds: tuple[str, ...], constants: Mapping[str, int]) -> None:
        self.kinds, self.constants = kinds, constants
        self.layout = layout(tables, kinds)
        self.made: dict[tuple[str, tuple[str, ...]], Callable[..., Any]] = {}
        own: list[dict[str, int]] = [{} for _ in (*kinds, "")]
        for name, value in constants.items():
            group, bare = split(name, kinds, first=True)
            for values in own if group < 0 else (own[group],):
                values[attribute(bare)] = value
        names = tuple(dict.fromkeys(n for values in own for n in values))
        self.beside = [_filled("constants", names, values) for values in own]
        self.rows = [self._compiled(event) for event in tables.events]

    def _compiled(self, event: Event) -> Compiled:
        text = text_of(event, self.kinds, self.constants)
        test = text_of(event, self.kinds, self.constants, effects=False)
        kind = event.kinds.get("self") or event.kinds.get("dst")
        group = self.kinds.index(kind) if kind else -1
        return Compiled(event, *row_class(text), _function(test.source, test.form), group)

    def row(self, compiled: Compiled, group: int, more: tuple[str, ...] = ()) -> Row:
        """A row to be fired, one of ``rows``, for a group."""
        event, form, function, test, _ = compiled
        return form(event, function, test, group, self.beside[group], self, more)

    def maker(self, cls: str, rigid: tuple[str, ...] = ()) -> Callable[..., Any]:
        """A function that makes records in their first stage, by straight-line code.

        Its keyword arguments are the rigid variables that it sets.
        """
        if (cls, rigid) in self.made:
            return self.made[cls, rigid]
        variables = {n: repr(first_value(v)) for n, v in self.layout[cls].items()}
        made = _entity_class(cls, tuple(variables), cls + PART in self.layout)
        set_here = variables if cls not in CLASSES else dict.fromkeys(rigid)
        lines = [f"def make({', '.join(sorted(rigid))}):", " e = new()"]
        lines += [f" e.{n} = {n if n in rigid else v}" for n, v in set_here.items()]
        space: dict[str, Any] = {"new": made}
        exec("\n".join([*lines, " return e"]), space)
        self.made[cls, rigid] = made if cls in CLASSES and not rigid else space["make"]
        return self.made[cls, rigid]

    def makers(self) -> Makers:
        """What makes the records that are made for block after block."""
        if MAKERS in CLASSES:
            return CLASSES[MAKERS][0]()
        space: dict[str, Any] = {"Lease": self.maker("lease")}
        exec(makers_source(self.layout["lease"], typed=False), space)
        return space["Makers"]()

    def pool(self) -> Pool:
        """A pool with nothing in it."""
        pool = self.maker(POOL)()
        pool.parts = [self.maker(POOL + PART)() for _ in self.kinds]
        return pool

    def values(self, row: Row, guard: Guard, pool: Pool, arguments: tuple[Any, ...]) -> dict[str, Value]:
        """What the variables of a row's guard were, by the name that a reader knows."""
        by_role = dict(zip((*row.event.roles, *row.event.inputs), arguments, strict=True))

        def look(ref: Ref) -> Value:
            if ref.role in ("const", "input"):
                found: Value = self.constants[ref.name] if ref.role == "const" else by_role[ref.name]
            else:
                group, bare = _part(ref, self.kinds)
                owner = pool if ref.role == "global" else by_role[ref.role]
                found = getattr(owner if group < 0 else owner.parts[group], attribute(bare))
            return found

        return named_values(guard.expr, look)


def _filled(cls: str, names: Iterable[str], values: Mapping[str, int]) -> Constants:
    made = _entity_class(cls, tuple(names), parts=False)()
    for name in names:
        setattr(made, name, values.get(name, 0))
    return made
