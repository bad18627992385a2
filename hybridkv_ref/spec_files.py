"""What may stand in a table file: one msgspec record per TOML section, and the reader that refuses anything else.

Only shapes are checked here; names and types inside expressions are ``loader``'s.
"""

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from hybridkv_ref.errors import InputError

ClassName = Literal["segment", "lease", "rank", "request", "copy", "shipment", "transfer", "graph"]
Scope = Literal[
    "global", "segment", "lease", "rank", "request", "copy", "pair", "shipment", "transfer", "graph", "system"
]  # fmt: skip


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"from_": "from", "pass_": "pass"}):
    """Base of every section: a misspelt key is an error, never ignored."""


class ConstantSpec(Record, frozen=True):
    """A symbolic constant.  ``assume`` holds in every proof; ``small`` is its value in finite instances."""

    small: int
    assume: list[str] = []
    doc: str = ""


class SumSpec(Record, frozen=True):
    """A variable that is the sum of ``term`` over all ``of`` entities (of kinds that have ``has``) which point at its
    owner.

    ``via`` is the pointing role (segment, request, src, dst); a global has none.
    """

    of: ClassName
    term: str
    via: str = ""
    has: str = ""


class VarSpec(Record, frozen=True):
    """A variable of an entity or a pool.  ``type`` is int, counter, bool, stage or a list of enum members.

    ``durable`` ones keep their value in a crash.  ``at_least`` bounds a rigid int: assumed in proofs, checked when
    the machine makes the entity.
    """

    type: str | list[str]
    rigid: bool = False
    per_kind: bool = False
    sum: SumSpec | list[SumSpec] | None = None
    durable: bool = False
    init: int | bool | str | None = None
    at_least: int | None = None
    needs: str = ""
    doc: str = ""


class RowSpec(Record, frozen=True):
    """One transition.  ``from``/``to`` are the stage columns of the row's own class.

    ``can`` lists cases at the limit in which the row must still be possible; ``new(x)`` is the value after it.
    """

    doc: str
    scope: Scope = "segment"
    from_: str = ""
    to: str = ""
    segment_from: str = ""
    segment_to: str = ""
    actor: Literal["request", "allocator", "gpu", "cpu", "io", "environment"] = "allocator"
    part: bool = False
    fair: bool = False
    intake: bool = False
    inputs: dict[str, str] = {}
    when: list[str] = []
    resume: bool = False
    then: list[str] = []
    can: list[str] = []
    tags: list[str] = []
    rules: list[str] = []
    kernel: str = ""


class ExtendSpec(Record, frozen=True):
    """What one kind adds to a shared row: stronger guards, effects on its own variables, more inputs.

    ``kernel`` takes the place of the row's.
    """

    when: list[str] = []
    then: list[str] = []
    can: list[str] = []
    inputs: dict[str, str] = {}
    rules: list[str] = []
    kernel: str = ""


class SideSpec(Record, frozen=True):
    """One side of a handoff: the capability that a kind must declare and the part row that fires there."""

    has: str
    row: str
    pass_: dict[str, str] = {}


class HandoffSpec(Record, frozen=True):
    """Two part rows that fire as one step, in the order of ``order``.

    ``from``/``to`` are stages of the copy between them.
    """

    doc: str
    src: SideSpec
    dst: SideSpec
    order: list[Literal["src", "dst"]]
    link: Literal["copy", "shipment"] = "copy"
    from_: str = ""
    to: str = ""
    same_kind: bool = False
    actor: Literal["request", "allocator", "gpu", "cpu", "io", "environment"] = "allocator"
    fair: bool = False
    intake: bool = False
    inputs: dict[str, str] = {}
    when: list[str] = []
    then: list[str] = []
    can: list[str] = []
    tags: list[str] = []
    rules: list[str] = []
    kernel: str = ""


class InvariantSpec(Record, frozen=True):
    """A one-state property.  ``goal`` says something a user cares about, ``helper`` makes a goal inductive.

    ``resume`` appends what recovery.toml demands of the kind.  ``choose`` fixes an arbitrary constant (a probe) for
    this proof: sound, because what is assumed holds for each of its values and the property does not mention it.
    """

    scope: Scope
    holds: str
    rules: list[str] = []
    role: Literal["goal", "helper"] = "goal"
    resume: bool = False
    choose: str = ""
    has: str = ""
    src_has: str = ""
    dst_has: str = ""
    same_kind: bool = False
    doc: str = ""


class StepSpec(Record, frozen=True):
    """A two-state property of every row (or of those with tag ``on``); ``new(x)`` is the next value.

    With ``on`` it may read the rows' ``inputs`` too.
    """

    scope: Scope
    holds: str
    rules: list[str] = []
    on: str = ""
    inputs: dict[str, str] = {}
    has: str = ""
    src_has: str = ""
    dst_has: str = ""
    same_kind: bool = False
    doc: str = ""


