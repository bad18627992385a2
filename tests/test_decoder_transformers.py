"""The decoder's attention against the released DeepseekV4Attention of transformers, on shared weights.

Optional: pip install "hybridkv-ref[transformers]".  transformers rotates and computes pooling weights in float32, hence
a tolerance of 1e-6 of the largest output; everything else is float64 on both sides.
"""

from types import ModuleType
from typing import Any

import msgspec
import pytest
import torch

from hybridkv_ref.decoder import COMPRESSED_THETA, THETA, YARN_FACTOR, YARN_ORIGINAL, Decoder
from hybridkv_ref.decoder_attention import AttentionLayer
from hybridkv_ref.decoder_geometry import LayerType, Sizes
from hybridkv_ref.decoder_plan import Step
from hybridkv_ref.decoder_weights import Attention, Compressor

VERSION = "5.20.2"
TYPES: dict[LayerType, str] = {
    "window": "sliding_attention",
    "csa": "compressed_sparse_attention",
    "hca": "heavily_compressed_attention",
}
# rotary pairs beyond the first are needed for YaRN's ramp to differ from plain scaling
# many index heads: with few, ReLU makes equal scores, which torch.topk orders by no rule
SMALL = Sizes(
    layers=("window", "csa", "hca"),
    head_dim=16,
    rotary=8,
    index_dim=12,
    index_heads=16,
    window=7,
    reach=40,
    max_step=40,
)
V4 = msgspec.structs.replace(SMALL, window=128, hca_ratio=128, hca_block=128, top_k=24, reach=300, max_step=300)


@pytest.fixture(scope="module")
def released() -> ModuleType:
    """The released module; skips with the reason where it is absent or of another version."""
    transformers = pytest.importorskip("transformers", reason=f"transformers {VERSION} is not installed")
    if transformers.__version__ != VERSION:
        pytest.skip(f"transformers is {transformers.__version__}; this test is pinned to {VERSION}")
    from transformers.models.deepseek_v4 import modeling_deepseek_v4

    module: ModuleType = modeling_deepseek_v4
    return module


def config(sizes: Sizes) -> Any:
    from transformers.models.deepseek_v4.configuration_deepseek_v4 import DeepseekV4Config

    return DeepseekV4Config(
        hidden_size=sizes.hidden,
        num_hidden_layers=len(sizes.layers),
        num_attention_heads=sizes.heads,
        head_dim=sizes.head_dim,
        q_lora_rank=sizes.query_rank,
        layer_types=[TYPES[layer] for layer in sizes.layers],
        mlp_layer_types=["moe"] * len(sizes.layers),
        compress_rates={TYPES["csa"]: sizes.csa_ratio, TYPES["hca"]: sizes.hca_ratio},
        sliding_window=sizes.window,
        o_groups=sizes.output_groups,
        o_lora_rank=sizes.output_rank,
        index_n_heads=sizes.index_heads,
        index_head_dim=sizes.index_dim,
        index_topk=sizes.top_k,
        partial_rotary_factor=sizes.rotary / sizes.head_dim,
        rope_theta=THETA,
        compress_rope_theta=COMPRESSED_THETA,
        rope_parameters={
            "rope_type": "yarn",
            "factor": YARN_FACTOR,
            "original_max_position_embeddings": YARN_ORIGINAL,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        max_position_embeddings=int(YARN_FACTOR) * YARN_ORIGINAL,
        attn_implementation="eager",
    )


def copy_compressor(weights: Compressor, target: Any) -> None:
    target.kv_proj.weight.copy_(weights.kv)
    target.gate_proj.weight.copy_(weights.gate)
    target.position_bias.copy_(weights.bias)
    target.kv_norm.weight.copy_(weights.norm)


def copy_weights(weights: Attention, target: Any) -> None:
    target.q_a_proj.weight.copy_(weights.q_down)
    target.q_a_norm.weight.copy_(weights.q_norm)
    target.q_b_proj.weight.copy_(weights.q_up)
    target.kv_proj.weight.copy_(weights.kv)
    target.kv_norm.weight.copy_(weights.kv_norm)
    target.o_a_proj.weight.copy_(weights.out_down)
    target.o_b_proj.weight.copy_(weights.out_up)
    target.sinks.copy_(weights.sink)
    if weights.compressor is not None:
        copy_compressor(weights.compressor, target.compressor)
    if weights.indexer is not None:
        copy_compressor(weights.indexer.compressor, target.compressor.indexer)
        target.compressor.indexer.q_b_proj.weight.copy_(weights.indexer.q)
        target.compressor.indexer.scorer.weights_proj.weight.copy_(weights.indexer.head)


@pytest.mark.parametrize("layer", range(len(SMALL.layers)), ids=SMALL.layers)
@pytest.mark.parametrize(
    ("sizes", "seed"), [(SMALL, 0), (SMALL, 1), (SMALL, 2), (V4, 3)], ids=["small", "small", "small", "ratios of V4"]
)
@torch.no_grad()
def test_attention_agrees(released: ModuleType, sizes: Sizes, layer: int, seed: int) -> None:
    decoder, tokens = Decoder(sizes, seed), sizes.reach
    mixer = decoder.mixers[layer]
    assert isinstance(mixer, AttentionLayer)
    settings = config(sizes)
    theirs = released.DeepseekV4Attention(settings, layer).double().eval()
    copy_weights(mixer.weights, theirs)
    x = torch.randn(tokens, sizes.hidden, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    rotary = released.DeepseekV4RotaryEmbedding(settings)
    positions = torch.arange(tokens)[None]
    embeddings = {name: rotary(x, positions, layer_type=name) for name in ("main", "compress")}
    distance = positions[0][:, None] - positions[0]
    mask = torch.zeros(tokens, tokens, dtype=torch.float64)
    mask[(distance < 0) | (distance >= sizes.window)] = -torch.inf
    expected, _ = theirs(x[None], embeddings, positions, mask[None, None])
    ours = mixer.forward(x, Step(0, tokens, 0), decoder.state(keep_all=True))
    assert (ours - expected[0]).abs().max() < 1e-6 * expected.abs().max()


@pytest.mark.parametrize("sizes", [SMALL, V4], ids=["small", "ratios of V4"])
def test_these_sizes_leave_entries_out(sizes: Sizes) -> None:
    """The indexer has more visible entries than it may choose; both compressors make several."""
    assert sizes.reach // sizes.csa_ratio > 2 * sizes.top_k
    assert sizes.reach // sizes.hca_ratio >= 2
