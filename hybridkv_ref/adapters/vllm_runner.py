"""A model runner without a model: it writes fingerprints where vLLM's Scheduler has a runner write keys and values.

It knows of the cache what a real one knows: block tables, built from each ``SchedulerOutput``, and slots of positions.
Each group has a shadow of its cache, 8 bytes per slot. What is written for a position stands for all tokens up
to it; what a step reads is compared with what its request is made of. A step is prepared when it is scheduled and runs
later, in order, as on a device. Tokens are sampled by a function of what came before.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hybridkv_ref import events as ev
from hybridkv_ref.events import Event, Header
from hybridkv_ref.recovery import Group

MASK = (1 << 64) - 1
VOCABULARY = 1 << 20


class WrongBytes(Exception):
    """A step read other bytes than its request's, or the scheduler told a table or tokens that cannot be."""


@dataclass
class Known:
    """What a runner keeps of a request: its tokens, a fingerprint of each prefix, a block table per group.

    ``prompt`` and ``length`` count tokens: as it came, and with those that the scheduler has or awaits. ``refused`` are
    drafts of steps of its present ``life`` that the scheduler still counts, for it has not heard of them.
    """

    tokens: list[int]
    salt: int
    tables: list[list[int]]
    prompt: int
    length: int
    prints: list[int] = field(default_factory=list)
    life: int = 0
    refused: int = 0

    def upto(self, end: int) -> None:
        """Fingerprints of all prefixes up to ``end``; what lies beyond the known tokens is sampled."""
        while len(self.prints) < end:
            at = len(self.prints)
            before = self.prints[-1] if at else self.salt
            if at == len(self.tokens):
                self.tokens.append(before % VOCABULARY)
            self.prints.append(hash((before, self.tokens[at])) & MASK or 1)

    def after(self, end: int, count: int) -> list[int]:
        """The tokens that follow the first ``end``."""
        self.upto(end + count)
        return self.tokens[end : end + count]


@dataclass
class Job:
    """One request in a step that was prepared: [lo, hi) with what is written, and per group slots and what is read.

    ``first``: position of the first token that it samples; drafts are the input from there on, of which it refuses
    ``refused``. ``out``: the tokens that it samples. ``told``: the writes of its tables. ``life``: of its request.
    ``step``: the name by which it is told.
    """

    name: str
    lo: int
    hi: int
    written: np.ndarray[Any, Any]
    slots: list[np.ndarray[Any, Any]]
    reads: list[tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]]
    first: int
    out: list[int]
    told: list[Event]
    refused: int
    life: int
    step: str = ""

    @property
    def kept(self) -> int:
        """Where what it wrote and nothing refuses ends."""
        return self.hi - self.refused


