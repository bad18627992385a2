"""Which calls of a vLLM manager are watched, and what a release lacks: found by signature, without the engine."""

import inspect
from collections.abc import Mapping

from hybridkv_ref.errors import InputError

Calls = Mapping[str, tuple[str, ...]]
"""Methods and the parameters of each that are used."""

NEEDED: Calls = {
    "get_computed_blocks": ("request",),
    "allocate_slots": ("request", "num_new_tokens", "num_new_computed_tokens", "new_computed_blocks"),
    "free": ("request",),
    "take_events": (),
}
OPTIONAL: Mapping[str, Calls] = {
    "delayed caching of external tokens": {
        "allocate_slots": ("num_external_computed_tokens", "delay_cache_blocks"),
        "cache_blocks": ("request", "num_computed_tokens"),
    },
    "look-ahead": {"allocate_slots": ("num_lookahead_tokens",)},
    "admission of whole sequences": {"allocate_slots": ("full_sequence_must_fit",)},
    "eviction by block": {"evict_blocks": ("block_ids",)},
    "reset": {"reset_prefix_cache": ()},
    "sliding outside of an allocation": {"remove_skipped_blocks": ("request_id",)},
    "same-step hits of states": {"new_step_starts": ()},
}


def call_names() -> tuple[str, ...]:
    """Every call that is named here, once."""
    return tuple(dict.fromkeys((*NEEDED, *(name for calls in OPTIONAL.values() for name in calls))))


def missing_features(cls: type) -> dict[str, list[str]]:
    """What a manager's class lacks, calls or parameters by feature; InputError where it cannot be watched at all."""
    if lacking := lacks(cls, NEEDED):
        raise InputError(
            f"{cls.__module__}.{cls.__qualname__}: not a manager that can be watched: no {', '.join(lacking)}"
        )
    return {feature: lost for feature, calls in OPTIONAL.items() if (lost := lacks(cls, calls))}


def lacks(cls: type, calls: Calls) -> list[str]:
    """Which of these calls and parameters a class has not."""
    missing = []
    for name, parameters in calls.items():
        call = getattr(cls, name, None)
        known = inspect.signature(call).parameters if call is not None else {}
        missing += [name] if call is None else [f"{name}({p})" for p in parameters if p not in known]
    return missing
