"""Every operation on the CPU: the torch version and the public function against the float64 reference."""

import inspect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("torch", reason="the kernels compute with torch")

import kernel_cases

from hybridkv_ref.kernels import OPERATIONS, operation


def test_every_operation_has_cases() -> None:
    assert set(kernel_cases.BUILDERS) == set(OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
def test_versions_share_one_signature(name: str) -> None:
    module = operation(name)
    public = list(inspect.signature(getattr(module, name)).parameters.values())
    for version in (module.reference, module.torch_version, module.grid, module.triton_version):
        assert list(inspect.signature(version).parameters.values()) == public


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=40)
@given(data=st.data())
def test_torch_version_matches_reference(name: str, data: st.DataObject) -> None:
    module = operation(name)
    kernel_cases.check(module, module.torch_version, kernel_cases.build(name, data))


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=10)
@given(data=st.data())
def test_public_function_runs_torch_on_the_cpu(name: str, data: st.DataObject) -> None:
    module = operation(name)
    kernel_cases.check(module, getattr(module, name), kernel_cases.build(name, data))


@pytest.mark.parametrize("name", OPERATIONS)
@settings(max_examples=5)
@given(data=st.data())
def test_doing_nothing_is_noticed(name: str, data: st.DataObject) -> None:
    """The comparison itself can fail: outputs that stay poisoned are wrong."""
    case = kernel_cases.build(name, data)
    with pytest.raises(kernel_cases.Wrong):
        kernel_cases.check(operation(name), lambda **_: None, case)
