"""Asking the solver: one verdict, its time, and a model where there is one; the same for every kind of obligation."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import z3

PROVED, FAILED, UNKNOWN = "proved", "failed", "unknown"


@dataclass(frozen=True)
class Answer:
    """``status`` is proved, failed or unknown (no verdict within the limit); ``model`` is a counterexample, if any."""

    status: str
    milliseconds: float
    model: z3.ModelRef | None = None


def holds(solver: z3.Solver, claim: z3.BoolRef) -> Answer:
    """Whether a claim follows from what the solver assumes."""
    begun = time.perf_counter()
    solver.push()
    solver.add(z3.Not(claim))
    verdict = solver.check()
    model = solver.model() if verdict == z3.sat else None
    solver.pop()
    return Answer(_status(verdict, z3.unsat), _since(begun), model)


def possible(solver: z3.Solver) -> Answer:
    """Whether what the solver assumes can be true at all."""
    begun = time.perf_counter()
    return Answer(_status(solver.check(), z3.sat), _since(begun))


def settle(solver: z3.Solver, claims: Sequence[z3.BoolRef], first: bool = False) -> Iterator[tuple[int, Answer]]:
    """(index, answer) for every claim: one query for their conjunction, and one for each only if that does not hold.

    With ``first``, only the first claim that a counterexample to the conjunction breaks.
    """
    if not claims:
        return
    together = holds(solver, z3.And(list(claims)))
    if together.status == PROVED or len(claims) == 1:
        share = Answer(together.status, round(together.milliseconds / len(claims), 3), together.model)
        yield from ((index, share) for index in range(len(claims)))
    elif first:
        yield next((i for i, c in enumerate(claims) if _breaks(together.model, c)), 0), together
    else:
        yield from ((index, holds(solver, claim)) for index, claim in enumerate(claims))


def _breaks(model: z3.ModelRef | None, claim: z3.BoolRef) -> bool:
    return model is not None and bool(z3.is_false(model.eval(claim, model_completion=True)))


def _status(verdict: z3.CheckSatResult, good: z3.CheckSatResult) -> str:
    if verdict == z3.unknown:
        return UNKNOWN
    return PROVED if verdict == good else FAILED


def _since(begun: float) -> float:
    return round((time.perf_counter() - begun) * 1000, 3)
