"""Parts: what the device can do at most, and what share of it every kernel reaches.

An operation's limit is the slower of two: its bytes over the measured copy rate, its tensor-core operations over the
measured rate of a large bf16 product.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from hybridkv_ref.gpu_check.bench import Bench
from hybridkv_ref.gpu_check.inputs import VARIANTS, Variant, Work, source
from hybridkv_ref.gpu_check.records import ALSO, Figure
from hybridkv_ref.kernels import operation

COPY, PRODUCT = "copy ceiling", "bf16 product ceiling"


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second read and written by a copy; floating-point operations per second of a bf16 product."""

    copy: float
    product: float

    def best(self, work: Work) -> tuple[str, float]:
        """The limit that binds, and the seconds that it allows at least."""
        moved, computed = work.nbytes / self.copy, work.flops / self.product
        return (COPY, moved) if moved >= computed else (PRODUCT, computed)


def ceilings(bench: Bench) -> None:
    """A copy of 2 GiB within the device, and a product of 8,192 x 8,192 matrices."""
    size, edge = (1 << 16, 64) if bench.tiny else (1 << 31, 8_192)
    old = source(bench.device).integers(0, 256, size, dtype=torch.uint8)
    new = torch.empty_like(old)
    bench.measure(COPY, "TB/s", 2 * size / 1e12, lambda: new.copy_(old))
    a, b = (source(bench.device, seed).normal(edge, edge).to(torch.bfloat16) for seed in (1, 2))
    out = torch.empty_like(a)
    bench.measure(PRODUCT, "TFLOP/s", 2 * edge**3 / 1e12, lambda: torch.matmul(a, b, out=out))


def measured(bench: Bench) -> Ceilings | None:
    """The ceilings that this bench measured; None where it measured none."""
    copy, product = bench.value(COPY), bench.value(PRODUCT)
    return None if copy is None or product is None else Ceilings(copy * 1e12, product * 1e12)


def kernels(bench: Bench, top: Ceilings | None) -> None:
    """A figure for every variant at a size that fills the chip."""
    for variant in VARIANTS:
        arguments, work = made(bench, variant)
        run = getattr(operation(variant.operation), variant.operation)
        enter(bench, f"{variant.operation}: {variant.name}", work, partial(run, **arguments), top)


def made(bench: Bench, variant: Variant) -> tuple[dict[str, object], Work]:
    """The variant's arguments on the device; nothing but its work where there is no time left."""
    if bench.out_of_time():
        return {}, Work(0)
    return variant.build(source(bench.device), variant.few if bench.tiny else variant.many)


def enter(bench: Bench, name: str, work: Work, run: Callable[[], object], top: Ceilings | None) -> None:
    """A figure in TB/s and, of an operation with products, one in TFLOP/s; the one that binds has the share."""
    limit, best = top.best(work) if top is not None else (COPY if not work.flops else PRODUCT, 0.0)
    rates = {COPY: (work.nbytes / 1e12, "TB/s"), PRODUCT: (work.flops / 1e12, "TFLOP/s")}
    amount, unit = rates.pop(limit)
    seconds = bench.measure(name, unit, amount, run, limit, best)
    if work.flops and seconds is not None:
        ((amount, unit),) = rates.values()
        bench.figures.append(Figure(name=name + ALSO, unit=unit, value=amount / seconds, device=bench.device_name))
