"""What only several engine instances together show: votes and decisions of ranks, and both ends of a transfer."""

from collections import OrderedDict
from pathlib import Path

from hybridkv_ref.events import Agree, Decide, Event, Header, TransferBegin, Vote
from hybridkv_ref.oracle import Oracle, Verdict
from hybridkv_ref.paths import SPEC_DIR

TIES = (Vote, Agree, Decide, TransferBegin)
"""The events that tie instances together."""

OPEN_TRANSFERS = 65536
"""Transfers of which one end was seen and the other may follow."""


class Joint:
    """One oracle over the events that tie instances together; the others pass by."""

    def __init__(self, header: Header, spec: Path = SPEC_DIR) -> None:
        self.oracle = Oracle(header, spec=spec)
        self.paired = self.oracle.state.bind("transfer_begin").other["paired"]
        self.begun: OrderedDict[str, tuple[str, dict[str, int]]] = OrderedDict()

    def feed(self, event: Event) -> Verdict:
        """Judges an event of any instance."""
        if isinstance(event, Vote | Agree | Decide):
            return self.oracle.feed(event)
        return self.pair(event) if isinstance(event, TransferBegin) else Verdict()

    def pair(self, event: TransferBegin) -> Verdict:
        """Compares the blocks of a transfer's second end with those of its first."""
        counts = {part.group: max(len(part.source), len(part.target)) for part in event.parts}
        instance, first = self.begun.pop(event.xfer, ("", None))
        if first is None or instance == event.instance:
            self.begun[event.xfer] = (event.instance, counts)
            if len(self.begun) > OPEN_TRANSFERS:
                self.begun.popitem(last=False)
            return Verdict()
        state = self.oracle.state
        state.event = "transfer_begin"
        for group in first | counts:
            state.fire(self.paired, first.get(group, 0), counts.get(group, 0), segment=(group, event.xfer))
        refusals, state.refusals = tuple(state.refusals), []
        return Verdict(refusals)
