"""Imports only go down the floors of the house, and each module has its place.

A module may import modules of its own room and of any lower floor. Rooms of one floor do not know each other, unless
DOORS says so and why. A new module is entered in ROOMS, a new room in FLOORS; a name that is in no file is taken out.
"""

import ast
import graphlib
import itertools
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
PACKAGE = "hybridkv_ref"
FOLDERS = ("kernels", "model_checks", "spec")  # at the top of the checkout, importable only inside the package

# Lowest floor first.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("ground",),
    ("expression",),
    ("tables", "geometry", "traces"),
    ("machines", "model_checks"),
    ("recovery", "kernels"),
    ("allocator", "oracle", "simulation"),
    ("adapters", "decoder"),
    ("graphs",),
    ("front", "conformance", "gpu_check"),
)

# Names inside the package; "" is the package itself.
ROOMS: dict[str, tuple[str, ...]] = {
    "ground": ("collector", "errors", "paths"),
    "expression": ("expr", "compile_py"),
    "tables": (
        "spec_files",
        "names",
        "tables",
        "ties",
        "rows",
        "needs",
        "need_functions",
        "loader",
        "statements",
        "rules",
        "event_map",
        "export",
        "graph",
    ),
    "geometry": ("layouts", "models", "io_unit"),
    "traces": ("events", "request_traces", "trace_reader", "workloads"),
    "machines": ("machine", "lanes", "row_faults", "row_traces"),
    "model_checks": (
        "model_checks",
        "model_checks.agreement",
        "model_checks.base",
        "model_checks.cache",
        "model_checks.canonical",
        "model_checks.check",
        "model_checks.crash",
        "model_checks.cvc5_opinion",
        "model_checks.deadness",
        "model_checks.deep",
        "model_checks.explore",
        "model_checks.explorers",
        "model_checks.fair_cycles",
        "model_checks.finite",
        "model_checks.frames",
        "model_checks.generator_probes",
        "model_checks.handoff_order",
        "model_checks.houdini",
        "model_checks.houdini_templates",
        "model_checks.induction",
        "model_checks.instances",
        "model_checks.interleave",
        "model_checks.ledger",
        "model_checks.liveness",
        "model_checks.model_text",
        "model_checks.murphi",
        "model_checks.mutants",
        "model_checks.mutation",
        "model_checks.mutation_run",
        "model_checks.obligations",
        "model_checks.planted_faults",
        "model_checks.promela",
        "model_checks.queries",
        "model_checks.random_states",
        "model_checks.recovery_equality",
        "model_checks.report",
        "model_checks.rumur",
        "model_checks.samples",
        "model_checks.second_opinion",
        "model_checks.smt",
        "model_checks.space",
        "model_checks.spacer",
        "model_checks.spin",
        "model_checks.tasks",
        "model_checks.thread_models",
        "model_checks.thread_programs",
        "model_checks.vector",
        "model_checks.verifiers",
        "model_checks.witnesses",
    ),
    "recovery": ("recovery", "exact_start", "fast_hit", "policy"),
    "oracle": (
        "oracle",
        "oracle_blocks",
        "oracle_choices",
        "native",
        "native_source",
        "oracle_claims",
        "oracle_code",
        "oracle_compiled",
        "oracle_coverage",
        "oracle_entities",
        "oracle_hits",
        "oracle_index",
        "oracle_joint",
        "oracle_pins",
        "oracle_ranks",
        "oracle_records",
        "oracle_requests",
        "oracle_row",
        "oracle_state",
        "oracle_steps",
        "oracle_tables",
        "oracle_tiers",
        "oracle_transfers",
        "trace_shrink",
        "validate",
        "validate_report",
    ),
    "kernels": (
        "kernels",
        "kernels._bits",
        "kernels._lse",
        "kernels._pages",
        "kernels._triton",
        "kernels.aot",
        "kernels.cases",
        "kernels.compress_pool_quant",
        "kernels.copy_blocks",
        "kernels.dispatch",
        "kernels.gather_dequant",
        "kernels.index_build",
        "kernels.indexer_logits",
        "kernels.judged",
        "kernels.merge_lse",
        "kernels.random_cases",
        "kernels.ring_gather",
        "kernels.segment_decode",
        "kernels.tail_append",
        "kernels.topk_select",
    ),
    "allocator": (
        "allocator",
        "allocator.abi",
        "allocator.admission",
        "allocator.allocator",
        "allocator.arena",
        "allocator.book",
        "allocator.environment",
        "allocator.eviction",
        "allocator.geometry",
        "allocator.handoffs",
        "allocator.hits",
        "allocator.index",
        "allocator.ledger",
        "allocator.lockstep",
        "allocator.media",
        "allocator.media_choice",
        "allocator.media_direct",
        "allocator.object_file",
        "allocator.objects",
        "allocator.pipelines",
        "allocator.prefetch",
        "allocator.rebuild",
        "allocator.records",
        "allocator.refinement",
        "allocator.replay",
        "allocator.requests",
        "allocator.reshape",
        "allocator.segment_bytes",
        "allocator.spills",
        "allocator.tiers",
        "allocator.writer",
    ),
    "simulation": (
        "sim_cache",
        "sim_drain",
        "sim_events",
        "sim_machine",
        "sim_plan",
        "sim_report",
        "sim_request",
        "sim_store",
        "sim_tree",
        "simulate",
    ),
    "decoder": (
        "decoder",
        "decoder_allocator",
        "decoder_attention",
        "decoder_demo",
        "decoder_geometry",
        "decoder_math",
        "decoder_plan",
        "decoder_recurrent",
        "decoder_reuse",
        "decoder_segments",
        "decoder_session",
        "decoder_state",
        "decoder_store",
        "decoder_weights",
    ),
    "graphs": ("batch_memory", "batch_step", "graphs", "launch_plan"),
    "gpu_check": (
        "gpu_check",
        "gpu_check.__main__",
        "gpu_check.baselines",
        "gpu_check.bench",
        "gpu_check.exactness",
        "gpu_check.graph_part",
        "gpu_check.inputs",
        "gpu_check.offload",
        "gpu_check.plot",
        "gpu_check.records",
        "gpu_check.speed",
    ),
    "conformance": (
        "conformance",
        "conformance.capabilities",
        "conformance.engine",
        "conformance.engines",
        "conformance.loading",
        "conformance.gate",
        "conformance.lockstep",
        "conformance.machine",
        "conformance.plugin",
        "conformance.process",
        "conformance.records",
        "conformance.reference",
        "conformance.reference_events",
        "conformance.report",
        "conformance.run",
        "conformance.simple",
        "conformance.test_rules",
        "table_rules",
    ),
    "adapters": (
        "adapters",
        "adapters.engine_report",
        "adapters.engine_suite",
        "adapters.engines",
        "adapters.event_stream",
        "adapters.sglang",
        "adapters.sglang_build",
        "adapters.sglang_driver",
        "adapters.sglang_features",
        "adapters.sglang_records",
        "adapters.sglang_runner",
        "adapters.sglang_scheduler",
        "adapters.sglang_server",
        "adapters.sglang_tree",
        "adapters.sglang_workload",
        "adapters.vllm",
        "adapters.vllm_build",
        "adapters.vllm_connector",
        "adapters.vllm_driver",
        "adapters.vllm_features",
        "adapters.vllm_index",
        "adapters.vllm_runner",
        "adapters.vllm_scheduler",
        "adapters.vllm_tables",
        "adapters.vllm_watched",
    ),
    "front": ("", "cli", "commands", "terminal"),
}

