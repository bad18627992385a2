"""The cache geometry of real models: which groups of layers store what, and how many bytes that takes.

A *model* is a list of *groups*; a group is a set of layers that store the same object in the same way. Which fields a
group has says what it stores:

=============  ==================================  ==================================================================
shape          fields                              one request of ``n`` tokens stores, in each layer
=============  ==================================  ==================================================================
``entries``    ratio, entry_bytes                  ``n // ratio`` entries (ratio 1: plain full attention, or MLA)
``window``     window or chunk, entry_bytes        ``min(window, n)`` rows
``ring``       row_bytes, ring_rows, ratio,        ``ring_rows`` rows of fp32 partial state of the group that it feeds
               halo, feeds
``state``      state_bytes                         one state
=============  ==================================  ==================================================================

The kind of a group names its transition table and is never interpreted here, so that a new kind needs no code. Every
number comes from ``spec/models/NAME.toml``, which gives its source and how far it is to be trusted: "config" was read
in a public configuration, "recall" was not checked. Sizes are bytes, positions tokens, layer ids count from 0.
"""

import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR

Shape = Literal["entries", "window", "ring", "state"]
Count = Annotated[int, msgspec.Meta(ge=1)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]

# A tier of the other kinds' bytes, not an object that layers store.
_TIER_KIND = "on_disk_prefix"

_REQUIRED: dict[Shape, frozenset[str]] = {
    "entries": frozenset({"ratio", "entry_bytes", "block_tokens"}),
    "window": frozenset({"entry_bytes", "block_tokens"}),
    "ring": frozenset({"row_bytes", "ring_rows", "ratio", "halo", "feeds", "block_tokens"}),
    "state": frozenset({"state_bytes"}),
}
_OPTIONAL: dict[Shape, frozenset[str]] = {
    "entries": frozenset({"page_bytes"}),
    "window": frozenset({"page_bytes", "window", "chunk"}),
    "ring": frozenset({"page_bytes"}),
    "state": frozenset(),
}
_SHAPE_FIELDS = frozenset().union(*_REQUIRED.values(), *_OPTIONAL.values())


class Dtypes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The formats in which a cache is kept: ``kv`` for entries and window rows, ``index`` for index keys."""

    kv: str = "bf16"
    index: str = "bf16"


class Group(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A set of layers that store the same object in the same way. Methods give bytes of all layers together.

    ``entry_bytes`` and ``page_bytes`` are keyed by the format that ``dtype_of`` selects. ``page_bytes`` is one layer's
    block as engines allocate it, padding included, where a source gives it. ``block_tokens`` is the number of tokens
    that one block covers. ``layer_ids`` is absent where no source gives the order of layers. ``constants`` gives a kind
    of one's own the values of the constants that its table declares.
    """

    name: Name
    kind: Name
    layers: Count
    layer_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] | None = None
    dtype_of: Literal["kv", "index"] = "kv"
    ratio: Count | None = None
    halo: Annotated[int, msgspec.Meta(ge=0)] | None = None
    feeds: Name | None = None
    window: Count | None = None
    chunk: Count | None = None
    entry_bytes: dict[str, Count] = {}
    row_bytes: Count | None = None
    ring_rows: Count | None = None
    state_bytes: Count | None = None
    block_tokens: Count | None = None
    page_bytes: dict[str, Count] = {}
    constants: dict[str, int] = {}

    @property
    def shape(self) -> Shape:
        """What the group stores; see the module's table."""
        if self.state_bytes is not None:
            return "state"
        if self.row_bytes is not None or self.ring_rows is not None:
            return "ring"
        return "window" if self.span is not None else "entries"

    @property
    def span(self) -> int | None:
        """Tokens that a windowed group keeps: its window, or its chunk; None for the other shapes."""
        return self.window if self.window is not None else self.chunk

    @property
    def is_state(self) -> bool:
        """Whether the group's bytes are working state of a running request (compressor tails, recurrent state)."""
        return self.shape in ("ring", "state")

    def dtype(self, dtypes: Dtypes) -> str:
        """The one of ``dtypes`` that this group is kept in."""
        return dtypes.index if self.dtype_of == "index" else dtypes.kv

    def row_size(self, dtypes: Dtypes) -> int:
        """Unpadded bytes of one entry, row or state in one layer."""
        return self.state_bytes or self.row_bytes or self.entry_bytes[self.dtype(dtypes)]

    def bytes_per_token(self, dtypes: Dtypes) -> float:
        """Unpadded bytes that one cached token takes in one layer; 0 for state, which no token adds to."""
        return 0.0 if self.is_state else self.row_size(dtypes) / (self.ratio or 1)

    def rows(self, tokens: int) -> int:
        """Entries, rows or states that a request of ``tokens`` tokens stores in one layer."""
        if self.span is not None:
            return min(self.span, tokens)
        return tokens // self.ratio if self.shape == "entries" and self.ratio else self.ring_rows or 1

    def stored_bytes(self, tokens: int, dtypes: Dtypes) -> int:
        """Unpadded bytes of a request of ``tokens`` tokens, all layers."""
        return self.layers * self.rows(tokens) * self.row_size(dtypes)

    def block_bytes(self, dtypes: Dtypes) -> int:
        """Bytes of one block, all layers: the padded page where a source gives it, else the rows of the block."""
        if self.block_tokens is None:
            return self.layers * self.row_size(dtypes)
        rows = self.block_tokens // self.ratio if self.shape == "entries" and self.ratio else self.block_tokens
        return self.layers * self.page_bytes.get(self.dtype(dtypes), rows * self.row_size(dtypes))

    def blocks(self, tokens: int) -> int:
        """Blocks that a request of ``tokens`` tokens fills, aligned: a window between blocks may touch one more."""
        if self.block_tokens is None:
            return 1
        return math.ceil((tokens if self.shape == "entries" else self.rows(tokens)) / self.block_tokens)


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One model's cache geometry. ``alignment`` is the number of tokens that a hit is rounded down to by default."""

    name: Name
    source: str
    confidence: str
    note: str
    alignment: Count
    groups: Annotated[tuple[Group, ...], msgspec.Meta(min_length=1)]
    default_dtypes: Dtypes = Dtypes()

    def group(self, name: str) -> Group:
        """The group of this name; InputError, with close matches, where there is none."""
        for group in self.groups:
            if group.name == name:
                return group
        raise _unknown(f"{self.name}:groups", "group", name, [group.name for group in self.groups])

    def dtypes(self, kv: str | None = None, index: str | None = None) -> Dtypes:
        """The formats to compute with; None takes the model's default. InputError where a group's size is not known.

        No format stands in for another: a size that no source gives is refused, not guessed.
        """
        chosen = Dtypes(kv or self.default_dtypes.kv, index or self.default_dtypes.index)
        for group in self.groups:
            if group.entry_bytes and group.dtype(chosen) not in group.entry_bytes:
                known = ", ".join(group.entry_bytes)
                reason = f"no source gives the entry size of group {group.name} in {group.dtype(chosen)}"
                raise InputError(f"{self.name}:{group.dtype_of}_dtype: {reason} (known: {known})")
        return chosen


