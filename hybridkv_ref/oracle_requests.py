"""The lives of requests: they arrive, are preempted, end, and are forgotten once they hold nothing."""

from hybridkv_ref.events import Abort, Arrive, Finish, Preempt
from hybridkv_ref.oracle_hits import Hits
from hybridkv_ref.oracle_ranks import Ranks
from hybridkv_ref.oracle_records import Request, digest
from hybridkv_ref.oracle_state import State


class Requests:
    """Arrival, preemption and ends; ``nobody`` is the record of what no request does."""

    def __init__(self, state: State, hits: Hits, ranks: Ranks) -> None:
        self.state, self.hits, self.ranks = state, hits, ranks
        # A life that is over is closed by the event that gives its last block back.
        self.on = {name: state.bind(name) for name in ("arrive", "preempt", "abort", "finish", "free")}
        self.nobody = state.new_record(0, 1)

    def arrive(self, e: Arrive) -> None:
        """A new life; a name whose last life still holds something is not free for it."""
        state, known = self.state, self.state.requests.get(e.req)
        if known is not None and not known.lost:
            other, over = self.on["arrive"].other, known.record.stage in self.hits.over
            if not (
                state.fire(other["one_life"], not over, segment=e.req)
                and state.fire(other["refused_first"], known.held, segment=e.req)
            ):
                state.lose_request(known)
            state.ended[e.req] = known.life
        made = state.arrive(e.req, e.length, e.kernel)
        made.extend(e.ids)
        made.grade = e.grade
        parts = tuple(sorted((k, v, state.epochs[k, v]) for k, v in e.domain.items()))
        made.domain = digest(parts)
        made.rough = digest(parts, e.grade) if e.grade == "bounded" else 0

    def finish(self, e: Finish | Abort, event: str = "finish") -> None:
        """The end of a life."""
        state, other = self.state, self.on[event].other
        request = state.requests.get(e.req)
        if request is None:
            if e.req in state.ended and event == "finish":
                state.fire(other["finish"], self.nobody, segment=e.req)
            return
        if request.lost:
            state.skipped += 1
            return
        record = request.record
        if record.stage in self.hits.over and event == "abort":
            return
        if record.stage == self.hits.first:
            done = state.fire(other["reject"], record, segment=e.req)
        elif record.stage in self.hits.over:
            done = state.fire(other["finish"], record, segment=e.req)
        else:
            done = self.hits.settle(request) and state.fire(other["finish"], record, segment=e.req)
        request.running = False
        if not done:
            state.lose_request(request)
        self.close(request, event)

    def abort(self, e: Abort) -> None:
        """The client's word; of a life that has ended it changes nothing."""
        self.finish(e, "abort")

    def preempt(self, e: Preempt) -> None:
        """All leases go; the request will look up its prefix anew."""
        state, request = self.state, self.state.request(e.req)
        other = self.on["preempt"].other
        if e.need >= 0:
            state.fire(other["preempts_for_room"], e.need, e.free, e.pending, segment=e.req)
        if request.lost or not self.hits.settle(request):
            return
        if not state.fire(other["preempt"], request.record, segment=e.req):
            state.lose_request(request)
        # What was accepted belongs to the prompt when the request comes again.
        request.length = max(request.length, request.record.accepted)
        request.running = request.cold = False
        request.positions.clear()
        self.ranks.forget(request.name)

    def close(self, request: Request, event: str) -> None:
        """Forgets a life that is over and holds nothing."""
        record = request.record
        if request.lost:
            self.forget(request)
            return
        close = self.on[event].other["close"]
        if not request.held and self.state.legal(close, record):
            self.state.fire(close, record)
            self.forget(request)

    def forget(self, request: Request) -> None:
        """Nothing of this life is kept but its name."""
        self.state.forget(request)
        self.ranks.forget(request.name)
        self.hits.leases.pop(request.uid, None)
