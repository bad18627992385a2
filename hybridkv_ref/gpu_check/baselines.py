"""Part: the same operations in plain torch, eager and compiled, on the same arguments.

Where the torch version of an operation is vectorised, that is the baseline.  Where it goes query by query, so that no
result depends on the batch, or waits for the device, the form that one would write by hand stands here.
"""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from hybridkv_ref.gpu_check.bench import Bench
from hybridkv_ref.gpu_check.inputs import VARIANTS, Variant
from hybridkv_ref.gpu_check.speed import Ceilings, enter, made
from hybridkv_ref.kernels import _pages, operation
from hybridkv_ref.layouts import Page

COMPARED = {
    ("gather_dequant", "stride 37,440"), ("compress_pool_quant", "CSA"), ("indexer_logits", "64 heads"),
    ("segment_decode", "512 listed, stride 37,440"), ("copy_blocks", "stride 37,440"), ("merge_lse", "3 parts"),
    ("index_build", "entries"), ("compress_pool_quant", "HCA"), ("tail_append", "CSA"), ("topk_select", "512 of many"),
    ("ring_gather", "window of 128"), ("segment_decode", "window of 128"),
}  # fmt: skip


def copied(source: Tensor, target: Tensor, moves: Tensor, unit: int) -> Tensor:
    """Whole blocks, by index."""
    del unit
    return target.index_copy_(0, moves[:, 2], source.index_select(0, moves[:, 0]))


def gathered(cache: Tensor, slots: Tensor, out: Tensor, page: Page, vector: str) -> Tensor:
    """Entries widened, all there."""
    return out.copy_(_pages.read_there(cache, slots, page, vector))


def _slots(block_table: Tensor, rows: Tensor, entries: Tensor, page: Page) -> Tensor:
    """int64 [T, N]: slots of entries [T, N], all there."""
    at = entries.long()
    block = block_table[rows.long()].long().gather(1, at // page.entries)
    return block * page.entries + at % page.entries


def scored(
    q: Tensor, weights: Tensor, rows: Tensor, visible: Tensor, block_table: Tensor, cache: Tensor, logits: Tensor,
    page: Page,
) -> Tensor:  # fmt: skip
    """Keys of all queries widened, one batched product, the sum over heads."""
    entry = torch.arange(logits.shape[1], device=q.device).expand(logits.shape)
    slots = _slots(block_table, rows, entry, page)
    keys = _pages.read_there(cache, slots.flatten(), page).to(torch.bfloat16).view(*slots.shape, -1)
    scores = torch.einsum("thd,tnd->thn", q, keys).relu().float()
    found = torch.einsum("thn,th->tn", scores, weights)
    return logits.copy_(found.masked_fill(entry >= visible[:, None], -torch.inf))


def attended(
    q: Tensor, rows: Tensor, entries: Tensor | None, first: Tensor | None, count: Tensor, block_table: Tensor,
    cache: Tensor, out: Tensor, lse: Tensor, page: Page, scale: float, convention: object,
) -> Tensor:  # fmt: skip
    """Entries of all queries widened to bf16, then torch's attention with the heads as queries of one shared head."""
    del lse, convention
    if entries is None:
        base = torch.zeros_like(count) if first is None else first
        entries = base[:, None] + torch.arange(int(count[0]), device=q.device)
    slots = _slots(block_table, rows, entries, page)
    kv = _pages.read_there(cache, slots.flatten(), page).to(torch.bfloat16).view(len(q), 1, slots.shape[1], -1)
    found = scaled_dot_product_attention(q[:, None], kv, kv, scale=scale)
    return out[0].copy_(found[:, 0])


BY_HAND: dict[str, Callable[..., Tensor]] = {
    "copy_blocks": copied,
    "indexer_logits": scored,
    "segment_decode": attended,
}


def run(bench: Bench, top: Ceilings | None) -> None:
    """Two figures for each compared variant."""
    backend = "inductor" if bench.device.type == "cuda" else "eager"  # on the CPU only the tracing is tried
    for name in ("torch._dynamo", "torch._inductor"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what the compiler could not take into one graph
        for variant in VARIANTS:
            if (variant.operation, variant.name) in COMPARED:
                _compare(bench, variant, top, backend)


def baseline(name: str) -> Callable[..., Any]:
    """Plain torch for an operation."""
    plain: Callable[..., Any] = BY_HAND.get(name, operation(name).torch_version)
    return plain


def _compare(bench: Bench, variant: Variant, top: Ceilings | None, backend: str) -> None:
    arguments, work = made(bench, variant)
    plain = baseline(variant.operation)
    compiled = torch.compile(plain, backend=backend)
    for form, function in (("eager", plain), ("compiled", compiled)):
        enter(bench, f"{variant.operation}: {variant.name}, {form}", work, partial(function, **arguments), top)
    torch.compiler.reset()
