"""Readers of recorded request traces: who asked for how many tokens when, and which prompt blocks are the same.

==================  =================================================================  ==========  ====================
format              one record                                                         block       recognised by
==================  =================================================================  ==========  ====================
Mooncake JSONL      a line {timestamp (ms), input_length, output_length, hash_ids}     512 tokens  ``{``
kv-cache-tester     a file {block_size, hash_id_scope, requests: [{t (s), in, out,     as it says  ``{`` and a key
JSON                hash_ids}]}: one conversation; sub-agents hold requests of                     block_size or
                    their own on the same clock                                                    requests
Azure CSV           a line TIMESTAMP,ContextTokens,GeneratedTokens                     none        its header line
==================  =================================================================  ==========  ====================

A block id stands for a block *and all that precedes it*, so two requests share the blocks up to the first id that
differs. Mooncake ids are global and count a last, partial block; kv-cache-tester ids are local to a file and count
whole blocks only; Azure has no ids, hence no reuse. Lines are read one at a time; a kv-cache-tester file is read whole.
"""

import codecs
import csv
import heapq
import re
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from hybridkv_ref.errors import InputError

MOONCAKE_BLOCK_TOKENS = 512
"""Tokens per id of a Mooncake trace: fixed by the format, whose files do not say it."""

AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
"""First line of an Azure trace."""

_Time = Annotated[float, msgspec.Meta(ge=0)]
_Input = Annotated[int, msgspec.Meta(ge=1)]
_Output = Annotated[int, msgspec.Meta(ge=0)]
_Ids = tuple[Annotated[int, msgspec.Meta(ge=0)], ...]

# Enough of a file to tell its format: the keys that decide stand before the first list.
_HEAD_BYTES = 4096


class Request(msgspec.Struct, frozen=True, gc=False):
    """One request: arrival in ms from the trace's start, at least 1 input token, at least 0 output tokens.

    ``block_ids`` are prefix-chained ids of ``block_tokens`` tokens each, the last one perhaps partial; empty, with
    ``block_tokens`` 0, where the trace has lengths only.
    """

    arrival_ms: float
    input_tokens: int
    output_tokens: int
    block_tokens: int
    block_ids: tuple[int, ...]


class _MooncakeLine(msgspec.Struct, gc=False):
    timestamp: _Time
    input_length: _Input
    output_length: _Output
    hash_ids: _Ids


class _Call(msgspec.Struct, tag_field="type", tag="n", gc=False):
    """A call of the model; the tag says that its output was not streamed, which is nothing to the cache."""

    t: _Time
    input_tokens: _Input = msgspec.field(name="in")
    output_tokens: _Output = msgspec.field(name="out")
    hash_ids: _Ids


class _StreamedCall(_Call, tag="s"):
    pass


class _SubAgent(msgspec.Struct, tag_field="type", tag="subagent"):
    requests: "list[_Call | _StreamedCall | _SubAgent]"


class _Conversation(msgspec.Struct):
    block_size: Annotated[int, msgspec.Meta(ge=1)]
    hash_id_scope: Literal["local"]
    requests: list[_Call | _StreamedCall | _SubAgent]


def read_trace(path: str | Path) -> Iterator[Request]:
    """Requests of the trace at ``path``, in the order of arrival; its content says which format it has.

    A folder is read as the kv-cache-tester files in it (``*.json``): conversations that all start at time 0. InputError
    with file, place and reason, before the first request or while iterating: a file that is missing, empty, binary or
    of no known format, a truncated or malformed record, a length that is missing, negative or no integer, more ids
    than the input has blocks, a time that runs backwards. The place is a line, or the path to a value in a JSON file.
    """
    path = Path(path)
    if path.is_dir():
        files = sorted(path.glob("*.json"))
        if not files:
            raise InputError(f"{path}:1: no *.json file in this folder")
        return _conversations(files)
    head = _head(path)
    if not head.startswith("{"):
        if next(csv.reader(head.splitlines()), []) == AZURE_HEADER:
            return _checked(path, _azure(path))
        raise InputError(f"{path}:1: unknown trace format (known: Mooncake JSONL, kv-cache-tester JSON, Azure CSV)")
    if re.search(r'"(block_size|requests)"\s*:', head):
        return _conversations([path])
    return _checked(path, _mooncake(path))


