"""Next to last launch of a plan: one rank's column of everything derived from the allocation.

Program r takes the winner, writes column r of the allocation, gives rank r's replicas their slots,
moves the residency on (``evenep.plan.residency``), and lays out rank r's rows
(``evenep.plan.layout``: home experts ascending, then slots).

Letters: R ranks, E experts, B slots, L home rows, G = L + B.

WORKED EXAMPLE (B = 3, slots hold 10 20 30, used at steps 0 1 2; wanted: 20 40 50): 20 stays in
slot 1. Of the free ones slot 0 is the oldest, then slot 2; so 40 goes to slot 0 and 50 to slot 2.
With alignment 2 and home experts of 3 and 0 routes, slots of 1, 2 and 2: home row 0 starts at 0
(4 rows), slots at 4, 6 and 8; 10 rows in all.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_choose import DENSE, bounded_source
from .plan_cost import ceil_rows

STATIC, BOUNDED, EXACT, AUTO = 0, 1, 2, 3  # how the winner is found


@triton.jit
def winner(
    scores_CZ, climbs_SZ, search_Z, MODE: tl.constexpr, COPIES: tl.constexpr, NE: tl.constexpr
):
    """``(source, chosen id, time, stuck)``; a time below 0 is static's."""
    source = tl.full([], -1, dtype=tl.int32)
    chosen = tl.full([], 0, dtype=tl.int64)
    time = tl.full([], -1, dtype=tl.int64)
    stuck = tl.full([], 0, dtype=tl.int64)
    if MODE == 1 or MODE == 2:
        source = tl.full([], 2 * NE, dtype=tl.int32)
        if MODE == 1:
            source = bounded_source(scores_CZ, 0, NE)
        chosen = tl.full([], MODE, dtype=tl.int64)
        stuck = tl.load(scores_CZ + source * 8)
        time = tl.load(scores_CZ + source * 8 + 6)
    if MODE == 3:
        chosen, time = tl.load(search_Z), tl.load(search_Z + 1)
        moved = tl.load(search_Z + 2)
        source = tl.load(search_Z + 3).to(tl.int32)
        for copy in tl.static_range(COPIES):
            climbed = tl.load(climbs_SZ + copy * 4)
            arrivals = tl.load(climbs_SZ + copy * 4 + 1)
            better = (climbed < time) | ((climbed == time) & (arrivals < moved))
            time = tl.where(better, climbed, time)
            moved = tl.where(better, arrivals, moved)
            start = tl.load(climbs_SZ + copy * 4 + 2)
            chosen = tl.where(better, 8 + start, chosen)
            source = tl.where(better, DENSE + copy, source)
    return source, chosen, time, stuck


