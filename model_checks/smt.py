"""Expressions as Z3 terms: the back end that proves.  Enums are small ints with a range, counters and ints are Int."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import z3

from hybridkv_ref.expr import BOOL, Expr, Lit, Member, Op, Ref, Type

Look = Callable[[Ref], z3.ExprRef]
TIMEOUT_MS = 10_000
_WRAP: ContextVar[Callable[[z3.Solver], z3.Solver]] = ContextVar("wrap", default=lambda solver: solver)


def literal(value: int | str, kind: Type) -> z3.ExprRef:
    """A value of a type as a term."""
    if kind == BOOL:
        return z3.BoolVal(bool(value))
    return z3.IntVal(kind.members.index(str(value)) if kind.name == "enum" else int(value))


def constant(name: str, kind: Type) -> z3.ExprRef:
    """A fresh symbolic constant of a type."""
    return z3.Bool(name) if kind == BOOL else z3.Int(name)


def in_range(term: z3.ExprRef, kind: Type) -> list[z3.BoolRef]:
    """What the type says about a symbolic constant."""
    return [term >= 0, term < len(kind.members)] if kind.name == "enum" else []


def term(expr: Expr, look: Look) -> z3.ExprRef:
    """The Z3 term of an expression; ``look`` gives the term of a variable."""
    match expr:
        case Lit(value=value, type=kind):
            return literal(value, kind)
        case Ref():
            return look(expr)
        case Member(arg=arg, members=members):
            inner, order = term(arg, look), arg.type.members
            return z3.Or([inner == order.index(m) for m in members]) if members else z3.BoolVal(False)
    args = [term(a, look) for a in expr.args]
    return _operator(expr, args)


def _operator(expr: Op, args: list[z3.ExprRef]) -> z3.ExprRef:
    op = expr.op
    if op == "and":
        return z3.And(args)
    if op == "or":
        return z3.Or(args)
    if op == "not":
        return z3.Not(args[0])
    if op == "neg":
        return -args[0]
    if op == "implies":
        return z3.Implies(args[0], args[1])
    if op == "ite":
        return z3.If(args[0], args[1], args[2])
    left, right = args
    match op:
        case "==":
            return left == right
        case "!=":
            return left != right
        case "<":
            return left < right
        case "<=":
            return left <= right
        case ">":
            return left > right
        case ">=":
            return left >= right
        case "+":
            return left + right
        case "-":
            return left - right
        case "floor_to":
            return left - left % right
        case "min":
            return z3.If(left <= right, left, right)
    return z3.If(left >= right, left, right)


def new_solver() -> z3.Solver:
    """A solver with the time limit that every call here has; what passes it is unknown, and unknown is a failure."""
    solver = z3.SolverFor("QF_LIA")
    solver.set("timeout", TIMEOUT_MS)
    return _WRAP.get()(solver)


@contextmanager
def accompanied(wrap: Callable[[z3.Solver], z3.Solver]) -> Iterator[None]:
    """Every solver made inside is what ``wrap`` makes of it: how a second solver sees each query."""
    token = _WRAP.set(wrap)
    try:
        yield
    finally:
        _WRAP.reset(token)
