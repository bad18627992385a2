"""A finite instance as text for another explorer: what Promela and Murphi say alike, and how they differ.

A ``Language`` writes expressions, conditions and effects; a ``Writer`` binds them to the entities of one instance, and
adds to every step what makes its state canonical again.  Generated text shares no code with the search that it checks:
from a finished search it takes the reductions, and nothing else.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv_ref.expr import BOOL, INT, Expr, Lit, Member, Ref, Type, refs
from hybridkv_ref.model_checks.explore import Graph
from hybridkv_ref.model_checks.instances import Entity, Step
from hybridkv_ref.model_checks.second_opinion import tuples
from hybridkv_ref.model_checks.space import Binding
from hybridkv_ref.model_checks.vector import code
from hybridkv_ref.tables import Effect, Guard

Namer = Callable[[Ref], str]

_INFIX = frozenset(("and", "or", "==", "!=", "<", "<=", ">", ">=", "+", "-"))


def late(effects: Sequence[Effect]) -> dict[Ref, str]:
    """The effects (by target) that read what an earlier one overwrites, with the local that holds their value."""
    found: dict[Ref, str] = {}
    overwritten: set[Ref] = set()
    for effect in effects:
        if refs(effect.expr) & overwritten:
            kind = "bool" if effect.target.type == BOOL else "number"
            found[effect.target] = f"saved_{kind}{len(found)}"
        overwritten.add(effect.target)
    return found


@dataclass(frozen=True)
class Language:
    """How a language writes the tables.  Enum members are numbers; ``spelled`` maps operators that it writes otherwise.

    ``truth`` is false and true; ``choice``, ``store`` and ``branch`` are patterns: a conditional expression, an
    assignment, a statement under a condition.
    """

    spelled: Mapping[str, str]
    truth: tuple[str, str]
    choice: str
    store: str
    branch: str

    def literal(self, value: int, kind: Type) -> str:
        """A stored value as the language writes it."""
        if kind == BOOL:
            return self.truth[value]
        return str(value) if value >= 0 else f"(-{-value})"

    def infix(self, op: str, *args: str) -> str:
        """Operands joined by one of the tables' operators."""
        return "(" + f" {self.spelled.get(op, op)} ".join(args) + ")"

    def expression(self, expr: Expr, name: Namer) -> str:
        """Text of an expression; ``name`` writes the variables."""
        match expr:
            case Lit(value=value, type=kind):
                return self.literal(code(value, kind), kind)
            case Ref():
                return name(expr)
            case Member(arg=arg, members=members):
                inside = self.expression(arg, name)
                each = (self.infix("==", inside, self.literal(code(m, arg.type), arg.type)) for m in members)
                return self.infix("or", *each) if members else self.truth[0]
        args = [self.expression(a, name) for a in expr.args]
        if expr.op in _INFIX:
            return self.infix(expr.op, *args)
        match expr.op:
            case "not":
                return f"(!{args[0]})"
            case "neg":
                return f"(0 - {args[0]})"
            case "implies":
                return self.infix("or", f"!{args[0]}", args[1])
            case "ite":
                return self.choice.format(*args)
        raise ValueError(f"'{expr.op}' is not part of the tables' language")

    def condition(self, guards: Sequence[Guard], name: Namer) -> str:
        """All guards of an event as one condition."""
        return self.infix("and", *(self.expression(g.expr, name) for g in guards)) if guards else self.truth[1]

    def assignments(self, effects: Sequence[Effect], name: Namer) -> list[str]:
        """The effects as statements in sequence; what one overwrites and a later one reads is saved first."""
        values = {e.target: self.expression(e.expr, name) for e in effects}
        saved = late(effects)
        first = [self.store.format(local, values[target]) for target, local in saved.items()]
        return first + [self.store.format(name(t), saved.get(t, value)) for t, value in values.items()]


@dataclass(frozen=True)
class Model:
    """A model of an instance.  Assertion number n is about ``asserted[n]``, an invariant and its entities.

    ``left_out`` names the invariants that reduced states cannot show.
    """

    name: str
    source: str
    asserted: tuple[str, ...]
    left_out: tuple[str, ...]


@dataclass(frozen=True)
class Action:
    """An event with its entities and inputs: the condition, the statements, and the locals that these use."""

    label: str
    when: str
    then: tuple[str, ...]
    locals: Mapping[str, Type]


