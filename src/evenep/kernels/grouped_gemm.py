"""Grouped GEMM on stored expert bytes: decoded in registers, fp32 accumulation, one rounding.

N outputs, K inputs, G groups, M compact rows (``group_tiles``), I FFN width, W = 2 I gated, else I.
Weights are ``[G, N, K]`` in the format's own layout (``evenep.formats``):

    bf16    w BF16
    mxfp4   w uint8 [G, N, K/2], scale uint8 [G, N, K/32]; decoded to BF16, exact
    fp8     w E4M3 as uint8, scale fp32 [G, ceil(N/128), ceil(K/128)]; codes are exact in BF16 and a
            block's scale multiplies its fp32 partial sum

Two launches make an expert. ``gate_up`` reads receive rows and writes compact rows: both halves of
w13 for the same columns, then bias, activation, route weight. ``down`` reads them and overwrites
the receive rows. A tile of the product is held transposed, ``acc[n, m] = w[n, :] . x[m, :]``: the
weights are the operand that Hopper's wgmma takes 64 rows of, so 16 rows of x waste nothing and
every tile size runs the same instruction. A group's K runs ascending in one accumulator, whatever
the tile, so a row's bits do not depend on the rows beside it.

A fixed number of programs walks the tiles in strides: how many tiles there are only the device
knows. Tiles of 8 row tiles lie together, so that weights are read from L2 by the next.

Worked example (mxfp4, one output, K = 32): packed bytes ``21 9F`` then zeros, scale byte 128 (2^1).
Columns 0..3 are 0.5, 1, -6, -0.5, doubled 1, 2, -12, -1. For x = 1, 1, 1, 2, 0 … the sum is
1 + 2 - 12 - 2 = -11, exact in BF16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..activation import Activation
from .activation import act_constants, act_value, gate_up_columns
from .bf16 import round_bf16, widen
from .group_tiles import Tiles
from .sizing import capability_major, grid_for, shared_bytes
from .weight_tiles import add_products, load_tile

_SWIZZLE = 8


@triton.jit
def _load_rows(x, k0, K, weight, WEIGH: tl.constexpr, K_TAIL: tl.constexpr, BK: tl.constexpr):
    """Columns k0 … of the rows at pointers x, transposed."""
    k = tl.arange(0, BK)
    rows = load_tile(x[:, None] + k[None, :], k0, (k0 + k < K)[None, :], K_TAIL)
    if WEIGH:
        rows = round_bf16(widen(rows) * weight[:, None])
    return tl.trans(rows)


@triton.jit
def _tile_of(p, m_tiles, n_tiles, SWIZZLE: tl.constexpr):
    """Row tile and column tile of the p-th piece of work."""
    span = SWIZZLE * n_tiles
    first = (p // span) * SWIZZLE
    width = tl.minimum(m_tiles - first, SWIZZLE)
    return first + (p % span) % width, (p % span) // width


@triton.jit
def _gate_up(
    rows_NH,
    w_GWK,
    s_G,
    bias_GW,
    weight_N,
    a_MI,
    table_T4,
    total_1,
    w_stride,
    s_stride,
    H: tl.constexpr,
    I: tl.constexpr,  # noqa: E741
    W: tl.constexpr,
    FORMAT: tl.constexpr,
    KIND: tl.constexpr,
    BETA: tl.constexpr,
    LINEAR_BETA: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    GATED: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    INTERLEAVE: tl.constexpr,
    WEIGH: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    K_TAIL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    m_tiles = tl.load(total_1)
    n_tiles = tl.cdiv(I, BN)
    p = tl.program_id(0)
    while p < m_tiles * n_tiles:
        m_tile, n_tile = _tile_of(p, m_tiles, n_tiles, SWIZZLE)
        entry = table_T4 + m_tile * 4
        group = tl.load(entry).to(tl.int64)
        row = tl.load(entry + 1).to(tl.int64)
        first = tl.load(entry + 2).to(tl.int64)
        count = tl.load(entry + 3)
        # Rows and columns beyond the end read the first instead: loads need no mask.
        m = tl.arange(0, BM)
        real_m = tl.where(m < count, m, 0)
        i = n_tile * BN + tl.arange(0, BN)
        real_i = tl.where(i < I, i, 0)
        gate, up = gate_up_columns(real_i, I, GATED, GATE_FIRST, INTERLEAVE)
        x = rows_NH + (row + real_m) * H
        w = w_GWK + group * w_stride
        s = w
        if FORMAT != "bf16":
            s = s_G + group * s_stride
        weight = tl.zeros((BM,), tl.float32)
        if WEIGH != "output":
            weight = tl.load(weight_N + row + real_m)
        gate64 = gate.to(tl.int64)
        up64 = up.to(tl.int64)
        acc_g = tl.zeros((BN, BM), tl.float32)
        acc_u = tl.zeros((BN, BM), tl.float32)
        for k0 in range(0, H, BK):
            x_T = _load_rows(x, k0, H, weight, WEIGH == "input", K_TAIL, BK)
            if GATED:
                acc_g = add_products(acc_g, w, s, gate64, x_T, k0, H, FORMAT, K_TAIL, BN, BM, BK)
            acc_u = add_products(acc_u, w, s, up64, x_T, k0, H, FORMAT, K_TAIL, BN, BM, BK)
        if HAS_BIAS:
            acc_u += widen(tl.load(bias_GW + group * W + up))[:, None]
            if GATED:
                acc_g += widen(tl.load(bias_GW + group * W + gate))[:, None]
        u = widen(round_bf16(acc_u))
        g = u
        if GATED:
            g = widen(round_bf16(acc_g))
        a = act_value(g, u, KIND, BETA, LINEAR_BETA, ALPHA, LIMIT)
        if WEIGH == "activation":
            a = a * weight[None, :]
        out = a_MI + (first + m)[:, None] * I + i[None, :]
        tl.store(out, tl.trans(round_bf16(a)), mask=(m < count)[:, None] & (i < I)[None, :])
        p += tl.num_programs(0)


@triton.jit
def _down(
    a_MI,
    w_GHK,
    s_G,
    bias_GH,
    rows_NH,
    table_T4,
    total_1,
    w_stride,
    s_stride,
    I: tl.constexpr,  # noqa: E741
    H: tl.constexpr,
    FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    K_TAIL: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SWIZZLE: tl.constexpr,
):
    m_tiles = tl.load(total_1)
    n_tiles = tl.cdiv(H, BN)
    p = tl.program_id(0)
    while p < m_tiles * n_tiles:
        m_tile, n_tile = _tile_of(p, m_tiles, n_tiles, SWIZZLE)
        entry = table_T4 + m_tile * 4
        group = tl.load(entry).to(tl.int64)
        row = tl.load(entry + 1).to(tl.int64)
        first = tl.load(entry + 2).to(tl.int64)
        count = tl.load(entry + 3)
        m = tl.arange(0, BM)
        n = n_tile * BN + tl.arange(0, BN)
        real_n = tl.where(n < H, n, 0)
        x = a_MI + (first + tl.where(m < count, m, 0)) * I
        w = w_GHK + group * w_stride
        s = w
        if FORMAT != "bf16":
            s = s_G + group * s_stride
        n64 = real_n.to(tl.int64)
        acc = tl.zeros((BN, BM), tl.float32)
        for k0 in range(0, I, BK):
            x_T = _load_rows(x, k0, I, 0.0, False, K_TAIL, BK)
            acc = add_products(acc, w, s, n64, x_T, k0, I, FORMAT, K_TAIL, BN, BM, BK)
        if HAS_BIAS:
            acc += widen(tl.load(bias_GH + group * H + real_n))[:, None]
        out = rows_NH + (row + m)[:, None] * H + n[None, :]
        tl.store(out, tl.trans(round_bf16(acc)), mask=(m < count)[:, None] & (n < H)[None, :])
        p += tl.num_programs(0)


@dataclass(frozen=True, slots=True)
class GemmConfig:
    """Tile sizes of both launches. A format's ``block_k`` is the same in all of its configs.

    ``block_n`` counts output columns of ``down``; ``gate_up`` takes half as many columns of each
    half.
    """

    block_m: int
    block_n: int
    block_k: int
    warps: int
    per_sm: int


BLOCK_K = {"bf16": 64, "mxfp4": 128, "fp8": 128}
BLOCK_M = (16, 32, 64, 128)


def config_for(fmt: str, likely: int) -> GemmConfig:
    """A config for groups of about ``likely`` rows: the smallest tile that holds them."""
    block_m = next((b for b in BLOCK_M if likely <= b), BLOCK_M[-1])
    if block_m >= 64:
        return GemmConfig(block_m, 128, BLOCK_K[fmt], warps=8, per_sm=1)
    # Decoding needs warps to hide behind; more than three programs have no registers.
    per_sm = 3 if block_m == 16 and fmt != "bf16" else 2
    return GemmConfig(block_m, 128, BLOCK_K[fmt], warps=4, per_sm=per_sm)


def stages_for(config: GemmConfig, fmt: str, shared: int) -> int:
    """Loads in flight: as many as shared memory holds, 2 to 5."""
    bits = {"bf16": 16, "mxfp4": 4, "fp8": 8}[fmt]
    stage = config.block_k * (config.block_n * bits // 8 + 2 * config.block_m)
    room = shared // config.per_sm - 2048
    if fmt != "bf16":  # decoded weights pass through shared memory too, as Triton lays it out
        room -= max(16 << 10, 2 * config.block_k * config.block_n - stage)
    return max(2, min(5, room // stage))


@dataclass(frozen=True, slots=True, eq=False)
class Matrix:
    """Weights ``[G, N, K]`` of a format, their scales and biases as the store keeps them."""

    fmt: str
    w: Tensor
    scale: Tensor | None
    bias: Tensor | None

    @staticmethod
    def of(fmt: str, tensors: Mapping[str, Tensor], name: str) -> Matrix:
        """``w13`` or ``w2`` of stacked tensors."""
        w = tensors[f"{name}_packed" if fmt == "mxfp4" else name]
        if fmt == "fp8":
            w = w.view(torch.uint8)
        return Matrix(fmt, w, tensors.get(f"{name}_scale"), tensors.get(f"{name}_bias"))

    @property
    def strides(self) -> tuple[int, int]:
        """Elements from one group to the next, of weights and of scales."""
        return self.w.stride(0), 0 if self.scale is None else self.scale.stride(0)


def _tuning(
    config: GemmConfig, matrix: Matrix, device: torch.device, weigh: str = "output"
) -> dict[str, int]:
    stages = stages_for(config, matrix.fmt, shared_bytes(device))
    if weigh == "input" and capability_major(device) >= 10:
        stages = 1  # Triton 3.6 fails to pipeline weighed rows into tcgen05
    return {"num_warps": config.warps, "num_stages": stages}


def gate_up(
    rows_NH: Tensor,
    matrix: Matrix,
    a_MI: Tensor,
    tiles: Tiles,
    config: GemmConfig,
    act: Activation,
    order: str = "gate_first",
    interleave: int = 0,
    *,
    weigh: str = "output",
    weight_N: Tensor | None = None,
    sms: int | None = None,
) -> None:
    """Write the tiles' compact rows of ``a_MI`` from their receive rows."""
    H, I, W = rows_NH.shape[1], a_MI.shape[1], matrix.w.shape[1]  # noqa: E741
    block_n = config.block_n // 2 if act.gated else config.block_n
    work = tiles.bound * triton.cdiv(I, block_n)
    w_stride, s_stride = matrix.strides
    weigh = "output" if weight_N is None else weigh
    _gate_up[grid_for(rows_NH.device, work, per_sm=config.per_sm, sms=sms)](
        rows_NH,
        matrix.w,
        matrix.scale,
        matrix.bias,
        weight_N,
        a_MI,
        tiles.table_T4,
        tiles.total_1,
        w_stride,
        s_stride,
        H=H,
        I=I,
        W=W,
        FORMAT=matrix.fmt,
        **act_constants(act, order, interleave),
        WEIGH=weigh,
        HAS_BIAS=matrix.bias is not None,
        K_TAIL=H % config.block_k != 0,
        BM=config.block_m,
        BN=block_n,
        BK=config.block_k,
        SWIZZLE=_SWIZZLE,
        **_tuning(config, matrix, rows_NH.device, weigh),
    )


