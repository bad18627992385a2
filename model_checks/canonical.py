"""Which differences between states do not matter: what keeps a search over growing counters finite.

Three reductions, each derived from the rows and refused where the rows do not allow it:

* **equality group**: a counter of one entity with the variables that remember it, where rows only copy, compare for
  (in)equality and add one.  Only "still the same" matters: the counter becomes 1, a memory 1 if equal, else 0.
* **shift group**: counters compared with each other and with what was taken from them.  Only distances matter: all are
  shifted so that the smallest counter is 0.
* **dead values**: what every row overwrites before it reads it is set to its first value: in an entity's first stage,
  where it is a leftover (properties see the blank), and in any stage in which no property or claim reads it either.  Whether a row may run in a stage is
  decided by its stage columns; a row of another class that names no stage of the entity is assumed not to read leftovers of the first
  stage, and ``explore`` checks that in the states found.  Amounts that a sum adds up are never reset.

A variable that no guard depends on and that compares a shift group with a constant (a ghost of the proofs) is left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, Expr, Lit, Member, Op, Ref, children, refs
from hybridkv_ref.rows import STAGE_ROLE
from hybridkv_ref.tables import CLASS_OF, Event, Tables

Key = tuple[str, str]
OWNER_ROLES = {"lease": ("self", "req"), "copy": ("src", "dst")}
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


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
    dead: Mapping[tuple[str, str, str], frozenset[str]]

    def keeps(self, expr: Expr) -> bool:
        """Whether a property means the same on reduced states; one that does not is left to the other checks."""
        found = refs(expr)
        if any(key(r) in self.ghosts for r in found):
            return False
        return not any(_misuse(expr, g) for g in self.groups)


class PropertyReads:
    """Which variables the properties and claims read, by class: made once per tables, asked per instance."""

    def __init__(self, tables: Tables) -> None:
        self.by_class: dict[str, list[tuple[str, str, frozenset[str], Expr]]] = {}
        self.asked: dict[tuple[str, str, str], frozenset[str]] = {}
        self.accounts = {cls: _accounts(tables, cls) for cls in ("segment", *tables.classes)}
        stated = [(p.kinds, p.expr) for p in tables.properties]
        stated += [(c.kinds, e) for c in tables.responses for e in (c.start, c.goal, c.given)]
        for kinds, expr in stated:
            found = refs(expr)
            for role in {r.role for r in found if r.role in CLASS_OF}:
                names = frozenset(r.name for r in found if r.role == role)
                self.by_class.setdefault(CLASS_OF[role], []).append((role, kinds.get(role, ""), names, expr))

    def of(self, cls: str, kind: str, stage: str) -> frozenset[str]:
        """The variables that some property still reads once the stage of an entity of this class and kind is known."""
        if (cls, kind, stage) not in self.asked:
            read: set[str] = set()
            for role, bound, names, expr in self.by_class.get(cls, ()):
                if bound in ("", kind) and not names <= read | {"stage"}:
                    read |= {r.name for r in refs(_fold(expr, role, stage)) if r.role == role}
            self.asked[cls, kind, stage] = frozenset(read)
        return self.asked[cls, kind, stage]


def reduction(tables: Tables, events: Iterable[Event], bounded: frozenset[str], reads: PropertyReads) -> Reduction:
    """The reductions for the rows of one instance; counters that only ``bounded`` rows move need none."""
    rows = tuple(events)
    moved = {key(e.target) for r in rows if r.row not in bounded for e in r.effects if e.target.type.name == "counter"}
    groups = _groups(rows, moved)
    needed = _cone(rows)
    ghosts: set[Key] = set()
    for group in groups:
        _judge(group, rows, needed, ghosts)
    return Reduction(tuple(groups), frozenset(ghosts), _dead(tables, rows, reads))


def _groups(rows: tuple[Event, ...], moved: set[Key]) -> list[Group]:
    """Counters with everything that is copied from or compared with them."""
    links: list[tuple[Key, Key]] = []
    for row in rows:
        links += [(key(e.target), key(e.expr)) for e in row.effects if isinstance(e.expr, Ref) and e.expr.role not in ("input", "const")]
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


def _cone(rows: tuple[Event, ...]) -> set[Key]:
    """The variables on which some guard depends, directly or through what is assigned."""
    needed = {key(r) for row in rows for g in row.guards for r in refs(g.expr)}
    while True:
        more = {key(r) for row in rows for e in row.effects if key(e.target) in needed for r in refs(e.expr)}
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
                raise InputError(f"{effect.place}: '{effect.text}' makes the values of {_names(group)} matter: no finite search")
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
    """Whether two variables of a group may meet: any of a shift group; a counter and a memory of it by its own entity."""
    if group.form == "shift":
        return {key(left), key(right)} <= group.counters | group.members
    counter, memory = (left, right) if key(left) in group.counters else (right, left)
    if key(counter) not in group.counters or key(memory) not in group.members:
        return False
    role = group.via.setdefault(key(memory), counter.role)
    return role == counter.role and (role == "global" or role in OWNER_ROLES.get(memory.role, ()))


def _misuse(expr: Expr, group: Group) -> bool:
    """Whether an expression uses the group otherwise than its form allows."""
    every = group.counters | group.members
    if not any(key(r) in every for r in refs(expr)):
        return False
    if isinstance(expr, Op) and expr.op in COMPARISONS and expr.args[0].type.number:
        found: dict[Ref, int] = {}
        left, right = (_linear(a, s, found) for a, s in zip(expr.args, (1, -1), strict=True))
        mine = {r: n for r, n in found.items() if key(r) in every and n}
        if left is None or right is None or sum(mine.values()):
            return True
        if group.form == "shift" or len({(key(r), r.role) for r in mine}) <= 1:
            return False  # a distance; or a variable against its own next value, judged before the reduction
        pair = tuple(found)
        return expr.op not in ("==", "!=") or left + right != 0 or len(pair) != 2 or not _related(*pair, group)
    if isinstance(expr, Ref):
        return True
    return any(_misuse(kid, group) for kid in children(expr))


def allowed_stages(event: Event, role: str, members: tuple[str, ...]) -> frozenset[str]:
    """The stages of a role that the event's own guards on that stage allow."""
    allowed = set(members)
    for guard in event.guards:
        if {(r.role, r.name) for r in refs(guard.expr)} == {(role, "stage")}:
            allowed &= {m for m in members if _stage_holds(guard.expr, m)}
    return frozenset(allowed)


