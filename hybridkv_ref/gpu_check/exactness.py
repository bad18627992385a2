"""Part: every kernel against its float64 reference, in random small cases and as DeepSeek-V4 calls it."""

from functools import partial
from typing import Any

import torch

from hybridkv_ref.gpu_check.bench import Bench
from hybridkv_ref.gpu_check.inputs import VARIANTS, Variant, source
from hybridkv_ref.kernels import OPERATIONS, operation
from hybridkv_ref.kernels.cases import Case, check, on_device
from hybridkv_ref.kernels.judged import JUDGES
from hybridkv_ref.kernels.random_cases import BUILDERS, Seeded

RANDOM_CASES = 3


def run(bench: Bench) -> None:
    """A check for each operation's random cases and for each of its variants."""
    for variant in VARIANTS:
        bench.check(f"{variant.operation}: {variant.name}", partial(_variant, bench, variant))
    for name in OPERATIONS:
        bench.check(f"{name}: random cases", partial(_random, bench, name))


def _random(bench: Bench, name: str) -> str:
    made = seed = 0
    while made < (1 if bench.tiny else RANDOM_CASES):
        case = BUILDERS[name](Seeded(seed))
        seed += 1
        if bench.device.type == "cuda" and _wide(case.arguments):
            continue
        _compare(bench, name, case)
        made += 1
    return f"{made} cases"


def _wide(arguments: dict[str, Any]) -> bool:
    """Queries that tensor cores do not take."""
    return "q" in arguments and arguments["q"].dtype is not torch.bfloat16


def _variant(bench: Bench, variant: Variant) -> str:
    arguments, _ = variant.build(source(torch.device("cpu")), variant.few)
    _compare(bench, variant.operation, JUDGES[variant.operation](arguments))
    return f"{variant.few} items"


def _compare(bench: Bench, name: str, case: Case) -> None:
    module = operation(name)
    there = on_device(getattr(module, name), bench.device, case.outputs)
    check(module, there, case, tensor_cores=bench.device.type == "cuda")
