"""BF16: plain matrices."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import EPConfig
from .base import TensorSpec, WeightFormat


class BF16(WeightFormat):
    """Plain matrices."""

    name = "bf16"

    def matrices(self, cfg: EPConfig) -> list[TensorSpec]:
        return [
            TensorSpec("w13", (cfg.w13_rows, cfg.hidden_size), torch.bfloat16),
            TensorSpec("w2", (cfg.hidden_size, cfg.intermediate_size), torch.bfloat16),
        ]

    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return tensors["w13"].to(dtype), tensors["w2"].to(dtype)

    def fill_random(self, tensors: Mapping[str, Tensor], generator: torch.Generator) -> None:
        for name in ("w13", "w2"):
            fan_in = tensors[name].shape[-1]
            values = (
                torch.randn(tensors[name].shape, generator=generator, device=generator.device)
                * fan_in**-0.5
            )
            tensors[name].copy_(values)
