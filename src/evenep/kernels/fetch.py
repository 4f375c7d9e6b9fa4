"""Replicas: an expert's bytes from its home rank into this rank's slots, by a few programs.

B slots, E experts, R ranks, X tensors of an expert. A tensor's rows lie one after the other:
expert e's at ``src_ptrs_XR[x, home_E[e]] + local_E[e] * row_bytes_X[x]``, slot b's at
``dest_ptrs_X[x] + b * row_bytes_X[x]``.

Few programs of many warps copy while others compute. Every tensor of every slot that moves is cut
into chunks, and chunks are dealt to programs in turn, going on where the last tensor ended:
whatever moves, two programs' shares differ by at most one chunk. The next chunk is asked for before
the current one is stored.

Worked example: 3 programs, two slots move, one tensor of 4 chunks each. The first slot's chunks go
to programs 0 1 2 0, the second's to 1 2 0 1: shares 3 3 2.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

from .fast_launch import FastLaunch
from .sizing import pow2

WARPS = 32
CHUNK = 32 * WARPS * 16 * 2  # bytes: two 16-byte words a thread


FETCH_PROGRAMS = 8
"""Multiprocessors that copy replicas while the others compute."""


@triton.jit
def _fetch(
    slot_B, moved_B, home_E, local_E, src_ptrs_XR, dest_ptrs_X,
    B: tl.constexpr, BP: tl.constexpr, R: tl.constexpr, X: tl.constexpr,
    ROW_BYTES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    me, programs = tl.program_id(0), tl.num_programs(0)
    b_B = tl.arange(0, BP)
    if tl.sum(tl.load(moved_B + b_B, mask=b_B < B, other=0), axis=0) == 0:
        return
    WORDS: tl.constexpr = CHUNK // 8
    BYTES: tl.constexpr = CHUNK // 16  # of a chunk without alignment: the rare way stays small
    word, byte, rest = tl.arange(0, WORDS), tl.arange(0, BYTES), tl.arange(0, 16)
    turn = tl.full([], 0, tl.int32)  # whose turn it is
    for b in range(B):
        e = tl.load(slot_B + b)
        if (tl.load(moved_B + b) != 0) & (e >= 0):
            home = tl.load(home_E + e)
            local = tl.load(local_E + e).to(tl.int64)
            for x in range(X):
                size = tl.full([], 0, tl.int64)
                for i in tl.static_range(X):
                    size = tl.where(x == i, tl.full([], ROW_BYTES[i], tl.int64), size)
                src = tl.load(src_ptrs_XR + x * R + home) + local * size
                dest = tl.load(dest_ptrs_X + x) + size * b
                first = (me - turn + programs) % programs
                if ((src | dest) & 15) == 0:
                    from_words = tl.multiple_of(src.to(tl.pointer_type(tl.int64)), 16)
                    to_words = tl.multiple_of(dest.to(tl.pointer_type(tl.int64)), 16)
                    words = tl.multiple_of(size // 16 * 2, 2)
                    chunks = (tl.cdiv(words, WORDS)).to(tl.int32)
                    at = first.to(tl.int64) * WORDS + word
                    held = tl.load(from_words + at, mask=at < words, eviction_policy="evict_first")
                    chunk = first
                    while chunk < chunks:
                        at = chunk.to(tl.int64) * WORDS + word
                        ahead = at + programs.to(tl.int64) * WORDS
                        coming = tl.load(
                            from_words + ahead, mask=ahead < words, eviction_policy="evict_first"
                        )
                        tl.store(to_words + at, held, mask=at < words, cache_modifier=".cs")
                        held = coming
                        chunk += programs
                    turn = (turn + chunks) % programs
                    if (size % 16 != 0) & (me == turn):
                        end = words * 8 + rest
                        from_bytes = src.to(tl.pointer_type(tl.int8)) + end
                        to_bytes = dest.to(tl.pointer_type(tl.int8)) + end
                        tl.store(to_bytes, tl.load(from_bytes, mask=end < size), mask=end < size)
                else:
                    chunks = (tl.cdiv(size, BYTES)).to(tl.int32)
                    chunk = first
                    while chunk < chunks:
                        at = chunk.to(tl.int64) * BYTES + byte
                        from_bytes = src.to(tl.pointer_type(tl.int8)) + at
                        to_bytes = dest.to(tl.pointer_type(tl.int8)) + at
                        tl.store(to_bytes, tl.load(from_bytes, mask=at < size), mask=at < size)
                        chunk += programs
                    turn = (turn + chunks) % programs


_launch_fetch = FastLaunch(_fetch)


def fetch_slots(
    slot_B: Tensor,
    moved_B: Tensor,
    home_E: Tensor,
    local_E: Tensor,
    src_ptrs_XR: Tensor,
    row_bytes_X: Sequence[int],
    dest_ptrs_X: Tensor,
    programs: int,
) -> None:
    """Copy the experts of this rank's slots that have to move.

    Args:
        slot_B: int32, expert of each slot, -1 unused. moved_B: int32, 1 where its bytes move.
        home_E, local_E: int32, home rank of each expert and its row there.
        src_ptrs_XR: int64 addresses of every rank's home rows of each tensor.
        row_bytes_X: bytes of one expert's row of each tensor.
        dest_ptrs_X: int64 addresses of this rank's slot 0 of each tensor.
        programs: how many multiprocessors may be kept busy with it.
    """
    B, (X, R) = slot_B.numel(), src_ptrs_XR.shape
    if B == 0 or X == 0:
        return
    _launch_fetch(
        programs,
        slot_B, moved_B, home_E, local_E, src_ptrs_XR, dest_ptrs_X,
        B=B, BP=pow2(B), R=R, X=X, ROW_BYTES=tuple(row_bytes_X), CHUNK=CHUNK, num_warps=WARPS,
    )  # fmt: skip


def fetch_ref(
    slot_B: Tensor,
    moved_B: Tensor,
    home_E: Tensor,
    local_E: Tensor,
    rows_XR: Sequence[Sequence[Tensor]],
    slots_X: Sequence[Tensor],
) -> None:
    """Oracle: ``slots_X[x][b] = rows_XR[x][home][local]`` for each slot that moves."""
    for b, (e, moved) in enumerate(zip(slot_B.tolist(), moved_B.tolist(), strict=True)):
        if moved and e >= 0:
            for rows_R, slots in zip(rows_XR, slots_X, strict=True):
                slots[b] = rows_R[int(home_E[e])][int(local_E[e])]
