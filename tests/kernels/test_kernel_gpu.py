"""Every operation on a GPU, if there is one: what dispatch runs for CUDA tensors against the float64 reference."""

from typing import Any

import pytest

pytest.importorskip("torch", reason="the kernels compute with torch")
pytest.importorskip("triton", reason="CUDA tensors run Triton")

import kernel_cases
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hybridkv_ref.kernels import OPERATIONS, operation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=20)
@given(data=st.data())
def test_operation_on_the_gpu(name: str, data: st.DataObject) -> None:
    case = kernel_cases.build(name, data)
    if "q" in case.arguments:  # tensor cores take bf16 only
        assume(case.arguments["q"].dtype is torch.bfloat16)

    def on_gpu(**arguments: Any) -> None:
        moved = {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}
        getattr(operation(name), name)(**moved)
        for output in case.outputs:
            arguments[output].copy_(moved[output])

    kernel_cases.check(operation(name), on_gpu, case, tensor_cores=True)
