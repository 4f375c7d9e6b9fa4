"""MXFP4 bytes and their values (OCP MX v1.0; the layout compressed-tensors writes).

A row of ``in`` columns is ``in / 2`` bytes: byte j holds column 2j in its low nibble and column
2j + 1 in its high nibble. A nibble is E2M1: bit 3 the sign, bits 0..2 pick a magnitude of
``{0, 0.5, 1, 1.5, 2, 3, 4, 6}``. Each group of 32 columns shares one E8M0 byte b, the factor
``2 ** (b - 127)``. Every value is exact in BF16 for b in 0..252.

Worked example: bytes ``21 9F 80 35`` under b = 120 (2^-7) are
``0.5, 1, -6, -0.5, 0, -0, 3, 1.5`` times 0.0078125.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..config import EPConfig
from ..errors import InputError, explain
from .base import TensorSpec, WeightFormat

GROUP = 32
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


@functools.cache
def _pair_table() -> Tensor:
    """All 256 bytes as their two BF16 values, one int32 each (so a look-up moves both)."""
    values = torch.tensor(E2M1, dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack([values[byte & 15], values[byte >> 4]], dim=1).contiguous()
    return pairs.view(torch.int32).squeeze(1)


@functools.cache
def _scale_table() -> Tensor:
    """``2 ** (byte - 127)`` in fp32; byte 0 is a subnormal, byte 255 is NaN."""
    exponent = torch.arange(256, dtype=torch.float64) - 127
    table = torch.pow(2.0, exponent)
    table[255] = float("nan")
    return table.float()


def decode_mxfp4(packed_NJ: Tensor, scale_NG: Tensor, dtype: torch.dtype) -> Tensor:
    """Packed rows ``[N, K/2]`` and scales ``[N, K/32]``, both uint8, to values ``[N, K]``."""
    N, J = packed_NJ.shape
    pairs, powers = _pair_table().to(packed_NJ.device), _scale_table().to(packed_NJ.device)
    codes = pairs.index_select(0, packed_NJ.reshape(-1).int()).view(torch.bfloat16)
    scale_NG1 = powers.index_select(0, scale_NG.reshape(-1).int()).view(N, -1, 1)
    grouped_NGC = codes.view(N, -1, GROUP).to(dtype)
    return grouped_NGC.mul_(scale_NG1.to(dtype)).view(N, 2 * J)


class MXFP4(WeightFormat):
    """OCP MXFP4 as Kimi-K3 stores it."""

    name = "mxfp4"

    def matrices(self, cfg: EPConfig) -> list[TensorSpec]:
        W, H, I = cfg.w13_rows, cfg.hidden_size, cfg.intermediate_size  # noqa: E741
        return [
            TensorSpec("w13_packed", (W, H // 2), torch.uint8),
            TensorSpec("w13_scale", (W, H // GROUP), torch.uint8),
            TensorSpec("w2_packed", (H, I // 2), torch.uint8),
            TensorSpec("w2_scale", (H, I // GROUP), torch.uint8),
        ]

    def decode(self, tensors: Mapping[str, Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        return (
            decode_mxfp4(tensors["w13_packed"], tensors["w13_scale"], dtype),
            decode_mxfp4(tensors["w2_packed"], tensors["w2_scale"], dtype),
        )

    def fill_random(self, tensors: Mapping[str, Tensor], generator: torch.Generator) -> None:
        for name in ("w13", "w2"):
            packed, scale = tensors[f"{name}_packed"], tensors[f"{name}_scale"]
            packed.random_(0, 256, generator=generator)
            # E2M1 codes have mean square 8.56; aim at unit gain, vary the scale per group.
            middle = 127 - round(math.log2((2 * packed.shape[-1] * 8.56) ** 0.5))
            scale.random_(middle - 2, middle + 2, generator=generator)

    def validate(self, tensors: Mapping[str, Tensor], where: str) -> None:
        for name in ("w13_scale", "w2_scale"):
            top = int(tensors[name].max())
            if top > 252:
                meaning = "NaN" if top == 255 else "a scale whose larger codes overflow BF16"
                raise InputError(
                    explain(
                        f"{name} holds byte {top}, {meaning}",
                        where=where,
                        expected="E8M0 bytes 0..252",
                        got=top,
                    )
                )
