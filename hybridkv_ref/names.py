"""Which names an expression may use, per scope and kind: the symbol tables of the loader.

A segment's own variables, globals, constants and the own pool of its kind are bare names; other entities are dotted
(``lease.seen``, ``req.s``, ``src.end``).  Per-kind request variables and per-kind pools are written without their kind
and resolve to the kind at hand, which is what lets a shared row be written once.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hybridkv_ref.errors import InputError
from hybridkv_ref.expr import BOOL, COUNTER, INT, Ref, Scope, Type, enum
from hybridkv_ref.spec_files import FileSpec, VarSpec
from hybridkv_ref.tables import CLASS_OF, ROLES

SIMPLE = {"int": INT, "counter": COUNTER, "bool": BOOL}


@dataclass(frozen=True)
class Declared:
    """All declarations of a spec, before any expression is read."""

    stages: Mapping[str, Type]
    kind_files: Mapping[str, str]
    sets: Mapping[str, Mapping[Type, tuple[str, ...]]]
    capabilities: Mapping[str, frozenset[str]]
    segment: Mapping[str, Mapping[str, VarSpec]]
    classes: Mapping[str, Mapping[str, VarSpec]]
    constants: tuple[str, ...]
    kind_constants: tuple[str, ...]
    pool: Mapping[str, VarSpec]
    kind_pool: Mapping[str, VarSpec]

    def kinds_with(self, capability: str) -> tuple[str, ...]:
        """The kinds that declare a capability ('' and 'any' mean all)."""
        return tuple(k for k in self.kind_files if capability in ("", "any") or capability in self.capabilities[k])

    def var_type(self, spec: VarSpec, stage: str, place: str) -> Type:
        """The type of a variable; ``stage`` is the class or kind whose stage enum ``stage`` means."""
        if isinstance(spec.type, list):
            return enum(tuple(spec.type), place)
        if spec.type == "stage":
            return self.stages[stage]
        if spec.type not in SIMPLE:
            raise InputError(f"{place}: unknown type '{spec.type}'")
        return SIMPLE[spec.type]

    def class_vars(self, cls: str, kind: str) -> dict[str, tuple[VarSpec, str]]:
        """Surface name -> (declaration, stored name) of one entity, per-kind variables resolved to ``kind``."""
        if cls == "segment":
            return {n: (s, n) for n, s in self.segment[kind].items()}
        return {
            n: (s, f"{n}.{kind}" if s.per_kind else n) for n, s in self.classes[cls].items() if kind or not s.per_kind
        }

    def entity(self, role: str, cls: str, kind: str, prefix: str) -> dict[str, Ref]:
        """The names of one entity under ``prefix``."""
        names = {}
        for surface, (spec, stored) in self.class_vars(cls, kind).items():
            where = kind if cls == "segment" else cls
            names[prefix + surface] = Ref(role, stored, self.var_type(spec, where, f"{cls}.{surface}"))
        if self.has_stage(cls, kind):
            names[prefix + "stage"] = Ref(role, "stage", self.stages[kind if cls == "segment" else cls])
        return names

    def has_stage(self, cls: str, kind: str) -> bool:
        """Whether the class has stages at all."""
        return (kind if cls == "segment" else cls) in self.stages

    def shared(self, kind: str = "") -> dict[str, Ref]:
        """Globals and constants, and the own ones of ``kind``; another kind's are out of reach (separation)."""
        names = {c: Ref("const", c, INT) for c in self.constants}
        names |= {g: Ref("global", g, self.var_type(s, "", g)) for g, s in self.pool.items()}
        for k in self.kind_files:
            owned = {c: Ref("const", f"{k}.{c}", INT) for c in self.kind_constants}
            owned |= {g: Ref("global", f"{k}.{g}", self.var_type(s, "", g)) for g, s in self.kind_pool.items()}
            if k == kind:
                names |= owned
        return names

    def scope(self, scope: str, kinds: Mapping[str, str], new: bool = False) -> Scope:
        """The Scope of rows and properties of ``scope`` over these kinds (role -> kind)."""
        own = kinds.get("self", "")
        names = self.shared(own)
        for role in ROLES[scope]:
            cls = CLASS_OF[role]
            if cls == "segment":
                if kinds.get(role):
                    names |= self.entity(role, cls, kinds[role], "" if role == "self" else f"{role}.")
            else:
                names |= self.entity(role, cls, own, f"{role}.")
        return Scope(names, self.sets, new=new)


