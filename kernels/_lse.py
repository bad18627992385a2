"""Conventions for the log-sum-exp that goes with a partial attention output.

Engines differ in base and in how an empty segment is written; the convention is part of the kernel ABI. An empty
segment has output zero, whatever its log-sum-exp.
"""

import math
from enum import Enum

import torch
from torch import Tensor

LOG2_E = math.log2(math.e)


class Lse(Enum):
    """A convention; `base2` says the base of the logarithm, `empty` is the value of an empty segment."""

    FLASHINFER = ("base 2", -math.inf)
    FLASHMLA = ("natural", math.inf)

    @property
    def base2(self) -> bool:
        """The logarithm is to base 2, else natural."""
        return self.value[0] == "base 2"

    @property
    def empty(self) -> float:
        """The log-sum-exp of no entries at all."""
        return self.value[1]

    def from_natural(self, lse: Tensor) -> Tensor:
        """`lse` in this convention, from natural logarithms where -inf is empty."""
        scaled = lse * LOG2_E if self.base2 else lse
        return torch.where(lse == -math.inf, torch.full_like(lse, self.empty), scaled)

    def to_natural(self, lse: Tensor) -> Tensor:
        """Natural logarithms where -inf is empty, from this convention."""
        scaled = lse / LOG2_E if self.base2 else lse
        return torch.where(lse == self.empty, torch.full_like(lse, -math.inf), scaled)
