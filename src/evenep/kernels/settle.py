"""Receive rows made whole: each payload copied along its chain, padding rows zeroed.

N receive rows, H row width, G groups of this rank. Chain words are ``dispatch``'s. A row holds a
route exactly if it lies in ``[start, start + count)`` of a group whose count isn't 0; words of
other rows are left from earlier steps and must not be followed.

Worked example: align 4, groups of 3 and 1 rows, so ``rows = 8``, real rows 0 1 2 4 and padding
3 5 6 7. ``chain = [-3, 5, -1, ?, 0 …]``: row 0 leads (``next = 3 - 2 = 1``), row 1 goes on at
``5 - 1 = 4``, row 4 ends (``0 - 1 = -1``); row 2 leads nobody. Row 0's payload is copied to rows 1
and 4; rows 3 5 6 7 become zero.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .fast_launch import FastLaunch
from .sizing import ceil_div, num_sms, pow2

PER_SM = 16  # programs per multiprocessor: most rows only follow, and are over at once
WIDEST = 8192  # elements of a row that one program holds


@triton.jit(do_not_specialize=["N", "longest"])
def _settle(
    rows_NH, weight_N, chain_N, group_start_G, group_count_G, rows_1, N, longest,
    H: tl.constexpr, HB: tl.constexpr, PARTS: tl.constexpr, G: tl.constexpr, GP: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    rows = tl.load(rows_1)
    g = tl.arange(0, GP)
    start_G = tl.load(group_start_G + g, mask=g < G, other=0)
    count_G = tl.load(group_count_G + g, mask=g < G, other=0)
    item = tl.program_id(0)
    while item < rows * PARTS:
        n = item // PARTS
        h = (item % PARTS) * HB + tl.arange(0, HB)
        row = rows_NH + n.to(tl.int64) * H
        word = tl.load(chain_N + n)
        step_G = n - start_G
        if tl.max(((step_G >= 0) & (step_G < count_G)).to(tl.int32), axis=0) == 0:
            tl.store(row + h, tl.zeros([HB], tl.bfloat16), mask=h < H)
            if WEIGHTED:
                tl.store(weight_N + n, 0.0)
        elif word < -1:
            payload = tl.load(row + h, mask=h < H)
            to = -word - 2
            left = longest - 1
            while (to >= 0) & (to < N) & (left > 0):
                # Asked for before the stores, so that the walk doesn't wait behind them.
                following = tl.load(chain_N + to) - 1
                tl.store(rows_NH + to.to(tl.int64) * H + h, payload, mask=h < H)
                to = following
                left -= 1
        item += tl.num_programs(0)


_launch_settle = FastLaunch(_settle)


def settle(
    rows_NH: Tensor,
    weight_N: Tensor | None,
    chain_N: Tensor,
    group_start_G: Tensor,
    group_count_G: Tensor,
    rows_1: Tensor,
    longest: int,
    sms: int | None = None,
) -> None:
    """Make rows ``[0, rows_1)`` what the experts expect, in place.

    Args:
        rows_NH: BF16, contiguous. weight_N: fp32, or None where nobody reads it.
        chain_N, group_start_G, group_count_G, rows_1: int32 on the device.
        longest: rows of a chain at most, the top-k. Where a peer failed its chains are whatever
            was there before: they lead to wrong rows, but no further than this buffer.
        sms: leave the rest of the GPU to others.
    """
    H, G = rows_NH.shape[1], group_start_G.numel()
    HB = min(pow2(H), WIDEST)
    _launch_settle(
        PER_SM * (sms or num_sms(rows_NH.device)),
        rows_NH, rows_NH if weight_N is None else weight_N, chain_N,
        group_start_G, group_count_G, rows_1, rows_NH.shape[0], longest,
        H=H, HB=HB, PARTS=ceil_div(H, HB), G=G, GP=pow2(G), WEIGHTED=weight_N is not None,
        num_warps=8 if HB > 4096 else 4,
    )  # fmt: skip


def real_rows(group_start_G: Tensor, group_count_G: Tensor) -> list[int]:
    """Oracle: rows that hold a route, ascending."""
    spans = zip(group_start_G.tolist(), group_count_G.tolist(), strict=True)
    return sorted(n for start, count in spans for n in range(start, start + count))


def chain_of(chain_N: list[int], leader: int) -> list[int]:
    """Oracle: the rows of a leader's chain, itself first."""
    found, to = [leader], -chain_N[leader] - 2
    while to >= 0:
        found.append(to)
        to = chain_N[to] - 1
    return found


def settle_ref(
    rows_NH: Tensor,
    weight_N: Tensor | None,
    chain_N: Tensor,
    group_start_G: Tensor,
    group_count_G: Tensor,
    rows_1: Tensor,
) -> None:
    """Oracle: row by row."""
    real, words = real_rows(group_start_G, group_count_G), chain_N.tolist()
    for n in set(range(int(rows_1))) - set(real):
        rows_NH[n] = 0
        if weight_N is not None:
            weight_N[n] = 0
    for n in real:
        if words[n] < 0:
            for to in chain_of(words, n)[1:]:
                rows_NH[to] = rows_NH[n]
