"""A row of the tables as the oracle fires it."""

from collections.abc import Callable
from typing import Any

from hybridkv_ref.event_map import row_name
from hybridkv_ref.oracle_entities import Constants, Lease, Pool, Record, Segment
from hybridkv_ref.tables import Event


class Row:
    """A row for one group (``group``, -1 for none) of one ``Code``, and how often it was fired.

    ``function(row, pool, *entities, *inputs)`` fires it and gives the index of the false guard, or -1; ``test`` takes
    the same and only asks. The methods do as ``function`` does, each for what a row may be about and its number of
    inputs; a row of that form has the method itself, and it is the fast way in. ``more``: the rules that it stands for
    besides its own, where it is about the need of one group.
    """

    __slots__ = ("code", "constants", "count", "event", "function", "group", "more", "name", "test")

    def __init__(
        self,
        event: Event,
        function: Callable[..., int],
        test: Callable[..., int],
        group: int,
        constants: Constants,
        code: Any,
        more: tuple[str, ...] = (),
    ) -> None:
        self.event, self.function, self.test, self.group = event, function, test, group
        self.constants, self.code, self.more = constants, code, more
        self.name, self.count = row_name(event), 0

    @property
    def rules(self) -> tuple[str, ...]:
        """The rules that the row stands for."""
        return (*self.event.rules, *self.more)

    def lease0(self, pool: Pool, seg: Segment, lease: Lease, req: Record) -> int:
        """A lease's row."""
        return self.function(self, pool, seg, lease, req)

    def lease1(self, pool: Pool, seg: Segment, lease: Lease, req: Record, a: int) -> int:
        """A lease's row of one input."""
        return self.function(self, pool, seg, lease, req, a)

    def lease2(self, pool: Pool, seg: Segment, lease: Lease, req: Record, a: int, b: int) -> int:
        """A lease's row of two inputs."""
        return self.function(self, pool, seg, lease, req, a, b)

    def lease6(
        self, pool: Pool, seg: Segment, lease: Lease, req: Record, a: int, b: int, c: int, d: int, e: int, f: int
    ) -> int:
        """A lease's row of six inputs."""
        return self.function(self, pool, seg, lease, req, a, b, c, d, e, f)

    def seg0(self, pool: Pool, seg: Segment) -> int:
        """A block's row."""
        return self.function(self, pool, seg)

    def seg2(self, pool: Pool, seg: Segment, a: int, b: int) -> int:
        """A block's row of two inputs."""
        return self.function(self, pool, seg, a, b)

    def req1(self, pool: Pool, req: Record, a: int) -> int:
        """A request's row of one input."""
        return self.function(self, pool, req, a)

    def sys1(self, pool: Pool, a: int) -> int:
        """A row over one input."""
        return self.function(self, pool, a)

    def sys2(self, pool: Pool, a: int, b: int) -> int:
        """A row over two inputs."""
        return self.function(self, pool, a, b)

    def sys4(self, pool: Pool, a: int, b: int, c: int, d: int) -> int:
        """A row over four inputs."""
        return self.function(self, pool, a, b, c, d)


FORMS = frozenset(name for name in vars(Row) if name[-1].isdigit())
"""The names of the methods that stand for a form."""