class HelpfulSpec(Record, frozen=True):
    """While ``when`` holds, progress is certain: the fair row ``row`` is enabled and lowers the rank, or what ``count``
    counts is owed an end by the claims whose names begin with ``by``.

    With ``by = "another"`` the row is another segment's, one for which ``who`` holds; ``count`` counts those, and
    ``probe`` is what the arbitrary constant in its definition is set to.
    """

    when: str
    row: str = ""
    by: str = ""
    count: str = ""
    who: str = ""
    probe: str = ""


class ResponseSpec(Record, frozen=True):
    """Liveness: whenever ``from`` holds, ``to`` follows.  ``rank`` is compared lexicographically.

    ``given`` restricts the claim to states that no row of the claim leaves (proved), ``without`` names the rows
    (or ``intake``: all that bring new work) that are switched off and ``also_fair`` rows that somebody who wants the
    cache drained will fire, for drain claims.
    """

    scope: Scope
    from_: str
    to: str
    rank: list[str]
    helpful: list[HelpfulSpec]
    rules: list[str] = []
    has: str = ""
    src_has: str = ""
    dst_has: str = ""
    same_kind: bool = False
    given: str = ""
    without: list[str] = []
    also_fair: list[str] = []
    form: Literal["response", "bounded", "drain", "queue"] = "response"
    doc: str = ""


class CrashSpec(Record, frozen=True):
    """What a crash of the process leaves of an entity in one of the stages ``from``, if ``when`` holds.

    It is then in stage ``to`` with the variables in ``keep`` as they were; every other one starts over.  An entity
    that no entry describes starts over as a whole.
    """

    from_: str
    to: str
    doc: str
    when: list[str] = []
    keep: list[str] = []
    rules: list[str] = []


class SometimesSpec(Record, frozen=True):
    """A state that must be reachable in the finite instance: the guard against vacuous proofs."""

    scope: Scope
    holds: str
    has: str = ""
    src_has: str = ""
    dst_has: str = ""
    same_kind: bool = False
    rules: list[str] = []
    doc: str = ""


class FileSpec(Record, frozen=True):
    """One table file; which sections it fills depends on what it describes."""

    title: str
    kind: str = ""
    capabilities: list[str] = []
    stages: dict[str, list[str]] = {}
    sets: dict[str, list[str]] = {}
    set_names: list[str] = []
    edges: list[str] = []
    uses: list[str] = []
    constants: dict[str, ConstantSpec] = {}
    kind_constants: dict[str, ConstantSpec] = {}
    pool: dict[str, VarSpec] = {}
    kind_pool: dict[str, VarSpec] = {}
    segment: dict[str, VarSpec] = {}
    lease: dict[str, VarSpec] = {}
    request: dict[str, VarSpec] = {}
    rank: dict[str, VarSpec] = {}
    copy: dict[str, VarSpec] = {}
    transfer: dict[str, VarSpec] = {}
    shipment: dict[str, VarSpec] = {}
    graph: dict[str, VarSpec] = {}
    rows: dict[str, RowSpec] = {}
    extend: dict[str, ExtendSpec] = {}
    handoffs: dict[str, HandoffSpec] = {}
    invariant: dict[str, InvariantSpec] = {}
    step: dict[str, StepSpec] = {}
    response: dict[str, ResponseSpec] = {}
    crash: dict[str, CrashSpec] = {}
    extend_claim: dict[str, list[HelpfulSpec]] = {}
    sometimes: dict[str, SometimesSpec] = {}


def read_toml(path: Path, label: str) -> dict[str, object]:
    """The file as plain data; one-line InputError when it is missing, binary, empty or malformed."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise InputError(f"{label}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{label}: byte {error.start}: not UTF-8 text") from None
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{label}: {error}") from None
    except RecursionError:
        raise InputError(f"{label}: nested too deeply") from None
    if not data:
        raise InputError(f"{label}: empty table")
    return data


def read_file(path: Path, label: str) -> FileSpec:
    """One table file as records."""
    data = read_toml(path, label)
    try:
        return msgspec.convert(data, FileSpec)
    except msgspec.ValidationError as error:
        raise InputError(f"{label}: {_place(str(error))}") from None


def _place(message: str) -> str:
    """msgspec's ``reason - at `$.rows[...].when``` turned into ``place: reason``."""
    reason, _, path = message.partition(" - at `$")
    return f"{path.rstrip('`').lstrip('.') or 'file'}: {reason}"


class Spec(msgspec.Struct, frozen=True):
    """All table files of one spec directory: label (path below it) to records, common first, then protocols, kinds."""

    files: dict[str, FileSpec]
    recovery: dict[str, object]


def read_spec(directory: Path) -> Spec:
    """Reads every table below ``directory``; the first unreadable file is named."""
    if not directory.is_dir():
        raise InputError(f"{directory}: not a directory of tables")
    paths = [directory / "common.toml"]
    paths += sorted((directory / "protocols").glob("*.toml")) + sorted((directory / "kinds").glob("*.toml"))
    files = {}
    for path in paths:
        label = path.relative_to(directory).as_posix()
        files[label] = read_file(path, label)
    if not any(spec.kind for spec in files.values()):
        raise InputError(f"{directory}: kinds: no table of a kind")
    return Spec(files, read_toml(directory / "recovery.toml", "recovery.toml"))
