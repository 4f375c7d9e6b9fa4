"""Last launch of a plan: where this rank's routes go; then the step's numbers and counters.

Letters: R ranks, E experts. Programs split the experts; program 0 also sums the statistics and
advances the residency's step and, under ``auto``, the pace of searching.

The rule is ``local_first`` of ``evenep.plan.layout.source_runs``, the oracle: routes stay on
their source as far as it computes the expert; what is left fills the ranks in ascending order.

WORKED EXAMPLE (one expert, counts per source ``2 2 1``, allocation ``0 2 3``, I am rank 0): ranks 1
and 2 keep their own 2 and 1; my 2 are the first of the leftovers, the room is ``0 0 2``. So
``take = 0 0 2``, and on rank 2 they stand before rank 2's own: ``row = start + 0``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .plan_cost import layer_ps

# Rows of the statistics, int64; ``evenep.device.planner`` reads them by these names.
STATS = (
    "chosen",
    "static_time_ps",
    "time_ps",
    "replicas",
    "fetches",
    "moved_routes",
    "max_load",
    "max_home_load",
    "total",
    "searched",
    "max_in",
    "stuck",
    "my_load",
    "my_routes",
)
LONGEST_REST = tl.constexpr(32)  # of evenep.plan.pace


@triton.jit
def plan_runs_kernel(
    counts_RE,
    counts_stride,
    constants,
    alloc_ER,
    start_ER,
    take_ER,
    row_ER,
    load_R,
    home_ps_R,
    part_RZ,
    outcome,
    loads_R,
    stats,
    step,
    pace,
    R: tl.constexpr,
    E: tl.constexpr,
    RP: tl.constexpr,
    EB: tl.constexpr,
    EP: tl.constexpr,
    AUTO: tl.constexpr,
):
    block = tl.program_id(0)
    me = tl.load(constants + 7).to(tl.int32)
    expert_E = block * EB + tl.arange(0, EB)
    rank_R = tl.arange(0, RP)
    here_ER = (expert_E < E)[:, None] & (rank_R < R)[None, :]
    at_ER = expert_E[:, None] * R + rank_R[None, :]
    from_ER = rank_R.to(tl.int64)[None, :] * counts_stride + expert_E[:, None]
    count_ER = tl.load(counts_RE + from_ER, mask=here_ER, other=0).to(tl.int32)
    amount_ER = tl.load(alloc_ER + at_ER, mask=here_ER, other=0)
    first_ER = tl.load(start_ER + at_ER, mask=here_ER, other=-1)
    kept_ER = tl.minimum(count_ER, amount_ER)
    rest_ER, room_ER = count_ER - kept_ER, amount_ER - kept_ER
    before_E1 = tl.sum(tl.where((rank_R < me)[None, :], rest_ER, 0), axis=1)[:, None]
    mine_E1 = tl.sum(tl.where((rank_R == me)[None, :], rest_ER, 0), axis=1)[:, None]
    filled_ER = tl.cumsum(room_ER, axis=1) - room_ER
    # Sources and destinations both cut the same line of leftover routes into intervals.
    take_here_ER = tl.minimum(before_E1 + mine_E1, filled_ER + room_ER)
    take_here_ER = tl.maximum(take_here_ER - tl.maximum(before_E1, filled_ER), 0)
    offset_ER = tl.minimum(tl.maximum(before_E1 - filled_ER, 0), room_ER)
    offset_ER += tl.where((rank_R < me)[None, :], kept_ER, 0)
    take_here_ER += tl.where((rank_R == me)[None, :], kept_ER, 0)
    row_here_ER = tl.where(take_here_ER > 0, first_ER + offset_ER, -1)
    tl.store(take_ER + at_ER, take_here_ER, mask=here_ER)
    tl.store(row_ER + at_ER, row_here_ER, mask=here_ER)
    if block == 0:
        real_R = rank_R < R
        home_R = tl.load(load_R + rank_R, mask=real_R, other=0)
        now_R = tl.load(loads_R + rank_R, mask=real_R, other=0)
        times_R = tl.load(home_ps_R + rank_R, mask=real_R, other=0)
        static_ps = layer_ps(times_R, rank_R, tl.load(constants + 5), R)
        replicas_R = tl.load(part_RZ + rank_R * 3, mask=real_R, other=0)
        fetches_R = tl.load(part_RZ + rank_R * 3 + 1, mask=real_R, other=0)
        moved_R = tl.load(part_RZ + rank_R * 3 + 2, mask=real_R, other=0)
        chosen, time_ps = tl.load(outcome), tl.load(outcome + 1)
        searched = tl.full([], 0, dtype=tl.int64)
        time_ps = tl.where(time_ps < 0, static_ps, time_ps)
        tl.store(stats, chosen)
        tl.store(stats + 1, static_ps)
        tl.store(stats + 2, time_ps)
        tl.store(stats + 3, tl.sum(replicas_R, axis=0).to(tl.int64))
        tl.store(stats + 4, tl.sum(fetches_R, axis=0).to(tl.int64))
        tl.store(stats + 5, tl.sum(moved_R, axis=0).to(tl.int64))
        tl.store(stats + 6, tl.max(now_R, axis=0).to(tl.int64))
        tl.store(stats + 7, tl.max(home_R, axis=0).to(tl.int64))
        tl.store(stats + 8, tl.sum(home_R, axis=0).to(tl.int64))
        tl.store(stats + 10, tl.max(replicas_R, axis=0).to(tl.int64))
        tl.store(stats + 11, tl.load(outcome + 2))
        tl.store(stats + 12, tl.sum(tl.where(rank_R == me, now_R, 0), axis=0).to(tl.int64))
        every_E = tl.arange(0, EP)
        my_row = counts_RE + me.to(tl.int64) * counts_stride
        mine_E = tl.load(my_row + every_E, mask=every_E < E, other=0)
        tl.store(stats + 13, tl.sum(mine_E, axis=0).to(tl.int64))
        tl.store(step, tl.load(step) + 1)
        if AUTO:
            resting, rest = tl.load(pace), tl.load(pace + 1)
            searched = (resting == 0).to(tl.int64)
            if resting > 0:
                tl.store(pace, resting - 1)
            else:
                paid = static_ps - time_ps >= tl.load(constants + 6)
                longer = tl.minimum(tl.maximum(2 * rest, 1), LONGEST_REST)
                longer = tl.where(paid, 0, longer)
                tl.store(pace, longer)
                tl.store(pace + 1, longer)
        tl.store(stats + 9, searched)
