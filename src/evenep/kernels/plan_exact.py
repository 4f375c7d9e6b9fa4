"""``exact``'s first phase (``evenep.plan.policies.exact.pair_ranks``, the oracle) in one warp.

A receiver is fed once, so the pairing is two vectors: who feeds each rank, and with how much. The
second phase needs no more code: the largest debt anywhere is also the largest of its donor's, and
donors don't touch each other's experts, so ``plan_candidates`` pays debts largest first.

WORKED EXAMPLE (R = 3, homes 0 0 1 1 2 2, routes ``1 5 3 2 1 0``, exact): loads 6 5 1, shares 4 4 4.
Rank 2 lacks 3 and gets them from rank 0 (balance -1 1 0), then rank 0 lacks 1 and gets it from rank
1. The largest debt is rank 2's 3, its feeder 0 has expert 1 as its largest: 3 routes of 1 go to 2;
then 1 route of expert 2 goes to 0.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_vector import first_of


@triton.jit
def pair_ranks(load_R, share_R, rank_R):
    """Who feeds each starved rank, and with how much: the most overloaded the most starved."""
    balance_R = load_R - share_R
    feeder_R = tl.zeros_like(load_R)
    owed_R = tl.zeros_like(load_R)
    most = tl.max(balance_R, axis=0)
    while most > 0:
        low = tl.min(balance_R, axis=0)
        donor = first_of(balance_R == most, rank_R)
        receiver = first_of(balance_R == low, rank_R)
        feeder_R = tl.where(rank_R == receiver, donor, feeder_R)
        owed_R = tl.where(rank_R == receiver, -low, owed_R)
        balance_R = tl.where(rank_R == donor, balance_R + low, balance_R)
        balance_R = tl.where(rank_R == receiver, 0, balance_R)
        most = tl.max(balance_R, axis=0)
    return feeder_R, owed_R
