"""Second launch of a plan: every candidate allocation, each built and scored by one warp.

``bounded`` (``evenep.plan.policies.bounded``) at every epsilon, with and without residents first,
and ``exact`` (``evenep.plan.policies.exact``) run side by side; ``plan_choose`` then picks one as
the CPU's search does. A greedy is a chain of small decisions, so a program is one warp: its vectors
over R live in registers and a reduction is one instruction. What must be indexed lies in scratch;
a barrier separates the lanes' writes from their next reads. Oracle: the two policies.

Letters: R ranks, E experts, B slots, L places for home experts (a *place* is ``home * L + j``),
W words of R bits. Scratch of candidate c, all int32:

    left_RL    routes of every home expert that are still at home
    bits_RLW   ranks that compute the expert away from home
    rep_RB     replicas of a rank in the order of their making: expert, routes, and
               source (the home its bytes come from, -1 where resident)
    vec_VR     surplus and room, exports: what other lanes read
    pair_RB    resident (expert, rank) pairs as ``expert * RP + rank``, and the expert's place

Candidates ``2 i`` and ``2 i + 1`` are epsilon i without and with residents first; ``2 NE`` is
exact; one more program spreads the residency into ``resident_ER``.

WORKED EXAMPLE: ``plan_exact``, ``plan_greedy`` and ``plan_residents`` have one each; this file
keeps the books. Three routes of expert 1 (5 at home 0) go to rank 2: left 2, a new entry (1, 3, 0)
in rank 2's list, bit 2 of the expert's word, and the two ranks' times follow by the difference.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_cost import layer_ps, segment_ps
from .plan_exact import pair_ranks
from .plan_greedy import donors_move
from .plan_residents import list_residents, most_useful
from .plan_vector import CHUNK, at, first_of

# Scores of a candidate, int64: stuck, moved, replicas, traffic, sends of the busiest home, highest
# load, time; one spare. The second to the fifth are ``_price`` of the CPU's bounded.
SCORES = 8


@triton.jit
def build_candidate(
    candidate,
    exact,
    residents,
    millionths,
    total,
    constants,
    load_R,
    home_ps_R,
    rank_R,
    routes_RL,
    owned_RL,
    home_E,
    local_E,
    experts_RB,
    left,
    bits,
    reps,
    vecs,
    pairs,
    times_CVR,
    scores,
    R: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    LP: tl.constexpr,
    BP: tl.constexpr,
    W: tl.constexpr,
    ALIGN: tl.constexpr,
):
    real_R = rank_R < R
    row_ps, read_ps = tl.load(constants), tl.load(constants + 1)
    launch_ps, fetch_ps = tl.load(constants + 2), tl.load(constants + 3)
    cold_ps, parallel = tl.load(constants + 4), tl.load(constants + 5)
    for first in range(0, R * L, CHUNK):
        place_P = first + tl.arange(0, CHUNK)
        routes_P = tl.load(routes_RL + place_P, mask=place_P < R * L, other=0)
        tl.store(left + place_P, routes_P, mask=place_P < R * L)
    for first in range(0, R * L * W, CHUNK):
        word_P = first + tl.arange(0, CHUNK)
        tl.store(bits + word_P, tl.zeros_like(word_P), mask=word_P < R * L * W)

    share_R = (total // R).to(tl.int32) + (rank_R < total % R).to(tl.int32)
    slack = (total * millionths // (R * 1000000)).to(tl.int32)
    gap_R = load_R - tl.where(exact > 0, share_R, tl.maximum(share_R, slack))
    gap_R = tl.where(real_R, gap_R, 0)
    room_R = tl.maximum(-gap_R, 0)
    pending_R = tl.maximum(gap_R, 0)  # surplus of donors; under exact: debts to receivers
    feeder_R = tl.zeros_like(load_R)
    if exact > 0:
        feeder_R, pending_R = pair_ranks(load_R, tl.where(real_R, share_R, load_R), rank_R)
    surplus_s, room_s, exports_s = vecs, vecs + RP, vecs + 2 * RP
    tl.store(surplus_s + rank_R, pending_R)
    tl.store(room_s + rank_R, room_R)
    tl.debug_barrier()
    none = exact * 0  # a typed zero: the interpreter keeps Python's numbers as they are
    count = none
    if residents > 0:
        count = list_residents(
            pairs, experts_RB, home_E, local_E, surplus_s, room_s, left, R, B, L, RP
        )
        tl.debug_barrier()

    now_R = load_R
    free_R = tl.where(real_R, B, 0)
    slot_ps_R = tl.zeros_like(home_ps_R)
    in_R, out_R, sends_R = tl.zeros_like(load_R), tl.zeros_like(load_R), tl.zeros_like(load_R)
    stuck, traffic = none, none
    slot_B = tl.arange(0, BP)
    pending = tl.max(pending_R, axis=0)
    while pending > 0:
        routes, j, to = none, none, none
        donor = first_of(pending_R == pending, rank_R)
        if exact > 0:
            to = donor
            donor = at(feeder_R, rank_R, to)
            place_L = tl.arange(0, LP)
            left_L = tl.load(left + donor * L + place_L, mask=place_L < L, other=0)
            most = tl.max(left_L, axis=0)
            j = first_of(left_L == most, place_L)
            routes = tl.minimum(most, pending)
            if at(free_R, rank_R, to) <= 0:  # it doesn't fit the slots
                routes = 0
        elif count > 0:
            routes, pair = most_useful(pairs, count, surplus_s, room_s, left, R, B, L, RP)
            if routes > 0:
                to = pair % RP
                expert = pair // RP
                donor = tl.load(home_E + expert)
                j = tl.load(local_E + expert)
        if (exact == 0) & (routes == 0):
            count = none  # residents have nothing more to take
            j, to, routes = donors_move(
                left, bits, donor, pending, room_R, free_R, rank_R, R, L, LP, W
            )
        if routes > 0:
            place = donor * L + j
            expert = tl.load(owned_RL + place)
            before = tl.load(left + place)
            word = tl.load(bits + place * W + to // 32)
            held_B = tl.load(experts_RB + to * B + slot_B, mask=slot_B < B, other=-1)
            known_B = tl.load(reps + to * B + slot_B, mask=slot_B < B, other=-1)
            used = B - at(free_R, rank_R, to)
            placed = (word >> (to % 32)) & 1
            moved = 1 - tl.max((held_B == expert).to(tl.int32), axis=0)
            index = used
            had = none
            if placed > 0:
                index = first_of((known_B == expert) & (slot_B < used), slot_B)
                had = tl.load(reps + R * B + to * B + index)
                moved = 0
            else:
                tl.store(bits + place * W + to // 32, word | (1 << (to % 32)))
                tl.store(reps + to * B + index, expert)
                tl.store(reps + 2 * R * B + to * B + index, tl.where(moved > 0, donor, -1))
            tl.store(reps + R * B + to * B + index, had + routes)
            tl.store(left + place, before - routes)
            less = segment_ps(before, row_ps, read_ps, launch_ps, ALIGN)
            less -= segment_ps(before - routes, row_ps, read_ps, launch_ps, ALIGN)
            more = segment_ps(had + routes, row_ps, read_ps, launch_ps, ALIGN)
            more += moved * cold_ps - segment_ps(had, row_ps, read_ps, launch_ps, ALIGN)
            gives_R, takes_R = rank_R == donor, rank_R == to
            home_ps_R -= tl.where(gives_R, less, 0)
            slot_ps_R += tl.where(takes_R, more, 0)
            now_R += tl.where(takes_R, routes, 0) - tl.where(gives_R, routes, 0)
            free_R -= tl.where(takes_R, 1 - placed, 0)
            sends_R += tl.where(gives_R, 1 - placed, 0)
            out_R += tl.where(gives_R, moved, 0)
            in_R += tl.where(takes_R, moved, 0)
            traffic += routes
            room_R -= tl.where(takes_R & (exact == 0), routes, 0)
            pending_R -= tl.where(tl.where(exact > 0, takes_R, gives_R), routes, 0)
            if residents > 0:
                tl.store(surplus_s + rank_R, pending_R)
                tl.store(room_s + rank_R, room_R)
            tl.debug_barrier()
        else:
            stuck = none + 1
            given_up = tl.where(exact > 0, to, donor)
            pending_R = tl.where(rank_R == given_up, 0, pending_R)
        pending = tl.max(pending_R, axis=0)

    # A rank waits for the busier of its own imports and of the homes it imports from.
    tl.store(exports_s + rank_R, out_R)
    tl.debug_barrier()
    busiest_R = in_R
    most_used = B - tl.min(tl.where(real_R, free_R, B), axis=0)
    b = most_used * 0
    while b < most_used:
        filled_R = real_R & (b < B - free_R)
        source_R = tl.load(reps + 2 * R * B + rank_R * B + b, mask=filled_R, other=-1)
        queue_R = tl.load(exports_s + source_R, mask=source_R >= 0, other=0)
        busiest_R = tl.maximum(busiest_R, queue_R)
        b += 1
    times_R = tl.maximum(home_ps_R, busiest_R * fetch_ps) + slot_ps_R
    tl.store(times_CVR + rank_R, home_ps_R)
    tl.store(times_CVR + RP + rank_R, slot_ps_R)
    tl.store(times_CVR + 2 * RP + rank_R, tl.where(real_R, B - free_R, 0).to(tl.int64))
    tl.store(scores, stuck.to(tl.int64))
    tl.store(scores + 1, tl.sum(in_R, axis=0).to(tl.int64))
    tl.store(scores + 2, tl.sum(sends_R, axis=0).to(tl.int64))
    tl.store(scores + 3, traffic.to(tl.int64))
    tl.store(scores + 4, tl.max(sends_R, axis=0).to(tl.int64))
    tl.store(scores + 5, tl.max(now_R, axis=0).to(tl.int64))
    tl.store(scores + 6, layer_ps(times_R, rank_R, parallel, R))


@triton.jit
def worth_searching(constants, home_ps_R, rank_R, total, pace, R: tl.constexpr):
    """``auto`` searches: it isn't resting, and the bound promises more than a search costs."""
    parallel, plan_ps = tl.load(constants + 5), tl.load(constants + 6)
    static_ps = layer_ps(home_ps_R, rank_R, parallel, R)
    at_once = tl.where((parallel > 0) & (parallel < R), parallel, R)
    bound_ps = tl.sum(home_ps_R, axis=0) // at_once
    awake = (tl.load(pace) == 0) & (total > 0)
    return (awake & (static_ps - bound_ps > plan_ps)).to(tl.int32), static_ps, bound_ps


