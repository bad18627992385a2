"""What several test files share: specs with one planted fault, worlds in any state, expressions evaluated plainly."""

import dataclasses
import operator
import random
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from hybridkv_ref.compile_py import attribute
from hybridkv_ref.expr import BOOL, Expr, Lit, Member, Ref, Type, refs
from hybridkv_ref.loader import build
from hybridkv_ref.machine import Entity, Refused, Value, World
from hybridkv_ref.model_checks.frames import Assumptions
from hybridkv_ref.model_checks.induction import Task
from hybridkv_ref.model_checks.liveness import Claim
from hybridkv_ref.model_checks.mutation import same_row
from hybridkv_ref.model_checks.obligations import Counterexample, Obligation, TaskResult
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.spec_files import Spec, read_spec
from hybridkv_ref.tables import CLASS_OF, Event, Tables

TABLES = ("common.toml", "recovery.toml", "rules.toml")
State = dict[tuple[str, str], Value]


# -- specs with a fault ------------------------------------------------------------------------------------------------
def copy_spec(folder: Path) -> Path:
    """A copy of every file that holds tables, to be changed by a test."""
    target = folder / "spec"
    target.mkdir(parents=True)
    for name in TABLES:
        shutil.copy(SPEC_DIR / name, target / name)
    for name in ("protocols", "kinds"):
        shutil.copytree(SPEC_DIR / name, target / name)
    return target


def copy_oracle_spec(folder: Path) -> Path:
    """A copy of every file that the oracle reads, its own tables and the map of events included."""
    target = copy_spec(folder)
    for name in ("events.toml", "rules.toml"):
        shutil.copy(SPEC_DIR / name, target / name)
    for name in ("oracle", "models"):
        shutil.copytree(SPEC_DIR / name, target / name)
    return target


def section(text: str, header: str) -> tuple[int, int]:
    """Where the section ``[header]`` of a TOML text begins and ends."""
    begin = re.search(rf"^\[{re.escape(header)}\]\n", text, re.MULTILINE)
    if begin is None:
        raise LookupError(f"no section [{header}]")
    end = re.compile(r"^\[", re.MULTILINE).search(text, begin.end())
    return begin.end(), end.start() if end else len(text)


def edit(path: Path, old: str, new: str, header: str = "") -> None:
    """Replaces ``old``, which must stand there exactly once (in the section ``[header]``)."""
    text = path.read_text("utf-8")
    low, high = section(text, header) if header else (0, len(text))
    if text.count(old, low, high) != 1:
        raise LookupError(f"{path.name}: '{old}' stands {text.count(old, low, high)} times in '{header}'")
    path.write_text(text[:low] + text[low:high].replace(old, new) + text[high:], "utf-8")


def drop(path: Path, header: str, item: str) -> None:
    """Takes one quoted string out of the lists of a section."""
    text = path.read_text("utf-8")
    low, high = section(text, header)
    changed, count = re.subn(rf'"{re.escape(item)}"(?:,\s*|(?=\s*\]))', "", text[low:high])
    if count != 1:
        raise LookupError(f"{path.name}: '{item}' stands {count} times in '{header}'")
    path.write_text(text[:low] + changed + text[high:], "utf-8")


def add_row(spec: Spec, label: str, name: str, **fields: Any) -> Spec:
    """The spec with one more row, or an own version of one, in memory."""
    from hybridkv_ref.spec_files import RowSpec

    file = spec.files[label]
    row = msgspec.convert({"doc": "Made up.", **fields}, RowSpec)
    changed = msgspec.structs.replace(file, rows={**file.rows, name: row})
    return msgspec.structs.replace(spec, files={**spec.files, label: changed})


def add_invariant(spec: Spec, label: str, name: str, **fields: Any) -> Spec:
    """The spec with one more invariant, in memory."""
    from hybridkv_ref.spec_files import InvariantSpec

    file = spec.files[label]
    found = msgspec.convert(fields, InvariantSpec)
    changed = msgspec.structs.replace(file, invariant={**file.invariant, name: found})
    return msgspec.structs.replace(spec, files={**spec.files, label: changed})


# -- proofs of a few rows ----------------------------------------------------------------------------------------------
def changed_events(tables: Tables, original: Tables) -> list[Event]:
    """The events whose guards or effects are not the original's."""
    before = {e.id: e for e in original.events}
    return [e for e in tables.events if e.id not in before or not same_row(e, before[e.id])]


def prove(tables: Tables, events: Iterable[Event], base: Assumptions | None = None) -> TaskResult:
    """Everything that ``check`` shows about these rows, in this process.

    ``base`` may be that of other tables with the same properties: terms are built once per base.
    """
    base, out = base or Assumptions(tables), TaskResult()
    for event in events:
        done = Task(tables, event, base).run()
        out.obligations += done.obligations
        out.counterexamples += done.counterexamples
    return out


def proofs_of_changed(folder: Path, original: Tables, base: Assumptions) -> Iterator[tuple[Event, TaskResult]]:
    """Each event that differs in a copy whose rows were changed, with its proofs."""
    changed = faulty(folder)
    events = changed_events(changed, original)
    if not events or table_properties(changed) != table_properties(original):
        raise LookupError("expected other rows and the same properties")
    tables = dataclasses.replace(original, events=changed.events)
    for event in events:
        yield event, prove(tables, [event], base)


