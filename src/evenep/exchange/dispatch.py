"""Rows to their experts: one payload per token and destination rank, at its final place."""

from __future__ import annotations

import torch
from torch import Tensor

from ..transport import Put
from .buffers import Buffers
from .routes import Routes


def dispatch_puts(
    buffers: Buffers, routes: Routes, x_TH: Tensor, weights_TK: Tensor | None
) -> list[Put]:
    """Everything this rank writes into its peers' receive buffers.

    Args:
        x_TH: BF16 rows of this rank's tokens.
        weights_TK: fp32 route weights if the experts' side needs them, else None.
    """
    lead_rows, lead_tokens = routes.leading()
    rows = routes.by_rank(routes.row_N)
    primaries = routes.by_rank(routes.primary_N.to(torch.int32))
    puts = []
    for peer, count in enumerate(routes.splits):
        if count == 0:
            continue
        payload = x_TH.index_select(0, lead_tokens[peer])
        puts.append(Put(buffers.rows, peer, lead_rows[peer], payload))
        puts.append(Put(buffers.primary, peer, rows[peer], primaries[peer]))
    if weights_TK is not None:
        weights = routes.by_rank(weights_TK.reshape(-1)[routes.flat_N])
        puts += [
            Put(buffers.weight, peer, rows[peer], weights[peer])
            for peer, count in enumerate(routes.splits)
            if count
        ]
    return puts
