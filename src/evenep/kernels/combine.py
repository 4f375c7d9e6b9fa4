"""Expert outputs back to their tokens, summed as the config's reduction defines.

T tokens, K top-k, R ranks, H row width, N receive rows, G groups.

``exact`` reads every route's output row and sums here: fp32, k ascending, one rounding to BF16.
``compact`` sums a token's routes at the experts first (``fold``: fp32, k ascending, one rounding),
reads one row per token and rank and sums those, ranks ascending, with one more rounding. Products
and sums round separately everywhere, so no fused multiply-add: a sum's bits don't depend on where
it was made.

Worked example: a token's outputs ``2^25, 1, -2^25`` for k = 0 1 2 on ranks 1 0 1. ``exact`` adds in
the order of k and loses the 1 (fp32 has 24 bits): 0. ``compact`` gets ``2^25 - 2^25 = 0`` from
rank 1 and 1 from rank 0: 1.
"""
# mypy: disable-error-code=assignment
# ruff: noqa: RUF005  (tuples grow by + in Triton; it has no unpacking)

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fast_launch import FastLaunch
from .settle import WIDEST, chain_of, real_rows
from .sizing import ceil_div, num_sms, pow2, split_width

PER_SM = 8  # programs of fold per multiprocessor
REGISTERS = 128  # left to itself, the assembler saves registers by asking for rows one by one
AT_ONCE = 8  # rows asked for before the first is added


