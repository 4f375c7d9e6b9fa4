"""The cost model of ``evenep.plan.cost`` inside a kernel: picoseconds in int64, bits equal.

Letters: R ranks (padded to a power of two). Constants arrive as one int64 tensor, in the order of
``CONSTANTS``, so that a new measurement needs no new compilation. Oracle: ``compute_ps`` and
``layer_time_ps``.

WORKED EXAMPLE (docs/planning.md): 200 routes pad to 256 rows at alignment 128; with a row of
110 000 ps, a read of 4 300 000 and a launch of 1 500 000 the segment costs
1 500 000 + max(4 300 000, 256 * 110 000) = 29 660 000 ps. Ranks of 1, 1 and 4 on P = 2 processors:
the R - P = 1 shortest adds 1, the longest counts P times, so the layer takes (1 + 2 * 4) / 2 = 4.5,
floored. (With the times ascending, ``layer_time_ps`` weighs the gap before the i-th with
``max(R - i, P)``; summed by parts the time itself weighs 1 below the P longest, P at the very last
and 0 between.)
"""

from __future__ import annotations

import triton
import triton.language as tl

CONSTANTS = (
    "row_ps",
    "read_ps",
    "launch_ps",
    "fetch_ps",
    "cold_ps",
    "parallel",
    "plan_ps",
    "rank",
)


@triton.jit
def ceil_rows(routes, ALIGN: tl.constexpr):
    """The smallest multiple of the alignment not below."""
    return (routes + (ALIGN - 1)) // ALIGN * ALIGN


@triton.jit
def segment_ps(routes, row_ps, read_ps, launch_ps, ALIGN: tl.constexpr):
    """Time of a segment (int64); 0 where it is empty."""
    padded = ceil_rows(routes.to(tl.int64), ALIGN)
    return tl.where(routes > 0, launch_ps + tl.maximum(read_ps, padded * row_ps), 0)


@triton.jit
def layer_ps(times_R, rank_R, parallel, R: tl.constexpr):
    """When the last of R ranks is done if ``parallel`` run at full speed (0: all).

    ``times_R`` is 0 beyond R.
    """
    longest = tl.max(times_R, axis=0)
    time = longest
    if (parallel > 0) & (parallel < R):
        # Take the P longest out, one by one, whichever of equal ones comes first.
        left_R = tl.where(rank_R < R, times_R, -1)
        short = tl.sum(times_R, axis=0)
        running = parallel
        while running > 0:
            top = tl.max(left_R, axis=0)
            at = tl.min(tl.where(left_R == top, rank_R, 1 << 30), axis=0)
            left_R = tl.where(rank_R == at, -1, left_R)
            short -= top
            running -= 1
        time = (short + parallel * longest) // parallel
    return time
