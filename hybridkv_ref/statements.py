"""What the tables claim: invariants, step properties, witnesses, liveness claims, and what survives a crash.

A statement is written once and made for every kind (or pair of kinds) that its scope and capabilities fit.
"""

import re
from collections.abc import Iterator, Mapping

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, INT, TRUE, Expr, Lit, Op, Ref, Type, parse, refs, render
from hybridkv_ref.names import Declared
from hybridkv_ref.needs import held_everywhere
from hybridkv_ref.rows import RowBuilder
from hybridkv_ref.spec_files import InvariantSpec, ResponseSpec, SometimesSpec, Spec, StepSpec
from hybridkv_ref.tables import HANDOFFS, Guard, Helpful, Property, Response, Survivor

ZERO = Lit(0, INT)
Stated = InvariantSpec | StepSpec | SometimesSpec | ResponseSpec


class Statements:
    """Builds the statements of one spec against its declarations."""

    def __init__(self, spec: Spec, declared: Declared, rows: RowBuilder) -> None:
        self.spec, self.declared, self.rows = spec, declared, rows

    def spread(self, label: str, item: Stated) -> Iterator[dict[str, str]]:
        """The kinds (role -> kind) that a property of this file, scope and capability is stated for."""
        own, scope, has = self.spec.files[label].kind, item.scope, item.has
        if scope in (*HANDOFFS, "pair"):
            for src in self.declared.kinds_with(item.src_has) if item.src_has else ("",):
                for dst in self.declared.kinds_with(item.dst_has) if item.dst_has else ("",):
                    if not item.same_kind or src == dst:
                        yield {r: k for r, k in (("src", src), ("dst", dst)) if k}
        elif scope in ("segment", "lease") or has or (own and scope == "request"):
            needed = has or ("cacheable" if scope == "lease" else "")
            for kind in (own,) if own else self.declared.kinds_with(needed):
                yield {"self": kind}
        else:
            yield {}

    def properties(self) -> Iterator[Property]:
        """Every invariant, step property and witness, per fitting kind."""
        for label, spec in self.spec.files.items():
            groups: tuple[tuple[str, Mapping[str, InvariantSpec | StepSpec | SometimesSpec]], ...] = (
                ("invariant", spec.invariant), ("step", spec.step), ("sometimes", spec.sometimes),
            )  # fmt: skip
            for form, items in groups:
                for name, item in items.items():
                    for kinds in self.spread(label, item):
                        yield self.property(f"{label}: {form}.{name}", form, name, item, kinds)

    def property(
        self, where: str, form: str, name: str, item: InvariantSpec | StepSpec | SometimesSpec, kinds: dict[str, str]
    ) -> Property:
        """One statement about a state or a step."""
        names = self.declared.scope(item.scope, kinds, new=form == "step")
        if isinstance(item, StepSpec) and item.inputs:
            names = names.with_names(self.rows.inputs(item.inputs, where, ""))
        expr: Expr = parse(item.holds, names, f"{where}.holds")
        text = item.holds
        if isinstance(item, InvariantSpec) and item.resume:
            if kinds.get("self") not in self.rows.resume:
                raise InputError(f"{where}.resume: stated for what has no recovery entry; has = 'cacheable' is missing")
            held = held_everywhere(self.spec.recovery, self.declared, kinds["self"])
            need = Op("and", (*(g.expr for g in self.rows.resume[kinds["self"]]), held), BOOL)
            expr, text = Op("implies", (expr, need), BOOL), f"implies({text}, {render(need)})"
        role = item.role if isinstance(item, InvariantSpec) else "goal"
        on = item.on if isinstance(item, StepSpec) else ""
        choose: Expr = TRUE
        if isinstance(item, InvariantSpec) and item.choose:
            choose = parse(item.choose, self.declared.scope(item.scope, kinds), f"{where}.choose")
            probes = {r for r in refs(choose) if r.role == "const"}
            if not probes or probes & refs(expr) or self.counted_by(probes) & {r.name for r in refs(expr)}:
                raise InputError(f"{where}.choose: fixes a constant on which the property itself must not depend")
        return Property(
            _id(name, kinds), form, item.scope, kinds, expr, text, where, role, on, choose, tuple(item.rules), item.doc
        )

    def counted_by(self, probes: set[Ref]) -> set[str]:
        """The pool variables whose sums mention one of these constants: they too belong to one value of it."""
        names = {probe.name for probe in probes}
        found = set()
        for name, var in self.declared.pool.items():
            for total in var.sum if isinstance(var.sum, list) else [var.sum] if var.sum else []:
                if names & set(re.findall(r"\w+", total.term)):
                    found.add(name)
        return found

    def responses(self) -> Iterator[Response]:
        """Every liveness claim, per fitting kind."""
        for label, spec in self.spec.files.items():
            for name, claim in spec.response.items():
                for kinds in self.spread(label, claim):
                    yield self.response(label, name, claim, kinds)

    def survivors(self) -> Iterator[Survivor]:
        """What a crash leaves, in the order of the files."""
        for label, spec in self.spec.files.items():
            if spec.crash and not spec.kind:
                raise InputError(f"{label}: crash: only a kind says what survives")
            for name, entry in spec.crash.items():
                where = f"{label}: crash.{name}"
                scope, stage = self.declared.scope("segment", {"self": spec.kind}), self.declared.stages[spec.kind]
                stages = RowBuilder.stage_names(scope, stage, entry.from_, f"{where}.from")
                target = RowBuilder.stage_names(scope, stage, entry.to, f"{where}.to")
                unknown = [v for v in entry.keep if v not in self.declared.segment[spec.kind]]
                if unknown or len(target) != 1:
                    raise InputError(
                        f"{where}: " + (f"keep: no variable '{unknown[0]}'" if unknown else "to: not one stage")
                    )
                guards = tuple(
                    Guard(text, parse(text, scope, f"{where}.when[{i}]"), f"{where}.when[{i}]")
                    for i, text in enumerate(entry.when)
                )
                yield Survivor(name, spec.kind, stages, guards, target[0], tuple(entry.keep), tuple(entry.rules))

    def response(self, label: str, name: str, claim: ResponseSpec, kinds: Mapping[str, str]) -> Response:
        """One liveness claim, with what the kind adds to it."""
        where = f"{label}: response.{name}"
        scope = self.declared.scope(claim.scope, kinds)

        def read(text: str, key: str, want: Type = BOOL) -> Expr:
            return parse(text, scope, f"{where}.{key}", want)

        extra = [
            h
            for s in self.spec.files.values()
            if s.kind and s.kind == kinds.get("self")
            for h in s.extend_claim.get(name, [])
        ]
        helps = (*claim.helpful, *extra)
        known = {r for s in self.spec.files.values() for r in (*s.rows, *s.handoffs)}
        for row in (*claim.without, *claim.also_fair, *(h.row for h in helps if h.row)):
            if row != "intake" and row not in known:
                raise InputError(f"{where}: no row '{row}'")
        helpful = tuple(
            Helpful(
                h.row,
                h.by,
                read(h.when, f"helpful[{i}].when"),
                read(h.count, f"helpful[{i}].count", INT) if h.by else ZERO,
                read(h.who, f"helpful[{i}].who") if h.who else TRUE,
                read(h.probe, f"helpful[{i}].probe") if h.probe else TRUE,
                h.when,
            )
            for i, h in enumerate(helps)
        )
        return Response(
            _id(name, kinds), claim.form, claim.scope, kinds, read(claim.from_, "from"), read(claim.to, "to"),
            read(claim.given, "given") if claim.given else TRUE,
            tuple(read(r, f"rank[{i}]", INT) for i, r in enumerate(claim.rank)),
            helpful, frozenset(claim.without), frozenset(claim.also_fair), tuple(claim.rules),
            f"{claim.from_}  leads to  {claim.to}",
        )  # fmt: skip


def _id(name: str, kinds: Mapping[str, str]) -> str:
    return f"{name}<{'>'.join(kinds.values())}>" if kinds else name
