"""Names that tie table files together: a misspelt capability, tag, role or claim would silently take rules away.

Checked on the records, before any expression is read; names inside expressions are ``expr``'s.
"""

import keyword
from collections.abc import Iterator, Mapping

from hybridkv_ref.errors import InputError
from hybridkv_ref.spec_files import FileSpec, SumSpec, VarSpec
from hybridkv_ref.tables import CLASS_OF, LINKS

CLASSES = tuple(dict.fromkeys(CLASS_OF.values()))
CORE = ("cacheable", "any", "")  # capabilities that the loader itself asks for
CRASH_TAG = "crash"  # the tag of the one step that is no row
RESERVED = ("cls", "kind", "name", "refs", "stage")  # attributes of every entity
Asked = tuple[str, str]


def check_ties(files: Mapping[str, FileSpec]) -> None:
    """Raises InputError for the first name that ties to nothing, or cannot be a name."""
    for label, file in files.items():
        for place, name in _names(file):
            if not name.isidentifier() or keyword.iskeyword(name) or name in RESERVED:
                raise InputError(f"{label}: {place}.{name}: not a name (letters, digits and _, no reserved word)")
        _check_stages(label, file)
    _check_capabilities(files)
    _check_claims(files)
    _check_sums(files)


def _names(file: FileSpec) -> Iterator[tuple[str, str]]:
    if file.kind:
        yield "kind", file.kind
    for section in ("constants", "kind_constants", "pool", "kind_pool", *CLASSES, "rows", "handoffs"):
        yield from ((section, name) for name in getattr(file, section))
    for section in ("rows", "extend", "handoffs"):
        for row, item in getattr(file, section).items():
            yield from ((f"{section}.{row}.inputs", name) for name in item.inputs)


def _check_stages(label: str, file: FileSpec) -> None:
    for cls, members in file.stages.items():
        if cls not in CLASSES or (cls == "segment") != bool(file.kind):
            raise InputError(f"{label}: stages.{cls}: no class of this name in this file")
        if not members or len(set(members)) != len(members):
            raise InputError(f"{label}: stages.{cls}: names a stage twice, or none")
    if file.kind and "segment" not in file.stages:
        raise InputError(f"{label}: stages.segment: missing")


def _asked(file: FileSpec) -> Iterator[Asked]:
    """(place, capability) of everything in a file that is stated for kinds with a capability."""
    for section in ("pool", "kind_pool", *CLASSES):
        for name, var in getattr(file, section).items():
            yield f"{section}.{name}.needs", var.needs
            yield from ((f"{section}.{name}.sum.has", total.has) for total in _sums(var))
    for name, handoff in file.handoffs.items():
        yield f"handoffs.{name}.src.has", handoff.src.has
        yield f"handoffs.{name}.dst.has", handoff.dst.has
    for section in ("invariant", "step", "response", "sometimes"):
        for name, item in getattr(file, section).items():
            for key in ("has", "src_has", "dst_has"):
                yield f"{section}.{name}.{key}", getattr(item, key)


def _check_capabilities(files: Mapping[str, FileSpec]) -> None:
    asked = [(label, *pair) for label, file in files.items() for pair in _asked(file)]
    declared = {c for file in files.values() for c in file.capabilities}
    for label, place, capability in asked:
        if capability not in CORE and capability not in declared:
            raise InputError(f"{label}: {place}: no kind has the capability '{capability}'")
    wanted = {capability for _, _, capability in asked} | set(CORE)
    for label, file in files.items():
        for capability in file.capabilities:
            if capability not in wanted:
                raise InputError(f"{label}: capabilities: nothing asks for '{capability}'")


def _check_claims(files: Mapping[str, FileSpec]) -> None:
    tags = {CRASH_TAG} | {tag for file in files.values() for row in file.rows.values() for tag in row.tags}
    tags |= {tag for file in files.values() for handoff in file.handoffs.values() for tag in handoff.tags}
    claims = {name for file in files.values() for name in file.response}
    for label, file in files.items():
        for name, step in file.step.items():
            if step.on and step.on not in tags:
                raise InputError(f"{label}: step.{name}.on: no row has the tag '{step.on}'")
        for name in file.extend_claim:
            if name not in claims:
                raise InputError(f"{label}: extend_claim.{name}: no claim of this name")
        for name, handoff in file.handoffs.items():
            if len(set(handoff.order)) != len(handoff.order) or not (handoff.order or handoff.then or handoff.to):
                raise InputError(f"{label}: handoffs.{name}.order: names a side twice, or none and does nothing")
        for name, row in file.rows.items():
            if row.scope in ("global", "pair", "copy", "shipment"):
                raise InputError(f"{label}: rows.{name}.scope: no row has the scope '{row.scope}'")
            if row.scope == "system" and (row.from_ or row.to):
                raise InputError(f"{label}: rows.{name}.{'from' if row.from_ else 'to'}: this scope has no stage")


def _check_sums(files: Mapping[str, FileSpec]) -> None:
    for label, file in files.items():
        for section in ("pool", "kind_pool", *CLASSES):
            for name, var in getattr(file, section).items():
                for total in _sums(var):
                    _check_via(f"{label}: {section}.{name}.sum.via", section, total)


def _sums(var: VarSpec) -> list[SumSpec]:
    return var.sum if isinstance(var.sum, list) else [var.sum] if var.sum else []


def _check_via(place: str, owner: str, total: SumSpec) -> None:
    allowed = tuple(r for r in LINKS.get(total.of, ()) if CLASS_OF[r] == owner)
    if owner in ("pool", "kind_pool"):
        allowed = ("",)
    if total.via not in allowed:
        raise InputError(f"{place}: a {total.of} points at no {owner} as '{total.via}'")
