"""MXFP4 matrices as the Gluon kernel reads them: the order of words and of bits within a word.

N rows (outputs), K columns (inputs), both padded here to NP (128) and KP (256) with zero codes.
J = K / 2 bytes and Q = K / 32 scale bytes a row, as in ``evenep.formats.mxfp4``.

Hopper's tensor core takes the weights as operand A from registers. A warp's tile is 16 rows by 16
columns; lane 4 g + q holds four registers of two BF16 each:

    register 0: row g,     columns 2q, 2q + 1        register 2: row g,     columns 2q + 8, 2q + 9
    register 1: row g + 8, columns 2q, 2q + 1        register 3: row g + 8, columns 2q + 8, 2q + 9

so one 32-bit word holds the eight codes of one lane. Words lie in the order lanes read them:

    words  [NP / 128, KP / 64, 1024]   1024 = 8 tiles of 16 rows x 8 g x 4 q x 4 steps of 16 columns
    scales [NP / 128, KP / 64, 64]     64 = 8 tiles x 8 g; a word has rows g, g + 8 and both groups

An expert is one slice of each: no more bytes than the checkpoint's (up to padding), and a replica
is plain copies.

Bits of a word q. A BF16 with an E2M1 code's sign in its sign and the three other bits in its
lowest exponent and highest mantissa bits is the code's value times 2^-126 (the code 0.5 becomes
a BF16 subnormal). With M = 0x81C081C0 (those bits of both halves) the four registers are

    q & M        (q << 6) & M        rotl(q, 12) & M        ((q >> 6) ^ (q << 2)) & M

and one multiplication by 2^(b - 1) yields the weight. A scale word is the pair of BF16 factors
2^(b - 1) of row g's two groups of 32, OR-ed with row g + 8's pair rotated right by 8 bits: the
exponent fields (bits 7..14 and 23..30) don't meet. 2^(b - 1) is a BF16 for b <= 128 only.

Worked example: row g has codes 1, 2 (0.5, 1) and 3, 4 (1.5, 2) in registers 0 and 2, row g + 8
codes 5, 6 (3, 4) and 7, 8 (6, -0) in registers 1 and 3. Checkpoint bytes in register order
0x21, 0x65, 0x43, 0x87 become q = 0x2CA63045: q & M = 0x00800040, halves 0x0040 and
0x0080, which are 0.5 and 1 times 2^-126. Scale bytes 127, 128 (row g) and 120, 121 (row g + 8)
become 0x7F7BFEFB.

The rows of a gated w13 are permuted: in each tile of 16, rows 0..7 are gates and rows 8..15 the
matching ups, so that a lane ends up with both halves of a column and can apply the activation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..activation import Activation
from ..errors import InputError, explain
from ..formats.mxfp4 import GROUP

N_TILE = 128
K_STEP = 256
TOP_SCALE = 128
WORDS_PER_BLOCK = 1024  # of 128 rows x 64 columns
SCALES_PER_BLOCK = 64
_CHUNK_BYTES = 1 << 24  # of codes at once; the temporaries are a small multiple of it
_MASK = 0x81C081C0 - (1 << 32)  # int32


def padded_shape(N: int, K: int) -> tuple[int, int]:
    """``(NP, KP)``: what ``[N, K]`` becomes."""
    return -(-N // N_TILE) * N_TILE, -(-K // K_STEP) * K_STEP


def word_shape(N: int, K: int) -> tuple[int, int, int]:
    """Shape of one matrix's int32 words of codes."""
    NP, KP = padded_shape(N, K)
    return NP // N_TILE, KP // 64, WORDS_PER_BLOCK


def scale_shape(N: int, K: int) -> tuple[int, int, int]:
    """Shape of one matrix's int32 words of scales."""
    NP, KP = padded_shape(N, K)
    return NP // N_TILE, KP // 64, SCALES_PER_BLOCK


def row_order(intermediate_size: int, act: Activation, order: str, interleave: int) -> Tensor:
    """Row of the checkpoint's w13 for each row of the packed one, int64 ``[W]``.

    Example: I = 16, gate first, two plain halves: ``0..7, 16..23, 8..15, 24..31``.
    """
    if not act.gated:
        return torch.arange(intermediate_size)
    column = torch.arange(intermediate_size)
    gate_half = 0 if order == "gate_first" else 1
    halves = []
    for half in (gate_half, 1 - gate_half):
        if interleave:
            row = column // interleave * (2 * interleave) + half * interleave + column % interleave
        else:
            row = half * intermediate_size + column
        halves.append(row.view(-1, 1, 8))
    return torch.cat(halves, dim=1).flatten()


def check_scales(*scales: Tensor) -> None:
    """Refuse scales the kernel's BF16 factors can't hold. Waits for the device once.

    Raises:
        InputError: a scale byte above 128 (a factor above 2).
    """
    top = int(torch.stack([s.max() for s in scales]).max())
    if top > TOP_SCALE:
        raise InputError(
            explain(
                "an MXFP4 scale is too large for the 'gluon' runner",
                expected=f"E8M0 bytes 0..{TOP_SCALE} (factors up to 2)",
                got=top,
                fix="use runner='triton'",
            )
        )


def _field(v: Tensor, source: int, bits: int, target: int) -> Tensor:
    """``bits`` bits of int32 ``v`` from ``source``, moved to ``target``."""
    return ((v >> source) & ((1 << bits) - 1)) << target


