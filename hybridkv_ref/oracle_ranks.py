"""What the ranks of an engine say about the hit of a request, and what they agree on."""

from collections import OrderedDict

from hybridkv_ref.events import Agree, Vote
from hybridkv_ref.oracle_records import REMEMBERED
from hybridkv_ref.oracle_state import State


class Ranks:
    """Votes by request and rank, and the hits that were agreed."""

    def __init__(self, state: State) -> None:
        self.state, self.on = state, state.bind("agree")
        self.votes: OrderedDict[str, dict[int, int]] = OrderedDict()
        self.agreed: OrderedDict[str, int] = OrderedDict()

    def vote(self, e: Vote) -> None:
        """A rank's own hit; the first one after an agreement is for another hit."""
        if self.agreed.pop(e.req, None) is not None:
            del self.votes[e.req]
        self.votes.setdefault(e.req, {})[e.rank] = e.hit
        if len(self.votes) > REMEMBERED:
            self.forget(next(iter(self.votes)))

    def agree(self, e: Agree) -> None:
        """The hit that all use."""
        votes = self.votes.setdefault(e.req, {})
        if votes:
            self.state.fire(self.on.other["smallest"], e.hit, min(votes.values()), segment=e.req)
        self.agreed[e.req] = e.hit
        if len(self.votes) > REMEMBERED:
            self.forget(next(iter(self.votes)))

    def forget(self, name: str) -> None:
        """Nothing is kept of what ranks said about this request."""
        self.votes.pop(name, None)
        self.agreed.pop(name, None)

    def hit(self, name: str) -> int:
        """The most tokens that all ranks can serve of this request; -1 if none said anything."""
        return self.agreed.get(name, min(self.votes.get(name, {}).values(), default=-1))
