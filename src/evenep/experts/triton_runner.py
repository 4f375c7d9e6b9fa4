"""The portable GPU runner: Triton on the formats' own bytes, any GPU that Triton compiles for.

N receive rows, H row width, M compact rows (the groups' rows one after the other), I FFN width.
Scratch is compact, so it is as long as ``Groups.rows`` may be, not as the receive buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..config import EPConfig
from ..kernels.group_tiles import group_tiles
from ..kernels.grouped_gemm import BLOCK_M, GemmConfig, Matrix, config_for, down, gate_up
from .compact import require_reserved
from .device import DeviceRunner, Groups


class TritonRunner(DeviceRunner):
    """Two launches an expert layer: gate, up and activation in one, down in the other.

    The activations between them are scratch of this runner: steps that run at once on different
    streams need a runner each.

    Args:
        gemm: tile sizes for every call; None: by ``Groups.likely``. Bits do not depend on it.
    """

    name = "triton"
    batch_invariant = True

    def __init__(
        self, cfg: EPConfig, device: torch.device, *, gemm: GemmConfig | None = None
    ) -> None:
        super().__init__(cfg, device)
        self._gemm = gemm
        self._a_MI = torch.empty(0, cfg.intermediate_size, dtype=torch.bfloat16, device=device)

    @property
    def classes(self) -> Sequence[int]:
        return BLOCK_M

    def reserve(self, rows: int) -> None:
        if rows > self._a_MI.shape[0]:
            self._a_MI = self._a_MI.new_empty(rows, self.cfg.intermediate_size)

    def run(
        self, rows_NH: Tensor, weight_N: Tensor | None, groups: Groups, sms: int | None = None
    ) -> None:
        if groups.rows == 0:
            return
        require_reserved(groups.rows, self._a_MI.shape[0], self.name)
        cfg, fmt = self.cfg, self.cfg.weight_format
        gemm = self._gemm or config_for(fmt, groups.likely)
        tiles = group_tiles(groups.start_G, groups.count_G, groups.rows, gemm.block_m)
        gate_up(
            rows_NH,
            Matrix.of(fmt, groups.tensors, "w13"),
            self._a_MI,
            tiles,
            gemm,
            cfg.act,
            cfg.gate_up_order,
            cfg.gate_up_interleave,
            weigh=cfg.route_weight,
            weight_N=weight_N,
            sms=sms,
        )
        down(self._a_MI, Matrix.of(fmt, groups.tensors, "w2"), rows_NH, tiles, gemm, sms=sms)
