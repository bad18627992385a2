"""What each operation may be off by: given its arguments, what to look at afterwards and how large an error is allowed.

The bounds follow from the formats and from how many roundings a result is made of; none is fitted to a run.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hybridkv_ref.kernels import _pages
from hybridkv_ref.kernels._lse import LOG2_E
from hybridkv_ref.kernels.cases import EPS, Case, narrowing, owned_bytes
from hybridkv_ref.kernels.compress_pool_quant import reference as pooled_reference
from hybridkv_ref.layouts import Page

Arguments = dict[str, Any]


def _largest(cache: Tensor, page: Page, vector: str = "kv") -> float:
    """The largest magnitude that any slot holds."""
    every = torch.arange(len(cache) * page.entries)
    return float(_pages.read_exact(cache, every, page, vector).nan_to_num().abs().max())


def _quotients(page: Page) -> float:
    """Scales that are quotients in fp32 are rounded twice; all else is exact."""
    return 2 * EPS if page.layout.scale_rule == "amax_div" else 0.0


def _index_build(a: Arguments) -> Case:
    keys, slots, page = a["keys"], a["slots"], a["page"]

    def observed(after: Arguments) -> tuple[Tensor, ...]:
        stored = _pages.read_exact(after["cache"], slots, page)[:, 0]
        return (torch.where((slots >= 0)[:, None], stored, _pages.narrowed_exact(keys, page)),)

    owned = {"cache": owned_bytes(page, len(a["cache"]), slots)}
    return Case(a, ("cache",), observed, lambda want: (want[0].abs() * _quotients(page),), owned)


def _gather_dequant(a: Arguments) -> Case:
    step = 2.0**-8 if a["out"].dtype is torch.bfloat16 else _quotients(a["page"]) / 2
    return Case(a, ("out",), lambda after: (after["out"],), lambda want: (want[0].abs() * step,))


def _tail_append(a: Arguments) -> Case:
    kv, score, bias, slots, page = (a[name] for name in ("kv", "score", "bias", "slots", "page"))
    there = (slots >= 0)[:, None]

    def observed(after: Arguments) -> tuple[Tensor, ...]:
        total = score.double() if bias is None else score.double() + bias[a["positions"] % len(bias)].double()
        stored = [_pages.read_exact(after["state"], slots, page, name)[:, 0] for name in ("kv", "score")]
        return torch.where(there, stored[0], kv.double()), torch.where(there, stored[1], total)

    owned = {"state": owned_bytes(page, len(a["state"]), slots)}
    return Case(a, ("state",), observed, lambda want: (0.0, want[1].abs() * EPS), owned)


def _compress_pool_quant(a: Arguments) -> Case:
    row_slots, weight, out_slots, page = (a[name] for name in ("row_slots", "weight", "out_slots", "page"))

    def allowed(want: tuple[Tensor, ...]) -> tuple[Tensor | float, ...]:
        # a sum of `rows` products, exp and the norm: a few roundings per row of the largest kv, scaled by the norm
        largest = _pages.read_exact(a["state"], row_slots.flatten(), a["state_page"], "kv").abs().max()
        pooled, norm = want[0], torch.ones(())
        if weight is not None:
            rms = pooled_reference(**a | {"weight": None, "rotary": None})[0].square().mean(-1).sqrt()
            made = rms[rms > 0] if rms.any() else torch.ones(1)  # no entry at all: nothing is divided
            pooled, norm = want[0] / weight.abs().max(), weight.abs().max() / made.min()
        slack = 4 * (row_slots.shape[1] + 8) * EPS * torch.maximum(largest * norm, pooled.abs().max())
        return (narrowing(want[0], page, slack),)

    return Case(
        a, ("cache",), lambda after: (_pages.read_exact(after["cache"], out_slots, page)[:, 0],), allowed,
        {"cache": owned_bytes(page, len(a["cache"]), out_slots)},
    )  # fmt: skip


def _copy_blocks(a: Arguments) -> Case:
    target = a["target"]
    mask = torch.zeros(target.shape, dtype=torch.bool)
    for source, _, block, goal, size in a["moves"].tolist():
        mask[block, goal : goal + size] |= source >= 0
    owned = {"target": mask}
    return Case(a, ("target",), lambda after: (torch.where(mask, after["target"], target),), lambda want: (0.0,), owned)


def _ring_gather(a: Arguments) -> Case:
    out = a["out"]
    used = torch.zeros(out.shape, dtype=torch.bool)
    used[:, : a["page"].nbytes] = True
    return Case(a, ("out",), lambda after: (torch.where(used, after["out"], out),), lambda want: (0.0,), {"out": used})


def _indexer_logits(a: Arguments) -> Case:
    q, weights, page = a["q"], a["weights"], a["page"]
    size = weights.abs().sum(1).max() * q.double().abs().sum(-1).max() * _largest(a["cache"], page)
    roundings = page.dim + weights.shape[1]
    return Case(a, ("logits",), lambda after: (after["logits"],), lambda want: (roundings * EPS * size,))


def _topk_select(a: Arguments) -> Case:
    return Case(a, ("chosen",), lambda after: (after["chosen"],), lambda want: (0.0,))


def _segment_decode(a: Arguments) -> Case:
    q, page, scale = a["q"], a["page"], a["scale"]
    largest = max(_largest(a["cache"], page, name) for name in (("k", "v") if "k" in page.places else ("kv",)))
    reach = a["block_table"].shape[1] * page.entries if a["entries"] is None else a["entries"].shape[1]
    asked = scale * float(q.double().abs().sum(-1).max()) * largest
    # an error of the scores moves every weight by as much; then a sum of `reach` products
    weights = 2 * (page.dim + 4) * EPS * asked + 4 * (reach + 8) * EPS

    def allowed(want: tuple[Tensor, ...]) -> tuple[Tensor | float, ...]:
        logs = torch.where(want[1].isfinite(), want[1].abs(), 0.0)
        return 2 * weights * largest, LOG2_E * weights + 8 * EPS * logs

    # bf16 weights and values, and keys where the page holds more than bf16
    keys = 2.0**-8 * asked if page.layout.id == "fp32" else 0.0
    narrow = ((2 * keys + 2.0**-7) * largest, LOG2_E * keys)
    return Case(a, ("out", "lse"), lambda after: (after["out"], after["lse"]), allowed, narrow=narrow)


def _merge_lse(a: Arguments) -> Case:
    partials, out = a["partials"], a["out"]
    natural = a["convention"].to_natural(a["partial_lse"].double())
    # weights are exponentials of differences of such numbers (in base 2 half as large again): that many roundings
    spread = 2 * LOG2_E * float(natural[natural.isfinite()].abs().max()) if natural.isfinite().any() else 0.0
    weights = 4 * (len(partials) + 2 * math.ceil(spread)) * EPS
    largest = float(partials.nan_to_num().abs().max())

    def allowed(want: tuple[Tensor, ...]) -> tuple[Tensor | float, ...]:
        logs = torch.where(want[1].isfinite(), want[1].abs(), 0.0)
        step = 2.0**-8 if out.dtype is torch.bfloat16 else 0.0
        return weights * largest + want[0].abs() * step, weights + 8 * EPS * logs

    return Case(a, ("out", "lse"), lambda after: (after["out"], after["lse"]), allowed)


JUDGES: dict[str, Callable[[Arguments], Case]] = {
    judge.__name__.removeprefix("_"): judge
    for judge in (
        _compress_pool_quant, _gather_dequant, _tail_append, _copy_blocks, _ring_gather, _index_build, _indexer_logits,
        _topk_select, _segment_decode, _merge_lse,
    )
}  # fmt: skip
"""By operation: the case of these arguments (on the CPU)."""
