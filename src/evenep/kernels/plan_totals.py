"""First launch of a plan: routes, load and static time of every home, and a clean slate.

Letters: R ranks, E experts, L places for home experts (of the fullest rank), S copies of the
allocation that ``plan_refine`` climbs in. One program per home rank; every expert has exactly one
home, so the programs cover all rows of the tables without overlap. Oracle: ``Problem.routes_E``,
``Problem.home_loads_R`` and ``compute_ps`` of ``evenep.plan``.

WORKED EXAMPLE (R = 2, E = 3, homes 0 0 1, counts ``4 0 2 | 1 3 0``): program 0 owns experts 0 and 1
and writes routes ``5 3``, load 8; program 1 owns expert 2 and writes ``2 0`` (L = 2), load 2.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_cost import segment_ps

TILE = 4096  # elements of a program's largest tile


@triton.jit
def plan_totals_kernel(
    counts_RE,
    counts_stride,
    owned_RL,
    constants,
    routes_RL,
    load_R,
    home_ps_R,
    resident_ER,
    dense_SER,
    R: tl.constexpr,
    E: tl.constexpr,
    L: tl.constexpr,
    RP: tl.constexpr,
    LP: tl.constexpr,
    ALIGN: tl.constexpr,
    SOURCES: tl.constexpr,
    ROWS: tl.constexpr,
    COPIES: tl.constexpr,
):
    home = tl.program_id(0)
    row_ps, read_ps = tl.load(constants), tl.load(constants + 1)
    launch_ps = tl.load(constants + 2)
    place_L = tl.arange(0, LP)
    expert_L = tl.load(owned_RL + home * L + place_L, mask=place_L < L, other=-1)
    routes_L = tl.zeros([LP], dtype=tl.int32)
    for first in range(0, R, SOURCES):
        source_S = first + tl.arange(0, SOURCES)
        here_SL = (source_S < R)[:, None] & (expert_L >= 0)[None, :]
        at_SL = source_S.to(tl.int64)[:, None] * counts_stride + expert_L[None, :]
        counts_SL = tl.load(counts_RE + at_SL, mask=here_SL, other=0).to(tl.int32)
        routes_L += tl.sum(counts_SL, axis=0)
    tl.store(routes_RL + home * L + place_L, routes_L, mask=place_L < L)
    tl.store(load_R + home, tl.sum(routes_L, axis=0))
    cost_L = segment_ps(routes_L, row_ps, read_ps, launch_ps, ALIGN)
    tl.store(home_ps_R + home, tl.sum(cost_L, axis=0))
    if COPIES > 0:
        rank_R = tl.arange(0, RP)
        none_LR = tl.zeros([ROWS, RP], dtype=tl.int32)
        for first in range(0, L, ROWS):
            row_L = first + tl.arange(0, ROWS)
            row_L = tl.load(owned_RL + home * L + row_L, mask=row_L < L, other=-1)
            at_LR = row_L[:, None] * R + rank_R[None, :]
            own_LR = (row_L >= 0)[:, None] & (rank_R < R)[None, :]
            tl.store(resident_ER + at_LR, none_LR.to(tl.int8), mask=own_LR)
            for copy in tl.static_range(COPIES):
                tl.store(dense_SER + copy * E * R + at_LR, none_LR, mask=own_LR)