class Runner:
    """Runs the steps of one Scheduler; WrongBytes where a step reads what its request is not made of.

    A draft that the scheduler leaves open (-1) is the runner's own: right up to some place, by ``chance``.
    """

    def __init__(
        self,
        header: Header,
        needs: Sequence[Group],
        states: Sequence[bool],
        blocks: int,
        longest: int,
        chance: random.Random,
    ) -> None:
        self.header, self.needs, self.states, self.longest, self.chance = header, needs, states, longest, chance
        self.sizes = [g.block for g in header.groups]
        per = [1 if state else size for state, size in zip(self.states, self.sizes, strict=True)]
        self.shadow = [np.zeros(blocks * slots, np.uint64) for slots in per]
        self.known: dict[str, Known] = {}
        self.bytes_written = self.bytes_read = 0

    # -- preparing -------------------------------------------------------------------------------------------------

    def prepare(self, output: Any, salts: dict[str, int]) -> dict[str, Job]:
        """The step of a scheduler's output: tables brought up to date, slots worked out, nothing written yet."""
        for name in output.finished_req_ids:
            self.known.pop(name, None)
        told: dict[str, list[Event]] = {}
        starts: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            name, starts[new.req_id] = new.req_id, new.num_computed_tokens
            tokens = list(new.prompt_token_ids)
            self.known[name] = Known(tokens, salts[name], [[] for _ in self.sizes], len(tokens), len(tokens))
            told[name] = self._tables(name, new.block_ids, starts[name], fresh=True)
        old = output.scheduled_cached_reqs
        rows = zip(old.req_ids, old.num_computed_tokens, old.num_output_tokens, old.new_block_ids, strict=True)
        for name, start, sampled, blocks in rows:
            resumed, sequence = name in old.resumed_req_ids, self.known[name]
            if resumed:
                sequence.life, sequence.refused = sequence.life + 1, 0
            starts[name] = start - sequence.refused
            sequence.length = sequence.prompt + sampled - sequence.refused
            told[name] = self._tables(name, blocks, start, fresh=resumed) if blocks is not None else []
            self._compare(name, old.all_token_ids.get(name, ()))
        drafts = output.scheduled_spec_decode_tokens
        return {
            name: self._job(name, starts[name], count, drafts.get(name, ()), told[name])
            for name, count in output.num_scheduled_tokens.items()
        }

    def _tables(self, name: str, blocks: Sequence[list[int]], at: int, fresh: bool) -> list[Event]:
        sequence, events = self.known[name], list[Event]()
        for index, numbers in enumerate(blocks):
            table = sequence.tables[index]
            if fresh:
                table.clear()
            if numbers:
                first, group = len(table), self.header.groups[index].name
                columns = -(-self.longest // self.sizes[index])
                events.append(ev.TableWrite(name, group, list(numbers), first, columns, at=at))
            table += numbers
        return events

    def _compare(self, name: str, tokens: Sequence[int]) -> None:
        """The scheduler's tokens of a request that comes again, against those that were sampled."""
        sequence = self.known[name]
        sequence.upto(len(tokens))
        if any(a != b for a, b in zip(tokens, sequence.tokens, strict=False) if a >= 0):
            raise WrongBytes(f"{name}: comes again with other tokens than it had")

    def _job(self, name: str, lo: int, count: int, drafts: Sequence[int], told: list[Event]) -> Job:
        sequence, hi = self.known[name], lo + count
        sequence.upto(hi)
        accepted, first = 0, hi - len(drafts)
        if drafts and drafts[0] < 0:
            drafts = self.guess(sequence, first, len(drafts))
        while accepted < len(drafts) and drafts[accepted] == sequence.tokens[first + accepted]:
            accepted += 1
        prints = sequence.prints[lo:hi]
        for place in range(first + accepted, hi):  # of a draft that is refused: nobody's prefix
            prints[place - lo] = hash((name, place, drafts[place - first], "refused")) & MASK or 1
        slots, reads = [], []
        for index, need in enumerate(self.needs):
            slots.append(self._slots(sequence, index, lo, hi))
            # The last query reads what the first one does and all that this step writes; the first reaches lowest.
            low = need.need(lo, lo)[0] if lo else 0
            at = self._slots(sequence, index, low, lo)
            reads.append((at, np.array(self._stored(index, sequence.prints, low, lo), np.uint64)))
        out = sequence.after(first, accepted + 1) if first >= sequence.length else []
        refused = len(drafts) - accepted
        sequence.refused += refused
        written = np.array(prints, np.uint64)
        return Job(name, lo, hi, written, slots, reads, first, out, told, refused, sequence.life)

    def _slots(self, sequence: Known, index: int, lo: int, hi: int) -> np.ndarray[Any, Any]:
        """The slots of positions [lo, hi); of a state's group the one that holds the state after them."""
        table, size = sequence.tables[index], self.sizes[index]
        if hi > len(table) * size:
            raise WrongBytes(f"{self.header.groups[index].name}: a table of {len(table)} blocks has none for {hi - 1}")
        if self.states[index]:
            return np.array([table[(hi - 1) // size]] if hi else [], np.int64)
        return np.array([table[at // size] * size + at % size for at in range(lo, hi)], np.int64)

    def _stored(self, index: int, prints: Sequence[int], lo: int, hi: int) -> Sequence[int]:
        return prints[hi - 1 : hi] if self.states[index] else prints[lo:hi]

    # -- telling ---------------------------------------------------------------------------------------------------

    def events(self, job: Job, first: bool) -> list[Event]:
        """The writes of tables, and the dispatch: its spans are what lies in this runner's own tables."""
        sequence, writes, reads = self.known[job.name], list[ev.Span](), list[ev.Span]()
        for index, group in enumerate(self.header.groups):
            if not group.reuse:
                continue
            table, size = sequence.tables[index], group.block
            writes.append(ev.Span(group.name, table[job.lo // size : -(-job.hi // size)], job.lo, job.hi))
            low = self.needs[index].need(job.lo, job.lo)[0] if job.lo else 0
            if job.lo and (low or first):
                reads.append(ev.Span(group.name, table[low // size : -(-job.lo // size)], low, job.lo))
        return [*job.told, ev.Dispatch(job.step, job.name, reads, writes)]

    def guess(self, sequence: Known, at: int, count: int) -> list[int]:
        """Drafts of the tokens from ``at`` on: right up to some place, sometimes."""
        right, cut = sequence.after(at, count), self.chance.randint(0, count)
        return [*right[:cut], *(token + 1 for token in right[cut:])]

    def propose(self, job: Job, count: int) -> list[int]:
        """Drafts of what follows a job's tokens."""
        return self.guess(self.known[job.name], job.first + len(job.out), count) if job.name in self.known else []

    def heard(self, job: Job) -> None:
        """The scheduler has taken in what a job refused."""
        sequence = self.known.get(job.name)
        if sequence is not None and sequence.life == job.life:
            sequence.refused -= job.refused

    def load(self, tokens: list[int], salt: int, tables: list[list[int]], span: tuple[int, int], whole: bool) -> None:
        """Bytes of positions [lo, hi) that come from elsewhere, wrong ones where they do not come ``whole``."""
        lo, hi = span
        sequence = Known(tokens, salt, tables, len(tokens), len(tokens))
        sequence.upto(hi)
        for index, shadow in enumerate(self.shadow):
            table, size = tables[index], self.sizes[index]
            ends = [hi - 1] if self.states[index] else range(lo, hi)
            kept = [at for at in ends if table[at // size] != self.header.null]
            slots = [table[at // size] if self.states[index] else table[at // size] * size + at % size for at in kept]
            shadow[slots] = [sequence.prints[at] if whole else 1 for at in kept]
            self.bytes_written += 8 * len(slots)

    # -- running ---------------------------------------------------------------------------------------------------

    def run(self, jobs: Sequence[Job]) -> None:
        """Runs a prepared step: all writes of the batch, then its reads, as each layer does."""
        before = {(job.name, i): self._look(job, i) for job in jobs for i, state in enumerate(self.states) if state}
        for job in jobs:
            for index, shadow in enumerate(self.shadow):
                shadow[job.slots[index]] = job.written[-1:] if self.states[index] else job.written
                self.bytes_written += 8 * len(job.slots[index])
        for job in jobs:
            for index, group in enumerate(self.header.groups):
                # A state is taken before it is written again.
                self._judge(job, index, group.name, before.get((job.name, index), self._look(job, index)))

    def _look(self, job: Job, index: int) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = self.shadow[index][job.reads[index][0]]
        return found

    def _judge(self, job: Job, index: int, group: str, found: np.ndarray[Any, Any]) -> None:
        slots, expected = job.reads[index]
        self.bytes_read += 8 * len(slots)
        if (bad := np.flatnonzero(found != expected)).size:
            at = int(bad[0])
            place = job.lo - len(expected) + at
            block = int(slots[at]) // (1 if self.states[index] else self.sizes[index])
            raise WrongBytes(f"{job.name} [{job.lo}, {job.hi}): {group} block {block} has other bytes at {place}")
