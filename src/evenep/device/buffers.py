"""What a step on a GPU writes into: windows that peers reach, and this rank's own scratch.

R ranks, E experts, B slots, S tokens capacity, K top-k, N receive rows, H row width, Z statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..config import EPConfig
from ..kernels.count import HEADER, RouteScratch
from ..plan.capacity import cap_routes, receive_rows
from ..transport import DeviceTransport, Window, WindowSpec, addresses
from .planner import DevicePlan, DevicePlanner

IMPOSSIBLE = -(2**30)
"""A row number that no kernel may follow; fills index buffers in poison mode."""


@dataclass(frozen=True, slots=True, eq=False)
class Lane:
    """One lane's memory; a step leases all of it.

    Attributes:
        counts: int32 ``[R, HEADER + E]``: row r is what rank r said this step.
        rows: BF16 ``[N, H]``: dispatched rows, overwritten by expert outputs.
        chain: int32 ``[N]``: links the rows of one token (see ``kernels.dispatch``).
        weight: fp32 ``[N]``: route weights.
        counts_R, rows_R, chain_R, weight_R: int64 ``[R]``, where every rank has each of them.
        plan: this rank's view of the step's plan.
        routes: scratch from counting to placing.
        dest_SK, row_SK: int32, where each of this rank's routes went; -1: nowhere.
    """

    counts: Window
    rows: Window
    chain: Window
    weight: Window
    counts_R: Tensor
    rows_R: Tensor
    chain_R: Tensor
    weight_R: Tensor
    plan: DevicePlan
    routes: RouteScratch
    dest_SK: Tensor
    row_SK: Tensor

    @classmethod
    def make(
        cls, cfg: EPConfig, home_rows: int, transport: DeviceTransport, planner: DevicePlanner
    ) -> list[Lane]:
        """One per step in flight. Collective."""
        rows = rows_capacity(cfg, home_rows)
        specs = [
            spec
            for lane in range(cfg.in_flight)
            for spec in (
                WindowSpec(f"counts.{lane}", (cfg.ranks, HEADER + cfg.num_experts), torch.int32),
                WindowSpec(f"rows.{lane}", (rows, cfg.hidden_size), torch.bfloat16),
                WindowSpec(f"chain.{lane}", (rows,), torch.int32),
                WindowSpec(f"weight.{lane}", (rows,), torch.float32),
            )
        ]
        made = transport.windows(specs)
        return [
            cls._over(cfg, made[4 * lane : 4 * lane + 4], transport.device, planner)
            for lane in range(cfg.in_flight)
        ]

    @classmethod
    def _over(
        cls, cfg: EPConfig, windows: Sequence[Window], device: torch.device, planner: DevicePlanner
    ) -> Lane:
        counts, rows, chain, weight = windows
        S, K = cfg.max_tokens_per_rank, cfg.top_k
        return cls(
            counts=counts,
            rows=rows,
            chain=chain,
            weight=weight,
            counts_R=addresses(counts),
            rows_R=addresses(rows),
            chain_R=addresses(chain),
            weight_R=addresses(weight),
            plan=planner.buffers(),
            routes=RouteScratch.make(S, K, cfg.num_experts, device),
            dest_SK=torch.full((S, K), -1, dtype=torch.int32, device=device),
            row_SK=torch.full((S, K), -1, dtype=torch.int32, device=device),
        )

    @property
    def counts_RE(self) -> Tensor:
        """The counts without their headers, a strided view."""
        return self.counts.local[:, HEADER:]

    def poison(self) -> None:
        """Make use before definition visible: NaN payload, impossible row numbers."""
        self.rows.local.fill_(float("nan"))
        self.weight.local.fill_(float("nan"))
        self.chain.local.fill_(IMPOSSIBLE)


def rows_capacity(cfg: EPConfig, home_rows: int) -> int:
    """Receive rows of a lane, N."""
    cap = cap_routes(cfg, home_rows)
    return receive_rows(cap, home_rows + cfg.slots, cfg.row_alignment)