# (from, to): rooms of one floor of which the first may import the second.
DOORS = {("model_checks", "machines")}  # exploration fires the very rows that the machine fires

# Never, whatever floors and doors say.
APART = {("allocator", "oracle"), ("oracle", "allocator"), ("model_checks", "allocator")}

# Rooms that may import only these modules of the package, besides their own.
ONLY = {"kernels": {"errors", "paths", "layouts"}}  # kernels know tensors, not segments

# Libraries that only these rooms may import, lazily or not: the rest starts fast, and runs where they are missing.
LIBRARIES = {
    "hypothesis": {"conformance"},
    "networkx": {"model_checks"},
    "torch": {"adapters", "allocator", "decoder", "gpu_check", "graphs", "kernels", "conformance"},
    "triton": {"kernels"},
    "z3": {"model_checks"},
}


def module_files(package: Path) -> dict[str, Path]:
    """The package's modules by their name inside it, through the links to the folders at the top."""
    found = {}
    for folder, _, names in os.walk(package, followlinks=True):
        for name in names:
            if name.endswith(".py"):
                path = Path(folder, name)
                parts = path.relative_to(package).with_suffix("").parts
                found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imported_names(path: Path, module: str = "") -> Iterator[tuple[int, str]]:
    """(line, dotted name) of each import anywhere in a file: also under a condition, in a function, by import_module.

    `from a import b` gives a.b, whether b is a module or not. `module` is the file's own name, for relative imports.
    """
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, name.name) for name in names)
            case ast.ImportFrom(module=base, names=names, level=level):
                if level:
                    levels_up = level - (path.name == "__init__.py")
                    inside = f"{PACKAGE}.{module}".rstrip(".").split(".")
                    base = ".".join([*inside[: len(inside) - levels_up], *([base] if base else [])])
                yield from ((node.lineno, f"{base}.{name.name}") for name in names)
            case ast.Call(
                func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name


def target_module(name: str, modules: Mapping[str, Path]) -> str | None:
    """The package's module that holds the imported `name`; None if it lies outside the package."""
    if name.split(".")[0] != PACKAGE:
        return None
    inside = name.split(".")[1:]
    while inside and ".".join(inside) not in modules:
        inside.pop()
    return ".".join(inside)


def room_table(rooms: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """The room of each module."""
    return {module: room for room, modules in rooms.items() for module in modules}


def listing_faults(package: Path, rooms: Mapping[str, tuple[str, ...]] = ROOMS) -> list[str]:
    """Modules without a room or with two, rooms without a floor, and names without a module."""
    modules, listed = set(module_files(package)), list(itertools.chain.from_iterable(rooms.values()))
    floored = set(itertools.chain.from_iterable(FLOORS))
    return [
        *(f"{name!r} has no room" for name in sorted(modules - set(listed))),
        *(f"{name!r} is listed and does not exist" for name in sorted(set(listed) - modules)),
        *(f"{name!r} has two rooms" for name in sorted(set(listed)) if listed.count(name) > 1),
        *(f"room {room!r} is on no floor" for room in sorted(rooms) if room not in floored),
    ]


def import_faults(package: Path, rooms: Mapping[str, tuple[str, ...]] = ROOMS) -> list[str]:
    """Every import that the house forbids, as `<module>:<line>: <reason>`; modules without a room are passed over."""
    modules, room_of = module_files(package), room_table(rooms)
    floor_of = {room: number for number, floor in enumerate(FLOORS) for room in floor}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    faults = []
    for module, path in sorted(modules.items()):
        if (room := room_of.get(module)) is None:
            continue
        for line, name in imported_names(path, module):
            root, target = name.split(".")[0], target_module(name, modules)
            if root in FOLDERS:
                faults.append(f"{module}:{line}: {root} is importable only inside {PACKAGE}")
            if root in LIBRARIES and room not in LIBRARIES[root]:
                faults.append(f"{module}:{line}: {room} may not import {root}")
            if target is None or (other := room_of.get(target)) is None:
                continue
            graph[module].add(target)
            if room == other:
                continue
            if (room, other) in APART:
                faults.append(f"{module}:{line}: {room} never imports {other}")
            elif room in ONLY and target not in ONLY[room]:
                faults.append(f"{module}:{line}: {room} may not import {target}")
            elif floor_of[other] > floor_of[room]:
                faults.append(f"{module}:{line}: {target or PACKAGE} ({other}) is on a higher floor than {room}")
            elif floor_of[other] == floor_of[room] and (room, other) not in DOORS:
                faults.append(f"{module}:{line}: no door from {room} to {other}")
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        faults.append(f"circle: {' < '.join(error.args[1])}")
    return faults


def test_every_module_has_its_place() -> None:
    assert listing_faults(CHECKOUT / PACKAGE) == []


def test_imports_only_go_down() -> None:
    assert import_faults(CHECKOUT / PACKAGE) == []


def test_tests_import_the_folders_only_inside_the_package() -> None:
    faults = [
        f"{path.relative_to(CHECKOUT)}:{line}: {name}"
        for path in sorted((CHECKOUT / "tests").rglob("*.py"))
        for line, name in imported_names(path)
        if name.split(".")[0] in FOLDERS
    ]
    assert faults == []


def test_spec_is_data_only() -> None:
    assert sorted((CHECKOUT / "spec").rglob("*.py")) == []


# A small house under the real floors, doors and bans.
SMALL: dict[str, tuple[str, ...]] = {
    "ground": ("errors",),
    "tables": ("tables", "loader"),
    "geometry": ("layouts",),
    "machines": ("machine",),
    "model_checks": ("model_checks", "model_checks.explore"),
    "kernels": ("kernels", "kernels.copy"),
    "allocator": ("allocator",),
    "oracle": ("oracle",),
    "front": ("", "cli", "commands", "terminal"),
    "conformance": ("conformance",),
}


def build_house(folder: Path, **sources: str) -> Path:
    """A package with SMALL's modules, empty save for `sources`, and with the links of a checkout."""
    package = folder / PACKAGE
    for name in ("kernels", "model_checks"):
        (folder / name).mkdir()
    package.mkdir()
    for name in ("kernels", "model_checks"):
        (package / name).symlink_to(Path("..", name))
    for module in itertools.chain.from_iterable(SMALL.values()):
        path = package.joinpath(*module.split(".")) if module else package
        path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        path.write_text(sources.get(module.replace(".", "__") or "package", ""))
    return package


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("tables", "from hybridkv_ref.errors import InputError"),
        ("tables", "from hybridkv_ref import loader"),
        ("cli", "import hybridkv_ref\nfrom hybridkv_ref.allocator import Pool"),
        ("model_checks__explore", "from hybridkv_ref.machine import fire\nimport networkx"),
        ("kernels__copy", "import torch\nimport triton.language as tl\nfrom hybridkv_ref.layouts import Layout"),
        ("conformance", "import hypothesis"),
    ],
)
def test_legal_imports_pass(module: str, source: str, tmp_path: Path) -> None:
    package = build_house(tmp_path, **{module: source})
    assert listing_faults(package, SMALL) == []
    assert import_faults(package, SMALL) == []


