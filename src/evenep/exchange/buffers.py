"""The receive buffer of one lane, leased to one step at a time (C6)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import EPConfig
from ..plan.capacity import cap_routes, receive_rows
from ..plan.layout import Segments
from ..transport import Transport, Window, WindowSpec


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """Windows of one lane; N is the capacity in rows, a step uses the front of it.

    Attributes:
        rows: BF16 ``[N, H]``: dispatched rows, overwritten by expert outputs.
        primary: int32 ``[N]``: the row that carries each route's payload.
        weight: fp32 ``[N]``: route weights.
    """

    rows: Window
    primary: Window
    weight: Window

    @classmethod
    def make(cls, cfg: EPConfig, home_rows: int, transport: Transport) -> list[Buffers]:
        """One per lane. Collective."""
        cap = cap_routes(cfg, home_rows)
        n = receive_rows(cap, home_rows + cfg.slots, cfg.row_alignment)
        specs = [
            spec
            for lane in range(cfg.in_flight)
            for spec in (
                WindowSpec(f"rows.{lane}", (n, cfg.hidden_size), torch.bfloat16),
                WindowSpec(f"primary.{lane}", (n,), torch.int32),
                WindowSpec(f"weight.{lane}", (n,), torch.float32),
            )
        ]
        made = transport.windows(specs)
        return [cls(*made[3 * lane : 3 * lane + 3]) for lane in range(cfg.in_flight)]

    def poison(self, rows: int | None = None) -> None:
        """Make use before definition visible: NaN payload, impossible row numbers."""
        self.rows.local[:rows].fill_(float("nan"))
        self.weight.local[:rows].fill_(float("nan"))
        self.primary.local[:rows].fill_(-1)


@dataclass(frozen=True, slots=True, eq=False)
class Arrived:
    """The rows of one step once every peer's are in.

    Attributes:
        rows_NH: the step's rows, padding included, in place.
        weight_N: route weights of the rows, fp32.
        real_M: row numbers that hold a route, ascending.
        primary_M: the payload row of each.
    """

    rows_NH: Tensor
    weight_N: Tensor
    real_M: Tensor
    primary_M: Tensor


def settle(buffers: Buffers, segments: Segments) -> Arrived:
    """Zero the padding, then copy each payload to the other routes of its token here."""
    n = segments.rows
    rows_NH = buffers.rows.local[:n]
    weight_N = buffers.weight.local[:n]
    start_G, count_G = torch.from_numpy(segments.start_G), torch.from_numpy(segments.count_G)
    first_G = torch.cumsum(count_G, 0) - count_G
    real_M = torch.arange(int(count_G.sum()))
    real_M = real_M + (start_G - first_G).repeat_interleave(count_G)
    if n > real_M.numel():
        padding = torch.ones(n, dtype=torch.bool)
        padding[real_M] = False
        rows_NH[padding] = 0
        weight_N[padding] = 0
    primary_M = buffers.primary.local[:n].index_select(0, real_M).long()
    copies = primary_M != real_M
    if copies.any():
        rows_NH.index_copy_(0, real_M[copies], rows_NH.index_select(0, primary_M[copies]))
    return Arrived(rows_NH, weight_N, real_M, primary_M)
