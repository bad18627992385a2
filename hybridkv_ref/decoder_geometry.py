"""The shape of the small decoder: real models' cache geometry, shrunk, so that histories past the next fold are cheap.

The groups are those of DeepSeek-V4-Flash (window, CSA with its indexer, HCA, a tail for every compressor) and the gated
delta net of Qwen3-Next, as ``spec/models/`` has them; which layers have them, ratios, windows, blocks and sizes are set
here.  The kinds, what feeds what and which group overlaps are read, not written again, and so are the rows that a
request needs: ``recovery.toml`` applies to the small model as to the real ones.
"""

import math
from pathlib import Path
from typing import Literal

import msgspec

from hybridkv_ref import models
from hybridkv_ref.errors import InputError
from hybridkv_ref.layouts import Layout, Page, load
from hybridkv_ref.need_functions import NeedFunction
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.recovery import from_model

LayerType = Literal["window", "csa", "hca", "recurrent"]

_V4, _DELTA = "deepseek-v4-flash", "qwen3-next-80b-a3b"


class Sizes(msgspec.Struct, frozen=True, kw_only=True):
    """Every size of the decoder.  Lengths are tokens, dims are elements.

    ``layers``: lowest first.  ``window_block``, ``csa_block``, ``hca_block``: tokens of one cacheable block.
    ``max_step``: most tokens of one forward call, drafts included: rings hold that many rows besides what is needed.
    ``ring_windows``: a request's window rows lie in a ring, else in pages.  ``reach``: most tokens of a request.
    ``fixed_order``: every sum is taken in an order that does not depend on the chunk, so results are bit-equal.
    """

    layers: tuple[LayerType, ...] = ("window", "window", "csa", "recurrent", "hca")
    window: int = 5
    csa_ratio: int = 4
    hca_ratio: int = 8
    window_block: int = 1
    csa_block: int = 4
    hca_block: int = 8
    top_k: int = 3
    vocab: int = 29
    hidden: int = 12
    heads: int = 2
    head_dim: int = 8
    rotary: int = 4
    query_rank: int = 6
    output_groups: int = 2
    output_rank: int = 4
    index_heads: int = 2
    index_dim: int = 4
    delta_heads: int = 2
    delta_dim: int = 3
    conv: int = 3
    feed: int = 16
    reach: int = 96
    max_step: int = 8
    ring_windows: bool = False
    fixed_order: bool = True

    def __post_init__(self) -> None:
        """Refuses sizes that do not fit each other."""
        for ratio, block, name in ((self.csa_ratio, self.csa_block, "csa"), (self.hca_ratio, self.hca_block, "hca")):
            if block % ratio:
                raise InputError(f"sizes:{name}_block: {block} is not a multiple of the ratio {ratio}")
        if self.rotary % 2 or self.rotary > min(self.head_dim, self.index_dim):
            raise InputError(f"sizes:rotary: {self.rotary} is odd or more than a head has")
        if self.heads % self.output_groups:
            raise InputError(f"sizes:output_groups: {self.heads} heads are not a multiple of {self.output_groups}")


class Layouts(msgspec.Struct, frozen=True):
    """Byte layouts: entries and window rows, index keys, compressor state, recurrent state."""

    kv: Layout
    index: Layout
    tail: Layout
    state: Layout

    def __hash__(self) -> int:
        return hash((self.kv.id, self.index.id, self.tail.id, self.state.id))


def exact_layouts() -> Layouts:
    """float64 throughout."""
    return Layouts(load("fp64"), load("fp64"), load("state_fp64"), load("fp64"))


class Stored(msgspec.Struct, frozen=True, kw_only=True):
    """One object that one layer stores: a row for every ``ratio`` tokens (of a state: after every token).

    ``dim``: elements of a row.  ``need``: the positions that a resume reads.  ``keep``: most rows that one request
    needs at a time; 0: all of them.  ``page``: the object's page with one block's rows.
    """

    group: str
    shape: models.Shape
    layer: int
    ratio: int
    dim: int
    need: NeedFunction
    keep: int
    page: Page


