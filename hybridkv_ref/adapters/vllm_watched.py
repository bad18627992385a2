"""vLLM's real Scheduler as events: its manager is watched, and a runner says what each step is and when it ends.

Three reductions. Where blocks are given back under a step in flight, the step is told as done (the device runs in
order, so whoever gets them writes later), as is one that refused drafts before the next step of its request (which the
device places by what was accepted). A preempted request that got a token meanwhile begins a new life, for its prompt
has grown. A request whose blocks the scheduler keeps until no step in flight writes them ends only then.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from hybridkv_ref import events as ev
from hybridkv_ref.adapters.vllm import Attached
from hybridkv_ref.adapters.vllm_runner import Job
from hybridkv_ref.adapters.vllm_tables import Life
from hybridkv_ref.events import Event


@dataclass(frozen=True)
class Planned:
    """Stands where the manager was asked for the blocks of a step, until the runner says what the step is."""

    step: str
    req: str
    first: bool
    told: int


class Watched(Attached):
    """A scheduler's manager: steps are what the runner says, and end when it says so."""

    def __init__(self, manager: Any, header: ev.Header, hear: Callable[[Event | Planned], None]) -> None:
        super().__init__(manager, header, hear)
        self.plan: Callable[[Planned], None] = hear
        self.deferred: list[tuple[list[Any], Any]] = []
        if hasattr(manager, "pop_blocks_for_free"):
            self.pop, self.give = manager.pop_blocks_for_free, self.pool.free_blocks
            manager.pop_blocks_for_free, self.pool.free_blocks = self._pop_blocks_for_free, self._free_blocks

    def _done(self, life: Life, position: int) -> None:
        """Left to the runner."""

    def _life(self, request: Any) -> Life:
        name, life = request.request_id, self.lives.get(request.request_id)
        if life is not None and not any(life.tables) and request.num_tokens > life.told:
            self.sink(ev.Abort(name))
            del self.lives[name]
        return super()._life(request)

    def _dispatch(self, name: str, life: Life, lo: int, hi: int, reads: list[ev.Span]) -> str:
        self.count += 1
        step = f"{name}#{self.count}"
        self.plan(Planned(step=step, req=name, first=not life.sent, told=life.told))
        return step

    def _pop_blocks_for_free(self, request: Any) -> Any:
        """The manager forgets a request that ended; the scheduler keeps its blocks for a while."""
        blocks = self.pop(request)
        self.deferred.append((list(blocks), request))
        return blocks

    def _free_blocks(self, ordered: Iterable[Any]) -> None:
        """Blocks go back to the pool, some of them late: only then is their request told as ended."""
        blocks = list(ordered)
        self.give(blocks)
        for place, (kept, request) in enumerate(self.deferred):
            if kept == blocks[::-1]:
                del self.deferred[place]
                self._left(request, self._life(request))
                return

    def _progress(self, request: Any, life: Life) -> None:
        """Tokens that the scheduler took in: which drafts were refused is told with the step."""
        life.sent = min(life.sent, request.num_computed_tokens)
        super()._progress(request, life)

    def _cache_blocks(self, request: Any, num_computed_tokens: int) -> Any:
        self._progress(request, self._life(request))
        return super()._cache_blocks(request, num_computed_tokens)

    def ran(self, job: Job) -> None:
        """A step has run, and is not told as done already."""
        life = self.lives.get(job.name)
        if life is not None and life.steps and life.steps[0][0] == job.step:
            life.steps.pop(0)
            self.sink(ev.Complete(job.step))
            if job.refused:
                self.sink(ev.Accept(job.name, job.kept))
                self.sink(ev.Reject(job.name, job.kept))
