"""An engine in a process of its own, in any language: one JSON object a line, over its standard input and output.

The process first writes a line ``{"name", "version", "capabilities", "header"}``, header as in a trace.  It is then
sent operations (``{"op": "begin", "req": "a", "tokens": [1, 2], "salt": ""}``), and answers each with a line
``{"result", "events", "snapshot"}``, or ``{"error": "reason"}``.  Fields that have their default may be left out.
"""

import contextlib
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import IO, Any

import msgspec

from hybridkv_ref.conformance import engine as operations
from hybridkv_ref.conformance.engine import AnyOperation, Engine, Pool, perform
from hybridkv_ref.errors import InputError
from hybridkv_ref.events import Event, Header

PATIENCE = 60.0
"""Seconds that a process may take for one answer."""


class EngineError(Exception):
    """An engine did not do what it was asked, nor said that it cannot: the one line says what happened."""


class Hello(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a process."""

    name: str
    header: Header
    version: str = ""
    capabilities: tuple[str, ...] = ()


class Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The answer to one operation."""

    result: bool | int | None = None
    events: list[Event] = []
    snapshot: dict[str, Pool] = {}
    error: str = ""


_HELLO, _ANSWER = msgspec.json.Decoder(Hello), msgspec.json.Decoder(Answer)
_OPERATION = msgspec.json.Decoder(AnyOperation)


class ProcessEngine:
    """The suite's side of the pipe; see ``engine.Engine`` for the operations."""

    def __init__(self, command: str) -> None:
        self.command = command
        try:
            self.process = subprocess.Popen(shlex.split(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        except (OSError, ValueError) as error:
            raise InputError(f"exec:{command}: cannot be started: {error}") from None
        try:
            hello = _HELLO.decode(self.line())
        except (msgspec.DecodeError, EngineError) as error:
            self.close()
            raise InputError(f"exec:{command}: its first line is no hello: {error}") from None
        self.name, self.version, self.capabilities = hello.name, hello.version, hello.capabilities
        self.header = hello.header
        self.events: list[Event] = []
        self.pools: Mapping[str, Pool] = {}

    def line(self) -> bytes:
        """The next line of the process, which is stopped if it keeps silent for too long."""
        timer = threading.Timer(PATIENCE, self.process.kill)
        timer.start()
        try:
            line = self.process.stdout.readline() if self.process.stdout is not None else b""
        finally:
            timer.cancel()
        if not line:
            raise EngineError(f"{self.command}: ended, or said nothing for {PATIENCE:g} s")
        return line

    def ask(self, operation: AnyOperation) -> Any:
        """Sends an operation and keeps the events of the answer."""
        if self.process.stdin is None:
            raise EngineError(f"{self.command}: has no standard input")
        try:
            self.process.stdin.write(msgspec.json.encode(operation) + b"\n")
            self.process.stdin.flush()
            answer = _ANSWER.decode(self.line())
        except (OSError, msgspec.DecodeError) as error:
            raise EngineError(f"{self.command}: {error}") from None
        if answer.error:
            raise EngineError(f"{self.command}: {answer.error}")
        self.events += answer.events
        self.pools = answer.snapshot
        return answer.result

    def reset(self) -> None:
        """See ``Engine``."""
        self.ask(operations.Reset())

    def begin(self, req: str, tokens: Sequence[int], salt: str) -> int | None:
        """See ``Engine``."""
        position = self.ask(operations.Begin(req, tuple(tokens), salt))
        return None if position is None else int(position)

    def load(self, req: str, tokens: Sequence[int], salt: str) -> bool:
        """See ``Transferring``."""
        return bool(self.ask(operations.Load(req, tuple(tokens), salt)))

    def schedule(self, req: str, count: int, new: Sequence[int], drafts: int) -> bool:
        """See ``Engine``."""
        return bool(self.ask(operations.Schedule(req, count, tuple(new), drafts)))

    def complete(self, req: str, accepted: int) -> bool:
        """See ``Engine``."""
        return bool(self.ask(operations.Complete(req, accepted)))

    def finish(self, req: str) -> bool:
        """See ``Engine``."""
        return bool(self.ask(operations.Finish(req)))

    def abort(self, req: str) -> bool:
        """See ``Engine``."""
        return bool(self.ask(operations.Abort(req)))

    def preempt(self, req: str) -> bool:
        """See ``Preempting``."""
        return bool(self.ask(operations.Preempt(req)))

    def evict(self, group: str, blocks: int) -> bool:
        """See ``Engine``."""
        return bool(self.ask(operations.Evict(group, blocks)))

    def store(self) -> bool:
        """See ``Transferring``."""
        return bool(self.ask(operations.Store()))

    def transfer(self, ok: bool) -> bool:
        """See ``Transferring``."""
        return bool(self.ask(operations.Transfer(ok)))

    def drain(self) -> list[Event]:
        """See ``Engine``."""
        events, self.events = self.events, []
        return events

    def snapshot(self) -> Mapping[str, Pool]:
        """See ``Engine``."""
        return self.pools

    def close(self) -> None:
        """Ends the process."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):  # what the process did not read is lost with it
                    pipe.close()


def serve(engine: Engine, source: IO[bytes] | None = None, target: IO[bytes] | None = None) -> None:
    """The engine's side of the pipe, for engines in Python: answers operations until the input ends."""
    read, write = source or sys.stdin.buffer, target or sys.stdout.buffer

    def say(record: Hello | Answer) -> None:
        write.write(msgspec.json.encode(record) + b"\n")
        write.flush()

    say(Hello(engine.name, engine.header, engine.version, tuple(engine.capabilities)))
    for line in read:
        try:
            result = perform(engine, _OPERATION.decode(line))
            say(Answer(result, engine.drain(), dict(engine.snapshot())))
        except Exception as error:
            # Whatever an engine raises is a fault of it that the other side reports.
            say(Answer(error=f"{type(error).__name__}: {error}"))
