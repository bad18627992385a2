"""Byte layouts of cache pages: the loader of `spec/layouts/*.toml`.

A *layout* describes one cached entry as a list of fields. A *page* is a layout at a given size: it says where every
field of entry `i`, head `h` lies inside a block. Kernels take a page, so no kernel holds a byte offset of its own.

Address of a field in a block of `entries` entries, in bytes from the block's start:

    region start + field offset + i * entry_step + h * head_step

Fields of one region are interleaved; regions follow one another (all rows of region 0, then all of region 1). With
order NHD an entry's heads are neighbours, with HND a head's entries are.
"""

import math
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR

DType = Literal["e4m3", "e2m1", "bf16", "fp32", "fp64", "ue8m0", "u8"]
ScaleRule = Literal["none", "fixed", "pow2_ceil", "amax_div"]

BITS: dict[str, int] = {"e4m3": 8, "e2m1": 4, "bf16": 16, "fp32": 32, "fp64": 64, "ue8m0": 8, "u8": 8}
ROLE_DTYPES: dict[str, frozenset[str]] = {
    "quantised": frozenset({"e4m3", "e2m1"}),
    "plain": frozenset({"bf16", "fp32", "fp64"}),
    "scale": frozenset({"ue8m0", "fp32"}),
    "pad": frozenset({"u8"}),
}


