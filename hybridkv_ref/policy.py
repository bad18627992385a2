"""Eviction order and recovery priority per kind: ``spec/policy.toml``, read strictly.

A policy is a preference. It decides which of several legal rows is asked for first, never whether a row is legal.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.paths import SPEC_DIR

FILE = "policy.toml"
Rank = Annotated[int, msgspec.Meta(ge=0)]


class KindPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind's preferences; the lowest rank goes first, kinds of one rank by last use.

    ``evict`` ranks device copies without a durable copy, ``evict_durable`` those with one, ``recover`` loads.
    ``spill``: a durable copy is written before the only copy is evicted. ``snapshots``: where a kind that resumes at
    exact positions is kept, at every position that the prefix index names or at the ends of its ranges; else None.
    """

    evict: Rank
    evict_durable: Rank
    recover: Rank
    spill: bool
    snapshots: Literal["every", "ends"] | None = None


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The file.

    ``reserve`` is the share of device memory, 0 to 1, that admission leaves to loads; ``default`` is for kinds without
    an entry of their own.
    """

    title: str
    reserve: Annotated[float, msgspec.Meta(ge=0, lt=1)]
    default: KindPolicy
    kinds: dict[str, KindPolicy]


def load_policy(kinds: Mapping[str, bool], spec: Path = SPEC_DIR) -> Policy:
    """Reads policy.toml of ``spec`` for these kinds (name -> whether the kind resumes at exact positions only).

    A kind without an entry gets the default. InputError for a file that cannot be read, an unknown or ill-typed field,
    an unknown kind, and ``snapshots`` where it is missing or means nothing.
    """
    path = spec / FILE
    try:
        policy = msgspec.toml.decode(path.read_bytes(), type=Policy)
    except OSError as error:
        raise InputError(f"{path}:1: cannot be read: {error.strerror}") from None
    except msgspec.ValidationError as error:
        reason, _, place = str(error).partition(" - at ")
        raise InputError(f"{path}:{place.strip('`$.') or 'file'}: {reason}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}:file: not TOML: {error}") from None
    filled = {
        kind: msgspec.structs.replace(policy.default, snapshots="ends" if exact else None)
        for kind, exact in kinds.items()
        if kind not in policy.kinds
    }
    policy = msgspec.structs.replace(policy, kinds={**policy.kinds, **filled})
    check_policy(policy, kinds, str(path))
    return policy


def check_policy(policy: Policy, kinds: Mapping[str, bool], place: str) -> None:
    """Refuses a policy that does not fit these kinds (name -> whether the kind resumes at exact positions only)."""
    for kind in sorted(policy.kinds.keys() - kinds.keys()):
        raise InputError(f"{place}:kinds.{kind}: no such kind with device copies")
    for kind, own in policy.kinds.items():
        if kinds[kind] and own.snapshots is None:
            raise InputError(f"{place}:kinds.{kind}.snapshots: missing in a kind that resumes at exact positions only")
        if own.snapshots is not None and not kinds[kind]:
            raise InputError(f"{place}:kinds.{kind}.snapshots: has no meaning in a kind that covers ranges")
