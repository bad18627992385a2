"""The ahead-of-time check: kernels pass, and it fails what must fail. No GPU is needed; a process of its own is."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels compute with torch")
pytest.importorskip("triton", reason="the kernels are compiled by Triton")

from hybridkv_ref.kernels import OPERATIONS

CHECKOUT = Path(__file__).parents[2]
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}

CONTROLS = """
import contextlib, io, json
from hybridkv_ref import layouts
from hybridkv_ref.kernels import aot, compress_pool_quant, copy_blocks, segment_decode

page = layouts.load("fp8_ds_mla_584").page(64)
cases = {
    "spills": compress_pool_quant.aot_case("one_tile", "fp8_ds_mla_584", 512, 128, 0, streamed=128),
    "shared": segment_decode.aot_case("wide_tile", page, 64, True, major=9, tile=128),
    "narrow": copy_blocks.aot_case("unknown_base", aligned=("moves",)),
    "narrow_unit": copy_blocks.aot_case("unit_8", unit=8),
    "broken": segment_decode.aot_case("tile_24", page, 64, True, major=9, tile=24),
    "good": copy_blocks.aot_case("good"),
}
faults = {name: aot.check(case, 90).faults for name, case in cases.items()}
for name in ("good", "narrow_unit"):
    aot.cases = lambda only: [cases["good"], cases[name]]
    with contextlib.redirect_stdout(io.StringIO()) as told:
        status = aot.main(["--arch", "90"])
    faults[f"main, {name}"] = [f"status {status}", f"{told.getvalue().count('FAIL')} failed"]
print(json.dumps(faults))
"""


def aot(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hybridkv_ref.kernels.aot", *arguments],
        env=ENVIRONMENT | environment, cwd=CHECKOUT, capture_output=True, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def controls() -> dict[str, list[str]]:
    """Faults of kernels made to fail, and of one that is good."""
    done = subprocess.run(
        [sys.executable, "-c", CONTROLS], env=ENVIRONMENT, cwd=CHECKOUT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    faults: dict[str, list[str]] = json.loads(done.stdout)
    return faults


@pytest.mark.parametrize(
    ("control", "fault"),
    [
        ("spills", "spills "),  # all 128 HCA rows in one tile
        ("shared", "bytes of shared memory, the limit is"),  # 128 entries of 512 columns at a time
        ("narrow", "has no 128-bit global load"),  # nothing known of the base address
        ("narrow_unit", "has no 128-bit global load"),  # moves in units of 8 bytes
        ("broken", "does not compile"),
    ],
)
def test_a_bad_kernel_fails(controls: dict[str, list[str]], control: str, fault: str) -> None:
    assert any(fault in found for found in controls[control]), controls[control]


def test_a_good_kernel_passes(controls: dict[str, list[str]]) -> None:
    assert controls["good"] == []


def test_one_bad_kernel_is_the_exit_status(controls: dict[str, list[str]]) -> None:
    assert controls["main, good"] == ["status 0", "0 failed"]
    assert controls["main, narrow_unit"] == ["status 1", "1 failed"]


def test_every_kernel_passes_on_sm_90(tmp_path: Path) -> None:
    check_all(tmp_path, "90")


@pytest.mark.deep
def test_every_kernel_passes_on_all(tmp_path: Path) -> None:
    check_all(tmp_path, "80", "90", "100")


@pytest.mark.deep
@pytest.mark.parametrize("arch", [80, 90, 100])
def test_every_launch_of_a_step_and_of_the_gpu_check_compiles(arch: int) -> None:
    """With the shapes and constants of the call, not those that the operation's own cases choose."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("launched.py")), str(arch)],
        env={**ENVIRONMENT, "PYTHONPATH": os.pathsep.join((str(CHECKOUT), ENVIRONMENT.get("PYTHONPATH", "")))},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    faults: dict[str, list[str]] = json.loads(done.stdout)
    assert {launch.split("[")[0] for launch in faults} == set(OPERATIONS)
    assert {launch: found for launch, found in faults.items() if found} == {}


def check_all(folder: Path, *architectures: str) -> None:
    done = aot("--json", str(folder / "aot.json"), "--arch", *architectures)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads((folder / "aot.json").read_text())
    assert {report["kernel"].split("[")[0] for report in reports} == set(OPERATIONS)
    assert {str(report["arch"]) for report in reports} == set(architectures)
    assert all(report["registers"] > 0 and any(int(width) >= 128 for width in report["loads"]) for report in reports)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (("--only", "nothing"), {}, "aot:--only: no kernel's name contains 'nothing'"),
        ((), {"TRITON_INTERPRET": "1"}, "aot:TRITON_INTERPRET: must not be set"),
        (("--only", "v4_page", "--arch", "90", "--json", "/nowhere/at/all.json"), {}, "cannot be written"),
    ],
)
def test_what_cannot_run_is_said_in_one_line(
    arguments: tuple[str, ...], environment: dict[str, str], message: str
) -> None:
    done = aot(*arguments, **environment)
    assert done.returncode == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
