"""Histories: a Hypothesis state machine over what a scheduler and its clients may do.

Each begins with A, B, A (a prompt, another, the first again) and ends with an abort during a transfer where transfers
are claimed; in between stand random operations.  The oracle judges after every one of them; nothing here does.
"""

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from hybridkv_ref.conformance.capabilities import Profile, load_suite
from hybridkv_ref.conformance.engine import (
    Abort,
    Begin,
    Complete,
    Engine,
    Evict,
    Finish,
    Load,
    Preempt,
    Schedule,
    Store,
    Transfer,
)
from hybridkv_ref.conformance.lockstep import ENOUGH, Client, Lockstep
from hybridkv_ref.events import Header

ALL = 1 << 20
"""More blocks than any group has."""

MOST_DRAFTS = 3
LETTERS = 3
SALTS = ("", "tenant")


def prompt(letters: Sequence[int], tail: int, chunk: int) -> tuple[int, ...]:
    """A chunk of tokens for each letter, and some more: prompts share what their first letters share."""
    tokens = [(letter + 1) * 1_000_000 + at for letter in letters for at in range(chunk)]
    return (*tokens, *((LETTERS + 1) * 1_000_000 + at for at in range(tail)))


class Histories(RuleBasedStateMachine):
    """One history; the subclass that ``machine_class`` makes sets the class variables."""

    engine: Engine
    header: Header
    claims: tuple[str, ...]
    ignored: tuple[str, ...]
    ended: Callable[[Lockstep], None]

    def __init__(self) -> None:
        super().__init__()
        self.run = Lockstep(self.engine, self.header, self.ignored)
        self.suite = load_suite()

    def may(self, operation: str) -> bool:
        """Whether the engine claims what an operation needs."""
        return self.suite.allowed(operation, self.claims)

    def drawn(self, data: st.DataObject) -> tuple[tuple[int, ...], str]:
        """A prompt and its salt."""
        letters = data.draw(st.lists(st.integers(0, LETTERS - 1), min_size=1, max_size=4), label="letters")
        tail = data.draw(st.integers(0, self.run.chunk - 1), label="tail")
        salt = data.draw(st.sampled_from(SALTS), label="salt") if self.may("salt") else ""
        return prompt(letters, tail, self.run.chunk), salt

    def some(self, data: st.DataObject, fits: Callable[[Client], bool]) -> str:
        """The name of one of the fitting requests; "" if there is none."""
        names = [name for name, client in self.run.clients.items() if fits(client)]
        return data.draw(st.sampled_from(names), label="request") if names else ""

    # -- always --------------------------------------------------------------------------------------------------------

    @initialize(data=st.data())
    def a_b_a(self, data: st.DataObject) -> None:
        """A prompt, another one, and the first one again; what is cached may be evicted in between.

        Where they are claimed, some drafts are refused, and the last request is preempted once.
        """
        first, second = self.drawn(data), self.drawn(data)
        self.run.serve(*first, self.guessed(data, least=1))
        self.run.serve(*second)
        self.pressure(data)
        last = self.run.name()
        self.run.do(Begin(last, *first))
        chunk = data.draw(st.integers(1, 2 * self.run.chunk), label="chunk")
        if self.may("preempt") and self.run.do(Schedule(last, min(chunk, len(first[0])))):
            self.run.do(Complete(last))
            self.run.again(last)
        if self.run.compute(last, chunk):
            self.run.do(Finish(last))

    def guessed(self, data: st.DataObject, least: int = 0) -> list[tuple[int, int]]:
        """Drafts after a prompt, and how many of each step's are accepted; at least so many steps refuse some."""
        if not self.may("draft"):
            return []
        steps = data.draw(st.lists(st.integers(1, MOST_DRAFTS), min_size=least, max_size=2), label="drafts")
        return [(count, data.draw(st.integers(0, count - 1), label="accepted")) for count in steps]

    def teardown(self) -> None:
        """A step and a load that their requests do not live to see, then the end of everything."""
        tokens = prompt((0, 1), 1, self.run.chunk)
        self.run.serve(tokens)
        self.abort_in_step(tokens)
        if self.may("store"):
            self.run.serve(tokens)
            for _ in range(ENOUGH):
                if not self.run.do(Store()):
                    break
                self.run.do(Transfer())
            self.abort_in_load(tokens)
        self.run.rest()
        type(self).ended(self.run)

    def abort_in_step(self, tokens: tuple[int, ...]) -> None:
        """A hit is read by a step when its request is aborted; memory is wanted before the step is done."""
        req = self.run.name()
        if self.run.do(Begin(req, tokens)) and self.run.do(Schedule(req, 1)):
            self.run.do(Abort(req))
            self.run.do(Evict("", ALL))
            self.run.serve(prompt((2,), 0, self.run.chunk))
            self.run.do(Complete(req))

    def abort_in_load(self, tokens: tuple[int, ...]) -> None:
        """A load that fails, and one that its request does not live to see; what came is used."""
        self.run.do(Evict("", ALL))
        for req in (self.run.name(), f"{self.run.name()}b"):
            if self.run.do(Load(req, tokens)):
                self.run.do(Transfer(ok=False))
                self.run.do(Abort(req))
                self.run.do(Evict("", ALL))
                self.run.serve(prompt((2,), 0, self.run.chunk))
            self.run.repeat(Transfer())
        self.run.serve(tokens)

    # -- by chance -----------------------------------------------------------------------------------------------------

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A new request, or one that waits."""
        req = self.some(data, lambda c: c.stage in ("waiting", "preempted"))
        if req and data.draw(st.booleans(), label="again"):
            client = self.run.clients[req]
            self.run.do(Begin(req, tuple(client.tokens), client.salt))
            return
        self.run.do(Begin(self.run.name(), *self.drawn(data)))

    @rule(data=st.data())
    def schedule(self, data: st.DataObject) -> None:
        """A chunk of what is known of a request, or a token more, with drafts where they are claimed."""
        req = self.some(data, lambda c: c.stage == "running" and len(c.steps) < 2)
        if not req:
            return
        client = self.run.clients[req]
        left = len(client.tokens) - client.sent
        if left:
            self.run.do(Schedule(req, data.draw(st.integers(1, min(left, 2 * self.run.chunk)), label="count")))
        elif not client.steps:
            drafts = data.draw(st.integers(0, MOST_DRAFTS), label="drafts") if self.may("draft") else 0
            self.run.do(Schedule(req, 1 + drafts, self.run.new_tokens(1 + drafts), drafts))

    @rule(data=st.data())
    def complete(self, data: st.DataObject) -> None:
        """The oldest step of a request, also of one that is gone."""
        req = self.some(data, lambda c: bool(c.steps))
        if req:
            drafts = self.run.clients[req].steps[0][1]
            self.run.do(Complete(req, data.draw(st.integers(0, drafts), label="accepted") if drafts else 0))

    @rule(data=st.data())
    def serve(self, data: st.DataObject) -> None:
        """A request from its arrival to its end, while others wait."""
        self.run.serve(*self.drawn(data), self.guessed(data))

    @rule(data=st.data(), how=st.sampled_from((Finish, Finish, Abort)))
    def end(self, data: st.DataObject, how: type[Finish] | type[Abort]) -> None:
        """A request finishes, or its client gives it up."""
        req = self.some(data, lambda c: c.stage != "gone" and (how is Abort or c.stage == "running"))
        if req:
            self.run.do(how(req))

    @rule(data=st.data())
    def pressure(self, data: st.DataObject) -> None:
        """Memory of a group is wanted, or of all."""
        group = data.draw(st.sampled_from(("", *sorted(self.run.groups))), label="group")
        self.run.do(Evict(group, data.draw(st.integers(1, 4), label="blocks")))

    @precondition(lambda self: self.may("preempt"))
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        """A running request gives its memory back."""
        req = self.some(data, lambda c: c.stage == "running" and not c.steps)
        if req:
            self.run.do(Preempt(req))

    @precondition(lambda self: self.may("store"))
    @rule()
    def store(self) -> None:
        """A block goes to a lower tier."""
        self.run.do(Store())

    @precondition(lambda self: self.may("load"))
    @rule(data=st.data())
    def load(self, data: st.DataObject) -> None:
        """What a lower tier has of a prompt comes back."""
        self.run.do(Load(self.run.name(), *self.drawn(data)))

    @precondition(lambda self: self.may("transfer"))
    @rule(ok=st.sampled_from((True, True, False)))
    def transfer(self, ok: bool) -> None:
        """The oldest transfer ends."""
        self.run.do(Transfer(ok))


def run_histories(
    engine: Engine,
    header: Header,
    profile: Profile,
    ended: Callable[[Lockstep], None],
    ignored: tuple[str, ...] = (),
) -> None:
    """Runs as many histories as the profile says and gives each of them to ``ended``.

    Those that Hypothesis cuts short, because they drew too much, are judged and given to ``ended`` too, uncounted.
    """
    body: dict[str, Any] = {
        "engine": engine,
        "header": header,
        "claims": tuple(engine.capabilities),
        "ignored": ignored,
        "ended": staticmethod(ended),
    }
    run_state_machine_as_test(
        type("EngineHistories", (Histories,), body),
        settings=settings(
            max_examples=profile.examples,
            stateful_step_count=profile.steps,
            derandomize=profile.derandomise,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        ),
    )
