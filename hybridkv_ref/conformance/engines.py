"""The engines in the box, by the names that ``--hybridkv-engine`` takes."""

from typing import TYPE_CHECKING

from hybridkv_ref.conformance.simple import GroupAwareEngine, SimpleBlockEngine
from hybridkv_ref.events import GroupSpec

if TYPE_CHECKING:
    from hybridkv_ref.conformance.reference import ReferenceEngine

SIZE, WINDOW = 4, 8


def _groups(capacity: int, states: bool = True) -> list[GroupSpec]:
    full = GroupSpec("full", "compressed_kv", SIZE, capacity=capacity)
    window = GroupSpec("window", "swa_window", SIZE, window=WINDOW, capacity=capacity - SIZE)
    state = GroupSpec("state", "recurrent_state", SIZE, capacity=capacity - SIZE)
    return [full, window, *([state] if states else [])]


def simple() -> SimpleBlockEngine:
    """A prefix-hash cache that treats all groups alike: it has to fail."""
    return SimpleBlockEngine(_groups(20))


def aware() -> GroupAwareEngine:
    """The same, asking every group: it has to pass."""
    return GroupAwareEngine(_groups(20))


def speculative() -> GroupAwareEngine:
    """Without recurrent layers, so that drafts can be taken back: it has to pass."""
    return GroupAwareEngine(_groups(20, states=False))


def reference() -> "ReferenceEngine":
    """The reference allocator with a host tier; needs torch."""
    from hybridkv_ref.conformance.reference import ReferenceEngine

    return ReferenceEngine()
