"""How many routes each expert gets from this rank, and telling every rank.

T tokens, K top-k, E experts, R ranks, J blocks of routes; N = T K routes, route n = t K + k.

Two launches. The first cuts the N routes into J <= 128 blocks and writes, per block, a histogram
and each route's place among its block's routes of the same expert. The second turns the histograms
into prefixes over the blocks (``place_routes`` reads them), and stores the totals behind a header
in this rank's row of everyone's counts window. ``check_headers`` compares those headers on the
device.

Worked example: E = 3, blocks of 2 routes, ids ``[[2, 0], [2, 2]]``:

    histograms   [1 0 1]   within   0 0      (routes 0 and 1)
                 [0 0 2]            0 1      (routes 2 and 3)
    prefixes     [0 0 0]   pushed   [layer, epoch, version, policy, tokens, 0, 1, 0, 3]
                 [1 0 1]

Route 3 is thus number ``1 + 1 = 2`` of this rank's routes to expert 2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .fast_launch import FastLaunch
from .sizing import ceil_div, pow2

HEADER = 6
"""int32 words before the counts: layer, epoch, version, policy, tokens, spare."""

AGREED = 4
"""The header's first words, which must be equal on all ranks."""

HEADERS_DIFFER = 1
"""Bit of the status word: a peer is elsewhere than this rank."""

BAD_EXPERT = 2
"""Bit of the status word: an id was not below E; its route was dropped."""

MAX_BLOCKS = 128
SUB = 128  # routes compared with each other at once: SUB^2 comparisons
EXPERTS = 32  # of one program when prefixes are made


@dataclass(frozen=True, slots=True, eq=False)
class RouteScratch:
    """Scratch of one lane, used from ``count_routes`` to ``place_routes``.

    Attributes:
        before_JE: int32, routes of each expert per block, then in all blocks before it.
        within_N: int32, place of a route among its block's routes of the same expert.
        status: int32 ``[2]``: bits of what went wrong, which kernels only ever set; steps so far.
        top_k: K.
    """

    before_JE: Tensor
    within_N: Tensor
    status: Tensor
    top_k: int

    @classmethod
    def make(
        cls, max_tokens: int, top_k: int, num_experts: int, device: torch.device | str
    ) -> RouteScratch:
        """For up to ``max_tokens`` tokens a step."""
        blocks = blocking(max_tokens * top_k)[0]
        return cls(
            before_JE=torch.zeros(max(blocks, 1), num_experts, dtype=torch.int32, device=device),
            within_N=torch.zeros(max_tokens * top_k, dtype=torch.int32, device=device),
            status=torch.zeros(2, dtype=torch.int32, device=device),
            top_k=top_k,
        )


def blocking(routes: int) -> tuple[int, int]:
    """``(blocks, routes of a block)``. Example: 131072 → (128, 1024); 40 → (1, 128)."""
    per_block = SUB * pow2(ceil_div(routes, SUB * MAX_BLOCKS))
    return ceil_div(routes, per_block), per_block


