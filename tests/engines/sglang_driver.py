"""Drives SGLang's real radix cache by chance, the oracle in lock step. Runs in the engine's own environment.

    python tests/engines/sglang_driver.py --model gpt-oss-20b@16 gpt-oss-20b:9@1 --steps 2000 --seed 1

Prints one line of JSON: steps, events, refusals, and what the engine's hits were worth against the longest sound ones.
"""

import argparse
import json
import sys
import time
import warnings
from typing import Any

from hybridkv_ref.adapters.sglang_driver import Driver
from hybridkv_ref.adapters.sglang_workload import MODELS

warnings.filterwarnings("ignore")


def drive(a: argparse.Namespace, model: str, seed: int) -> dict[str, Any]:
    """One run until its end or the first refusal."""
    begun = time.process_time()
    driver = Driver(model, seed, a.pages, a.window_pages, a.cache)
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
        "cache": type(driver.cache).__name__,
        "version": driver.header.engine.version,
        "model": model,
        "seed": seed,
        "steps": done,
        "events": driver.events,
        "refusals": [f"{r} {', '.join(r.rules)}" for r in driver.refusals[:3]],
        **driver.stats,
        "lost": driver.lost.most_common(5),
        "missing": driver.missing,
        "skipped": driver.oracle.state.skipped,
        "cpu_s": round(time.process_time() - begun, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", nargs="+", default=list(MODELS))
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, nargs="+", default=[1])
    parser.add_argument("--pages", type=int, default=0, help="of full attention's pool")
    parser.add_argument("--window-pages", type=int, default=0, help="of the window's pool")
    parser.add_argument("--cache", default="", help="the cache's class, where a release has several")
    parser.add_argument("--show", type=int, default=0, help="events to print before a refusal")
    a = parser.parse_args()
    refused = 0
    for model in a.model:
        for seed in a.seed:
            one = drive(a, model, seed)
            refused += len(one["refusals"])
            print(json.dumps(one), flush=True)
    return int(refused > 0)


if __name__ == "__main__":
    sys.exit(main())
