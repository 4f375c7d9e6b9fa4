"""Where each route of this rank goes: a destination rank and a row there.

T tokens, K top-k, E experts, R ranks, J blocks; N = T K routes in the order token, then k.

A route's number among this rank's routes of its expert is ``before_JE[block, e] + within_N[n]``
(see ``count``). The expert's routes are dealt to ranks in the order: this rank, then the others
ascending, ``take_ER[e, r]`` to each; the first of a rank's share has row ``row_ER[e, r]`` there.

Worked example: rank 1 of 3 has five routes of an expert, ``take = [1 2 2]``, ``row = [40 7 90]``.
In order they go to (rank, row): (1, 7) (1, 8) (0, 40) (2, 90) (2, 91).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .count import RouteScratch, blocking
from .fast_launch import FastLaunch
from .sizing import ceil_div, pow2


@triton.jit(do_not_specialize=["N", "per_block", "me", "rows"])
def _place(
    ids_N, before_JE, within_N, take_ER, row_ER, dest_N, row_N, N, per_block, me, rows,
    R: tl.constexpr, E: tl.constexpr, RP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    id_n = tl.load(ids_N + n, mask=n < N, other=-1)
    valid = (id_n >= 0) & (id_n < E)
    e = tl.where(valid, id_n, 0).to(tl.int32)
    number = tl.load(within_N + n, mask=valid, other=0)
    number += tl.load(before_JE + (n // per_block) * E + e, mask=valid, other=0)
    column = tl.arange(0, RP)
    rank = tl.where(column == 0, me, tl.where(column <= me, column - 1, column))[None, :]
    at = e[:, None].to(tl.int64) * R + rank
    take = tl.load(take_ER + at, mask=valid[:, None] & (column < R)[None, :], other=0)
    end = tl.cumsum(take, axis=1)
    step = number[:, None] - (end - take)
    mine = (step >= 0) & (step < take)
    row = tl.load(row_ER + at, mask=mine, other=0) + step
    found = tl.max(mine.to(tl.int32), axis=1) > 0
    dest = tl.where(found, tl.sum(tl.where(mine, rank, 0), axis=1), -1)
    row = tl.where(found, tl.sum(tl.where(mine, row, 0), axis=1), -1)
    # Counts that a failed peer left half written may lead past the end of a buffer.
    inside = (row >= 0) & (row < rows)
    tl.store(dest_N + n, tl.where(inside, dest, -1), mask=n < N)
    tl.store(row_N + n, tl.where(inside, row, -1), mask=n < N)


_launch_place = FastLaunch(_place)


def place_routes(
    ids_TK: Tensor,
    scratch: RouteScratch,
    take_ER: Tensor,
    row_ER: Tensor,
    me: int,
    dest_TK: Tensor,
    row_TK: Tensor,
    rows: int,
) -> None:
    """Resolve this rank's routes against its share of the plan.

    Args:
        ids_TK: int32 or int64, contiguous, as counted.
        scratch: after ``count_routes`` and ``push_counts``.
        take_ER: int32, this rank's routes of each expert that go to each rank.
        row_ER: int32, the row there of the first of them.
        dest_TK: int32, out: destination rank, -1 where there is no route.
        row_TK: int32, out: row there, -1 where there is no route.
        rows: receive rows of every rank; no route gets a row beyond.
    """
    N = ids_TK.numel()
    if N == 0:
        return
    E, R = take_ER.shape
    block = min(max(2048 // pow2(R), 16), 128)
    _launch_place(
        ceil_div(N, block),
        ids_TK, scratch.before_JE, scratch.within_N, take_ER, row_ER, dest_TK, row_TK,
        N, blocking(N)[1], me, rows, R=R, E=E, RP=pow2(R), BLOCK=block,
    )  # fmt: skip


def place_ref(
    ids_TK: Tensor, take_ER: Tensor, row_ER: Tensor, me: int
) -> tuple[list[list[int]], list[list[int]]]:
    """Oracle: ``(dest_TK, row_TK)``, each expert's places listed and handed out one by one."""
    E, R = take_ER.shape
    order = [me, *(r for r in range(R) if r != me)]
    take, row = take_ER.tolist(), row_ER.tolist()
    places = [
        iter([(r, row[e][r] + i) for r in order for i in range(take[e][r])]) for e in range(E)
    ]
    nowhere = (-1, -1)
    got = [
        [next(places[e], nowhere) if 0 <= e < E else nowhere for e in token]
        for token in ids_TK.tolist()
    ]
    return [[d for d, _ in token] for token in got], [[n for _, n in token] for token in got]
