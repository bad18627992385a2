"""Random weights of the small decoder, drawn from a seed.

Shapes are [out, in].  Weights are dense and never zero, so that nothing that a rule protects is multiplied away.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hybridkv_ref.decoder_geometry import Sizes, branches, conv_columns
from hybridkv_ref.decoder_plan import Folded, Plan


@dataclass(frozen=True)
class Compressor:
    """kv, gate [branches * dim, hidden]; bias [ratio, branches * dim] of the score; norm [dim] of the entry."""

    kv: Tensor
    gate: Tensor
    bias: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Indexer:
    """The indexer's own compressor; q [index heads * index dim, query rank]; head [index heads, hidden]."""

    compressor: Compressor
    q: Tensor
    head: Tensor


@dataclass(frozen=True)
class Attention:
    """Shared K=V attention: q through a low rank, one kv head, output in groups through a low rank, a sink per head."""

    q_down: Tensor
    q_norm: Tensor
    q_up: Tensor
    kv: Tensor
    kv_norm: Tensor
    out_down: Tensor
    out_up: Tensor
    sink: Tensor
    compressor: Compressor | None
    indexer: Indexer | None


@dataclass(frozen=True)
class Delta:
    """A gated delta layer: mixed [3 * heads * dim, hidden], conv [taps, columns], decay and rate [heads, hidden]."""

    mixed: Tensor
    conv: Tensor
    decay: Tensor
    rate: Tensor
    out: Tensor


@dataclass(frozen=True)
class Layer:
    """A mixer and a gated feed-forward, each behind a norm."""

    norm: Tensor
    mixer: Attention | Delta
    feed_norm: Tensor
    feed_gate: Tensor
    feed_up: Tensor
    feed_down: Tensor


@dataclass(frozen=True)
class Weights:
    """embed [vocab, hidden]; head [vocab, hidden]."""

    embed: Tensor
    layers: tuple[Layer, ...]
    norm: Tensor
    head: Tensor


def random_weights(plans: Sequence[Plan], sizes: Sizes, seed: int, dtype: torch.dtype) -> Weights:
    """Weights for layers of these plans; of the same seed they are the same on every machine with one torch."""
    source = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(*shape, generator=source, dtype=torch.float64).mul_(scale).to(dtype)

    def matrix(out: int, inner: int) -> Tensor:
        return draw(out, inner, scale=1.4 * inner**-0.5)

    def norm(dim: int) -> Tensor:
        return 1.0 + draw(dim, scale=0.1)

    def compressor(dim: int, folded: Folded) -> Compressor:
        columns = branches(folded.halo) * dim
        kv, gate = matrix(columns, sizes.hidden), matrix(columns, sizes.hidden)
        return Compressor(kv, gate, draw(folded.ratio, columns, scale=0.7), norm(dim))

    def attention(plan: Plan) -> Attention:
        folded = compressor(sizes.head_dim, plan.entries) if plan.entries else None
        indexer = None
        if plan.index:
            own = compressor(sizes.index_dim, plan.index)
            q = matrix(sizes.index_heads * sizes.index_dim, sizes.query_rank)
            indexer = Indexer(own, q, matrix(sizes.index_heads, sizes.hidden))
        groups, rank = sizes.output_groups, sizes.output_rank
        width = sizes.heads * sizes.head_dim
        return Attention(
            q_down=matrix(sizes.query_rank, sizes.hidden),
            q_norm=norm(sizes.query_rank),
            q_up=matrix(width, sizes.query_rank),
            kv=matrix(sizes.head_dim, sizes.hidden),
            kv_norm=norm(sizes.head_dim),
            out_down=matrix(groups * rank, width // groups),
            out_up=matrix(sizes.hidden, groups * rank),
            sink=draw(sizes.heads),
            compressor=folded,
            indexer=indexer,
        )

    def delta() -> Delta:
        columns = conv_columns(sizes)
        return Delta(
            mixed=matrix(columns, sizes.hidden),
            conv=draw(sizes.conv, columns, scale=0.7),
            decay=matrix(sizes.delta_heads, sizes.hidden),
            rate=matrix(sizes.delta_heads, sizes.hidden),
            out=matrix(sizes.hidden, sizes.delta_heads * sizes.delta_dim),
        )

    def layer(plan: Plan) -> Layer:
        return Layer(
            norm(sizes.hidden),
            delta() if plan.state else attention(plan),
            norm(sizes.hidden),
            matrix(sizes.feed, sizes.hidden),
            matrix(sizes.feed, sizes.hidden),
            matrix(sizes.hidden, sizes.feed),
        )

    embed = draw(sizes.vocab, sizes.hidden)
    return Weights(embed, tuple(layer(plan) for plan in plans), norm(sizes.hidden), matrix(sizes.vocab, sizes.hidden))
