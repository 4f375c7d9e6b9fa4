"""Runners around a library's grouped GEMM: rows gathered into compact scratch, outputs put back.

N receive rows, M compact rows (the groups' rows one after the other), H row width, I FFN width,
W columns of the first GEMM's output, G groups. Five launches and two GEMMs:

    find tiles, gather x [M, H], GEMM -> h [M, W], activate -> a [M, I], GEMM -> o [M, H], scatter
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import EPConfig
from ..errors import StateError, explain
from ..kernels.activation import activate
from ..kernels.group_rows import gather_rows, scatter_rows
from ..kernels.group_tiles import Tiles, group_tiles
from .device import DeviceRunner, Groups

_BLOCK = 16  # rows of a tile that the copies and the activation walk


class CompactRunner(DeviceRunner):
    """What such runners share; a subclass multiplies.

    Scratch belongs to the runner: steps that run at once on different streams need one each.
    """

    align = 1
    """A group's compact rows start at a multiple of at most this."""

    def __init__(self, cfg: EPConfig, device: torch.device) -> None:
        super().__init__(cfg, device)
        self._reserved = 0
        self._x_MH = self._a_MI = torch.empty(0, dtype=torch.bfloat16, device=device)

    def align_for(self, groups: Groups) -> int:
        """What these groups' compact rows start at multiples of."""
        return self.align

    def compact_rows(self, rows: int) -> int:
        """Compact rows that hold ``rows`` rows of any groups, padding included."""
        groups = min(rows, self.cfg.num_experts + self.cfg.slots)
        return -(-(rows + groups * (self.align - 1)) // self.align) * self.align

    def reserve(self, rows: int) -> None:
        if rows <= self._reserved:
            return
        self._reserved = rows
        M = self.compact_rows(rows)
        self._x_MH = self._empty(M, self.cfg.hidden_size)
        self._a_MI = self._empty(M, self.cfg.intermediate_size)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(*shape, dtype=torch.bfloat16, device=self.device)

    @abstractmethod
    def gemm(
        self,
        x_MK: Tensor,
        tensors: Mapping[str, Tensor],
        name: str,
        tiles: Tiles,
        sms: int | None,
    ) -> Tensor:
        """The groups' compact rows times ``w13`` or ``w2``, rounded to BF16; others undefined."""

    def run(
        self, rows_NH: Tensor, weight_N: Tensor | None, groups: Groups, sms: int | None = None
    ) -> None:
        if groups.rows == 0:
            return
        require_reserved(groups.rows, self._reserved, self.name)
        cfg, tensors = self.cfg, groups.tensors
        M = self.compact_rows(groups.rows)
        x_MH, a_MI = self._x_MH[:M], self._a_MI[:M]
        align = self.align_for(groups)
        tiles = group_tiles(groups.start_G, groups.count_G, groups.rows, _BLOCK, align)
        gather_rows(rows_NH, x_MH, tiles, weight_N if cfg.route_weight == "input" else None, sms)
        activate(
            self.gemm(x_MH, tensors, "w13", tiles, sms),
            a_MI,
            tiles,
            cfg.act,
            cfg.gate_up_order,
            cfg.gate_up_interleave,
            weight_N=weight_N if cfg.route_weight == "activation" else None,
            bias_GW=tensors.get("w13_bias"),
            sms=sms,
        )
        o_MH = self.gemm(a_MI, tensors, "w2", tiles, sms)
        scatter_rows(o_MH, rows_NH, tiles, tensors.get("w2_bias"), sms)


def require_reserved(rows: int, reserved: int, name: str) -> None:
    """Refuse a call that scratch is too small for."""
    if rows > reserved:
        raise StateError(
            explain(
                f"runner '{name}' has no scratch for this many rows",
                expected=f"at most {reserved}",
                got=rows,
                fix="call reserve() with the largest Groups.rows before the first run",
            )
        )
