"""Words of MXFP4 codes in shared memory to Hopper's operand A in registers, in Gluon.

A word holds the eight codes of one lane of one 16 x 16 tile (``mxfp4_layout`` has the bits), and
words lie in lane order, so 16 bytes a lane loaded from shared memory are four fragments: no
shuffles. Twelve instructions turn a word into four registers: a mask each, three shifts or rotates
and an exclusive or, and one BF16 product of a pair with its scale.

BN weight rows and BK columns of a stage; BLOCKS = BK / 64.

Worked example: q = 0x2CA63045, ``mxfp4_layout``'s. Register 0 is q & 0x81C081C0 = 0x00800040, the
pair (0.5, 1) times 2^-126; with scale byte 127 the factor is 2^126 and the product (0.5, 1).
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier


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
    linear = gl.DistributedLinearLayout
    w, groups = WARPS.bit_length() - 1, max(1, BN // 128)
    tile_bits = (min(BN, 128) // 16).bit_length() - 1
    tiles = 1 << tile_bits
    blocks = [1 << i for i in range(BLOCKS.bit_length() - 1)]

    def bases(tile, rows_per_block):
        bits = [[t, 0] if isinstance(t, int) else t for t in tile[:tile_bits]]
        return bits + ([[rows_per_block * BLOCKS, 0]] if groups == 2 else [])

    words = bases([4, 8, 16], 4 * tiles)
    scales = bases([[0, 8], 1, 2], tiles // 2)
    rows = bases([8, 16, 32], 8 * tiles)
    as_copied = linear(
        [[0, 1], [0, 2], *words[w:], *([4 * tiles * i, 0] for i in blocks)],
        [[0, 4], [0, 8], [0, 16], [1, 0], [2, 0]],
        words[:w],
        [],
        [4 * tiles * groups * BLOCKS, 32],
    )
    of_scales = linear(
        [*scales[w:], *([tiles // 2 * i, 0] for i in blocks)],
        [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]],
        scales[:w],
        [],
        [tiles // 2 * groups * BLOCKS, 16],
    )
    by_row = linear(
        [[0, 1], [0, 2], *rows[w:], *([8 * tiles * i, 0] for i in blocks)],
        [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]],
        rows[:w],
        [],
        [8 * tiles * groups * BLOCKS, 16],
    )
    return as_copied, of_scales, by_row


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
def load_weights(
    w_ring,
    s_ring,
    full,
    it,
    t,
    HALF: gl.constexpr,
    LA: gl.constexpr,
    P: gl.constexpr,
):
    """Wait for stage ``it`` of tile ``t`` and decode its weights into operand A's registers.

    ``HALF`` is the parity of ``it``: which of two stages of 64 columns.
    """
    BN: gl.constexpr = P.value.tile.bn
    BK: gl.constexpr = P.value.tile.bk
    STAGES: gl.constexpr = P.value.tile.stages
    BLOCKS: gl.constexpr = BK // 64
    ROWS_OF_WORDS: gl.constexpr = BN * BLOCKS // 2
    GROUPS: gl.constexpr = (BN + 127) // 128
    L: gl.constexpr = _layouts(BN, BLOCKS, gl.num_warps())
    stage = it % STAGES
    mbarrier.wait(full.index(stage), (it // STAGES) & 1)
    scales = s_ring.index(stage)
    q = w_ring.index(stage).load(L[0]).reshape([ROWS_OF_WORDS, 16])
    q = gl.convert_layout(q, L[2], assert_trivial=True)
    if BN == 64:  # both halves of the scales were copied: TMA has no tile as small as one
        WHOLE: gl.constexpr = _layouts(128, BLOCKS, gl.num_warps())
        s = scales.load(WHOLE[1]).reshape([BLOCKS, 2, 32]).permute((0, 2, 1))
        lower, upper = gl.split(s)
        s = gl.where(t % 2 == 0, lower, upper).reshape([ROWS_OF_WORDS])
    elif BK == 64:  # the scales of 128 columns were copied, likewise
        PAIR: gl.constexpr = _layouts(BN, 2, gl.num_warps())
        s = scales.load(PAIR[1]).reshape([GROUPS, 2, ROWS_OF_WORDS // GROUPS])
        first, second = gl.split(s.permute((0, 2, 1)))
        s = (second if HALF else first).reshape([ROWS_OF_WORDS])
    else:
        s = scales.load(L[1]).reshape([ROWS_OF_WORDS])
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
    w = w.reshape([GROUPS, BLOCKS, BN // GROUPS // 16, 8, 4, 4, 2, 2, 2])
    w = w.permute((0, 2, 7, 3, 1, 5, 8, 4, 6)).reshape([BN, BK])
    return gl.convert_layout(w, LA, assert_trivial=True)  # only register names move
