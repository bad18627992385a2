"""Which differences between states do not matter: what keeps a search over growing counters finite.

Three reductions, each derived from the rows and refused where the rows do not allow it:

* **equality group**: a counter of one entity with the variables that remember it, where rows only copy, compare for
  (in)equality and add one.  Only "still the same" matters: the counter becomes 1, a memory 1 if equal, else 0.
* **shift group**: counters compared with each other and with what was taken from them.  Only distances matter: all are
  shifted so that the smallest counter is 0.
* **dead values** (``deadness``) are set to their first value.

A variable that no guard depends on and that compares a shift group with a constant (a ghost of the proofs) is left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import Expr, Lit, Op, Ref, children, refs
from hybridkv_ref.model_checks.deadness import COMPARISONS, Facts, Place, dead_values
from hybridkv_ref.tables import CLASS_OF, LINKS, Event, Tables

Key = tuple[str, str]


def key(ref: Ref) -> Key:
    """A variable without its role: (class or 'global', name)."""
    return (CLASS_OF.get(ref.role, ref.role), ref.name)


@dataclass
class Group:
    """Variables that hold values of one or several counters; ``form`` is equality or shift.

    ``via`` names, per memory of an equality group, the role through which it points at the counter's entity.
    """

    counters: set[Key]
    members: set[Key]
    form: str = "equality"
    via: dict[Key, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Reduction:
    """What applies to a set of rows: the groups, the ghosts left out, and (class, kind, stage) -> dead variables."""

    groups: tuple[Group, ...]
    ghosts: frozenset[Key]
    dead: Mapping[Place, frozenset[str]]
    facts: Facts

    def keeps(self, expr: Expr) -> bool:
        """Whether a property means the same on reduced states; one that does not is left to the other checks."""
        found = {key(r) for r in self.facts.refs(expr)}
        if found & self.ghosts:
            return False
        return not any(found & (g.counters | g.members) and _misuse(expr, g) for g in self.groups)


def reduction(tables: Tables, events: Iterable[Event], bounded: frozenset[str], facts: Facts) -> Reduction:
    """The reductions for the rows of one instance; counters that only ``bounded`` rows move need none."""
    rows = tuple(events)
    moved = {key(e.target) for r in rows if r.row not in bounded for e in r.effects if e.target.type.name == "counter"}
    groups = _groups(rows, moved)
    needed = _cone(rows, facts)
    ghosts: set[Key] = set()
    for group in groups:
        _judge(group, rows, needed, ghosts)
    return Reduction(tuple(groups), frozenset(ghosts), dead_values(tables, rows, facts), facts)


def _groups(rows: tuple[Event, ...], moved: set[Key]) -> list[Group]:
    """Counters with everything that is copied from or compared with them."""
    links: list[tuple[Key, Key]] = []
    for row in rows:
        links += [
            (key(e.target), key(e.expr))
            for e in row.effects
            if isinstance(e.expr, Ref) and e.expr.role not in ("input", "const")
        ]
        for expr in (*(g.expr for g in row.guards), *(e.expr for e in row.effects)):
            links += [(key(left), key(right)) for left, right in _compared(expr)]
    groups: list[Group] = []
    for counter in sorted(moved):
        if any(counter in g.counters for g in groups):
            continue
        reached, grew = {counter}, True
        while grew:
            more = {b for pair in links for a, b in (pair, pair[::-1]) if a in reached}
            grew = not more <= reached
            reached |= more
        groups.append(Group(reached & moved, reached - moved))
    return groups


def _compared(expr: Expr) -> list[tuple[Ref, Ref]]:
    """The pairs of variables that are compared directly."""
    found = []
    if isinstance(expr, Op) and expr.op in COMPARISONS:
        left, right = expr.args
        if isinstance(left, Ref) and isinstance(right, Ref) and not {left.role, right.role} & {"input", "const"}:
            found.append((left, right))
    return found + [pair for kid in children(expr) for pair in _compared(kid)]


def _cone(rows: tuple[Event, ...], facts: Facts) -> set[Key]:
    """The variables on which some guard depends, directly or through what is assigned."""
    needed = {key(r) for row in rows for g in row.guards for r in facts.refs(g.expr)}
    while True:
        more = {key(r) for row in rows for e in row.effects if key(e.target) in needed for r in facts.refs(e.expr)}
        if more <= needed:
            return needed
        needed |= more


def _judge(group: Group, rows: tuple[Event, ...], needed: set[Key], ghosts: set[Key]) -> None:
    """Finds the form that every use of the group allows; a misuse in a ghost's effect makes it a ghost to leave out."""
    every = group.counters | group.members
    group.form = "shift" if len(group.counters) > 1 else "equality"
    for row in rows:
        for guard in row.guards:
            if _misuse(guard.expr, group):
                raise InputError(f"{guard.place}: '{guard.text}' bounds the search by no distance of {_names(group)}")
        for effect in row.effects:
            if key(effect.target) in every:
                copied = isinstance(effect.expr, Ref) and _related(effect.target, effect.expr, group)
                fine = copied or _plus_one(effect.expr, effect.target)
            else:
                fine = not _misuse(effect.expr, group)
            if fine:
                continue
            if key(effect.target) in needed:
                raise InputError(
                    f"{effect.place}: '{effect.text}' makes the values of {_names(group)} matter: no finite search"
                )
            ghosts.add(key(effect.target))


