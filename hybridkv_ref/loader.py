"""Builds the Tables from the table files: every row once per kind that uses it, every property once per kind it fits.

``load_tables()`` is what everybody calls.  ``build`` takes the records themselves, so that mutation and tests can
change one row in memory and see what follows.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from hybridkv_ref.compile_py import predicate_source
from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import INT, Scope, parse, refs
from hybridkv_ref.names import Declared, declare
from hybridkv_ref.needs import resume_guards
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.rows import RowBuilder, RowSource, pairs
from hybridkv_ref.spec_files import (
    ConstantSpec,
    Spec,
    VarSpec,
    read_spec,
)
from hybridkv_ref.statements import Statements
from hybridkv_ref.tables import (
    Constant,
    Event,
    Kind,
    Sum,
    Tables,
    Var,
)
from hybridkv_ref.ties import check_ties

SCHEMA_VERSION = 1


@lru_cache(maxsize=8)
def load_tables(directory: Path = SPEC_DIR) -> Tables:
    """Reads and builds the tables of a spec directory; InputError names file, place and reason."""
    return build(read_spec(directory))


def build(spec: Spec, whole: bool = True) -> Tables:
    """The Tables of these records.

    ``whole`` is False for a part of a spec made in memory, in which some names tie to nothing.
    """
    if whole:
        check_ties(spec.files)
    return _Builder(spec, declare(spec.files), lint=True).tables()


def build_events(spec: Spec) -> tuple[Event, ...]:
    """Only the events, and without the lint for unread inputs.

    For mutants, whose one change may leave an input unread.
    """
    return tuple(_Builder(spec, declare(spec.files), lint=False).events())


def table_hash(spec: Spec) -> str:
    """SHA-256 of the records in canonical JSON: comments and layout do not count, every rule does."""
    return hashlib.sha256(msgspec.json.encode(spec, order="deterministic")).hexdigest()


class _Builder:
    def __init__(self, spec: Spec, declared: Declared, lint: bool) -> None:
        self.spec, self.declared = spec, declared
        self.rows = RowBuilder(declared, resume_guards(spec.recovery, declared), lint)

    def tables(self) -> Tables:
        d = self.declared
        classes = {c: dict(self.class_vars(c)) for c in d.classes}
        stages = {k: t.members for k, t in d.stages.items()}
        sets: dict[str, dict[str, tuple[str, ...]]] = {}
        for name, options in d.sets.items():
            for kind, members in options.items():
                sets.setdefault(kind.label.removeprefix("stage:"), {})[name] = members
        events = tuple(self.events())
        names = [e.id for e in events]
        twice = next((n for n in names if names.count(n) > 1), None)
        if twice:
            raise InputError(f"rows: '{twice}' is written twice")
        stated = Statements(self.spec, d, self.rows)
        return Tables(
            {k: self.kind(k) for k in d.kind_files},
            classes,
            stages,
            sets,
            self.constants(),
            self.globals(),
            events,
            tuple(stated.properties()),
            tuple(stated.responses()),
            tuple(stated.survivors()),
            table_hash(self.spec),
        )

    # -- declarations ---------------------------------------------------------------------------------------------
    def kind(self, name: str) -> Kind:
        label = self.declared.kind_files[name]
        spec = self.spec.files[label]
        members = self.declared.stages[name].members
        edges = set()
        for index, text in enumerate(spec.edges):
            ends = [p.strip() for p in text.split("->")]
            if len(ends) != 2 or any(e not in members for e in ends):
                raise InputError(f"{label}: edges[{index}]: '{text}' is not 'STAGE -> STAGE'")
            edges.add((ends[0], ends[1]))
        stage = Var("stage", self.declared.stages[name], members[0])
        own = {
            n: self.var(n, v, name, f"{label}: segment.{n}", "segment", name)
            for n, v in self.declared.segment[name].items()
        }
        sets = {
            n: o[self.declared.stages[name]] for n, o in self.declared.sets.items() if self.declared.stages[name] in o
        }
        return Kind(
            name, label, spec.title, members, sets, frozenset(spec.capabilities), frozenset(edges),
            {"stage": stage, **own}, tuple(spec.extend),
        )  # fmt: skip

    def class_vars(self, cls: str) -> Iterator[tuple[str, Var]]:
        if cls in self.declared.stages:
            kind = self.declared.stages[cls]
            yield "stage", Var("stage", kind, kind.members[0])
        for name, spec in self.declared.classes[cls].items():
            for kind_name in self.declared.kinds_with("cacheable") if spec.per_kind else ("",):
                stored = f"{name}.{kind_name}" if kind_name else name
                yield stored, self.var(stored, spec, cls, f"{cls}.{name}", cls, kind_name)

    def var(self, name: str, spec: VarSpec, stage: str, place: str, cls: str, kind: str) -> Var:
        kind_type = self.declared.var_type(spec, stage, place)
        init: int | str = kind_type.members[0] if kind_type.name == "enum" else 0
        if spec.init is not None:
            init = spec.init if isinstance(spec.init, str) else int(spec.init)
            if (kind_type.name == "enum") != isinstance(init, str) or (
                isinstance(init, str) and init not in kind_type.members
            ):
                raise InputError(f"{place}.init: {spec.init!r} is not {kind_type}")
        if spec.at_least is not None and not (spec.rigid and kind_type == INT):
            raise InputError(f"{place}.at_least: only a rigid int has a lower bound")
        if spec.at_least is not None and spec.init is None:
            init = spec.at_least
        return Var(
            name, kind_type, init, spec.rigid, spec.at_least, self.sums(spec, place, kind), spec.durable, spec.doc
        )

    def sums(self, spec: VarSpec, place: str, kind: str) -> tuple[Sum, ...]:
        """What a variable adds up; a per-kind counter, a kind's pool and a segment's own count see that kind only."""
        found = []
        for index, item in enumerate(spec.sum if isinstance(spec.sum, list) else [spec.sum] if spec.sum else []):
            where = f"{place}.sum[{index}].term"
            if item.of in ("segment", "lease"):
                fitting = self.declared.kinds_with(item.has or ("cacheable" if item.of == "lease" else ""))
                terms = {
                    k: parse(item.term, self.declared.scope(item.of, {"self": k}), where, INT)
                    for k in ((kind,) if kind else fitting)
                    if k in fitting
                }
            else:
                terms = {"": parse(item.term, self.declared.scope(item.of, {}), where, INT)}
            found.append(Sum(item.of, item.via, terms))
        return tuple(found)

    def constants(self) -> dict[str, Constant]:
        found: dict[str, Constant] = {}
        for label, spec in self.spec.files.items():
            for name, constant in spec.constants.items():
                found[name] = self.constant(name, constant, label, "")
            for name, constant in spec.kind_constants.items():
                for kind in self.declared.kind_files:
                    found[f"{kind}.{name}"] = self.constant(f"{kind}.{name}", constant, label, kind)
        _assumptions_hold(found)
        return found

    def constant(self, name: str, spec: ConstantSpec, label: str, kind: str) -> Constant:
        scope = Scope({n: r for n, r in self.declared.shared(kind).items() if r.role == "const"})
        assume = tuple(
            (text, parse(text, scope, f"{label}: constants.{name}.assume[{i}]")) for i, text in enumerate(spec.assume)
        )
        return Constant(name, spec.small, assume, spec.doc, label)

    def globals(self) -> dict[str, Var]:
        found = {n: self.var(n, s, "", f"pool.{n}", "global", "") for n, s in self.declared.pool.items()}
        for kind in self.declared.kind_files:
            for name, spec in self.declared.kind_pool.items():
                found[f"{kind}.{name}"] = self.var(f"{kind}.{name}", spec, "", f"kind_pool.{name}", "global", kind)
        return found

    # -- rows -----------------------------------------------------------------------------------------------------
    def sources(self) -> tuple[dict[str, RowSource], dict[str, dict[str, RowSource]]]:
        """Shared rows by name, and per kind the rows it uses or owns."""
        shared: dict[str, RowSource] = {}
        for label, spec in self.spec.files.items():
            for name, row in spec.rows.items() if not spec.kind else ():
                if name in shared:
                    raise InputError(f"{label}: rows.{name}: written twice")
                shared[name] = RowSource(label, name, row)
            for name, row in spec.rows.items() if spec.kind else ():
                if row.scope == "system":
                    shared[name] = RowSource(label, name, row)
        per_kind: dict[str, dict[str, RowSource]] = {}
        for label, spec in self.spec.files.items():
            if not spec.kind:
                continue
            mine: dict[str, RowSource] = {}
            for name in spec.uses:
                if name not in shared or shared[name].spec.scope not in ("segment", "lease"):
                    raise InputError(f"{label}: uses: '{name}' is no shared row of a segment or lease")
                base = shared[name]
                extra = ((label, spec.kind, spec.extend[name]),) if name in spec.extend else ()
                mine[name] = RowSource(base.file, name, base.spec, extra)
            for name, extension in spec.extend.items():
                if name in shared and shared[name].spec.scope == "request":
                    base = shared[name]
                    shared[name] = dataclasses.replace(base, extends=(*base.extends, (label, spec.kind, extension)))
                elif name not in mine:
                    raise InputError(f"{label}: extend.{name}: not among the rows that this kind uses")
            for name, row in spec.rows.items():
                if row.scope == "system":
                    continue
                if name in mine or name in shared:
                    raise InputError(f"{label}: rows.{name}: a shared row has this name")
                mine[name] = RowSource(label, name, row)
            per_kind[spec.kind] = mine
        return shared, per_kind

    def events(self) -> Iterator[Event]:
        shared, per_kind = self.sources()
        for kind, mine in per_kind.items():
            for row in mine.values():
                if not row.spec.part:
                    yield self.rows.event(row, {"self": kind})
        for row in shared.values():
            if row.spec.scope not in ("segment", "lease"):
                yield self.rows.event(row, {})
        for label, spec in self.spec.files.items():
            for name, handoff in spec.handoffs.items():
                for pair in pairs(self.declared, handoff):
                    ends: dict[str, RowSource] = {}
                    for role, side in (("src", handoff.src), ("dst", handoff.dst)):
                        if role not in handoff.order:
                            continue
                        row_or_none = per_kind[pair[role]].get(side.row)
                        if row_or_none is None or not row_or_none.spec.part:
                            where = self.declared.kind_files[pair[role]]
                            raise InputError(f"{where}: capability '{side.has}' needs the part row '{side.row}'")
                        ends[role] = row_or_none
                    yield self.rows.handoff(label, name, handoff, ends, pair)


def _assumptions_hold(constants: Mapping[str, Constant]) -> None:
    """The small values meet every assumption.

    So all of them can hold at once, and no proof rests on a contradiction.
    """
    small = {name: constant.small for name, constant in constants.items()}
    for name, constant in constants.items():
        for index, (text, expr) in enumerate(constant.assume):
            space: dict[str, Callable[[None], bool]] = {}
            exec(predicate_source(expr, "holds", (), small), space)
            if not space["holds"](None):
                values = ", ".join(f"{r}={small[r]}" for r in sorted({ref.name for ref in refs(expr)}))
                place = f"{constant.file}: constants.{name}.assume[{index}]"
                raise InputError(f"{place}: '{text}' does not hold for the small values ({values})")
