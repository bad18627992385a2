"""Captured graphs: a step is captured once and replayed, and every change of its state is a row of the tables.

``CapturedStep`` holds one graph of one step.  It establishes facts (a buffer is somewhere else, a padding row addresses
a slot of a request) and fires the row that goes with each; what may follow is the tables' decision, and a refusal is
the row's.  On a CUDA device the launches are a real CUDA graph, on the CPU the launch plan itself; the plan is recorded
on both, so a step that no graph can hold is refused alike.

Rows fire in a world of their own (``TableRows``), or in an allocator's, whose pools the graph reads: its ``graph``,
``graph_row`` and ``system`` are what is asked for.
"""

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import torch
from torch import Tensor

from hybridkv_ref.launch_plan import Plan, place, record
from hybridkv_ref.loader import load_tables
from hybridkv_ref.machine import Machine

WARM_UPS = 2
"""Runs before a CUDA capture: kernels are compiled and libraries ask for their memory."""


class Step(Protocol):
    """What can be captured: static buffers, and a run that only launches."""

    def buffers(self) -> Mapping[str, Tensor]:
        """All memory that ``run`` uses and does not make, by name, as bound now."""

    def run(self) -> None:
        """Launches everything; decides nothing by values."""

    def padded(self) -> bool:
        """Whether every padding row of the contents addresses the null slot and no slot of a request."""


class GraphRows(Protocol):
    """Where rows fire.  Each raises Refused and changes nothing if its row does not allow it."""

    def graph(self) -> Any:
        """A new entity for a graph; its variables are attributes."""

    def graph_row(self, graph: Any, row: str, **inputs: int | bool) -> None:
        """Fires a row of a graph."""

    def system(self, row: str) -> None:
        """Fires a row that is of no entity."""


@lru_cache(maxsize=1)
def _machine() -> Machine:
    return Machine(load_tables())


class TableRows:
    """Rows fire in a world of their own."""

    def __init__(self, machine: Machine | None = None) -> None:
        self.world = (machine or _machine()).world()

    def graph(self) -> Any:
        """A new entity for a graph."""
        return self.world.add("graph")

    def graph_row(self, graph: Any, row: str, **inputs: int | bool) -> None:
        """Fires a row of a graph."""
        self.world.fire(f"graph.{row}", graph, **inputs)

    def system(self, row: str) -> None:
        """Fires a row that is of no entity."""
        self.world.fire(f"system.{row}")


class CapturedStep:
    """One graph of ``step``.  ``state``: its entity in the tables.  ``plan``: what it holds, None before a capture."""

    def __init__(self, step: Step, rows: GraphRows) -> None:
        self.step, self.rows, self.state = step, rows, rows.graph()
        self.plan: Plan | None = None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._bound = self._places()

    @property
    def stage(self) -> str:
        """The graph's stage."""
        return str(self.state.stage)

    def capture(self) -> None:
        """Captures the step, which runs: its contents are all padding.

        Refused, NotCapturable (nothing is captured then).
        """
        self._capture("capture")

    def recapture(self) -> None:
        """Gives up a graph of an older topology and captures anew.  Refused where the topology has not moved."""
        self.observe()
        self.rows.graph_row(self.state, "invalidate")
        self._capture("recapture")

    def discard(self) -> None:
        """Destroys the graph."""
        self.rows.graph_row(self.state, "discard_graph")
        self.plan = self._graph = None

    def observe(self) -> None:
        """Looks whether a buffer is somewhere else, or of another shape, than when last looked: the topology moved."""
        now = self._places()
        if now != self._bound:
            self.rows.system("rebase")
            self._bound = now

    def replay(self) -> None:
        """Runs the graph over the contents of now, and waits.  Refused: another topology, or contents not padded."""
        self.begin()
        self.end()

    def begin(self) -> None:
        """Starts a replay: looks at bindings and contents, fires the row, launches."""
        self.observe()
        padded = self.step.padded()
        if padded != bool(self.state.padded):
            self.rows.graph_row(self.state, "set_contents", padded=padded)
        self.rows.graph_row(self.state, "replay")
        if self._graph is not None:
            self._graph.replay()
        elif self.plan is not None:
            self.plan.replay()

    def end(self) -> None:
        """Waits for the replay that runs, and fires the row that ends it."""
        if self._graph is not None:
            torch.cuda.synchronize()
        self.rows.graph_row(self.state, "replayed")

    def differences(self) -> list[str]:
        """What of the step, as it would launch now, the captured graph does not do.  The step runs."""
        now = record(self.step.run, self.step.buffers())
        return ["nothing is captured"] if self.plan is None else self.plan.differences(now)

    def _places(self) -> dict[str, Any]:
        return {name: place(buffer) for name, buffer in self.step.buffers().items()}

    def _capture(self, row: str) -> None:
        self.observe()
        self.rows.graph_row(self.state, row)
        try:
            self.plan, self._graph = self._record()
        except BaseException:
            self.rows.graph_row(self.state, "discard_graph")
            self.plan = self._graph = None
            raise

    def _record(self) -> tuple[Plan, torch.cuda.CUDAGraph | None]:
        buffers = self.step.buffers()
        if not any(buffer.is_cuda for buffer in buffers.values()):
            return record(self.step.run, buffers), None
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            for _ in range(WARM_UPS):
                self.step.run()
        torch.cuda.current_stream().wait_stream(side)
        record(self.step.run, buffers)  # outside of a capture a host read is one clear line, not a broken stream
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            plan = record(self.step.run, buffers)
        return plan, graph
