"""Mutants: every way to weaken or bend one row by one change, as changed records.

Operators: drop a guard conjunct, drop a stage column's guard, drop an effect, flip a sign (``+`` and ``-``, ``+=`` and
``-=``), flip a comparison (``<=`` and ``<``, ``>=`` and ``>``, ``==`` and ``!=``).
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from hybridkv_ref.needs import FILE
from hybridkv_ref.spec_files import CrashSpec, ExtendSpec, HandoffSpec, RowSpec, Spec
from hybridkv_ref.tables import Tables

NEED, CRASH = "need", "crash"
Section = RowSpec | ExtendSpec | HandoffSpec
_SIGNS: dict[type, type] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_COMPARISONS: dict[type, type] = {
    ast.LtE: ast.Lt, ast.Lt: ast.LtE, ast.GtE: ast.Gt, ast.Gt: ast.GtE, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One changed row: where it stands, what was done, and the text before and after ('' when dropped)."""

    file: str
    section: str
    row: str
    operator: str
    key: str
    before: str
    after: str

    @property
    def id(self) -> str:
        """A stable name: file, row, key and operator."""
        return f"{self.file}: {self.section}.{self.row}.{self.key}: {self.operator} '{self.before}'" + (
            f" -> '{self.after}'" if self.after else ""
        )

    def apply(self, spec: Spec) -> Spec:
        """The spec with this one change."""
        if self.section == NEED:
            raise ValueError("a mutant of a recovery entry is applied to the event")
        file = spec.files[self.file]
        section: dict[str, Any] = dict(getattr(file, self.section))
        section[self.row] = self._changed(section[self.row])
        return msgspec.structs.replace(
            spec, files={**spec.files, self.file: msgspec.structs.replace(file, **{self.section: section})}
        )

    def _changed(self, item: Section | CrashSpec) -> Section | CrashSpec:
        key, _, index = self.key.partition("[")
        if not index:
            return msgspec.structs.replace(item, **{_attribute(key): ""})
        texts = list(getattr(item, key))
        position = int(index.rstrip("]"))
        texts[position : position + 1] = [self.after] if self.after else []
        return msgspec.structs.replace(item, **{key: texts})


def _attribute(key: str) -> str:
    return "from_" if key == "from" else key


def mutants(spec: Spec, tables: Tables) -> Iterator[Mutant]:
    """All mutants of a spec, in file order; last, each demand of a recovery entry dropped from the joint row."""
    for label, file in spec.files.items():
        for section in ("rows", "extend", "handoffs"):
            for name, item in getattr(file, section).items():
                yield from _of_row(label, section, name, item)
        for name, entry in file.crash.items():
            for key, texts in (("when", entry.when), ("keep", entry.keep)):
                for index, text in enumerate(texts):
                    yield Mutant(label, CRASH, name, f"drop {key}", f"{key}[{index}]", text, "")
    for event in tables.events:
        for guard in event.guards:
            label, _, place = guard.place.partition(": ")
            if label == FILE:
                yield Mutant(label, NEED, event.row, "drop guard", place, guard.text, "")


def _of_row(label: str, section: str, name: str, item: Section) -> Iterator[Mutant]:
    columns = [] if isinstance(item, ExtendSpec) else ["from_"]
    columns += ["segment_from"] if isinstance(item, RowSpec) else []
    for column in columns:
        if getattr(item, column):
            yield Mutant(label, section, name, "drop column", column.rstrip("_"), getattr(item, column), "")
    for index, text in enumerate(item.when):
        yield Mutant(label, section, name, "drop guard", f"when[{index}]", text, "")
        for after in flips(text):
            yield Mutant(label, section, name, "flip", f"when[{index}]", text, after)
    for index, text in enumerate(item.then):
        yield Mutant(label, section, name, "drop effect", f"then[{index}]", text, "")
        for after in effect_flips(text):
            yield Mutant(label, section, name, "flip", f"then[{index}]", text, after)


def flips(text: str) -> Iterator[str]:
    """The expression with one sign or comparison flipped, in every way."""
    count = sum(1 for node in ast.walk(ast.parse(text, mode="eval")) if _flippable(node))
    for index in range(count):
        tree = ast.parse(text, mode="eval")
        node = [n for n in ast.walk(tree) if _flippable(n)][index]
        if isinstance(node, ast.BinOp):
            node.op = _SIGNS[type(node.op)]()
        elif isinstance(node, ast.Compare):
            node.ops = [_COMPARISONS[type(node.ops[0])]()]
        yield ast.unparse(tree)


def _flippable(node: ast.AST) -> bool:
    if isinstance(node, ast.BinOp):
        return type(node.op) in _SIGNS
    return isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARISONS


def effect_flips(text: str) -> Iterator[str]:
    """The effect with its ``+=`` or ``-=`` turned round, or one sign or comparison of its right side flipped."""
    for old, new in (("+=", "-="), ("-=", "+=")):
        if old in text:
            yield text.replace(old, new, 1)
    left, _, right = text.partition("=")
    for after in flips(right.strip()):
        yield f"{left}= {after}"
