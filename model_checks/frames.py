"""Frames: the few entities that one proof obligation looks at, and what may be assumed of them.

A row acts on its *actors*.  A property is shown after the step for every way in which its entities can be actors or
arbitrary *bystanders* (a segment of any kind, another lease of the same segment, of the same request, a copy from or
to an actor, ...).  Everything else is the unchanged *rest* of each sum: ``used = actors + bystanders + rest``.  So a
proof over a frame of at most six entities holds for any number of segments, leases, requests, copies and graphs.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product

import z3

from hybridkv_ref.expr import Expr, Ref, refs
from hybridkv_ref.model_checks.smt import constant, in_range, new_solver, term
from hybridkv_ref.tables import CLASS_OF, HANDOFFS, LINKS, ROLES, Event, Sum, Tables, Var


@dataclass(frozen=True)
class Inst:
    """One entity of a frame. ``refs`` maps roles to the entities that it points at."""

    name: str
    cls: str
    kind: str = ""
    refs: tuple[tuple[str, "Inst"], ...] = ()

    def owner(self, role: str) -> "Inst | None":
        """The entity that this one points at through ``role``."""
        return dict(self.refs).get(role)


Binding = Mapping[str, Inst]
Cell = tuple[str, str]


def property_roles(prop_scope: str, kinds: Mapping[str, str]) -> tuple[str, ...]:
    """The roles a property talks about: a copy property may leave one end out."""
    if prop_scope in HANDOFFS:
        return tuple(r for r in ROLES[prop_scope] if CLASS_OF[r] != "segment" or r in kinds)
    return ROLES[prop_scope]


@dataclass
class Frame:
    """Actors and bystanders; builds and caches terms over their variables."""

    tables: Tables
    actors: Binding
    fresh: tuple[Inst, ...] = ()

    @property
    def instances(self) -> tuple[Inst, ...]:
        """All entities, actors first."""
        return (*self.actors.values(), *self.fresh)


@dataclass
class Vocabulary:
    """Symbolic constants for cells (entity, variable), shared by all frames of one process."""

    tables: Tables
    cells: dict[Cell, z3.ExprRef] = field(default_factory=dict)
    terms: dict[tuple[int, tuple[tuple[str, str], ...]], tuple[Expr, z3.ExprRef]] = field(default_factory=dict)

    def cell(self, owner: str, ref: Ref) -> z3.ExprRef:
        """The constant of one variable before the step."""
        key = (owner, ref.name)
        if key not in self.cells:
            self.cells[key] = constant(f"{owner}.{ref.name}", ref.type)
        return self.cells[key]

    def pre(self, expr: Expr, binding: Binding) -> z3.ExprRef:
        """An expression over the state before the step (cached by identity.

        Hashing a tree costs more than building it).
        """
        key = (id(expr), tuple((r, i.name) for r, i in binding.items()))
        if key not in self.terms:
            self.terms[key] = (expr, term(expr, lambda ref: self.cell(owner_name(ref, binding), ref)))
        return self.terms[key][1]


def owner_name(ref: Ref, binding: Binding) -> str:
    """The name of the entity that a ref belongs to; globals, constants and inputs own themselves."""
    return ref.role if ref.role in ("global", "const", "input") else binding[ref.role].name


def actors(event: Event) -> dict[str, Inst]:
    """The entities of an event by role; a lease or copy points at the others."""
    found: dict[str, Inst] = {}
    for role in event.roles:
        if role not in LINKS:
            kind = event.kinds.get(role, "")
            found[role] = Inst(f"{role}:{kind}" if kind else role, CLASS_OF[role], kind)
    return {r: found[r] if r in found else Inst(r, r, "", tuple((e, found[e]) for e in LINKS[r])) for r in event.roles}


@cache
def link_pairs(tables: Tables, link: str) -> frozenset[tuple[str, str]]:
    """The (source, target) kinds between which a copy or shipment can run at all."""
    return frozenset((e.kinds["src"], e.kinds["dst"]) for e in tables.events if e.scope == link)


def placements(tables: Tables, acting: Binding, scope: str, kinds: Mapping[str, str]) -> Iterator[dict[str, Inst]]:
    """Every way to choose the entities of a scope as actors or as bystanders (named ``~role:kind``)."""
    roles = property_roles(scope, kinds)
    if scope in LINKS:
        found = acting.get(scope)
        if found is not None:
            ends = {r: i for r, i in found.refs if r in roles}
            if all(ends[r].kind == k for r, k in kinds.items() if r in ends):
                yield {**ends, scope: found}
        yield from _bystander_links(tables, acting, scope, kinds)
    elif not roles:
        yield {}
    else:
        choices = [list(_ends(tables, acting, role, kinds.get(role, ""))) for role in roles]
        yield from (dict(zip(roles, c, strict=True)) for c in product(*choices) if len(set(c)) == len(c))


def _bystander_links(
    tables: Tables, acting: Binding, scope: str, kinds: Mapping[str, str]
) -> Iterator[dict[str, Inst]]:
    roles = LINKS[scope]
    choices = [list(_ends(tables, acting, role, kinds.get(role, ""))) for role in roles]
    for chosen in product(*choices):
        bound = dict(zip(roles, chosen, strict=True))
        if scope in HANDOFFS:
            pair = (bound["src"].kind, bound["dst"].kind)
            if bound["src"] is bound["dst"] or pair not in link_pairs(tables, scope):
                continue
        elif "self" in bound and "cacheable" not in tables.kinds[bound["self"].kind].capabilities:
            continue
        name = f"~{scope}({','.join(i.name for i in chosen)})"
        yield {**bound, scope: Inst(name, scope, "", tuple(bound.items()))}


def _ends(tables: Tables, acting: Binding, role: str, want: str) -> Iterator[Inst]:
    cls = CLASS_OF[role]
    for actor in acting.values():
        if actor.cls == cls and (not want or actor.kind == want):
            yield actor
    if cls != "segment":
        yield Inst(f"~{role}", cls)
        return
    for kind in (want,) if want else tables.kinds:
        yield Inst(f"~{role}:{kind}", "segment", kind)


def bindings_within(frame: Frame, prop_scope: str, kinds: Mapping[str, str]) -> Iterator[dict[str, Inst]]:
    """The ways in which a property applies to entities of the frame (refs respected)."""
    roles = property_roles(prop_scope, kinds)
    if not roles:
        yield {}
        return
    for inst in frame.instances:
        if prop_scope in LINKS:
            if inst.cls != prop_scope:
                continue
            ends = dict(inst.refs)
            bound = {r: (inst if r == prop_scope else ends.get(r)) for r in roles}
            if any(i is None for i in bound.values()):
                continue
            complete = {r: i for r, i in bound.items() if i is not None}
        elif inst.cls == CLASS_OF[roles[0]]:
            complete = {roles[0]: inst}
        else:
            continue
        if all(complete[r].kind == k for r, k in kinds.items() if r in complete):
            yield complete


def contributors(frame: Frame, owner: Inst | None, var: Var) -> Iterator[tuple[Inst, Expr, dict[str, Inst]]]:
    """The entities of the frame that count towards an owner's sum, with their term and binding."""
    for total, inst in product(var.sums, frame.instances):
        if inst.cls != total.cls or (owner is not None and inst.owner(total.via) != owner):
            continue
        role = next(r for r in ROLES[inst.cls] if CLASS_OF[r] == inst.cls) if inst.cls in ROLES else inst.cls
        bound = {**dict(inst.refs), role: inst}
        kind = bound["self"].kind if "self" in bound else ""
        found = total.terms.get(kind)
        if found is not None:
            yield inst, found, bound


