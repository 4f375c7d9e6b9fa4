"""Hill climbing on the modelled time: take work off the slowest rank while that helps.

The other policies balance routes; time also has weight reads, launches and fetches in it. Each
step looks at every expert on the slowest rank and every rank it may run on, moves either all of
its routes there or as many as would level the two ranks, and keeps the best move if the layer gets
faster. At decode, where reading weights is the cost, that moves whole experts and never splits.
"""

from __future__ import annotations

import numpy as np

from ..cost import compute_ps, layer_time_ps
from ..placement import Ints
from ..problem import Problem

TRIES = 4  # moves verified per step, best estimate first


def refine(problem: Problem, alloc_ER: Ints, *, max_steps: int) -> Ints:
    """An allocation at least as fast as the given one; ``[E, R]``."""
    best_ER, best = alloc_ER, _key(problem, alloc_ER)
    for _ in range(max_steps):
        for candidate_ER in _moves(problem, best_ER):
            key = _key(problem, candidate_ER)
            if key < best:
                best_ER, best = candidate_ER, key
                break
        else:
            return best_ER
    return best_ER


def _key(problem: Problem, alloc_ER: Ints) -> tuple[int, ...]:
    """Layer time, then the slowest rank, the next slowest …: progress while several ranks tie."""
    times_R = problem.rank_times_ps(alloc_ER)
    layer_ps = layer_time_ps(times_R, problem.hardware.parallel)
    return (layer_ps, *sorted(times_R.tolist(), reverse=True)[:4])


def _moves(problem: Problem, alloc_ER: Ints) -> list[Ints]:
    """The most promising allocations one move away."""
    times_R = problem.rank_times_ps(alloc_ER)
    slow = int(times_R.argmax())
    experts = np.flatnonzero(alloc_ER[:, slow])
    if not experts.size:
        return []
    free_R = problem.slots - problem.replicas(alloc_ER).sum(axis=0)
    here_E1 = alloc_ER[experts, slow][:, None]
    at_ER = alloc_ER[experts]
    allowed_ER = (at_ER > 0) | (free_R > 0)[None, :]
    allowed_ER[np.arange(experts.size), problem.placement.home_E[experts]] = True
    allowed_ER[:, slow] = False
    row_ps = max(problem.hardware.row_ps, 1)
    level_R = np.maximum((times_R[slow] - times_R) // (2 * row_ps), 1)
    amounts = [np.broadcast_to(here_E1, at_ER.shape), np.minimum(here_E1, level_R[None, :])]

    def cost(routes: Ints) -> Ints:
        return compute_ps(routes, problem.hardware, problem.align)

    estimates = []
    for amount_ER in amounts:
        slow_ER = times_R[slow] - cost(here_E1) + cost(here_E1 - amount_ER)
        other_ER = times_R[None, :] - cost(at_ER) + cost(at_ER + amount_ER)
        worst_ER = np.maximum(slow_ER, other_ER)
        estimates.append(np.where(allowed_ER, worst_ER, np.iinfo(np.int64).max))
    stacked = np.stack(estimates)
    result = []
    for flat in np.argsort(stacked, axis=None, kind="stable")[:TRIES]:
        which, i, rank = (int(v) for v in np.unravel_index(int(flat), stacked.shape))
        if stacked[which, i, rank] >= times_R[slow]:
            break
        candidate_ER = alloc_ER.copy()
        routes = int(amounts[which][i, rank])
        candidate_ER[experts[i], slow] -= routes
        candidate_ER[experts[i], rank] += routes
        result.append(candidate_ER)
    return result
