"""Which candidate wins: ``bounded``'s choice between its greedies, and ``auto``'s search replayed.

The CPU builds candidates one after the other and stops early; here all of them exist, and the same
rules decide which ones the search would have seen. Oracle: ``evenep.plan.policies.auto``.

Letters: NE epsilons, C candidates (see ``plan_candidates``), N places in the search's list:

    0 static · 1 bounded at the config's epsilon · 2 exact · 3 ... 7 bounded at 0.5 0.2 0.1 0.05 0

A *source* says where an allocation lies: -1 nothing moves, c candidate c, ``DENSE + s`` the s-th
refined copy.

WORKED EXAMPLE: static 90 us, bounded(0.02) 70, exact 72, bounded(0.5) 80, bounded(0.2) 75,
bounded(0.1) 76: the search stops after 0.1, which is slower than the one before; the winner is
place 1, and climbing starts there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_candidates import worth_searching

EPSILONS_FIRST = 3  # place of bounded(0.5) in the search's list
REFINED = 8  # a chosen id of ``REFINED + n`` is place n, refined
FAR = tl.constexpr(2**62)
DENSE = tl.constexpr(1000)
LIST = tl.constexpr(8)


@triton.jit
def cheaper(a0, a1, a2, a3, b0, b1, b2, b3):
    """``(a0, a1, a2, a3) < (b0, b1, b2, b3)``, 1 or 0."""
    last = (a2 < b2) | ((a2 == b2) & (a3 < b3))
    middle = (a1 < b1) | ((a1 == b1) & last)
    return ((a0 < b0) | ((a0 == b0) & middle)).to(tl.int32)


@triton.jit
def bounded_source(scores_CZ, epsilon, NE: tl.constexpr):
    """The candidate ``bounded`` returns at one epsilon."""
    plain, held = scores_CZ + 16 * epsilon, scores_CZ + 16 * epsilon + 8
    p_stuck, p_load = tl.load(plain), tl.load(plain + 5)
    h_stuck, h_load = tl.load(held), tl.load(held + 5)
    p1, p2, p3, p4 = (
        tl.load(plain + 1),
        tl.load(plain + 2),
        tl.load(plain + 3),
        tl.load(plain + 4),
    )
    h1, h2, h3, h4 = tl.load(held + 1), tl.load(held + 2), tl.load(held + 3), tl.load(held + 4)
    exact_fits = tl.load(scores_CZ + 16 * NE) == 0
    held_cheaper = cheaper(h1, h2, h3, h4, p1, p2, p3, p4) > 0
    both = (p_stuck == 0) & (h_stuck == 0)
    # A plain plan that moves nothing stays, so that equal counts settle on an equal plan.
    held_wins = (h_stuck == 0) & ((p_stuck != 0) | (both & (p1 > 0) & held_cheaper))
    nearer = (h_load < p_load) | ((h_load == p_load) & held_cheaper)
    all_stuck = (p_stuck != 0) & (h_stuck != 0)
    use_held = held_wins | (all_stuck & nearer)
    source = 2 * epsilon + use_held.to(tl.int32)
    return tl.where(all_stuck & exact_fits, 2 * NE, source)


@triton.jit
def search(
    scores_CZ,
    constants,
    home_ps_R,
    rank_R,
    total,
    pace,
    R: tl.constexpr,
    NE: tl.constexpr,
):
    """What the search sees: ``(time_N, moved_N, source_N, go on to refine)``.

    A place it doesn't see has time FAR.
    """
    place_N = tl.arange(0, LIST)
    worth, static_ps, bound_ps = worth_searching(constants, home_ps_R, rank_R, total, pace, R)
    time_N = tl.where(place_N == 0, static_ps, FAR)
    moved_N = tl.zeros([LIST], dtype=tl.int64)
    source_N = tl.full([LIST], -1, dtype=tl.int32)
    go_on = worth
    if worth > 0:
        plan_ps = tl.load(constants + 6)
        for n in tl.static_range(1, 3):
            source = tl.full([], 2 * NE, dtype=tl.int32)
            take_N = place_N == n
            if n == 1:
                source = bounded_source(scores_CZ, 0, NE)
            else:
                take_N = take_N & (tl.load(scores_CZ + source * 8) == 0)
            time_N = tl.where(take_N, tl.load(scores_CZ + source * 8 + 6), time_N)
            moved_N = tl.where(take_N, tl.load(scores_CZ + source * 8 + 1), moved_N)
            source_N = tl.where(take_N, source, source_N)
        best = tl.min(time_N, axis=0)
        fewest = tl.min(tl.where(time_N == best, moved_N, FAR), axis=0)
        more = best - bound_ps > plan_ps
        more = more | ((fewest > 0) & (static_ps - best > plan_ps))
        go_on = more.to(tl.int32)
        open_ = go_on
        last = tl.full([], FAR, dtype=tl.int64)
        for n in tl.static_range(1, NE):
            source = bounded_source(scores_CZ, n, NE)
            time = tl.load(scores_CZ + source * 8 + 6)
            take_N = (place_N == n + 2) & (open_ > 0)
            time_N = tl.where(take_N, time, time_N)
            moved_N = tl.where(take_N, tl.load(scores_CZ + source * 8 + 1), moved_N)
            source_N = tl.where(take_N, source, source_N)
            open_ = tl.where(time > last, 0, open_)
            last = time
        good = tl.min(time_N, axis=0) * 100 <= bound_ps * 101
        go_on = tl.where(good, 0, go_on)
    return time_N, moved_N, source_N, go_on


@triton.jit
def pick(time_N, moved_N):
    """``(time, moved, place)`` of the fastest; ties to fewer moves, then to the earlier place."""
    place_N = tl.arange(0, LIST)
    time = tl.min(time_N, axis=0)
    moved = tl.min(tl.where(time_N == time, moved_N, FAR), axis=0)
    same_N = (time_N == time) & (moved_N == moved)
    return time, moved, tl.min(tl.where(same_N, place_N, LIST), axis=0)
