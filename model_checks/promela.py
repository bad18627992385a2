"""A finite instance as a Promela model: the same events, written out for Spin, which shares no code with our search.

Every event on every fitting tuple of entities, with every choice of inputs, is one guarded ``d_step`` of a single loop.
What never changes is a number in the text, what changes is a global variable; after a step the differences that
``canonical`` declares meaningless are removed, so that Spin must store exactly the states that ``explore`` finds.  An
invariant is an option of the loop that is open only where it is broken: it adds no state to a model that has no fault.
"""

import re
from collections.abc import Sequence

from hybridkv_ref.model_checks.explore import Graph
from hybridkv_ref.model_checks.model_text import Action, Language, Model, Writer, counted

BROKEN = "broken_invariant"

PROMELA = Language(
    spelled={"and": "&&", "or": "||"},
    truth=("0", "1"),
    choice="({} -> {} : {})",
    store="{} = {}",
    branch="if :: {} -> {} :: else fi",
)


def step(action: Action) -> str:
    """An action as one statement of a ``d_step``."""
    return f"{action.when} -> " + "; ".join([*action.then, "skip"])


def model(graph: Graph) -> Model:
    """The model of the instance that a search went through; a script is one step that comes first.

    The search must have come to its end: from it the model takes the reductions, and nothing else.  ValueError if it
    did not, or if the instance ends at a depth, which a model cannot say.
    """
    writer, instance = Writer(graph, PROMELA), graph.instance
    script, actions = writer.script(), writer.actions()
    lines = [f"/* {instance.name}: {instance.doc} */", *_declarations(writer, [*script, *actions])]
    lines += ["active proctype instance() {"]
    lines += [f"  d_step {{ {'; '.join(map(step, script))} }};"] if script else []
    lines += ["end:", "  do", *(f"/* {a.label} */\n  :: d_step {{ {step(a)} }}" for a in actions)]
    asserted: list[str] = []
    for label, holds in writer.invariants():
        mark = f"{BROKEN} = {len(asserted)}; assert({BROKEN} != {len(asserted)})"
        lines.append(f"/* {label} */\n  :: d_step {{ !({holds}) -> {mark} }}")
        asserted.append(label)
    return Model(instance.name, "\n".join([*lines, "  od", "}", ""]), tuple(asserted), writer.left_out())


def _declarations(writer: Writer, actions: Sequence[Action]) -> list[str]:
    """The variables; ``hidden`` ones are no part of a state."""
    small = {p: writer.space.types[p].name in ("enum", "bool") for p in writer.stored}
    stored = [f"{'byte' if small[p] else 'short'} {writer.variable(p)} = {writer.first(p)};" for p in writer.stored]
    return [*stored, *(f"hidden int {n};" for n in sorted({BROKEN}.union(*(a.locals for a in actions))))]


def broken(model: Model, error: str) -> str:
    """The invariant and entities that an error of Spin is about; empty if it is about none."""
    found = re.search(rf"{BROKEN}\s*!=\s*(\d+)", error)
    return model.asserted[int(found[1])] if found else ""


def size(graph: Graph) -> tuple[int, int]:
    """The states and transitions that Spin should report for the model: those of the search proper and its first step.

    Spin counts the state before the script, and the step into the first state, as well.
    """
    first = 1 if graph.instance.script else 0
    states, transitions = counted(graph)
    return states + first, transitions + 1 + first
