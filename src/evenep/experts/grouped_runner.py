"""BF16 through ``torch.nn.functional.grouped_mm``: always there, right, near the top in prefill.

On SM90 and SM100 torch multiplies groups whose ends the device knows; rows past the last end cost
nothing. Elsewhere it would read the ends on the host, so it is refused there.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from ..config import EPConfig
from ..errors import UnsupportedError, explain
from ..kernels.group_tiles import Tiles
from .compact import CompactRunner

_ALIGNED = 8  # BF16 elements in the 16 bytes that rows must be a multiple of
_CAPABILITIES = (9, 10)


class GroupedRunner(CompactRunner):
    """``torch`` on a GPU. ``sms`` binds its copies and its activation, not the GEMMs."""

    name = "torch"
    batch_invariant = True

    def __init__(self, cfg: EPConfig, device: torch.device) -> None:
        reason = refusal(cfg, device)
        if reason:
            raise UnsupportedError(
                explain(f"runner 'torch' {reason}", where=str(device), fix="use runner 'triton'")
            )
        super().__init__(cfg, device)

    def gemm(
        self,
        x_MK: Tensor,
        tensors: Mapping[str, Tensor],
        name: str,
        tiles: Tiles,
        sms: int | None,
    ) -> Tensor:
        return grouped_mm(x_MK, tensors[name].transpose(1, 2), offs=tiles.ends_G)


def refusal(cfg: EPConfig, device: torch.device) -> str:
    """Why torch can't run this config on this device; empty when it can."""
    if cfg.weight_format != "bf16":
        return f"multiplies BF16 on a GPU, not {cfg.weight_format}"
    if cfg.hidden_size % _ALIGNED or cfg.intermediate_size % _ALIGNED:
        return "needs hidden_size and intermediate_size to be multiples of 8"
    if device.type == "cuda":
        major = torch.cuda.get_device_capability(device)[0]
        if major not in _CAPABILITIES:
            return f"multiplies groups without the host on SM90 and SM100 only, not SM{major}x"
    return ""
