"""Drives SGLang's real Scheduler by chance, with a worker that has no model. Runs in the engine's own environment.

    python tests/engines/sglang_scheduler_runs.py --model gpt-oss-20b:9@1 --how "overlapped scheduler" --steps 1000

Prints one line of JSON per run. ``--faults`` plants faults, one at a time.
"""

import argparse
import json
import logging
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from vllm_planting import changed

from hybridkv_ref.adapters.sglang_build import prepare
from hybridkv_ref.adapters.sglang_scheduler import WAYS, SchedulerDriver, ways
from hybridkv_ref.adapters.sglang_workload import MODELS

warnings.filterwarnings("ignore")
logging.disable(logging.CRITICAL)
prepare()

from sglang.srt.managers import schedule_batch, scheduler  # noqa: E402  once the engine can be imported
from sglang.srt.mem_cache import common, memory_pool  # noqa: E402

FAULTS: dict[str, tuple[str, Any, str, Callable[[Any], Any]]] = {}
"""name -> (way, owner, attribute, old -> new)."""


def fault(
    name: str, owner: Any, attribute: str, how: str = "scheduler"
) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    def enter(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
        FAULTS[name] = (how, owner, attribute, change)
        return change

    return enter


@fault("a row leaves out what was hit", memory_pool.ReqToTokenPool, "write")
def _(old: Any) -> Any:
    def write(self: Any, indices: Any, values: Any) -> None:
        if isinstance(indices[1], slice) and indices[1].start == 0 and len(values):
            values = values.flip(0)
        old(self, indices, values)

    return write


@fault("the window slides two tokens early", common, "free_swa_out_of_window_slots")
def _(old: Any) -> Any:
    def slide(req: Any, at: int, *, sliding_window_size: int, **kwargs: Any) -> None:
        old(req, at, sliding_window_size=sliding_window_size - 2, **kwargs)

    vars(schedule_batch).update(free_swa_out_of_window_slots=slide)
    return slide


@fault("a chunk is not handed to the tree", scheduler.Scheduler, "stash_chunked_request")
def _(old: Any) -> Any:
    return lambda self, req: None


@fault("decoding writes where the last token lies", schedule_batch, "alloc_for_decode", "overlapped scheduler")
def _(old: Any) -> Any:
    def alloc(batch: Any, token_per_req: int) -> Any:
        slots = old(batch, token_per_req)
        return slots.roll(1)

    return alloc


def run(model: str, how: str, seed: int, steps: int) -> dict[str, Any]:
    """One run until its end, a refusal, or an error of the engine or the worker."""
    begun, driver, done, raised = time.process_time(), SchedulerDriver(model, seed, **WAYS[how]), 0, ""
    try:
        while done < steps and not driver.refusals:
            driver.step()
            done += 1
        if not driver.refusals:
            driver.end()
    except Exception as error:
        raised = f"{type(error).__name__}: {error}".partition("\n")[0]
    return {
        "model": model,
        "how": how,
        "cache": type(driver.cache).__name__,
        "version": driver.header.engine.version,
        "seed": seed,
        "steps": done,
        "events": len(driver.trail),
        "refusals": [f"{r} {', '.join(r.rules)}" for r in driver.refusals[:3]],
        "raised": raised,
        **driver.stats,
        "lost": driver.lost.most_common(5),
        "skipped": driver.oracle.state.skipped,
        "bytes_read": driver.worker.bytes_read,
        "cpu_s": round(time.process_time() - begun, 1),
    }


def hunt(name: str, steps: int = 300, seeds: int = 8) -> dict[str, Any]:
    """Drives the engine with a fault until something is found."""
    how, owner, attribute, change = FAULTS[name]
    old = vars(schedule_batch).get("free_swa_out_of_window_slots")
    with changed(owner, attribute, change):
        for seed in range(1, seeds + 1):
            one = run("gpt-oss-20b:9@1", how, seed, steps)
            if one["refusals"] or one["raised"]:
                break
    vars(schedule_batch).update(free_swa_out_of_window_slots=old)
    return {"fault": name, "found": (one["refusals"] or [one["raised"]])[0], "steps": one["steps"]}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    parser.add_argument("--how", nargs="+", default=list(WAYS), choices=WAYS)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--faults", action="store_true")
    a = parser.parse_args(argv)
    if a.faults:
        for name in FAULTS:
            print(json.dumps(hunt(name)), flush=True)
        return
    for model in a.model:
        for how in a.how:
            if how in ways(model):
                print(json.dumps(run(model, how, a.seed, a.steps)), flush=True)


if __name__ == "__main__":
    main()
