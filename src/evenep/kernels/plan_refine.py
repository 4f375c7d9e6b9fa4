"""Third launch of a plan, under ``auto`` only: choose a start, then climb on the modelled time.

``evenep.plan.policies.refine`` step by step: the best estimated move off the slowest rank, verified
by the whole key. Program s climbs from the s-th best distinct candidate in its own dense copy of
the allocation; program 0 also writes down what the search chose without climbing.

Letters: R ranks, E experts, B slots, L home places, M experts of the slowest rank handled at once,
S copies. Scratch of a copy: ``dense_ER`` (zeroed by ``plan_totals``), ``slot_RB`` the expert of
each replica in any order (-1 none), ``feeds_OR`` replicas whose bytes owner o sends to r.

WORKED EXAMPLE (reading is the cost): four experts of 3 routes on rank 0, two idle ones on rank 1,
read 1000 ps, row 1 ps. Estimates of moving one expert whole: rank 0 falls to 3000, rank 1 rises to
1000, the later is 3000 < 4000: moved. Then 2000, and no third: 3000 >= 2000.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_candidates import BIG, at, first_of
from .plan_choose import FAR, LIST, pick, search
from .plan_cost import layer_ps, segment_ps

OUTCOME = 4  # int64 of a copy: time, moved, place it started from; and one spare


@triton.jit
def load_start(
    source,
    home_ps_R,
    rank_R,
    routes_RL,
    owned_RL,
    left_CRL,
    reps_CVRB,
    times_CVR,
    dense_ER,
    slot_RB,
    feeds_OR,
    R: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    RC: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Unfold a candidate; returns ``(home_R, slot_R, replicas_R)`` of its ranks."""
    real_R = rank_R < R
    other_R = tl.arange(0, RP)
    for first in range(0, RP, ROWS):
        owner_O = first + tl.arange(0, ROWS)
        at_OR = owner_O[:, None] * RP + other_R[None, :]
        tl.store(feeds_OR + at_OR, tl.zeros_like(at_OR), mask=(owner_O < RP)[:, None])
    for first in range(0, R * L, 1024):
        place_P = first + tl.arange(0, 1024)
        expert_P = tl.load(owned_RL + place_P, mask=place_P < R * L, other=-1)
        left = routes_RL
        if source >= 0:
            left = left_CRL + source * R * L
        routes_P = tl.load(left + place_P, mask=expert_P >= 0, other=0)
        tl.store(dense_ER + expert_P * R + place_P // L, routes_P, mask=expert_P >= 0)
    tl.debug_barrier()
    home_R = home_ps_R
    slot_R = tl.zeros_like(home_ps_R)
    replicas_R = tl.zeros_like(rank_R)
    if source >= 0:
        mine = times_CVR + source * 3 * RC
        home_R = tl.load(mine + rank_R, mask=real_R, other=0)
        slot_R = tl.load(mine + RC + rank_R, mask=real_R, other=0)
        replicas_R = tl.load(mine + 2 * RC + rank_R, mask=real_R, other=0).to(tl.int32)
    for first in range(0, R * B, 1024):
        spot_P = first + tl.arange(0, 1024)
        here_P = spot_P < R * B
        rank_P = spot_P // B
        expert_P = tl.full([1024], -1, dtype=tl.int32)
        if source >= 0:
            reps = reps_CVRB + source * 3 * R * B
            used_P = tl.load(times_CVR + (source * 3 + 2) * RC + rank_P, mask=here_P, other=0)
            filled_P = here_P & (spot_P % B < used_P)
            expert_P = tl.load(reps + spot_P, mask=filled_P, other=-1)
            routes_P = tl.load(reps + R * B + spot_P, mask=filled_P, other=0)
            source_P = tl.load(reps + 2 * R * B + spot_P, mask=filled_P, other=-1)
            tl.store(dense_ER + expert_P * R + rank_P, routes_P, mask=filled_P)
            tl.atomic_add(feeds_OR + source_P * RP + rank_P, 1, mask=source_P >= 0)
        tl.store(slot_RB + spot_P, expert_P, mask=here_P)
    tl.debug_barrier()
    return home_R, slot_R, replicas_R


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


@triton.jit
def plan_refine_kernel(
    constants,
    load_R,
    home_ps_R,
    routes_RL,
    owned_RL,
    home_E,
    pace,
    left_CRL,
    reps_CVRB,
    times_CVR,
    scores_CZ,
    resident_ER,
    dense_SER,
    slots_SRB,
    feeds_SOR,
    outs_SR,
    climbs_SZ,
    search_Z,
    R: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    RC: tl.constexpr,
    BP: tl.constexpr,
    M: tl.constexpr,
    ROWS: tl.constexpr,
    NE: tl.constexpr,
    ALIGN: tl.constexpr,
    STEPS: tl.constexpr,
):
    copy = tl.program_id(0)
    rank_R = tl.arange(0, RP)
    place_N = tl.arange(0, LIST)
    loads_R = tl.load(load_R + rank_R, mask=rank_R < R, other=0)
    home_R = tl.load(home_ps_R + rank_R, mask=rank_R < R, other=0)
    total = tl.sum(loads_R.to(tl.int64), axis=0)
    time_N, moved_N, source_N, go_on = search(
        scores_CZ, constants, home_R, rank_R, total, pace, R, NE
    )
    time, moved, place = pick(time_N, moved_N)
    if copy == 0:
        tl.store(search_Z, place.to(tl.int64))
        tl.store(search_Z + 1, time)
        tl.store(search_Z + 2, moved)
        tl.store(search_Z + 3, at(source_N, place_N, place).to(tl.int64))
    passed = copy * 0
    while passed < copy:  # over the starts of the copies before
        time_N = tl.where((time_N == time) & (moved_N == moved), FAR, time_N)
        time, moved, place = pick(time_N, moved_N)
        passed += 1
    climbs = climbs_SZ + copy * 4
    if (go_on > 0) & (time < FAR):
        dense_ER = dense_SER + copy * E * R
        slot_RB = slots_SRB + copy * R * B
        feeds_OR = feeds_SOR + copy * RP * RP
        home_R, slot_R, replicas_R = load_start(
            at(source_N, place_N, place),
            home_R,
            rank_R,
            routes_RL,
            owned_RL,
            left_CRL,
            reps_CVRB,
            times_CVR,
            dense_ER,
            slot_RB,
            feeds_OR,
            R,
            B,
            L,
            RP,
            RC,
            ROWS,
        )
        layer, arrivals = climb(
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
            outs_SR + copy * RP,
            R,
            B,
            L,
            RP,
            BP,
            M,
            ROWS,
            ALIGN,
            STEPS,
        )
        tl.store(climbs, layer)
        tl.store(climbs + 1, arrivals)
        tl.store(climbs + 2, place.to(tl.int64))
    else:
        tl.store(climbs, tl.full([], FAR, dtype=tl.int64))
        tl.store(climbs + 1, tl.full([], 0, dtype=tl.int64))
        tl.store(climbs + 2, tl.full([], 0, dtype=tl.int64))
