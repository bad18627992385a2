"""The command ``hybridkv``.  Each command imports what it needs when it runs.

Exit codes: 0 as it should be, 1 something is not proved or a mutant survived, 2 input that cannot be used (one line on
standard error: file, place, reason).
"""

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR

if TYPE_CHECKING:
    from hybridkv_ref.models import Footprint
    from hybridkv_ref.request_traces import Request

UNITS = {
    "": 1,
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}


def size(text: str) -> int:
    """A number of bytes: 1048576, 80GiB, 1.5TB (units of 1000 without the i, of 1024 with it)."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?(?:/s)?\s*", text, re.IGNORECASE)
    if match is None:
        raise InputError(f"'{text}': not a size such as 80GiB or 2TB")
    return int(float(match[1]) * UNITS[(match[2] or "").lower()])


def write_whole(path: Path, data: bytes) -> None:
    """Writes under a temporary name and renames, so that nobody sees half a file."""
    try:
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        Path(name).replace(path)
    except OSError as error:
        Path(name).unlink(missing_ok=True)
        raise InputError(f"{path}: cannot be written: {error.strerror}") from None


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on standard error; nothing where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def cmd_check(args: argparse.Namespace) -> int:
    """Proves and searches everything about the tables."""
    import msgspec
    from rich.console import Console

    from hybridkv_ref.model_checks.check import check
    from hybridkv_ref.model_checks.report import markdown, render

    if args.lockstep < 0:
        raise InputError(f"--lockstep {args.lockstep:g}: expected 0 or more seconds")
    with progress_bar("proving") as progress:
        report = check(args.spec, args.kind, not args.no_cache, args.jobs, progress, args.deep)
    if args.json:
        write_whole(args.json, msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
    if args.markdown:
        write_whole(args.markdown, markdown(report).encode())
    Console().print(render(report))
    same = _in_lockstep(args.lockstep, args.spec) if args.lockstep else True
    return 0 if report.summary.passed and same else 1


def _in_lockstep(seconds: float, spec: Path) -> bool:
    """Drives the allocator beside the tables; whether nothing differed."""
    from hybridkv_ref.allocator.lockstep import lockstep

    run = lockstep(seconds, spec=spec)
    print(
        f"lock step: {run.steps:,} steps, {run.rows:,} rows of {run.events} events, {run.requests:,} requests, "
        f"{run.hits:,} hits read: {len(run.faults)} differences"
    )
    for fault in run.faults[:10]:
        print(f"  {fault}")
    return not run.faults


def cmd_mutate(args: argparse.Namespace) -> int:
    """Changes every row in every small way and names what notices."""
    import msgspec
    from rich.console import Console

    from hybridkv_ref.model_checks.mutation_run import mutate, mutation_table

    with progress_bar("mutating") as progress:
        result = mutate(args.spec, args.row, args.jobs, progress)
    if args.json:
        print(msgspec.json.format(msgspec.json.encode(result), indent=1).decode())
    else:
        Console().print(mutation_table(result))
    return 0 if result.summary.passed else 1


def cmd_export(args: argparse.Namespace) -> int:
    """The tables, their JSON Schema or that of event traces, on standard output or into a file."""
    from hybridkv_ref.export import export_json, schema_json
    from hybridkv_ref.loader import load_tables

    if args.events:
        import json

        from hybridkv_ref.events import schema

        data = json.dumps(schema(), indent=1, sort_keys=True).encode() + b"\n"
    else:
        data = schema_json() if args.schema else export_json(load_tables(args.spec))
    if args.out:
        write_whole(args.out, data)
    else:
        sys.stdout.write(data.decode())
    return 0


def cmd_graph(args: argparse.Namespace) -> int:
    """A kind's state diagram."""
    from hybridkv_ref.graph import mermaid, write_svg
    from hybridkv_ref.loader import load_tables

    tables = load_tables(args.spec)
    if args.svg:
        write_svg(tables, args.kind, args.svg)
    else:
        sys.stdout.write(mermaid(tables, args.kind))
    return 0


def cmd_models(args: argparse.Namespace) -> int:
    """The models, or the bytes that one request takes in one of them."""
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from hybridkv_ref.models import footprint, load_model, model_names

    if not args.name:
        models = [load_model(n, args.spec) for n in model_names(args.spec)]
        if args.json:
            print(
                msgspec.json.encode(
                    [{"name": m.name, "kinds": sorted({g.kind for g in m.groups})} for m in models]
                ).decode()
            )
            return 0
        table = Table("model", "groups", "confidence")
        for model in models:
            table.add_row(model.name, ", ".join(f"{g.layers}x {g.name}" for g in model.groups), model.confidence)
        Console().print(table)
        return 0
    found = footprint(load_model(args.name, args.spec), args.tokens, args.kv_dtype, args.index_dtype)
    if args.json:
        print(msgspec.json.encode(found).decode())
    else:
        Console().print(_footprint_table(found))
    return 0


def _footprint_table(found: "Footprint") -> "object":
    from rich.table import Table

    table = Table(title=f"{found.name}, {found.tokens:,} tokens")
    for name in ("group", "kind", "layers", "bytes/token", "bytes"):
        table.add_column(name, justify="left" if name in ("group", "kind") else "right")
    for group in found.groups:
        table.add_row(group.name, group.kind, str(group.layers), f"{group.bytes_per_token:,.4g}", f"{group.bytes:,}")
    for name, count in (("total", found.total_bytes), ("state", found.state_bytes), ("padded", found.padded_bytes)):
        table.add_row(name, "", "", "", f"{count:,} ({count / 1024**3:.3f} GiB)")
    return table


