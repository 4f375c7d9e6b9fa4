"""From router ids to rows: where each route of this rank goes, and which rows carry payload.

T tokens, K top-k, R ranks, N valid routes of this rank (ids below zero are not routes).
A token's row travels once to each destination rank, at the place of its route with the smallest k
there, the *primary*; its other routes to that rank only say which primary to copy.

Worked example: K = 3, token 0 routes to experts on ranks (1, 0, 1) at rows (4, 9, 7). Its primaries
are row 4 on rank 1 and row 9 on rank 0; row 7 on rank 1 names row 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan.layout import Runs


@dataclass(frozen=True, slots=True, eq=False)
class Routes:
    """This rank's routes, grouped by destination rank (ascending); all int64.

    Attributes:
        flat_N: ``token * K + k`` of each route.
        token_N: its token.
        row_N: its row on the destination.
        primary_N: the destination row that carries its token's payload.
        leads_N: bool, the route is its own primary.
        splits: routes per destination rank.
    """

    flat_N: Tensor
    token_N: Tensor
    row_N: Tensor
    primary_N: Tensor
    leads_N: Tensor
    splits: tuple[int, ...]

    def by_rank(self, values_N: Tensor) -> tuple[Tensor, ...]:
        """Cut something per route into one piece per destination rank."""
        return torch.split(values_N, list(self.splits))

    def leading(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """``(rows, tokens)`` of the primaries per destination rank."""
        leads = self.by_rank(self.leads_N)
        rows = tuple(r[m] for r, m in zip(self.by_rank(self.row_N), leads, strict=True))
        tokens = tuple(t[m] for t, m in zip(self.by_rank(self.token_N), leads, strict=True))
        return rows, tokens


def count_routes(ids_TK: Tensor, num_experts: int) -> Tensor:
    """Valid routes per expert, int64 ``[E]``; ids below zero are not counted."""
    flat = ids_TK.reshape(-1).long()
    # One extra bin takes what is not routed: no mask, no size that depends on the data.
    bins = torch.where(flat < 0, num_experts, flat)
    counts = torch.zeros(num_experts + 1, dtype=torch.int64)
    return counts.scatter_add_(0, bins, torch.ones_like(bins))[:num_experts]


def build_routes(ids_TK: Tensor, runs: Runs, ranks: int) -> Routes:
    """Resolve this rank's routes against its runs of the plan."""
    T, K = ids_TK.shape
    ids_n = ids_TK.reshape(-1).long()
    valid_n = torch.nonzero(ids_n >= 0).squeeze(1)
    # Stable by expert: runs of the plan are in this very order.
    flat_N = valid_n[torch.argsort(ids_n[valid_n], stable=True)]
    count_M = torch.from_numpy(runs.count_N)
    dest_N = torch.from_numpy(runs.dest_N).repeat_interleave(count_M)
    first_M = torch.cumsum(count_M, 0) - count_M
    step_N = torch.arange(flat_N.numel()) - first_M.repeat_interleave(count_M)
    row_N = torch.from_numpy(runs.row_N).repeat_interleave(count_M) + step_N
    by_dest = torch.argsort(dest_N, stable=True)
    flat_N, dest_N, row_N = flat_N[by_dest], dest_N[by_dest], row_N[by_dest]
    token_N = flat_N // max(K, 1)
    meeting_N = token_N * ranks + dest_N
    leader = torch.full((T * ranks,), T * K, dtype=torch.int64)
    leader.scatter_reduce_(0, meeting_N, flat_N, "amin")
    row_of_flat = torch.empty(T * K, dtype=torch.int64)
    row_of_flat[flat_N] = row_N
    lead_N = leader[meeting_N]
    splits = torch.bincount(dest_N, minlength=ranks).tolist()
    return Routes(flat_N, token_N, row_N, row_of_flat[lead_N], lead_N == flat_N, tuple(splits))