class GroupFootprint(msgspec.Struct, frozen=True):
    """One group's share; ``bytes_per_token`` is of one layer, ``bytes`` of all layers, unpadded."""

    name: str
    kind: str
    layers: int
    bytes_per_token: float
    bytes: int


class Footprint(msgspec.Struct, frozen=True):
    """Bytes that one request of ``tokens`` tokens takes.

    ``total_bytes``: entries, index keys and window rows, unpadded. ``state_bytes``: compressor tails and recurrent
    state, unpadded. ``padded_bytes``: whole blocks for all of these. MTP layers are not counted.
    """

    name: str
    tokens: int
    total_bytes: int
    state_bytes: int
    padded_bytes: int
    groups: tuple[GroupFootprint, ...]


def footprint(model: Model, tokens: int, kv_dtype: str | None = None, index_dtype: str | None = None) -> Footprint:
    """Bytes that one request of ``tokens`` tokens takes in ``model``.

    A dtype of None takes the model's default. InputError for fewer than 1 token or a dtype whose size is not known.
    """
    if tokens < 1:
        raise InputError(f"{model.name}:tokens: expected at least 1, got {tokens}")
    dtypes = model.dtypes(kv_dtype, index_dtype)
    groups = tuple(
        GroupFootprint(
            group.name, group.kind, group.layers, group.bytes_per_token(dtypes), group.stored_bytes(tokens, dtypes)
        )
        for group in model.groups
    )
    state = sum(share.bytes for share, group in zip(groups, model.groups, strict=True) if group.is_state)
    return Footprint(
        name=model.name,
        tokens=tokens,
        total_bytes=sum(share.bytes for share in groups) - state,
        state_bytes=state,
        padded_bytes=sum(group.blocks(tokens) * group.block_bytes(dtypes) for group in model.groups),
        groups=groups,
    )


def model_names(spec: Path = SPEC_DIR) -> list[str]:
    """Names of the models that ``spec`` holds, sorted; InputError when there are none."""
    names = sorted(path.stem for path in (spec / "models").glob("*.toml"))
    if not names:
        raise InputError(f"{spec / 'models'}: no model files")
    return names


