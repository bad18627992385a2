"""A finite instance as a Murphi model, for Rumur: a third explorer, with its own order, state store and arithmetic.

Every event on every fitting tuple of entities, with every choice of inputs, is one rule, and an invariant is one of
Murphi's own.  A script is part of the start state, where each of its steps is asserted to be enabled.  After a step the
differences that ``canonical`` declares meaningless are removed, so that Rumur must find the states of ``explore``.

A number has one byte (``NUMBER``); Rumur ends with an error at the first assignment that does not fit, also of a value
that is reduced later in its rule.
"""

from collections.abc import Mapping, Sequence

from hybridkv_ref.expr import BOOL, Type
from hybridkv_ref.model_checks.explore import Graph
from hybridkv_ref.model_checks.model_text import Action, Language, Model, Writer

# 255 values and Rumur's "undefined" are eight bits.
NUMBER = "-127..127"

MURPHI = Language(
    spelled={"and": "&", "or": "|", "==": "="},
    truth=("false", "true"),
    choice="({} ? {} : {})",
    store="{} := {}",
    branch="if {} then {}; end",
)


def model(graph: Graph) -> Model:
    """The model of the instance that a search went through.

    The search must have come to its end: from it the model takes the reductions, and nothing else.  ValueError if it
    did not, or if the instance ends at a depth, which a model cannot say.
    """
    writer, instance = Writer(graph, MURPHI), graph.instance
    script, rules, asserted = writer.script(), writer.actions(), list(writer.invariants())
    lines = [f"-- {instance.name}: {instance.doc}", f"type number: {NUMBER};"]
    lines += [f"var {writer.variable(p)}: {_type(writer.space.types[p])};" for p in writer.stored]
    first = [MURPHI.store.format(writer.variable(p), writer.first(p)) for p in writer.stored]
    for number, step in enumerate(script):
        first += [f'assert {step.when} "script[{number}] is refused: {step.label}"', *step.then]
    names: dict[str, Type] = {}
    for step in script:
        names |= step.locals
    lines += [f'startstate "{instance.name}"{_body(names, first)}', *map(_rule, rules)]
    lines += [f'invariant "{label}" {holds};' for label, holds in asserted]
    return Model(instance.name, "\n".join([*lines, ""]), tuple(label for label, _ in asserted), writer.left_out())


def _rule(action: Action) -> str:
    return f'rule "{action.label}" {action.when} ==>{_body(action.locals, action.then)}'


def _body(names: Mapping[str, Type], statements: Sequence[str]) -> str:
    declared = "".join(f" {n}: {'boolean' if t == BOOL else 'number'};" for n, t in names.items())
    return f"{' var' if declared else ''}{declared} begin {'; '.join([*statements, 'end'])};"


def _type(kind: Type) -> str:
    if kind == BOOL:
        return "boolean"
    return f"0..{len(kind.members) - 1}" if kind.name == "enum" else "number"
