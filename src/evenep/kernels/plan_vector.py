"""Small words of the planner's kernels about vectors over ranks or experts.

WORKED EXAMPLE: in ``values = 4 9 9`` the index of the largest is
``first_of(values == 9, 0 1 2) = 1``, ties to the lowest; ``at(values, 0 1 2, 0) = 4``. In one warp
each is a single reduction.
"""

from __future__ import annotations

import triton
import triton.language as tl

BIG = tl.constexpr(2**31 - 1)
CHUNK = tl.constexpr(256)  # elements a warp handles at once: 8 a lane


@triton.jit
def first_of(mask_R, index_R):
    """The lowest index where the mask holds, BIG where nowhere."""
    return tl.min(tl.where(mask_R, index_R, BIG), axis=0)


@triton.jit
def at(values_R, index_R, index):
    """``values_R[index]``, a scalar."""
    return tl.sum(tl.where(index_R == index, values_R, tl.zeros_like(values_R)), axis=0)
