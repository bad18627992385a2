"""A local store that passes the page cache by: every byte moves between a file and an aligned buffer, O_DIRECT.

The unit is the block size of the file system, ``f_frsize`` of statvfs(3).  Source: open(2), notes on O_DIRECT: memory
address, file offset and length had to be multiples of it at first, and since Linux 2.6 of the logical block of the
device, of which it is a multiple.  Opening the store writes and reads one unit, so that a file system that takes none
says so there.

Files and folder are those of ``media.Files``, so either store finds what the other one wrote.  Only whole units can be
written, hence the padding of ``object_file``; a file of any other length is read to the end of its last unit.  The
headers that a start looks at are read through the page cache.

Each thread has one buffer for life, so what a row was told of a transfer is true when the same thread carries it out.
"""

import contextlib
import mmap
import os
import threading
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor

from hybridkv_ref.allocator.media import TEMPORARY, Files, MediumError
from hybridkv_ref.allocator.object_file import encode_units, unit_bytes, whole_units
from hybridkv_ref.errors import InputError
from hybridkv_ref.io_unit import Transfer, remainders

LEAST_UNIT = 512  # bytes of a sector, the least that a block device addresses
PIECE = 1 << 20
"""Bytes of a buffer, at least: what one call moves."""


class DirectFiles(Files):
    """Objects as files of one local folder, written and read past the page cache."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        if not self.local:
            raise InputError(f"{url}:store_io: direct I/O needs a local folder")
        self.flag: int = getattr(os, "O_DIRECT", 0)
        if not self.flag:
            raise InputError(f"{url}:store_io: this operating system has no O_DIRECT")
        self.unit = max(LEAST_UNIT, os.statvfs(self.root).f_frsize)
        self.own = threading.local()
        self.prove(url)

    def prove(self, url: str) -> None:
        """Writes and reads one unit; InputError where the file system refuses."""
        path = f"{self.root}/{TEMPORARY}{uuid.uuid4().hex}"
        try:
            self.pour(path, bytes(self.unit))
            self.fetch(path)
        except OSError as error:
            raise InputError(
                f"{url}:store_io: the file system takes no direct I/O: {error.strerror or error}"
            ) from None
        finally:
            with contextlib.suppress(OSError):
                Path(path).unlink()

    def buffer(self) -> memoryview:
        """This thread's buffer, whole units of memory that begin at a multiple of the unit."""
        found: memoryview | None = getattr(self.own, "buffer", None)
        if found is None:
            found = self.own.buffer = aligned(whole_units(PIECE, self.unit), self.unit)
        return found

    def transfer(self, length: int) -> Transfer:
        """A transfer of a file of so many bytes, from its start, by this thread."""
        return Transfer(True, *remainders(address(self.buffer()), 0, length, self.unit))

    def outgoing(self, sizes: Sequence[int]) -> Transfer:
        """Past the page cache."""
        return self.transfer(unit_bytes(sizes, self.unit))

    def incoming(self, name: str) -> Transfer:
        """Past the page cache; of a file that is not there no byte."""
        try:
            size = Path(self.path(name)).stat().st_size
        except OSError:
            size = 0
        return self.transfer(whole_units(size, self.unit))

    def encode(self, parts: Sequence[Tensor], meta: Mapping[str, str]) -> bytes:
        """What an object's file holds, in whole units; MediumError if its header has no room for the description."""
        try:
            return encode_units(parts, meta, self.unit)
        except ValueError as error:
            raise MediumError(f"{self.root}: cannot be described: {error}") from None

    def put(self, name: str, data: bytes) -> None:
        """Writes one file, whole or not at all; counters, which are JSON, get spaces up to a whole unit."""
        super().put(name, data.ljust(whole_units(len(data), self.unit)))

    def pour(self, path: str, data: bytes) -> None:
        """Writes a new file of whole units, in pieces of one buffer, and syncs it."""
        buffer, source = self.buffer(), memoryview(data)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | self.flag, 0o666)
        try:
            for at in range(0, len(source), len(buffer)):
                piece = buffer[: len(source) - at]
                piece[:] = source[at : at + len(piece)]
                if os.pwrite(handle, piece, at) != len(piece):
                    raise OSError(f"short write of {len(piece)} bytes at {at}")
            os.fsync(handle)
        finally:
            os.close(handle)

    def fetch(self, path: str) -> bytes:
        """All bytes of a file, in pieces of one buffer; the last one ends with the file."""
        buffer, found = self.buffer(), []
        handle = os.open(path, os.O_RDONLY | self.flag)
        try:
            at, end = 0, os.fstat(handle).st_size
            while at < end:
                piece = buffer[: whole_units(end - at, self.unit)]
                count = os.preadv(handle, [piece], at)
                if count < min(len(piece), end - at):
                    raise OSError(f"short read of {len(piece)} bytes at {at}")
                found.append(bytes(piece[:count]))
                at += count
        finally:
            os.close(handle)
        return b"".join(found)


def aligned(length: int, unit: int) -> memoryview:
    """Memory of so many bytes that begins at a multiple of ``unit``, also of one that is larger than a page."""
    memory = memoryview(mmap.mmap(-1, length + unit))
    skip = -address(memory) % unit
    return memory[skip : skip + length]


def address(buffer: memoryview) -> int:
    """Of the first byte."""
    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
