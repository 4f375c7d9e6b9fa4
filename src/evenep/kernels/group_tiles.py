"""Groups whose sizes only the device knows, as a table of row tiles.

G groups, T tiles, M compact rows (the groups' rows one after the other, as scratch keeps them).
A tile is up to ``block`` consecutive rows of one group:

    table_T4[t] = (group, first receive row, first compact row, rows)

so a kernel that walks tiles needs to know nothing of groups, gaps or padding. Compact starts of
groups are multiples of ``align``. There are at most ``rows / block + min(G, rows)`` tiles, which
the host knows; how many there are only ``total_1`` says.

Worked example: block 4, align 1, starts 0 9 20, counts 6 0 3: rows 0..5 and 20..22.

    group 0: tile 0 = (0, 0, 0, 4), tile 1 = (0, 4, 4, 2);  group 1: none
    group 2: tile 2 = (2, 20, 6, 3)                         total 3, ends_G = 6 6 9

With align 8 group 2 starts at compact row 8: tile 2 = (2, 20, 8, 3) and ends_G = 6 8 11.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_T = 32


@triton.jit
def _group_tiles(
    start_G,
    count_G,
    table_T4,
    total_1,
    ends_G,
    G,
    T,
    BLOCK: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    pid = tl.program_id(0)
    g = tl.arange(0, BLOCK_G)
    count = tl.load(count_G + g, mask=g < G, other=0)
    start = tl.load(start_G + g, mask=g < G, other=0)
    tiles = (count + BLOCK - 1) // BLOCK
    room = (count + ALIGN - 1) // ALIGN * ALIGN
    tile_end = tl.cumsum(tiles, 0)
    first = tl.cumsum(room, 0) - room
    total = tl.minimum(tl.sum(tiles, 0), T)
    if pid == 0:
        tl.store(total_1, total)
        tl.store(ends_G + g, first + count, mask=g < G)
    t = pid * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.sum((tile_end[None, :] <= t[:, None]).to(tl.int32), 1)
    mine = g[None, :] == group[:, None]
    done = (t - tl.sum(tl.where(mine, (tile_end - tiles)[None, :], 0), 1)) * BLOCK
    left = tl.sum(tl.where(mine, count[None, :], 0), 1) - done
    row = tl.sum(tl.where(mine, start[None, :], 0), 1) + done
    compact = tl.sum(tl.where(mine, first[None, :], 0), 1) + done
    out = table_T4 + t * 4
    tl.store(out, group, mask=t < total)
    tl.store(out + 1, row, mask=t < total)
    tl.store(out + 2, compact, mask=t < total)
    tl.store(out + 3, tl.minimum(left, BLOCK), mask=t < total)


@dataclass(frozen=True, slots=True, eq=False)
class Tiles:
    """A tile table on the device.

    Attributes:
        table_T4: int32 ``[T, 4]``; rows from ``total_1`` on are undefined.
        total_1: int32 ``[1]``, tiles there are.
        ends_G: int32 ``[G]``, compact row after each group's last (the group's start if empty).
        block: most rows of a tile.
        bound: T, tiles there may be.
        align: what the groups' first compact rows are multiples of.
    """

    table_T4: Tensor
    total_1: Tensor
    ends_G: Tensor
    block: int
    bound: int
    align: int = 1


def tile_bound(rows: int, groups: int, block: int) -> int:
    """Most tiles that ``rows`` rows of ``groups`` groups can make."""
    return rows // block + min(groups, rows)


def group_tiles(start_G: Tensor, count_G: Tensor, rows: int, block: int, align: int = 1) -> Tiles:
    """Find the tiles of groups on the device; ``rows`` bounds the sum of the counts (>= 1)."""
    (G,) = count_G.shape
    T = tile_bound(rows, G, block)
    words = torch.empty(4 * T + 1 + G, dtype=torch.int32, device=count_G.device)
    table, total, ends = words.split([4 * T, 1, G])
    _group_tiles[(triton.cdiv(T, _BLOCK_T),)](
        start_G,
        count_G,
        table,
        total,
        ends,
        G,
        T,
        BLOCK=block,
        ALIGN=align,
        BLOCK_G=triton.next_power_of_2(G),
        BLOCK_T=_BLOCK_T,
    )
    return Tiles(table.view(T, 4), total, ends, block, T, align)


def group_tiles_ref(
    starts: list[int], counts: list[int], block: int, align: int = 1
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """Tiles and compact ends by walking the groups."""
    tiles, ends, compact = [], [], 0
    for g, (start, count) in enumerate(zip(starts, counts, strict=True)):
        tiles += [
            (g, start + done, compact + done, min(block, count - done))
            for done in range(0, count, block)
        ]
        ends.append(compact + count)
        compact += -(-count // align) * align
    return tiles, ends
