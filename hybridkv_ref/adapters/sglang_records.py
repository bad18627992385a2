"""What an adapter remembers of SGLang's requests and locks."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any


@dataclass(slots=True)
class Lock:
    """A lock on the way from a node to the root: its holder, and the pages of each group on which it counts."""

    name: str
    node: Any
    pages: list[Counter[int]]


@dataclass(slots=True)
class Life:
    """What was last seen of a request; ``state``: the slot that its hit ends in."""

    req: Any
    told: int
    used: int = 0
    state: int = 0
    sent: int = 0
    step: str = ""
    running: bool = False
    ending: bool = False
    held: list[dict[int, int]] = field(default_factory=lambda: [{}, {}])
    locks: list[Lock] = field(default_factory=list)


def receipt_of(req: Any) -> Any:
    """What the scheduler keeps of a request's lock."""
    return getattr(req, "lock_receipt", None) or getattr(getattr(req, "lock", None), "receipt", None)


def domain_of(req: Any) -> dict[str, str]:
    """Who may share a request's prefix: the engine joins an adapter's id to the key that a caller gave."""
    adapter, extra = req.lora_id or "", req.extra_key or ""
    said = {"adapter": adapter, "extra": extra.removesuffix(adapter), "salt": req.cache_salt or ""}
    return {name: value for name, value in said.items() if value}
