"""``bounded``'s use of replicas that are already in place (``_use_residents``, the oracle).

Letters: R ranks, B slots, L places for home experts, P pairs handled at once.

WORKED EXAMPLE: rank 0 has 8 too many. Its expert 3 (5 routes) is resident on rank 1 (room 9), its
expert 1 (7 routes) on rank 2 (room 6): uses 5 and 6, so expert 1 sends 6; then expert 3 can send
min(2, 9, 5) = 2, and nothing is left to send.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_vector import BIG, CHUNK


@triton.jit
def list_residents(
    pairs,
    experts_RB,
    home_E,
    local_E,
    surplus_s,
    room_s,
    left,
    R: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
):
    """Write down the resident replicas that can take surplus; uses only ever shrink."""
    count = tl.full([], 0, dtype=tl.int32)
    for first in range(0, R * B, CHUNK):
        slot_P = first + tl.arange(0, CHUNK)
        expert_P = tl.load(experts_RB + slot_P, mask=slot_P < R * B, other=-1)
        held_P = expert_P >= 0
        rank_P = slot_P // B
        home_P = tl.load(home_E + expert_P, mask=held_P, other=0)
        place_P = home_P * L + tl.load(local_E + expert_P, mask=held_P, other=0)
        use_P = tl.load(surplus_s + home_P, mask=held_P, other=0)
        use_P = tl.minimum(use_P, tl.load(room_s + rank_P, mask=held_P, other=0))
        use_P = tl.minimum(use_P, tl.load(left + place_P, mask=held_P, other=0))
        useful_P = ((use_P > 0) & (home_P != rank_P)).to(tl.int32)
        to_P = count + tl.cumsum(useful_P, axis=0) - useful_P
        tl.store(pairs + to_P, expert_P * RP + rank_P, mask=useful_P > 0)
        tl.store(pairs + R * B + to_P, place_P, mask=useful_P > 0)
        count += tl.sum(useful_P, axis=0)
    return count


@triton.jit
def most_useful(
    pairs,
    count,
    surplus_s,
    room_s,
    left,
    R: tl.constexpr,
    B: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
):
    """``(routes, pair)`` of the resident replica that takes most; ties to the lowest pair."""
    best = count * 0
    best_pair = best + BIG
    first = count * 0
    while first < count:
        slot_P = first + tl.arange(0, CHUNK)
        here_P = slot_P < count
        pair_P = tl.load(pairs + slot_P, mask=here_P, other=BIG)
        place_P = tl.load(pairs + R * B + slot_P, mask=here_P, other=0)
        use_P = tl.load(surplus_s + place_P // L, mask=here_P, other=0)
        use_P = tl.minimum(use_P, tl.load(room_s + pair_P % RP, mask=here_P, other=0))
        use_P = tl.minimum(use_P, tl.load(left + place_P, mask=here_P, other=0))
        most = tl.max(use_P, axis=0)
        pair = tl.min(tl.where(use_P == most, pair_P, BIG), axis=0)
        if (most > best) | ((most == best) & (pair < best_pair)):
            best, best_pair = most, pair
        first += CHUNK
    return best, best_pair
