"""The GPU check itself: its report, its refusals, its deadlines, and that it fails when something is wrong.

On a machine without a GPU every part runs on the CPU at tiny sizes, through the same code, and measures nothing.
"""

import dataclasses
import inspect
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

pytest.importorskip("torch", reason="the check is of tensors")

import torch
from torch import Tensor

from hybridkv_ref import graphs, load_tables
from hybridkv_ref.batch_memory import BatchMemory, Saved
from hybridkv_ref.batch_step import BatchStep
from hybridkv_ref.gpu_check import __main__ as command
from hybridkv_ref.gpu_check import baselines, exactness, graph_part, offload, speed
from hybridkv_ref.gpu_check.bench import Bench
from hybridkv_ref.gpu_check.inputs import STRIDES, VARIANTS, Work, entry_page, source
from hybridkv_ref.gpu_check.plot import BAR, COLOURS, svg
from hybridkv_ref.gpu_check.records import NOT_MEASURED, Figure, PartReport, Report
from hybridkv_ref.kernels import OPERATIONS, _triton, operation
from hybridkv_ref.machine import Machine

CHECKOUT = Path(__file__).resolve().parents[1]
torch.set_num_threads(1)


def new_bench(seconds: float = 300.0) -> Bench:
    return Bench(torch.device("cpu"), True, time.monotonic() + seconds)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a whole tiny run that passed."""
    folder = tmp_path_factory.mktemp("gpu_check") / "new"
    assert command.main(["--out", str(folder), "--tiny"]) == 0
    return folder


def test_the_report_has_every_part_and_no_number_without_a_device(tiny: Path) -> None:
    raw = (tiny / "gpu_check.json").read_bytes()
    report = msgspec.json.decode(raw, type=Report, strict=True)
    assert report.device == "cpu"
    assert {"hybridkv-ref", "python", "torch", "triton"} <= set(report.versions)
    assert [(part.name, part.budget) for part in report.parts] == list(command.BUDGETS.items())
    figures = [figure for part in report.parts for figure in part.figures]
    assert {(f.value, f.device, f.share, f.why) for f in figures} == {(NOT_MEASURED, "", None, "no CUDA device")}
    assert all(check.passed for part in report.parts for check in part.checks)


def test_every_variant_and_stride_is_compared_and_would_be_measured(tiny: Path) -> None:
    report = msgspec.json.decode((tiny / "gpu_check.json").read_bytes(), type=Report)
    names = [f"{variant.operation}: {variant.name}" for variant in VARIANTS]
    assert {variant.operation for variant in VARIANTS} == set(OPERATIONS)
    assert [figure.name for figure in report.figures("speed")] == names
    checked = {check.name for part in report.parts if part.name == "exactness" for check in part.checks}
    assert checked == {*names, *(f"{name}: random cases" for name in OPERATIONS)}
    for stride in STRIDES:
        assert sum(f"stride {stride:,}" in name for name in names) == 3
    compared = {figure.name for figure in report.figures("compare")}
    assert {name.split(":")[0] for name in compared} == set(OPERATIONS)
    assert {name.rsplit(", ", 1)[1] for name in compared} == {"eager", "compiled"}


def test_the_plot_names_every_kernel_and_draws_no_bar_that_was_not_measured(tiny: Path) -> None:
    texts, bars = read_svg((tiny / "gpu_check.svg").read_bytes())
    for variant in VARIANTS:
        assert f"{variant.operation}: {variant.name}" in texts
    assert "not measured: no CUDA device" in texts
    assert bars == []


def read_svg(document: bytes) -> tuple[list[str], list[tuple[str, float]]]:
    """Texts, and (what of, width) of bars; those of the legend are as wide as they are high."""
    space = "{http://www.w3.org/2000/svg}"
    root = ElementTree.fromstring(document)
    texts = [str(text.text or "") for text in root.iter(f"{space}text")]
    of = {colour: name for name, colour in COLOURS.items()}
    boxes = [rect for rect in root.iter(f"{space}rect") if rect.get("fill") in of]
    bars = [(of[str(b.get("fill"))], float(str(b.get("width")))) for b in boxes if b.get("width") != f"{BAR:.1f}"]
    return texts, bars


def made_up(name: str, share: float) -> Figure:
    return Figure(name=name, unit="TB/s", value=4 * share, device="made up", limit="copy ceiling", share=share)


def test_bars_are_as_long_as_their_share() -> None:
    parts = (
        PartReport(
            name="speed", budget=1, wall=1, figures=(made_up("a", 0.8), made_up("a, also", 1), made_up("b", 0.2))
        ),
        PartReport(name="compare", budget=1, wall=1, figures=(made_up("a, eager", 0.4), made_up("a, compiled", 1.25))),
        PartReport(name="offload", budget=1, wall=1, figures=(made_up("s, engine", 0.3), made_up("s, gathered", 0.9))),
    )
    texts, bars = read_svg(svg(Report(device="made up", versions={}, parts=parts)))
    assert [of for of, _ in bars] == ["this kernel", "eager", "compiled", "this kernel", "engine", "gathered"]
    whole = bars[2][1]  # cut at the limit
    lengths = [width / whole for _, width in bars]
    assert lengths == pytest.approx([0.8, 0.4, 1.0, 0.2, 1 / 3, 1.0], abs=0.01)
    assert "125%, 5 TB/s" in texts
    assert not any("also" in text for text in texts)


def test_numbers_where_there_is_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The arithmetic of a measurement: every run is said to take a millisecond on a device that is made up."""
    monkeypatch.setattr(Bench, "seconds", lambda bench, run: 1e-3)
    monkeypatch.setattr(Bench, "device_name", "made up")
    bench = new_bench()
    speed.ceilings(bench)
    top = speed.measured(bench)
    assert top is not None
    assert (top.copy, top.product) == pytest.approx((2 * (1 << 16) / 1e-3, 2 * 64**3 / 1e-3))
    speed.enter(bench, "moves", Work(1 << 16), lambda: None, top)
    speed.enter(bench, "multiplies", Work(1 << 10, 4 * 64**3), lambda: None, top)
    moves, multiplies, also = bench.figures[-3:]
    assert (moves.unit, moves.limit, multiplies.unit, multiplies.limit) == (
        "TB/s",
        speed.COPY,
        "TFLOP/s",
        speed.PRODUCT,
    )
    assert (moves.value, moves.share, multiplies.share) == pytest.approx(((1 << 16) / 1e9, 0.5, 2.0))
    assert (also.name, also.unit, also.share) == ("multiplies, also", "TB/s", None)
    assert also.value == pytest.approx((1 << 10) / 1e9)
    assert {figure.device for figure in bench.figures} == {"made up"}


