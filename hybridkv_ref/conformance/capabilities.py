"""``spec/conformance.toml``: profiles, and what an engine may claim; with ``events.toml``, what it must then show."""

from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path

import msgspec

from hybridkv_ref.errors import InputError
from hybridkv_ref.event_map import load_event_map
from hybridkv_ref.paths import SPEC_DIR
from hybridkv_ref.rules import load_rules
from hybridkv_ref.spec_files import read_toml

FILE = "conformance.toml"


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long a run is: histories, random operations in each, seconds for minimising what was found."""

    doc: str
    examples: int
    steps: int
    minimise: float
    derandomise: bool


class _Capability(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    doc: str
    operations: tuple[str, ...]
    rules: tuple[str, ...] = ()


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    title: str
    capabilities: dict[str, _Capability]
    profiles: dict[str, Profile]


class Suite(msgspec.Struct, frozen=True):
    """Both files together. ``asks``: per capability, the rules that a run has to exercise.

    ``needs``: per operation, the capability without which nobody asks for it; ``judged``: the capabilities that the
    oracle knows.
    """

    profiles: Mapping[str, Profile]
    asks: Mapping[str, tuple[str, ...]]
    needs: Mapping[str, str]
    judged: frozenset[str]

    def claimed(self, claims: Iterable[str]) -> dict[str, list[str]]:
        """By rule, the claims that ask for it."""
        found: dict[str, list[str]] = {}
        for claim in claims:
            for rule in self.asks[claim]:
                found.setdefault(rule, []).append(claim)
        return found

    def allowed(self, operation: str, claims: Iterable[str]) -> bool:
        """Whether an engine with these claims is asked for an operation."""
        return self.needs.get(operation) in (None, *claims)


@lru_cache(maxsize=8)
def load_suite(spec: Path = SPEC_DIR) -> Suite:
    """Reads the file; one-line InputError for what it does not allow."""
    try:
        read = msgspec.convert(read_toml(spec / FILE, FILE), _File)
    except msgspec.ValidationError as error:
        raise InputError(f"{FILE}: {error}") from None
    known = load_event_map(spec).capabilities
    asks = {name: one.rules for name, one in known.items()}
    rules = load_rules(spec)
    for name, own in read.capabilities.items():
        if unknown := [rule for rule in own.rules if rule not in rules]:
            raise InputError(f"{FILE}: capabilities.{name}.rules: no rule '{unknown[0]}'")
        asks[name] = (*asks.get(name, ()), *own.rules)
    needs = {operation: name for name, own in read.capabilities.items() for operation in own.operations}
    return Suite(read.profiles, asks, needs, frozenset(known))
