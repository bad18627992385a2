"""A real vLLM cache manager, or Scheduler, for our model geometry, and the header of its trace.

Groups are the geometry's, one engine spec each: the engine's own planner would also merge layers that share a block
size, which changes no block table's rules. Sizes of heads do not matter to the manager and are made up.
"""

import inspect
import json
import tempfile
from collections.abc import Callable
from math import gcd, lcm
from pathlib import Path
from typing import Any

from hybridkv_ref.adapters.vllm import CLAIMS
from hybridkv_ref.adapters.vllm_features import missing_features
from hybridkv_ref.events import Engine, GroupSpec, Header
from hybridkv_ref.models import Group, Model

LENGTH = 1 << 14
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "intermediate_size": 64,
    "num_attention_heads": 1, "num_key_value_heads": 1, "num_hidden_layers": 1, "vocab_size": 1 << 21,
    "max_position_embeddings": 1 << 15, "torch_dtype": "bfloat16",
}  # fmt: skip
"""A model whose name the engine knows; the scheduler asks of it no more than lengths. Groups come from the geometry."""


def _accepted(call: Callable[..., Any], wanted: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in wanted.items() if name in inspect.signature(call).parameters}


def configure(model: Model, num_blocks: int, unit: int = 0, **options: Any) -> Any:
    """The engine's ``KVCacheConfig`` for a model's groups, and whatever it needs before its first manager.

    ``num_blocks`` counts the null block, which all groups share as they share the pool. ``unit``: tokens of a block of
    a group whose geometry names none (a state's), default the model's alignment. ``eagle`` (group names) and
    ``retention`` are taken where the engine knows them.
    """
    from vllm.utils.hashing import sha256
    from vllm.v1.core import single_type_kv_cache_manager
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    if hasattr(single_type_kv_cache_manager, "register_all_kvcache_specs"):
        single_type_kv_cache_manager.register_all_kvcache_specs(None)
    init_none_hash(sha256)
    eagle = options.get("eagle", ())
    groups = []
    for group in model.groups:
        marked = {"is_eagle_group": group.name in eagle} if eagle else {}
        layers = [f"{group.name}.{i}" for i in range(group.layers)]
        groups.append(KVCacheGroupSpec(layers, _spec(group, unit or model.alignment), **marked))
    retention = {"prefix_cache_retention_interval": options.get("retention")}
    return KVCacheConfig(num_blocks, [], groups, **_accepted(KVCacheConfig, retention))


def units(config: Any) -> tuple[int, int]:
    """Tokens of a scheduler's block and of a hash of a configuration: what all groups' blocks divide, and share."""
    sizes = [g.kv_cache_spec.block_size for g in config.kv_cache_groups]
    return lcm(*sizes), gcd(*sizes)


def build(model: Model, num_blocks: int, max_model_len: int, unit: int = 0, **options: Any) -> tuple[Any, Header]:
    """A real manager for a model's groups, events on, and the header of its trace.

    ``options`` go to the manager where it knows them, and as ``configure`` says.
    """
    from vllm.v1.core.kv_cache_manager import KVCacheManager

    missing_features(KVCacheManager)
    config = configure(model, num_blocks, unit, **options)
    whole, least = units(config)
    known = {"scheduler_block_size": whole, "hash_block_size": least, "enable_kv_cache_events": True}
    manager = KVCacheManager(config, max_model_len, **_accepted(KVCacheManager.__init__, known | options))
    return manager, describe(config, model, least)


def _spec(group: Group, unit: int) -> Any:
    import torch
    from vllm.v1 import kv_cache_interface as kv

    size = group.block_tokens or unit
    head: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "dtype": torch.bfloat16}
    if group.shape == "state":
        return kv.MambaSpec(size, ((64,),), (torch.float32,), mamba_cache_mode="align")
    if group.shape == "window":
        return kv.SlidingWindowSpec(block_size=size, sliding_window=group.span, **head)
    if group.shape == "ring":
        return kv.SlidingWindowMLASpec(block_size=size, sliding_window=(group.ratio or 1) + (group.halo or 0), **head)
    if group.ratio == 1 and group.dtype_of == "kv":
        return kv.FullAttentionSpec(block_size=size, **head)
    ratio = _accepted(kv.MLAAttentionSpec, {"tokens_per_state": group.ratio, "compress_ratio": group.ratio})
    return kv.MLAAttentionSpec(block_size=size, **ratio, **head)


def describe(config: Any, model: Model, unit: int) -> Header:
    """The header for a manager's configuration of a model's groups."""
    import vllm

    groups = []
    for g, made in zip(model.groups, config.kv_cache_groups, strict=True):
        own = made.kv_cache_spec
        cached = bool(getattr(own, "prefix_cacheable", True))
        sizes = (own.block_size, g.ratio or 1, g.halo or 0, g.span or 0)
        # All managers of a coordinator take their blocks from one pool.
        groups.append(GroupSpec(g.name, g.kind, *sizes, reuse=cached, pool="device"))
    engine = Engine("vllm", str(getattr(vllm, "__version__", "")))
    return Header(
        "hybridkv.events/1", engine=engine, model=model.name, unit=unit, groups=tuple(groups), capabilities=CLAIMS
    )


def build_scheduler(
    model: Model, blocks: int, asynchronous: bool, policy: str, drafts: int, connector: int | None
) -> tuple[Any, Any]:
    """A real Scheduler for a model's groups, events on, and its configuration of caches; ``connector`` is a seed."""
    from vllm.config import (
        CacheConfig,
        KVEventsConfig,
        KVTransferConfig,
        ModelConfig,
        SchedulerConfig,
        SpeculativeConfig,
        VllmConfig,
    )
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    config = configure(model, blocks)
    whole, least = units(config)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIG))
        named = ModelConfig(folder, skip_tokenizer_init=True, max_model_len=LENGTH, dtype="bfloat16")
        settings = SchedulerConfig(
            max_num_seqs=5,
            max_num_batched_tokens=3 * whole + 7,
            max_model_len=LENGTH,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            policy=policy,
        )
        caches = CacheConfig(
            enable_prefix_caching=True, mamba_cache_mode="align" if config.has_mamba_layers else "none"
        )
        guess = None
        if drafts:
            # Of the methods that the engine schedules asynchronously, the one that asks for no model.
            method = "ngram_gpu" if asynchronous else "ngram"
            guess = SpeculativeConfig(
                method=method, num_speculative_tokens=drafts, prompt_lookup_max=drafts, prompt_lookup_min=1
            )
        outside = None
        if connector is not None:
            outside = KVTransferConfig(
                kv_connector="ChanceConnector", kv_connector_module_path="hybridkv_ref.adapters.vllm_connector",
                kv_role="kv_both", kv_load_failure_policy="recompute",
                kv_connector_extra_config={"seed": connector, "align": whole},
            )  # fmt: skip
        made = VllmConfig(
            model_config=named,
            scheduler_config=settings,
            cache_config=caches,
            speculative_config=guess,
            kv_transfer_config=outside,
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null"),
        )
        structured = StructuredOutputManager(made)
    caches.num_gpu_blocks, caches.block_size = blocks, whole
    # The platform's own settings switch it off on a CPU, where the engine's runner has no use for it.
    settings.async_scheduling = asynchronous
    kind = AsyncScheduler if asynchronous else Scheduler
    return kind(made, config, structured, block_size=whole, hash_block_size=least), config