def _names(group: Group) -> str:
    return ", ".join(sorted(f"{cls}.{name}" for cls, name in group.counters))


def _plus_one(expr: Expr, target: Ref) -> bool:
    return isinstance(expr, Op) and expr.op == "+" and expr.args[0] == target and isinstance(expr.args[1], Lit)


def _linear(expr: Expr, sign: int, found: dict[Ref, int]) -> int | None:
    """Adds the coefficients of an expression to ``found`` and gives its constant; None if it is not linear."""
    match expr:
        case Lit(value=int() as value):
            return sign * value
        case Ref():
            found[expr] = found.get(expr, 0) + sign
            return 0
        case Op(op="+" | "-", args=(left, right)):
            first = _linear(left, sign, found)
            second = _linear(right, sign if expr.op == "+" else -sign, found)
            return None if first is None or second is None else first + second
    return None


def _related(left: Ref, right: Ref, group: Group) -> bool:
    """Whether two variables of a group may meet: any of a shift group; a counter and a memory of its own."""
    if group.form == "shift":
        return {key(left), key(right)} <= group.counters | group.members
    counter, memory = (left, right) if key(left) in group.counters else (right, left)
    if key(counter) not in group.counters or key(memory) not in group.members:
        return False
    role = group.via.setdefault(key(memory), counter.role)
    return role == counter.role and (role == "global" or role in LINKS.get(memory.role, ()))


def _misuse(expr: Expr, group: Group) -> bool:
    """Whether an expression uses the group otherwise than its form allows."""
    every = group.counters | group.members
    if not any(key(r) in every for r in refs(expr)):
        return False
    if isinstance(expr, Op) and expr.op in COMPARISONS and expr.args[0].type.number:
        found: dict[Ref, int] = {}
        left, right = _linear(expr.args[0], 1, found), _linear(expr.args[1], -1, found)
        mine: dict[Ref, int] = {r: n for r, n in found.items() if key(r) in every and n}
        if left is None or right is None or sum(mine.values()) != 0:
            return True
        if group.form == "shift" or len({(key(r), r.role) for r in mine}) <= 1:
            return False  # a distance; or a variable against its own next value, judged before the reduction
        pair = tuple(found)
        return expr.op not in ("==", "!=") or left + right != 0 or len(pair) != 2 or not _related(*pair, group)
    if isinstance(expr, Ref):
        return True
    return any(_misuse(kid, group) for kid in children(expr))
