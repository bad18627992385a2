"""Copies of the reference allocator that stop half way until they are told to go on.

The allocator copies in threads of its own.  A task that is begun while the gate holds runs until it moves bytes and
waits there; whoever began it waits until every task waits or has ended, so that only one thread ever runs.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from torch import Tensor

from hybridkv_ref.allocator.media import HostMemory, MediumError
from hybridkv_ref.allocator.object_file import Description
from hybridkv_ref.allocator.pipelines import Pipelines

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = 20.0
"""Seconds after which a task that neither waits nor ends is given up."""

WORKERS = 16


@dataclass(eq=False)
class Ticket:
    """A copy that waits; ``ok`` is whether it will succeed."""

    ok: bool = True
    go: threading.Event = field(default_factory=threading.Event)


class Gate:
    """Tasks that run, and those of them that wait."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.running = 0
        self.waiting: deque[Ticket] = deque()
        self.opened = False
        self.mine = threading.local()

    def wait(self) -> None:
        """Called by a task before its bytes move; MediumError where they are not to arrive."""
        with self.changed:
            if self.opened:
                raise MediumError("host: closed")
            ticket = Ticket()
            self.waiting.append(ticket)
            self.changed.notify_all()
        ticket.go.wait()
        self.mine.fate = ticket.ok
        if not ticket.ok:
            raise MediumError("host: did not answer")

    def begin(self) -> None:
        """This thread begins a copy of which no byte has arrived yet."""
        self.mine.fate = False

    def fate(self) -> bool | None:
        """Whether the bytes of this thread's copy arrived; None if another thread moves them, and may still do so."""
        arrived: bool | None = getattr(self.mine, "fate", None)
        return arrived

    def settle(self) -> None:
        """Returns once every task waits or has ended."""
        with self.changed:
            if not self.changed.wait_for(lambda: self.running <= len(self.waiting), PATIENCE):
                raise TimeoutError(f"{self.running - len(self.waiting)} copies neither move nor end")

    def held(self, begin: Callable[[], object]) -> bool:
        """Begins copies; whether any waits that did not before."""
        before = len(self.waiting)
        begin()
        self.settle()
        return len(self.waiting) > before

    def release(self, ok: bool) -> bool:
        """Lets the oldest go on, or fail; False if none waits."""
        with self.changed:
            if not self.waiting:
                return False
            ticket = self.waiting.popleft()
        ticket.ok = ok
        ticket.go.set()
        self.settle()
        return True

    def open(self) -> None:
        """Fails all that wait, and whatever comes."""
        with self.changed:
            self.opened = True
        while self.release(ok=False):
            pass


class GatedMemory(HostMemory):
    """Host memory whose copies wait at the gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__()
        self.gate = gate

    def write(self, name: str, parts: Sequence[Tensor], about: Description) -> None:
        """Keeps the parts, once the gate lets them pass."""
        self.gate.wait()
        super().write(name, parts, about)

    def read(self, name: str) -> list[Tensor]:
        """The parts, once the gate lets them pass."""
        self.gate.wait()
        return super().read(name)


class GatedPipelines(Pipelines):
    """Pipelines that count their tasks at the gate."""

    def __init__(self, gate: Gate) -> None:
        super().__init__(io=WORKERS, cpu=1)
        self.gate = gate

    def submit(self, actor: str, work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Runs work on an actor's pipeline."""
        with self.gate.changed:
            self.gate.running += 1

        def counted() -> R:
            try:
                return work(*args, **kwargs)
            finally:
                with self.gate.changed:
                    self.gate.running -= 1
                    self.gate.changed.notify_all()

        return super().submit(actor, counted)
