"""The command ``hybridkv``: its arguments and exit codes.

Exit codes: 0 as it should be, 1 something is not proved or a mutant survived, 2 input that cannot be used (one line on
standard error: file, place, reason).
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from hybridkv_ref import commands
from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR


def parser() -> argparse.ArgumentParser:
    """The command line."""
    from hybridkv_ref.adapters.engines import ENGINES
    from hybridkv_ref.workloads import DEFAULT_WORKLOAD, WORKLOADS

    top = argparse.ArgumentParser(
        prog="hybridkv", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    added = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], tables: bool = True) -> argparse.ArgumentParser:
        sub = added.add_parser(name, help=(run.__doc__ or "").strip().rstrip("."), description=run.__doc__)
        sub.set_defaults(run=run)
        if tables:
            sub.add_argument(
                "--spec", type=Path, default=SPEC_DIR, metavar="DIR", help="tables to read (default: the package's)"
            )
        return sub

    sub = command("check", commands.cmd_check)
    sub.add_argument("--kind", default="", help="only rows and claims of this kind, no searches")
    sub.add_argument("--deep", action="store_true", help="also mutants, other solvers, planted faults, random states")
    sub.add_argument("--infer", action="store_true", help="also infer invariants from templates alone")
    sub.add_argument(
        "--lockstep", type=float, default=0, metavar="SECONDS", help="also drive the allocator beside the tables"
    )
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the whole report as JSON")
    sub.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary as Markdown")
    sub.add_argument("--no-cache", action="store_true", help="prove everything again and store nothing")
    sub.add_argument("--jobs", type=int, default=0, help="processes (default: one per core)")

    sub = command("mutate", commands.cmd_mutate)
    sub.add_argument("--row", default="", help="only mutants whose name contains this text")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--jobs", type=int, default=0, help="processes (default: one per core)")

    sub = command("export", commands.cmd_export)
    sub.add_argument("--schema", action="store_true", help="the JSON Schema instead of the tables")
    sub.add_argument("--events", action="store_true", help="the JSON Schema of a line of an event trace")
    sub.add_argument("--out", type=Path, metavar="FILE", help="write to a file")

    sub = command("validate", commands.cmd_validate)
    sub.add_argument("file", help="JSON Lines; gzip and zstd by name; - for standard input")
    sub.add_argument("--model", help="take the cache groups of this model instead of the header's")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--strict-hash", action="store_true", help="refuse a trace of other tables")
    sub.add_argument("--jobs", type=int, default=1, help="processes, over which engine instances are spread")

    command("native", commands.cmd_native, tables=False)

    sub = command("graph", commands.cmd_graph)
    sub.add_argument("kind", help="a kind of segment")
    sub.add_argument("--svg", type=Path, metavar="FILE", help="write SVG instead of printing Mermaid")

    sub = command("models", commands.cmd_models)
    sub.add_argument("name", nargs="?", default="", help="a model (default: list them)")
    sub.add_argument("--tokens", type=int, default=131072)
    sub.add_argument("--kv-dtype", choices=("bf16", "fp8"))
    sub.add_argument("--index-dtype", choices=("bf16", "fp8", "fp4"))
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("simulate", commands.cmd_simulate)
    sub.add_argument(
        "trace", nargs="?", type=Path, help="Mooncake JSONL, kv-cache-tester JSON or Azure CSV (default: generate)"
    )
    sub.add_argument("--model", required=True)
    sub.add_argument("--gpu-memory", required=True, metavar="SIZE", help="device memory for the cache, e.g. 80GiB")
    sub.add_argument("--disk", default="0", metavar="SIZE", help="durable store (default: none)")
    sub.add_argument("--alignment", type=int, metavar="N", help="tokens (default: the model's)")
    sub.add_argument("--recovery", choices=("full", "bounded", "zero-exact"), default="full")
    sub.add_argument(
        "--memory",
        choices=("tables", "real"),
        default="tables",
        help="real: the reference allocator's arenas and files",
    )
    sub.add_argument("--io-bandwidth", metavar="RATE", help="bytes per second of loads, e.g. 25GB/s")
    sub.add_argument("--events", type=Path, metavar="FILE", help="write what it does, for hybridkv validate")
    sub.add_argument("--workload", choices=WORKLOADS, default=DEFAULT_WORKLOAD, help="what to generate without a trace")
    sub.add_argument("--requests", type=int, default=1000, help="how many to generate")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("demo", commands.cmd_demo)
    sub.add_argument("--requests", type=int, default=8, help="how many to serve")
    sub.add_argument(
        "--capacity", type=int, default=1, metavar="N", help="requests of full length whose state fits the device"
    )
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--json", action="store_true", help="print JSON, a line per request")

    sub = command("events", commands.cmd_events)
    sub.add_argument("input", help="JSON Lines or frames in a file, or a ZMQ address: tcp://127.0.0.1:5557")
    sub.add_argument("--format", required=True, metavar="ENGINE", help="whose events: a file of spec/engines")
    sub.add_argument("--out", type=Path, metavar="FILE", help="write the trace, for hybridkv validate")
    sub.add_argument("--idle", type=float, default=5.0, metavar="SECONDS", help="end after so long without a batch")
    sub.add_argument("--show", type=int, default=20, metavar="N", help="refusals to print")

    sub = command("conform", commands.cmd_conform, tables=False)
    sub.add_argument("engine", help=f"whose environment it is: {' or '.join(ENGINES)}")
    sub.add_argument("--python", required=True, metavar="PATH", help="interpreter of an environment with the engine")
    sub.add_argument("--model", nargs="+", default=[], metavar="NAME", help="default: those of the engine's tests")
    sub.add_argument("--steps", type=int, default=300, metavar="N", help="of each run (default: 300)")
    sub.add_argument("--seed", type=int, default=1)
    sub.add_argument("--out", type=Path, metavar="DIR", help="write report.json, report.md and traces of refusals")
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs one command and returns its exit code."""
    args = parser().parse_args(argv)
    run: Callable[[argparse.Namespace], int] = args.run
    try:
        if getattr(args, "jobs", 0) < 0:
            raise InputError(f"--jobs {args.jobs}: expected 0 or more")
        return run(args)
    except InputError as error:
        print(f"hybridkv: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


if __name__ == "__main__":
    sys.exit(main())
