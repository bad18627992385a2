"""Index segments whose encoding is out of date: stored keys are encoded anew, by the CPU pipeline.

Keys that are not stored need prefill; the tables refuse a rebuild of them.  While it runs the segment cannot be pinned.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from hybridkv_ref.allocator.book import Book
from hybridkv_ref.allocator.records import CacheSegment
from hybridkv_ref.kernels import _pages

Encode = Callable[[Tensor], Tensor]
"""fp32 [n, dim] keys as they are stored -> the same keys in the current encoding."""


def outdated(book: Book) -> list[CacheSegment]:
    """The segments that the tables let be labelled out of date now, or that are so already and wait for a rebuild."""
    with book.ledger.lock:
        candidates = [s for s in book.segments if s.slots is not None and book.ledger.has(s.kind, "rebuild_begin")]
        return [s for s in candidates if book.allows(s, "outdate") or book.allows(s, "rebuild_begin")]


def rebuild(book: Book, segment: CacheSegment, encode: Encode) -> None:
    """Labels, rebuilds and publishes one segment; Refused where a reader holds it, or its keys are not stored."""
    if book.allows(segment, "outdate"):
        book.fire(segment, "outdate")
    book.fire(segment, "rebuild_begin")
    try:
        _encode(book, segment, encode)
    except BaseException:
        book.fire(segment, "rebuild_fail")
        raise
    book.fire(segment, "rebuild_end")


def _encode(book: Book, segment: CacheSegment, encode: Encode) -> None:
    group, arena = segment.group, book.arena(segment.group)
    if segment.slots is None:
        return
    index = torch.arange(group.rows(*segment.token_range))
    block = torch.from_numpy(segment.slots)[:, index // group.page.entries]
    places = (block * group.page.entries + index % group.page.entries).reshape(-1).to(arena.bytes.device)
    keys = _pages.read(arena.bytes, places, group.page)[:, 0]
    store = book.ledger.kernel(book.ledger.event_id(segment.kind, "rebuild_begin"))
    store(encode(keys).contiguous(), places, arena.bytes, group.page)
