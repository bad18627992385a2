"""A Hypothesis state machine generated from the tables: one rule per row, every property checked after every step.

The world is a finite instance of ``spec/instances.toml``: its entities, constants and input values.  A rule may be
chosen when its row can fire somewhere, and then fires it on a drawn binding; now and then a refused firing is tried
as well, which must change nothing.  After each step all invariants, the step properties and every counter against its
sum are checked on every fitting tuple of entities.  There is no kind, row or property by name here.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from hybridkv_ref.compile_py import attribute, namer, python, role_name
from hybridkv_ref.expr import Ref, refs
from hybridkv_ref.machine import Machine, Refused, Value, World
from hybridkv_ref.model_checks.instances import Instance
from hybridkv_ref.model_checks.instances import fitting as fitting_entities
from hybridkv_ref.tables import CLASS_OF, ROLES, Event, Property, Tables

Firing = tuple[tuple[Any, ...], dict[str, Value]]
OLD = "old_"


class BrokenPropertyError(AssertionError):
    """A property of the tables does not hold after a step; the message ends with the steps that led there."""


class Compiled:
    """One property over one tuple of entities, as a function of (pool, old pool, entities, old entities)."""

    def __init__(self, prop: Property, roles: tuple[str, ...], constants: Mapping[str, int]) -> None:
        self.prop, self.roles = prop, roles
        plain = namer(constants)

        def name(ref: Ref) -> str:
            text = plain(ref)
            return text if prop.form == "invariant" or ref.new or ref.role in ("const", "input") else f"{OLD}{text}"

        both = [f"{p}{n}" for p in ("", OLD) for n in ("G", *map(role_name, roles))]
        space: dict[str, Any] = {}
        exec(f"def holds({', '.join(both)}):\n    return {python(prop.expr, name)}", space)
        self.holds: Callable[..., bool] = space["holds"]


class Frozen:
    """The variables of an entity or the pool as they were."""

    def __init__(self, source: Any, names: tuple[str, ...]) -> None:
        for n in names:
            setattr(self, n, getattr(source, n))


class TableRules(RuleBasedStateMachine):
    """Base of the generated machines; ``tables``, ``instance`` and ``coverage`` are set by ``machine_class``."""

    tables: Tables
    instance: Instance
    machine: Machine
    checks: tuple[tuple[Compiled, tuple[str, ...]], ...]
    bound: dict[str, list[tuple[Event, tuple[str, ...]]]]
    coverage: Counter[str]

    def __init__(self) -> None:
        super().__init__()
        self.world: World = self.machine.world()
        self.by_name: dict[str, Any] = {}
        for entity in self.instance.entities:
            owners = {role: self.by_name[name] for role, name in entity.owners.items()}
            variables = self.tables.vars_of(entity.cls, entity.kind)
            rigid = {n: v for n, v in entity.rigid.items() if variables[n].rigid}
            made = self.world.add(entity.cls, entity.kind, owners)
            for name, value in rigid.items():
                setattr(made, attribute(name), value)
            made.name = entity.name
            self.by_name[entity.name] = made
        for step in self.instance.script:
            names = dict(zip(self.machine.events[step.event].event.inputs, step.inputs, strict=True))
            self.world.fire(step.event, *(self.by_name[n] for n in step.entities), **names)
        self.left = dict(self.instance.budgets)
        self.steps: list[str] = []
        self.stored = {
            made: tuple(attribute(v) for v in self.tables.vars_of(made.cls, made.kind))
            for made in self.by_name.values()
        }
        self.pooled = tuple(attribute(v) for v in self.tables.globals)

    # -- what can fire ------------------------------------------------------------------------------------------------
    def firings(self, row: str, wanted: bool) -> Iterator[tuple[Event, Firing]]:
        """Every firing of a row that the tables allow now, or refuse now."""
        if self.left.get(row, 1) <= 0:
            return
        for one, names in self.bound[row]:
            entities = tuple(self.by_name[n] for n in names)
            for values in self.instance.choices(one):
                inputs = dict(zip(one.inputs, values, strict=True))
                if self.world.allows(one.id, *entities, **inputs) == wanted:
                    yield one, (entities, inputs)

    def may_fire(self, row: str) -> bool:
        """Whether the row can fire somewhere."""
        return next(self.firings(row, True), None) is not None

    @precondition(lambda self: not any(map(self.may_fire, self.bound)))
    @rule()
    def rest(self) -> None:
        """Nothing happens, where no row can fire."""

    def fire(self, row: str, data: st.DataObject) -> None:
        """Fires one drawn firing of the row, after trying a refused one."""
        refused = list(self.firings(row, False))
        if refused and data.draw(st.integers(0, 3)) == 0:
            self.refuse(*refused[data.draw(st.integers(0, len(refused) - 1))])
        allowed = list(self.firings(row, True))
        one, (entities, inputs) = allowed[data.draw(st.integers(0, len(allowed) - 1))]
        before = self.frozen()
        self.world.fire(one.id, *entities, **inputs)
        if row in self.left:
            self.left[row] -= 1
        self.coverage[one.id] += 1
        self.steps.append(self.told(one, entities, inputs, before))
        self.check(one, entities, before)

    def refuse(self, one: Event, firing: Firing) -> None:
        """A refused row changes nothing and says why."""
        entities, inputs = firing
        before = self.values()
        try:
            self.world.fire(one.id, *entities, **inputs)
        except Refused as refusal:
            if refusal.guard not in one.guards or self.values() != before:
                self.broken("a refused row changed something", one.id)
            return
        self.broken("a row that is not allowed fired", one.id)

    # -- what must hold ----------------------------------------------------------------------------------------------
    def check(self, one: Event, acting: tuple[Any, ...], before: dict[Any, Frozen]) -> None:
        """Every invariant, step property and sum, on every fitting tuple."""
        by_role = dict(zip(one.roles, acting, strict=True))
        for item, names in self.checks:
            found = [self.by_name[n] for n in names]
            if item.prop.on and (
                item.prop.on not in one.tags
                or any(by_role.get(r) is not e for r, e in zip(item.roles, found, strict=True))
            ):
                continue
            if not item.holds(self.world.pool, *found, before[None], *(before[e] for e in found)):
                self.broken(item.prop.id, ", ".join(names))
        for owner, name, count in self.sums():
            if getattr(owner or self.world.pool, attribute(name)) != count:
                self.broken(f"{name} is not the sum of its shares", owner.name if owner else "pool")

    def sums(self) -> Iterator[tuple[Any, str, int]]:
        """(owner or None, counter, what it should be)."""
        for name, var in self.tables.globals.items():
            if var.sums:
                yield None, name, self.world.recount(var)
        for owner in self.by_name.values():
            for name, var in self.tables.vars_of(owner.cls, owner.kind).items():
                if var.sums:
                    yield owner, name, self.world.recount(var, owner)

    def broken(self, what: str, where: str) -> None:
        """Reports a failure with the steps so far."""
        raise BrokenPropertyError(f"{what}: {where}\n" + "\n".join(self.steps))

    # -- states --------------------------------------------------------------------------------------------------------
    def frozen(self) -> dict[Any, Frozen]:
        """The state as it is; None stands for the pool."""
        found: dict[Any, Frozen] = {made: Frozen(made, names) for made, names in self.stored.items()}
        found[None] = Frozen(self.world.pool, self.pooled)
        return found

    def values(self) -> list[Value]:
        """The state as one list."""
        found = [getattr(self.world.pool, n) for n in self.pooled]
        return found + [getattr(made, n) for made, names in self.stored.items() for n in names]

    def told(self, one: Event, entities: tuple[Any, ...], inputs: dict[str, Value], before: dict[Any, Frozen]) -> str:
        """One step as a line: event, entities, inputs, changed fields."""
        changed = [
            f"{made.name}.{n}: {getattr(before[made], n)} -> {getattr(made, n)}"
            for made, names in self.stored.items()
            for n in names
            if getattr(before[made], n) != getattr(made, n)
        ]
        given = "".join(f" {n}={v}" for n, v in inputs.items())
        return f"{one.id} {' '.join(e.name for e in entities)}{given}  [{', '.join(changed)}]"


def machine_class(tables: Tables, instance: Instance) -> type[TableRules]:
    """The machine of these tables over one instance: one rule for each row that the instance can try."""
    machine = Machine(tables, dict(instance.constants))
    properties = [
        Compiled(p, _roles(p), machine.constants)
        for p in (*tables.forms("invariant"), *tables.forms("step"))
        if not any(r.role == "input" for r in refs(p.expr))
    ]
    checks = [
        (item, tuple(e.name for e in found))
        for item in properties
        for found in fitting_entities(instance.entities, item.roles, item.prop.kinds)
    ]
    bound: dict[str, list[tuple[Event, tuple[str, ...]]]] = {}
    for one in tables.events:
        if one.actor == "environment" and one.row not in instance.budgets:
            continue
        for found in instance.bindings(one):
            if not instance.leaves_out(one.row, found):
                bound.setdefault(one.row, []).append((one, tuple(e.name for e in found)))
    body: dict[str, Any] = {
        "tables": tables,
        "instance": instance,
        "machine": machine,
        "checks": tuple(checks),
        "bound": bound,
        "coverage": Counter(),
    }
    return type("Rules", (TableRules,), body | {f"row_{row}": _rule(row) for row in bound})


def _roles(prop: Property) -> tuple[str, ...]:
    named = {r.role for r in refs(prop.expr)}
    return tuple(r for r in ROLES[prop.scope] if r in named or CLASS_OF[r] != "segment" or r in prop.kinds)


def _rule(row: str) -> Any:
    def fire(machine: TableRules, data: st.DataObject) -> None:
        machine.fire(row, data)

    fire.__name__ = f"row_{row}"
    return precondition(lambda machine: machine.may_fire(row))(rule(data=st.data())(fire))


def run_rules(rules: type[TableRules], examples: int, steps: int) -> Counter[str]:
    """Runs the machine, derandomised; how often each event fired. Raises BrokenPropertyError."""
    rules.coverage = Counter()
    run_state_machine_as_test(
        rules,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return rules.coverage
