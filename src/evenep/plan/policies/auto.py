"""Candidates of every kind, scored by the cost model; the fastest wins.

``static`` and ``exact`` are always among them, so ``auto`` is never slower than either in modelled
time. Ties go to the one that moves fewer experts, then to the earlier candidate.
"""

from __future__ import annotations

import numpy as np

from ..placement import Ints
from ..problem import Problem
from .bounded import bounded
from .exact import exact
from .refine import refine

EPSILONS = (0.0, 0.01, 0.05, 0.1, 0.2, 0.5)
REFINE_STEPS = 32
REFINE_STARTS = 3  # hill climbing ends in different places


def auto(problem: Problem) -> tuple[Ints, str]:
    """The allocation with the least modelled time, and the candidate's name."""
    candidates = [("static", problem.static_allocation())]
    if problem.slots and problem.ranks > 1 and problem.total and not _static_is_optimal(problem):
        candidates.extend(
            (f"bounded({epsilon:g})", bounded(problem, epsilon))
            for epsilon in sorted({problem.epsilon, *EPSILONS}, reverse=True)
        )
        exact_ER = exact(problem)
        if problem.fits(exact_ER):
            candidates.append(("exact", exact_ER))
        candidates.extend(
            (f"{name}+refined", refine(problem, alloc_ER, max_steps=REFINE_STEPS))
            for name, alloc_ER in _distinct(problem, candidates)[:REFINE_STARTS]
        )
    winner, _ = _best(problem, candidates)
    return candidates[winner][1], candidates[winner][0]


def _distinct(problem: Problem, candidates: list[tuple[str, Ints]]) -> list[tuple[str, Ints]]:
    """Best first, without repeats."""
    keys = [
        (problem.time_ps(a), int(problem.moved_ER(a).sum()), i)
        for i, (_, a) in enumerate(candidates)
    ]
    found: list[tuple[str, Ints]] = []
    for _, _, i in sorted(keys):
        if not any(np.array_equal(candidates[i][1], other) for _, other in found):
            found.append(candidates[i])
    return found


def _best(problem: Problem, candidates: list[tuple[str, Ints]]) -> tuple[int, int]:
    """Index and modelled time of the winner."""
    scores = [
        (problem.time_ps(alloc_ER), int(problem.moved_ER(alloc_ER).sum()), i)
        for i, (_, alloc_ER) in enumerate(candidates)
    ]
    time_ps, _, index = min(scores)
    return index, time_ps


def _static_is_optimal(problem: Problem) -> bool:
    """Every rank takes equally long at home already: moving work can only lengthen one."""
    return bool(np.ptp(problem.rank_times_ps(problem.static_allocation())) == 0)
