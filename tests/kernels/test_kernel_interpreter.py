"""Every Triton kernel against the float64 reference, in Triton's interpreter: a child session, reported by name."""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the kernels compute with torch")
pytest.importorskip("triton", reason="the interpreter is Triton's")

from hybridkv_ref.gpu_check.inputs import VARIANTS
from hybridkv_ref.kernels import OPERATIONS

FOLDER = Path(__file__).parent
LAYOUTS = ("fp8_ds_mla_584", "dsv32_656", "uniform_fp8_512", "bf16", "fp32", "index_fp8_132", "index_fp4_68")
TESTS = (
    "test_this_is_the_interpreter",
    *(f"test_operation[{name}]" for name in OPERATIONS),
    *(f"test_stored_bytes_equal_those_of_torch[{name}]" for name in LAYOUTS),
    "test_topk_ties_across_chunks",
    "test_blocks_lie_beyond_four_gib",
    *(f"test_variant_of_the_gpu_check[{variant.operation}: {variant.name}]" for variant in VARIANTS),
    *(f"test_every_launch_of_a_decode_step[{tokens}]" for tokens in (8, 14)),
)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Failure text of each test of the child session by its name, empty where it passed."""
    report = tmp_path_factory.mktemp("interpreted") / "report.xml"
    command = [
        sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", f"--junitxml={report}",
        str(FOLDER / "interpreted_session.py"),
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "TRITON_INTERPRET": "1"}, cwd=FOLDER.parents[1], capture_output=True, text=True
    )
    assert report.exists(), done.stdout + done.stderr
    return {
        str(case.get("name")): "\n".join(f"{part.tag}: {part.text}" for part in case)
        for case in ElementTree.parse(report).iter("testcase")
    }


@pytest.mark.parametrize("name", TESTS)
def test_in_the_interpreter(session: dict[str, str], name: str) -> None:
    assert name in session
    assert not session[name], session[name]


def test_no_interpreted_test_is_left_out(session: dict[str, str]) -> None:
    assert set(session) == set(TESTS)