def _head(path: Path) -> str:
    """The start of the file as text, without leading blanks."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
        # Incremental, because the last character read may be cut in two.
        text = codecs.getincrementaldecoder("utf-8-sig")().decode(head).lstrip()
    except OSError as error:
        raise InputError(f"{path}:1: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise InputError(f"{path}:1: binary file, not a text trace") from None
    if "\0" in text:
        raise InputError(f"{path}:1: binary file, not a text trace")
    if not text:
        raise InputError(f"{path}:1: empty file")
    return text


def _checked(path: Path, records: Iterable[tuple[int | str, Request]]) -> Iterator[Request]:
    """The requests of (place, request) records, checked for what the types of one record do not say."""
    last = -1.0
    for place, request in records:
        if request.arrival_ms < last:
            raise InputError(f"{path}:{place}: arrives before the request ahead of it")
        last = request.arrival_ms
        # Zero ids pass: -(-n // b) would divide by the 0 of a trace without ids.
        if request.block_ids and len(request.block_ids) > -(-request.input_tokens // request.block_tokens):
            reason = f"{len(request.block_ids)} block ids for {request.input_tokens} input tokens"
            raise InputError(f"{path}:{place}: {reason} in blocks of {request.block_tokens}")
        yield request
    if last < 0:
        raise InputError(f"{path}:1: no requests")


def _mooncake(path: Path) -> Iterator[tuple[int, Request]]:
    decode = msgspec.json.Decoder(_MooncakeLine).decode
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.isspace():
                continue
            try:
                record = decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                value, reason = _explain(error)
                raise InputError(f"{path}:{number}: {value and value + ': '}{reason}") from None
            yield (
                number,
                Request(
                    record.timestamp, record.input_length, record.output_length, MOONCAKE_BLOCK_TOKENS, record.hash_ids
                ),
            )


def _azure(path: Path) -> Iterator[tuple[int, Request]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file, strict=True)
        start: datetime | None = None
        try:
            next(rows)
            for row in rows:
                if not row:
                    continue
                if len(row) != len(AZURE_HEADER):
                    raise ValueError(f"expected {len(AZURE_HEADER)} columns, got {len(row)}")
                time = datetime.fromisoformat(row[0])
                start = start or time
                arrival_ms = (time - start).total_seconds() * 1000
                inputs, outputs = _length(row[1], AZURE_HEADER[1], 1), _length(row[2], AZURE_HEADER[2], 0)
                yield rows.line_num, Request(arrival_ms, inputs, outputs, 0, ())
        # A file of another encoding, a quote that never closes, a bad date or length, times with and without a zone.
        except (UnicodeDecodeError, csv.Error, ValueError, TypeError) as error:
            raise InputError(f"{path}:{rows.line_num}: {error}") from None


def _length(text: str, column: str, least: int) -> int:
    if not (text.isascii() and text.isdecimal()) or int(text) < least:
        raise ValueError(f"{column}: expected an integer >= {least}, got {text!r}")
    return int(text)


def _conversations(files: list[Path]) -> Iterator[Request]:
    """Requests of kv-cache-tester files, merged by arrival; every file's ids are moved to a range of their own."""
    base = 0
    streams = []
    for path in files:
        conversation = _conversation(path)
        # Sub-agents run beside their parent, so the order of the file is not the order of time.
        calls = sorted(_flatten("requests", conversation.requests), key=lambda placed: placed[1].t)
        streams.append(
            _checked(path, [(place, _request(call, conversation.block_size, base)) for place, call in calls])
        )
        base += 1 + max((max(call.hash_ids, default=0) for _, call in calls), default=0)
    return heapq.merge(*streams, key=lambda request: request.arrival_ms)


def _conversation(path: Path) -> _Conversation:
    _head(path)  # refuses a binary or empty file in the same words as for the other formats
    data = path.read_bytes()
    try:
        return msgspec.json.decode(data, type=_Conversation)
    except (msgspec.DecodeError, RecursionError) as error:
        value, reason = _explain(error)
        byte = re.search(r"\(byte (\d+)\)", reason)
        end = int(byte[1]) if byte else len(data.rstrip())
        line = data.count(b"\n", 0, end) + 1
        raise InputError(f"{path}:{value or line}: {reason}") from None


def _flatten(place: str, requests: Iterable[_Call | _SubAgent]) -> Iterator[tuple[str, _Call]]:
    for index, request in enumerate(requests):
        if isinstance(request, _SubAgent):
            yield from _flatten(f"{place}[{index}].requests", request.requests)
        else:
            yield f"{place}[{index}]", request


def _request(call: _Call, block_tokens: int, base: int) -> Request:
    ids = tuple(base + block_id for block_id in call.hash_ids)
    return Request(call.t * 1000, call.input_tokens, call.output_tokens, block_tokens, ids)


def _explain(error: Exception) -> tuple[str, str]:
    """(path to the value or "", reason) of a record that msgspec refuses."""
    if isinstance(error, RecursionError):
        return "", "nested too deeply"
    reason, _, value = str(error).partition(" - at ")
    return value.strip("`$."), reason