def declare(files: Mapping[str, FileSpec]) -> Declared:
    """Collects the declarations of all files; a name declared twice is an error."""
    kind_files = {spec.kind: label for label, spec in files.items() if spec.kind}
    if len(kind_files) != sum(1 for spec in files.values() if spec.kind):
        raise InputError("kinds: two files describe the same kind")
    stages: dict[str, Type] = {}
    shared_segment: dict[str, VarSpec] = {}
    classes: dict[str, dict[str, VarSpec]] = {c: {} for c in dict.fromkeys(CLASS_OF.values()) if c != "segment"}
    pool: dict[str, VarSpec] = {}
    kind_pool: dict[str, VarSpec] = {}
    constants: list[str] = []
    kind_constants: list[str] = []
    for label, spec in files.items():
        for cls, members in spec.stages.items():
            owner = spec.kind if cls == "segment" else cls
            _once(stages, owner, label, "stages")
            stages[owner] = enum(tuple(members), f"stage:{owner}")
        parts: list[tuple[dict[str, VarSpec], Mapping[str, VarSpec]]] = [(pool, spec.pool), (kind_pool, spec.kind_pool)]
        parts += [(classes[c], getattr(spec, c)) for c in classes]
        parts += [] if spec.kind else [(shared_segment, spec.segment)]
        for known, fresh in parts:
            for name, var in fresh.items():
                _once(known, name, label, "variable")
                known[name] = var
        for seen, declared in ((constants, spec.constants), (kind_constants, spec.kind_constants)):
            for name in declared:
                _once((*constants, *kind_constants), name, label, "constant")
                seen.append(name)
    capabilities = {spec.kind: frozenset(spec.capabilities) for spec in files.values() if spec.kind}
    segment = {}
    for label, spec in files.items():
        if spec.kind:
            mine = {n: v for n, v in shared_segment.items() if not v.needs or v.needs in capabilities[spec.kind]}
            for name in spec.segment:
                _once(mine, name, label, "variable")
            segment[spec.kind] = {**mine, **spec.segment}
    return Declared(
        stages, kind_files, _sets(files, stages), capabilities, segment, classes,
        tuple(constants), tuple(kind_constants), pool, kind_pool,
    )  # fmt: skip


def _sets(files: Mapping[str, FileSpec], stages: Mapping[str, Type]) -> dict[str, dict[Type, tuple[str, ...]]]:
    needed = {n for spec in files.values() if not spec.kind for n in spec.set_names}
    sets: dict[str, dict[Type, tuple[str, ...]]] = {}
    for label, spec in files.items():
        for key, members in spec.sets.items():
            cls, _, name = key.rpartition(".")
            owner = spec.kind or cls
            kind = stages.get(owner)
            if kind is None:
                raise InputError(f"{label}: sets.{key}: no stages of '{owner}' to choose from")
            unknown = [m for m in members if m not in kind.members]
            if unknown:
                raise InputError(f"{label}: sets.{key}: '{unknown[0]}' is no stage of {owner}")
            sets.setdefault(name, {})[kind] = tuple(members)
        for name in needed if spec.kind else ():
            if name not in spec.sets:
                raise InputError(f"{label}: sets.{name}: missing; shared rows use it")
    return sets


def _once(known: Iterable[str], name: str, label: str, what: str) -> None:
    if name in known:
        raise InputError(f"{label}: {what} '{name}': declared twice")
