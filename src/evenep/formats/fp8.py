"""FP8: E4M3 codes with one FP32 scale per 128 x 128 block (DeepSeek-V3, Kimi-K2)."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import EPConfig
from .base import TensorSpec, WeightFormat

BLOCK = 128  # rows and columns that share one scale


class FP8(WeightFormat):
    """E4M3 with one FP32 scale per 128 x 128 block (DeepSeek-V3, Kimi-K2)."""

    name = "fp8"

    def matrices(self, cfg: EPConfig) -> list[TensorSpec]:
        specs = []
        for name, rows, cols in (
            ("w13", cfg.w13_rows, cfg.hidden_size),
            ("w2", cfg.hidden_size, cfg.intermediate_size),
        ):
            blocks = (math.ceil(rows / BLOCK), math.ceil(cols / BLOCK))
            specs.append(TensorSpec(name, (rows, cols), torch.float8_e4m3fn))
            specs.append(TensorSpec(f"{name}_scale", blocks, torch.float32))
        return specs

    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            decode_fp8_block(tensors["w13"], tensors["w13_scale"], dtype),
            decode_fp8_block(tensors["w2"], tensors["w2_scale"], dtype),
        )

    def fill_random(self, tensors: Mapping[str, Tensor], generator: torch.Generator) -> None:
        for name in ("w13", "w2"):
            codes, scale = tensors[name], tensors[f"{name}_scale"]
            codes.copy_(torch.randn(codes.shape, generator=generator, device=generator.device))
            spread = torch.rand(scale.shape, generator=generator, device=generator.device) + 0.5
            scale.copy_(spread * codes.shape[-1] ** -0.5)


def decode_fp8_block(codes_NK: Tensor, scale_nk: Tensor, dtype: torch.dtype) -> Tensor:
    """E4M3 codes ``[N, K]`` times the scale of their 128 x 128 block, computed in fp32."""
    N, K = codes_NK.shape
    scale_NK = scale_nk.repeat_interleave(BLOCK, 0)[:N].repeat_interleave(BLOCK, 1)[:, :K]
    return (codes_NK.float() * scale_NK).to(dtype)
