"""merge_lse: one attention output from the partial outputs of segments and splits.

Theory. Softmax over a union is the mean of the parts' outputs weighted by exp(lse). The sink is one more logit with no
value: it is added here, once, because adding it in every segment would count it as often as there are segments. A
part without entries has weight zero whatever its output holds. The result carries the log-sum-exp of everything, sink
included, so results can be merged again (with no sink).
"""

import math

import torch
from torch import Tensor

from hybridkv_ref.kernels import _bits, dispatch
from hybridkv_ref.kernels._lse import LOG2_E, Lse
from hybridkv_ref.kernels._triton import AotCase, cdiv, jit, power_of_two, tl

narrow_bf16 = _bits.narrow_bf16
HEADS = 4
"""Heads that one program merges."""
_LOG2_E = tl.constexpr(LOG2_E)


def merge_lse(
    partials: Tensor, partial_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, convention: Lse
) -> tuple[Tensor, Tensor]:
    """Merge P parts; write and return (out, lse).

    partials     fp32 [P, T, H, D] (float64 in torch only); what a part without entries holds does not matter
    partial_lse  same dtype [P, T, H], in `convention`
    sink         same dtype [H], a logit in natural units (softmax scale included), or None
    out          fp32 or bf16 [T, H, D] (or float64), overwritten; zeros where all parts are empty
    lse          dtype of partials [T, H], overwritten, in `convention`, sink included; empty where all is empty and
                 there is no sink
    convention   Lse.FLASHINFER (base 2, empty -inf) or Lse.FLASHMLA (natural, empty +inf), of input and output

    InputError: wrong dtype, shape or device.
    """
    name, wide = "merge_lse", (torch.float64 if partials.dtype is torch.float64 and partials.is_cpu else torch.float32)
    p, t, h, d = partials.shape if partials.dim() == 4 else (None, None, None, None)
    dispatch.expect(name, "partials", partials, (wide,), (p, t, h, d))
    dispatch.expect(name, "partial_lse", partial_lse, (wide,), (p, t, h))
    if sink is not None:
        dispatch.expect(name, "sink", sink, (wide,), (h,))
    dispatch.expect(name, "out", out, (wide, torch.bfloat16), (t, h, d))
    dispatch.expect(name, "lse", lse, (wide,), (t, h))
    tensors = (partials, partial_lse, sink, out, lse)
    return dispatch.choose(name, torch_version, triton_version, *tensors)(*tensors, convention)


def reference(
    partials: Tensor, partial_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, convention: Lse
) -> tuple[Tensor, ...]:
    """float64 [T, H, D] and [T, H]."""
    natural = convention.to_natural(partial_lse.double())
    extra = torch.full_like(natural[:1], -math.inf) if sink is None else sink.double().expand_as(natural[:1])
    total = torch.cat((natural, extra)).logsumexp(0)
    share = torch.where(natural == -math.inf, 0.0, (natural - total).exp())
    values = torch.where((natural == -math.inf)[..., None], 0.0, partials.double())
    return (share[..., None] * values).sum(0), convention.from_natural(total)


def torch_version(
    partials: Tensor, partial_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, convention: Lse
) -> tuple[Tensor, Tensor]:
    """`merge_lse` on any device that torch knows."""
    natural = convention.to_natural(partial_lse)
    top = natural.amax(0) if sink is None else torch.maximum(natural.amax(0), sink)
    top = torch.where(top == -math.inf, 0.0, top)
    share = (natural - top).exp_()
    total = share.sum(0) if sink is None else share.sum(0) + (sink - top).exp()
    values = partials.masked_fill((share == 0)[..., None], 0.0)
    merged = (share[..., None] * values).sum(0) / torch.where(total == 0, 1.0, total)[..., None]
    lse.copy_(convention.from_natural(top + total.log()))
    return out.copy_(merged), lse


@jit
def _kernel(
    partials: tl.tensor, partial_lse: tl.tensor, sink: tl.tensor, out: tl.tensor, lse: tl.tensor, parts: tl.tensor,
    queries: tl.tensor, H: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, N: tl.constexpr, SINK: tl.constexpr,
    BASE2: tl.constexpr, EMPTY: tl.constexpr, BF16: tl.constexpr,
) -> None:  # fmt: skip
    head = tl.program_id(1) * N + tl.arange(0, N)
    here = head < H
    cols = tl.arange(0, WIDE)
    inside = here[:, None] & (cols < D)[None, :]
    row = tl.program_id(0).to(tl.int64) * H + head
    if SINK:
        top = tl.load(sink + head, mask=here, other=0.0) * _LOG2_E
        total = tl.full((N,), 1.0, tl.float32)
    else:
        top = tl.full((N,), float("-inf"), tl.float32)
        total = tl.full((N,), 0.0, tl.float32)
    merged = tl.full((N, WIDE), 0.0, tl.float32)
    for part in range(parts):
        at = queries.to(tl.int64) * H * part + row
        stored = tl.load(partial_lse + at, mask=here, other=EMPTY)
        filled = stored != EMPTY
        log = tl.where(filled, stored if BASE2 else stored * _LOG2_E, float("-inf"))
        higher = tl.maximum(top, log)
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        share = tl.exp2(log - finite)
        kept = tl.exp2(top - finite)
        value = tl.load(partials + at[:, None] * D + cols[None, :], mask=inside & filled[:, None], other=0.0)
        merged = merged * kept[:, None] + share[:, None] * value
        total = total * kept + share
        top = higher
    some = total > 0.0
    merged = merged / tl.where(some, total, 1.0)[:, None]
    log = top + tl.log2(tl.where(some, total, 1.0))
    tl.store(lse + row, tl.where(some, log if BASE2 else log / _LOG2_E, EMPTY), mask=here)
    at = row[:, None] * D + cols[None, :]
    if BF16:
        tl.store(out.to(tl.pointer_type(tl.int16), bitcast=True) + at, narrow_bf16(merged), mask=inside)
    else:
        tl.store(out + at, merged, mask=inside)


def grid(
    partials: Tensor, partial_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, convention: Lse
) -> tuple[int, ...]:
    """Programs: queries, tiles of heads."""
    return partials.shape[1], cdiv(partials.shape[2], HEADS)


def triton_version(
    partials: Tensor, partial_lse: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor, convention: Lse
) -> tuple[Tensor, Tensor]:
    """`merge_lse` in Triton: one program merges HEADS heads of one query."""
    parts, t, h, d = partials.shape
    _kernel[grid(partials, partial_lse, sink, out, lse, convention)](
        partials, partial_lse, partial_lse if sink is None else sink, out, lse, parts, t, h, d, power_of_two(d), HEADS,
        sink is not None, convention.base2, convention.empty, out.dtype is torch.bfloat16,
    )  # fmt: skip
    return out, lse


def aot_cases() -> tuple[AotCase, ...]:
    """64 heads of 512 in both conventions."""
    pointers = dict.fromkeys(("partials", "partial_lse", "sink", "lse"), "*fp32") | {"out": "*bf16"}
    sizes = {"H": 64, "D": 512, "WIDE": 512, "N": HEADS, "SINK": True, "BF16": True}
    return tuple(
        AotCase(
            f"merge_lse[{convention.name.lower()}]", _kernel, pointers | {"parts": "i32", "queries": "i32"},
            sizes | {"BASE2": convention.base2, "EMPTY": convention.empty}, tuple(pointers),
        )
        for convention in Lse
    )  # fmt: skip