def load_model(name: str, spec: Path = SPEC_DIR) -> Model:
    """The model of this name in ``spec``; InputError, with close matches, where there is none."""
    names = model_names(spec)
    if name not in names:
        raise _unknown("model", "model", name, names)
    return load_model_file(spec / "models" / f"{name}.toml", spec)


def load_model_file(path: Path, spec: Path = SPEC_DIR) -> Model:
    """Reads one model file and checks it against itself and against the kinds of ``spec``; InputError for any fault."""
    try:
        model = msgspec.toml.decode(path.read_bytes(), type=Model)
    except OSError as error:
        raise InputError(f"{path}:1: cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        raise InputError(f"{path}:{place.strip('`$.') or 'file'}: {reason}") from None
    except msgspec.DecodeError as error:
        raise InputError(f"{path}:file: not TOML: {error}") from None
    for place, reason in _faults(model, path, {kind.stem for kind in (spec / "kinds").glob("*.toml")}):
        raise InputError(f"{path}:{place}: {reason}")
    return model


def _unknown(place: str, what: str, name: str, known: list[str]) -> InputError:
    spelled = {candidate.lower(): candidate for candidate in known}
    close = difflib.get_close_matches(name.lower(), spelled, n=3)
    hint = f"did you mean {', '.join(spelled[match] for match in close)}?" if close else f"known: {', '.join(known)}"
    return InputError(f"{place}: no {what} named {name!r} ({hint})")


def _faults(model: Model, path: Path, kinds: set[str]) -> Iterable[tuple[str, str]]:
    """Yields (place, reason) for what the types of the fields do not say."""
    if model.name != path.stem:
        yield "name", f"expected {path.stem!r} as in the file's name, got {model.name!r}"
    by_name = {group.name: group for group in model.groups}
    if len(by_name) < len(model.groups):
        yield "groups", "two groups have the same name"
    for index, group in enumerate(model.groups):
        place = f"groups[{index}]"
        if group.kind == _TIER_KIND:
            yield f"{place}.kind", f"{_TIER_KIND} is a tier, not an object that layers store"
        elif kinds and group.kind not in kinds:
            yield f"{place}.kind", f"expected one of {', '.join(sorted(kinds - {_TIER_KIND}))}, got {group.kind!r}"
        yield from _field_faults(group, place)
        yield from _layer_faults(group, place)
        if group.shape == "entries" and group.ratio and model.alignment % group.ratio:
            yield "alignment", f"{model.alignment} is not a multiple of the ratio {group.ratio} of group {group.name}"
        if group.shape == "ring":
            fed = by_name.get(group.feeds or "")
            if fed is None or fed.shape != "entries":
                yield f"{place}.feeds", f"no group of entries is named {group.feeds!r}"
            elif (fed.ratio, fed.layers, fed.layer_ids) != (group.ratio, group.layers, group.layer_ids):
                yield f"{place}.feeds", f"ratio and layers differ from those of group {fed.name}"


def _field_faults(group: Group, place: str) -> Iterable[tuple[str, str]]:
    present = {name for name in _SHAPE_FIELDS if getattr(group, name) not in (None, {})}
    required, optional = _REQUIRED[group.shape], _OPTIONAL[group.shape]
    for name in sorted(required - present):
        yield f"{place}.{name}", f"missing in a group that stores {group.shape}"
    for name in sorted(present - required - optional):
        yield f"{place}.{name}", f"has no meaning in a group that stores {group.shape}"
    if group.window is not None and group.chunk is not None:
        yield f"{place}.chunk", "a group has a window or a chunk, not both"
    if group.ratio and group.block_tokens and group.block_tokens % group.ratio and group.shape == "entries":
        yield f"{place}.block_tokens", f"{group.block_tokens} is not a multiple of the ratio {group.ratio}"
    for dtype, page in group.page_bytes.items():
        size = group.row_bytes or group.entry_bytes.get(dtype)
        rows = (group.block_tokens or 0) // (group.ratio or 1 if group.shape == "entries" else 1)
        if size is None:
            yield f"{place}.page_bytes.{dtype}", "has no entry_bytes of this format"
        elif page < rows * size:
            yield f"{place}.page_bytes.{dtype}", f"{page} is less than the {rows} x {size} bytes that it holds"


def _layer_faults(group: Group, place: str) -> Iterable[tuple[str, str]]:
    if group.layer_ids is not None:
        if len(group.layer_ids) != group.layers:
            yield f"{place}.layer_ids", f"lists {len(group.layer_ids)} layers, but layers = {group.layers}"
        if list(group.layer_ids) != sorted(set(group.layer_ids)):
            yield f"{place}.layer_ids", "expected increasing ids, each once"