def test_a_measurement_that_breaks_is_no_number() -> None:
    def breaks() -> None:
        raise RuntimeError("out of memory\nand much more")

    bench = new_bench()
    assert bench.measure("x", "TB/s", 1.0, breaks) is None
    assert bench.figures == [Figure(name="x", unit="TB/s", why="RuntimeError: out of memory")]


@pytest.mark.parametrize(
    "wrong",
    [
        {"value": 1.0},
        {"value": 1.0, "device": "gpu", "why": "no"},
        {"device": "gpu", "why": "no CUDA device"},
        {"why": "no CUDA device", "share": 0.5},
        {},
    ],
)
def test_a_number_needs_a_device_and_no_number_a_reason(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^x: "):
        Figure(name="x", unit="TB/s", **wrong)


def test_without_a_gpu_it_refuses_in_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "hybridkv_ref.gpu_check", "--out", str(tmp_path / "out")],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, cwd=CHECKOUT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "gpu_check:device: no CUDA device (--tiny tries the check itself on the CPU)\n"
    assert done.stdout == ""
    assert not (tmp_path / "out").exists()


def test_without_triton_it_refuses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(_triton, "AVAILABLE", False)
    assert command.main(["--out", str(tmp_path)]) == 2


def nothing(bench: Bench) -> None:
    """A part that does nothing."""
    del bench


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in which only the exactness part does anything."""
    for module, name in ((graph_part, "run"), (offload, "run"), (speed, "ceilings")):
        monkeypatch.setattr(module, name, nothing)
    monkeypatch.setattr(speed, "kernels", lambda bench, top: None)
    monkeypatch.setattr(baselines, "run", lambda bench, top: None)


def test_a_folder_that_cannot_be_made_is_one_line_and_nothing_runs(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run", lambda *arguments: pytest.fail("it ran"))
    (tmp_path / "file").write_text("")
    assert command.main(["--out", str(tmp_path / "file" / "x"), "--tiny"]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/file/x: cannot be written: Not a directory\n"


@pytest.mark.usefixtures("quick")
def test_a_failed_check_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(operation("topk_select"), "torch_version", lambda *arguments: arguments[2])
    assert command.main(["--out", str(tmp_path), "--tiny"]) == 1
    report = msgspec.json.decode((tmp_path / "gpu_check.json").read_bytes(), type=Report)
    assert {check.name for check in report.failed} == {"topk_select: 512 of many", "topk_select: random cases"}
    assert "FAIL topk_select: 512 of many: Wrong: " in capsys.readouterr().out


@pytest.mark.usefixtures("quick")
def test_a_part_that_breaks_is_a_failure_and_the_others_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def breaks(bench: Bench) -> None:
        raise RuntimeError("the driver is gone")

    monkeypatch.setattr(exactness, "run", nothing)
    monkeypatch.setattr(offload, "run", breaks)
    assert command.main(["--out", str(tmp_path), "--tiny"]) == 1
    report = msgspec.json.decode((tmp_path / "gpu_check.json").read_bytes(), type=Report)
    assert [check.detail for check in report.failed] == ["RuntimeError: the driver is gone"]
    assert len(report.parts) == len(command.BUDGETS)


def test_what_there_is_no_time_for_is_said() -> None:
    report = command.run(torch.device("cpu"), tiny=True, whole=0.0)
    checks = [check for part in report.parts for check in part.checks]
    assert checks
    assert {check.passed for check in checks} == {None}
    assert {check.detail for check in checks} == {"not reached: out of time"}
    assert {figure.why for part in report.parts for figure in part.figures} == {"out of time"}
    assert report.failed == ()


def test_the_budgets_leave_room_below_four_minutes() -> None:
    assert sum(command.BUDGETS.values()) <= command.WHOLE
    assert command.WHOLE <= 4 * 60 - 30  # imports, and what one item (a compilation) may take beyond its part's end


@pytest.mark.parametrize("name", baselines.BY_HAND)
def test_a_baseline_by_hand_does_what_the_operation_does(name: str) -> None:
    """To bf16: otherwise the comparison of their speeds means nothing."""
    variant = next(v for v in VARIANTS if (v.operation, v.name) in baselines.COMPARED and v.operation == name)
    arguments, _ = variant.build(source(torch.device("cpu")), variant.few)
    output = {"copy_blocks": "target", "indexer_logits": "logits"}.get(name, "out")
    found = []
    for run in (getattr(operation(name), name), baselines.baseline(name)):
        fresh = arguments | {output: torch.empty_like(arguments[output]).fill_(0)}
        run(**fresh)
        found.append(fresh[output].double())
    if name == "copy_blocks":  # which moves whole strides, the padding behind the entries too
        found = [one[:, : entry_page().nbytes] for one in found]
    assert (found[0] - found[1]).abs().max() <= 2.0**-6 * found[0].abs().max()
    assert found[0].abs().max() > 0


def test_limits_are_the_slower_of_two() -> None:
    top = speed.Ceilings(copy=100.0, product=10.0)
    assert top.best(Work(200)) == (speed.COPY, 2.0)
    assert top.best(Work(200, 30)) == (speed.PRODUCT, 3.0)


# ---- Planted faults ----

Version = Callable[..., Any]


OUTPUTS = {
    "tail_append": "state", "copy_blocks": "target", "indexer_logits": "logits", "index_build": "cache",
    "ring_gather": "out", "gather_dequant": "out",
}  # fmt: skip


def _first_output(name: str, change: Callable[[Tensor], None]) -> Callable[[Version], Version]:
    """What runs right, and then changes one of its outputs."""

    def plant(version: Version) -> Version:
        def wrong(*arguments: Any) -> Any:
            result = version(*arguments)
            names = list(inspect.signature(operation(name).reference).parameters)
            change(arguments[names.index(OUTPUTS[name])])
            return result

        return wrong

    return plant


def _flip_bit(tensor: Tensor) -> None:
    """The lowest bit of some bytes in the middle of everything."""
    flat = tensor.view(torch.uint8).flatten() if tensor.is_floating_point() else tensor.flatten()
    flat[: len(flat) // 2] ^= 4


def _skip_halo(version: Version) -> Version:
    def wrong(state: Any, row_slots: Tensor, *rest: Any) -> Any:
        overlap = rest[-2]
        slots = row_slots.clone()
        slots[:, :overlap] = -1
        return version(state, slots, *rest)

    return wrong


def _one_less(version: Version) -> Version:
    """Attention that leaves the last entry out."""

    def wrong(q: Any, rows: Any, entries: Any, first: Any, count: Tensor, *rest: Any) -> Any:
        return version(q, rows, entries, first, (count - 1).clamp(min=0), *rest)

    return wrong


def _natural_only(version: Version) -> Version:
    """A merge that forgets the sink."""

    def wrong(partials: Any, partial_lse: Any, sink: Any, *rest: Any) -> Any:
        return version(partials, partial_lse, None, *rest)

    return wrong


def _late_ties(version: Version) -> Version:
    """A choice that prefers the later of two equal scores."""

    def wrong(logits: Tensor, visible: Tensor, chosen: Tensor) -> Tensor:
        chosen.fill_(-1)
        for row, (scores, seen) in enumerate(zip(logits, visible.tolist(), strict=True)):
            pairs = [(-float(s), -i) for i, s in enumerate(scores[:seen].tolist()) if s > -torch.inf]
            best = sorted(-i for _, i in sorted(pairs)[: chosen.shape[1]])
            chosen[row, : len(best)] = torch.tensor(best, dtype=torch.int32)
        return chosen

    return wrong


FAULTS: dict[str, tuple[str, Callable[[Version], Version]]] = {
    "an entry without its halo": ("compress_pool_quant", _skip_halo),
    "attention without the last entry": ("segment_decode", _one_less),
    "a merge without the sink": ("merge_lse", _natural_only),
    "the later of two ties": ("topk_select", _late_ties),
    "a flipped bit in a copy": ("copy_blocks", _first_output("copy_blocks", _flip_bit)),
    "a flipped bit in a state row": ("tail_append", _first_output("tail_append", _flip_bit)),
    "a flipped bit in an entry": ("index_build", _first_output("index_build", _flip_bit)),
    "a flipped bit in a window": ("ring_gather", _first_output("ring_gather", _flip_bit)),
    "half of what was read": ("gather_dequant", _first_output("gather_dequant", lambda t: void(t.mul_(0.5)))),
    "scores a little off": ("indexer_logits", _first_output("indexer_logits", lambda t: void(t.mul_(1.01)))),
}


def void(value: object) -> None:
    """A change returns nothing."""
    del value


def test_every_operation_has_a_planted_fault() -> None:
    assert {name for name, _ in FAULTS.values()} == set(OPERATIONS)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_wrong_kernel_fails_its_checks_and_no_other(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    name, plant = FAULTS[fault]
    module = operation(name)
    monkeypatch.setattr(module, "torch_version", plant(module.torch_version))
    monkeypatch.setattr(exactness, "VARIANTS", [v for v in VARIANTS if v.operation in (name, "copy_blocks")])
    monkeypatch.setattr(exactness, "OPERATIONS", (name,))
    bench = new_bench()
    exactness.run(bench)
    failed = {check.name.split(":")[0] for check in bench.checks if check.passed is False}
    assert failed == {name}


def checks_of(bench: Bench) -> dict[str, bool | None]:
    return {check.name.split(":")[0].split(",")[0]: check.passed for check in bench.checks}


def test_a_table_without_its_guard_fails_the_graph_part(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = load_tables()
    for text, failing in (("graph.captured == topology", "rebound pool refused"), ("graph.padded", "padding")):
        events = [
            dataclasses.replace(event, guards=tuple(g for g in event.guards if g.text != text))
            if event.id == "graph.replay"
            else event
            for event in tables.events
        ]
        machine = Machine(dataclasses.replace(tables, events=tuple(events)))
        monkeypatch.setattr(graph_part, "TableRows", lambda machine=machine: graphs.TableRows(machine))
        bench = new_bench()
        graph_part.run(bench)
        assert any(passed is False and name.startswith(failing) for name, passed in checks_of(bench).items())


def test_a_restore_that_mixes_up_blocks_fails_the_graph_part(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = BatchMemory.restore

    def wrong(memory: BatchMemory, row: int, saved: Saved) -> None:
        mixed = {at: host.flip(0) if at[1] == "window" else host for at, host in saved.bytes.items()}
        restore(memory, row, Saved(saved.blocks, mixed))

    monkeypatch.setattr(BatchMemory, "restore", wrong)
    bench = new_bench()
    graph_part.run(bench)
    assert checks_of(bench)["restore to other blocks"] is False
    assert checks_of(bench)["poisoned replay"] is True


def test_a_kernel_that_is_wrong_alike_everywhere_shows_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays equal the eager step, for both are wrong; the launches do not equal their references."""
    module = operation("merge_lse")
    monkeypatch.setattr(module, "torch_version", _natural_only(module.torch_version))
    bench = new_bench()
    graph_part.run(bench)
    failed = [check for check in bench.checks if check.passed is False]
    assert [check.name for check in failed] == ["every launch of the decoder's step against float64"]
    assert "merge_lse: " in failed[0].detail


def test_a_step_that_peeks_is_not_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    run = BatchStep.run

    def peeking(step: BatchStep) -> None:
        run(step)
        step.logits.mul_(float(step.logits.isnan().sum()) + 1.0)

    monkeypatch.setattr(BatchStep, "run", peeking)
    bench = new_bench()
    graph_part.run(bench)
    assert {check.passed for check in bench.checks} == {False}
    assert "reads a value on the host" in bench.checks[0].detail


def test_a_copy_that_loses_bytes_fails_the_offload_part(monkeypatch: pytest.MonkeyPatch) -> None:
    module = operation("copy_blocks")
    right = module.torch_version

    def wrong(source: Tensor, target: Tensor, moves: Tensor, unit: int) -> None:
        right(source, target, moves[:-1], unit)

    monkeypatch.setattr(module, "torch_version", wrong)
    bench = new_bench()
    offload.run(bench)
    assert bench.checks
    assert {check.passed for check in bench.checks} == {False}
