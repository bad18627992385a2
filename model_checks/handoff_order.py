"""What a handoff means, said a second time: its rows fired one after the other, in random states.

The loader fuses the parts of a handoff into one event over the state before it, and both the proofs and the machine
take that event on trust.  Here the parts are built on their own and run in order on a plain dictionary: each sees what
the earlier ones did, what is passed is read before the first, and one false guard undoes everything.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from hybridkv_ref.compile_py import python
from hybridkv_ref.expr import Expr, Ref, parse
from hybridkv_ref.loader import build_events
from hybridkv_ref.model_checks.random_states import cells, sample
from hybridkv_ref.model_checks.vector import decode
from hybridkv_ref.names import Declared, declare
from hybridkv_ref.needs import resume_guards
from hybridkv_ref.rows import Part, RowBuilder, RowSource
from hybridkv_ref.spec_files import HandoffSpec, SideSpec, Spec
from hybridkv_ref.tables import HANDOFFS, Event, Tables

SAMPLES = 60  # per pair of kinds
Value = int | str
State = dict[tuple[str, str], Value]


@dataclass(frozen=True)
class Difference:
    """A state in which a handoff and its rows in order do not do the same; what differs, and the values before."""

    event: str
    what: str
    before: Mapping[tuple[str, str], Value]


def value(expr: Expr, state: State, turned: str = "") -> Any:
    """An expression in a state; ``turned`` is the role that ``self`` plays."""

    def name(ref: Ref) -> str:
        return f"S[{(turned if ref.role == 'self' else ref.role, ref.name)!r}]"

    return eval(python(expr, name), {"S": state})


def first_difference(spec: Spec, tables: Tables, name: str) -> Difference | None:
    """The first difference in any pair of kinds of this handoff; InputError where the spec is no tables."""
    declared = declare(spec.files)
    file, handoff = next((f, s.handoffs[name]) for f, s in spec.files.items() if name in s.handoffs)
    builder = RowBuilder(declared, resume_guards(spec.recovery, declared), lint=False)
    rng = np.random.default_rng(1)
    for event in (e for e in build_events(spec) if e.row == name and e.file == file):
        parts = list(_parts(spec, declared, builder, handoff, event))
        fixed = {n: c.small for n, c in tables.constants.items()}
        batch = sample(event, cells(tables, event), fixed, SAMPLES, rng)
        for row in batch.values.tolist():
            state: State = {(r.role, r.name): decode(v, r.type) for r, v in zip(batch.cells, row, strict=True)}
            found = _compare(event, parts, state)
            if found:
                return Difference(event.id, found, state)
    return None


@dataclass(frozen=True)
class _Turned:
    """A part with the role that its ``self`` plays, and what its inputs are given (None: an input of the handoff)."""

    part: Part
    role: str
    given: Mapping[str, Expr | None]


def _parts(
    spec: Spec, declared: Declared, builder: RowBuilder, handoff: HandoffSpec, event: Event
) -> Iterator[_Turned]:
    """The handoff's own columns, then each side's row as it stands in its file."""
    kinds, place = dict(event.kinds), event.id
    scope = declared.scope(event.scope, kinds).with_names(builder.inputs(handoff.inputs, place, ""))
    own = Part()
    if event.scope in HANDOFFS:
        builder.columns(own, scope, event.scope, handoff.from_, handoff.to, place, "")
    builder.conjuncts(own, handoff.when, scope, place)
    builder.assignments(own, handoff.then, scope, set(), place)
    yield _Turned(own, event.scope, {})
    for role in handoff.order:
        side: SideSpec = handoff.src if role == "src" else handoff.dst
        source = _source(spec, kinds[role], side.row)
        types = builder.inputs(source.inputs, place, kinds[role])
        given = {n: parse(side.pass_[n], scope, place, r.type) if n in side.pass_ else None for n, r in types.items()}
        yield _Turned(builder.part(source, {"self": kinds[role]}), role, given)


def _source(spec: Spec, kind: str, name: str) -> RowSource:
    """A part row: the kind's own, or the shared one with what the kind adds."""
    label, own = next((f, s) for f, s in spec.files.items() if s.kind == kind)
    if name in own.rows:
        return RowSource(label, name, own.rows[name])
    shared = next((f, s.rows[name]) for f, s in spec.files.items() if not s.kind and name in s.rows)
    return RowSource(shared[0], name, shared[1], ((label, kind, own.extend[name]),) if name in own.extend else ())


def _compare(event: Event, parts: list[_Turned], before: State) -> str:
    """What differs in this state, or ''."""
    passed = [{n: value(e, before) for n, e in p.given.items() if e is not None} for p in parts]
    now: State | None = dict(before)
    for turned, values in zip(parts, passed, strict=True):
        now = None if now is None else _fired(turned, values, now)
    fires = all(value(g.expr, before) for g in event.guards)
    if fires != (now is not None):
        return f"fires: {fires} at once, {now is not None} in order"
    if now is None:
        return ""
    after = before | {(e.target.role, e.target.name): value(e.expr, before) for e in event.effects}
    changed = next((c for c in before if after[c] != now[c]), None)
    return f"{'.'.join(changed)}: {after[changed]} at once, {now[changed]} in order" if changed else ""


def _fired(turned: _Turned, passed: Mapping[str, Value], now: State) -> State | None:
    """One part on the state that the earlier ones left; None if it refuses."""
    given: State = {**now, **{("input", n): v for n, v in passed.items()}}
    if not all(value(g.expr, given, turned.role) for g in turned.part.guards):
        return None
    new = {
        (turned.role if e.target.role == "self" else e.target.role, e.target.name): value(e.expr, given, turned.role)
        for e in turned.part.effects
    }
    return now | new