@triton.jit
def plan_slots_kernel(
    constants,
    scores_CZ,
    climbs_SZ,
    search_Z,
    routes_RL,
    left_CRL,
    reps_CVRB,
    times_CVR,
    dense_SER,
    owned_RL,
    home_E,
    local_E,
    experts_RB,
    used_RB,
    step,
    mark_RE,
    new_RB,
    age_RB,
    alloc_ER,
    start_ER,
    slot_RB,
    moved_RB,
    group_start_G,
    group_count_G,
    rows_1,
    loads_R,
    part_RZ,
    outcome,
    R: tl.constexpr,
    E: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    RC: tl.constexpr,
    EP: tl.constexpr,
    LP: tl.constexpr,
    BP: tl.constexpr,
    CB: tl.constexpr,
    NE: tl.constexpr,
    MODE: tl.constexpr,
    COPIES: tl.constexpr,
    CHOSEN: tl.constexpr,
    ALIGN: tl.constexpr,
    CAP: tl.constexpr,
):
    rank = tl.program_id(0)
    expert_E = tl.arange(0, EP)
    real_E = expert_E < E
    source, chosen, time, stuck = winner(scores_CZ, climbs_SZ, search_Z, MODE, COPIES, NE)
    own_E = tl.load(home_E + expert_E, mask=real_E, other=-1) == rank
    local = tl.load(local_E + expert_E, mask=own_E, other=0)
    column = alloc_ER + expert_E * R + rank
    tl.store(start_ER + expert_E * R + rank, tl.full([EP], -1, dtype=tl.int32), mask=real_E)
    left = routes_RL
    if MODE > 0:  # noqa: SIM102  (decided when compiling)
        if (source >= 0) & (source < DENSE):
            left = left_CRL + source * R * L
    routes_E = tl.load(left + rank * L + local, mask=own_E, other=0)
    if MODE == 3:  # noqa: SIM102
        if source >= DENSE:
            dense_ER = dense_SER + (source - DENSE) * E * R
            routes_E = tl.load(dense_ER + expert_E * R + rank, mask=real_E, other=0)
    tl.store(column, routes_E, mask=real_E)
    tl.debug_barrier()
    if MODE > 0:  # noqa: SIM102  (decided when compiling)
        if (source >= 0) & (source < DENSE):
            slot_B = tl.arange(0, BP)
            reps = reps_CVRB + source * 3 * R * B + rank * B
            filled_B = slot_B < tl.load(times_CVR + (source * 3 + 2) * RC + rank)
            guest_B = tl.load(reps + slot_B, mask=filled_B, other=0)
            count_B = tl.load(reps + R * B + slot_B, mask=filled_B, other=0)
            tl.store(alloc_ER + guest_B * R + rank, count_B, mask=filled_B)
            tl.debug_barrier()
            routes_E = tl.load(column, mask=real_E, other=0)
    tl.store(loads_R + rank, tl.sum(routes_E, axis=0))
    wanted_E = ((routes_E > 0) & (~own_E)).to(tl.int32)
    fetches = tl.zeros([], dtype=tl.int32)

    # Slots.
    if B > 0:
        slot_B = tl.arange(0, BP)
        real_B = slot_B < B
        held_B = tl.load(experts_RB + rank * B + slot_B, mask=real_B, other=-1)
        used_B = tl.load(used_RB + rank * B + slot_B, mask=real_B, other=-1)
        holds_B = held_B >= 0
        needed_B = tl.load(alloc_ER + held_B * R + rank, mask=holds_B, other=0) > 0
        kept_B = needed_B & (tl.load(home_E + held_B, mask=holds_B, other=0) != rank)
        for first in range(0, B, CB):  # of slots that hold the same, the lowest counts
            other_C = first + tl.arange(0, CB)
            twin_C = tl.load(experts_RB + rank * B + other_C, mask=other_C < B, other=-1)
            twins_BC = (twin_C[None, :] == held_B[:, None]) & (other_C[None, :] < slot_B[:, None])
            kept_B = kept_B & (tl.sum(twins_BC.to(tl.int32), axis=1) == 0)
        free_B = real_B & (~kept_B)
        age_B = tl.where(holds_B, used_B + 1, 0)
        # Oldest first, then the lowest slot; what is kept comes last.
        order_B = tl.where(free_B, age_B.to(tl.int64) * BP + slot_B, 2**62)
        tl.store(age_RB + rank * B + slot_B, order_B, mask=real_B)
        tl.store(mark_RE + rank * E + expert_E, tl.zeros([EP], dtype=tl.int32), mask=real_E)
        tl.debug_barrier()
        tl.store(mark_RE + rank * E + held_B, tl.full([BP], 1, dtype=tl.int32), mask=kept_B)
        turn_B = tl.zeros([BP], dtype=tl.int32)
        for first in range(0, B, CB):
            other_C = first + tl.arange(0, CB)
            order_C = tl.load(age_RB + rank * B + other_C, mask=other_C < B, other=2**62)
            turn_B += tl.sum((order_C[None, :] < order_B[:, None]).to(tl.int32), axis=1)
        tl.debug_barrier()
        known_E = tl.load(mark_RE + rank * E + expert_E, mask=real_E, other=0)
        new_E = wanted_E * (1 - known_E)
        to_E = tl.cumsum(new_E, axis=0) - new_E
        tl.store(new_RB + rank * B + to_E, expert_E, mask=(new_E > 0) & (to_E < B))
        tl.debug_barrier()
        comes_B = free_B & (turn_B < tl.sum(new_E, axis=0))
        new_B = tl.load(new_RB + rank * B + turn_B, mask=comes_B, other=-1)
        slots_B = tl.where(kept_B, held_B, new_B)
        filled_B = slots_B >= 0
        fetched_B = (filled_B & (slots_B != held_B)).to(tl.int32)
        fetches = tl.sum(fetched_B, axis=0)
        at_B = rank * B + slot_B
        tl.store(slot_RB + at_B, slots_B, mask=real_B)
        tl.store(moved_RB + at_B, fetched_B, mask=real_B)
        tl.store(experts_RB + at_B, slots_B, mask=filled_B)
        now_B = tl.zeros([BP], dtype=tl.int32) + tl.load(step)
        tl.store(used_RB + at_B, now_B, mask=filled_B)

    # Rows.
    place_L = tl.arange(0, LP)
    home_L = tl.load(owned_RL + rank * L + place_L, mask=place_L < L, other=-1)
    count_L = tl.load(alloc_ER + home_L * R + rank, mask=home_L >= 0, other=0)
    padded_L = ceil_rows(count_L, ALIGN)
    start_L = tl.cumsum(padded_L, axis=0) - padded_L
    tl.store(start_ER + home_L * R + rank, start_L, mask=count_L > 0)
    rows = tl.sum(padded_L, axis=0)
    mine = rank == tl.load(constants + 7).to(tl.int32)
    tl.store(group_start_G + place_L, start_L, mask=(place_L < L) & mine)
    # Counts that a failed peer left half written may ask for more rows than there are.
    fit_L = tl.minimum(count_L, tl.maximum(CAP - start_L, 0))
    tl.store(group_count_G + place_L, fit_L, mask=(place_L < L) & mine)
    if B > 0:
        count_B = tl.load(alloc_ER + slots_B * R + rank, mask=filled_B, other=0)
        padded_B = ceil_rows(count_B, ALIGN)
        start_B = rows + tl.cumsum(padded_B, axis=0) - padded_B
        tl.store(start_ER + slots_B * R + rank, start_B, mask=count_B > 0)
        tl.store(group_start_G + L + slot_B, start_B, mask=real_B & mine)
        fit_B = tl.minimum(count_B, tl.maximum(CAP - start_B, 0))
        tl.store(group_count_G + L + slot_B, fit_B, mask=real_B & mine)
        rows += tl.sum(padded_B, axis=0)
    if mine:
        tl.store(rows_1, tl.minimum(rows, CAP))
    foreign_E = tl.where(wanted_E > 0, routes_E, 0)
    tl.store(part_RZ + rank * 3, tl.sum(wanted_E, axis=0))
    tl.store(part_RZ + rank * 3 + 1, fetches)
    tl.store(part_RZ + rank * 3 + 2, tl.sum(foreign_E, axis=0))
    if rank == 0:
        if MODE == 0:
            chosen = tl.full([], CHOSEN, dtype=tl.int64)
        tl.store(outcome, chosen)
        tl.store(outcome + 1, time)
        tl.store(outcome + 2, stuck)