@triton.jit(do_not_specialize=["N", "subs"])
def _count(
    ids_N, before_JE, within_N, status, N, subs,
    E: tl.constexpr, EP: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    lane = tl.arange(0, SUB)
    seen_E = tl.zeros([EP], tl.int32)
    first = block * subs * SUB
    end = first + subs * SUB
    while first < end:
        n = first + lane
        # Compared at full width: an int64 id must not wrap into range.
        id_n = tl.load(ids_N + n, mask=n < N, other=-1)
        valid = (id_n >= 0) & (id_n < E)
        if tl.max((id_n >= E).to(tl.int32)) > 0:
            tl.atomic_or(status, 2)
        e = tl.where(valid, id_n, 0).to(tl.int32)
        # Invalid routes get a key of their own, so that they precede nobody.
        key = tl.where(valid, e, -1)
        earlier = (key[:, None] == key[None, :]) & (lane[None, :] < lane[:, None])
        within = tl.sum(earlier.to(tl.int32), axis=1) + tl.gather(seen_E, e, axis=0)
        tl.store(within_N + n, within, mask=n < N)
        seen_E += tl.histogram(e, EP, mask=valid)
        first += SUB
    e = tl.arange(0, EP)
    tl.store(before_JE + block * E + e, seen_E, mask=e < E)


@triton.jit(do_not_specialize=["blocks", "layer", "epoch", "version", "policy", "tokens", "me"])
def _push(
    before_JE, status, ptrs_R, blocks, layer, epoch, version, policy, tokens, me,
    R: tl.constexpr, E: tl.constexpr, JP: tl.constexpr, EB: tl.constexpr, HEADER: tl.constexpr,
):  # fmt: skip
    j = tl.arange(0, JP)[:, None]
    e = tl.program_id(0) * EB + tl.arange(0, EB)
    at_JE = before_JE + j * E + e[None, :]
    in_JE = (j < blocks) & (e[None, :] < E)
    count_JE = tl.load(at_JE, mask=in_JE, other=0)
    total_E = tl.sum(count_JE, axis=0)
    word = tl.arange(0, 8)
    header = tl.where(word == 0, layer, 0) + tl.where(word == 1, epoch, 0)
    header += tl.where(word == 2, version, 0) + tl.where(word == 3, policy, 0)
    header += tl.where(word == 4, tokens, 0)
    for r in range(R):
        row = tl.load(ptrs_R + r).to(tl.pointer_type(tl.int32)) + me.to(tl.int64) * (HEADER + E)
        tl.store(row + HEADER + e, total_E, mask=e < E)
        if tl.program_id(0) == 0:
            tl.store(row + word, header.to(tl.int32), mask=word < HEADER)
    if tl.program_id(0) == 0:
        tl.store(status + 1, tl.load(status + 1) + 1)
    tl.store(at_JE, tl.cumsum(count_JE, axis=0) - count_JE, mask=in_JE)


@triton.jit
def _check(counts_RW, status, W: tl.constexpr, R: tl.constexpr, RP: tl.constexpr):
    r, word = tl.arange(0, RP)[:, None], tl.arange(0, 4)[None, :]
    first = tl.load(counts_RW + word)
    mine = tl.load(counts_RW + r * W + word, mask=r < R, other=0)
    differ = ((mine != first) & (r < R)).to(tl.int32)
    if tl.max(tl.max(differ, axis=1), axis=0) > 0:
        tl.atomic_or(status, 1)


_launch_count = FastLaunch(_count)
_launch_push = FastLaunch(_push)
_launch_check = FastLaunch(_check)


def count_routes(ids_TK: Tensor, scratch: RouteScratch, num_experts: int) -> None:
    """Block histograms of this rank's valid routes, into ``scratch``.

    Ids below zero are not routes. Ids of E and above are dropped and set ``BAD_EXPERT``.

    Args:
        ids_TK: int32 or int64, contiguous.
    """
    N = ids_TK.numel()
    if N == 0:
        return
    blocks, per_block = blocking(N)
    _launch_count(
        blocks,
        ids_TK, scratch.before_JE, scratch.within_N, scratch.status, N, per_block // SUB,
        E=num_experts, EP=max(pow2(num_experts), SUB), SUB=SUB,
    )  # fmt: skip


def push_counts(
    scratch: RouteScratch,
    header: tuple[int, int, int, int, int],
    ptrs_R: Tensor,
    me: int,
    num_experts: int,
) -> None:
    """Store row ``me`` of every rank's counts window, and make ``scratch`` ready to place routes.

    Args:
        header: layer, epoch, version, policy, and the tokens that ``count_routes`` saw.
        ptrs_R: int64, addresses of the counts windows int32 ``[R, HEADER + E]``.
    """
    blocks = blocking(header[4] * scratch.top_k)[0]
    _launch_push(
        ceil_div(num_experts, EXPERTS),
        scratch.before_JE, scratch.status, ptrs_R, blocks, *header, me,
        R=ptrs_R.numel(), E=num_experts, JP=pow2(blocks), EB=EXPERTS, HEADER=HEADER,
    )  # fmt: skip


def check_headers(counts_RW: Tensor, me_status: Tensor) -> None:
    """Set ``HEADERS_DIFFER`` in the status word unless all rows agree in their first words.

    Args:
        counts_RW: int32 ``[R, HEADER + E]``, this rank's counts window.
        me_status: int32 ``[1]``.
    """
    R, W = counts_RW.shape
    _launch_check(1, counts_RW, me_status, W=W, R=R, RP=pow2(R), num_warps=1)


def count_ref(ids_TK: Tensor, num_experts: int) -> list[int]:
    """Oracle: routes per expert, one at a time."""
    counts = [0] * num_experts
    for e in ids_TK.reshape(-1).tolist():
        if 0 <= e < num_experts:
            counts[e] += 1
    return counts
