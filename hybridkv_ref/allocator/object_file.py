"""The file of one durable object: safetensors, one uint8 tensor per part, and what the file says of itself.

The metadata hold the object's description and a checksum of all bytes of the parts.  A file for direct I/O is whole
units long: its header ends in spaces, and a tensor that is no part follows the last one.  Both forms are read alike.
"""

import hashlib
import io
import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO

from safetensors.torch import load, save
from torch import Tensor

SCHEMA = "hybridkv-object-1"
PADDING = "padding"
MOST_HEADER = 1 << 24  # bytes

Description = Mapping[str, int | str | bool]


def checksum(parts: Sequence[Tensor]) -> str:
    """Of all bytes of all parts, in order."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(_bytes(part))
    return digest.hexdigest()


def metadata(about: Description, checked: str) -> dict[str, str]:
    """What a file says of itself: its description and the checksum of its parts."""
    text = json.dumps(dict(about), sort_keys=True)
    return {"schema": SCHEMA, "checksum": checked, "about": text, "described": digest(text)}


def digest(text: str) -> str:
    """Of a description."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def header(file: BinaryIO) -> tuple[int, dict[str, Any]]:
    """(bytes, contents) of the header of an open safetensors file; ValueError if it is torn."""
    size = file.read(8)
    if len(size) < 8:
        raise ValueError(f"{len(size)} bytes")
    (length,) = struct.unpack("<Q", size)
    if length > MOST_HEADER:
        raise ValueError(f"header of {length} bytes")
    found = json.loads(file.read(length))
    if not isinstance(found, dict):
        raise ValueError("the header is no object")
    return length, found


def encode(parts: Sequence[Tensor], meta: Mapping[str, str]) -> bytes:
    """The file of these parts, uint8 of any shape."""
    return save({f"p{i}": part.contiguous() for i, part in enumerate(parts)}, dict(meta))


def encode_units(parts: Sequence[Tensor], meta: Mapping[str, str], unit: int) -> bytes:
    """The same in whole units, as many bytes as ``unit_bytes`` says; ValueError if the header has no room."""
    entries: dict[str, Any] = {"__metadata__": dict(meta)}
    at = 0
    for i, part in enumerate(parts):
        entries[f"p{i}"] = {"dtype": "U8", "shape": list(part.shape), "data_offsets": [at, at + part.numel()]}
        at += part.numel()
    rest = -at % unit
    if rest:
        entries[PADDING] = {"dtype": "U8", "shape": [rest], "data_offsets": [at, at + rest]}
    text, room = json.dumps(entries).encode(), _header_bytes(len(parts), unit) - 8
    if len(text) > room:
        raise ValueError(f"a header of {len(text)} bytes has room for {room}")
    return b"".join([struct.pack("<Q", room), text.ljust(room), *(_bytes(part) for part in parts), bytes(rest)])


def unit_bytes(sizes: Sequence[int], unit: int) -> int:
    """Bytes of a file in whole units whose parts have so many; known before the object can be described."""
    return _header_bytes(len(sizes), unit) + whole_units(sum(sizes), unit)


def whole_units(count: int, unit: int) -> int:
    """The least multiple of ``unit`` that is no less."""
    return count + -count % unit


def decode(data: bytes) -> tuple[dict[str, Any], list[Tensor]]:
    """Metadata and parts of a file in either form.

    SafetensorError, ValueError or TypeError if it is torn, KeyError if it lacks a part.
    """
    _, found = header(io.BytesIO(data))
    tensors = load(data)
    tensors.pop(PADDING, None)
    return dict(found.get("__metadata__") or {}), [tensors[f"p{i}"] for i in range(len(tensors))]


def _header_bytes(parts: int, unit: int) -> int:
    # A description has some 1,000 bytes and 90 more per part, its place in the file 70.
    return whole_units(2048 + 512 * parts, unit)


def _bytes(part: Tensor) -> memoryview:
    found: memoryview = part.contiguous().view(-1).numpy().data
    return found
