"""Expert outputs back to their tokens, summed as the config's reduction defines (C5).

T tokens, K top-k, H row width, M rows with a route on this rank, U payload rows among them.
``exact`` brings every route's output home and sums there: fp32, k ascending, one rounding.
``compact`` sums a token's routes on each rank first (fp32, row order, one rounding to BF16), brings
one row per token and rank home and sums those in fp32, rank ascending, with one more rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .buffers import Arrived
from .routes import Routes


def fold(arrived: Arrived, *, weighted: bool) -> None:
    """``compact``, at the experts: each payload row becomes the sum of its token's routes here."""
    lead_U, slot_M = torch.unique(arrived.primary_M, return_inverse=True)
    out_MH = arrived.rows_NH.index_select(0, arrived.real_M).float()
    if weighted:
        out_MH *= arrived.weight_N.index_select(0, arrived.real_M)[:, None]
    sum_UH = torch.zeros(lead_U.numel(), out_MH.shape[1])
    sum_UH.index_add_(0, slot_M, out_MH)
    arrived.rows_NH.index_copy_(0, lead_U, sum_UH.to(arrived.rows_NH.dtype))


def rows_to_pull(routes: Routes, reduction: str) -> tuple[Tensor, ...]:
    """The rows this rank reads back from each peer."""
    return routes.leading()[0] if reduction == "compact" else routes.by_rank(routes.row_N)


def sum_compact(routes: Routes, got: list[Tensor], T: int, H: int) -> Tensor:
    """``compact``, at the tokens: one partial per rank, rank ascending; BF16 ``[T, H]``."""
    y_TH = torch.zeros(T, H)
    for tokens, partial in zip(routes.leading()[1], got, strict=True):
        y_TH.index_add_(0, tokens, partial.float())
    return y_TH.to(torch.bfloat16)


def sum_exact(
    routes: Routes, got: list[Tensor], weights_TK: Tensor | None, T: int, K: int, H: int
) -> Tensor:
    """``exact``, at the tokens: fp32 over k ascending, one rounding; BF16 ``[T, H]``.

    Multiply and add round separately, so that a fused multiply-add can't change the bits.
    """
    out_nH = torch.zeros(T * K, H, dtype=torch.bfloat16)
    for flat, rows in zip(routes.by_rank(routes.flat_N), got, strict=True):
        out_nH.index_copy_(0, flat, rows)
    out_TKH = out_nH.view(T, K, H)
    routed_TK = torch.zeros(T * K, dtype=torch.bool)
    routed_TK[routes.flat_N] = True
    y_TH = torch.zeros(T, H)
    for k in range(K):
        term_TH = out_TKH[:, k].float()
        if weights_TK is not None:
            weight_T = torch.where(routed_TK.view(T, K)[:, k], weights_TK[:, k], 0.0)
            term_TH = term_TH * weight_T[:, None]
        y_TH = y_TH + term_TH
    return y_TH.to(torch.bfloat16)