def table_properties(tables: Tables) -> list[tuple[str, Expr]]:
    """What the tables claim."""
    return [(p.id, p.expr) for p in tables.properties]


def prove_claims(tables: Tables, name: str, base: Assumptions | None = None, kinds: int = 99) -> TaskResult:
    """The obligations of one liveness claim (or one kind of it), for its first ``kinds`` choices of kinds.

    ``base`` is as for ``prove``.
    """
    base, out = base or Assumptions(tables), TaskResult()
    for claim in [c for c in tables.responses if name in (c.id, c.id.partition("<")[0])][:kinds]:
        out.obligations += Claim(tables, claim, base).run().obligations
    return out


def failed(result: TaskResult) -> list[Obligation]:
    """What is not proved."""
    return [o for o in result.obligations if o.status != "proved"]


def example(result: TaskResult, prop: str) -> Counterexample:
    """The first counterexample to a property (without its kind)."""
    return next(c for c in result.counterexamples if c.property.partition("<")[0] == prop)


def faulty(folder: Path) -> Tables:
    """The tables of a changed copy."""
    return build(read_spec(folder))


# -- the language, evaluated without any back end ----------------------------------------------------------------------
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
    "+": operator.add, "-": operator.sub, "min": min, "max": max, "floor_to": lambda a, b: a // b * b,
    "implies": lambda a, b: bool(b) if a else True,
}  # fmt: skip


def evaluate(expr: Expr, look: Callable[[Ref], Value]) -> Any:
    """The value of an expression by walking its tree: what the compiled and the proved form are compared with."""
    match expr:
        case Lit(value=value, type=kind):
            return bool(value) if kind == BOOL else value
        case Ref():
            return look(expr)
        case Member(arg=arg, members=members):
            return evaluate(arg, look) in members
    args = [evaluate(a, look) for a in expr.args]
    match expr.op:
        case "and":
            return all(args)
        case "or":
            return any(args)
        case "not":
            return not args[0]
        case "neg":
            return -args[0]
        case "ite":
            return args[1] if args[0] else args[2]
    return _BINARY[expr.op](*args)


# -- worlds in any state -----------------------------------------------------------------------------------------------
class Scene:
    """The entities of one event in an arbitrary state, reachable or not, with inputs: what ``fire`` may meet."""

    def __init__(self, world: World, event: Event, rng: random.Random) -> None:
        self.world, self.event, self.rng = world, event, rng
        by_role: dict[str, Entity] = {}
        for role in sorted(event.roles, key=lambda r: r in ("lease", "copy")):
            by_role[role] = world.add(
                CLASS_OF[role], event.kinds.get(role, ""), by_role if role in ("lease", "copy") else {}
            )
        self.by_role = by_role
        self.entities = [by_role[role] for role in event.roles]
        self.inputs: dict[str, Value] = {n: self.any_of(t) for n, t in event.inputs.items()}
        for name, var in world.machine.tables.globals.items():
            setattr(world.pool, attribute(name), self.any_of(var.type))
        for entity in self.entities:
            for name, var in world.machine.tables.vars_of(entity.cls, entity.kind).items():
                setattr(entity, attribute(name), self.any_of(var.type))

    def any_of(self, kind: Type) -> Value:
        """Any value of a type; small numbers, so that they often meet."""
        if kind.name == "enum":
            return self.rng.choice(kind.members)
        return bool(self.rng.getrandbits(1)) if kind == BOOL else self.rng.randint(-1, 4)

    def look(self, ref: Ref) -> Value:
        """The value of a variable, constant or input."""
        if ref.role == "const":
            return self.world.machine.constants[ref.name]
        if ref.role == "input":
            return self.inputs[ref.name]
        owner = self.world.pool if ref.role == "global" else self.by_role[ref.role]
        value: Value = getattr(owner, attribute(ref.name))
        return value

    def shake(self, expr: Expr) -> None:
        """Draws the variables of an expression anew."""
        for ref in sorted(refs(expr), key=str):
            if ref.role == "input":
                self.inputs[ref.name] = self.any_of(ref.type)
            elif ref.role != "const":
                owner = self.world.pool if ref.role == "global" else self.by_role[ref.role]
                setattr(owner, attribute(ref.name), self.any_of(ref.type))

    def settle(self, **kept: Value) -> None:
        """Draws until every guard holds; ``kept`` fixes variables (``role__name``)."""
        for _ in range(10_000):
            for name, value in kept.items():
                role, _, variable = name.partition("__")
                setattr(self.by_role[role], variable, value)
            false = next((g for g in self.event.guards if not evaluate(g.expr, self.look)), None)
            if false is None:
                return
            self.shake(false.expr)
        raise LookupError(f"{self.event.id}: no state was found in which it can fire")

    def fire(self) -> None:
        """Fires the event."""
        self.world.fire(self.event.id, *self.entities, **self.inputs)

    def state(self) -> State:
        """Every variable of the world, globals included."""
        return snapshot(self.world)


def snapshot(world: World) -> State:
    """Every variable of a world by (owner, name)."""
    tables = world.machine.tables
    found: State = {("", n): getattr(world.pool, attribute(n)) for n in tables.globals}
    for entity in world.entities:
        for name in tables.vars_of(entity.cls, entity.kind):
            found[entity.name, name] = getattr(entity, attribute(name))
    return found


def refusal(action: Callable[[], None]) -> Refused | None:
    """What an action was refused with, or None when it fired."""
    try:
        action()
    except Refused as error:
        return error
    return None
