"""Hill climbing on the modelled time: take work off the slowest rank while that helps.

The other policies balance routes; time also has weight reads, launches and fetches in it. Each
step looks at every expert on the slowest rank and every rank it may run on, estimates moving either
all of its routes there or as many as would level the two ranks, and takes the best of these moves
if the layer gets faster. At decode, where reading weights is the cost, that moves whole experts and
never splits.

Letters: R ranks, E experts, M experts with routes on the slowest rank. O is R by owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..cost import compute_ps, layer_time_ps
from ..placement import Ints
from ..problem import Problem

NEVER = int(np.iinfo(np.int64).max)


@dataclass(frozen=True, slots=True, eq=False)
class _Timeline:
    """The parts of every rank's time under one allocation.

    Attributes:
        home_R: home segments; slot_R: slot segments, first uses of arrivals included.
        feeds_OR: replicas whose bytes owner o sends to rank r.
        fetch_R: when the last of a rank's replicas is there.
        times_R: all of it.
    """

    home_R: Ints
    slot_R: Ints
    feeds_OR: Ints
    fetch_R: Ints
    times_R: Ints

    @classmethod
    def of(cls, problem: Problem, alloc_ER: Ints) -> _Timeline:
        home_E, hardware = problem.placement.home_E, problem.hardware
        cost_ER = compute_ps(alloc_ER, hardware, problem.align)
        home_R = np.zeros(problem.ranks, dtype=np.int64)
        np.add.at(home_R, home_E, cost_ER[np.arange(home_E.size), home_E])
        feeds_OR = np.zeros((problem.ranks, problem.ranks), dtype=np.int64)
        np.add.at(feeds_OR, home_E, problem.moved_ER(alloc_ER))
        in_R, out_O = feeds_OR.sum(axis=0), feeds_OR.sum(axis=1)
        slot_R = cost_ER.sum(axis=0) - home_R + in_R * hardware.cold_ps
        busiest_R = np.where(feeds_OR > 0, np.maximum(in_R, out_O[:, None]), 0).max(axis=0)
        fetch_R = busiest_R * hardware.fetch_ps
        return cls(home_R, slot_R, feeds_OR, fetch_R, np.maximum(home_R, fetch_R) + slot_R)

    def key(self, parallel: int) -> tuple[int, int, int]:
        """Layer time, then the slowest rank's and how many tie with it: progress while they do."""
        slowest = int(self.times_R.max())
        layer_ps = layer_time_ps(self.times_R, parallel)
        return layer_ps, slowest, int((self.times_R == slowest).sum())


def refine(problem: Problem, alloc_ER: Ints, *, max_steps: int) -> Ints:
    """An allocation at least as fast as the given one; ``[E, R]``."""
    now = _Timeline.of(problem, alloc_ER)
    for _ in range(max_steps):
        moved_ER = _best_move(problem, alloc_ER, now)
        if moved_ER is None:
            return alloc_ER
        then = _Timeline.of(problem, moved_ER)
        if then.key(problem.hardware.parallel) >= now.key(problem.hardware.parallel):
            return alloc_ER
        alloc_ER, now = moved_ER, then
    return alloc_ER


def _best_move(problem: Problem, alloc_ER: Ints, now: _Timeline) -> Ints | None:
    """The allocation with the least estimate one move away, None where none promises anything.

    An estimate is the later of the two ranks. It ignores that other imports of the same home come
    later and that a replica given up frees its home, both of which the caller's key knows. Ties go
    to the whole move, then to the lowest expert, then to the lowest rank.
    """
    hardware = problem.hardware
    slow, ranks_R = int(now.times_R.argmax()), np.arange(problem.ranks)
    slow_ps = now.times_R[slow]
    experts_M = np.flatnonzero(alloc_ER[:, slow])
    if not experts_M.size:
        return None
    at_MR, own_M1 = alloc_ER[experts_M], problem.placement.home_E[experts_M][:, None]
    here_M1, at_home_MR = at_MR[:, [slow]], own_M1 == ranks_R
    free_R = problem.slots - problem.replicas(alloc_ER).sum(axis=0)
    allowed_MR = ((at_MR > 0) | (free_R > 0) | at_home_MR) & (ranks_R != slow)
    arrives_MR = (at_MR == 0) & ~at_home_MR & (problem.resident_ER[experts_M] == 0)
    in_R, out_M1 = now.feeds_OR.sum(axis=0), now.feeds_OR.sum(axis=1)[own_M1]
    queue_MR = (np.maximum(in_R, out_M1) + 1) * hardware.fetch_ps
    fetch_MR = np.where(arrives_MR, np.maximum(now.fetch_R, queue_MR), now.fetch_R)
    level_R = np.maximum((slow_ps - now.times_R) // (2 * max(hardware.row_ps, 1)), 1)

    def cost(routes: Ints) -> Ints:
        return compute_ps(routes, hardware, problem.align)

    def estimate(amount_MR: Ints) -> Ints:
        less_MR = cost(here_M1) - cost(here_M1 - amount_MR)
        more_MR = cost(at_MR + amount_MR) - cost(at_MR)
        lighter_MR = np.maximum(now.home_R[slow] - less_MR, now.fetch_R[slow]) + now.slot_R[slow]
        slow_MR = np.where(own_M1 == slow, lighter_MR, slow_ps - less_MR)
        home_MR = np.maximum(now.home_R + np.where(at_home_MR, more_MR, 0), fetch_MR)
        slot_MR = now.slot_R + np.where(at_home_MR, 0, more_MR) + arrives_MR * hardware.cold_ps
        return np.where(allowed_MR, np.maximum(slow_MR, home_MR + slot_MR), NEVER)

    amounts = [np.broadcast_to(here_M1, at_MR.shape), np.minimum(here_M1, level_R)]
    estimates = np.stack([estimate(amount_MR) for amount_MR in amounts])
    which, i, rank = (int(v) for v in np.unravel_index(int(estimates.argmin()), estimates.shape))
    if estimates[which, i, rank] >= slow_ps:
        return None
    moved_ER, routes = alloc_ER.copy(), amounts[which][i, rank]
    moved_ER[experts_M[i], slow] -= routes
    moved_ER[experts_M[i], rank] += routes
    return moved_ER
