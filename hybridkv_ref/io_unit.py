"""By how much an I/O call misses the unit of its I/O mode, as the tables ask for it.

The condition itself stands in the tables: in the rows that begin a spill and a restore, and in those about the calls of
an engine.
"""

from typing import NamedTuple


class Remainders(NamedTuple):
    """Bytes by which a call's memory address, file offset and length miss the unit."""

    buffer: int
    offset: int
    length: int


class Transfer(NamedTuple):
    """What a row asks of a transfer that begins: whether it is direct I/O, and its remainders."""

    direct: bool
    buffer: int
    offset: int
    length: int


BUFFERED = Transfer(False, 0, 0, 0)
"""Buffered I/O moves single bytes, so nothing remains of any call."""


def remainders(address: int, offset: int, length: int, unit: int) -> Remainders:
    """Of a call with these values, in bytes; ``unit`` is at least 1."""
    return Remainders(address % unit, offset % unit, length % unit)
