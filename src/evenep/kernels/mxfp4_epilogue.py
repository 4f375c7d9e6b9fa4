"""What follows a tile's sums: bias, BF16, activation, route weight, and a masked store, in Gluon.

The accumulator is ``[BN, ROWS]``: weight rows by x rows. A gated w13 has its rows permuted
(``mxfp4_layout``), so that gate and up of a column are two registers of one thread.

Worked example: n tile 2 of BN = 128, packed row 21 of the tile. 21 = 16 x 1 + 5: 16-row tile 1, in
its first eight, so a gate; its up is packed row 29. Their column of ``a`` is 2 x 64 + 8 x 1 + 5,
that is 141.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .mxfp4_table import find_block


@gluon.constexpr_function
def _store_layout(COLUMNS, WARPS):
    """Neighbouring lanes hold neighbouring columns of one row, four each."""
    lanes = min(COLUMNS // 4, 32)
    return gl.BlockedLayout([4, 1], [lanes, 32 // lanes], [1, WARPS], [0, 1])


@gluon.jit
def _of_unit(ASM: gl.constexpr, x):
    """One instruction of the SM's unit for special functions; NaN for NaN."""
    return gl.inline_asm_elementwise(ASM, "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def _sigmoid(x, FACTOR: gl.constexpr):
    """1 / (1 + exp(-FACTOR x)), relative error about 1e-6; a sum of infinity ends as 0."""
    e = _of_unit("ex2.approx.ftz.f32 $0, $1;", x * (FACTOR * -1.4426950408889634))
    return _of_unit("rcp.approx.ftz.f32 $0, $1;", 1.0 + e)


@gluon.jit
def _tanh(x):
    """Relative error at most 2^-11 for any x: a quarter of what rounding to BF16 may add."""
    return _of_unit("tanh.approx.f32 $0, $1;", x)


@gluon.jit
def _clamp_up(u, LIMIT: gl.constexpr):
    u = gl.where(u > LIMIT, LIMIT, u)
    return gl.where(u < -LIMIT, -LIMIT, u)


@gluon.jit
def _activate(g, u, P: gl.constexpr):
    """The gated kinds of ``evenep.activation`` in fp32. NaN stays NaN, as comparisons are false."""
    if P.value.kind == "situ":
        both = _tanh(g * (1.0 / P.value.beta)) * _tanh(u * (1.0 / P.value.linear_beta))
        a = both * _sigmoid(g, 1.0) * (P.value.beta * P.value.linear_beta)
    elif P.value.kind == "swigluoai":
        g = gl.where(g > P.value.limit, P.value.limit, g)
        a = g * _sigmoid(g, P.value.alpha) * (_clamp_up(u, P.value.limit) + 1.0)
    elif P.value.kind == "swiglu_clamp_before":
        g = gl.where(g > P.value.limit, P.value.limit, g)
        a = g * _sigmoid(g, 1.0) * _clamp_up(u, P.value.limit)
    elif P.value.kind == "swiglu_clamp_after":
        g = g * _sigmoid(g, 1.0)
        a = gl.where(g > P.value.limit, P.value.limit, g) * _clamp_up(u, P.value.limit)
    else:
        gl.static_assert(P.value.kind == "swiglu")
        a = g * _sigmoid(g, 1.0) * u
    return a


@gluon.jit
def _halves_of_rows(acc):
    """Its lower and upper rows: registers of their own."""
    BN: gl.constexpr = acc.shape[0]
    HALF: gl.constexpr = acc.shape[1] // 2
    return gl.split(acc.reshape([BN, 2, HALF]).permute((0, 2, 1)))


@gluon.jit
def finish_tile(acc, t, table, weight_N, bias, out, MMA: gl.constexpr, P: gl.constexpr):
    """A tile's epilogue: bias, BF16, activation, route weight, masked store."""
    ROWS: gl.constexpr = P.value.tile.rows
    BN: gl.constexpr = P.value.tile.bn
    N_TILES: gl.constexpr = P.value.NP // BN
    group, receive_row, scratch_row, left = find_block(table, t // N_TILES, ROWS)
    n_tile = t % N_TILES
    if P.value.bias:
        n = group * P.value.NP + n_tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
        acc += gl.expand_dims(gl.load(bias + n).to(gl.float32), 1)
    row = receive_row if P.value.down else scratch_row
    # Some rows at a time: what is stored passes through shared memory, which the ring could use.
    if ROWS >= 128:
        lower, upper = _halves_of_rows(acc)
        if ROWS == 256:
            first, second = _halves_of_rows(lower)
            _finish_rows(first, 0, n_tile, receive_row, row, left, weight_N, out, P)
            _finish_rows(second, 64, n_tile, receive_row, row, left, weight_N, out, P)
            first, second = _halves_of_rows(upper)
            _finish_rows(first, 128, n_tile, receive_row, row, left, weight_N, out, P)
            _finish_rows(second, 192, n_tile, receive_row, row, left, weight_N, out, P)
        else:
            _finish_rows(lower, 0, n_tile, receive_row, row, left, weight_N, out, P)
            _finish_rows(upper, 64, n_tile, receive_row, row, left, weight_N, out, P)
    else:
        _finish_rows(acc, 0, n_tile, receive_row, row, left, weight_N, out, P)


@gluon.jit
def _finish_rows(
    acc, FIRST: gl.constexpr, n_tile, receive_row, row, left, weight_N, out, P: gl.constexpr
):
    """Rows ``FIRST`` on of a tile, ``[BN, ROWS]``, whose first is ``row`` of ``out``."""
    BN: gl.constexpr = acc.shape[0]
    ROWS: gl.constexpr = acc.shape[1]
    o = acc.to(gl.bfloat16)
    if P.value.kind != "none":
        h = o.to(gl.float32)
        if P.value.gated:
            h = h.reshape([BN // 16, 2, 8, ROWS]).permute((0, 2, 3, 1))
            g, u = gl.split(h)
            a = _activate(g, u, P).reshape([BN // 2, ROWS])
        else:
            h = gl.where(h < 0, 0.0, h)
            a = h * h
        if P.value.weighted:
            r = FIRST + gl.arange(0, ROWS, layout=gl.SliceLayout(0, a.type.layout))
            w = gl.load(weight_N + receive_row + r, mask=r < left, other=0.0)
            a = a * gl.expand_dims(w, 0)
        o = a.to(gl.bfloat16)
    WIDTH: gl.constexpr = o.shape[0]
    LO: gl.constexpr = _store_layout(WIDTH, gl.num_warps())
    o = gl.convert_layout(o, LO)
    c = gl.expand_dims(n_tile * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, LO)), 1)
    r = FIRST + gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LO)), 0)
    place = out + (row + r).to(gl.int64) * P.value.C + c
    gl.store(place, o, mask=(r < left) & (c < P.value.C))