def _stage_holds(expr: Expr, stage: str) -> bool:
    """A guard over one stage, decided."""
    match expr:
        case Member(members=members):
            return stage in members
        case Op(op="==" | "!=", args=args):
            same = any(isinstance(a, Lit) and a.value == stage for a in args)
            return same == (expr.op == "==")
        case Op(op="not", args=(inner,)):
            return not _stage_holds(inner, stage)
        case Op(op="and", args=args):
            return all(_stage_holds(a, stage) for a in args)
        case Op(op="or", args=args):
            return any(_stage_holds(a, stage) for a in args)
    return True


def _dead(tables: Tables, rows: tuple[Event, ...], reads: PropertyReads) -> dict[tuple[str, str, str], frozenset[str]]:
    """Per (class, kind, stage): the variables overwritten before any row that may run there reads them."""
    found: dict[tuple[str, str, str], frozenset[str]] = {}
    types = [("segment", k) for k in tables.kinds] + [(c, "") for c in tables.classes]
    for cls, kind in types:
        stages = tables.stages.get(kind or cls)
        if stages is None or not any(kind in r.kinds.values() or not kind for r in rows):
            continue
        uses = []
        for row in rows:
            for role in row.roles:
                if CLASS_OF[role] != cls or row.kinds.get(role, kind) != kind:
                    continue
                where = allowed_stages(row, role, stages)
                read = {r.name for g in row.guards for r in refs(g.expr) if r.role == role}
                read |= {r.name for e in row.effects for r in refs(e.expr) if r.role == role}
                written = {e.target.name for e in row.effects if e.target.role == role}
                goal = next((e.expr for e in row.effects if e.target.role == role and e.target.name == "stage"), None)
                targets = set(stages) if isinstance(goal, Ref) else {str(goal.value)} if isinstance(goal, Lit) else None
                assumed = len(where) == len(stages) and role != STAGE_ROLE.get(row.scope)
                uses.append((where, read, written, targets, assumed))
        live: dict[str, set[str]] = {s: set() for s in stages}
        grew = True
        while grew:
            grew = False
            for stage in stages:
                now = set(live[stage])
                for where, read, written, targets, assumed in uses:
                    if stage not in where:
                        continue
                    if not assumed or stage != stages[0]:
                        now |= read
                    for target in targets or ():
                        now |= live[target] - written
                grew |= now != live[stage]
                live[stage] = now
        plain = {n for n, v in tables.vars_of(cls, kind).items() if n != "stage" and not v.rigid and v.type.name != "counter"}
        plain -= reads.accounts[cls]
        for stage in stages:
            dead = plain - live[stage]
            found[cls, kind, stage] = frozenset(dead - reads.of(cls, kind, stage) if stage != stages[0] else dead)
    return found


def _accounts(tables: Tables, cls: str) -> set[str]:
    """The variables of a class whose values some sum adds up."""
    owners = [tables.globals, *tables.classes.values(), *(k.vars for k in tables.kinds.values())]
    sums = [v.sum for variables in owners for v in variables.values() if v.sum is not None and v.sum.cls == cls]
    return {name for s in sums for term in s.terms.values() for name in _amounts(term, cls)}


def _amounts(expr: Expr, cls: str) -> set[str]:
    if isinstance(expr, Ref):
        return {expr.name} if CLASS_OF.get(expr.role) == cls else set()
    if isinstance(expr, Member) or (isinstance(expr, Op) and expr.op in COMPARISONS):
        return set()
    return {name for kid in children(expr) for name in _amounts(kid, cls)}


def _fold(expr: Expr, role: str, stage: str) -> Expr:
    """The expression with the (old) stage of a role known and what follows from it simplified."""
    match expr:
        case Member(arg=Ref(role=r, name="stage", new=False), members=members) if r == role:
            return Lit(int(stage in members), BOOL)
        case Op(op="==" | "!=" as op, args=(Ref(role=r, name="stage", new=False), Lit(value=value))) if r == role:
            return Lit(int((value == stage) == (op == "==")), BOOL)
        case Op(op=op, args=args, type=kind):
            folded = tuple(_fold(a, role, stage) for a in args)
            first = folded[0]
            if op == "implies":
                op, folded = "or", (_fold(Op("not", (first,), BOOL), role, stage), folded[1])
            if op in ("and", "or"):
                absorbing = Lit(int(op == "or"), BOOL)
                rest = tuple(a for a in folded if a != Lit(int(op == "and"), BOOL))
                return absorbing if absorbing in rest else Op(op, rest, BOOL) if rest else Lit(int(op == "and"), BOOL)
            if op == "not" and isinstance(first, Lit):
                return Lit(1 - int(first.value), BOOL)
            if op == "ite" and isinstance(first, Lit):
                return folded[1] if first.value else folded[2]
            return Op(op, folded, kind)
    return expr
