"""Dead values: what every row overwrites before it reads it, so that states differing only there need no telling apart.

Per class, kind and stage, by the usual fixed point over the stage edges of the rows.  Whether a row may run in a
stage is decided by its own guards on that stage.  A row of another class that names no stage of the entity is assumed
not to read leftovers of the first stage; ``explore`` checks that in the states found.  Amounts that a sum adds up are
never dead, and outside the first stage neither is what a property or claim still reads there (in the first stage it
sees the blank).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from hybridkv_ref.expr import BOOL, Expr, Lit, Member, Op, Ref, children, refs
from hybridkv_ref.rows import STAGE_ROLE
from hybridkv_ref.tables import CLASS_OF, Event, Tables

COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")
Place = tuple[str, str, str]


class Facts:
    """What the reductions ask about one set of tables again and again: made once, shared by all instances."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.read: dict[int, frozenset[Ref]] = {}
        self.allowed: dict[tuple[str, str], frozenset[str]] = {}
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

    def refs(self, expr: Expr) -> frozenset[Ref]:
        """The variables of an expression of the tables (which keep it alive, so that its id stays its own)."""
        if id(expr) not in self.read:
            self.read[id(expr)] = refs(expr)
        return self.read[id(expr)]

    def stages(self, event: Event, role: str, members: tuple[str, ...]) -> frozenset[str]:
        """The stages of a role that the event's own guards on that stage allow."""
        if (event.id, role) not in self.allowed:
            own = [g.expr for g in event.guards if {(r.role, r.name) for r in self.refs(g.expr)} == {(role, "stage")}]
            self.allowed[event.id, role] = frozenset(m for m in members if all(_stage_holds(e, m) for e in own))
        return self.allowed[event.id, role]

    def of(self, cls: str, kind: str, stage: str) -> frozenset[str]:
        """The variables that some property still reads once the stage of an entity of this class and kind is known."""
        if (cls, kind, stage) not in self.asked:
            read: set[str] = set()
            for role, bound, names, expr in self.by_class.get(cls, ()):
                if bound in ("", kind) and not names <= read | {"stage"}:
                    read |= {r.name for r in refs(_fold(expr, role, stage)) if r.role == role}
            self.asked[cls, kind, stage] = frozenset(read)
        return self.asked[cls, kind, stage]


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


@dataclass(frozen=True)
class _Use:
    """What one row does to one role: the stages it may find, what it reads and writes, the stages it may lead to."""

    where: frozenset[str]
    read: frozenset[str]
    written: frozenset[str]
    targets: frozenset[str]
    assumed: bool


def _uses(rows: Sequence[Event], cls: str, kind: str, stages: tuple[str, ...], facts: Facts) -> list[_Use]:
    """Every role of every row that an entity of this class and kind may take."""
    found = []
    for row in rows:
        for role in row.roles:
            if CLASS_OF[role] != cls or row.kinds.get(role, kind) != kind:
                continue
            where = facts.stages(row, role, stages)
            exprs = (*(g.expr for g in row.guards), *(e.expr for e in row.effects))
            read = frozenset(r.name for expr in exprs for r in facts.refs(expr) if r.role == role)
            writes = {e.target.name: e.expr for e in row.effects if e.target.role == role}
            goal = writes.get("stage")
            targets = (str(goal.value),) if isinstance(goal, Lit) else stages if goal is not None else ()
            assumed = len(where) == len(stages) and role != STAGE_ROLE.get(row.scope)
            found.append(_Use(where, read, frozenset(writes), frozenset(targets), assumed))
    return found


def _live(uses: list[_Use], stages: tuple[str, ...]) -> dict[str, frozenset[str]]:
    """Per stage, the variables that some row may read before they are overwritten."""
    live: dict[str, frozenset[str]] = {s: frozenset() for s in stages}
    while True:
        now = {}
        for stage in stages:
            here = [u for u in uses if stage in u.where]
            read = [u.read for u in here if not u.assumed or stage != stages[0]]
            later = [live[target] - u.written for u in here for target in u.targets]
            now[stage] = live[stage].union(*read, *later)
        if now == live:
            return live
        live = now


def dead_values(tables: Tables, rows: Sequence[Event], facts: Facts) -> dict[Place, frozenset[str]]:
    """Per (class, kind, stage): the variables overwritten before any row that may run there reads them."""
    found: dict[Place, frozenset[str]] = {}
    types = [("segment", k) for k in tables.kinds] + [(c, "") for c in tables.classes]
    for cls, kind in types:
        stages = tables.stages.get(kind or cls)
        if stages is None or not any(kind in r.kinds.values() or not kind for r in rows):
            continue
        live = _live(_uses(rows, cls, kind, stages, facts), stages)
        plain = {
            n for n, v in tables.vars_of(cls, kind).items() if n != "stage" and not v.rigid and v.type.name != "counter"
        }
        plain -= facts.accounts[cls]
        for stage in stages:
            dead = plain - live[stage]
            found[cls, kind, stage] = frozenset(dead - facts.of(cls, kind, stage) if stage != stages[0] else dead)
    return found


def _accounts(tables: Tables, cls: str) -> set[str]:
    """The variables of a class whose values some sum adds up."""
    owners = [tables.globals, *tables.classes.values(), *(k.vars for k in tables.kinds.values())]
    sums = [s for variables in owners for v in variables.values() for s in v.sums if s.cls == cls]
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
