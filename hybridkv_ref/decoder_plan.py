"""What a layer stores under which name, and which rows a step touches.

Both are read from the geometry: a layer attends a window because a group of windows lists it, folds because a ring
feeds one of its groups of entries, chooses because one of these is an index.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hybridkv_ref.decoder_state import Rows
from hybridkv_ref.models import Model


@dataclass(frozen=True)
class Folded:
    """Entries of one compressor: the group that holds them and the group of the tail that feeds them."""

    entries: str
    tail: str
    ratio: int
    halo: int


@dataclass(frozen=True)
class Plan:
    """What one layer stores; ``state`` is set on recurrent layers, ``window`` on attention layers."""

    window: str = ""
    entries: Folded | None = None
    index: Folded | None = None
    state: str = ""


def layer_plans(model: Model) -> tuple[Plan, ...]:
    """The plan of every layer, lowest first."""
    plans = []
    for layer in sorted({i for group in model.groups for i in group.layer_ids or ()}):
        here = [group for group in model.groups if layer in (group.layer_ids or ())]
        tails = {group.feeds: group for group in here if group.shape == "ring"}
        parts: dict[str, Any] = {}
        for group in here:
            match group.shape:
                case "window" | "state" as shape:
                    parts[shape] = group.name
                case "entries":
                    tail = tails[group.name]
                    part = Folded(group.name, tail.name, group.ratio or 1, tail.halo or 0)
                    parts["index" if group.dtype_of == "index" else "entries"] = part
        plans.append(Plan(**parts))
    return tuple(plans)


@dataclass(frozen=True)
class Step:
    """Tokens [start, end) of one request, computed at once, with ``padding`` rows after them that belong to nobody.

    Entries that end at or before ``frontier`` are cached and not written.
    """

    start: int
    end: int
    frontier: int
    padding: int = 0

    @cached_property
    def positions(self) -> Tensor:
        """int64 [T]: the tokens' positions; -1 for padding."""
        return torch.cat((torch.arange(self.start, self.end), torch.full((self.padding,), -1)))

    @cached_property
    def request_rows(self) -> Tensor:
        """int32 [T]: the row of the block table of each query; -1 for padding, which sees nothing."""
        return self.positions.clamp(max=0).int()

    def slots(self, rows: Rows) -> Tensor:
        """int64 [T]: where each token's row goes; padding has the null slot."""
        return rows.slots(self.positions)

    def visible(self, ratio: int) -> Tensor:
        """int32 [T]: how many entries of this ratio each query sees: those whose last token is not after it."""
        return ((self.positions + 1) // ratio).int()


@dataclass(frozen=True)
class IndexEncoding:
    """How index keys are stored: an epoch permutes and signs their columns.

    Index queries are encoded alike, so scores are those of any other epoch; keys of two epochs do not fit each other,
    and nothing but the selection shows it.  Epoch 0 is plain.  Re-encoding is exact: no value is rounded.
    """

    epoch: int = 0

    def encode(self, x: Tensor) -> Tensor:
        """x [..., dim] of the plain encoding, in this one."""
        order, sign = self._parts(x.shape[-1])
        return x[..., order] * sign.to(x.dtype)

    def decode(self, x: Tensor) -> Tensor:
        """x [..., dim] of this encoding, plain."""
        order, sign = self._parts(x.shape[-1])
        return (x * sign.to(x.dtype))[..., order.argsort()]

    def _parts(self, dim: int) -> tuple[Tensor, Tensor]:
        if not self.epoch:
            return torch.arange(dim), torch.ones(dim)
        source = torch.Generator().manual_seed(self.epoch)
        return torch.randperm(dim, generator=source), torch.randint(0, 2, (dim,), generator=source) * 2.0 - 1.0