def down(
    a_MI: Tensor,
    matrix: Matrix,
    rows_NH: Tensor,
    tiles: Tiles,
    config: GemmConfig,
    *,
    sms: int | None = None,
) -> None:
    """Overwrite the tiles' receive rows from their compact rows of ``a_MI``."""
    I, H = a_MI.shape[1], rows_NH.shape[1]  # noqa: E741
    work = tiles.bound * triton.cdiv(H, config.block_n)
    w_stride, s_stride = matrix.strides
    _down[grid_for(rows_NH.device, work, per_sm=config.per_sm, sms=sms)](
        a_MI,
        matrix.w,
        matrix.scale,
        matrix.bias,
        rows_NH,
        tiles.table_T4,
        tiles.total_1,
        w_stride,
        s_stride,
        I=I,
        H=H,
        FORMAT=matrix.fmt,
        HAS_BIAS=matrix.bias is not None,
        K_TAIL=I % config.block_k != 0,
        BM=config.block_m,
        BN=config.block_n,
        BK=config.block_k,
        SWIZZLE=_SWIZZLE,
        **_tuning(config, matrix, rows_NH.device),
    )


def grouped_gemm_ref(
    x_MK: Tensor, w_GNK: Tensor, counts: list[int], bias_GN: Tensor | None = None
) -> Tensor:
    """Compact rows times decoded weights, a group after the other, fp64."""
    parts, at = [], 0
    for g, count in enumerate(counts):
        product = x_MK[at : at + count].double() @ w_GNK[g].double().T
        parts.append(product if bias_GN is None else product + bias_GN[g].double())
        at += count
    return torch.cat(parts)
