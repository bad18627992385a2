"""The records on which the oracle's rows are fired, as types.

What they hold is read from the tables when an oracle is made (``oracle_code``), so here they are no more than names. In
a compiled oracle (``native``) this module is written from the tables, and its classes are real ones.
"""

from typing import Any, TypeAlias

Pool: TypeAlias = Any
PoolPart: TypeAlias = Any
Segment: TypeAlias = Any
Lease: TypeAlias = Any
Record: TypeAlias = Any
RecordPart: TypeAlias = Any
Constants: TypeAlias = Any
Makers: TypeAlias = Any

CLASSES: dict[str, tuple[type, tuple[str, ...]]] = {}
"""Of a compiled oracle: its classes by the name that the tables give, each with its variables."""
