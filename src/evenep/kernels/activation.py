"""Between the two GEMMs, on rows of groups: bias, activation, route weight, one rounding.

M compact rows, N receive rows, I FFN width, W columns of h (2 I gated, else I), G groups.
Formulas and names are ``evenep.activation``'s; everything is fp32 inside.

    a[m, i] = rnd(act(g, u) * weight)     g, u = rnd(h + bias) at the columns of gate and up

Column i of the two halves: i and I + i of two plain halves; interleaved in granules of q,
``(i // q) * 2 q + i % q`` and q further. ``gate_first`` says which half is the gate.

Worked example: SiTU (b 4, lb 25), I = 1, h = 2, 10: g = 2, u = 10.
4 tanh(0.5) = 1.848, sigmoid(2) = 0.8808, 25 tanh(0.4) = 9.499: a = 15.46, rounded to BF16 15.4375.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..activation import Activation
from .bf16 import round_bf16, widen
from .group_tiles import Tiles
from .sizing import grid_for


@triton.jit
def tanh(x):
    """Odd series below 1/4, where 1 - exp(-2 |x|) would cancel; relative error < 4e-7."""
    size = tl.where(x < 0, -x, x)
    t = tl.exp(-2.0 * size)
    far = (1.0 - t) / (1.0 + t)
    s = tl.where(size < 0.25, x * x, 0.0)
    near = 1.0 + s * (-1 / 3 + s * (2 / 15 + s * (-17 / 315 + s * (62 / 2835 - s * 1382 / 155925))))
    return tl.where(size < 0.25, x * near, tl.where(x < 0, -far, far))


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) without overflow on either side."""
    t = tl.exp(tl.where(x < 0, x, -x))
    return tl.where(x < 0, t, 1.0) / (1.0 + t)


@triton.jit
def clamp(x, low, high):
    """Between low and high; unlike tl.clamp a NaN stays one."""
    return tl.where(x < low, low, tl.where(x > high, high, x))


@triton.jit
def act_value(
    g,
    u,
    KIND: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
):
    """The activation of fp32 gate and up values; without a gate both are u."""
    if KIND == "relu2":
        r = tl.where(u < 0, 0.0, u)
        return r * r
    elif KIND == "situ":
        return BETA * tanh(g / BETA) * sigmoid(g) * (LINEAR_BETA * tanh(u / LINEAR_BETA))
    elif KIND == "swigluoai":
        low = tl.where(g > LIMIT, LIMIT, g)
        return low * sigmoid(ALPHA * low) * (clamp(u, -LIMIT, LIMIT) + 1.0)
    elif KIND == "swiglu_clamp_before":
        low = tl.where(g > LIMIT, LIMIT, g)
        return low * sigmoid(low) * clamp(u, -LIMIT, LIMIT)
    elif KIND == "swiglu_clamp_after":
        s = g * sigmoid(g)
        return tl.where(s > LIMIT, LIMIT, s) * clamp(u, -LIMIT, LIMIT)
    else:
        tl.static_assert(KIND == "swiglu")
        return g * sigmoid(g) * u


@triton.jit
def gate_up_columns(
    i,
    I,  # noqa: E741
    GATED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Columns of gate and up (equal without a gate) of FFN column i."""
    if not GATED:
        return i, i
    if INTERLEAVE > 0:
        first = (i // INTERLEAVE) * (2 * INTERLEAVE) + i % INTERLEAVE
        second = first + INTERLEAVE
    else:
        first = i
        second = i + I
    if GATE_FIRST:
        return first, second
    else:
        return second, first


@triton.jit
def _activate(
    h_MW,
    a_MI,
    weight_N,
    bias_GW,
    table_T4,
    total_1,
    W,
    I,  # noqa: E741
    KIND: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    HAS_WEIGHT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    columns = tl.cdiv(I, BLOCK_I)
    total = tl.load(total_1) * columns
    p = tl.program_id(0)
    while p < total:
        entry = table_T4 + (p // columns) * 4
        group = tl.load(entry).to(tl.int64)
        row = tl.load(entry + 1).to(tl.int64)
        first = tl.load(entry + 2).to(tl.int64)
        count = tl.load(entry + 3)
        m = tl.arange(0, BLOCK)
        i = (p % columns) * BLOCK_I + tl.arange(0, BLOCK_I)
        mask = (m < count)[:, None] & (i < I)[None, :]
        gate, up = gate_up_columns(i, I, GATED, GATE_FIRST, INTERLEAVE)
        h_m = h_MW + (first + m)[:, None] * W
        u = widen(tl.load(h_m + up[None, :], mask=mask, other=0.0))
        g = u
        if GATED:
            g = widen(tl.load(h_m + gate[None, :], mask=mask, other=0.0))
        if HAS_BIAS:
            b = bias_GW + group * W
            u = widen(round_bf16(u + widen(tl.load(b + up, mask=i < I, other=0.0))[None, :]))
            if GATED:
                g = widen(round_bf16(g + widen(tl.load(b + gate, mask=i < I, other=0.0))[None, :]))
            else:
                g = u
        a = act_value(g, u, KIND, BETA, LINEAR_BETA, ALPHA, LIMIT)
        if HAS_WEIGHT:
            a = a * tl.load(weight_N + row + m, mask=m < count, other=0.0)[:, None]
        tl.store(a_MI + (first + m)[:, None] * I + i[None, :], round_bf16(a), mask=mask)
        p += tl.num_programs(0)


def act_constants(act: Activation, order: str, interleave: int) -> dict[str, object]:
    """The compile-time arguments of an activation."""
    return {
        "KIND": act.kind,
        "BETA": act.beta or 0.0,
        "LINEAR_BETA": act.linear_beta or 0.0,
        "ALPHA": act.alpha or 0.0,
        "LIMIT": act.limit or 0.0,
        "GATED": act.gated,
        "GATE_FIRST": order == "gate_first",
        "INTERLEAVE": interleave,
    }


def activate(
    h_MW: Tensor,
    a_MI: Tensor,
    tiles: Tiles,
    act: Activation,
    order: str = "gate_first",
    interleave: int = 0,
    *,
    weight_N: Tensor | None = None,
    bias_GW: Tensor | None = None,
    sms: int | None = None,
) -> None:
    """Write the tiles' rows of ``a_MI``; other rows stay. The oracle is ``experts.activations``.

    Args:
        h_MW: BF16, compact rows of the first GEMM.
        a_MI: BF16, compact rows, overwritten.
        tiles: which rows there are, and their groups and receive rows.
        act: the activation.
        order: ``gate_first`` or ``up_first``.
        interleave: granule of interleaved halves, 0 for plain ones.
        weight_N: fp32 per receive row, multiplied before the rounding.
        bias_GW: BF16 per group, added (and rounded) before the activation.
        sms: SMs to use; None: all.
    """
    W, I = h_MW.shape[1], a_MI.shape[1]  # noqa: E741
    block_i = 128
    grid = grid_for(h_MW.device, tiles.bound * triton.cdiv(I, block_i), per_sm=8, sms=sms)
    _activate[grid](
        h_MW,
        a_MI,
        weight_N,
        bias_GW,
        tiles.table_T4,
        tiles.total_1,
        W,
        I,
        **act_constants(act, order, interleave),
        HAS_WEIGHT=weight_N is not None,
        HAS_BIAS=bias_GW is not None,
        BLOCK=tiles.block,
        BLOCK_I=block_i,
    )
