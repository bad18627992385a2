"""The operations on cache bytes, one module each: float64 reference, torch version, Triton kernel, one dispatch.

Every module has, beside the public function of its own name, `reference`, `torch_version`, `triton_version` and `grid`
(the programs of a launch, from shapes alone) with the same signature, and `aot_cases()` for the ahead-of-time check.
The public function checks its arguments, writes the tensors it is given and returns those that are results. References
return float64 (or bytes, or indices) and write nothing. Shapes are static and everything that changes from step to step
(lengths, slots, block tables, -1 for "not there") is read from tensors, so one captured CUDA graph serves every mix of
states.
"""

from importlib import import_module
from types import ModuleType

from hybridkv_ref.errors import InputError

OPERATIONS = (
    "compress_pool_quant",
    "gather_dequant",
    "tail_append",
    "copy_blocks",
    "ring_gather",
    "index_build",
    "indexer_logits",
    "topk_select",
    "segment_decode",
    "merge_lse",
)


def operation(name: str) -> ModuleType:
    """The module of operation `name`, as table rows name it. InputError: there is no such operation."""
    if name not in OPERATIONS:
        raise InputError(f"kernels:{name}: no such operation; there are {', '.join(OPERATIONS)}")
    return import_module(f"hybridkv_ref.kernels.{name}")
