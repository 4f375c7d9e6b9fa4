"""BF16 in kernels: one rounding, the same on a GPU and in Triton's interpreter.

The interpreter keeps BF16 as the 16 bits it is: it truncates where a GPU rounds, and multiplies the
bit patterns as integers where a GPU multiplies values. Kernels therefore round, widen, multiply and
feed ``tl.dot`` through these four; on a GPU each is the plain operation.

Worked example: 1.00390625 = 1 + 2^-8 lies half-way between the BF16 neighbours 1 (bits 3F80) and
1.0078125 (3F81); fp32 bits 3F808000. Nearest-even adds 7FFF + 0 (bit 16 is even) = 3F80FFFF and
keeps the upper half: 3F80, so 1. For 1.01171875 (3F818000) bit 16 is odd: + 8000 = 3F820000, so
3F82.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = bool(triton.knobs.runtime.interpret)
_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def round_bf16(x):
    """fp32 to BF16, nearest even; NaN stays NaN."""
    if _INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        up = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return tl.where(x == x, up, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def widen(x):
    """BF16 to fp32, exact (subnormals too)."""
    if _INTERPRETED:
        bits = x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def mul_bf16(x, y):
    """The BF16 product of BF16 values, one rounding."""
    if _INTERPRETED:
        return round_bf16(widen(x) * widen(y))
    else:
        return x * y


@triton.jit
def dot_bf16(x, y, acc):
    """``acc + x @ y`` of BF16 operands, fp32 accumulation."""
    if _INTERPRETED:
        return tl.dot(widen(x), widen(y), acc)
    else:
        return tl.dot(x, y, acc)
