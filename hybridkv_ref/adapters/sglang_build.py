"""A real SGLang radix cache on a CPU for our model geometry, and the header of its trace.

The cache, its allocators and its pools are the engine's own. What needs a GPU or a package that is not used here is
stood in for: a module of image operations, and two kernels that compute slots, by the engine's own tensor form of them.
Sizes of heads do not matter and are made up.
"""

import importlib
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

from hybridkv_ref.adapters.sglang_features import CLAIMS, missing_features
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Engine, GroupSpec, Header
from hybridkv_ref.models import Model

MEMORY = "sglang.srt.mem_cache"
CACHES = {"SWARadixCache": "swa_radix_cache", "UnifiedRadixCache": "unified_radix_cache"}
"""Caches of full attention with a window, and their modules; the first that a release has is taken."""

ROWS = 64
"""Requests at once."""


class _Word(type):
    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class _StandIn(ModuleType):
    """A module of which any name can be imported."""

    __version__ = "0.26"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Word(name, (), {})


class _Kernel:
    """Stands in for a kernel of the paged allocator: ``run`` takes what the kernel takes."""

    def __init__(self, run: Callable[..., None]) -> None:
        self.run = run

    def __getitem__(self, grid: object) -> Callable[..., None]:
        return self.run


def prepare() -> None:
    """Makes the engine's modules importable, and its paged allocator usable, on a machine without a GPU."""
    if importlib.util.find_spec("torchvision") is None:
        for path in ("", ".io", ".transforms", ".transforms.functional", ".transforms.v2", ".transforms.v2.functional"):
            made = _StandIn(f"torchvision{path}")
            made.__path__ = []
            made.__spec__ = importlib.machinery.ModuleSpec(made.__name__, None)
            sys.modules[made.__name__] = made
            above, _, last = made.__name__.rpartition(".")
            if above:
                setattr(sys.modules[above], last, made)
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    if os.access(sys.prefix, os.W_OK):  # releases build an extension of one name from different sources
        os.environ.setdefault("TORCH_EXTENSIONS_DIR", f"{sys.prefix}/torch_extensions")
    paged = importlib.import_module(f"{MEMORY}.allocator.paged")
    naive = paged.alloc_extend_naive

    def extend(prefix: Any, seq: Any, last: Any, pages: Any, out: Any, _: int, page: int) -> None:
        naive(prefix, seq, last, pages, out, page, out.device)

    def decode(seq: Any, last: Any, pages: Any, out: Any, _: int, page: int) -> None:
        naive(seq - 1, seq, last, pages, out, page, out.device)

    vars(paged).update(alloc_extend_kernel=_Kernel(extend), alloc_decode_kernel=_Kernel(decode))
    # Settings of a server that was never started, at their defaults.
    spec, serving = SimpleNamespace(speculative_algorithm=None), SimpleNamespace(strip_thinking_cache=False)
    settings(get_spec=lambda: spec, get_serving=lambda: serving)


def settings(**given: Callable[[], Any]) -> None:
    """Where the caches' calls get a server's settings from."""
    for name in (f"{MEMORY}.common", "sglang.srt.managers.schedule_batch"):
        vars(importlib.import_module(name)).update(given)


def cache_class(kind: str = "") -> type:
    """The radix cache of this release, or the one of a name; InputError where it has none that is known."""
    for name, module in CACHES.items():
        if kind in ("", name) and importlib.util.find_spec(f"{MEMORY}.{module}") is not None:
            found: type = getattr(importlib.import_module(f"{MEMORY}.{module}"), name)
            return found
    raise InputError(f"{MEMORY}: none of {kind or ', '.join(CACHES)}")


def with_states(model: Model, page: int) -> bool:
    """Whether a model has states beside full attention, else a window; InputError for what the cache does not have."""
    shapes = sorted(g.shape for g in model.groups)
    if shapes not in (["entries", "state"], ["entries", "window"]):
        raise InputError(f"{model.name}: expected full attention and one window or states, got {', '.join(shapes)}")
    if shapes[1] == "state" and page != 1:
        raise InputError(f"{model.name}: pages of {page} tokens: states go with pages of 1 token")
    return shapes[1] == "state"


