"""Which calls of an SGLang radix cache are watched, what a release lacks, and which of its rules hold: by signature.

Nothing here needs the engine. A rule that changed between releases is a field of ``Rules``, not of the oracle.
"""

import inspect
from dataclasses import dataclass

from hybridkv_ref.adapters.vllm_features import Calls, lacks
from hybridkv_ref.errors import InputError

CLAIMS = ("blocks", "reuse", "index", "steps", "in_order")
"""What a trace of this adapter shows."""

NEEDED: Calls = {
    "match_prefix": ("params",),
    "inc_lock_ref": (),
    "dec_lock_ref": ("params",),
    "evict": ("params",),
    "resolve_node_handle": ("node_handle",),
}
STORES: tuple[Calls, ...] = (
    {"cache_unfinished_req": ("req",), "cache_finished_req": ("req",)},
    {"checkpoint": ("req", "up_to"), "claim_kv_row": ("req",)},
)
"""How a request's tokens are handed to the tree: one of these."""

OF_WINDOW = "early release of the window"
OPTIONAL: dict[str, tuple[Calls, ...]] = {
    OF_WINDOW: (
        {"dec_swa_lock_only": ("node", "params")},
        {"dec_swa_lock_only": ("node_id", "params")},
        {"release_swa_prefix_lock": ("req",), "release_swa": ("lock",)},
    ),
    "eviction for an allocation": ({"evict_for_alloc": ("params",)},),
}
"""Each by one of these."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules of the engine that changed between releases.

    ``locked_tombstones``: a lock of the window may span nodes whose window pages are gone. Where it may not, such a
    lock is told as a pin of a page that is free, which the oracle refuses.
    """

    locked_tombstones: bool


def rules_of(cls: type) -> Rules:
    """The rules that a cache's class follows."""
    return Rules(locked_tombstones="skip_lock_components" in inspect.signature(cls.inc_lock_ref).parameters)  # type: ignore[attr-defined]


def missing_features(cls: type, window: bool = True) -> dict[str, list[str]]:
    """What a cache's class lacks, calls or parameters by feature; InputError where it cannot be watched at all.

    ``window``: whether a group has one; without it nothing of a window is missing.
    """
    lacking = lacks(cls, NEEDED) or _best(cls, STORES)
    if lacking:
        raise InputError(
            f"{cls.__module__}.{cls.__qualname__}: not a cache that can be watched: no {', '.join(lacking)}"
        )
    wanted = {feature: ways for feature, ways in OPTIONAL.items() if window or feature != OF_WINDOW}
    return {feature: lost for feature, ways in wanted.items() if (lost := _best(cls, ways))}


def _best(cls: type, ways: tuple[Calls, ...]) -> list[str]:
    """What a class lacks for the way of which it lacks the least."""
    return min((lacks(cls, calls) for calls in ways), key=len)
