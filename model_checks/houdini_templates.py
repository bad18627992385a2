"""Templates of invariants: everything that ``houdini`` tries.

A candidate is ``premise implies claim``:

* premise: nothing; one stage of the entity; that and a count of it that is positive;
* claim: an int against 0 and 1, a bool or its opposite, an enum is not a member, two related ints ordered.

A set of stages or of members needs no template: it is a conjunction of these.  Two ints are *related* if rows compare
them or assign one from the other, directly or through others.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import permutations

from hybridkv_ref.expr import BOOL, INT, TRUE, Expr, Lit, Op, Ref, children
from hybridkv_ref.model_checks.frames import link_pairs
from hybridkv_ref.model_checks.samples import Scope
from hybridkv_ref.rows import STAGE_ROLE
from hybridkv_ref.tables import CLASS_OF, HANDOFFS, ROLES, Tables, Var

Premise = tuple[Expr, ...]
COMPARISONS = ("==", "!=", "<", "<=", ">", ">=")


@dataclass(frozen=True)
class Candidate:
    """One implication over the entities of a scope."""

    scope: Scope
    premise: Premise
    claim: Expr


class Related:
    """Which ints the rows relate, as classes of (class of entity, variable)."""

    def __init__(self, tables: Tables) -> None:
        self.parent: dict[tuple[str, str], tuple[str, str]] = {}
        for event in tables.events:
            tag = f"input of {event.id}"
            for guard in event.guards:
                self.compared(guard.expr, tag)
            for effect in event.effects:
                self.compared(effect.expr, tag)
                self.join([effect.target, *values(effect.expr)], tag)

    def compared(self, expr: Expr, tag: str) -> None:
        """Joins both sides of every comparison."""
        if isinstance(expr, Op) and expr.op in COMPARISONS:
            self.join([r for side in expr.args for r in values(side)], tag)
        for kid in children(expr):
            self.compared(kid, tag)

    def join(self, found: list[Ref], tag: str) -> None:
        """Makes numbers one class."""
        roots = [self.root(self.key(r, tag)) for r in found if r.type.number]
        for root in roots[1:]:
            self.parent[self.root(root)] = self.root(roots[0])

    @staticmethod
    def key(ref: Ref, tag: str = "") -> tuple[str, str]:
        """A variable without its role; an input belongs to its event."""
        return (tag if ref.role == "input" else CLASS_OF.get(ref.role, ref.role), ref.name)

    def root(self, key: tuple[str, str]) -> tuple[str, str]:
        """The representative of a class."""
        while self.parent.get(key, key) != key:
            key = self.parent[key]
        return key

    def __call__(self, left: Ref, right: Ref) -> bool:
        """Whether two ints are in one class."""
        return self.root(self.key(left)) == self.root(self.key(right))


def values(expr: Expr) -> list[Ref]:
    """The variables that an expression may add up or choose from; what a condition reads is left out."""
    if isinstance(expr, Ref):
        return [expr]
    if isinstance(expr, Op) and expr.op in ("+", "-", "neg", "ite"):
        return [r for kid in (expr.args[1:] if expr.op == "ite" else expr.args) for r in values(kid)]
    return []


# -- candidates -------------------------------------------------------------------------------------------------------
def roles_of(scope: str) -> tuple[str, ...]:
    """The roles of a scope, that of the entity itself first."""
    return tuple(sorted(ROLES[scope], key=lambda role: CLASS_OF[role] != scope))


def scopes(tables: Tables) -> Iterator[Scope]:
    """Every scope with every choice of kinds for it."""
    yield "global", ()
    for kind, spec in tables.kinds.items():
        yield "segment", (("self", kind),)
        if "cacheable" in spec.capabilities:
            yield "lease", (("self", kind),)
    for cls in tables.classes:
        if cls in HANDOFFS:
            yield from ((cls, (("src", src), ("dst", dst))) for src, dst in sorted(link_pairs(tables, cls)))
        elif cls != "lease":
            yield cls, ()


def candidates(tables: Tables) -> Iterator[Candidate]:
    """All candidates of the templates."""
    related = Related(tables)
    for scope in scopes(tables):
        owned = variables(tables, scope)
        own = next(iter(owned))
        shared = constants(tables, scope)
        for premise, about in premises(tables, scope[0], owned):
            for role, refs_of in owned.items() if about is None else ():
                wanted = refs_of if role == own else [r for r in refs_of if premise and r.name == "stage"]
                yield from (Candidate(scope, premise, claim) for ref in wanted for claim in alone(ref))
            numbers = [r for role in owned for r in owned[role] if r.type.number]
            for left, right in permutations([*numbers, *shared], 2):
                if pairs_up(scope[0], left, right) and related(left, right) and fits(about, left, right):
                    orders = ("<=", "<") if len(roles_of(scope[0])) == 1 else ("<=",)
                    yield from (Candidate(scope, premise, Op(order, (left, right), BOOL)) for order in orders)


def variables(tables: Tables, scope: Scope) -> dict[str, list[Ref]]:
    """The variables of a scope by role; of a request's per-kind ones those of the lease's kind."""
    kinds = dict(scope[1])
    if scope[0] == "global":
        return {"global": [Ref("global", n, v.type) for n, v in tables.globals.items()]}
    found: dict[str, list[Ref]] = {}
    for role in roles_of(scope[0]):
        owned: Iterable[Var] = tables.vars_of(CLASS_OF[role], kinds.get(role, "")).values()
        own = ("", kinds.get("self", "")) if scope[0] == "lease" else ()
        found[role] = [Ref(role, v.name, v.type) for v in owned if not own or v.name.partition(".")[2] in own]
    return found


def constants(tables: Tables, scope: Scope) -> list[Ref]:
    """The constants and, for one segment, the globals that its ints may be compared with."""
    kinds = tuple(dict(scope[1]).values())
    found = [Ref("const", n, INT) for n in tables.constants if "." not in n or n.split(".")[0] in kinds or not kinds]
    if scope[0] == "segment":
        found += [Ref("global", n, v.type) for n, v in tables.globals.items() if "." not in n]
    return found if scope[0] in ("global", "segment") else []


def premises(tables: Tables, scope: str, owned: dict[str, list[Ref]]) -> Iterator[tuple[Premise, Ref | None]]:
    """The premises of a scope, with the count that one of them is about."""
    yield (), None
    role = STAGE_ROLE.get(scope)
    if role is None:
        return
    stage = next(r for r in owned[role] if r.name == "stage")
    counts = {n for n, v in tables.vars_of("request").items() if v.sums} if scope == "request" else set()
    for member in stage.type.members:
        here = Op("==", (stage, Lit(member, stage.type)), BOOL)
        yield (here,), None
        yield from (((here, Op(">", (r, Lit(0, INT)), BOOL)), r) for r in owned[role] if r.name in counts)


def alone(ref: Ref) -> Iterator[Expr]:
    """The claims about one variable."""
    if ref.type == BOOL:
        yield from (ref, Op("not", (ref,), BOOL))
    elif ref.type.number:
        for op, number in ((">=", 0), ("<=", 0), (">=", 1), ("<=", 1)):
            yield Op(op, (ref, Lit(number, INT)), BOOL)
    else:
        yield from (Op("!=", (ref, Lit(m, ref.type)), BOOL) for m in ref.type.members)


def pairs_up(scope: str, left: Ref, right: Ref) -> bool:
    """Pairs worth asking: across entities where the scope has several, of one kind where a request has one per kind."""
    if left.role == right.role:
        suffixes = {left.name.partition(".")[2], right.name.partition(".")[2]} - {""}
        return len(roles_of(scope)) < 2 and len(suffixes) < 2
    shared = {left.role, right.role} <= {"const", "global"}
    return scope == "global" if shared else True


def fits(about: Ref | None, left: Ref, right: Ref) -> bool:
    """A claim under a count is about variables of the count's kind."""
    suffix = about.name.partition(".")[2] if about else ""
    return about is None or (bool(suffix) and {left.name.partition(".")[2], right.name.partition(".")[2]} == {suffix})


def is_pair(claim: Expr) -> bool:
    """Whether a claim orders two variables; those are tried when everything else is settled."""
    return isinstance(claim, Op) and len(claim.args) == 2 and all(isinstance(a, Ref) for a in claim.args)


def implies(premise: Premise, claim: Expr) -> Expr:
    """``premise implies claim``."""
    return Op("implies", (conjunction(premise), claim), BOOL) if premise else claim


def conjunction(parts: tuple[Expr, ...]) -> Expr:
    """All of these."""
    return TRUE if not parts else parts[0] if len(parts) == 1 else Op("and", parts, BOOL)
