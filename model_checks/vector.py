"""Expressions over whole columns of states: the back end of the finite-state search.

An explored state is one entry of every column, so that a guard is evaluated in thousands of states by a few array
operations.  The source is generated per expression, never per instance: a function takes the values of its *slots*
(the variables that it reads, in a fixed order), each an integer array, or a plain int where the value is the same
everywhere.  Truth values are stored as 0 and 1, enum members as their position.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hybridkv_ref.expr import BOOL, Expr, Lit, Member, Ref, Type

Values = Sequence[Any]
VectorFunction = Callable[[Values], Any]

_BITWISE = {"and": " & ", "or": " | "}
_INFIX = {"==", "!=", "<", "<=", ">", ">=", "+", "-"}


def code(value: int | str, kind: Type) -> int:
    """How a value is stored: an enum member is its position in the type."""
    return kind.members.index(str(value)) if kind.name == "enum" else int(value)


def decode(number: int, kind: Type) -> int | str:
    """The value that a stored number stands for."""
    return kind.members[number] if kind.name == "enum" else number


def vector_source(expr: Expr, slots: dict[Ref, int], tables: list[Any]) -> str:
    """Source of an expression over ``V``; lookup tables of stage sets are appended to ``tables``."""
    match expr:
        case Lit(value=value, type=kind):
            return repr(bool(value)) if kind == BOOL else repr(code(value, kind))
        case Ref(type=kind):
            return f"(V[{slots[expr]}] != 0)" if kind == BOOL else f"V[{slots[expr]}]"
        case Member(arg=arg, members=members):
            inside = vector_source(arg, slots, tables)
            if len(members) == 1:
                return f"({inside} == {code(members[0], arg.type)})"
            tables.append(np.array([m in members for m in arg.type.members]))
            return f"T[{len(tables) - 1}][{inside}]"
    args = [vector_source(a, slots, tables) for a in expr.args]
    if expr.op in _BITWISE:
        return "(" + _BITWISE[expr.op].join(args) + ")"
    if expr.op in _INFIX:
        return f"({args[0]} {expr.op} {args[1]})"
    if expr.op == "not":
        return f"np.logical_not({args[0]})"
    if expr.op == "implies":
        return f"(np.logical_not({args[0]}) | {args[1]})"
    if expr.op == "neg":
        return f"(-{args[0]})"
    if expr.op == "ite":
        return f"np.where({args[0]}, {args[1]}, {args[2]})"
    raise ValueError(f"'{expr.op}' is not part of the tables' language")


def vector_function(expr: Expr, slots: tuple[Ref, ...]) -> VectorFunction:
    """A function of the slots' values; a bool expression gives truth values, an int expression numbers."""
    tables: list[Any] = []
    source = vector_source(expr, {ref: i for i, ref in enumerate(slots)}, tables)
    function: VectorFunction = eval(f"lambda V: {source}", {"np": np, "T": tables})
    return function