def encode_words(v: Tensor) -> Tensor:
    """Checkpoint bytes of registers 0..3 (byte r of int32 ``v``) to the kernel's words."""
    q = torch.zeros_like(v)
    for shift, sign, magnitude in [
        (0, 15, 6),  # register 0, low half
        (4, 31, 22),  # and high half
        (8, 9, 0),
        (12, 25, 16),
        (16, 3, 26),
        (20, 19, 10),
    ]:
        q |= _field(v, shift + 3, 1, sign)
        q |= _field(v, shift, 3, magnitude)
    # Register 3 is bits p + 6 and p - 2 XOR-ed; one of each two is still free. High half first:
    # its bits 29 and 21 are the low half's and its own neighbours.
    q |= _field(v, 31, 1, 29)
    q |= _field(v, 29, 1, 21) ^ _field(q, 29, 1, 21)
    q |= _field(v, 30, 1, 30) ^ _field(q, 22, 1, 30)
    q |= _field(v, 28, 1, 20) ^ _field(q, 28, 1, 20)
    q |= _field(v, 27, 1, 13) ^ _field(q, 21, 1, 13)
    q |= _field(v, 25, 1, 5) ^ _field(q, 13, 1, 5)
    q |= _field(v, 26, 1, 14) ^ _field(q, 6, 1, 14)
    q |= _field(v, 24, 1, 4) ^ _field(q, 12, 1, 4)
    return q


def decode_words(q: Tensor) -> Tensor:
    """Inverse of ``encode_words``, by the kernel's own shifts and masks."""
    rotated = (q << 12) | ((q >> 20) & 0xFFF)
    crossed = ((q >> 6) & 0x3FFFFFF) ^ (q << 2)  # int32 shifts in copies of the sign: cut them
    registers = [q & _MASK, (q << 6) & _MASK, rotated & _MASK, crossed & _MASK]
    v = torch.zeros_like(q)
    for r, bf16_pair in enumerate(registers):
        for half in (0, 1):
            target = 8 * r + 4 * half
            v |= _field(bf16_pair, 16 * half + 6, 3, target)
            v |= _field(bf16_pair, 16 * half + 15, 1, target + 3)
    return v


def encode_scales(b: Tensor) -> Tensor:
    """Scale bytes ``[..., row half, group]`` as int32 ``[..., 2, 2]`` to one word each."""
    pair = ((b[..., 0] + 126) << 7) | ((b[..., 1] + 126) << 23)
    low, high = pair[..., 0], pair[..., 1]
    return low | (high >> 8) | ((high & 255) << 24)


def decode_scales(s: Tensor) -> Tensor:
    """Inverse of ``encode_scales``, by the kernel's rotate and mask."""
    pair = torch.stack([s, (s << 8) | ((s >> 24) & 255)], dim=-1)
    return torch.stack([((pair >> shift) & 255) - 126 for shift in (7, 23)], dim=-1)


def pack_matrix(
    packed_NJ: Tensor,
    scale_NQ: Tensor,
    words: Tensor,
    scales: Tensor,
    order_N: Tensor | None = None,
) -> None:
    """One matrix of the checkpoint into the kernel's layout.

    Args:
        packed_NJ: uint8 codes, two a byte.
        scale_NQ: uint8 scales, 0..128 (see ``check_scales``).
        words: int32, ``word_shape``; overwritten.
        scales: int32, ``scale_shape``; overwritten.
        order_N: the checkpoint's row for each packed row (see ``row_order``); None: as they are.
    """
    N, J = packed_NJ.shape
    groups, blocks, _ = words.shape
    step = max(1, _CHUNK_BYTES // (N_TILE * blocks * 32))
    for first in range(0, groups, step):
        last = min(first + step, groups)
        rows = slice(first * N_TILE, min(last * N_TILE, N))
        count = rows.stop - rows.start
        code = packed_NJ.new_zeros((last - first) * N_TILE, blocks * 32)
        byte = scale_NQ.new_zeros((last - first) * N_TILE, blocks * 2)
        picked = rows if order_N is None else order_N[rows]
        code[:count, :J] = packed_NJ[picked]
        byte[:count, : J * 2 // GROUP] = scale_NQ[picked]
        # group, tile, row half, g | block, step, column half, q  ->  a word's four bytes last
        code = code.view(-1, 8, 2, 8, blocks, 4, 2, 4).permute(0, 4, 1, 3, 7, 5, 6, 2)
        v = code.reshape(last - first, blocks, -1).view(torch.int32)
        words[first:last] = encode_words(v)
        b = byte.view(-1, 8, 2, 8, blocks, 2).permute(0, 4, 1, 3, 2, 5).int()
        scales[first:last] = encode_scales(b).view(last - first, blocks, -1)


def unpack_matrix(
    words: Tensor, scales: Tensor, N: int, K: int, order_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """What ``pack_matrix`` was given: uint8 ``([N, K / 2], [N, K / 32])``. The layout's oracle."""
    groups, blocks, _ = words.shape
    v = decode_words(words).contiguous().view(torch.uint8)
    v = v.view(groups, blocks, 8, 8, 4, 4, 2, 2)  # tile, g, q, step, column half, row half
    code = v.permute(0, 2, 7, 3, 1, 5, 6, 4).reshape(groups * N_TILE, blocks * 32)
    b = decode_scales(scales).view(groups, blocks, 8, 8, 2, 2)
    byte = b.permute(0, 2, 4, 3, 1, 5).reshape(groups * N_TILE, blocks * 2).to(torch.uint8)
    code, byte = code[:N, : K // 2], byte[:N, : K // GROUP]
    if order_N is None:
        return code.contiguous(), byte.contiguous()
    packed, scale = torch.empty_like(code), torch.empty_like(byte)
    packed[order_N], scale[order_N] = code, byte
    return packed, scale