class Writer:
    """Writes the variables, actions and invariants of the instance of a finished search.

    ValueError if the search was cut short, or if the instance ends at a depth, which a model cannot say.
    """

    def __init__(self, graph: Graph, language: Language) -> None:
        if graph.truncated or graph.instance.depth:
            raise ValueError(f"{graph.instance.name}: no model of a search that was cut short")
        self.graph, self.space, self.language = graph, graph.space, language
        self.stored = sorted(self.space.written)

    def variable(self, position: int) -> str:
        """The name of a position that changes."""
        return f"v{position}_" + re.sub(r"\W", "_", ".".join(n for n in self.space.names[position] if n))

    def first(self, position: int) -> str:
        """A position's value in the first state."""
        return self.language.literal(self.space.initial[position], self.space.types[position])

    def value(self, position: int) -> str:
        """A position's variable, or its value if it never changes."""
        return self.variable(position) if position in self.stored else self.first(position)

    def namer(self, by_role: Mapping[str, Entity], inputs: Mapping[str, int]) -> Namer:
        """Writes variables for these entities; inputs are values."""

        def name(ref: Ref) -> str:
            if ref.role == "input":
                return self.language.literal(inputs[ref.name], ref.type)
            return self.value(self.space.position(ref, by_role))

        return name

    def action(self, binding: Binding, inputs: Sequence[int]) -> Action:
        """One binding with one choice of inputs."""
        event, space, language = binding.event, self.space, self.language
        by_role = dict(zip(event.roles, binding.entities, strict=True))
        given = dict(zip(event.inputs, inputs, strict=True))
        name = self.namer(by_role, given)
        kept = [e for e in event.effects if space.position(e.target, by_role) not in space.ghosts]
        when, then = language.condition(event.guards, name), language.assignments(kept, name)
        used = {local: target.type for target, local in late(kept).items()}
        if binding.shifts:
            used["base"] = INT
        if binding.budget >= 0:
            left = self.value(binding.budget)
            when = language.infix("and", language.infix(">", left, "0"), when)
            then.append(language.store.format(left, language.infix("-", left, "1")))
        label = " ".join([binding.label, *(f"{n}={v}" for n, v in given.items())])
        return Action(label, when, (*then, *self.reduced(binding)), used)

    def reduced(self, binding: Binding) -> Iterator[str]:
        """What makes the state canonical again after this binding."""
        space, language = self.space, self.language
        store, choice, infix = language.store.format, language.choice.format, language.infix
        for counter, memories in binding.equal:
            for memory, stage in memories:
                value = self.value(memory)
                same = choice(infix("==", value, self.value(counter)), "1", "0")
                yield store(value, choice(infix("==", self.value(stage), "0"), self.first(memory), same))
            yield store(self.value(counter), "1")
        if binding.shifts:
            first, *others = (self.value(c) for c in space.counters)
            yield store("base", first)
            yield from (store("base", choice(infix("<", c, "base"), c, "base")) for c in others)
            yield from (store(c, infix("-", c, "base")) for c in (first, *others))
            for member, stage, dead in space.members:
                gone = [infix("==", self.value(stage), str(n)) for n, d in enumerate(dead) if d]
                kept = infix("-", self.value(member), "base")
                yield store(self.value(member), choice(infix("or", *gone), self.first(member), kept) if gone else kept)
        for stage, table in binding.resets:
            for at, spots in table.items():
                lost = "; ".join(store(self.value(p), language.literal(v, space.types[p])) for p, v in spots)
                yield language.branch.format(infix("==", self.value(stage), str(at)), lost)

    def scripted(self, step: Step) -> Action:
        """A step of the script."""
        for binding in self.space.bindings:
            if binding.event.id == step.event and tuple(e.name for e in binding.entities) == step.entities:
                kinds = binding.event.inputs.values()
                return self.action(binding, [code(v, t) for v, t in zip(step.inputs, kinds, strict=True)])
        raise ValueError(f"no binding for {step}")

    def script(self) -> list[Action]:
        """The steps of the script, if there is one."""
        return [self.scripted(s) for s in self.space.instance.script]

    def actions(self) -> list[Action]:
        """Every event on every fitting tuple of entities, with every choice of inputs."""
        return [self.action(b, inputs) for b in self.space.bindings if b.active for inputs in b.choices.tolist()]

    def invariants(self) -> Iterator[tuple[str, str]]:
        """The invariants that reduced states can show, with their entities; and their text."""
        for item in self.space.tables.forms("invariant"):
            for by_role in tuples(self.graph, item) if self.space.reduction.keeps(item.expr) else ():
                label = f"{item.id}({', '.join(e.name for e in by_role.values())})"
                yield label, self.language.expression(item.expr, self.namer(by_role, {}))

    def left_out(self) -> tuple[str, ...]:
        """The invariants on entities of this instance that reduced states cannot show."""
        stated = self.space.tables.forms("invariant")
        return tuple(i.id for i in stated if not self.space.reduction.keeps(i.expr) and any(tuples(self.graph, i)))


def counted(graph: Graph) -> tuple[int, int]:
    """The states and transitions that an explorer should find which starts where the script ended.

    A state of the script that is reached again counts again, since the script is over.  Another explorer expands it and
    ``explore`` does not: an instance which goes back beyond its script has more transitions there, and may have more
    states.
    """
    proper = graph.src >= graph.opened
    again = len(np.unique(graph.dst[proper & (graph.dst < graph.opened)]))
    return graph.states - graph.opened + again, int(proper.sum())


__all__ = ["Action", "Language", "Model", "Namer", "Writer", "counted", "late"]
