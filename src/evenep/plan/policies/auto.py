"""Candidates of every kind, scored by the cost model; the fastest wins.

``static``, ``bounded`` at the config's own epsilon and ``exact`` (where it fits) are among them, so
``auto`` is never slower than any of them in modelled time, planning included: where reaching a
bound that no plan beats would win back less than the search costs (``Hardware.plan_ps``, 0 unless
measured), it stays with ``static`` and doesn't search. Ties go to the one that moves fewer experts,
then to the earlier candidate. The search stops as soon as the best is within ``GOOD_ENOUGH`` of the
bound.
"""

from __future__ import annotations

from ..cost import compute_ps
from ..placement import Ints
from ..problem import Problem
from .bounded import bounded
from .exact import exact
from .refine import refine

EPSILONS = (0.0, 0.05, 0.1, 0.2, 0.5)
GOOD_ENOUGH = 101  # percent of the bound; searching on costs more than it can win back
SMALL = 64  # experts times ranks of a problem where climbing costs nothing
MANY_RANKS = 16  # beyond it a step of climbing costs a GPU more and wins the layer less


def refine_effort(experts: int, ranks: int) -> tuple[int, int]:
    """``(starts, steps)`` of hill climbing: it ends in different places; first steps win most."""
    if experts * ranks <= SMALL:
        return 3, 32
    return 1, 8 if ranks <= MANY_RANKS else 2


class _Search:
    """Candidates so far, best first."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.scored: list[tuple[int, int, int]] = []
        self.named: list[tuple[str, Ints]] = []
        self._bound_ps = _bound_ps(problem)

    def add(self, name: str, alloc_ER: Ints) -> None:
        moved = int(self.problem.moved_ER(alloc_ER).sum())
        self.scored.append((self.problem.time_ps(alloc_ER), moved, len(self.named)))
        self.named.append((name, alloc_ER))

    def worth_continuing(self) -> bool:
        """There is more to win than the search costs, or as much by moving fewer experts."""
        time_ps, moved, _ = min(self.scored)
        if time_ps - self._bound_ps > self.problem.hardware.plan_ps:
            return True
        return moved > 0 and self.scored[0][0] - time_ps > self.problem.hardware.plan_ps

    def good_enough(self) -> bool:
        return min(self.scored)[0] * 100 <= self._bound_ps * GOOD_ENOUGH

    def best(self) -> tuple[str, Ints]:
        return self.named[min(self.scored)[2]]

    def distinct(self) -> list[tuple[str, Ints]]:
        """Best first; of those with equal time and moves the earliest only."""
        found: dict[tuple[int, int], int] = {}
        for time_ps, moved, i in sorted(self.scored):
            found.setdefault((time_ps, moved), i)
        return [self.named[i] for i in found.values()]


def auto(problem: Problem) -> tuple[Ints, str]:
    """The allocation with the least modelled time found, and the candidate's name."""
    search = _Search(problem)
    search.add("static", problem.static_allocation())
    if problem.slots and problem.ranks > 1 and problem.total and search.worth_continuing():
        search.add(f"bounded({problem.epsilon:g})", bounded(problem, problem.epsilon))
        exact_ER = exact(problem)
        if problem.fits(exact_ER):
            search.add("exact", exact_ER)
        if search.worth_continuing():
            _try_bounded(search)
            if not search.good_enough():
                _try_refined(search)
    name, alloc_ER = search.best()
    return alloc_ER, name


def _try_bounded(search: _Search) -> None:
    """From much slack to none: more replicas each time, until they cost more than they win."""
    last_ps = None
    for epsilon in sorted(EPSILONS, reverse=True):
        search.add(f"bounded({epsilon:g})", bounded(search.problem, epsilon))
        time_ps = search.scored[-1][0]
        if last_ps is not None and time_ps > last_ps:
            return
        last_ps = time_ps


def _try_refined(search: _Search) -> None:
    """Climb from the best few where that is cheap, from the best one in large problems."""
    problem = search.problem
    starts, steps = refine_effort(problem.placement.num_experts, problem.ranks)
    for name, alloc_ER in search.distinct()[:starts]:
        search.add(f"{name}+refined", refine(problem, alloc_ER, max_steps=steps))


def _bound_ps(problem: Problem) -> int:
    """No layer is faster: splitting an expert never lessens the ranks' summed compute time."""
    work_ps = int(compute_ps(problem.routes_E, problem.hardware, problem.align).sum())
    return work_ps // min(problem.ranks, problem.hardware.parallel or problem.ranks)
