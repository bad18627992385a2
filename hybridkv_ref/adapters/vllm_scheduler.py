"""Drives vLLM's real Scheduler by chance, with a runner that has no model, the oracle in lock step.

The scheduler calls its own manager, which is watched as ever. While it schedules, events wait: the step that a call of
the manager is for is then told as the runner prepared it, with the blocks in the runner's own tables. A step is done
when the runner has run it. Under a connector some requests load tokens, at once or later, and some loads fail.
"""

import random
from collections import Counter, deque
from itertools import compress
from operator import not_
from typing import Any

from hybridkv_ref import events as ev
from hybridkv_ref.adapters.vllm_build import LENGTH, build_scheduler, describe, units
from hybridkv_ref.adapters.vllm_driver import MODELS, Prompts, geometry, longest
from hybridkv_ref.adapters.vllm_runner import Job, Runner
from hybridkv_ref.adapters.vllm_watched import Planned, Watched
from hybridkv_ref.events import Event
from hybridkv_ref.oracle import Oracle
from hybridkv_ref.oracle_records import Refusal

WAYS: dict[str, dict[str, Any]] = {
    "scheduler": {},
    "scheduler, drafts": {"drafts": 3},
    "scheduler, by priority": {"policy": "priority"},
    "asynchronous scheduler": {"asynchronous": True},
    "asynchronous scheduler, drafts": {"asynchronous": True, "drafts": 3},
    "scheduler, connector": {"connector": True},
    "asynchronous scheduler, connector": {"asynchronous": True, "connector": True},
}
"""What a driver may be told."""


