"""Dispatch by device, refusal of bad arguments in one line, and life without triton."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="the kernels compute with torch")

import kernel_cases
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridkv_ref import layouts
from hybridkv_ref.errors import InputError
from hybridkv_ref.kernels import OPERATIONS, _triton, dispatch, operation


def cpu_version() -> str:
    return "torch"


def gpu_version() -> str:
    return "triton"


def test_cpu_tensors_run_torch() -> None:
    assert dispatch.choose("op", cpu_version, gpu_version, torch.ones(1), None) is cpu_version


@pytest.mark.parametrize("installed", [True, False])
def test_cuda_tensors_run_triton_or_are_refused(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    class OnGpu:
        device = torch.device("cuda", 0)

    tensor: Any = OnGpu()
    monkeypatch.setattr(_triton, "AVAILABLE", installed)
    if installed:
        assert dispatch.choose("op", cpu_version, gpu_version, tensor) is gpu_version
    else:
        with pytest.raises(InputError, match=r"^op:device: CUDA tensors need triton"):
            dispatch.choose("op", cpu_version, gpu_version, tensor)


def test_two_devices_and_other_devices_are_refused() -> None:
    with pytest.raises(InputError, match=r"^op:device: tensors on "):
        dispatch.choose("op", cpu_version, gpu_version, torch.ones(1), torch.ones(1, device="meta"))
    with pytest.raises(InputError, match=r"^op:device: meta is neither"):
        dispatch.choose("op", cpu_version, gpu_version, torch.ones(1, device="meta"))


def test_unknown_operation_is_refused() -> None:
    with pytest.raises(InputError, match=r"^kernels:fold: no such operation"):
        operation("fold")


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=4)
@given(data=st.data())
def test_each_tensor_is_checked(name: str, data: st.DataObject) -> None:
    """Wrong dtype, wrong number of dimensions, not contiguous: each is refused, in one line that names the argument."""
    case = kernel_cases.build(name, data)
    tensors = {key: value for key, value in case.arguments.items() if isinstance(value, torch.Tensor)}
    public = getattr(operation(name), name)
    for key, tensor in tensors.items():
        wider = torch.stack((tensor, tensor), dim=-1)
        for wrong in (tensor.to(torch.complex64), tensor[None], wider[..., 0]):
            if wrong.is_contiguous() and wrong.dtype is tensor.dtype and wrong.shape == tensor.shape:
                continue  # one element: every stride is contiguous
            with pytest.raises(InputError) as error:
                public(**case.arguments | {key: wrong})
            assert str(error.value).startswith(f"{name}:")
            assert "\n" not in str(error.value)


def test_misaligned_arena_is_refused() -> None:
    page = layouts.load("uniform_fp8_512").page(2)
    cache = kernel_cases.arena_of(page, 3).flatten()[8 : 8 + 2 * page.stride].view(2, page.stride)
    with pytest.raises(InputError, match=r"^gather_dequant:cache: base address"):
        operation("gather_dequant").gather_dequant(
            cache, torch.zeros(1, dtype=torch.int64), torch.empty(1, 1, 512), page
        )


def test_block_table_must_reach_the_columns() -> None:
    page = layouts.load("bf16").page(2, dim=16)
    one, table = torch.zeros(1, dtype=torch.int32), torch.zeros(1, 3, dtype=torch.int32)
    with pytest.raises(InputError, match=r"^indexer_logits:logits: 7 entries, but the block table reaches 6"):
        operation("indexer_logits").indexer_logits(
            torch.ones(1, 2, 16),
            torch.ones(1, 2),
            one,
            one,
            table,
            kernel_cases.arena_of(page, 1),
            torch.ones(1, 7),
            page,
        )


def test_without_triton_everything_imports_and_runs_on_the_cpu(tmp_path: Path) -> None:
    """A `triton` that cannot be imported stands for one that is not installed."""
    (tmp_path / "triton.py").write_text("raise ImportError('not installed')\n")
    script = (
        "import torch\n"
        "from hybridkv_ref import layouts\n"
        "from hybridkv_ref.kernels import OPERATIONS, _triton, operation\n"
        "modules = [operation(name) for name in OPERATIONS]\n"
        "assert not _triton.AVAILABLE\n"
        "assert all(module.torch_version is not None for module in modules)\n"
        "page = layouts.load('bf16').page(2, dim=4)\n"
        "cache = torch.zeros(3, page.stride, dtype=torch.uint8)\n"
        "keys, slots = torch.tensor([[1.0, -2.0, 3.0, 0.5]]), torch.tensor([3])\n"
        "operation('index_build').index_build(keys, slots, cache, page)\n"
        "out = torch.empty(1, 1, 4)\n"
        "operation('gather_dequant').gather_dequant(cache, slots, out, page)\n"
        "assert torch.equal(out[0], keys), out\n"
    )
    paths = os.pathsep.join([str(tmp_path), str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", script], env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