def build(model: Model, page: int, pages: int, window_pages: int, longest: int, kind: str = "") -> tuple[Any, Header]:
    """A real cache for a model of full attention and one window, events on, and the header of its trace.

    ``pages`` and ``window_pages`` are the pages of ``page`` tokens of the two pools, the padding page not counted;
    ``longest`` is the most tokens of a request. ``kind``: a cache's class where the release has several; for states
    the one of their own comes first. InputError for another geometry.
    """
    states = with_states(model, page)
    prepare()
    if states:
        return _with_states(page, pages, window_pages, longest, kind), describe(model, page, pages, window_pages)
    import torch

    init, memory = (importlib.import_module(f"{MEMORY}.{m}") for m in ("cache_init_params", "memory_pool"))
    kept = importlib.import_module(f"{MEMORY}.swa_memory_pool")
    allocator = importlib.import_module(f"{MEMORY}.allocator.swa").SWATokenToKVPoolAllocator
    cls = cache_class(kind)
    missing_features(cls)
    span = next(g.span for g in model.groups if g.span) or 1
    sizes = {"size": pages * page, "size_swa": window_pages * page, "page_size": page}
    common = {"dtype": torch.bfloat16, "device": "cpu"}
    pool = kept.SWAKVPool(
        **sizes, **common, head_num=1, head_dim=2, swa_attention_layer_ids=[0], full_attention_layer_ids=[1],
        enable_memory_saver=False,
    )  # fmt: skip
    rows = memory.ReqToTokenPool(ROWS, longest, "cpu", False)
    slots = allocator(**sizes, **common, kvcache=pool, need_sort=False)
    wanted: dict[str, Any] = {
        "disable": False, "req_to_token_pool": rows, "token_to_kv_pool_allocator": slots, "page_size": page,
        "enable_kv_cache_events": True, "sliding_window_size": span - 1,
    }  # fmt: skip
    if "tree_components" in {f.name for f in fields(init.CacheInitParams)} and cls.__name__ == "UnifiedRadixCache":
        kinds = importlib.import_module(f"{MEMORY}.unified_cache.component_type").ComponentType
        wanted["tree_components"] = (kinds.FULL, kinds.SWA)
    return cls(init.CacheInitParams(**wanted)), describe(model, page, pages, window_pages)


def _with_states(page: int, pages: int, states: int, longest: int, kind: str) -> Any:
    """A real cache of full attention and states; ``page`` 1 only, as the engine has it without a buffer of its own."""
    import torch

    state, init, memory = (
        importlib.import_module(name)
        for name in ("sglang.srt.configs.mamba_utils", f"{MEMORY}.cache_init_params", f"{MEMORY}.memory_pool")
    )
    shape = state.Mamba2StateShape.create(
        tp_world_size=1, intermediate_size=16, n_groups=1, num_heads=2, head_dim=8, state_size=4, conv_kernel=4
    )
    dtype = state.Mamba2StateDType(conv=torch.float32, temporal=torch.float32)
    rows = memory.HybridReqToTokenPool(
        size=ROWS, mamba_size=states, mamba_spec_state_size=ROWS, max_context_len=longest, device="cpu",
        enable_memory_saver=False, cache_params=state.Mamba2CacheParams(shape=shape, layers=[0], dtype=dtype),
        mamba_layer_ids=[0], enable_mamba_extra_buffer=False, enable_overlap_schedule=False,
    )  # fmt: skip
    common = {"page_size": page, "dtype": torch.bfloat16, "device": "cpu"}
    pool = memory.MHATokenToKVPool(
        size=pages * page, **common, head_num=1, head_dim=2, layer_num=1, enable_memory_saver=False
    )
    slots = importlib.import_module(f"{MEMORY}.allocator.token").TokenToKVPoolAllocator(
        pages * page, torch.bfloat16, "cpu", pool, False
    )
    wanted: dict[str, Any] = {
        "disable": False, "req_to_token_pool": rows, "token_to_kv_pool_allocator": slots, "page_size": page,
        "enable_kv_cache_events": True,
    }  # fmt: skip
    if not kind and importlib.util.find_spec(f"{MEMORY}.mamba_radix_cache") is not None:
        module = importlib.import_module(f"{MEMORY}.mamba_radix_cache")
        cls = module.MambaRadixCache
    else:
        cls = cache_class("UnifiedRadixCache")
        module = importlib.import_module(f"{MEMORY}.unified_cache.components.mamba")
        kinds = importlib.import_module(f"{MEMORY}.unified_cache.component_type").ComponentType
        wanted["tree_components"] = (kinds.FULL, kinds.MAMBA)
    limits = SimpleNamespace(mamba=SimpleNamespace(mamba_max_states_per_path=-1, enable_mamba_extra_buffer_lazy=False))
    vars(module).update(
        mamba_cache_chunk_size=lambda: page, mamba_checkpoint_grid=lambda tree_page: page, get_exec=lambda: limits
    )
    missing_features(cls, window=False)
    return cls(init.CacheInitParams(**wanted))


def describe(model: Model, page: int, pages: int, window_pages: int) -> Header:
    """The header for a cache of a model's groups: full attention first."""
    import sglang

    groups = []
    for g in sorted(model.groups, key=lambda g: g.shape):
        room = (pages if g.shape == "entries" else window_pages) + 1
        groups.append(GroupSpec(g.name, g.kind, page, g.ratio or 1, g.halo or 0, g.span or 0, capacity=room))
    engine = Engine("sglang", str(getattr(sglang, "__version__", "")))
    return Header(
        "hybridkv.events/1", engine=engine, model=model.name, unit=page, groups=tuple(groups), capabilities=CLAIMS
    )
