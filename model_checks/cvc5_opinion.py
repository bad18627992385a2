"""Second opinion: cvc5 answers every query that Z3 answers, and the two must agree.

While a task runs, each solver that it makes is accompanied by a cvc5 solver that gets the same assertions, pushes and
pops; whatever Z3 is asked, cvc5 is asked too.  So no query can be left out, those for vacuity and for limit cases
(where the answer is sat) included.  Terms go over node by node, not as text: Z3 writes a sum of one term in a way that
SMT-LIB does not have.  The verdict on a query is ``proved`` if both solvers gave the same answer, ``failed`` if they
contradict each other and ``unknown`` if either gave none.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import z3

from hybridkv_ref.errors import InputError
from hybridkv_ref.model_checks.obligations import Obligation
from hybridkv_ref.model_checks.smt import TIMEOUT_MS, accompanied

METHOD = "second solver"
_OPERATORS = {
    z3.Z3_OP_AND: "AND",
    z3.Z3_OP_OR: "OR",
    z3.Z3_OP_NOT: "NOT",
    z3.Z3_OP_IMPLIES: "IMPLIES",
    z3.Z3_OP_ITE: "ITE",
    z3.Z3_OP_EQ: "EQUAL",
    z3.Z3_OP_DISTINCT: "DISTINCT",
    z3.Z3_OP_LE: "LEQ",
    z3.Z3_OP_LT: "LT",
    z3.Z3_OP_GE: "GEQ",
    z3.Z3_OP_GT: "GT",
    z3.Z3_OP_ADD: "ADD",
    z3.Z3_OP_SUB: "SUB",
    z3.Z3_OP_UMINUS: "NEG",
    z3.Z3_OP_MOD: "INTS_MODULUS",
}
_OF_ONE = (z3.Z3_OP_AND, z3.Z3_OP_OR, z3.Z3_OP_ADD)


def installed() -> bool:
    """Whether there is a second solver."""
    return find_spec("cvc5") is not None


def cvc5() -> ModuleType:
    """The solver's package; InputError where it is not installed (extra ``second-opinion``)."""
    try:
        return import_module("cvc5")
    except ImportError:
        raise InputError("--deep: cvc5 is not installed: install hybridkv-ref[second-opinion]") from None


class Translator:
    """Z3 terms as cvc5 terms, each translated once; holds the Z3 term, so that its number stays its own."""

    def __init__(self) -> None:
        self.cvc5 = cvc5()
        self.terms = self.cvc5.TermManager()
        self.kinds = {op: getattr(self.cvc5.Kind, name) for op, name in _OPERATORS.items()}
        self.known: dict[int, tuple[z3.ExprRef, Any]] = {}

    def term(self, source: z3.ExprRef) -> Any:
        """The cvc5 term; TypeError for an operator that no table produces."""
        number = source.get_id()
        if number not in self.known:
            self.known[number] = (source, self._build(source))
        return self.known[number][1]

    def _build(self, source: z3.ExprRef) -> Any:
        if z3.is_int_value(source):
            return self.terms.mkInteger(source.as_long())
        operator = source.decl().kind()
        if operator in (z3.Z3_OP_TRUE, z3.Z3_OP_FALSE):
            return self.terms.mkBoolean(operator == z3.Z3_OP_TRUE)
        if operator == z3.Z3_OP_UNINTERPRETED:
            sort = self.terms.getBooleanSort() if z3.is_bool(source) else self.terms.getIntegerSort()
            return self.terms.mkConst(sort, source.decl().name())
        arguments = [self.term(a) for a in source.children()]
        if len(arguments) == 1 and operator in _OF_ONE:
            return arguments[0]
        if operator not in self.kinds:
            raise TypeError(f"no cvc5 counterpart of '{source.decl()}'")
        return self.terms.mkTerm(self.kinds[operator], *arguments)


@lru_cache(maxsize=1)
def _translator() -> Translator:
    return Translator()


class Accompanied:
    """A Z3 solver with cvc5 beside it; ``answers`` collects both solvers' words and cvc5's milliseconds per query."""

    def __init__(self, solver: z3.Solver, answers: list[tuple[str, str, float]]) -> None:
        self.z3, self.answers, self.translator = solver, answers, _translator()
        self.cvc5 = self.translator.cvc5.Solver(self.translator.terms)
        self.cvc5.setOption("incremental", "true")
        self.cvc5.setOption("tlimit-per", str(TIMEOUT_MS))
        self.cvc5.setLogic("QF_LIA")

    def add(self, *assertions: z3.BoolRef) -> None:
        """Asserts to both."""
        self.z3.add(*assertions)
        for assertion in assertions:
            self.cvc5.assertFormula(self.translator.term(assertion))

    def push(self) -> None:
        """Opens a scope in both."""
        self.z3.push()
        self.cvc5.push()

    def pop(self) -> None:
        """Closes a scope in both."""
        self.z3.pop()
        self.cvc5.pop()

    def check(self) -> z3.CheckSatResult:
        """Asks both; the answer is Z3's."""
        verdict = self.z3.check()
        begun = time.perf_counter()
        other = self.cvc5.checkSat()
        word = "sat" if other.isSat() else "unsat" if other.isUnsat() else "unknown"
        self.answers.append((str(verdict), word, round((time.perf_counter() - begun) * 1000, 3)))
        return verdict

    def model(self) -> z3.ModelRef:
        """Z3's model."""
        return self.z3.model()


def beside_cvc5(name: str, task: Callable[[], object]) -> list[Obligation]:
    """Runs a task, and returns one opinion per query: on all its obligations, since each is (part of) a query.

    A goal that Z3 proved in a conjunction is proved by cvc5's agreement on the conjunction.  ValueError for a task that
    asks nothing: its solver was made before it could be accompanied.
    """
    answers: list[tuple[str, str, float]] = []
    with accompanied(lambda solver: Accompanied(solver, answers)):
        task()
    if not answers:
        raise ValueError(f"{name}: no query was seen")
    found = []
    for number, (mine, other, spent) in enumerate(answers):
        status = "unknown" if "unknown" in (mine, other) else "proved" if mine == other else "failed"
        found.append(Obligation(f"cvc5/{name}/{number}:{mine}", "", "", name, METHOD, status, spent))
    return found
