"""Drives vLLM's real manager by chance, the oracle in lock step. Runs in the engine's own environment.

    python tests/engines/vllm_runs.py --model gpt-oss-20b --steps 2000 --seed 1

Prints one line of JSON: steps, events, refusals, and what the engine's hits were worth against the longest sound ones.
"""

import argparse
import json
import sys
import time
from typing import Any

from hybridkv_ref.adapters.vllm_driver import Driver


def drive(a: argparse.Namespace, model: str, seed: int) -> dict[str, Any]:
    """One run until its end or the first refusal."""
    begun = time.process_time()
    options = {} if a.retention is None else {"retention": a.retention}
    driver = Driver(model, seed, a.blocks, a.depth, a.evict, **options)
    done = 0
    while done < a.steps and not driver.refusals:
        driver.step()
        done += 1
    if not driver.refusals:
        driver.end()
    if driver.refusals and a.show:
        at = driver.refusals[0].index
        for number, event in enumerate(driver.trail[max(0, at - a.show) : at], max(0, at - a.show) + 1):
            print(number, event, file=sys.stderr)
        print(driver.oracle.explain(driver.refusals[0]), file=sys.stderr)
    return {
        "model": model,
        "seed": seed,
        "depth": a.depth,
        "steps": done,
        "events": driver.events,
        "refusals": [f"{r} {', '.join(r.rules)}" for r in driver.refusals[:3]],
        **driver.stats,
        "lost": driver.lost.most_common(5),
        "partial_entries": driver.attached.index.parts,
        "missing": driver.missing,
        "skipped": driver.oracle.state.skipped,
        "cpu_s": round(time.process_time() - begun, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=["gpt-oss-20b"])
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--blocks", type=int, default=0, help="of the pool, the null block included")
    parser.add_argument("--depth", type=int, default=1, help="steps in flight")
    parser.add_argument("--evict", type=float, default=0.02, help="chance per step that cached blocks are evicted")
    parser.add_argument("--retention", type=int, default=None, help="the engine's prefix_cache_retention_interval")
    parser.add_argument("--show", type=int, default=0, help="events to print before a refusal")
    a = parser.parse_args()
    found = [drive(a, model, seed) for model in a.model for seed in a.seed]
    for one in found:
        print(json.dumps(one))
    return int(any(one["refusals"] for one in found))


if __name__ == "__main__":
    sys.exit(main())
