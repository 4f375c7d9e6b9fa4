"""Rows of groups between the receive buffer and compact scratch.

M compact rows, N receive rows, H row width, G groups.

    gather:   x[m] = rows[n]          (times weight[n], fp32, rounded)
    scatter:  rows[n] = o[m]          (plus bias[group], fp32, rounded)

for every row n of a group and its compact row m. Rows of no group are neither read nor written.

Worked example: starts 0 5, counts 2 1: receive rows 0 1 5 are compact rows 0 1 2. With weights
w0 w1 . . . w5 gather writes rnd(w0 r0), rnd(w1 r1), rnd(w5 r5).
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .bf16 import round_bf16, widen
from .group_tiles import Tiles
from .sizing import grid_for

_BLOCK_H = 512


@triton.jit
def _copy_rows(
    rows_NH,
    x_MH,
    extra,
    table_T4,
    total_1,
    H,
    GATHER: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    columns = tl.cdiv(H, BLOCK_H)
    total = tl.load(total_1) * columns
    p = tl.program_id(0)
    while p < total:
        entry = table_T4 + (p // columns) * 4
        group = tl.load(entry).to(tl.int64)
        row = tl.load(entry + 1).to(tl.int64)
        first = tl.load(entry + 2).to(tl.int64)
        count = tl.load(entry + 3)
        h = (p % columns) * BLOCK_H + tl.arange(0, BLOCK_H)
        m = tl.arange(0, BLOCK)
        mask = (m < count)[:, None] & (h < H)[None, :]
        theirs = rows_NH + (row + m)[:, None] * H + h[None, :]
        mine = x_MH + (first + m)[:, None] * H + h[None, :]
        if GATHER:
            x = tl.load(theirs, mask=mask, other=0.0)
            if HAS_EXTRA:
                w = tl.load(extra + row + m, mask=m < count, other=0.0)
                x = round_bf16(widen(x) * w[:, None])
            tl.store(mine, x, mask=mask)
        else:
            x = tl.load(mine, mask=mask, other=0.0)
            if HAS_EXTRA:
                b = tl.load(extra + group * H + h, mask=h < H, other=0.0)
                x = round_bf16(widen(x) + widen(b)[None, :])
            tl.store(theirs, x, mask=mask)
        p += tl.num_programs(0)


def _launch(
    rows_NH: Tensor, x_MH: Tensor, extra: Tensor | None, tiles: Tiles, sms: int | None, gather: bool
) -> None:
    H = rows_NH.shape[1]
    work = tiles.bound * triton.cdiv(H, _BLOCK_H)
    _copy_rows[grid_for(rows_NH.device, work, per_sm=8, sms=sms)](
        rows_NH,
        x_MH,
        extra,
        tiles.table_T4,
        tiles.total_1,
        H,
        GATHER=gather,
        HAS_EXTRA=extra is not None,
        BLOCK=tiles.block,
        BLOCK_H=_BLOCK_H,
    )


def gather_rows(
    rows_NH: Tensor, x_MH: Tensor, tiles: Tiles, weight_N: Tensor | None, sms: int | None = None
) -> None:
    """Receive rows to compact rows, times a route weight that belongs on the input."""
    _launch(rows_NH, x_MH, weight_N, tiles, sms, gather=True)


def scatter_rows(
    o_MH: Tensor, rows_NH: Tensor, tiles: Tiles, bias_GH: Tensor | None, sms: int | None = None
) -> None:
    """Compact rows to receive rows, plus the group's bias."""
    _launch(rows_NH, o_MH, bias_GH, tiles, sms, gather=False)