class Field(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One field of an entry. `count` is in elements; "dim" stands for the vector length that the model gives."""

    name: str
    role: Literal["quantised", "plain", "scale", "pad"]
    dtype: DType
    count: int | Literal["dim"]
    region: int = 0
    vector: str = "kv"


class Place(msgspec.Struct, frozen=True):
    """Where a field lies in a page, in bytes from the block's start. `count` is in elements."""

    dtype: DType
    count: int
    base: int
    entry_step: int
    head_step: int

    @property
    def nbytes(self) -> int:
        """Bytes of the field in one entry and head."""
        return self.count * BITS[self.dtype] // 8


class Vector(msgspec.Struct, frozen=True):
    """The parts of one logical vector: quantised elements first, then plain ones, `dim` in all."""

    dim: int
    quantised: Place | None
    plain: Place | None
    scale: Place | None
    pad: Place | None


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file of `spec/layouts/`.

    heads, dim       per entry; "model" where the model gives them
    order            NHD: an entry's heads are neighbours; HND: a head's entries are
    entry_bytes      bytes of an entry, pinned against the sum of the fields
    stride_multiple  the distance of blocks is a multiple of it, in bytes
    base_align       an arena's address is a multiple of it, in bytes; a power of two
    scale_rule       none; fixed: 1.0, not stored; pow2_ceil: 2 ** ceil(log2(amax / max)); amax_div: amax / max in fp32,
                     where amax is the largest magnitude of a tile and max that of the quantised format
    tile             quantised elements under one scale
    min_exponent     floor of a scale, as a power of two: amax = 0 has no logarithm
    source, confidence  where the layout is from, and how surely
    """

    id: str
    role: Literal["kv", "index", "state"]
    summary: str
    source: str
    confidence: Literal["read", "published", "recall", "defined here"]
    heads: int | Literal["model"]
    dim: int | Literal["model"]
    order: Literal["NHD", "HND"]
    entry_bytes: int | Literal["model"]
    stride_multiple: int
    base_align: int
    scale_rule: ScaleRule
    fields: tuple[Field, ...]
    tile: int = 0
    min_exponent: int = 0

    def page(
        self, entries: int, *, heads: int | None = None, dim: int | None = None, stride: int | None = None
    ) -> "Page":
        """The layout at a size: `entries` per block, `heads` and `dim` where the model gives them.

        `stride` is the distance of consecutive blocks in bytes; the smallest legal one if absent.
        InputError: a size that the layout fixes, or does not know, or a stride that is too small or misaligned.
        """
        place = f"{self.id}.toml:page"
        real_heads = _given(self.heads, heads, f"{place}.heads")
        real_dim = _given(self.dim, dim, f"{place}.dim")
        if entries < 1:
            raise InputError(f"{place}.entries: {entries} is not a positive number of entries")
        raw, places = _place(self, entries, real_heads, real_dim)
        least = _round_up(raw, self.stride_multiple)
        real_stride = least if stride is None else stride
        if real_stride < raw or real_stride % self.stride_multiple:
            raise InputError(
                f"{place}.stride: {real_stride} is not a multiple of {self.stride_multiple} that holds {raw} bytes"
            )
        return Page(self, entries, real_heads, real_dim, raw, real_stride, places)


class Page(msgspec.Struct, frozen=True):
    """A layout at a size. `nbytes` are the used bytes of a block, `stride` the distance of blocks, both in bytes."""

    layout: Layout
    entries: int
    heads: int
    dim: int
    nbytes: int
    stride: int
    places: dict[str, Place]

    def __hash__(self) -> int:
        return hash((self.layout.id, self.entries, self.heads, self.dim, self.stride))

    def resized(self, entries: int) -> "Page":
        """The same heads and dim with `entries` per block, at the smallest legal stride."""
        return self.layout.page(entries, heads=self.heads, dim=self.dim)

    def aligned_stride(self, *multiples: int) -> int:
        """The least device stride in bytes that also is a multiple of each of `multiples`."""
        return _round_up(self.nbytes, math.lcm(self.layout.stride_multiple, *multiples))

    def file_stride(self, sector: int = 4096) -> int:
        """The least distance of blocks in a file, in bytes: only O_DIRECT's sector counts there."""
        return _round_up(self.nbytes, sector)

    def vector(self, name: str) -> Vector:
        """The parts of vector `name`. InputError: the layout has none of that name."""
        parts = {f.role: self.places[f.name] for f in self.layout.fields if f.vector == name}
        if not parts:
            raise InputError(f"{self.layout.id}.toml:fields: no vector {name!r}")
        quantised, plain = parts.get("quantised"), parts.get("plain")
        dim = sum(part.count for part in (quantised, plain) if part is not None)
        return Vector(dim, quantised, plain, parts.get("scale"), parts.get("pad"))

    def regions(self) -> tuple[Place, ...]:
        """Every region as one field of bytes: the units that move when an entry moves."""
        members: dict[int, list[Place]] = {}
        for field in self.layout.fields:
            members.setdefault(field.region, []).append(self.places[field.name])
        return tuple(
            Place("u8", sum(p.nbytes for p in ps), ps[0].base, ps[0].entry_step, ps[0].head_step)
            for _, ps in sorted(members.items())
        )


def _given(fixed: int | str, given: int | None, place: str) -> int:
    if isinstance(fixed, int):
        if given is not None and given != fixed:
            raise InputError(f"{place}: the layout fixes {fixed}, not {given}")
        return fixed
    if given is None or given < 1:
        raise InputError(f"{place}: the model must give a positive number, not {given}")
    return given


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _place(layout: Layout, entries: int, heads: int, dim: int) -> tuple[int, dict[str, Place]]:
    """Used bytes of a block and the place of every field."""
    places: dict[str, Place] = {}
    start = 0
    for region in range(1 + max(f.region for f in layout.fields)):
        members = [f for f in layout.fields if f.region == region]
        sizes = [_count(f, dim) * BITS[f.dtype] // 8 for f in members]
        row = sum(sizes)
        entry_step, head_step = (row * heads, row) if layout.order == "NHD" else (row, row * entries)
        offset = start
        for field, size in zip(members, sizes, strict=True):
            places[field.name] = Place(field.dtype, _count(field, dim), offset, entry_step, head_step)
            offset += size
        start += row * heads * entries
    return start, places


def _count(field: Field, dim: int) -> int:
    return dim if field.count == "dim" else field.count


def names(folder: Path = SPEC_DIR / "layouts") -> tuple[str, ...]:
    """The identifiers of all layouts, sorted."""
    return tuple(sorted(path.stem for path in folder.glob("*.toml")))


@cache
def load(name: str) -> Layout:
    """The layout `name` of `spec/layouts/`. InputError: no such layout, or a bad file."""
    return load_file(SPEC_DIR / "layouts" / f"{name}.toml")


def load_file(path: Path) -> Layout:
    """The layout in `path`, checked. InputError (one line: file, place, reason) for anything wrong with it."""
    try:
        layout = msgspec.toml.decode(path.read_bytes(), type=Layout)
    except OSError as error:
        raise InputError(f"{path.name}: cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path.name}: {' '.join(str(error).split())}") from error
    for place, reason in _faults(layout, path.stem):
        raise InputError(f"{path.name}:{place}: {reason}")
    return layout


def _faults(layout: Layout, stem: str) -> Sequence[tuple[str, str]]:
    """Every (place, reason) that makes a decoded layout unusable."""
    faults: list[tuple[str, str]] = []
    if layout.id != stem:
        faults.append(("id", f"{layout.id!r} is not the file's name"))
    for key in ("heads", "dim", "entry_bytes", "stride_multiple", "base_align"):
        if isinstance(getattr(layout, key), int) and getattr(layout, key) < 1:
            faults.append((key, "must be positive"))
    if layout.base_align & (layout.base_align - 1):
        faults.append(("base_align", f"{layout.base_align} is not a power of two"))
    if not layout.fields:
        return [*faults, ("fields", "there are none")]
    regions = {field.region for field in layout.fields}
    if regions != set(range(len(regions))):
        faults.append(("fields.region", f"regions {sorted(regions)} are not 0, 1, ... without a gap"))
    if len({field.name for field in layout.fields}) != len(layout.fields):
        faults.append(("fields.name", "two fields have the same name"))
    for field in layout.fields:
        where = f"fields.{field.name}"
        if field.dtype not in ROLE_DTYPES[field.role]:
            faults.append((where, f"a {field.role} field cannot be {field.dtype}"))
        if field.count != "dim" and (field.count < 1 or field.count * BITS[field.dtype] % 8):
            faults.append((where, f"{field.count} elements are not a whole positive number of bytes"))
        if field.count == "dim" and layout.dim != "model":
            faults.append((where, f"count is given by the model, but dim is fixed at {layout.dim}"))
    return faults or [*_vector_faults(layout), *_size_faults(layout)]


def _vector_faults(layout: Layout) -> list[tuple[str, str]]:
    """Faults between the fields of one vector: sums, tiles, scale rule."""
    faults: list[tuple[str, str]] = []
    if ("quantised" in {f.role for f in layout.fields}) != (layout.scale_rule != "none"):
        faults.append(("scale_rule", f"{layout.scale_rule!r} does not fit the fields' roles"))
    for vector in dict.fromkeys(field.vector for field in layout.fields):
        members = [f for f in layout.fields if f.vector == vector]
        where = f"fields.{vector}"
        if len({f.role for f in members}) != len(members):
            faults.append((where, "a vector has two fields of one role"))
            continue
        role = {f.role: f for f in members}
        counts = [role[key].count for key in ("quantised", "plain") if key in role]
        if layout.dim != "model" and sum(c for c in counts if isinstance(c, int)) != layout.dim:
            faults.append((where, f"elements {counts} do not add up to dim {layout.dim}"))
        tiled = layout.scale_rule in {"pow2_ceil", "amax_div"} and "quantised" in role
        if tiled != ("scale" in role):
            faults.append((where, f"scale rule {layout.scale_rule!r} does not fit the presence of a scale field"))
        elif tiled:
            count = role["quantised"].count
            if layout.tile < 1 or not isinstance(count, int) or count != layout.tile * int(role["scale"].count):
                faults.append((where, f"{count} elements are not {role['scale'].count} tiles of {layout.tile}"))
            if layout.scale_rule == "amax_div" and role["scale"].dtype != "fp32":
                faults.append((where, "scale rule 'amax_div' needs an fp32 scale"))
            if not -126 <= layout.min_exponent <= 0:
                faults.append(("min_exponent", f"{layout.min_exponent} is outside [-126, 0]"))
    return faults


def _size_faults(layout: Layout) -> list[tuple[str, str]]:
    """Faults in the bytes: the pinned entry size, and fields that are not aligned to their own elements."""
    faults: list[tuple[str, str]] = []
    heads = layout.heads if isinstance(layout.heads, int) else 1
    dim = layout.dim if isinstance(layout.dim, int) else 1
    raw, places = _place(layout, 1, heads, dim)
    fixed = isinstance(layout.heads, int) and isinstance(layout.dim, int)
    if fixed != isinstance(layout.entry_bytes, int) or (fixed and raw != layout.entry_bytes):
        faults.append(("entry_bytes", f"{layout.entry_bytes} is not what the fields add up to ({raw})"))
    for name, place in places.items():
        item = max(1, BITS[place.dtype] // 8)
        if place.base % item or place.entry_step % item:
            faults.append((f"fields.{name}", f"is not aligned to its {item}-byte elements"))
    return faults
