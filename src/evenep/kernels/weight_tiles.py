"""Tiles of stored weights as BF16 operands of a dot, decoded in registers.

N weight rows, K columns; a tile is ``[BN, BK]`` at column k0 of the rows n (any rows). MXFP4 values
are exact for scale bytes 0..252; E4M3 codes are exact, and a block's scale multiplies the fp32 sum
of its 128 columns.

Worked example: a nibble becomes BF16 by moving its bits. 0b0111 (6) << 6 is exponent field 3,
mantissa .1, so 1.5 * 2^(3 - 127); times 2^126 that is 6. 0b0001 becomes a subnormal, and the same
product makes it 0.5. An E4M3 code moves likewise: 0b0_1000_100 (3) << 4 is field 8, mantissa .1, so
1.5 * 2^(8 - 127); times 2^120 that is 3.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .bf16 import dot_bf16, mul_bf16


@triton.jit
def _power_of_two_bf16(field):
    """BF16 whose exponent field is ``field``; 0 gives 2^-127, a subnormal."""
    return tl.where(field == 0, 0x40, field << 7).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def load_tile(base, offset, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(base + offset, mask=mask, other=0.0)
    else:
        return tl.load(base + offset)


@triton.jit
def _load_bf16(w, n, k0, K, K_TAIL: tl.constexpr, BK: tl.constexpr):
    k = tl.arange(0, BK)
    return load_tile(w + n[:, None] * K + k[None, :], k0, (k0 + k < K)[None, :], K_TAIL)


@triton.jit
def _load_mxfp4(w, s, n, k0, K, BN: tl.constexpr, K_TAIL: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] values, exact for scale bytes 0..252."""
    half = K // 2
    groups = K // 32
    j = tl.arange(0, BK // 2)
    q = tl.arange(0, BK // 32)
    if K_TAIL:
        mask_j = (k0 // 2 + j < half)[None, :]
        mask_q = (k0 // 32 + q < groups)[None, :]
        packed = tl.load(w + n[:, None] * half + k0 // 2 + j[None, :], mask=mask_j, other=0)
        exponent = tl.load(s + n[:, None] * groups + k0 // 32 + q[None, :], mask=mask_q, other=0)
    else:
        packed = tl.load(w + n[:, None] * half + j[None, :] + k0 // 2)
        exponent = tl.load(s + n[:, None] * groups + q[None, :] + k0 // 32)
    packed = packed.to(tl.uint16)
    low = ((packed & 0x07) << 6) | ((packed & 0x08) << 12)
    high = ((packed & 0x70) << 2) | ((packed & 0x80) << 8)
    bits = tl.reshape(tl.join(low, high), (BN, BK // 32, 32))
    lift = _power_of_two_bf16(tl.full((1, 1, 1), 126 + 127, tl.uint16))
    values = mul_bf16(bits.to(tl.bfloat16, bitcast=True), lift)
    scale = _power_of_two_bf16(exponent.to(tl.uint16))
    return tl.reshape(mul_bf16(values, scale[:, :, None]), (BN, BK))


@triton.jit
def _load_fp8(w, n, k0, K, K_TAIL: tl.constexpr, BK: tl.constexpr):
    """[BN, BK] E4M3 codes as BF16, exact, without their scale."""
    k = tl.arange(0, BK)
    if K_TAIL:
        code = tl.load(w + n[:, None] * K + k0 + k[None, :], mask=(k0 + k < K)[None, :], other=0)
    else:
        code = tl.load(w + n[:, None] * K + k[None, :] + k0)
    code = code.to(tl.uint16)
    size = code & 0x7F
    lift = _power_of_two_bf16(tl.full((1, 1), 120 + 127, tl.uint16))
    values = mul_bf16(((size << 4) | ((code & 0x80) << 8)).to(tl.bfloat16, bitcast=True), lift)
    nan = tl.full((1, 1), 0x7FC0, tl.uint16).to(tl.bfloat16, bitcast=True)
    return tl.where(size == 0x7F, nan, values)


@triton.jit
def add_products(
    acc,
    w,
    s,
    n,
    x_T,
    k0,
    K,
    FORMAT: tl.constexpr,
    K_TAIL: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
):
    """``acc`` plus the products of columns k0 … of weight rows n."""
    if FORMAT == "bf16":
        return dot_bf16(_load_bf16(w, n, k0, K, K_TAIL, BK), x_T, acc)
    elif FORMAT == "mxfp4":
        return dot_bf16(_load_mxfp4(w, s, n, k0, K, BN, K_TAIL, BK), x_T, acc)
    else:
        tl.static_assert(FORMAT == "fp8")
        scale = tl.load(s + (n // 128) * tl.cdiv(K, 128) + k0 // 128)
        zero = tl.zeros((BN, BM), tl.float32)
        return acc + dot_bf16(_load_fp8(w, n, k0, K, K_TAIL, BK), x_T, zero) * scale[:, None]
