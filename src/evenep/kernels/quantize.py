"""BF16 rows to FP8 (E4M3), one fp32 scale per row and 128 columns: how DeepGEMM takes activations.

M compact rows, K columns, Q = K / 128 groups of columns.

    scale[m, q] = max(|x[m, 128 q …]|, 1e-4) / 448        code = E4M3(x / scale)

Scales lie column after column (``[M, Q]`` with strides 1 and M), which is what TMA reads there.

Worked example: a group whose largest magnitude is 7 has scale 7 / 448 = 0.015625; the value 3.3 is
211.2 scales, and the nearest E4M3 is 208, so it stands for 3.25.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .bf16 import widen
from .group_tiles import Tiles
from .sizing import grid_for

GROUP = 128
LARGEST = 448.0  # of E4M3
SMALLEST = 1e-4  # largest magnitude of a group that still counts


@triton.jit
def _quantize_rows(
    x_MK,
    q_MK,
    scale_MQ,
    table_T4,
    total_1,
    M,
    K,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    columns = K // GROUP
    total = tl.load(total_1) * columns
    p = tl.program_id(0)
    while p < total:
        entry = table_T4 + (p // columns) * 4
        first = tl.load(entry + 2).to(tl.int64)
        count = tl.load(entry + 3)
        q = p % columns
        m = tl.arange(0, BLOCK)
        k = q * GROUP + tl.arange(0, GROUP)
        mask = (m < count)[:, None]
        at = (first + m)[:, None] * K + k[None, :]
        x = widen(tl.load(x_MK + at, mask=mask, other=0.0))
        top = tl.max(tl.abs(x), 1)
        scale = tl.where(top < SMALLEST, SMALLEST, top) / LARGEST
        code = (x / scale[:, None]).to(tl.float8e4nv, fp_downcast_rounding="rtne")
        tl.store(q_MK + at, code, mask=mask)
        tl.store(scale_MQ + q.to(tl.int64) * M + first + m, scale, mask=m < count)
        p += tl.num_programs(0)


def quantize_rows(
    x_MK: Tensor, q_MK: Tensor, scale_MQ: Tensor, tiles: Tiles, sms: int | None = None
) -> None:
    """Fill the tiles' rows of ``q_MK`` (E4M3) and ``scale_MQ`` (fp32, strides 1 and M)."""
    M, K = x_MK.shape
    work = tiles.bound * (K // GROUP)
    _quantize_rows[grid_for(x_MK.device, work, per_sm=8, sms=sms)](
        x_MK,
        q_MK,
        scale_MQ,
        tiles.table_T4,
        tiles.total_1,
        M,
        K,
        BLOCK=tiles.block,
        GROUP=GROUP,
        LARGEST=LARGEST,
        SMALLEST=SMALLEST,
    )


def quantize_rows_ref(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of all rows."""
    groups = x_MK.float().unflatten(1, (-1, GROUP))
    scale_MQ = groups.abs().amax(2).clamp(min=SMALLEST) / LARGEST
    return (groups / scale_MQ[:, :, None]).flatten(1).to(torch.float8_e4m3fn), scale_MQ
