"""The other explorers of finite instances, each with the model that it reads and the counts that it should find."""

from collections.abc import Callable
from dataclasses import dataclass

from hybridkv_ref.model_checks import murphi, promela, rumur, spin
from hybridkv_ref.model_checks.explore import Graph
from hybridkv_ref.model_checks.model_text import Model, counted
from hybridkv_ref.model_checks.verifiers import Run

MOST_STATES = 20_000_000
MEMORY_MB = 12_000


@dataclass(frozen=True)
class Explorer:
    """One tool.  ``missing`` says why it cannot run here ('' if it can); ``count`` runs it on a model's source."""

    name: str
    missing: Callable[[], str]
    model: Callable[[Graph], Model]
    count: Callable[[str], Run]
    wanted: Callable[[Graph], tuple[int, int]]


EXPLORERS = (
    Explorer(
        "Spin",
        lambda: spin.missing(),
        lambda graph: promela.model(graph),
        lambda source: spin.check(source, MEMORY_MB, depth=10_000_000, table_bits=24),
        promela.size,
    ),
    Explorer(
        "Rumur",
        lambda: rumur.missing(),
        lambda graph: murphi.model(graph),
        lambda source: rumur.check(source, MEMORY_MB),
        counted,
    ),
)


def agrees(graph: Graph, run: Run, wanted: tuple[int, int]) -> bool:
    """Whether a tool found the states and transitions that our search found, and nothing wrong.

    Only what goes back beyond its script may have more transitions there.
    """
    if (run.states, run.error) != (wanted[0], "") or graph.truncated:
        return False
    back = bool(((graph.src >= graph.opened) & (graph.dst < graph.opened)).any())
    return run.transitions == wanted[1] or (back and run.transitions > wanted[1])
