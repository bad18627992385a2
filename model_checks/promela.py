"""A finite instance as a Promela model: the same events, written out for Spin, which shares no code with our search.

Every event on every fitting tuple of entities, with every choice of inputs, is one guarded ``d_step`` of a single loop.
What never changes is a number in the text, what changes is a global variable; after a step the differences that
``canonical`` declares meaningless are removed, so that Spin must store exactly the states that ``explore`` finds.  An
invariant is an option of the loop that is open only where it is broken: it adds no state to a model that has no fault.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from hybridkv_ref.expr import Expr, Lit, Member, Ref, refs
from hybridkv_ref.model_checks.explore import Graph
from hybridkv_ref.model_checks.instances import Entity, Step
from hybridkv_ref.model_checks.second_opinion import tuples
from hybridkv_ref.model_checks.space import Binding
from hybridkv_ref.model_checks.vector import code
from hybridkv_ref.tables import Effect, Guard

Namer = Callable[[Ref], str]
BROKEN = "broken_invariant"

_INFIX = ("==", "!=", "<", "<=", ">", ">=", "+", "-")
_SYMBOL = {"and": "&&", "or": "||", **{op: op for op in _INFIX}}


def number(value: int) -> str:
    """A number as Promela writes it."""
    return str(value) if value >= 0 else f"(-{-value})"


def promela(expr: Expr, name: Namer) -> str:
    """Promela text of an expression; ``name`` writes the variables.  Truth values are 0 and 1, enum members numbers."""
    match expr:
        case Lit(value=value, type=kind):
            return number(code(value, kind))
        case Ref():
            return name(expr)
        case Member(arg=arg, members=members):
            inside = promela(arg, name)
            return "(" + (" || ".join(f"{inside} == {code(m, arg.type)}" for m in members) or "false") + ")"
    args = [promela(a, name) for a in expr.args]
    if expr.op in _SYMBOL:
        return "(" + f" {_SYMBOL[expr.op]} ".join(args) + ")"
    match expr.op:
        case "not":
            return f"(!{args[0]})"
        case "neg":
            return f"(0 - {args[0]})"
        case "implies":
            return f"(!{args[0]} || {args[1]})"
        case "ite":
            return f"({args[0]} -> {args[1]} : {args[2]})"
    raise ValueError(f"'{expr.op}' is not part of the tables' language")


def condition(guards: Sequence[Guard], name: Namer) -> str:
    """All guards of an event as one condition."""
    return " && ".join(promela(g.expr, name) for g in guards) or "true"


def assignments(effects: Sequence[Effect], name: Namer) -> list[str]:
    """The effects as statements in sequence; what an earlier one overwrites and a later one reads is saved first."""
    saved: list[str] = []
    stored: list[str] = []
    overwritten: set[Ref] = set()
    for effect in effects:
        value = promela(effect.expr, name)
        if refs(effect.expr) & overwritten:
            saved.append(f"saved{len(saved)} = {value}")
            value = f"saved{len(saved) - 1}"
        stored.append(f"{name(effect.target)} = {value}")
        overwritten.add(effect.target)
    return saved + stored


@dataclass(frozen=True)
class Model:
    """A Promela model of an instance.  Assertion number n is about ``asserted[n]``, an invariant and its entities.

    ``left_out`` names the invariants that reduced states cannot show.  A script is one step that comes first.
    """

    name: str
    source: str
    asserted: tuple[str, ...]
    left_out: tuple[str, ...]

    def broken(self, error: str) -> str:
        """The invariant and entities that an error of Spin is about; empty if it is about none."""
        found = re.search(rf"{BROKEN}\s*!=\s*(\d+)", error)
        return self.asserted[int(found[1])] if found else ""


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.graph, self.space = graph, graph.space
        self.stored = set(self.space.written)

    def variable(self, position: int) -> str:
        """The Promela name of a position that changes."""
        return f"v{position}_" + re.sub(r"\W", "_", ".".join(n for n in self.space.names[position] if n))

    def value(self, position: int) -> str:
        """A position's variable, or its value if it never changes."""
        return self.variable(position) if position in self.stored else number(self.space.initial[position])

    def namer(self, by_role: Mapping[str, Entity], inputs: Mapping[str, int]) -> Namer:
        """Writes variables for these entities; inputs are numbers."""

        def name(ref: Ref) -> str:
            if ref.role == "input":
                return number(inputs[ref.name])
            return self.value(self.space.position(ref, by_role))

        return name

    def declarations(self) -> Iterator[str]:
        """The variables; ``hidden`` ones are no part of a state."""
        for position in sorted(self.stored):
            small = self.space.types[position].name in ("enum", "bool")
            yield f"{'byte' if small else 'short'} {self.variable(position)} = {number(self.space.initial[position])};"
        most = max((len(b.event.effects) for b in self.space.bindings), default=0)
        yield from (f"hidden int saved{i};" for i in range(most))
        yield f"hidden int base, {BROKEN};"

    def step(self, binding: Binding, inputs: Sequence[int]) -> str:
        """One binding with one choice of inputs: its condition and its statements."""
        event, space = binding.event, self.space
        by_role = dict(zip(event.roles, binding.entities, strict=True))
        name = self.namer(by_role, dict(zip(event.inputs, inputs, strict=True)))
        kept = [e for e in event.effects if space.position(e.target, by_role) not in space.ghosts]
        when, then = condition(event.guards, name), assignments(kept, name)
        if binding.budget >= 0:
            when = f"{self.value(binding.budget)} > 0 && {when}"
            then.append(f"{self.value(binding.budget)}--")
        return f"{when} -> " + "; ".join([*then, *self.reduced(binding), "skip"])

    def reduced(self, binding: Binding) -> Iterator[str]:
        """What makes the state canonical again after this binding."""
        space = self.space
        for counter, memories in binding.equal:
            for memory, stage in memories:
                blank, first = f"{self.value(stage)} == 0", number(space.initial[memory])
                yield f"{self.value(memory)} = ({blank} -> {first} : ({self.value(memory)} == {self.value(counter)}))"
            yield f"{self.value(counter)} = 1"
        if binding.shifts:
            first, *others = (self.value(c) for c in space.counters)
            yield f"base = {first}"
            yield from (f"base = ({c} < base -> {c} : base)" for c in others)
            yield from (f"{self.value(c)} = {self.value(c)} - base" for c in space.counters)
            for member, stage, dead in space.members:
                gone = " || ".join(f"{self.value(stage)} == {n}" for n, d in enumerate(dead) if d) or "false"
                value = self.value(member)
                yield f"{value} = (({gone}) -> {number(space.initial[member])} : {value} - base)"
        for stage, table in binding.resets:
            for at, spots in table.items():
                lost = "; ".join(f"{self.value(p)} = {number(first)}" for p, first in spots)
                yield f"if :: {self.value(stage)} == {at} -> {lost} :: else fi"

    def scripted(self, step: Step) -> str:
        """A step of the script."""
        for binding in self.space.bindings:
            if binding.event.id == step.event and tuple(e.name for e in binding.entities) == step.entities:
                kinds = binding.event.inputs.values()
                return self.step(binding, [code(v, t) for v, t in zip(step.inputs, kinds, strict=True)])
        raise ValueError(f"no binding for {step}")

    def options(self) -> Iterator[str]:
        """The options of the loop that stand for events."""
        for binding in self.space.bindings:
            for inputs in binding.choices.tolist() if binding.active else ():
                given = zip(binding.event.inputs, inputs, strict=True)
                note = " ".join([binding.label, *(f"{n}={v}" for n, v in given)])
                yield f"/* {note} */\n  :: d_step {{ {self.step(binding, inputs)} }}"

    def model(self) -> Model:
        asserted: list[str] = []
        left_out: list[str] = []
        checks: list[str] = []
        for item in self.space.tables.forms("invariant"):
            bound = list(tuples(self.graph, item))
            if bound and not self.space.reduction.keeps(item.expr):
                left_out.append(item.id)
                continue
            for by_role in bound:
                holds = promela(item.expr, self.namer(by_role, {}))
                mark = f"{BROKEN} = {len(asserted)}; assert({BROKEN} != {len(asserted)})"
                asserted.append(f"{item.id}({', '.join(e.name for e in by_role.values())})")
                checks.append(f"/* {asserted[-1]} */\n  :: d_step {{ !({holds}) -> {mark} }}")
        instance = self.space.instance
        script = "; ".join(self.scripted(s) for s in instance.script)
        lines = [f"/* {instance.name}: {instance.doc} */", *self.declarations(), "active proctype instance() {"]
        lines += [f"  d_step {{ {script} }};"] if script else []
        lines += ["end:", "  do", *self.options(), *checks, "  od", "}", ""]
        return Model(instance.name, "\n".join(lines), tuple(asserted), tuple(left_out))


def model(graph: Graph) -> Model:
    """The model of the instance that a search went through.

    The search must have come to its end: from it the model takes the reductions, and nothing else.  ValueError if it
    did not, or if the instance ends at a depth, which a model cannot say.
    """
    if graph.truncated or graph.instance.depth:
        raise ValueError(f"{graph.instance.name}: no model of a search that was cut short")
    return _Writer(graph).model()


def size(graph: Graph) -> tuple[int, int]:
    """The states and transitions that Spin should report for the model: those of the search proper and its first step.

    A state of the script that is reached again counts again, since the script is over.  Spin expands it and ``explore``
    does not: an instance which goes back beyond its script has more transitions in Spin, and may have more states.
    """
    proper = graph.src >= graph.opened
    again = len(np.unique(graph.dst[proper & (graph.dst < graph.opened)]))
    first = 1 if graph.instance.script else 0
    return graph.states - graph.opened + again + first, int(proper.sum()) + 1 + first