@triton.jit
def plan_candidates_kernel(
    constants,
    millionths_N,
    load_R,
    home_ps_R,
    routes_RL,
    owned_RL,
    home_E,
    local_E,
    experts_RB,
    pace,
    left_CRL,
    bits_CRLW,
    reps_CVRB,
    vecs_CVR,
    pairs_CVRB,
    times_CVR,
    scores_CZ,
    resident_ER,
    R: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    LP: tl.constexpr,
    BP: tl.constexpr,
    W: tl.constexpr,
    NE: tl.constexpr,
    ALIGN: tl.constexpr,
    AUTO: tl.constexpr,
):
    program = tl.program_id(0)
    rank_R = tl.arange(0, RP)
    loads_R = tl.load(load_R + rank_R, mask=rank_R < R, other=0)
    times_R = tl.load(home_ps_R + rank_R, mask=rank_R < R, other=0)
    total = tl.sum(loads_R.to(tl.int64), axis=0)
    worth = 1
    if AUTO:
        worth, _, _ = worth_searching(constants, times_R, rank_R, total, pace, R)
    if worth > 0:
        if program <= 2 * NE:
            exact = (program == 2 * NE).to(tl.int32)
            millionths = total * 0
            if program < 2 * NE:
                millionths = tl.load(millionths_N + program // 2)
            build_candidate(
                program,
                exact,
                (program % 2) * (1 - exact),
                millionths,
                total,
                constants,
                loads_R,
                times_R,
                rank_R,
                routes_RL,
                owned_RL,
                home_E,
                local_E,
                experts_RB,
                left_CRL + program * R * L,
                bits_CRLW + program * R * L * W,
                reps_CVRB + program * 3 * R * B,
                vecs_CVR + program * 3 * RP,
                pairs_CVRB + program * 2 * R * B,
                times_CVR + program * 3 * RP,
                scores_CZ + program * 8,
                R,
                B,
                L,
                RP,
                LP,
                BP,
                W,
                ALIGN,
            )
        elif AUTO:
            for first in range(0, R * B, CHUNK):
                slot_P = first + tl.arange(0, CHUNK)
                expert_P = tl.load(experts_RB + slot_P, mask=slot_P < R * B, other=-1)
                spot_P = expert_P * R + slot_P // B
                one_P = tl.full([CHUNK], 1, dtype=tl.int8)
                tl.store(resident_ER + spot_P, one_P, mask=expert_P >= 0)