def cmd_simulate(args: argparse.Namespace) -> int:
    """A trace of requests through the table machines of a model."""
    import msgspec
    from rich.console import Console

    from hybridkv_ref.models import load_model
    from hybridkv_ref.request_traces import read_trace
    from hybridkv_ref.sim_report import report_table
    from hybridkv_ref.simulate import IO_BANDWIDTH, simulate
    from hybridkv_ref.workloads import generate

    requests: Iterator[Request] = (
        read_trace(args.trace) if args.trace else generate(args.workload, args.requests, args.seed)
    )
    if args.memory == "real":
        return _on_real_memory(args, requests)
    report = simulate(
        requests,
        load_model(args.model, args.spec),
        size(args.gpu_memory),
        size(args.disk),
        args.alignment,
        args.recovery,
        size(args.io_bandwidth) if args.io_bandwidth else IO_BANDWIDTH,
        spec=args.spec,
    )
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        Console().print(report_table(report))
    return 0


def cmd_validate(args: argparse.Namespace) -> int:
    """Validates a trace of an engine's events; exit code 1 if a row refuses one, 2 if the trace cannot be read."""
    import msgspec
    from rich.console import Console

    from hybridkv_ref.validate import validate
    from hybridkv_ref.validate_report import render

    with progress_bar("validating") as progress:
        report = validate(args.file, args.model, args.strict_hash, args.spec, progress, jobs=args.jobs or 1)
    for warning in report.warnings:
        print(f"hybridkv: warning: {args.file}:1: {warning}", file=sys.stderr)
    if args.json:
        print(msgspec.json.encode(report).decode())
    else:
        Console().print(render(report))
    if report.fault:
        print(f"hybridkv: {report.fault}", file=sys.stderr)
        return 2
    return 1 if report.refusals else 0


def _on_real_memory(args: argparse.Namespace, requests: "Iterator[Request]") -> int:
    import msgspec
    from rich.console import Console
    from rich.table import Table

    from hybridkv_ref.allocator.replay import replay
    from hybridkv_ref.models import load_model

    if args.recovery != "full" or args.io_bandwidth:
        raise InputError("simulate:memory: real memory recovers in full, at the speed of its disk")
    model = load_model(args.model, args.spec)
    report = replay(requests, model, size(args.gpu_memory), size(args.disk), args.alignment, args.spec)
    if args.json:
        print(msgspec.json.encode(report).decode())
        return 0
    table = Table("on real memory", "")
    for name, value in msgspec.structs.asdict(report).items():
        shown = ", ".join(f"{k} {v:,}" for k, v in value.items()) if isinstance(value, dict) else value
        table.add_row(name.replace("_", " "), f"{shown:,}" if isinstance(shown, int) else str(shown))
    Console().print(table)
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    from hybridkv_ref.workloads import DEFAULT_WORKLOAD, WORKLOADS

    top = argparse.ArgumentParser(
        prog="hybridkv", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=(run.__doc__ or "").strip().rstrip("."), description=run.__doc__)
        sub.set_defaults(run=run)
        sub.add_argument(
            "--spec", type=Path, default=SPEC_DIR, metavar="DIR", help="tables to read (default: the package's)"
        )
        return sub

    sub = command("check", cmd_check)
    sub.add_argument("--kind", default="", help="only rows and claims of this kind, no searches")
    sub.add_argument("--deep", action="store_true", help="also mutants, skipped obligations, other evaluators")
    sub.add_argument(
        "--lockstep", type=float, default=0, metavar="SECONDS", help="also drive the allocator beside the tables"
    )
    sub.add_argument("--json", type=Path, metavar="FILE", help="write the whole report as JSON")
    sub.add_argument("--markdown", type=Path, metavar="FILE", help="write a summary as Markdown")
    sub.add_argument("--no-cache", action="store_true", help="prove everything again and store nothing")
    sub.add_argument("--jobs", type=int, default=0, help="processes (default: one per core)")

    sub = command("mutate", cmd_mutate)
    sub.add_argument("--row", default="", help="only mutants whose name contains this text")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--jobs", type=int, default=0, help="processes (default: one per core)")

    sub = command("export", cmd_export)
    sub.add_argument("--schema", action="store_true", help="the JSON Schema instead of the tables")
    sub.add_argument("--events", action="store_true", help="the JSON Schema of a line of an event trace")
    sub.add_argument("--out", type=Path, metavar="FILE", help="write to a file")

    sub = command("validate", cmd_validate)
    sub.add_argument("file", help="JSON Lines; gzip and zstd by name; - for standard input")
    sub.add_argument("--model", help="take the cache groups of this model instead of the header's")
    sub.add_argument("--json", action="store_true", help="print JSON")
    sub.add_argument("--strict-hash", action="store_true", help="refuse a trace of other tables")
    sub.add_argument("--jobs", type=int, default=1, help="processes, over which engine instances are spread")

    sub = command("graph", cmd_graph)
    sub.add_argument("kind", help="a kind of segment")
    sub.add_argument("--svg", type=Path, metavar="FILE", help="write SVG instead of printing Mermaid")

    sub = command("models", cmd_models)
    sub.add_argument("name", nargs="?", default="", help="a model (default: list them)")
    sub.add_argument("--tokens", type=int, default=131072)
    sub.add_argument("--kv-dtype", choices=("bf16", "fp8"))
    sub.add_argument("--index-dtype", choices=("bf16", "fp8", "fp4"))
    sub.add_argument("--json", action="store_true", help="print JSON")

    sub = command("simulate", cmd_simulate)
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
    sub.add_argument("--workload", choices=WORKLOADS, default=DEFAULT_WORKLOAD, help="what to generate without a trace")
    sub.add_argument("--requests", type=int, default=1000, help="how many to generate")
    sub.add_argument("--seed", type=int, default=0)
    sub.add_argument("--json", action="store_true", help="print JSON")
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
