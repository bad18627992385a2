"""Reads traces of events: a stream of any size, line by line, plain, gzip or zstd by name, or standard input.

What was read before a fault is given first; the fault then is one InputError with file, line and reason.
"""

import gzip
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Event, Header

CHUNK = 1 << 14
"""Bytes that are read at once: what they hold is judged, and forgotten, while it is still in the processor's cache."""

LONGEST = 64 << 20
"""Bytes that a line may have."""

STDIN = "-"
PACKED = (".gz", ".zst", ".zstd")
_EVENT = msgspec.json.Decoder(Event)
_HEADER = msgspec.json.Decoder(Header)


@contextmanager
def open_trace(path: str) -> Iterator[tuple[IO[bytes], int]]:
    """The bytes of a trace, and how many there are (0: not known)."""
    if path == STDIN:
        yield sys.stdin.buffer, 0
        return
    try:
        size = Path(path).stat().st_size
        stream = _unpacked(path)
    except OSError as error:
        raise InputError(f"{path}:1: cannot be read: {error.strerror}") from None
    with stream:
        yield stream, 0 if path.endswith(PACKED) else size


def _unpacked(path: str) -> IO[bytes]:
    if path.endswith(PACKED[0]):
        return cast("IO[bytes]", gzip.open(path, "rb"))
    if path.endswith(PACKED[1:]):
        try:
            import zstandard
        except ImportError:
            raise InputError(f"{path}:1: needs the package zstandard to be read (pip install zstandard)") from None
        return cast("IO[bytes]", _Zstd(Path(path).open("rb"), zstandard.ZstdDecompressor().decompressobj))
    return Path(path).open("rb")


class _Zstd:
    """What zstd frames hold; EOFError for a file that ends inside one, which the library's own reader does not tell."""

    PIECE = 1 << 11
    """Packed bytes that are unpacked at once, which bounds what comes of them: 64 MiB of equal bytes at most."""

    def __init__(self, file: IO[bytes], new_frame: Callable[[], Any]) -> None:
        self.file, self.new_frame, self.frame = file, new_frame, new_frame()
        self.rest, self.inside = b"", False

    def __enter__(self) -> "_Zstd":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()

    def read(self, _size: int) -> bytes:
        """What the next piece holds; nothing at the end."""
        while packed := self.rest or self.file.read(self.PIECE):
            found: bytes = self.frame.decompress(packed)
            self.rest, self.inside = b"", not self.frame.eof
            if self.frame.eof:
                self.rest, self.frame = self.frame.unused_data, self.new_frame()
            if found:
                return found
        if self.inside:
            raise EOFError("the file ends inside a zstd frame")
        return b""


class TraceReader:
    """One pass over a trace.

    ``header`` is read at once, ``batches`` gives lists of events and the line of the first.
    """

    def __init__(self, stream: IO[bytes], place: str) -> None:
        self.stream, self.place, self.line, self.read = stream, place, 1, 0
        self.rest = b""
        first = self._first_line()
        if not first.strip():
            raise InputError(f"{place}:1: empty; expected a header")
        try:
            self.header = _HEADER.decode(first)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise InputError(f"{place}:1: not a header of a trace: {error}") from None
        self.line = 2

    def _chunk(self) -> bytes:
        try:
            data = self.stream.read(CHUNK)
        except (OSError, EOFError, ValueError) as error:
            raise InputError(f"{self.place}:{self.line}: truncated or damaged: {error}") from None
        except Exception as error:
            # The optional library's own error class is not known here.
            raise InputError(f"{self.place}:{self.line}: truncated or damaged: {error}") from None
        self.read += len(data)
        return data

    def _first_line(self) -> bytes:
        pieces = [self._chunk()]
        while pieces[-1] and b"\n" not in pieces[-1]:
            if self.read > LONGEST:
                raise InputError(f"{self.place}:1: longer than {LONGEST >> 20} MiB")
            pieces.append(self._chunk())
        line, _, self.rest = b"".join(pieces).partition(b"\n")
        return line

    def batches(self) -> Iterator[tuple[int, list[Event]]]:
        """(line of the first event, events): all that is whole, then the fault if there is one."""
        cut = self.rest.rfind(b"\n") + 1
        pieces = [self.rest[cut:]]
        yield from self._decode(self.rest[:cut])
        while True:
            fault: InputError | None = None
            try:
                data = self._chunk()
            except InputError as error:
                data, fault = b"", error
            cut = data.rfind(b"\n")
            if data and cut < 0:
                pieces.append(data)
                if sum(map(len, pieces)) > LONGEST:
                    raise InputError(f"{self.place}:{self.line}: longer than {LONGEST >> 20} MiB")
                continue
            whole = b"".join([*pieces, data[: cut + 1]])
            pieces = [data[cut + 1 :]]
            yield from self._decode(whole)
            if fault is not None:
                raise fault
            if not data:
                return

    def _decode(self, whole: bytes) -> Iterator[tuple[int, list[Event]]]:
        if not whole.strip():
            self.line += whole.count(b"\n")
            return
        try:
            events = _EVENT.decode_lines(whole)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield from self._one_by_one(whole)
            return
        first, lines = self.line, whole.count(b"\n") + (not whole.endswith(b"\n"))
        if lines != len(events):
            yield from self._one_by_one(whole)
            return
        self.line += lines
        yield first, events

    def _one_by_one(self, whole: bytes) -> Iterator[tuple[int, list[Event]]]:
        """Finds the faulty line, after what stands before it; blank lines count and are passed over."""
        lines = whole.split(b"\n")
        if not lines[-1]:
            lines.pop()
        for line in lines:
            if line.strip():
                try:
                    event = _EVENT.decode(line)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    reason = "truncated: " if "truncated" in str(error) else ""
                    raise InputError(f"{self.place}:{self.line}: not an event: {reason}{error}") from None
                yield self.line, [event]
            self.line += 1


def read_trace(path: str) -> tuple[Header, list[Event]]:
    """A whole trace in memory; InputError for the first line that is not one."""
    with open_trace(path) as (stream, _):
        reader = TraceReader(stream, path)
        return reader.header, [event for _, events in reader.batches() for event in events]


def encode_trace(header: Header, events: list[Event]) -> bytes:
    """A trace as a file's contents."""
    return b"".join(msgspec.json.encode(record) + b"\n" for record in (header, *events))
