"""Where durable copies lie: host memory, or files below a URL that fsspec opens.

A file (see ``object_file``) is written under a temporary name, synced and renamed; the rename is what commits it.  A
file that is torn, of another size than its header says or without a description is none: opening a store deletes
temporary files and passes over the rest.  The checksum is compared whenever bytes are read.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import fsspec
import torch
from safetensors import SafetensorError
from torch import Tensor

from hybridkv_ref.allocator.object_file import SCHEMA, Description, checksum, decode, digest, encode, header, metadata
from hybridkv_ref.errors import InputError
from hybridkv_ref.io_unit import BUFFERED, Transfer

SUFFIX = ".safetensors"
TEMPORARY = ".writing-"
COUNTERS = "counters.json"


class MediumError(Exception):
    """A medium could not write or read an object: the one line says what and why."""


class Medium(Protocol):
    """Names to objects of several parts, each with a description."""

    def outgoing(self, sizes: Sequence[int]) -> Transfer:
        """How the bytes of an object whose parts have so many will move, if this thread writes it."""

    def incoming(self, name: str) -> Transfer:
        """How the bytes of an object will move, if this thread reads it."""

    def write(self, name: str, parts: Sequence[Tensor], about: Description) -> None:
        """Stores an object, whole or not at all; MediumError otherwise."""

    def redescribe(self, name: str, about: Description) -> None:
        """Another description of an object whose bytes stay; MediumError, with nothing changed, if it cannot."""

    def read(self, name: str) -> list[Tensor]:
        """The parts of an object; MediumError if any byte is not what was written."""

    def delete(self, name: str) -> None:
        """Forgets an object; nothing if it is not there."""

    def objects(self) -> Iterator[tuple[str, Description]]:
        """Every whole object with its description."""

    def location(self, name: str) -> str:
        """Where it is, for people."""

    def remember(self, values: Mapping[str, int]) -> None:
        """Keeps the counters that outlive a process."""

    def recall(self, counters: Collection[str]) -> Mapping[str, int]:
        """The counters that were kept, empty where none were; InputError if they are not these."""


class HostMemory:
    """Copies in this process's memory; gone with it."""

    def __init__(self) -> None:
        self.held: dict[str, tuple[list[Tensor], Description, str]] = {}

    def outgoing(self, sizes: Sequence[int]) -> Transfer:
        """Nothing has a unit here."""
        return BUFFERED

    def incoming(self, name: str) -> Transfer:
        """Nothing has a unit here."""
        return BUFFERED

    def write(self, name: str, parts: Sequence[Tensor], about: Description) -> None:
        """Keeps the parts; they are the caller's copies."""
        self.held[name] = (list(parts), about, checksum(parts))

    def redescribe(self, name: str, about: Description) -> None:
        """Another description; MediumError if the parts are gone."""
        found = self.held.get(name)
        if found is None:
            raise MediumError(f"host:{name}: not there")
        self.held[name] = (found[0], about, found[2])

    def read(self, name: str) -> list[Tensor]:
        """The parts; MediumError if they are gone or changed."""
        found = self.held.get(name)
        if found is None:
            raise MediumError(f"host:{name}: not there")
        if checksum(found[0]) != found[2]:
            raise MediumError(f"host:{name}: checksum differs")
        return found[0]

    def delete(self, name: str) -> None:
        """Forgets them."""
        self.held.pop(name, None)

    def objects(self) -> Iterator[tuple[str, Description]]:
        """None: a new process finds nothing in host memory."""
        return iter(())

    def location(self, name: str) -> str:
        """Its name."""
        return f"host:{name}"

    def remember(self, values: Mapping[str, int]) -> None:
        """Nothing in host memory outlives the process."""

    def recall(self, counters: Collection[str]) -> Mapping[str, int]:
        """None."""
        return {}