class SchedulerDriver:
    """Arrivals, aborts and resets around a real Scheduler; ``depth`` 2 where it is asynchronous."""

    def __init__(
        self, name: str, seed: int, asynchronous: bool = False, policy: str = "fcfs", drafts: int = 0, blocks: int = 0,
        connector: bool = False,
    ) -> None:  # fmt: skip
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher

        self.chance, self.drafts, self.policy = random.Random(seed), drafts, policy
        blocks = blocks or MODELS.get(name, 100)
        model = geometry(name)
        self.scheduler, config = build_scheduler(
            model, blocks, asynchronous, policy, drafts, seed if connector else None
        )
        whole, least = units(config)
        self.header = describe(config, model, least)
        self.oracle = Oracle(self.header)
        self.trail: list[Event] = []
        self.refusals: list[Refusal] = []
        self.stats: Counter[str] = Counter()
        self.lost: Counter[str] = Counter()
        self.waiting: list[Event | Planned] = []
        self.scheduling = False
        self.attached = Watched(self.scheduler.kv_cache_manager, self.header, self.hear)
        self.missing = self.attached.missing
        states = [g.shape == "state" for g in model.groups]
        self.runner = Runner(self.header, self.attached.needs, states, blocks, LENGTH, self.chance)
        self.depth = 2 if asynchronous else 1
        self.queue: deque[tuple[Any, dict[str, Job], list[Any]]] = deque()
        self.connector = self.scheduler.connector
        self.loads: list[Any] = []
        self.ending = False
        self.prompts = Prompts(self.chance, whole, longest(self.header, blocks))
        self.hasher = get_request_block_hasher(least, sha256)
        self.salts: dict[str, int] = {}

    # -- judging ---------------------------------------------------------------------------------------------------

    def hear(self, event: Event | Planned) -> None:
        """Takes one event in, now or when the step is known."""
        if self.scheduling or isinstance(event, Planned):
            self.waiting.append(event)
            return
        self.trail.append(event)
        self.refusals += self.oracle.feed(event).refusals
        if isinstance(event, ev.Lookup):
            self.judge(event)

    def judge(self, event: ev.Lookup) -> None:
        """The engine's hit against the longest one."""
        known = self.oracle.state.requests.get(event.req)
        if known is None or known.lost:
            return
        best = self.oracle.expected_hit(event.req)
        self.stats["lookups"] += 1
        self.stats["hit_tokens"] += event.used
        self.stats["best_tokens"] += best.r
        if event.used > best.r:
            self.stats["longer"] += 1
        elif event.used < best.r:
            self.stats["shorter"] += 1
            self.lost["some group"] += best.r - event.used

    def tell(self, jobs: dict[str, Job]) -> None:
        """What waited, with the steps as they are."""
        events, self.waiting = self.waiting, []
        never = set[str]()  # the manager was asked, and then the request gave way in the same step
        for event in events:
            if not isinstance(event, Planned):
                if not (isinstance(event, ev.Complete) and event.step in never):
                    self.hear(event)
            elif event.req not in jobs:
                never.add(event.step)
                self.stats["gave_way"] += 1
            else:
                job = jobs[event.req]
                job.step = event.step
                for _, earlier, _ in self.queue:
                    if (before := earlier.get(event.req)) is not None and before.refused:
                        self.attached.ran(before)
                if job.hi > event.told:
                    self.hear(ev.Draft(job.name, job.hi - max(job.lo, event.told)))
                for one in self.runner.events(job, event.first):
                    self.hear(one)

    # -- the engine's loop -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step of the engine, and what comes and goes beside it."""
        c, scheduler = self.chance, self.scheduler
        if len(scheduler.waiting) < 3 and c.random() < 0.5:
            self.arrive()
        if scheduler.requests and c.random() < 0.05:
            self.abort(c.choice(list(scheduler.requests)))
        if c.random() < 0.01:
            self.stats["resets"] += bool(scheduler.reset_prefix_cache(self.idle() and c.random() < 0.5))
        self.turn()

    def idle(self) -> bool:
        """Only running requests hold blocks: else the engine refuses to preempt all, "not supported yet"."""
        late = self.connector is not None and self.depth > 1 and self.queue
        running = {request.request_id for request in self.scheduler.running}
        return not late and all(n in running or not any(life.tables) for n, life in self.attached.lives.items())

    def turn(self) -> None:
        """The engine schedules a step, and runs the oldest."""
        scheduler = self.scheduler
        self.scheduling = True
        output = scheduler.schedule()
        jobs = self.runner.prepare(output, self.salts)
        self.scheduling = False
        self.tell(jobs)
        self.stats["scheduled"] += len(jobs)
        self.stats["preempted"] += len(output.preempted_req_ids)
        self.queue.append((output, jobs, self.loads_now()))
        while len(self.queue) >= self.depth:
            self.finish_step()

    def finish_step(self) -> None:
        """The oldest step runs, and the scheduler hears of it; then drafts for the next one, some of them wrong."""
        from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

        output, jobs, loads = self.queue.popleft()
        for load in loads:
            self.move(load, whole=True)
        self.runner.run(list(jobs.values()))
        for job in jobs.values():
            self.attached.ran(job)
        names = {name: place for place, name in enumerate(jobs)}
        result = ModelRunnerOutput(
            list(names), names, [list(job.out) for job in jobs.values()], kv_connector_output=self.arrived()
        )
        self.scheduler.update_from_output(output, result)
        for job in jobs.values():
            self.runner.heard(job)
            self.stats["drafts_refused"] += job.refused
            self.stats["drafts_accepted"] += max(len(job.out) - 1, 0)
        if self.drafts and self.depth == 1:
            ready = [job for job in jobs.values() if job.out]
            guesses = [self.runner.propose(job, self.drafts) for job in ready]
            self.scheduler.update_draft_token_ids(DraftTokenIds([job.name for job in ready], guesses))

    # -- a connector -----------------------------------------------------------------------------------------------

    def loads_now(self) -> list[Any]:
        """Loads that this step waits for; those that come later are kept apart."""
        if self.connector is None:
            return []
        begun, self.connector.begun = self.connector.begun, []
        self.stats["loads"] += len(begun)
        self.loads += [load for load in begun if load.later]
        for load in begun:
            # Not ordered with the steps in flight: the bytes may be there before they run, or long after.
            if load.later and self.chance.random() < 0.5:
                self.move(load, whole=True)
        return [load for load in begun if not load.later]

    def move(self, load: Any, whole: bool) -> None:
        """The bytes of a load."""
        self.runner.load(load.tokens, self.salts[load.name], load.tables, (load.lo, load.hi), whole)

    def arrived(self) -> Any:
        """What the connector's workers say after a step: loads that ended, some badly, and blocks that were sent."""
        from vllm.v1.outputs import KVConnectorOutput

        if self.connector is None:
            return None
        ended, self.loads = self.apart(self.loads)
        sent, kept = self.apart(sorted(self.connector.sending))
        self.connector.sending = set(kept)
        failed = {load.name for load in ended if self.chance.random() < 0.25}
        for load in ended:
            self.move(load, load.name not in failed)
            self.attached.loaded(load.request, load.name not in failed)
            self.connector.loading.discard(load.name)
        self.stats["loads_failed"] += len(failed)
        return KVConnectorOutput(
            finished_sending=set(sent), finished_recving={load.name for load in ended}, failed_recving=failed
        )

    def apart(self, waiting: list[Any]) -> tuple[list[Any], list[Any]]:
        """Those whose time has come, and the others."""
        due = [self.ending or self.chance.random() < 0.4 for _ in waiting]
        return list(compress(waiting, due)), list(compress(waiting, map(not_, due)))

    # -- requests --------------------------------------------------------------------------------------------------

    def arrive(self) -> None:
        """A request, some under a salt."""
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        self.stats["begun"] += 1
        name = f"r{self.stats['begun']}"
        salt = "s" if self.chance.random() < 0.1 else None
        self.salts[name] = 1 if salt else 0
        limits = SamplingParams(max_tokens=self.chance.randint(1, 40), ignore_eos=True)
        chosen = {"priority": self.chance.randint(0, 3)} if self.policy == "priority" else {}
        self.scheduler.add_request(
            Request(name, self.prompts.draw(), limits, None, block_hasher=self.hasher, cache_salt=salt, **chosen)
        )

    def abort(self, name: str) -> None:
        """The client gives up, also while a step of it is in flight."""
        from vllm.v1.request import RequestStatus

        self.stats["aborted"] += 1
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def end(self) -> None:
        """Ends all that runs."""
        self.ending = True
        for name in list(self.scheduler.requests):
            self.abort(name)
        while self.queue:
            self.finish_step()
        while self.scheduler.requests:
            self.turn()
