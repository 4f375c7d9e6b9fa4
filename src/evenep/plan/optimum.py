"""The optimum of tiny cases by exhaustive search: the oracle of ``bounds`` and of the policies.

Letters: R ranks, E experts, N ways to deal one expert.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from .cost import compute_ps
from .placement import Ints
from .problem import Problem


def brute_force_replicas(problem: Problem, epsilon: float) -> int | None:
    """The fewest replicas within the caps and the slots, None when no allocation is; tiny cases.

    Tries every set of (expert, rank) replicas, smaller sets first. A set is enough iff for all
    subsets X of ranks the experts that run nowhere else fit X's caps: that is max-flow min-cut of
    experts → ranks, and integer capacities have integer flows, so splits are covered exactly.
    """
    R, caps = problem.ranks, problem.caps(epsilon).tolist()
    homes, routes = problem.placement.home_E.tolist(), problem.routes_E.tolist()
    subsets = [(x, sum(caps[r] for r in range(R) if x >> r & 1)) for x in range(1, 1 << R)]
    places = [(e, r) for e, n in enumerate(routes) if n for r in range(R) if r != homes[e]]
    for size in range(len(places) + 1):
        for chosen in itertools.combinations(places, size):
            ranks = [r for _, r in chosen]
            if any(ranks.count(r) > problem.slots for r in ranks):
                continue
            hosts = [1 << home for home in homes]
            for e, r in chosen:
                hosts[e] |= 1 << r
            if all(
                sum(n for n, h in zip(routes, hosts, strict=True) if h | x == x) <= cap
                for x, cap in subsets
            ):
                return size
    return None


def brute_force_time(problem: Problem) -> int:
    """The least modelled time over all allocations within the slots, in picoseconds; tiny cases.

    Deals experts one by one, largest first, in every way, and cuts a branch that can't beat the
    best: its ranks' times only grow, and all ranks' times sum to at least what is dealt plus the
    rest unsplit (see ``bounds.time_bound_ps``). Experts are dealt in whole alignments, as many as
    the padded expert has. That loses nothing: time depends on padded rows only, and it doesn't
    grow when an allocation with more alignments than that drops the spare ones; the real routes
    then fill those left, one of them partly.
    """
    busy_E = compute_ps(problem.routes_E, problem.hardware, problem.align)
    order = [e for e in np.argsort(-busy_E, kind="stable").tolist() if problem.routes_E[e]]
    search = _Search(
        problem=problem,
        options=[_options(problem, e) for e in order],
        to_come=[*np.cumsum(busy_E[order][::-1])[::-1].tolist(), 0],
        best=problem.time_ps(problem.static_allocation()),
    )
    zero_RR = np.zeros((problem.ranks, problem.ranks), dtype=np.int64)
    search.deal(0, np.zeros((3, problem.ranks), dtype=np.int64), zero_RR)
    return search.best


@dataclass(frozen=True, slots=True)
class _Options:
    """Every way to deal one expert. N ways; the three planes are home time, slot time, slots."""

    home: int
    planes_N3R: Ints
    moved_NR: Ints


def _options(problem: Problem, expert: int) -> _Options:
    units = -(-int(problem.routes_E[expert]) // problem.align)
    parts_NR = np.array(list(_compositions(units, problem.ranks)), dtype=np.int64)
    busy_NR = compute_ps(parts_NR * problem.align, problem.hardware, problem.align)
    away_R = (np.arange(problem.ranks) != problem.placement.home_E[expert]).astype(np.int64)
    foreign_NR = (parts_NR > 0) * away_R
    return _Options(
        home=int(problem.placement.home_E[expert]),
        planes_N3R=np.stack([busy_NR * (1 - away_R), busy_NR * away_R, foreign_NR], axis=1),
        moved_NR=foreign_NR * (1 - problem.resident_ER[expert]),
    )


@dataclass(slots=True)
class _Search:
    """Depth-first search. ``planes_3R`` and ``moved_RR`` [owner, receiver] are what is dealt."""

    problem: Problem
    options: list[_Options]
    to_come: list[int]
    best: int

    def deal(self, depth: int, planes_3R: Ints, moved_RR: Ints) -> None:
        """Deal the next expert in every way that may beat ``best``, most promising first."""
        if depth == len(self.options):
            return
        option = self.options[depth]
        planes_N3R = planes_3R + option.planes_N3R
        moved_NRR = np.repeat(moved_RR[None], planes_N3R.shape[0], axis=0)
        moved_NRR[:, option.home] += option.moved_NR
        home_NR, slot_NR, used_NR = planes_N3R.swapaxes(0, 1)
        busiest_NRR = np.maximum(moved_NRR.sum(axis=2)[:, :, None], moved_NRR.sum(axis=1)[:, None])
        fetch_NR = (busiest_NRR * (moved_NRR > 0)).max(axis=1) * self.problem.hardware.fetch_ps
        time_N = (np.maximum(home_NR, fetch_NR) + slot_NR).max(axis=1)
        busy_N = (home_NR + slot_NR).sum(axis=1) + self.to_come[depth + 1]
        bound_N = np.maximum(time_N, -(-busy_N // self.problem.ranks))
        fits_N = (used_NR <= self.problem.slots).all(axis=1)
        if depth + 1 == len(self.options):
            self.best = min([self.best, *time_N[fits_N].tolist()])
            return
        for n in np.lexsort((time_N, bound_N)):
            if bound_N[n] >= self.best:
                break
            if fits_N[n]:
                self.deal(depth + 1, planes_N3R[n], moved_NRR[n])


def _compositions(units: int, parts: int) -> Iterator[tuple[int, ...]]:
    """All ways to write ``units`` as an ordered sum of ``parts`` numbers >= 0."""
    if parts == 1:
        yield (units,)
        return
    for first in range(units, -1, -1):
        for others in _compositions(units - first, parts - 1):
            yield (first, *others)
