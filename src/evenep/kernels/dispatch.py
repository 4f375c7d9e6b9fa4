"""Rows to their experts: one payload per token and destination rank, and the chain behind it.

T tokens, K top-k, R ranks, H row width, N receive rows of a peer.

The routes of one token to one rank form a chain in ascending k; the first is the *leader* and the
only one whose payload travels. ``chain[n]`` of a leader's row is ``-(next + 2)``, of any other
``next + 1``, where ``next`` is the row of the next k on the same rank, or -1.

Worked example: K = 3, a token routed to ranks ``1 0 1`` at rows ``4 9 7``. Its payload goes to
row 4 of rank 1 and row 9 of rank 0. Rank 1 gets ``chain[4] = -(7 + 2) = -9`` and ``chain[7] =
-1 + 1 = 0``, rank 0 gets ``chain[9] = -(-1 + 2) = -1``.
"""
# mypy: disable-error-code=assignment
# ruff: noqa: RUF005  (tuples grow by + in Triton; it has no unpacking)

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .fast_launch import FastLaunch
from .sizing import ceil_div, num_sms, pow2, split_width

WAVES = 2  # programs per multiprocessor below which rows are split
MAX_TOP_K = 64
PER_SM = 8  # programs per multiprocessor where their number is limited


@triton.jit(do_not_specialize=["T"])
def _dispatch(
    x_TH, weights_TK, dest_TK, row_TK, rows_ptrs_R, chain_ptrs_R, weight_ptrs_R, T,
    K: tl.constexpr, KP: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, PARTS: tl.constexpr,
    WEIGHTED: tl.constexpr,
):  # fmt: skip
    k = tl.arange(0, KP)
    item = tl.program_id(0)
    while item < T * PARTS:
        t = (item // PARTS).to(tl.int64)
        h = (item % PARTS) * HB + tl.arange(0, HB)
        payload = tl.load(x_TH + t * H + h, mask=h < H, eviction_policy="evict_first")
        dest_K = tl.load(dest_TK + t * K + k, mask=k < K, other=-1)
        # Everyone's destination and row, and this token's addresses, before the first use.
        dest, row, base = (), (), ()
        for i in tl.static_range(K):
            dest = dest + (tl.load(dest_TK + t * K + i),)
            row = row + (tl.load(row_TK + t * K + i),)
        for i in tl.static_range(K):
            base = base + (tl.load(rows_ptrs_R + tl.maximum(dest[i], 0)),)
        at_KK = (dest_K[:, None] == dest_K[None, :]) & (dest_K[:, None] >= 0)
        before_K = tl.max((at_KK & (k[None, :] < k[:, None])).to(tl.int32), axis=1)
        leads_K = (before_K == 0) & (dest_K >= 0)
        leads = tl.sum(tl.where(leads_K, tl.full([KP], 1, tl.int64) << k.to(tl.int64), 0))
        for i in tl.static_range(K):
            there = tl.multiple_of(base[i].to(tl.pointer_type(tl.bfloat16)), 16)
            mine = ((leads >> i) & 1) != 0
            tl.store(there + row[i].to(tl.int64) * H + h, payload, mask=(h < H) & mine)
        if item % PARTS == 0:
            row_K = tl.load(row_TK + t * K + k, mask=k < K, other=-1)
            later_KK = at_KK & (k[None, :] > k[:, None])
            next_K = tl.min(tl.where(later_KK, k[None, :], KP), axis=1)
            chosen_KK = k[None, :] == next_K[:, None]
            # Rows of other routes, beside this one: -1 where nothing follows.
            next_row_K = tl.sum(tl.where(chosen_KK, row_K[None, :] + 1, 0), axis=1) - 1
            word_K = tl.where(leads_K, -(next_row_K + 2), next_row_K + 1)
            chain = tl.load(chain_ptrs_R + dest_K, mask=dest_K >= 0, other=0)
            tl.store(chain.to(tl.pointer_type(tl.int32)) + row_K, word_K, mask=dest_K >= 0)
            if WEIGHTED:
                weight_K = tl.load(weights_TK + t * K + k, mask=dest_K >= 0, other=0.0)
                there_K = tl.load(weight_ptrs_R + dest_K, mask=dest_K >= 0, other=0)
                there_K = there_K.to(tl.pointer_type(tl.float32)) + row_K
                tl.store(there_K, weight_K, mask=dest_K >= 0)
        item += tl.num_programs(0)


_launch_dispatch = FastLaunch(_dispatch)


def dispatch(
    x_TH: Tensor,
    weights_TK: Tensor | None,
    dest_TK: Tensor,
    row_TK: Tensor,
    rows_ptrs_R: Tensor,
    chain_ptrs_R: Tensor,
    weight_ptrs_R: Tensor,
    sms: int | None = None,
) -> None:
    """Write payloads, chain words and (if given) weights into every rank's receive buffer.

    Args:
        x_TH: BF16, contiguous.
        weights_TK: fp32, contiguous, or None.
        dest_TK, row_TK: of ``place_routes``; nothing is written for a destination of -1.
        rows_ptrs_R, chain_ptrs_R, weight_ptrs_R: int64 addresses of every rank's ``rows`` BF16
            ``[N, H]`` (16-byte aligned), ``chain`` int32 ``[N]`` and ``weight`` fp32 ``[N]``.
        sms: leave the rest of the GPU to others.
    """
    T, H = x_TH.shape
    K = dest_TK.shape[1]
    assert K <= MAX_TOP_K, "leaders are bits of one int64"
    if T == 0:
        return
    HB = split_width(H, T, WAVES * num_sms(x_TH.device), 512, 8192)
    parts = ceil_div(H, HB)
    programs = T * parts if sms is None else min(T * parts, PER_SM * sms)
    _launch_dispatch(
        programs,
        x_TH, x_TH if weights_TK is None else weights_TK, dest_TK, row_TK,
        rows_ptrs_R, chain_ptrs_R, weight_ptrs_R, T,
        K=K, KP=pow2(K), H=H, HB=HB, PARTS=parts, WEIGHTED=weights_TK is not None,
        num_warps=8 if HB > 4096 else min(HB // 256, 4),
    )  # fmt: skip


def dispatch_ref(
    x_TH: Tensor,
    weights_TK: Tensor | None,
    dest_TK: Tensor,
    row_TK: Tensor,
    rows_RNH: Sequence[Tensor],
    chain_RN: Sequence[Tensor],
    weight_RN: Sequence[Tensor],
) -> None:
    """Oracle: token by token, with the peers' tensors themselves in place of addresses."""
    dests, rows = dest_TK.tolist(), row_TK.tolist()
    for t, (dest_K, row_K) in enumerate(zip(dests, rows, strict=True)):
        for rank in set(dest_K) - {-1}:
            ks = [k for k, d in enumerate(dest_K) if d == rank]
            rows_RNH[rank][row_K[ks[0]]] = x_TH[t]
            for i, k in enumerate(ks):
                following = row_K[ks[i + 1]] if i + 1 < len(ks) else -1
                chain_RN[rank][row_K[k]] = -(following + 2) if i == 0 else following + 1
                if weights_TK is not None:
                    weight_RN[rank][row_K[k]] = weights_TK[t, k]
