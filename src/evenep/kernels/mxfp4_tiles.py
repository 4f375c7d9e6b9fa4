"""How the MXFP4 kernel cuts its GEMMs: what a launch computes, its tiles, and which are chosen.

G groups, GB the places of their table, I FFN width, H row width, N receive rows, NP and KP a
weight's padded shape.

The choice reads two host numbers: the likely rows of a busy group decide a tile's rows (twice the
mean is a good guess: too small a tile costs more than too large a one), and the number of groups
which of two shapes of small tiles fills the last wave of programs better.

Many rows: what bounds a tile is the bytes that L2 hands an SM. A 128 x 128 tile copies 2 bytes of x
and half a byte of weights a column and row: 40 bytes for each cycle of its products, when L2 has
about 32 for each of 132 SMs. With 256 weight rows it is 25: weights are the cheap operand.

Worked example: 132 SMs, 56 groups of 1 row, gate+up of NP = 6144: 48 n tiles x 56 = 2688 tiles.
Two programs per SM need ceil(2688 / 264) = 11 waves, 93 % of their places used; three need
ceil(2688 / 396) = 7, 97 %. That is 1.048 times better, below the 1.05 asked for: two it is.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

NO_ACTIVATION = "none"


@dataclass(frozen=True, slots=True)
class Tile:
    """How one launch cuts its GEMM. Any tile gives the same bits.

    Args:
        rows: x rows of a tile, the tensor core's n: 8 … 256.
        bn: weight rows of a tile: 128; 256 (where the padded rows allow it, else 128), which
            reads x half as often; 64, for twice as many tiles where there are few.
        bk: columns per stage, 64 (pipelined only), 128 or 256.
        stages: depth of the ring.
        pipelined: decode a stage while the products of the one before run, and queue its own
            behind them: the tensor core waits for nobody.
        warps: computing warps, 4 or 8; at most bn / 16.
        ctas: programs per SM.
        registers: cap per thread, 0 for none.
        exact: tiles with 1, 2 or 4 rows copy just those rows of x.
    """

    rows: int
    bn: int
    bk: int
    stages: int
    pipelined: bool
    warps: int
    ctas: int
    registers: int = 0
    exact: bool = False

    @property
    def scale_columns(self) -> int:
        """Columns whose scales a stage copies: shared memory's swizzle has no pattern for 64."""
        return max(self.bk, 128)

    @property
    def scaled(self) -> int:
        """Weight rows whose scales a stage copies."""
        return max(self.bn, 128)


@dataclass(frozen=True, slots=True)
class Gemm:
    """What a launch computes: everything its compiled kernel depends on.

    Args:
        tile: how it is cut.
        down: x is the compact scratch and out the receive rows; else the other way round.
        GB: groups rounded up to a power of two, see ``group_places``.
        NP: padded rows of the weight.
        KP: padded columns of the weight.
        C: columns of out.
        kind: activation, ``none`` for the down GEMM.
        bias: add ``bias`` of each group's NP rows.
        weighted: multiply the activation by the route weight.
        early: started before the launch in front of it has ended (programmatic dependent launch):
            fill the ring with weights, then wait for it. Its x is that launch's out.
    """

    tile: Tile
    down: bool
    GB: int
    NP: int
    KP: int
    C: int
    kind: str = NO_ACTIVATION
    beta: float = 0.0
    linear_beta: float = 0.0
    alpha: float = 0.0
    limit: float = 0.0
    bias: bool = False
    weighted: bool = False
    early: bool = False

    @property
    def ahead(self) -> int:
        """Stages of weights an early launch copies before it waits."""
        return min(self.tile.stages, self.KP // self.tile.bk)

    @property
    def gated(self) -> bool:
        """Rows of the weight alternate: 8 gates, their 8 ups."""
        return self.kind not in (NO_ACTIVATION, "relu2")


def group_places(G: int) -> int:
    """Places of the kernel's table of groups. Few values, so that few kernels are compiled."""
    return max(32, 1 << (G - 1).bit_length())


SMALL = Tile(8, 128, 256, 4, pipelined=False, warps=8, ctas=2, registers=80)
SMALL_SPREAD = Tile(8, 128, 128, 6, pipelined=False, warps=4, ctas=3, registers=80)
TILES: dict[int, Tile] = {
    8: SMALL,
    16: Tile(16, 128, 128, 8, pipelined=True, warps=4, ctas=2, registers=128),
    32: Tile(32, 128, 128, 6, pipelined=True, warps=4, ctas=2, registers=128),
    64: Tile(64, 128, 64, 7, pipelined=True, warps=4, ctas=2, registers=128),
    128: Tile(128, 256, 64, 8, pipelined=True, warps=8, ctas=1),
    256: Tile(256, 128, 64, 5, pipelined=True, warps=8, ctas=1),
}


def fit(tile: Tile, NP: int) -> Tile:
    """The tile, with 128 weight rows where 256 don't divide the padded ones."""
    return tile if NP % tile.bn == 0 else dataclasses.replace(tile, bn=128)


def _filled(tiles: int, places: int) -> float:
    """Part of the places of all waves that hold a tile."""
    return tiles / (-(-tiles // places) * places)


def rows_of_tile(likely: int) -> int:
    """The key of ``TILES`` for groups of about so many rows."""
    return next((r for r in TILES if r >= likely), max(TILES))


def choose(likely: int, groups: int, NP: int, sms: int) -> Tile:
    """The tile of a launch.

    Args:
        likely: rows of a busy group.
        groups: at most this many have rows.
        NP: padded rows of the weight.
        sms: SMs to use.
    """
    rows = rows_of_tile(likely)
    if rows > SMALL.rows:
        return fit(TILES[rows], NP)
    tiles = groups * NP // SMALL.bn
    if tiles <= sms * SMALL.ctas:
        return SMALL  # one wave: more warps per tile
    two, three = (_filled(tiles, sms * t.ctas) for t in (SMALL, SMALL_SPREAD))
    return SMALL_SPREAD if three > 1.05 * two else SMALL
