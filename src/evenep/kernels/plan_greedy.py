"""``bounded``'s choice of a donor's next replica (``evenep.plan.policies.bounded``, the oracle).

Letters: R ranks, L places for home experts, W words of R bits (see ``plan_candidates``).

WORKED EXAMPLE: a donor needs 5 away and has experts of 9, 6 and 2 routes; rooms are ``0 7 5``. The
smallest sufficient expert is the one of 6, the tightest sufficient room rank 2's 5: 5 of its routes
go to rank 2. With rooms ``0 3 4`` nothing takes all: the largest expert gives 4 to the largest
room.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_vector import BIG, at, first_of


@triton.jit
def hosted_R(bits, place, free_R, rank_R, R: tl.constexpr, W: tl.constexpr):
    """1 where a rank may compute the expert of a place: a slot is free or already its own."""
    word_R = tl.load(bits + place * W + rank_R // 32, mask=rank_R < R, other=0)
    return ((free_R > 0) | (((word_R >> (rank_R % 32)) & 1) > 0)).to(tl.int32)


@triton.jit
def spread_L(bits, donor, place_L, L: tl.constexpr, W: tl.constexpr):
    """1 where a home expert of the donor has a replica anywhere."""
    found_L = tl.zeros_like(place_L)
    for word in tl.static_range(W):
        at_L = (donor * L + place_L) * W + word
        found_L |= tl.load(bits + at_L, mask=place_L < L, other=0)
    return (found_L != 0).to(tl.int32)


@triton.jit
def donors_move(
    left,
    bits,
    donor,
    need,
    room_R,
    free_R,
    rank_R,
    R: tl.constexpr,
    L: tl.constexpr,
    LP: tl.constexpr,
    W: tl.constexpr,
):
    """The greedy's next replica for a donor: ``(j of the expert, rank, routes)``; 0 routes: stuck.

    First one that takes the whole surplus: the smallest sufficient expert in the tightest
    sufficient room; else the most routes any one replica can take.
    """
    place_L = tl.arange(0, LP)
    left_L = tl.load(left + donor * L + place_L, mask=place_L < L, other=0)
    j, to, routes = donor * 0, donor * 0, need * 0
    fit_R = room_R >= need
    if tl.max(fit_R.to(tl.int32), axis=0) > 0:
        enough_L = tl.where(left_L >= need, left_L, BIG)
        if tl.max((fit_R & (free_R > 0)).to(tl.int32), axis=0) == 0:
            # Only experts with a replica somewhere can have one in a rank without free slots.
            enough_L = tl.where(spread_L(bits, donor, place_L, L, W) > 0, enough_L, BIG)
        least = tl.min(enough_L, axis=0)
        while (routes == 0) & (least < BIG):
            j = first_of(enough_L == least, place_L)
            host_R = hosted_R(bits, donor * L + j, free_R, rank_R, R, W)
            tight_R = tl.where(fit_R & (host_R > 0), room_R, BIG)
            tight = tl.min(tight_R, axis=0)
            if tight < BIG:
                to = first_of(tight_R == tight, rank_R)
                routes = need
            else:
                enough_L = tl.where(place_L == j, BIG, enough_L)
                least = tl.min(enough_L, axis=0)
    if routes == 0:
        most = tl.max(left_L, axis=0)
        j = first_of(left_L == most, place_L)
        space = tl.max(room_R, axis=0)
        to = first_of(room_R == space, rank_R)
        host_R = hosted_R(bits, donor * L + j, free_R, rank_R, R, W)
        if at(host_R, rank_R, to) > 0:  # nothing beats the largest expert in the largest room
            routes = tl.minimum(tl.minimum(most, space), need)
        else:
            # Slots are scarce. Beyond the largest expert only those with a replica can do better.
            other_L = tl.where(spread_L(bits, donor, place_L, L, W) > 0, left_L, 0)
            trial = j
            while most > routes:
                host_R = hosted_R(bits, donor * L + trial, free_R, rank_R, R, W)
                space_R = tl.where(host_R > 0, room_R, 0)
                space = tl.max(space_R, axis=0)
                taken = tl.minimum(tl.minimum(most, space), need)
                if taken > routes:
                    routes = taken
                    j = trial
                    to = first_of(space_R == space, rank_R)
                other_L = tl.where(place_L == trial, 0, other_L)
                most = tl.max(other_L, axis=0)
                trial = first_of(other_L == most, place_L)
    return j, to, routes
