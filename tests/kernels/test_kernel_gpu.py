"""Every operation on a GPU, if there is one: what dispatch runs for CUDA tensors against the float64 reference."""

import pytest

pytest.importorskip("torch", reason="the kernels compute with torch")
pytest.importorskip("triton", reason="CUDA tensors run Triton")

import kernel_cases
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybridkv_ref.kernels import OPERATIONS, operation
from hybridkv_ref.kernels.cases import on_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=20)
@given(data=st.data())
def test_operation_on_the_gpu(name: str, data: st.DataObject) -> None:
    module, case = operation(name), kernel_cases.build(name, data)
    if "q" in case.arguments:  # tensor cores take bf16 only
        assume(case.arguments["q"].dtype is torch.bfloat16)
    on_gpu = on_device(getattr(module, name), "cuda", case.outputs)
    kernel_cases.check(module, on_gpu, case, tensor_cores=True)
