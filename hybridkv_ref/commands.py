"""The commands of ``hybridkv``: each imports what it needs when it runs, prints, and returns its exit code."""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from hybridkv_ref.errors import InputError
from hybridkv_ref.terminal import progress_bar, size, write_whole

if TYPE_CHECKING:
    from hybridkv_ref.models import Footprint
    from hybridkv_ref.request_traces import Request
    from hybridkv_ref.sim_report import Report


def cmd_check(args: argparse.Namespace) -> int:
    """Proves and searches everything about the tables."""
    import msgspec
    from rich.console import Console

    from hybridkv_ref.model_checks.check import check
    from hybridkv_ref.model_checks.report import markdown, render

    if args.lockstep < 0:
        raise InputError(f"--lockstep {args.lockstep:g}: expected 0 or more seconds")
    with progress_bar("proving") as progress:
        report = check(args.spec, args.kind, not args.no_cache, args.jobs, progress, args.deep, args.infer)
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
    if args.events is not None:
        report = _with_events(args, requests)
    elif args.memory == "real":
        return _on_real_memory(args, requests)
    else:
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


def _with_events(args: argparse.Namespace, requests: "Iterator[Request]") -> "Report":
    """A simulation that tells what it does; the file appears when it is complete."""
    import msgspec

    from hybridkv_ref.models import load_model
    from hybridkv_ref.sim_events import tell

    if args.memory == "real" or size(args.disk) or args.recovery != "full" or args.io_bandwidth:
        raise InputError("simulate:events: told of full recovery without a store, on the memory of the tables")
    model, half = load_model(args.model, args.spec), args.events.with_name(args.events.name + ".part")
    try:
        with half.open("wb") as file:

            def write(record: object) -> None:
                file.write(msgspec.json.encode(record) + b"\n")

            report = tell(requests, model, size(args.gpu_memory), args.alignment, write, write, args.spec)
        half.replace(args.events)
    except OSError as error:
        raise InputError(f"{args.events}: {error.strerror}") from None
    finally:
        half.unlink(missing_ok=True)
    return report


def cmd_demo(args: argparse.Namespace) -> int:
    """A small hybrid decoder serves requests with shared prefixes; each is compared with a run without cache."""
    import msgspec

    from hybridkv_ref.decoder_demo import describe, run

    equal = True
    for served in run(args.requests, args.capacity, args.seed, args.spec):
        equal &= served.equal
        print(msgspec.json.encode(served).decode() if args.json else describe(served))
    return 0 if equal else 1


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


def cmd_native(args: argparse.Namespace) -> int:
    """Compiles the oracle for this Python, to be used where HYBRIDKV_NATIVE=1."""
    from hybridkv_ref.native import build

    print(build())
    return 0


def cmd_events(args: argparse.Namespace) -> int:
    """Validates the event stream that an engine publishes; exit code 1 if a row refuses an event."""
    import msgspec

    from hybridkv_ref.adapters.event_stream import EventStream, StreamJudge, live_batches, read_batches

    stream = EventStream(args.format, args.spec)
    judge, kept = StreamJudge(stream), []
    batches = (
        live_batches(args.input, args.idle)
        if "://" in args.input
        else ((b, place, -1) for b, place in read_batches(Path(args.input)))
    )
    for batch, place, seq in batches:
        for event in stream.batch(batch, place, seq):
            judge.feed(event, place)
            if args.out:
                kept.append(event)
    if not judge.events:
        raise InputError(f"{args.input}:1: no event")
    if args.out:
        lines = [stream.header(stream.groups.values()), *kept]
        write_whole(args.out, b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
    for place, refusal in judge.refusals[: args.show]:
        print(f"{place}: {refusal} ({', '.join(refusal.rules)})")
    notes = [f"{len(judge.refusals)} refused"]
    notes += [f"{stream.gaps} gaps"] if stream.gaps else []
    notes += [f"{stream.untold} removals of unknown entries not judged"] if stream.untold else []
    print(f"{args.input}: {judge.events} events of {len(stream.groups)} groups, {', '.join(notes)}")
    return 1 if judge.refusals else 0


def cmd_conform(args: argparse.Namespace) -> int:
    """Drives a real engine in its own environment; exit code 1 if a row refuses an event or a hit is too long."""
    import msgspec

    from hybridkv_ref.adapters.engine_report import Played, markdown, report, traces
    from hybridkv_ref.adapters.engine_suite import run_there

    if args.steps < 1:
        raise InputError(f"--steps {args.steps}: expected at least 1")
    if args.out:
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"--out {args.out}: cannot be made a folder: {error.strerror}") from None

    def tell(run: Played) -> None:
        said = run.error or (run.refused.message if run.refused else f"{run.events:,} events, nothing refused")
        print(f"{run.model}, {run.how}: {said}", flush=True)

    told = list(run_there(args.engine, args.python, args.model, args.steps, args.seed, tell))
    found = report([one.played for one in told], [one.coverage for one in told])
    if args.out:
        write_whole(args.out / "report.json", msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        write_whole(args.out / "report.md", markdown(found).encode())
        for name, data in traces(found):
            write_whole(args.out / name, data)
    shown = sum(1 for verdict in found.rules.values() if verdict.result == "pass")
    print(f"{found.engine} {found.version}: {found.verdict}: {found.events:,} events, {shown} rules shown")
    if found.open:
        print(f"claimed and not shown: {', '.join(found.open)}")
    return 1 if found.verdict == "fail" else 0
