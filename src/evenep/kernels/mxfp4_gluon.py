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
    warpgroup_mma_wait,
)

from .mxfp4_decode import load_weights
from .mxfp4_epilogue import finish_tile
from .mxfp4_table import find_block, group_table


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
def _taking_part(busy, away):
    """Programs that share the tiles: all, or all but ``away`` while replicas are on their way.

    The copies hold their multiprocessors before this launch starts. Programs without one then come
    last, when the others are nearly done: they must find nothing to do.
    """
    programs = gl.num_programs(0)
    if busy is not None:
        programs = programs - gl.where(gl.load(busy) > 0, away, 0)
    return programs


@gluon.jit
def _first_block(group, t, P: gl.constexpr):
    """First block of 128 rows x 64 columns that tile ``t`` is in, counted over all groups."""
    BN: gl.constexpr = P.value.tile.bn
    NP: gl.constexpr = P.value.NP
    return (group * (NP // 128) + t % (NP // BN) * BN // 128) * (P.value.KP // 64)


@gluon.jit
def _copy_weights(w_desc, s_desc, w_ring, s_ring, full, stage, block, t, P: gl.constexpr):
    """Announce a stage's bytes, x included, and queue the copies of its words and scales."""
    BN: gl.constexpr = P.value.tile.bn
    BK: gl.constexpr = P.value.tile.bk
    bar = full.index(stage)
    SCALES: gl.constexpr = P.value.tile.scaled * P.value.tile.scale_columns // 32
    mbarrier.expect(bar, BN * BK // 2 + SCALES + P.value.tile.rows * BK * 2)
    if BN == 64:  # half of each block's words
        for i in gl.static_range(BK // 64):
            words = w_ring.index(stage).slice(i * 16, 16, 0)
            row = (block + i) * 32 + t % 2 * 16
            tma.async_copy_global_to_shared(w_desc, [row, 0], bar, words)
        tma.async_copy_global_to_shared(s_desc, [block * 4, 0], bar, s_ring.index(stage))
    S: gl.constexpr = P.value.tile.scale_columns // 16
    for i in gl.static_range(BN // 128):
        b = block + i * (P.value.KP // 64)
        words = w_ring.index(stage).slice(i * (BK // 2), BK // 2, 0)
        scales = s_ring.index(stage).slice(i * S, S, 0)
        tma.async_copy_global_to_shared(w_desc, [b * 32, 0], bar, words)
        tma.async_copy_global_to_shared(s_desc, [b * 4 // S * S, 0], bar, scales)


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
    busy,
    away,
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
    table = group_table(start_G, count_G, G, P.value.GB, ROWS)
    step = _taking_part(busy, away)
    tiles = gl.sum((table[2] + ROWS - 1) // ROWS, 0) * N_TILES
    tiles = gl.where(gl.program_id(0) < step, tiles, 0)
    if P.value.early:
        if gl.program_id(0) < tiles:
            group, receive_row, scratch_row, left = find_block(
                table, gl.program_id(0) // N_TILES, ROWS
            )
            first = _first_block(group, gl.program_id(0), P)
            for i in gl.static_range(AHEAD):
                _copy_weights(
                    w_desc,
                    s_desc,
                    w_ring,
                    s_ring,
                    full,
                    i,
                    first + i * (BK // 64),
                    gl.program_id(0),
                    P,
                )
        _wait_for_earlier_launch()
    it = 0
    for t in range(gl.program_id(0), tiles, step):
        group, receive_row, scratch_row, left = find_block(table, t // N_TILES, ROWS)
        row = scratch_row if P.value.down else receive_row
        first = _first_block(group, t, P)
        for k in range(0, KP, BK):
            stage = it % STAGES
            bar = full.index(stage)
            if P.value.early:
                if it >= AHEAD:
                    mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
                    _copy_weights(
                        w_desc, s_desc, w_ring, s_ring, full, stage, first + k // 64, t, P
                    )
            else:
                mbarrier.wait(empty.index(stage), ((it // STAGES) & 1) ^ 1)
                _copy_weights(w_desc, s_desc, w_ring, s_ring, full, stage, first + k // 64, t, P)
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
def _compute_tiles(
    start_G,
    count_G,
    G,
    weight_N,
    bias,
    busy,
    away,
    out,
    w_ring,
    s_ring,
    x_ring,
    full,
    empty,
    P: gl.constexpr,
):
    """The computing warps: decode, multiply, finish."""
    KP: gl.constexpr = P.value.KP
    ROWS: gl.constexpr = P.value.tile.rows
    BN: gl.constexpr = P.value.tile.bn
    BK: gl.constexpr = P.value.tile.bk
    STAGES: gl.constexpr = P.value.tile.stages
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [gl.num_warps(), 1], [16, ROWS, 16])
    LA: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    table = group_table(start_G, count_G, G, P.value.GB, ROWS)
    step = _taking_part(busy, away)
    tiles = gl.sum((table[2] + ROWS - 1) // ROWS, 0) * (P.value.NP // BN)
    tiles = gl.where(gl.program_id(0) < step, tiles, 0)
    it = 0
    for t in range(gl.program_id(0), tiles, step):
        acc = gl.full((BN, ROWS), 0.0, gl.float32, MMA)
        if P.value.tile.pipelined:
            # An asynchronous product reads its A registers until a wait says it is done. Only
            # `deps` keeps them from being reused, hence w0 and w1 in turn; one set carried along
            # would be copied. Products are queued behind those of the stage before, so that the
            # tensor core never waits for this warp.
            w1 = gl.full((BN, BK), 0.0, gl.bfloat16, LA)
            for k in range(0, KP, 2 * BK):
                w0 = load_weights(w_ring, s_ring, full, it, t, 0, LA, P)
                x0 = x_ring.index(it % STAGES).permute((1, 0))
                running = warpgroup_mma(w0, x0, acc, is_async=True)
                acc, _ = warpgroup_mma_wait(1, deps=[running, w1])
                mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1, pred=k > 0)
                w1 = load_weights(w_ring, s_ring, full, it + 1, t, 1, LA, P)
                x1 = x_ring.index((it + 1) % STAGES).permute((1, 0))
                running = warpgroup_mma(w1, x1, acc, is_async=True)
                acc, _ = warpgroup_mma_wait(1, deps=[running, w0])
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                it += 2
            acc, _ = warpgroup_mma_wait(0, deps=[acc, w1])
            mbarrier.arrive(empty.index((it + STAGES - 1) % STAGES), count=1)
        else:
            for _k in range(0, KP, BK):
                w = load_weights(w_ring, s_ring, full, it, t, 0, LA, P)
                x = x_ring.index(it % STAGES).permute((1, 0))
                running = warpgroup_mma(w, x, acc, is_async=True)
                acc, _ = warpgroup_mma_wait(0, deps=[running, w])
                mbarrier.arrive(empty.index(it % STAGES), count=1)
                it += 1
        finish_tile(acc, t, table, weight_N, bias, out, MMA, P)


@gluon.jit(
    do_not_specialize=["G", "away"],
    do_not_specialize_on_alignment=["start_G", "count_G", "weight_N", "bias", "busy"],
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
    busy,
    away,
    out,
    P: gl.constexpr,
):
    """One launch; ``P`` is a ``mxfp4_tiles.Gemm``. See the module's docstring."""
    if not P.value.down:
        _start_next_launch()
    STAGES: gl.constexpr = P.value.tile.stages
    BN: gl.constexpr = P.value.tile.bn
    BK: gl.constexpr = P.value.tile.bk
    WORDS: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    SCALES: gl.constexpr = gl.NVMMASharedLayout(64, 32, 2)
    w_ring = gl.allocate_shared_memory(gl.int32, [STAGES, BN * BK // 256, 32], WORDS)
    s_ring = gl.allocate_shared_memory(
        gl.int32,
        [STAGES, P.value.tile.scaled * P.value.tile.scale_columns // 2048, 16],
        SCALES,
    )
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
                (
                    start_G,
                    count_G,
                    G,
                    weight_N,
                    bias,
                    busy,
                    away,
                    out,
                    w_ring,
                    s_ring,
                    x_ring,
                    full,
                    empty,
                    P,
                ),
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
                    busy,
                    away,
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
