"""An expert's MLP over groups of rows, MXFP4 weights and BF16 rows, for Hopper in Gluon.

N receive rows, M scratch rows, G groups, I FFN width, H row width. One launch is one grouped GEMM
``out[r, n] = sum_k x[r, k] w[group(r), n, k]``; NP and KP are its weight's padded shape
(``mxfp4_layout``), C its output columns. Two launches make the MLP:

    gate+up   x = receive rows at start_G, [N, H]    epilogue: bias, activation, route weight
              out = a, compact scratch [M, I]        row = (rows of earlier groups) + row in group
    down      x = a                                  epilogue: bias
              out = receive rows at start_G, [N, H]

The scratch is compact because N, the buffer's capacity, is several times the rows of a step.

A program copies and a second set of warps computes (warp specialisation). The copying warp keeps a
ring of ``stages`` tiles of weights, scales and x in shared memory full by TMA; columns of x past
its end arrive as zeros, and so meet the weights' zero padding as 0 x 0. The other warps decode
codes straight into the tensor core's A registers, 12 instructions for 8 weights, and keep the
weights as the M operand, so a tile of few rows wastes nothing. Programs stay and walk the list of
tiles (row block, n tile); which group a row block belongs to comes from the prefix sums of
``count_G``, all on the device: no host value depends on the counts.

Every output is one fp32 sum over k in one fixed order whatever the tile, so a row's bits depend on
that row and its expert's weights alone: ``Tile`` only decides speed.

Worked example: counts (3, 0, 18), starts (0, -, 8), tiles of 16 rows, NP = 256, n tiles of 128.
Row blocks per group 1, 0, 2, running sums 1, 1, 3; times 2 n tiles = 6 tiles. Tile 5 is row block
2: two running sums are <= 2, so group 2; its second block: receive row 8 + 16 = 24, scratch row
3 + 16 = 19, 2 rows left of the 16 it loads. The other 14 are computed and not stored.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)


def _decode_asm() -> str:
    """Four words (q) of one row pair and k block -> four A registers each; see mxfp4_layout."""
    lines = ["{", ".reg .b32 t, u, al, ah, bl, bh;", ".reg .b16 l, h;"]
    # Factors of row g ($20) and row g + 8 ($24), each for the low and the high 32 columns.
    lines += ["mov.b32 {l, h}, $20;", "mov.b32 al, {l, l};", "mov.b32 ah, {h, h};"]
    lines += ["mov.b32 {l, h}, $24;", "mov.b32 bl, {l, l};", "mov.b32 bh, {h, h};"]
    for j in range(4):
        q = f"${16 + j}"
        a, b = ("al", "bl") if j < 2 else ("ah", "bh")
        lines += [
            f"and.b32 t, {q}, 0x81C081C0;",
            f"mul.bf16x2 ${j}, t, {a};",
            f"shl.b32 t, {q}, 6;",
            "and.b32 t, t, 0x81C081C0;",
            f"mul.bf16x2 ${4 + j}, t, {b};",
            f"shf.l.wrap.b32 t, {q}, {q}, 12;",
            "and.b32 t, t, 0x81C081C0;",
            f"mul.bf16x2 ${8 + j}, t, {a};",
            f"shr.b32 t, {q}, 6;",
            f"shl.b32 u, {q}, 2;",
            "lop3.b32 t, t, u, 0x81C081C0, 0x28;",  # (t ^ u) & M
            f"mul.bf16x2 ${12 + j}, t, {b};",
        ]
    return "\n".join([*lines, "}"])


_DECODE = gl.constexpr(_decode_asm())
_DECODE_REGISTERS = gl.constexpr(",".join(["=&r"] * 16 + ["r"] * 12))
_SCALES = gl.constexpr(
    "{\n.reg .b32 t;\nand.b32 $0, $2, 0x7F807F80;\nshf.l.wrap.b32 t, $2, $2, 8;\n"
    "and.b32 $1, t, 0x7F807F80;\n}"
)


@gluon.constexpr_function
def _layouts(BN, BLOCKS, WARPS):
    """Registers that hold a stage's words as copied, its scales, and its words one row per
    (128-row group, k block, 16-row tile, g). Lane and warp bits are the A fragment's."""
    groups, linear = BN // 128, gl.DistributedLinearLayout
    w = WARPS.bit_length() - 1
    blocks = [1 << i for i in range(BLOCKS.bit_length() - 1)]

    def bases(tile, group):
        bits = [[t, 0] if isinstance(t, int) else t for t in tile]
        return bits + ([[group, 0]] if groups == 2 else [])

    words = bases([4, 8, 16], 32 * BLOCKS)
    scales = bases([[0, 8], 1, 2], 4 * BLOCKS)
    rows = bases([8, 16, 32], 64 * BLOCKS)
    as_copied = linear(
        [[0, 1], [0, 2], *words[w:], *([32 * i, 0] for i in blocks)],
        [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        words[:w],
        [],
        [32 * groups * BLOCKS, 32],
    )
    of_scales = linear(
        [*scales[w:], *([4 * i, 0] for i in blocks)],
        [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        scales[:w],
        [],
        [4 * groups * BLOCKS, 16],
    )
    by_row = linear(
        [[0, 1], [0, 2], *rows[w:], *([64 * i, 0] for i in blocks)],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        rows[:w],
        [],
        [64 * groups * BLOCKS, 16],
    )
    return as_copied, of_scales, by_row


@gluon.constexpr_function
def _store_layout(COLUMNS, WARPS):
    """Neighbouring lanes hold neighbouring columns of one row, four each."""
    lanes = min(COLUMNS // 4, 32)
    return gl.BlockedLayout([4, 1], [lanes, 32 // lanes], [1, WARPS], [0, 1])


@gluon.jit
def _halves(r):
    return gl.inline_asm_elementwise(
        "mov.b32 {$0, $1}, $2;",
        "=h,=h,r",
        [r],
        dtype=(gl.bfloat16, gl.bfloat16),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _table(start_G, count_G, G, GB: gl.constexpr, ROWS: gl.constexpr):
    """Per group: index, first row, rows, running sums of row blocks and of rows."""
    L: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    g = gl.arange(0, GB, layout=L)
    start = gl.load(start_G + g, mask=g < G, other=0)
    count = gl.load(count_G + g, mask=g < G, other=0)
    blocks_to = gl.associative_scan((count + ROWS - 1) // ROWS, 0, _add)
    return g, start, count, blocks_to, gl.associative_scan(count, 0, _add)


@gluon.jit
def _find(table, block, ROWS: gl.constexpr):
    """Group of a row block, its first receive and scratch rows, and its rows from there on."""
    g, start, count, blocks_to, rows_to = table
    group = gl.sum((blocks_to <= block).to(gl.int32), 0)
    here = g == group
    done = (block - blocks_to + (count + ROWS - 1) // ROWS) * ROWS
    receive_row = gl.sum(gl.where(here, start + done, 0), 0)
    scratch_row = gl.sum(gl.where(here, rows_to - count + done, 0), 0)
    return group, receive_row, scratch_row, gl.sum(gl.where(here, count - done, 0), 0)


@gluon.jit
def _start_next_launch():
    """Let a launch that asked for it (``Gemm.early``) start as this one's programs end."""
    gl.inline_asm_elementwise(
        "griddepcontrol.launch_dependents; // $0",
        "=r",
        [],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def _wait_for_earlier_launch():
    gl.inline_asm_elementwise(
        "griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _first_block(group, t, P: gl.constexpr):
    """First block of 128 rows x 64 columns of tile ``t``, counted over all groups."""
    BN: gl.constexpr = P.value.tile.bn
    NP: gl.constexpr = P.value.NP
    return (group * (NP // 128) + t % (NP // BN) * (BN // 128)) * (P.value.KP // 64)


@gluon.jit
def _copy_weights(w_desc, s_desc, w_ring, s_ring, full, stage, block, P: gl.constexpr):
    """Announce a stage's bytes, x included, and queue the copies of its words and scales."""
    BN: gl.constexpr = P.value.tile.bn
    BK: gl.constexpr = P.value.tile.bk
    bar = full.index(stage)
    mbarrier.expect(bar, BN * BK // 2 + BN * BK // 32 + P.value.tile.rows * BK * 2)
    for i in gl.static_range(BN // 128):
        b = block + i * (P.value.KP // 64)
        words = w_ring.index(stage).slice(i * (BK // 2), BK // 2, 0)
        scales = s_ring.index(stage).slice(i * (BK // 16), BK // 16, 0)
        tma.async_copy_global_to_shared(w_desc, [b * 32, 0], bar, words)
        tma.async_copy_global_to_shared(s_desc, [b * 4, 0], bar, scales)


@gluon.jit
def _copy_tiles(
    w_desc,
    s_desc,
    x_desc,
    x1_desc,
    x2_desc,
    x4_desc,
    start_G,
    count_G,
    G,
    w_ring,
    s_ring,
    x_ring,
    full,
    empty,
    P: gl.constexpr,
):
    """The copying warp: TMA of each stage's weights, scales and rows, in the tiles' order."""
    KP: gl.constexpr = P.value.KP
    ROWS: gl.constexpr = P.value.tile.rows
    BK: gl.constexpr = P.value.tile.bk
    STAGES: gl.constexpr = P.value.tile.stages
    N_TILES: gl.constexpr = P.value.NP // P.value.tile.bn
    AHEAD: gl.constexpr = P.value.ahead
    table = _table(start_G, count_G, G, P.value.GB, ROWS)
    tiles = gl.sum((table[2] + ROWS - 1) // ROWS, 0) * N_TILES
    if P.value.early:
        if gl.program_id(0) < tiles:
            group, receive_row, scratch_row, left = _find(table, gl.program_id(0) // N_TILES, ROWS)
            first = _first_block(group, gl.program_id(0), P)
            for i in gl.static_range(AHEAD):
                _copy_weights(w_desc, s_desc, w_ring, s_ring, full, i, first + i * (BK // 64), P)
        _wait_for_earlier_launch()
    it = 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        group, receive_row, scratch_row, left = _find(table, t // N_TILES, ROWS)
        row = scratch_row if P.value.down else receive_row
        first = _first_block(group, t, P)
        for k in range(0, KP, BK):
            stage = it % STAGES
            bar = full.index(stage)
            if P.value.early:
                if it >= AHEAD:
                    mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
                    _copy_weights(w_desc, s_desc, w_ring, s_ring, full, stage, first + k // 64, P)
            else:
                mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
                _copy_weights(w_desc, s_desc, w_ring, s_ring, full, stage, first + k // 64, P)
            x_tile = x_ring.index(stage)
            if P.value.tile.exact:
                few = x_tile.reshape([1, ROWS, BK])
                if left == 1:
                    tma.async_copy_global_to_shared(x1_desc, [row, 0, k], bar, few)
                elif left == 2:
                    tma.async_copy_global_to_shared(x2_desc, [row, 0, k], bar, few)
                elif left == 4:
                    tma.async_copy_global_to_shared(x4_desc, [row, 0, k], bar, few)
                else:
                    tma.async_copy_global_to_shared(x_desc, [row, k], bar, x_tile)
            else:
                tma.async_copy_global_to_shared(x_desc, [row, k], bar, x_tile)
            it += 1


@gluon.jit
def _load_weights(w_ring, s_ring, full, it, LA: gl.constexpr, P: gl.constexpr):
    """Wait for stage ``it`` and decode its weights into the registers of operand A."""
    BN: gl.constexpr = P.value.tile.bn
    BK: gl.constexpr = P.value.tile.bk
    STAGES: gl.constexpr = P.value.tile.stages
    BLOCKS: gl.constexpr = BK // 64
    ROWS_OF_WORDS: gl.constexpr = BN * BLOCKS // 2
    L: gl.constexpr = _layouts(BN, BLOCKS, gl.num_warps())
    stage = it % STAGES
    mbarrier.wait(full.index(stage), (it // STAGES) & 1)
    q = w_ring.index(stage).load(L[0]).reshape([ROWS_OF_WORDS, 16])
    q = gl.convert_layout(q, L[2], assert_trivial=True)
    s = s_ring.index(stage).load(L[1]).reshape([ROWS_OF_WORDS])
    s = gl.convert_layout(s, gl.SliceLayout(1, L[2]), assert_trivial=True)
    s0, s8 = gl.inline_asm_elementwise(
        _SCALES, "=r,=r,r", [s], dtype=(gl.int32, gl.int32), is_pure=True, pack=1
    )
    s0, _ = gl.broadcast(gl.expand_dims(s0, 1), q)
    s8, _ = gl.broadcast(gl.expand_dims(s8, 1), q)
    r0, r1, r2, r3 = gl.inline_asm_elementwise(
        _DECODE,
        _DECODE_REGISTERS,
        [q, s0, s8],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=4,
    )
    a0, b0 = _halves(r0)
    a1, b1 = _halves(r1)
    a2, b2 = _halves(r2)
    a3, b3 = _halves(r3)
    left = gl.join(gl.join(a0, b0), gl.join(a1, b1))
    w = gl.join(left, gl.join(gl.join(a2, b2), gl.join(a3, b3)))
    # group, k block, tile, g, q, step, pair, row half, column half -> row, column
    w = w.reshape([BN // 128, BLOCKS, 8, 8, 4, 4, 2, 2, 2])
    w = w.permute((0, 2, 7, 3, 1, 5, 8, 4, 6)).reshape([BN, BK])
    return gl.convert_layout(w, LA, assert_trivial=True)  # only register names move


@gluon.jit
def _tanh(x):
    """tanh as a quotient ``(p, q)``, relative error about 1e-6 for any x, NaN for NaN."""
    e = gl.exp(-2.0 * gl.abs(x))
    small = gl.abs(x) < 0.125  # there 1 - e would cancel; the series' next term is below 1e-7
    x2 = x * x
    series = x * (1.0 - x2 * (0.33333333 - x2 * 0.13333333))
    p = gl.where(x < 0, e - 1.0, 1.0 - e)
    return gl.where(small, series, p), gl.where(small, 1.0, 1.0 + e)


@gluon.jit
def _clamp_up(u, LIMIT: gl.constexpr):
    u = gl.where(u > LIMIT, LIMIT, u)
    return gl.where(u < -LIMIT, -LIMIT, u)


@gluon.jit
def _activate(g, u, P: gl.constexpr):
    """The gated kinds of ``evenep.activation`` in fp32. NaN stays NaN, as comparisons are false."""
    if P.value.kind == "situ":
        gp, gq = _tanh(g / P.value.beta)
        up, uq = _tanh(u / P.value.linear_beta)
        a = (P.value.beta * P.value.linear_beta) * (gp * up) / (gq * uq * (1.0 + gl.exp(-g)))
    elif P.value.kind == "swigluoai":
        g = gl.where(g > P.value.limit, P.value.limit, g)
        a = g / (1.0 + gl.exp(-P.value.alpha * g)) * (_clamp_up(u, P.value.limit) + 1.0)
    elif P.value.kind == "swiglu_clamp_before":
        g = gl.where(g > P.value.limit, P.value.limit, g)
        a = g / (1.0 + gl.exp(-g)) * _clamp_up(u, P.value.limit)
    elif P.value.kind == "swiglu_clamp_after":
        g = g / (1.0 + gl.exp(-g))
        a = gl.where(g > P.value.limit, P.value.limit, g) * _clamp_up(u, P.value.limit)
    else:
        gl.static_assert(P.value.kind == "swiglu")
        a = g / (1.0 + gl.exp(-g)) * u
    return a


@gluon.jit
def _finish(acc, t, table, weight_N, bias, out, MMA: gl.constexpr, P: gl.constexpr):
    """A tile's epilogue: bias, BF16, activation, route weight, masked store."""
    ROWS: gl.constexpr = P.value.tile.rows
    BN: gl.constexpr = P.value.tile.bn
    N_TILES: gl.constexpr = P.value.NP // BN
    group, receive_row, scratch_row, left = _find(table, t // N_TILES, ROWS)
    n_tile = t % N_TILES
    if P.value.bias:
        n = group * P.value.NP + n_tile * BN + gl.arange(0, BN, layout=gl.SliceLayout(1, MMA))
        acc += gl.expand_dims(gl.load(bias + n).to(gl.float32), 1)
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
            r = gl.arange(0, ROWS, layout=gl.SliceLayout(0, a.type.layout))
            w = gl.load(weight_N + receive_row + r, mask=r < left, other=0.0)
            a = a * gl.expand_dims(w, 0)
        o = a.to(gl.bfloat16)
    WIDTH: gl.constexpr = o.shape[0]
    LO: gl.constexpr = _store_layout(WIDTH, gl.num_warps())
    o = gl.convert_layout(o, LO)
    c = gl.expand_dims(n_tile * WIDTH + gl.arange(0, WIDTH, layout=gl.SliceLayout(1, LO)), 1)
    r = gl.expand_dims(gl.arange(0, ROWS, layout=gl.SliceLayout(0, LO)), 0)
    row = (receive_row if P.value.down else scratch_row) + r
    gl.store(out + row.to(gl.int64) * P.value.C + c, o, mask=(r < left) & (c < P.value.C))


@gluon.jit
def _compute_tiles(
    start_G, count_G, G, weight_N, bias, out, w_ring, s_ring, x_ring, full, empty, P: gl.constexpr
):
    """The computing warps: decode, multiply, finish."""
    KP: gl.constexpr = P.value.KP
    ROWS: gl.constexpr = P.value.tile.rows
    BN: gl.constexpr = P.value.tile.bn
    BK: gl.constexpr = P.value.tile.bk
    STAGES: gl.constexpr = P.value.tile.stages
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    LA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    table = _table(start_G, count_G, G, P.value.GB, ROWS)
    tiles = gl.sum((table[2] + ROWS - 1) // ROWS, 0) * (P.value.NP // BN)
    it = 0
    for t in range(gl.program_id(0), tiles, gl.num_programs(0)):
        acc = gl.full((BN, ROWS), 0.0, gl.float32, MMA)
        if P.value.tile.pipelined:
            # An asynchronous product reads its A registers until the wait. Only `deps` keeps them
            # from being reused, hence w0 and w1 in turn; one set carried along would be copied.
            running = warpgroup_mma_init(acc)
            w1 = gl.full((BN, BK), 0.0, gl.bfloat16, LA)
            for k in range(0, KP, 2 * BK):
                w0 = _load_weights(w_ring, s_ring, full, it, LA, P)
                acc, _ = warpgroup_mma_wait(0, deps=[running, w1])
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=k > 0)
                x0 = x_ring.index(it % STAGES).permute((1, 0))
                running = warpgroup_mma(w0, x0, acc, is_async=True)
                w1 = _load_weights(w_ring, s_ring, full, it + 1, LA, P)
                acc, _ = warpgroup_mma_wait(0, deps=[running, w0])
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                x1 = x_ring.index((it + 1) % STAGES).permute((1, 0))
                running = warpgroup_mma(w1, x1, acc, is_async=True)
                it += 2
            acc, _ = warpgroup_mma_wait(0, deps=[running, w1])
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
        else:
            for _k in range(0, KP, BK):
                w = _load_weights(w_ring, s_ring, full, it, LA, P)
                x = x_ring.index(it % STAGES).permute((1, 0))
                running = warpgroup_mma(w, x, acc, is_async=True)
                acc, _ = warpgroup_mma_wait(0, deps=[running, w])
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                it += 1
        _finish(acc, t, table, weight_N, bias, out, MMA, P)


@gluon.jit(
    do_not_specialize=["G"],
    do_not_specialize_on_alignment=["start_G", "count_G", "weight_N", "bias"],
)
def mxfp4_grouped_gemm(
    w_desc,
    s_desc,
    x_desc,
    x1_desc,
    x2_desc,
    x4_desc,
    start_G,
    count_G,
    G,
    weight_N,
    bias,
    out,
    P: gl.constexpr,
):
    """One launch; ``P`` is a ``mxfp4_tiles.Gemm``. See the module's docstring."""
    if not P.value.down:
        _start_next_launch()
    STAGES: gl.constexpr = P.value.tile.stages
    BN: gl.constexpr = P.value.tile.bn
    BK: gl.constexpr = P.value.tile.bk
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BN * BK // 256, 32], w_desc.layout)
    s_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BN * BK // 2048, 16], s_desc.layout)
    x_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, P.value.tile.rows, BK], x_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (
                _compute_tiles,
                (start_G, count_G, G, weight_N, bias, out, w_ring, s_ring, x_ring, full, empty, P),
            ),
            (
                _copy_tiles,
                (
                    w_desc,
                    s_desc,
                    x_desc,
                    x1_desc,
                    x2_desc,
                    x4_desc,
                    start_G,
                    count_G,
                    G,
                    w_ring,
                    s_ring,
                    x_ring,
                    full,
                    empty,
                    P,
                ),
            ),
        ],
        [1],
        [40],
    )
