"""Every launch the MXFP4 runner can choose compiles for SM90, and its machine code is sound."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from evenep.bench.experts import SWEEP
from evenep.kernels.mxfp4_layout import padded_shape
from evenep.kernels.mxfp4_tiles import (
    SMALL,
    SMALL_SPREAD,
    TILES,
    Gemm,
    Tile,
    choose,
    fit,
    group_places,
)

from .mxfp4_compile import hazards, main_loop

H, FFN, GB = 3584, 3072, 64  # Kimi-K3, 56 groups
CHOSEN = [*TILES.values(), SMALL_SPREAD]
SITU: dict[str, Any] = {"kind": "situ", "beta": 4.0, "linear_beta": 25.0}
KINDS: list[dict[str, Any]] = [
    SITU,
    {"kind": "swiglu"},
    {"kind": "swiglu_clamp_before", "limit": 7.0},
    {"kind": "swiglu_clamp_after", "limit": 7.0},
    {"kind": "swigluoai", "alpha": 1.702, "limit": 7.0},
    {"kind": "relu2"},
]
SM_SHARED, BLOCK_RESERVED, SM_REGISTERS = 233472, 1024, 65536


def gate_up(tile: Tile, **fields: Any) -> Gemm:
    NP, KP = padded_shape(2 * FFN, H)
    return Gemm(fit(tile, NP), False, GB, NP, KP, FFN, **(SITU | fields))


def down(tile: Tile, **fields: Any) -> Gemm:
    NP, KP = padded_shape(H, FFN)
    return Gemm(fit(tile, NP), True, GB, NP, KP, H, **({"early": True} | fields))


def reports(gemms: list[Gemm]) -> list[dict[str, Any]]:
    nvidia = importlib.util.find_spec("triton.backends.nvidia")
    if nvidia is None or nvidia.origin is None:
        pytest.skip("needs Triton's NVIDIA backend")
    if not (Path(nvidia.origin).parent / "bin" / "ptxas").exists():
        pytest.skip("needs Triton's ptxas")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.mxfp4_compile"],
        input=json.dumps([dataclasses.asdict(g) for g in gemms]),
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(gemms: list[Gemm]) -> None:
    for gemm, report in zip(gemms, reports(gemms), strict=True):
        tile = gemm.tile
        assert report["hazards"] == 0, f"writes to A registers in flight: {gemm}"
        batches = 2 if tile.pipelined else 1
        assert report["warpgroup"] <= 2 * batches, f"ptxas serialised the products: {gemm}"
        assert report["spills"] == 0, f"the main loop spills: {gemm}"
        per_block = report["shared"] + BLOCK_RESERVED
        assert per_block * tile.ctas <= SM_SHARED, f"{report['shared']} bytes of shared: {gemm}"


@pytest.mark.timeout(300)
def test_chosen_tiles_compile_without_hazard_serialisation_or_spill() -> None:
    check([make(tile) for tile in CHOSEN for make in (gate_up, down)])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_candidate_tiles_compile_without_hazard_serialisation_or_spill() -> None:
    candidates = {tile for tiles in SWEEP.values() for tile in tiles} - set(CHOSEN)
    check([make(tile) for tile in candidates for make in (gate_up, down)])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("tile", CHOSEN, ids=str)
def test_every_epilogue_compiles_on_every_tile(tile: Tile) -> None:
    exact = dataclasses.replace(tile, exact=True)
    check(
        [gate_up(tile, **{"beta": 0.0, "linear_beta": 0.0} | kind) for kind in KINDS]
        + [gate_up(tile, bias=True, weighted=True), down(tile, bias=True, early=False)]
        + [gate_up(exact), down(exact)]
    )


LOOP = """
.L_x_1:
        /*0000*/                   MOV R8, R1 ;
.L_x_2:
        /*0010*/                   HGMMA.64x8x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;
        /*0020*/              @!P0 LDS.128 R{first}, [R40] ;
        /*0030*/                   WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
        /*0040*/                   MOV R5, R9 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(("first", "found"), [(0, 0), (1, 2), (7, 2), (8, 0)])
def test_the_check_sees_a_write_to_a_register_in_flight(first: int, found: int) -> None:
    loop = main_loop(LOOP.format(first=first))
    assert len(loop) == 5, "the inner loop, without what is around it"
    assert len(hazards(loop)) == found, "twice round: each write counts twice"


QUEUED = """
.L_x_1:
        /*0000*/                   HGMMA.64x8x16.F32.BF16 R24, R4, gdesc[UR8], R24 ;
        /*0010*/                   HGMMA.64x8x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0 ;
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0030*/                   MOV R{first}, R1 ;
        /*0040*/                   HGMMA.64x8x16.F32.BF16 R24, R12, gdesc[UR8], R24, gsb0 ;
        /*0050*/                   WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
        /*0060*/                   MOV R{second}, R1 ;
        /*0070*/                   BRA `(.L_x_1) ;
"""


@pytest.mark.parametrize(
    ("first", "second", "found"), [(12, 4, 0), (4, 4, 2), (11, 4, 2), (12, 15, 2), (13, 8, 0)]
)
def test_the_check_knows_which_batch_is_still_in_flight(
    first: int, second: int, found: int
) -> None:
    assert len(hazards(main_loop(QUEUED.format(first=first, second=second)))) == found


@pytest.mark.parametrize("tile", CHOSEN, ids=str)
def test_as_many_programs_fit_an_sm_as_the_grid_assumes(tile: Tile) -> None:
    """Programs wait for nobody, so too many would only be slow; but the waves are counted."""
    warps = -(-(tile.warps + 1) // 4) * 4  # a warp group is the unit of register allocation
    if tile.ctas > 1:
        assert tile.registers * 32 * warps * tile.ctas <= SM_REGISTERS


def test_the_choice_follows_rows_and_waves() -> None:
    assert [choose(n, 56, 6144, 132).rows for n in (1, 8, 9, 16, 33, 64, 65, 4096)] == [
        8, 8, 16, 16, 64, 64, 128, 256,
    ]  # fmt: skip
    assert choose(1, 56, 6144, 132) == SMALL
    assert choose(1, 4, 6144, 132) == SMALL, "one wave: more warps a tile"
    assert choose(1, 14, 3584, 132) == SMALL_SPREAD, "392 tiles: one wave of 396, two of 264"


def test_a_few_table_sizes_serve_any_number_of_groups() -> None:
    assert [group_places(G) for G in (1, 32, 33, 64, 65, 448)] == [32, 32, 64, 64, 128, 512]


def test_wide_tiles_fall_back_where_rows_do_not_divide() -> None:
    wide = dataclasses.replace(TILES[64], bn=256)
    assert fit(wide, 6144).bn == 256
    assert fit(wide, 6144 + 128).bn == 128