class Descriptor(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel ABI of one object: reader and writer must agree in every field.

    ``layout``, ``tile``, ``scale_rule``, ``dim``: of the byte layout; ``ratio``, ``halo``: tokens; ``rope``: which
    rotary rule the rows were turned by; ``bias_in_score``: stored scores include the positional bias; ``epoch``:
    encoding of index keys, 0 elsewhere.
    """

    layout: str
    dim: int
    tile: int
    scale_rule: str
    ratio: int
    halo: int = 0
    rope: str = "none"
    bias_in_score: bool = True
    epoch: int = 0


def small_model(sizes: Sizes, spec: Path = SPEC_DIR) -> models.Model:
    """The decoder's cache geometry.  InputError where ``spec`` lacks the models that it is made from."""
    v4, delta = models.load_model(_V4, spec), models.load_model(_DELTA, spec)
    shape: dict[str, tuple[tuple[LayerType, ...], int, int]] = {
        "window": (("window", "csa", "hca"), 1, sizes.window_block),
        "csa": (("csa",), sizes.csa_ratio, sizes.csa_block),
        "csa_index": (("csa",), sizes.csa_ratio, sizes.csa_block),
        "csa_tail": (("csa",), sizes.csa_ratio, 1),
        "csa_index_tail": (("csa",), sizes.csa_ratio, 1),
        "hca": (("hca",), sizes.hca_ratio, sizes.hca_block),
        "hca_tail": (("hca",), sizes.hca_ratio, 1),
    }
    groups = []
    for name, (types, ratio, block) in shape.items():
        ids = tuple(i for i, layer in enumerate(sizes.layers) if layer in types)
        if not ids:
            continue
        group = v4.group(name)
        changes: dict[str, object] = {"layers": len(ids), "layer_ids": ids, "block_tokens": block, "page_bytes": {}}
        if group.shape == "window":
            changes |= {"window": sizes.window, "entry_bytes": {"fp64": 8 * sizes.head_dim}}
        elif group.shape == "entries":
            dim = sizes.index_dim if group.dtype_of == "index" else sizes.head_dim
            changes |= {"ratio": ratio, "entry_bytes": {"fp64": 8 * dim}}
        else:
            halo = ratio if group.halo else 0
            dim = (sizes.index_dim if group.dtype_of == "index" else sizes.head_dim) * branches(halo)
            changes |= {"ratio": ratio, "halo": halo, "row_bytes": 16 * dim}
            changes["ring_rows"] = ratio + halo + sizes.max_step
        groups.append(msgspec.structs.replace(group, **changes))
    ids = tuple(i for i, layer in enumerate(sizes.layers) if layer == "recurrent")
    if ids:
        state = next(group for group in delta.groups if group.shape == "state")
        size = 8 * state_dim(sizes)
        groups.append(msgspec.structs.replace(state, layers=len(ids), layer_ids=ids, state_bytes=size))
    return models.Model(
        name="small-decoder",
        source=f"{v4.name} and {delta.name}, shrunk",
        confidence="config",
        note="Random weights; the shape is what matters.",
        alignment=math.lcm(sizes.csa_ratio, sizes.hca_ratio),
        groups=tuple(groups),
        default_dtypes=models.Dtypes("fp64", "fp64"),
    )


def state_dim(sizes: Sizes) -> int:
    """Elements of one recurrent state: the heads' matrices, then the convolution's last inputs."""
    return sizes.delta_heads * sizes.delta_dim**2 + (sizes.conv - 1) * conv_columns(sizes)


def conv_columns(sizes: Sizes) -> int:
    """Columns that the causal convolution runs over: query, key and value of every head."""
    return 3 * sizes.delta_heads * sizes.delta_dim


def branches(halo: int) -> int:
    """Folds that a tail row takes part in, each with columns of its own: with a halo, the next entry's too."""
    return 2 if halo else 1


def stored_objects(model: models.Model, sizes: Sizes, layouts: Layouts) -> tuple[Stored, ...]:
    """What every layer stores, group by group."""
    found = []
    for group, rule in zip(model.groups, from_model(model), strict=True):
        is_index = group.dtype_of == "index"
        dim = sizes.index_dim if is_index else sizes.head_dim
        keep = max(hi - lo for lo, hi, _ in (rule.need(s, s) for s in range(sizes.reach + 1)))
        ratio, rows = 1, group.block_tokens or 1
        layout = layouts.index if is_index else layouts.kv
        match group.shape:
            case "entries":
                ratio, keep = group.ratio or 1, 0
                rows //= ratio
            case "ring":
                dim, layout, rows = dim * branches(group.halo or 0), layouts.tail, 1
            case "state":
                dim, layout = state_dim(sizes), layouts.state
        page = layout.page(rows, dim=dim)
        for layer in group.layer_ids or ():
            item = Stored(
                group=group.name, shape=group.shape, layer=layer, ratio=ratio, dim=dim, need=rule.need, keep=keep,
                page=page,
            )  # fmt: skip
            found.append(item)
    return tuple(found)