@triton.jit(do_not_specialize=["N", "longest"])
def _fold(
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
        word = tl.load(chain_N + n)
        step_G = n - start_G
        real = tl.max(((step_G >= 0) & (step_G < count_G)).to(tl.int32), axis=0) > 0
        # A leader alone and unweighted is its own sum.
        if real & ((word < -1) | (WEIGHTED & (word == -1))):
            row = rows_NH + n.to(tl.int64) * H
            sum_H = tl.zeros([HB], tl.float32)
            at, to = n, -word - 2
            left = longest
            while (at >= 0) & (at < N) & (left > 0):
                following = tl.load(chain_N + to, mask=(to >= 0) & (to < N), other=0) - 1
                out_H = tl.load(rows_NH + at.to(tl.int64) * H + h, mask=h < H, other=0.0)
                if WEIGHTED:
                    sum_H += out_H.to(tl.float32) * tl.load(weight_N + at)
                else:
                    sum_H += out_H.to(tl.float32)
                at, to = to, following
                left -= 1
            tl.store(row + h, sum_H.to(tl.bfloat16), mask=h < H)
        item += tl.num_programs(0)


@triton.jit
def _combine_exact(
    dest_TK, row_TK, weights_TK, rows_ptrs_R, y_TH,
    K: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, PARTS: tl.constexpr,
    WEIGHTED: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    t = (item // PARTS).to(tl.int64)
    h = (item % PARTS) * HB + tl.arange(0, HB)
    y_H = tl.zeros([HB], tl.float32)
    for first in tl.static_range(0, K, AT_ONCE):
        dest, row, weight, base, out = (), (), (), (), ()
        for k in tl.static_range(first, first + AT_ONCE if first + AT_ONCE < K else K):
            dest = dest + (tl.load(dest_TK + t * K + k),)
            row = row + (tl.load(row_TK + t * K + k),)
        for i in tl.static_range(len(dest)):
            base = base + (tl.load(rows_ptrs_R + tl.maximum(dest[i], 0)),)
            if WEIGHTED:
                at = weights_TK + t * K + first + i
                weight = weight + (tl.load(at, mask=dest[i] >= 0, other=0.0),)
        for i in tl.static_range(len(dest)):
            there = tl.multiple_of(base[i].to(tl.pointer_type(tl.bfloat16)), 16)
            there = there + row[i].to(tl.int64) * H + h
            mask = (h < H) & (dest[i] >= 0)
            out = out + (tl.load(there, mask=mask, other=0.0, eviction_policy="evict_first"),)
        for i in tl.static_range(len(dest)):
            if WEIGHTED:
                y_H += out[i].to(tl.float32) * weight[i]
            else:
                y_H += out[i].to(tl.float32)
    tl.store(y_TH + t * H + h, y_H.to(tl.bfloat16), mask=h < H)


@triton.jit
def _combine_compact(
    dest_TK, row_TK, rows_ptrs_R, y_TH,
    K: tl.constexpr, KP: tl.constexpr, MOST: tl.constexpr, H: tl.constexpr, HB: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(0)
    t = (item // PARTS).to(tl.int64)
    h = (item % PARTS) * HB + tl.arange(0, HB)
    k = tl.arange(0, KP)
    dest_K = tl.load(dest_TK + t * K + k, mask=k < K, other=-1)
    row_K = tl.load(row_TK + t * K + k, mask=k < K, other=0)
    address_K = tl.load(rows_ptrs_R + dest_K, mask=dest_K >= 0, other=0)
    address_K += row_K.to(tl.int64) * (2 * H)
    before_KK = (dest_K[:, None] == dest_K[None, :]) & (k[None, :] < k[:, None])
    leads_K = (tl.max(before_KK.to(tl.int32), axis=1) == 0) & (dest_K >= 0)
    # Leaders in ascending order of their ranks: place = leaders of lower ranks.
    key_K = tl.where(leads_K, dest_K, -1)
    lower_KK = (key_K[None, :] >= 0) & (key_K[None, :] < dest_K[:, None])
    place_K = tl.where(leads_K, tl.sum(lower_KK.to(tl.int32), axis=1), KP)
    out = ()
    for i in tl.static_range(MOST):
        address = tl.sum(tl.where(place_K == i, address_K, 0), axis=0)
        there = address.to(tl.pointer_type(tl.bfloat16))
        if H % 8 == 0:
            there = tl.multiple_of(there, 16)
        mask = (h < H) & (address != 0)
        out = out + (tl.load(there + h, mask=mask, other=0.0, eviction_policy="evict_first"),)
    y_H = tl.zeros([HB], tl.float32)
    for i in tl.static_range(MOST):
        y_H += out[i].to(tl.float32)
    tl.store(y_TH + t * H + h, y_H.to(tl.bfloat16), mask=h < H)


_launch_fold = FastLaunch(_fold)
_launch_combine_exact = FastLaunch(_combine_exact)
_launch_combine_compact = FastLaunch(_combine_compact)


def fold(
    rows_NH: Tensor,
    weight_N: Tensor | None,
    chain_N: Tensor,
    group_start_G: Tensor,
    group_count_G: Tensor,
    rows_1: Tensor,
    longest: int,
    sms: int | None = None,
) -> None:
    """``compact``, at the experts: each leader's row becomes the sum over its chain, in place.

    Args:
        rows_NH: BF16 expert outputs, contiguous; rows that don't lead stay as they are.
        weight_N: fp32 factor of each row, or None.
        chain_N, group_start_G, group_count_G, rows_1: int32 on the device.
        longest: rows of a chain at most, the top-k (see ``settle``).
        sms: leave the rest of the GPU to others.
    """
    H, G = rows_NH.shape[1], group_start_G.numel()
    HB = min(pow2(H), WIDEST)
    _launch_fold(
        PER_SM * (sms or num_sms(rows_NH.device)),
        rows_NH, rows_NH if weight_N is None else weight_N, chain_N,
        group_start_G, group_count_G, rows_1, rows_NH.shape[0], longest,
        H=H, HB=HB, PARTS=ceil_div(H, HB), G=G, GP=pow2(G), WEIGHTED=weight_N is not None,
        num_warps=8 if HB > 4096 else 4, enable_fp_fusion=False,
    )  # fmt: skip


def combine_exact(
    dest_TK: Tensor, row_TK: Tensor, weights_TK: Tensor | None, rows_ptrs_R: Tensor, y_TH: Tensor
) -> None:
    """``exact``, at the tokens; zero for a token without a route.

    Args:
        dest_TK, row_TK: int32 of ``place_routes``.
        weights_TK: fp32, contiguous, or None where outputs are weighted already.
        rows_ptrs_R: int64 addresses of every rank's rows, BF16 ``[N, H]``, 16-byte aligned.
        y_TH: BF16, out, contiguous.
    """
    T, H = y_TH.shape
    if T == 0:
        return
    HB = _least_waste(H, 1024)
    parts = ceil_div(H, HB)
    _launch_combine_exact(
        T * parts,
        dest_TK, row_TK, y_TH if weights_TK is None else weights_TK, rows_ptrs_R, y_TH,
        K=dest_TK.shape[1], H=H, HB=HB, PARTS=parts, WEIGHTED=weights_TK is not None,
        AT_ONCE=AT_ONCE, num_warps=HB // 256, enable_fp_fusion=False,
        maxnreg=REGISTERS,
    )  # fmt: skip


def combine_compact(dest_TK: Tensor, row_TK: Tensor, rows_ptrs_R: Tensor, y_TH: Tensor) -> None:
    """``compact``, at the tokens: the leader's row of each rank, ranks ascending.

    Args:
        dest_TK, row_TK: int32 of ``place_routes``.
        rows_ptrs_R: int64 addresses of every rank's folded rows, BF16 ``[N, H]``, 16-byte aligned.
        y_TH: BF16, out, contiguous.
    """
    (T, H), K = y_TH.shape, dest_TK.shape[1]
    if T == 0:
        return
    HB = split_width(H, T, 2 * num_sms(y_TH.device), 512, 2048)
    parts = ceil_div(H, HB)
    _launch_combine_compact(
        T * parts,
        dest_TK, row_TK, rows_ptrs_R, y_TH,
        K=K, KP=pow2(K), MOST=min(K, rows_ptrs_R.numel()), H=H, HB=HB, PARTS=parts,
        num_warps=min(HB // 256, 4), enable_fp_fusion=False, maxnreg=REGISTERS,
    )  # fmt: skip


def _least_waste(width: int, largest: int) -> int:
    """``largest`` or its half: what covers a row with fewer idle lanes. Example: 3584 → 512."""
    half = largest // 2
    return half if ceil_div(width, half) * half < ceil_div(width, largest) * largest else largest


def fold_ref(
    rows_NH: Tensor,
    weight_N: Tensor | None,
    chain_N: Tensor,
    group_start_G: Tensor,
    group_count_G: Tensor,
) -> None:
    """Oracle: chain by chain."""
    words = chain_N.tolist()
    for n in real_rows(group_start_G, group_count_G):
        if words[n] < 0:
            total_H = torch.zeros_like(rows_NH[n], dtype=torch.float32)
            for at in chain_of(words, n):
                out_H = rows_NH[at].float()
                total_H = total_H + (out_H if weight_N is None else out_H * weight_N[at])
            rows_NH[n] = total_H.bfloat16()


def combine_exact_ref(
    dest_TK: Tensor, row_TK: Tensor, weights_TK: Tensor | None, rows_RNH: Sequence[Tensor]
) -> Tensor:
    """Oracle: token by token, k by k; BF16 ``[T, H]``."""
    y_TH = torch.zeros(dest_TK.shape[0], rows_RNH[0].shape[1], device=dest_TK.device)
    for t, (dest_K, row_K) in enumerate(zip(dest_TK.tolist(), row_TK.tolist(), strict=True)):
        for k, (rank, row) in enumerate(zip(dest_K, row_K, strict=True)):
            if rank >= 0:
                out_H = rows_RNH[rank][row].float()
                y_TH[t] = y_TH[t] + (out_H if weights_TK is None else out_H * weights_TK[t, k])
    return y_TH.bfloat16()


def combine_compact_ref(dest_TK: Tensor, row_TK: Tensor, rows_RNH: Sequence[Tensor]) -> Tensor:
    """Oracle: token by token, rank by rank; BF16 ``[T, H]``."""
    y_TH = torch.zeros(dest_TK.shape[0], rows_RNH[0].shape[1], device=dest_TK.device)
    for t, (dest_K, row_K) in enumerate(zip(dest_TK.tolist(), row_TK.tolist(), strict=True)):
        for rank in sorted(set(dest_K) - {-1}):
            y_TH[t] = y_TH[t] + rows_RNH[rank][row_K[dest_K.index(rank)]].float()
    return y_TH.bfloat16()
