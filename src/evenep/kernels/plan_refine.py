"""Third launch of a plan, under ``auto`` only: choose a start, then climb on the modelled time.

Program s climbs from the s-th best distinct candidate in its own dense copy of
the allocation; program 0 also writes down what the search chose without climbing.

Letters: R ranks, E experts, B slots, L home places, M experts of the slowest rank handled at once,
S copies. Scratch of a copy: ``dense_ER`` (zeroed by ``plan_totals``), ``slot_RB`` the expert of
each replica in any order (-1 none), ``feeds_OR`` replicas whose bytes owner o sends to r.

WORKED EXAMPLE: the search ends with bounded(0.5) at 75 us before bounded(0.02) at 80 and static at
90. Copy 0 unfolds bounded(0.5): home entries from what is left there, replicas from its lists. With
three copies the others climb from bounded(0.02) and from static.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_choose import FAR, LIST, pick, search
from .plan_climb import climb
from .plan_vector import at

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