def owners(frame: Frame) -> Iterator[tuple[Inst | None, Var]]:
    """Every variable of the frame (and every global) that is a sum."""
    for var in frame.tables.globals.values():
        if var.sums:
            yield None, var
    for inst in frame.instances:
        for var in frame.tables.vars_of(inst.cls, inst.kind).values():
            if var.sums:
                yield inst, var


@cache
def subset_lemmas(tables: Tables) -> tuple[tuple[str, str, str, str], ...]:
    """Pairs of counters of one owner class where the first counts no more than the second: (class, kind, small, large).

    Found by asking Z3 whether ``small's term <= large's term`` for every kind, so nothing is written by hand.
    """
    found = []
    owner_sets = [*((c, "") for c in tables.classes), *(("segment", k) for k in tables.kinds)]
    for cls, kind in owner_sets:
        sums = [v for v in tables.vars_of(cls, kind).values() if v.sums]
        for small, large in product(sums, sums):
            if small is not large and all(any(_never_more(tables, s, o) for o in large.sums) for s in small.sums):
                found.append((cls, kind, small.name, large.name))
    return tuple(found)


def _never_more(tables: Tables, small: Sum, large: Sum) -> bool:
    if (small.cls, small.via) != (large.cls, large.via):
        return False
    vocabulary, solver = Vocabulary(tables), new_solver()
    bound = {r: Inst(r, c) for r, c in CLASS_OF.items()}
    for kind, low in small.terms.items():
        high = large.terms.get(kind)
        if high is None:
            return False
        solver.push()
        solver.add(vocabulary.pre(low, bound) > vocabulary.pre(high, bound))
        for expr in (low, high):
            for ref in refs(expr):
                solver.add(*in_range(vocabulary.cell(owner_name(ref, bound), ref), ref.type))
        verdict = solver.check()
        solver.pop()
        if verdict != z3.unsat:
            return False
    return True


