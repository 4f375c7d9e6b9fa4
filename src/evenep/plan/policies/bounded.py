"""Every rank within ``(1 + epsilon)`` of the mean, with the fewest replicas that reach it.

With slack, a rank may stay below its share, so the R - 1 replicas that exactness costs disappear:
only surpluses have to move. The greedy serves the largest surplus first. If one replica can finish
a donor it takes the receiver whose room fits best and the smallest expert that suffices (moving a
whole expert also saves its home the weight read); otherwise it pairs the largest expert with the
largest room. Resident replicas, which move no bytes, are tried first as a second candidate.

When the slot budget can't reach ``epsilon``, a donor that finds no place for more of its surplus
keeps it and the others go on; the plan's statistics say what was reached. No route is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..placement import Ints
from ..problem import Problem
from .exact import exact


@dataclass(slots=True)
class _State:
    """A plan being built. Lists, not arrays: the greedy touches single numbers."""

    alloc_ER: Ints
    surplus: list[int]
    room: list[int]
    free: list[int]
    remaining: list[int]  # routes of each expert still at home
    placed: set[tuple[int, int]]
    stuck: bool = False  # some surplus found no place

    def can_host(self, expert: int, rank: int) -> bool:
        return self.free[rank] > 0 or (expert, rank) in self.placed

    def move(self, expert: int, home: int, rank: int, routes: int) -> None:
        self.alloc_ER[expert, home] -= routes
        self.alloc_ER[expert, rank] += routes
        self.surplus[home] -= routes
        self.room[rank] -= routes
        self.remaining[expert] -= routes
        if (expert, rank) not in self.placed:
            self.placed.add((expert, rank))
            self.free[rank] -= 1


def bounded(problem: Problem, epsilon: float) -> Ints:
    """The bounded allocation, ``[E, R]``."""
    static_ER = problem.static_allocation()
    load_R, cap_R = problem.home_loads_R, problem.caps(epsilon)
    if problem.slots == 0 or (load_R <= cap_R).all():
        return static_ER
    tries = [_greedy(problem, cap_R, residents_first=False)]
    if not tries[0].stuck and not problem.moved_ER(tries[0].alloc_ER).any():
        return tries[0].alloc_ER  # nothing moves, and equal counts settle on an equal plan
    if (problem.residency.experts_RB >= 0).any():
        tries.append(_greedy(problem, cap_R, residents_first=True))
    within = [t.alloc_ER for t in tries if not t.stuck]
    if within:
        return min(within, key=lambda a: _price(problem, a))
    exact_ER = exact(problem)
    if problem.fits(exact_ER):
        return exact_ER
    return min(
        (t.alloc_ER for t in tries),
        key=lambda a: (int(a.sum(axis=0).max()), *_price(problem, a)),
    )


def _price(problem: Problem, alloc_ER: Ints) -> tuple[int, int, int, int]:
    """Bytes first, then replicas, then traffic, then the worst sender."""
    foreign_ER = problem.replicas(alloc_ER)
    sends_R = np.bincount(
        problem.placement.home_E[np.nonzero(foreign_ER)[0]], minlength=problem.ranks
    )
    return (
        int(problem.moved_ER(alloc_ER).sum()),
        int(foreign_ER.sum()),
        int(alloc_ER[foreign_ER].sum()),
        int(sends_R.max()),
    )


def _greedy(problem: Problem, cap_R: Ints, *, residents_first: bool) -> _State:
    gap = (problem.home_loads_R - cap_R).tolist()
    state = _State(
        alloc_ER=problem.static_allocation(),
        surplus=[max(g, 0) for g in gap],
        room=[max(-g, 0) for g in gap],
        free=[problem.slots] * problem.ranks,
        remaining=problem.routes_E.tolist(),
        placed=set(),
    )
    if residents_first:
        _use_residents(problem, state)
    while (largest := max(state.surplus)) > 0:
        donor = state.surplus.index(largest)
        experts = problem.placement.owned[donor]
        choice = _finishing_move(state, donor, experts) or _largest_move(state, donor, experts)
        if choice is None:
            state.surplus[donor], state.stuck = 0, True  # it stays at home
        else:
            state.move(choice[0], donor, *choice[1:])
    return state


def _use_residents(problem: Problem, state: _State) -> None:
    """Send surplus to replicas that are already in place, most useful first."""
    home_E, held_RB = problem.placement.home_E.tolist(), problem.residency.experts_RB.tolist()
    pairs = {(e, r) for r, held in enumerate(held_RB) for e in held if e >= 0 and home_E[e] != r}
    while pairs:
        useful = [
            (min(state.surplus[home_E[e]], state.room[r], state.remaining[e]), -e, -r)
            for e, r in pairs
        ]
        routes, expert, rank = max(useful)
        if routes <= 0:
            return
        state.move(-expert, home_E[-expert], -rank, routes)
        pairs.discard((-expert, -rank))


def _finishing_move(
    state: _State, donor: int, experts: Sequence[int]
) -> tuple[int, int, int] | None:
    """One replica that takes the donor's whole surplus: ``(expert, rank, routes)``."""
    need = state.surplus[donor]
    fit = [(room, r) for r, room in enumerate(state.room) if room >= need]
    if not fit:
        return None
    fit.sort()
    for _, expert in sorted((state.remaining[e], e) for e in experts if state.remaining[e] >= need):
        for _, rank in fit:
            if state.can_host(expert, rank):
                return expert, rank, need
    return None


def _largest_move(state: _State, donor: int, experts: Sequence[int]) -> tuple[int, int, int] | None:
    """The most routes one replica can take from the donor, ties to the lowest ids."""
    expert = max(experts, key=state.remaining.__getitem__)
    room = max(state.room)
    rank = state.room.index(room)
    if state.can_host(expert, rank):  # nothing beats the largest expert in the largest room
        routes = min(state.remaining[expert], room, state.surplus[donor])
        return (expert, rank, routes) if routes > 0 else None
    return _largest_hosted_move(state, donor, experts)


def _largest_hosted_move(
    state: _State, donor: int, experts: Sequence[int]
) -> tuple[int, int, int] | None:
    """The same where slots are scarce."""
    best: tuple[int, int, int] | None = None
    for expert in sorted(experts, key=lambda e: (-state.remaining[e], e)):
        if best is not None and state.remaining[expert] <= best[2]:
            break
        hosts = [
            (room, -r) for r, room in enumerate(state.room) if room and state.can_host(expert, r)
        ]
        if not hosts:
            continue
        room, rank = max(hosts)
        routes = min(state.remaining[expert], room, state.surplus[donor])
        if routes > 0 and (best is None or routes > best[2]):
            best = (expert, -rank, routes)
    return best