class Files:
    """Objects as files in one folder of any file system that fsspec knows."""

    def __init__(self, url: str, fs: Any = None) -> None:
        self.fs: Any = fs
        self.root: str = url
        try:
            if fs is None:
                self.fs, self.root = fsspec.core.url_to_fs(url)
            self.fs.makedirs(self.root, exist_ok=True)
        except (OSError, ValueError, ImportError) as error:
            raise InputError(f"{url}:store: cannot be opened: {error}") from None
        self.local = "file" in (self.fs.protocol if isinstance(self.fs.protocol, tuple) else (self.fs.protocol,))

    def outgoing(self, sizes: Sequence[int]) -> Transfer:
        """Through the page cache."""
        return BUFFERED

    def incoming(self, name: str) -> Transfer:
        """Through the page cache."""
        return BUFFERED

    def path(self, name: str) -> str:
        """The path of an object."""
        return f"{self.root}/{name}{SUFFIX}"

    def location(self, name: str) -> str:
        """Its URL."""
        return str(self.fs.unstrip_protocol(self.path(name)))

    def write(self, name: str, parts: Sequence[Tensor], about: Description) -> None:
        """Temporary name, checksum, sync, rename; MediumError, with the temporary file deleted, if any of it fails."""
        self.put(name + SUFFIX, self.encode(parts, metadata(about, checksum(parts))))

    def redescribe(self, name: str, about: Description) -> None:
        """Writes the whole file anew under a temporary name; its checksum stays that of the bytes once written."""
        meta, parts = self.whole(name)
        self.put(name + SUFFIX, self.encode(parts, metadata(about, str(meta.get("checksum")))))

    def encode(self, parts: Sequence[Tensor], meta: Mapping[str, str]) -> bytes:
        """What an object's file holds; MediumError if it cannot be said."""
        return encode(parts, meta)

    def put(self, name: str, data: bytes) -> None:
        """Writes one file, whole or not at all."""
        temporary = f"{self.root}/{TEMPORARY}{name}-{uuid.uuid4().hex}"
        try:
            self.pour(temporary, data)
            if self.fs.size(temporary) != len(data):
                raise OSError(f"holds {self.fs.size(temporary)} of {len(data)} bytes")
            if self.local:
                Path(temporary).replace(f"{self.root}/{name}")
                self.sync_folder()
            else:
                self.fs.mv(temporary, f"{self.root}/{name}")
        except OSError as error:
            with contextlib.suppress(OSError):
                self.fs.rm_file(temporary)
            raise MediumError(f"{self.root}/{name}: cannot be written: {error}") from None

    def pour(self, path: str, data: bytes) -> None:
        """Writes a new file and makes it last; OSError if not all of it is written."""
        with self.fs.open(path, "wb") as file:
            if file.write(data) != len(data):
                raise OSError(f"short write of {len(data)} bytes")
            file.flush()
            if self.local:
                os.fsync(file.fileno())

    def fetch(self, path: str) -> bytes:
        """All bytes of a file; OSError if it cannot be read."""
        with self.fs.open(path, "rb") as file:
            data: bytes = file.read()
        return data

    def sync_folder(self) -> None:
        """Makes renames last."""
        handle = os.open(self.root, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def read(self, name: str) -> list[Tensor]:
        """The parts; MediumError for a file that is missing, torn, changed or of something else."""
        meta, parts = self.whole(name)
        if any(part.dtype != torch.uint8 for part in parts):
            raise MediumError(f"{self.path(name)}: parts that are no bytes")
        if checksum(parts) != meta.get("checksum"):
            raise MediumError(f"{self.path(name)}: checksum differs")
        return parts

    def whole(self, name: str) -> tuple[dict[str, Any], list[Tensor]]:
        """Metadata and parts of an object's file; MediumError if it is missing or torn."""
        try:
            data = self.fetch(self.path(name))
        except OSError as error:
            raise MediumError(f"{self.path(name)}: cannot be read: {error}") from None
        try:
            return decode(data)
        except KeyError as error:
            raise MediumError(f"{self.path(name)}: no part {error}") from None
        except (SafetensorError, ValueError, TypeError) as error:
            raise MediumError(f"{self.path(name)}: torn: {error}") from None

    def delete(self, name: str) -> None:
        """Deletes the file."""
        with contextlib.suppress(OSError):
            self.fs.rm_file(self.path(name))

    def objects(self) -> Iterator[tuple[str, Description]]:
        """Every whole file with its description; deletes what was being written when a process died."""
        for path in self.unfinished():
            with contextlib.suppress(OSError):
                self.fs.rm_file(path)
        return self.objects_now()

    def objects_now(self) -> Iterator[tuple[str, Description]]:
        """Every whole file with its description."""
        for path in self.listed():
            if path.endswith(SUFFIX) and not self.is_temporary(path):
                about = self.describe(path)
                if about is not None:
                    yield path.rsplit("/", 1)[-1].removesuffix(SUFFIX), about

    def unfinished(self) -> list[str]:
        """Files under a temporary name."""
        return [path for path in self.listed() if self.is_temporary(path)]

    def listed(self) -> list[str]:
        """Every file of the folder."""
        return sorted(self.fs.ls(self.root, detail=False, refresh=True))

    @staticmethod
    def is_temporary(path: str) -> bool:
        """Whether a file is being written, or was when its process died."""
        return path.rsplit("/", 1)[-1].startswith(TEMPORARY)

    def remember(self, values: Mapping[str, int]) -> None:
        """Keeps the counters that outlive a process; MediumError if they cannot be written."""
        self.put(COUNTERS, json.dumps(dict(values), sort_keys=True).encode())

    def recall(self, counters: Collection[str]) -> Mapping[str, int]:
        """The counters that were kept, empty where there is no file; InputError for any other file than of these."""
        try:
            found = json.loads(self.fetch(f"{self.root}/{COUNTERS}"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise InputError(f"{self.root}/{COUNTERS}: cannot be read: {error}") from None
        counts = isinstance(found, dict) and all(type(value) is int and value >= 0 for value in found.values())
        if not counts or found.keys() != set(counters):
            raise InputError(f"{self.root}/{COUNTERS}: expected counters {', '.join(sorted(counters))}")
        return dict(found)

    def describe(self, path: str) -> Description | None:
        """The description of a whole file, None for any other; reads the header only."""
        try:
            with self.fs.open(path, "rb") as file:
                length, found = header(file)
            ends = [entry["data_offsets"][1] for key, entry in found.items() if key != "__metadata__"]
            meta = found["__metadata__"]
            whole = self.fs.size(path) == 8 + length + max(ends, default=0)
            if meta["schema"] != SCHEMA or not whole or digest(meta["about"]) != meta["described"]:
                return None
            about = json.loads(meta["about"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            return None
        return about if isinstance(about, dict) else None
