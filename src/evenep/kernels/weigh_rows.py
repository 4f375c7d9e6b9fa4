"""Rows times their route weights in place, for models that weigh an expert's input.

N rows, H row width, G groups. ``x = bf16(x * w)`` in fp32, for the rows of groups only: what lies
between groups may be another's.

Worked example: starts (0, 8), counts (3, 2), 4 programs. Each program walks both groups; program 1
takes row 1 of group 0 and row 9 of group 1, program 3 nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _weigh_rows(
    rows_NH, weight_N, start_G, count_G, G: tl.constexpr, H: tl.constexpr, BLOCK: tl.constexpr
):
    for g in range(G):
        start = tl.load(start_G + g).to(tl.int64)
        count = tl.load(count_G + g)
        i = tl.program_id(0)
        while i < count:
            w = tl.load(weight_N + start + i)
            for h in range(0, H, BLOCK):
                column = h + tl.arange(0, BLOCK)
                x = rows_NH + (start + i) * H + column
                value = tl.load(x, mask=column < H, other=0.0).to(tl.float32)
                tl.store(x, (value * w).to(tl.bfloat16), mask=column < H)
            i += tl.num_programs(0)


def weigh_rows(
    rows_NH: Tensor, weight_N: Tensor, start_G: Tensor, count_G: Tensor, programs: int
) -> None:
    """Multiply each group's BF16 rows by their fp32 weights, in place."""
    H = rows_NH.shape[1]
    block = min(1024, triton.next_power_of_2(H))
    G = count_G.shape[0]
    _weigh_rows[(programs,)](rows_NH, weight_N, start_G, count_G, G, H, BLOCK=block, num_warps=4)


def weigh_rows_ref(rows_NH: Tensor, weight_N: Tensor, start_G: Tensor, count_G: Tensor) -> Tensor:
    """A weighed copy, row by row."""
    out = rows_NH.clone()
    for start, count in zip(start_G.tolist(), count_G.tolist(), strict=True):
        for n in range(start, start + count):
            out[n] = (rows_NH[n].float() * weight_N[n]).to(torch.bfloat16)
    return out
