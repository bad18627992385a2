"""From a row's text to an Event: columns, guards and effects of each part, parts fused into one atomic step.

A handoff is two part rows (one per side) and the copy between them, fired in order; the second part sees the first
one's effects.  Fusing substitutes those effects into later guards, so that every Event reads only the state before it.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import INT, Expr, Member, Op, Ref, Scope, Type, parse, refs, render, rewrite
from hybridkv_ref.names import SIMPLE, Declared
from hybridkv_ref.spec_files import ExtendSpec, HandoffSpec, RowSpec, SideSpec
from hybridkv_ref.tables import CLASS_OF, HANDOFFS, Effect, Event, Guard

_EFFECT = re.compile(r"\s*([A-Za-z_][\w.]*)\s*(\+=|-=|=)(?!=)\s*(.+)", re.DOTALL)
STAGE_ROLE = {
    "segment": "self",
    "lease": "lease",
    "rank": "rank",
    "request": "req",
    "graph": "graph",
    "transfer": "xfer",
}
Resume = Mapping[str, tuple[Guard, ...]]


@dataclass
class Part:
    """What one row contributes: guards, effects and stage edges (role -> (from stages, to))."""

    guards: list[Guard] = field(default_factory=list)
    effects: list[Effect] = field(default_factory=list)
    edges: dict[str, tuple[tuple[str, ...], str]] = field(default_factory=dict)
    can: list[Guard] = field(default_factory=list)


@dataclass(frozen=True)
class RowSource:
    """A row as written: where, under which name, with what kinds add to it (file, kind, extension)."""

    file: str
    name: str
    spec: RowSpec
    extends: tuple[tuple[str, str, ExtendSpec], ...] = ()

    @property
    def inputs(self) -> dict[str, str]:
        """Input names to type names, those of extensions included."""
        found = dict(self.spec.inputs)
        for _, _, extension in self.extends:
            found |= extension.inputs
        return found


class RowBuilder:
    """Builds Parts and Events against the declarations of one spec."""

    def __init__(self, declared: Declared, resume: Resume, lint: bool) -> None:
        self.declared, self.resume, self.lint = declared, resume, lint

    def inputs(self, names: Mapping[str, str], place: str, kind: str) -> dict[str, Ref]:
        """Input declarations as Refs; ``stage`` is the stage enum of the kind."""
        found = {}
        for name, text in names.items():
            if text != "stage" and text not in SIMPLE:
                raise InputError(f"{place}.inputs.{name}: unknown type '{text}'")
            found[name] = Ref("input", name, self.declared.stages[kind] if text == "stage" else SIMPLE[text])
        return found

    def columns(self, part: Part, scope: Scope, role: str, source: str, target: str, place: str, prefix: str) -> None:
        """Adds the guard and effect that a pair of stage columns stands for."""
        dotted = "stage" if role == "self" else f"{role}.stage"
        ref = scope.names.get(dotted)
        if ref is None:
            if source or target:
                raise InputError(f"{place}.{prefix}from: this scope has no stage")
            return
        allowed = self.stage_names(scope, ref.type, source, f"{place}.{prefix}from")
        if not allowed:
            raise InputError(f"{place}.{prefix}from: '{source}' is an empty set")
        if source:
            guard = Member(ref, allowed) if len(allowed) > 1 else parse(f"{dotted} == {allowed[0]}", scope, place)
            part.guards.append(Guard(render(guard), guard, f"{place}.{prefix}from"))
        if target:
            stored = scope.names.get(target if role == "self" else f"{role}.{target}")
            if stored is not None and stored.type == ref.type and stored.name != "stage":
                value: Expr = stored
                part.edges[role] = (allowed, f"*{stored.name}")
            else:
                single = self.stage_names(scope, ref.type, target, f"{place}.{prefix}to")
                if len(single) != 1:
                    raise InputError(f"{place}.{prefix}to: '{target}' is {len(single)} stages, a row needs one")
                value = parse(single[0], scope, f"{place}.{prefix}to", ref.type)
                part.edges[role] = (allowed, single[0])
            part.effects.append(Effect(ref, value, f"{dotted} = {render(value)}", f"{place}.{prefix}to"))

    @staticmethod
    def stage_names(scope: Scope, kind: Type, text: str, place: str) -> tuple[str, ...]:
        """The stages that a column names: one stage, or a set; an empty column means all."""
        if not text:
            return kind.members
        if text in kind.members:
            return (text,)
        if text in scope.sets and kind in scope.sets[text]:
            return scope.sets[text][kind]
        raise InputError(f"{place}: '{text}' is neither a stage nor a set of {kind}")

    def conjuncts(self, part: Part, texts: Iterable[str], scope: Scope, place: str) -> None:
        """Adds guards written in ``when``."""
        for index, text in enumerate(texts):
            where = f"{place}[{index}]"
            part.guards.append(Guard(text, parse(text, scope, where), where))

    def limits(self, part: Part, texts: Iterable[str], scope: Scope, place: str) -> None:
        """Adds the limit cases written in ``can``."""
        for index, text in enumerate(texts):
            where = f"{place}[{index}]"
            part.can.append(Guard(text, parse(text, replace(scope, new=True), where), where))

    def assignments(self, part: Part, texts: Iterable[str], scope: Scope, rigid: set[Ref], place: str) -> None:
        """Adds effects written in ``then``; refuses writes outside the row's footprint."""
        for index, text in enumerate(texts):
            where = f"{place}[{index}]"
            match = _EFFECT.fullmatch(text) if isinstance(text, str) else None
            if match is None:
                raise InputError(f"{where}: column 1, at '{text}': not an assignment")
            name, how, right = match.groups()
            target = scope.names.get(name)
            if target is None:
                raise InputError(f"{where}: column 1, at '{name}': unknown name, or outside the row's footprint")
            if target.role in ("const", "input") or target in rigid:
                raise InputError(f"{where}: column 1, at '{name}': a constant, an input or rigid: never written")
            if any(e.target == target for e in part.effects):
                raise InputError(f"{where}: column 1, at '{name}': written twice in one row")
            value = parse(right.strip(), scope, where, target.type)
            if how != "=":
                value = Op(how[0], (target, value), INT)
            part.effects.append(Effect(target, value, text, where))

    def rigid(self, kinds: Mapping[str, str]) -> set[Ref]:
        """Every rigid variable in reach."""
        found = set()
        for role, cls in CLASS_OF.items():
            if cls == "segment":
                continue
            own = kinds.get("self", "")
            for spec, stored in self.declared.class_vars(cls, own).values():
                if spec.rigid:
                    found.add(Ref(role, stored, self.declared.var_type(spec, cls, f"{cls}.{stored}")))
        for role, kind in kinds.items():
            for name, spec in self.declared.segment[kind].items():
                if spec.rigid:
                    found.add(Ref(role, name, self.declared.var_type(spec, kind, f"segment.{name}")))
        return found

    def part(self, row: RowSource, kinds: Mapping[str, str]) -> Part:
        """One row over these kinds, its extension last."""
        place = f"{row.file}: rows.{row.name}"
        kind = kinds.get("self", "")
        scope = self.declared.scope(row.spec.scope, kinds)
        hidden = [n for n in row.inputs if n in scope.names]
        if hidden:
            raise InputError(f"{place}.inputs.{hidden[0]}: hides a variable of that name")
        scope = scope.with_names(self.inputs(row.inputs, place, kind))
        part, rigid = Part(), self.rigid(kinds)
        if row.spec.scope in STAGE_ROLE:
            role = STAGE_ROLE[row.spec.scope]
            self.columns(part, scope, role, row.spec.from_, row.spec.to, place, "")
            if role == "lease":
                self.columns(part, scope, "self", row.spec.segment_from, row.spec.segment_to, place, "segment_")
        self.conjuncts(part, row.spec.when, scope, f"{place}.when")
        if row.spec.resume:
            part.guards += [guard for guards in self.resume.values() for guard in guards]
        self.assignments(part, row.spec.then, scope, rigid, f"{place}.then")
        self.limits(part, row.spec.can, scope, f"{place}.can")
        for label, owner, extension in row.extends:
            where = f"{label}: extend.{row.name}"
            wider = self.declared.scope(row.spec.scope, {**kinds, "self": owner})
            wider = wider.with_names(self.inputs(row.inputs, place, kind))
            self.conjuncts(part, extension.when, wider, f"{where}.when")
            self.assignments(part, extension.then, wider, rigid, f"{where}.then")
            self.limits(part, extension.can, wider, f"{where}.can")
        read = {r.name for g in part.guards for r in refs(g.expr) if r.role == "input"}
        read |= {r.name for e in part.effects for r in refs(e.expr) if r.role == "input"}
        unused = [n for n in row.inputs if n not in read]
        if unused and self.lint:
            raise InputError(f"{place}.inputs.{unused[0]}: nothing reads this input")
        return part

    def event(self, row: RowSource, kinds: Mapping[str, str]) -> Event:
        """A plain row as an Event."""
        part, kind = self.part(row, kinds), kinds.get("self", "")
        owner = kind or row.spec.scope
        types = {n: r.type for n, r in self.inputs(row.inputs, f"{row.file}: rows.{row.name}", kind).items()}
        rules = (*row.spec.rules, *(r for _, _, extension in row.extends for r in extension.rules))
        kernel = next((e.kernel for _, _, e in reversed(row.extends) if e.kernel), row.spec.kernel)
        return Event(
            f"{owner}.{row.name}", row.name, row.file, row.spec.scope, dict(kinds),
            tuple(part.guards), tuple(part.effects), part.edges, tuple(part.can), types, row.spec.actor, row.spec.fair,
            row.spec.intake, tuple(row.spec.tags), tuple(dict.fromkeys(rules)), kernel, row.spec.doc,
        )  # fmt: skip

    def handoff(
        self, file: str, name: str, spec: HandoffSpec, rows: Mapping[str, RowSource], kinds: Mapping[str, str]
    ) -> Event:
        """A handoff over one pair of kinds as an Event."""
        place = f"{file}: handoffs.{name}"
        linked = spec.link if spec.from_ or spec.to else "pair"
        pair = self.declared.scope(linked, kinds)
        free = self.inputs(spec.inputs, place, "")
        own = Part()
        scope = pair.with_names(free)
        if linked in HANDOFFS:
            self.columns(own, scope, linked, spec.from_, spec.to, place, "")
        self.conjuncts(own, spec.when, scope, f"{place}.when")
        self.assignments(own, spec.then, scope, self.rigid(kinds), f"{place}.then")
        self.limits(own, spec.can, scope, f"{place}.can")
        outside = [e for e in own.effects if e.target.role in ("src", "dst", "global")]
        if outside:
            raise InputError(f"{outside[0].place}: at '{outside[0].text}': a handoff itself writes only its link")
        types = {n: r.type for n, r in free.items()}
        parts, passed = [own], dict[str, Expr]()
        for role in spec.order:
            side = spec.src if role == "src" else spec.dst
            parts.append(self.side(rows[role], side, role, kinds, pair.with_names(free), types, passed, place))
        guards, effects, edges = fuse(parts)
        can = tuple(c for part in parts for c in part.can)

        def hand_over(expr: Expr) -> Expr | None:
            return passed.get(expr.name) if isinstance(expr, Ref) and expr.role == "input" else None

        can = tuple(replace(c, expr=rewrite(c.expr, hand_over)) for c in can)
        guards = tuple(replace(g, expr=rewrite(g.expr, hand_over)) for g in guards)
        effects = tuple(replace(e, expr=rewrite(e.expr, hand_over)) for e in effects)
        rules = [r for role in spec.order for r in rows[role].spec.rules]
        return Event(
            f"{name}[{kinds['src']}>{kinds['dst']}]", name, file, linked, dict(kinds), guards, effects, edges, can,
            types, spec.actor, spec.fair, spec.intake, tuple(spec.tags), tuple(dict.fromkeys([*spec.rules, *rules])),
            spec.kernel, spec.doc,
        )  # fmt: skip

    def side(
        self,
        row: RowSource,
        side: SideSpec,
        role: str,
        kinds: Mapping[str, str],
        scope: Scope,
        types: dict[str, Type],
        passed: dict[str, Expr],
        place: str,
    ) -> Part:
        """A part row turned to its side: ``self`` becomes src or dst.

        What the handoff passes is collected in ``passed`` under the side's own input names; it is put in after fusing,
        because it is read before the step.
        """
        part = self.part(row, {"self": kinds[role]})
        declared = self.inputs(row.inputs, place, kinds[role])
        for name, ref in declared.items():
            if name in side.pass_:
                passed[f"{role}.{name}"] = parse(side.pass_[name], scope, f"{place}.{role}.pass.{name}", ref.type)
            else:
                types.setdefault(name, ref.type)
        unknown = [n for n in side.pass_ if n not in declared]
        if unknown:
            raise InputError(f"{place}.{role}.pass.{unknown[0]}: row '{row.name}' has no such input")

        def turn(expr: Expr) -> Expr | None:
            if isinstance(expr, Ref) and expr.role == "input":
                return replace(expr, name=f"{role}.{expr.name}") if expr.name in side.pass_ else expr
            if isinstance(expr, Ref) and expr.role == "self":
                return replace(expr, role=role)
            return None

        guards = [replace(g, expr=rewrite(g.expr, turn)) for g in part.guards]
        effects = []
        for effect in part.effects:
            target = rewrite(effect.target, turn)
            if isinstance(target, Ref):
                effects.append(replace(effect, target=target, expr=rewrite(effect.expr, turn)))
        can = [replace(c, expr=rewrite(c.expr, turn)) for c in part.can]
        edges = {role: part.edges["self"]} if "self" in part.edges else {}
        return Part(guards, effects, edges, can)


def fuse(parts: Iterable[Part]) -> tuple[tuple[Guard, ...], tuple[Effect, ...], dict[str, tuple[tuple[str, ...], str]]]:
    """Parts fired in order as one step over the state before it."""
    guards: list[Guard] = []
    written: dict[Ref, Effect] = {}
    edges: dict[str, tuple[tuple[str, ...], str]] = {}

    def before(expr: Expr) -> Expr | None:
        return written[expr].expr if isinstance(expr, Ref) and expr in written else None

    for part in parts:
        guards += [replace(g, expr=rewrite(g.expr, before)) for g in part.guards]
        fresh = [replace(e, expr=rewrite(e.expr, before)) for e in part.effects]
        written |= {e.target: e for e in fresh}
        edges |= part.edges
    return tuple(guards), tuple(written.values()), edges


def pairs(declared: Declared, spec: HandoffSpec) -> Iterator[dict[str, str]]:
    """The pairs of kinds that a handoff binds, by declared capability."""
    for src in declared.kinds_with(spec.src.has):
        for dst in declared.kinds_with(spec.dst.has):
            if not spec.same_kind or src == dst:
                yield {"src": src, "dst": dst}
