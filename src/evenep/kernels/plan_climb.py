"""``evenep.plan.policies.refine`` (the oracle) step by step, on one copy of an allocation.

Each step takes the best estimated move off the slowest rank and keeps it if the whole key improves.
Letters: R ranks, B slots, L home places, M experts of the slowest rank handled at once. Scratch of
a copy as in ``plan_refine``.

WORKED EXAMPLE (reading is the cost): four experts of 3 routes on rank 0, two idle ones on rank 1,
read 1000 ps, row 1 ps. Estimates of moving one expert whole: rank 0 falls to 3000, rank 1 rises to
1000, the later is 3000 < 4000: moved. Then 2000, and no third: 3000 >= 2000.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_choose import FAR
from .plan_cost import layer_ps, segment_ps
from .plan_vector import BIG, at, first_of


@triton.jit
def queue_R(feeds_OR, owner, rank_a, rank_b, add_a, add_b, RP: tl.constexpr, ROWS: tl.constexpr):
    """``(in, out, busiest)`` of every rank if owner sent ``add`` more replicas to two ranks."""
    rank_R = tl.arange(0, RP)
    in_R = tl.zeros([RP], dtype=tl.int32)
    busiest_R = tl.zeros([RP], dtype=tl.int32)
    out_R = tl.zeros([RP], dtype=tl.int32)
    for first in tl.static_range(0, RP, ROWS):
        owner_O = first + tl.arange(0, ROWS)
        feeds = tl.load(feeds_OR + owner_O[:, None] * RP + rank_R[None, :])
        here = (owner_O == owner)[:, None]
        feeds += tl.where(here & (rank_R == rank_a)[None, :], add_a, 0)
        feeds += tl.where(here & (rank_R == rank_b)[None, :], add_b, 0)
        out_O = tl.sum(feeds, axis=1)
        in_R += tl.sum(feeds, axis=0)
        busiest_R = tl.maximum(busiest_R, tl.max(tl.where(feeds > 0, out_O[:, None], 0), axis=0))
        out_R += tl.sum(tl.where(owner_O[:, None] == rank_R[None, :], out_O[:, None], 0), axis=0)
    return in_R, out_R, tl.maximum(busiest_R, in_R)


@triton.jit
def best_move(
    slow,
    slow_ps,
    home_R,
    slot_R,
    fetch_R,
    times_R,
    in_R,
    out_s,
    free_R,
    level_R,
    constants,
    owned_RL,
    slot_RB,
    home_E,
    dense_ER,
    resident_ER,
    R: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    M: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """``(estimate, 0 whole or 1 levelling, expert * RP + rank)``, the least of all."""
    row_ps, read_ps = tl.load(constants), tl.load(constants + 1)
    launch_ps, fetch_ps = tl.load(constants + 2), tl.load(constants + 3)
    cold_ps = tl.load(constants + 4)
    rank_R = tl.arange(0, RP)
    home_slow, slot_slow = at(home_R, rank_R, slow), at(slot_R, rank_R, slow)
    fetch_slow = at(fetch_R, rank_R, slow)
    best = tl.full([], FAR, dtype=tl.int64)
    best_kind = tl.full([], 0, dtype=tl.int32)
    best_key = tl.full([], BIG, dtype=tl.int32)
    for first in range(0, L + B, M):
        row_M = first + tl.arange(0, M)
        mine_M = tl.load(owned_RL + slow * L + row_M, mask=row_M < L, other=-1)
        guest_M = tl.load(
            slot_RB + slow * B + row_M - L, mask=(row_M >= L) & (row_M < L + B), other=-1
        )
        expert_M = tl.maximum(mine_M, guest_M)
        real_M = expert_M >= 0
        own_M = tl.load(home_E + expert_M, mask=real_M, other=0)
        here_M = tl.load(dense_ER + expert_M * R + slow, mask=real_M, other=0)
        out_M = tl.load(out_s + own_M)
        at_MR = expert_M[:, None] * R + rank_R[None, :]
        real_MR = (here_M > 0)[:, None] & (rank_R < R)[None, :]
        had_MR = tl.load(dense_ER + at_MR, mask=real_MR, other=0)
        held_MR = tl.load(resident_ER + at_MR, mask=real_MR, other=0).to(tl.int32)
        at_home_MR = own_M[:, None] == rank_R[None, :]
        allowed_MR = (had_MR > 0) | (free_R > 0)[None, :] | at_home_MR
        allowed_MR = allowed_MR & real_MR & (rank_R != slow)[None, :]
        arrives_MR = (had_MR == 0) & (~at_home_MR) & (held_MR == 0)
        waits_MR = (tl.maximum(in_R[None, :], out_M[:, None]) + 1) * fetch_ps
        waits_MR = tl.maximum(tl.where(arrives_MR, waits_MR, 0), fetch_R[None, :])
        cold_MR = tl.where(arrives_MR, cold_ps, 0)
        cost_here_M = segment_ps(here_M, row_ps, read_ps, launch_ps, ALIGN)
        cost_had_MR = segment_ps(had_MR, row_ps, read_ps, launch_ps, ALIGN)
        key_MR = expert_M[:, None] * RP + rank_R[None, :]
        for kind in tl.static_range(2):
            amount_MR = tl.where(allowed_MR, here_M[:, None], 0)
            if kind == 1:
                amount_MR = tl.minimum(amount_MR, level_R[None, :])
            rest_MR = here_M[:, None] - amount_MR
            less_MR = cost_here_M[:, None] - segment_ps(rest_MR, row_ps, read_ps, launch_ps, ALIGN)
            more_MR = segment_ps(had_MR + amount_MR, row_ps, read_ps, launch_ps, ALIGN)
            more_MR -= cost_had_MR
            slow_MR = tl.where(
                (own_M == slow)[:, None],
                tl.maximum(home_slow - less_MR, fetch_slow) + slot_slow,
                slow_ps - less_MR,
            )
            home_MR = tl.maximum(home_R[None, :] + tl.where(at_home_MR, more_MR, 0), waits_MR)
            guest_MR = slot_R[None, :] + tl.where(at_home_MR, 0, more_MR) + cold_MR
            later_MR = tl.where(allowed_MR, tl.maximum(slow_MR, home_MR + guest_MR), FAR)
            least = tl.min(later_MR)
            same_MR = tl.where(later_MR == least, key_MR, BIG)
            key = tl.min(same_MR)
            tie = (least == best) & ((kind < best_kind) | ((kind == best_kind) & (key < best_key)))
            if (least < best) | tie:
                best = least
                best_kind = tl.full([], kind, dtype=tl.int32)
                best_key = key
    return best, best_kind, best_key


@triton.jit
def climb(
    home_R,
    slot_R,
    replicas_R,
    constants,
    owned_RL,
    home_E,
    dense_ER,
    resident_ER,
    slot_RB,
    feeds_OR,
    out_s,
    R: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    BP: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    ALIGN: tl.constexpr,
    STEPS: tl.constexpr,
):
    """Up to STEPS moves; returns ``(layer time, replicas that move)`` of where it ends."""
    row_ps, read_ps = tl.load(constants), tl.load(constants + 1)
    launch_ps, fetch_ps = tl.load(constants + 2), tl.load(constants + 3)
    cold_ps, parallel = tl.load(constants + 4), tl.load(constants + 5)
    rank_R = tl.arange(0, RP)
    slot_B = tl.arange(0, BP)
    in_R, out_R, busiest_R = queue_R(feeds_OR, -1, -1, -1, 0, 0, RP, ROWS)
    fetch_R = busiest_R * fetch_ps
    times_R = tl.maximum(home_R, fetch_R) + slot_R
    layer = layer_ps(times_R, rank_R, parallel, R)
    steps = tl.full([], STEPS, dtype=tl.int32)
    while steps > 0:
        tl.store(out_s + rank_R, out_R)
        tl.debug_barrier()
        slow_ps = tl.max(times_R, axis=0)
        slow = first_of((times_R == slow_ps) & (rank_R < R), rank_R)
        ties = tl.sum(((times_R == slow_ps) & (rank_R < R)).to(tl.int32), axis=0)
        free_R = tl.where(rank_R < R, B, 0) - replicas_R
        level_R = (slow_ps - times_R) // (2 * tl.maximum(row_ps, 1))
        level_R = tl.maximum(tl.minimum(level_R, BIG), 1).to(tl.int32)
        least, kind, key = best_move(
            slow,
            slow_ps,
            home_R,
            slot_R,
            fetch_R,
            times_R,
            in_R,
            out_s,
            free_R,
            level_R,
            constants,
            owned_RL,
            slot_RB,
            home_E,
            dense_ER,
            resident_ER,
            R,
            B,
            L,
            RP,
            M,
            ALIGN,
        )
        steps -= 1
        if least < slow_ps:
            expert, to = key // RP, key % RP
            own = tl.load(home_E + expert)
            here = tl.load(dense_ER + expert * R + slow)
            had = tl.load(dense_ER + expert * R + to)
            held_here = tl.load(resident_ER + expert * R + slow).to(tl.int32)
            held_there = tl.load(resident_ER + expert * R + to).to(tl.int32)
            routes = tl.where(kind > 0, tl.minimum(here, at(level_R, rank_R, to)), here)
            rest = here - routes
            leaves = ((own != slow) & (rest == 0)).to(tl.int32)
            enters = ((own != to) & (had == 0)).to(tl.int32)
            drops, arrives = leaves * (1 - held_here), enters * (1 - held_there)
            less = segment_ps(here, row_ps, read_ps, launch_ps, ALIGN)
            less -= segment_ps(rest, row_ps, read_ps, launch_ps, ALIGN)
            more = segment_ps(had + routes, row_ps, read_ps, launch_ps, ALIGN)
            more -= segment_ps(had, row_ps, read_ps, launch_ps, ALIGN)
            from_R, to_R = rank_R == slow, rank_R == to
            home_new_R = home_R - tl.where(from_R & (own == slow), less, 0)
            home_new_R += tl.where(to_R & (own == to), more, 0)
            slot_new_R = slot_R - tl.where(from_R, tl.where(own == slow, 0, less), 0)
            slot_new_R += tl.where(to_R, tl.where(own == to, 0, more), 0)
            slot_new_R += tl.where(to_R, arrives * cold_ps, 0)
            slot_new_R -= tl.where(from_R, drops * cold_ps, 0)
            in_new_R, out_new_R, busiest_R = queue_R(
                feeds_OR, own, slow, to, -drops, arrives, RP, ROWS
            )
            fetch_new_R = busiest_R * fetch_ps
            times_new_R = tl.maximum(home_new_R, fetch_new_R) + slot_new_R
            layer_new = layer_ps(times_new_R, rank_R, parallel, R)
            top = tl.max(times_new_R, axis=0)
            ties_new = tl.sum(((times_new_R == top) & (rank_R < R)).to(tl.int32), axis=0)
            better = (top < slow_ps) | ((top == slow_ps) & (ties_new < ties))
            better = (layer_new < layer) | ((layer_new == layer) & better)
            if better:
                slow_B = tl.load(slot_RB + slow * B + slot_B, mask=slot_B < B, other=-2)
                to_B = tl.load(slot_RB + to * B + slot_B, mask=slot_B < B, other=-2)
                gone = first_of(slow_B == expert, slot_B)
                gap = first_of(to_B == -1, slot_B)
                fed_here = tl.load(feeds_OR + own * RP + slow)
                fed_there = tl.load(feeds_OR + own * RP + to)
                tl.debug_barrier()
                tl.store(dense_ER + expert * R + slow, rest)
                tl.store(dense_ER + expert * R + to, had + routes)
                tl.store(slot_RB + slow * B + gone, -1, mask=(leaves > 0) & (gone < B))
                tl.store(slot_RB + to * B + gap, expert, mask=(enters > 0) & (gap < B))
                tl.store(feeds_OR + own * RP + slow, fed_here - drops)
                tl.store(feeds_OR + own * RP + to, fed_there + arrives)
                replicas_R += tl.where(to_R, enters, 0) - tl.where(from_R, leaves, 0)
                home_R, slot_R, fetch_R = home_new_R, slot_new_R, fetch_new_R
                times_R, in_R, out_R = times_new_R, in_new_R, out_new_R
                layer = layer_new
            else:
                steps = tl.full([], 0, dtype=tl.int32)
        else:
            steps = tl.full([], 0, dtype=tl.int32)
        tl.debug_barrier()
    return layer, tl.sum(in_R, axis=0).to(tl.int64)
