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

import torch
from torch import Tensor

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
    codes = _pair_table().index_select(0, packed_NJ.reshape(-1).int()).view(torch.bfloat16)
    scale_NG1 = _scale_table().index_select(0, scale_NG.reshape(-1).int()).view(N, -1, 1)
    grouped_NGC = codes.view(N, -1, GROUP).to(dtype)
    return grouped_NGC.mul_(scale_NG1.to(dtype)).view(N, 2 * J)