@pytest.mark.parametrize(
    ("sources", "fault"),
    [
        ({"tables": "import hybridkv_ref.machine"}, "tables:1: machine (machines) is on a higher floor than tables"),
        (
            {"tables": "from hybridkv_ref import machine"},
            "tables:1: machine (machines) is on a higher floor than tables",
        ),
        ({"tables": "from . import machine"}, "tables:1: machine (machines) is on a higher floor than tables"),
        (
            {"kernels": "from ..machine import fire"},
            "kernels:1: kernels may not import machine",
        ),
        (
            {"tables": "def late():\n    from hybridkv_ref.machine import fire"},
            "tables:2: machine (machines) is on a higher floor than tables",
        ),
        (
            {"tables": "from importlib import import_module\nimport_module('hybridkv_ref.machine')"},
            "tables:2: machine (machines) is on a higher floor than tables",
        ),
        (
            {"errors": "from hybridkv_ref import __version__"},
            "errors:1: hybridkv_ref (front) is on a higher floor than ground",
        ),
        ({"allocator": "import hybridkv_ref.oracle"}, "allocator:1: allocator never imports oracle"),
        ({"oracle": "import hybridkv_ref.allocator"}, "oracle:1: oracle never imports allocator"),
        (
            {"model_checks__explore": "import hybridkv_ref.allocator"},
            "model_checks.explore:1: model_checks never imports allocator",
        ),
        ({"machine": "import hybridkv_ref.model_checks.explore"}, "machine:1: no door from machines to model_checks"),
        ({"kernels__copy": "import hybridkv_ref.tables"}, "kernels.copy:1: kernels may not import tables"),
        ({"cli": "import hybridkv_ref.conformance"}, "cli:1: no door from front to conformance"),
        ({"cli": "from kernels import copy"}, "cli:1: kernels is importable only inside hybridkv_ref"),
        ({"tables": "import model_checks.explore"}, "tables:1: model_checks is importable only inside hybridkv_ref"),
        ({"tables": "import spec"}, "tables:1: spec is importable only inside hybridkv_ref"),
        ({"cli": "def check():\n    import hypothesis.stateful"}, "cli:2: front may not import hypothesis"),
        ({"machine": "import z3"}, "machine:1: machines may not import z3"),
        (
            {"tables": "import hybridkv_ref.loader", "loader": "import hybridkv_ref.tables"},
            "circle: loader < tables < loader",
        ),
    ],
)
def test_illegal_imports_are_found(sources: dict[str, str], fault: str, tmp_path: Path) -> None:
    assert import_faults(build_house(tmp_path, **sources), SMALL) == [fault]


def test_a_misplaced_listing_is_found(tmp_path: Path) -> None:
    package = build_house(tmp_path)
    (package / "model_checks" / "new.py").touch()
    wrong = {**SMALL, "machines": ("machine", "errors", "gone"), "attic": ()}
    assert listing_faults(package, wrong) == [
        "'model_checks.new' has no room",
        "'gone' is listed and does not exist",
        "'errors' has two rooms",
        "room 'attic' is on no floor",
    ]
