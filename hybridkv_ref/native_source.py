"""The modules of a compiled oracle that are written from the tables: classes of records, and one of each row."""

from hybridkv_ref.compile_py import role_name
from hybridkv_ref.events import GroupSpec
from hybridkv_ref.expr import BOOL, Type
from hybridkv_ref.oracle_code import MAKERS, PART, POOL, Text, first_value, layout, makers_source, split, text_of
from hybridkv_ref.oracle_tables import kind_name, oracle_tables
from hybridkv_ref.tables import Event, Tables, Var

GROUP = "group"
"""The one group whose rows are compiled: their text is that of any group."""

RECORDS = {
    "segment": "Segment", "lease": "Lease", "request": "Record", "request" + PART: "RecordPart", POOL: "Pool",
    POOL + PART: "PoolPart", "constants": "Constants",
}  # fmt: skip
"""The records that have a class of their own, as the oracle's modules name it; others are as when interpreted."""

_ROLES = {"G": "Pool", "seg": "Segment", "lease": "Lease", "req": "Record"}


def _type(kind: Type) -> str:
    return "bool" if kind == BOOL else "int" if kind.number else "str"


def _entity(cls: str, variables: dict[str, Var], parts: bool) -> list[str]:
    name = RECORDS[cls]
    lines = [f"class {name}:", "    def __init__(self) -> None:"]
    lines += [f"        self.{n}: {_type(v.type)} = {first_value(v)!r}" for n, v in variables.items()]
    lines += [f"        self.parts: list[{name}Part] = []"] if parts else []
    return [*lines, f"CLASSES[{cls!r}] = ({name}, {tuple(variables)!r})"]


def _tables() -> tuple[Tables, tuple[str, ...]]:
    group = GroupSpec(GROUP, "compressed_kv", 1)
    return oracle_tables([group]), (kind_name(GROUP),)


def entities() -> str:
    """The module ``oracle_entities`` of a compiled oracle."""
    tables, kinds = _tables()
    found = layout(tables, kinds)
    lines = ["CLASSES: dict[str, tuple[type, tuple[str, ...]]] = {}"]
    names = dict.fromkeys(split(n, kinds, first=True)[1] for n in tables.constants)
    constants = [f"        self.{n}: int = 0" for n in names]
    lines += ["class Constants:", "    def __init__(self) -> None:", *constants]
    lines += [f"CLASSES['constants'] = (Constants, {tuple(names)!r})"]
    for cls in sorted(RECORDS.keys() - {"constants"}, key=lambda c: not c.endswith(PART)):
        lines += _entity(cls, found[cls], cls + PART in found)
    lines += [makers_source(found["lease"], typed=True)]
    lines += [f"CLASSES[{MAKERS!r}] = (Makers, ())"]
    return "\n".join(lines) + "\n"


def _typed(event: Event, text: Text, name: str) -> list[str]:
    roles = {role_name(r) for r in event.roles} | {"G"}
    arguments = [f"{a}: {_ROLES[a] if a in roles else 'int'}" for a in text.arguments]
    head = f"    def {text.form}({', '.join(('self', *arguments))}) -> int:"
    return [f"class {name}(Row):", head, *(f"    {line}" for line in text.lines), f"ROWS[{text.source!r}] = {name}"]


def rows() -> str:
    """The module ``oracle_compiled`` of a compiled oracle: every row that has a form and a text for all groups."""
    tables, kinds = _tables()
    lines = [
        "from hybridkv_ref.oracle_entities import Constants, Lease, Pool, Record, Segment",
        "from hybridkv_ref.oracle_row import Row",
        "ROWS: dict[str, type[Row]] = {}",
    ]
    seen = set[str]()
    for index, event in enumerate(tables.events):
        text = text_of(event, kinds, dict.fromkeys(tables.constants, 0))
        if text.form != "fire" and text.source not in seen:
            seen.add(text.source)
            lines += _typed(event, text, f"Row{index}")
    return "\n".join(lines) + "\n"