class Assumptions:
    """The hypotheses of frames, as terms; one object per process, since the terms are cached."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.words = Vocabulary(tables)
        self.invariants = tables.forms("invariant")
        self.known: dict[tuple[tuple[str, ...], frozenset[str] | None], z3.BoolRef] = {}

    def constants(self) -> list[z3.BoolRef]:
        """What is assumed of the constants."""
        return [self.words.pre(e, {}) for c in self.tables.constants.values() for _, e in c.assume]

    def types(self, inst: Inst) -> list[z3.BoolRef]:
        """The ranges of an entity's enums and the bounds of its rigid variables."""
        found: list[z3.BoolRef] = []
        role = next(r for r, c in CLASS_OF.items() if c == inst.cls)
        for var in self.tables.vars_of(inst.cls, inst.kind).values():
            if var.type.name == "enum":
                found += in_range(self.words.cell(inst.name, Ref(role, var.name, var.type)), var.type)
            if var.at_least is not None:
                found.append(self.words.cell(inst.name, Ref(role, var.name, var.type)) >= var.at_least)
        return found

    def facts(self, frame: Frame, only: frozenset[str] | None = None) -> list[z3.BoolRef]:
        """All invariants over the frame, types and sums; ``only`` keeps what mentions one of these entities.

        One conjunction, cached: frames of the same entities recur all the time.
        """
        key = (tuple(i.name for i in frame.instances), only)
        if key not in self.known:
            found: list[z3.BoolRef] = []
            for inst in frame.instances:
                if only is None or inst.name in only:
                    found += self.types(inst)
            for prop in self.invariants:
                for bound in bindings_within(frame, prop.scope, prop.kinds):
                    if only is None or any(i.name in only for i in bound.values()):
                        found.append(self.words.pre(prop.expr, bound))
            self.known[key] = z3.And([z3.BoolVal(True), *found, *self.sums(frame)])
        return [self.known[key]]

    def sums(self, frame: Frame) -> list[z3.BoolRef]:
        """``owner = contributors in the frame + rest``, rest not negative, rests ordered by the subset lemmas."""
        found: list[z3.BoolRef] = []
        tag = "|" + ",".join(i.name for i in frame.fresh)
        rests: dict[tuple[str, str], z3.ArithRef] = {}
        for owner, var in owners(frame):
            name = owner.name if owner else "global"
            rest = z3.Int(f"rest({name}.{var.name}){tag}")
            rests[name, var.name] = rest
            inside = [self.words.pre(t, b) for _, t, b in contributors(frame, owner, var)]
            total = self.words.cell(name, Ref("", var.name, var.type))
            found += [total == z3.Sum([*inside, rest]), rest >= 0]
        for inst in frame.instances:
            for cls, kind, small, large in subset_lemmas(self.tables):
                if (cls, kind) == (inst.cls, inst.kind):
                    found.append(rests[inst.name, small] <= rests[inst.name, large])
        return found
