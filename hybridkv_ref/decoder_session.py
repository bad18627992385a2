"""One request on the small decoder: hit, chunked prefill, decode, drafts with rejection, and what it publishes.

What may be published (FACTS section 2): objects whose rows are all exact and lie before the committed
position.  After a plain hit every row from the start on is exact, and so are the restored ones; after a start without
stored windows a layer's rows are exact only from where ``exact_start.Replay`` says.  What follows a bounded start
carries its grade in the key.
"""

from collections.abc import Sequence

from torch import Tensor

from hybridkv_ref.decoder_geometry import Stored
from hybridkv_ref.decoder_reuse import Match, Planner, Want
from hybridkv_ref.decoder_store import Key, MemoryStore, copy_object
from hybridkv_ref.errors import InputError
from hybridkv_ref.recovery import Group


class Session:
    """A request over ``tokens`` (its prompt), which may reuse and publish objects of ``store``.

    ``hit``: what was reused.  ``position``: tokens committed.  ``exact_from``: logits from here on equal those of a run
    from scratch (None: never, the grade is bounded).
    """

    def __init__(
        self, planner: Planner, store: MemoryStore, tokens: Sequence[int], want: Want | None = None, keep_every: int = 1
    ) -> None:
        self.planner, self.store, self.want, self.keep_every = planner, store, want or Want(), keep_every
        self.decoder, self.tokens = planner.decoder, tuple(tokens)
        while True:  # an object that was found may have gone before it was read
            self.match: Match = planner.find(store, self.tokens, self.want)
            self.state = store.running()
            if planner.restore(store, self.match, self.state):
                break
        self.hit, self.exact_from = self.match.hit, self.match.exact_from
        self.position = self.pending = self.hit.r
        self.grade = self._grade()
        self._valid = self._valid_from()

    def _grade(self) -> str:
        return self.hit.grade

    def _valid_from(self) -> dict[tuple[int, str], int]:
        """Per layer and group, the first position whose rows are exact (restored ones included); begins every layer."""
        made = self.match.replay
        read = {(item.layer, item.group): one.lo for item, one in self.planner.reads(self.match)}
        valid = {}
        for item in self.planner.decoder.stored:
            at, begins = (item.layer, item.group), made.begins[item.layer]
            valid[at] = read.get(at, begins if item.shape == "state" else made.rows_from[item.layer])
            if item.shape == "state":
                self.state.begin_at(item.layer, begins)
            elif item.shape == "window":
                self.state.begin_at(item.layer, read.get(at, begins))
        return valid

    # ---- Computing ----

    def prefill(self, count: int) -> Tensor:
        """Logits [n, vocab] of the next ``count`` tokens of the prompt, which are committed."""
        logits = self.compute(self.tokens[self.position : self.position + count])
        self.commit(len(logits))
        return logits

    def compute(self, tokens: Sequence[int], padding: int = 0) -> Tensor:
        """Logits [n, vocab] of ``tokens`` after the committed position, drafts perhaps: nothing is committed yet."""
        decoder = self.planner.decoder
        logits = decoder.forward(tokens, self.position, self.hit.frontier, self.state, padding)
        self.tokens = (*self.tokens[: self.position], *tokens, *self.tokens[self.position + len(tokens) :])
        self.pending = self.position + len(tokens)
        return logits

    def commit(self, accepted: int) -> None:
        """Keeps the first ``accepted`` tokens of the last step, publishes what they complete; the rest is rejected."""
        if not 0 <= accepted <= self.pending - self.position:
            raise InputError(f"session:accepted: {accepted} of {self.pending - self.position} computed tokens")
        before, self.position = self.position, self.position + accepted
        for group in self.planner.groups.values():
            self._publish(group, before, self._publishable())
        self.state.slide(self.position)

    # ---- Publishing ----

    def _publishable(self) -> int:
        """The end of what may be published: nothing past the committed position."""
        return self.position

    def _exact(self, item: Stored, first: int) -> bool:
        """Whether the layer's rows are exact from position ``first`` on."""
        return first >= self._valid[item.layer, item.group]

    def _publish(self, group: Group, before: int, after: int) -> None:
        for end in range(before + 1, after + 1):
            if end % self._step_of(group):
                continue  # no object that is kept ends there
            first = self.planner.first_row(group, end)
            if first >= end:
                continue  # nothing is needed there
            key = self.planner.key(self.tokens[:end], self.grade)
            for item in self.planner.objects[group.name]:
                if self._exact(item, first):
                    self._write(item, key, first // item.ratio, (end - first) // item.ratio)

    def _step_of(self, group: Group) -> int:
        return self.keep_every if group.exact else group.unit

    def _write(self, item: Stored, key: Key, first: int, count: int) -> None:
        """Begins an object, copies its rows, and only then lets it be found."""
        ref = self.store.begin(item.layer, item.group, key, self.planner.descriptors[item.layer, item.group])
        if ref is None:
            return
        target = self.store.rows(ref)
        if target is not None:
            copy_object(self.state.rows(item.layer, item.group), first, target, 0, count)
            self.store.finish(ref)
