"""Drives vLLM's real Scheduler by chance, with a runner that has no model. Runs in the engine's own environment.

    python tests/engines/vllm_scheduler_runs.py --model gpt-oss-20b --how asynchronous --steps 1000

Prints one line of JSON per run. ``--faults`` plants faults, one at a time.
"""

import argparse
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.sched import scheduler as module
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm_patched import PATCHES, patch
from vllm_planting import changed

from hybridkv_ref.adapters.vllm_scheduler import WAYS, SchedulerDriver

FAULTS: dict[str, tuple[str, str, Any, str, Callable[[Any], Any]]] = {}
"""name -> (model, way, owner, attribute, old -> new)."""


def fault(
    name: str, owner: Any, attribute: str, model: str = "gpt-oss-20b", how: str = "scheduler"
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def enter(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        FAULTS[name] = (model, how, owner, attribute, change)
        return change

    return enter


def new_data(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A fault in what the runner is told of a new request."""

    def made(old: Any) -> Any:
        def from_request(cls: Any, *args: Any, **kwargs: Any) -> Any:
            return change(old.__func__(cls, *args, **kwargs))

        return classmethod(from_request)

    return made


def old_data(change: Callable[[Any, Any], None]) -> Callable[[Any], Any]:
    """A fault in what the runner is told of requests that it knows; ``change`` gets the data and the scheduler."""

    def made(old: Any) -> Any:
        def make(self: Any, *args: Any, **kwargs: Any) -> CachedRequestData:
            data: CachedRequestData = old(self, *args, **kwargs)
            change(data, self)
            return data

        return make

    return made


def swapped(groups: Sequence[list[int]] | None) -> Any:
    """New blocks in the wrong order."""
    return None if groups is None else tuple(numbers[::-1] for numbers in groups)


@fault("new blocks are told in the wrong order", module.Scheduler, "_make_cached_request_data")
@old_data
def _(data: Any, scheduler: Any) -> None:
    data.new_block_ids = [swapped(groups) for groups in data.new_block_ids]


@fault("a resumed request is told as one that runs on", module.Scheduler, "_make_cached_request_data")
@old_data
def _(data: Any, scheduler: Any) -> None:
    data.resumed_req_ids = set()


@fault("the tables of two groups are told for one another", NewRequestData, "from_request")
@new_data
def _(data: Any) -> Any:
    data.block_ids = data.block_ids[::-1]
    return data


@fault("null blocks are left out of a new request's table", NewRequestData, "from_request")
@new_data
def _(data: Any) -> Any:
    data.block_ids = tuple([n for n in numbers if n] for numbers in data.block_ids)
    return data


@fault("a token after a hit is not computed", NewRequestData, "from_request")
@new_data
def _(data: Any) -> Any:
    data.num_computed_tokens += bool(data.num_computed_tokens)
    return data


@fault("a running request's position is one behind", module.Scheduler, "_make_cached_request_data")
@old_data
def _(data: Any, scheduler: Any) -> None:
    data.num_computed_tokens = [max(at - 1, 0) for at in data.num_computed_tokens]


@fault("a step in flight is forgotten when the window slides", HybridKVCacheCoordinator, "remove_skipped_blocks",
       how="asynchronous scheduler")  # fmt: skip
def _(old: Any) -> Any:
    def remove(self: Any, name: str, processed: int, *args: Any, **kwargs: Any) -> Any:
        return old(self, name, processed + 1 if processed > 64 else processed, *args, **kwargs)

    return remove


@fault("drafts in flight are forgotten when the window slides", HybridKVCacheCoordinator, "remove_skipped_blocks",
       how="asynchronous scheduler, drafts")  # fmt: skip
def _(old: Any) -> Any:
    def remove(self: Any, name: str, processed: int, *args: Any, **kwargs: Any) -> Any:
        return old(self, name, processed + 4 if processed > 64 else processed, *args, **kwargs)

    return remove


@fault("blocks go back while a step in flight reads them", module.Scheduler, "_request_blocks_can_be_freed",
       how="asynchronous scheduler, connector")  # fmt: skip
def _(old: Any) -> Any:
    return lambda self, request: True


@fault("a load that failed counts as computed", module.Scheduler, "_handle_failed_recving", how="scheduler, connector")
def _(old: Any) -> Any:
    return lambda self, names: set()


def drive(model: str, how: str, seed: int, steps: int) -> dict[str, Any]:
    """One run until its end, the first refusal or the first wrong byte."""
    begun, driver, done, stopped = time.process_time(), SchedulerDriver(model, seed, **WAYS[how]), 0, ""
    try:
        while done < steps and not driver.refusals:
            driver.step()
            done += 1
        if not driver.refusals:
            driver.end()
    except Exception as error:
        stopped = f"{type(error).__name__}: {error}"
    return {
        "model": model,
        "how": how,
        "seed": seed,
        "steps": done,
        "events": len(driver.trail),
        "refusals": [f"{r} {', '.join(r.rules)}" for r in driver.refusals[:3]],
        "stopped": stopped,
        **driver.stats,
        "bytes_written": driver.runner.bytes_written,
        "bytes_read": driver.runner.bytes_read,
        "skipped": driver.oracle.state.skipped,
        "cpu_s": round(time.process_time() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["gpt-oss-20b"])
    parser.add_argument("--how", nargs="+", default=["scheduler"], choices=WAYS)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--faults", action="store_true", help="each planted fault instead, one at a time")
    parser.add_argument("--patch", choices=PATCHES, help="a minimal patch of the engine, in memory")
    a = parser.parse_args()
    if a.patch:
        patch(a.patch)
    if a.faults:
        for name in FAULTS:
            model, how, *change = FAULTS[name]
            with changed(*change):
                runs = (drive(model, how, seed, a.steps) for seed in a.seed)
                # The first history that shows it, or the last one.
                for run in runs:
                    if run["refusals"] or run["stopped"]:
                        break
                print(json.dumps({"fault": name, **run}), flush=True)
        return
    for model in a.model:
        for how in a.how:
            for seed in a.seed:
                print(json.dumps(drive(model, how, seed, a.steps)), flush=True)


if __name__ == "__main__":
    main()
