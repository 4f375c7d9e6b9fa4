"""The grouped GEMM's two launches against fp64 products of decoded weights."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from evenep import Activation, EPConfig
from evenep.formats import format_of
from evenep.formats.mxfp4 import decode_mxfp4
from evenep.kernels.group_tiles import group_tiles
from evenep.kernels.grouped_gemm import (
    BLOCK_K,
    BLOCK_M,
    GemmConfig,
    Matrix,
    config_for,
    down,
    gate_up,
    grouped_gemm_ref,
    stages_for,
)

DEV = "cuda" if torch.cuda.is_available() else "cpu"
FORMATS = ("bf16", "mxfp4", "fp8")


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEV)


def matrices(fmt: str, G: int, H: int, I: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:  # noqa: E741
    """Random stacked tensors of a format and w2 ``[G, H, I]`` decoded."""
    cfg = EPConfig(
        num_experts=2, top_k=1, hidden_size=H, intermediate_size=I, max_tokens_per_rank=1,
        weight_format=fmt, activation="relu2",
    )  # fmt: skip
    form, g = format_of(cfg), torch.Generator().manual_seed(seed)
    stacked = {s.name: torch.zeros(G, *s.shape, dtype=s.dtype) for s in form.specs(cfg)}
    for e in range(G):
        form.fill_random({name: t[e] for name, t in stacked.items()}, g)
    w2 = [form.decode({n: t[e] for n, t in stacked.items()}, torch.float32)[1] for e in range(G)]
    return {name: t.to(DEV) for name, t in stacked.items()}, torch.stack(w2)


def multiply(
    x_MK: Tensor,
    matrix: Matrix,
    counts: list[int],
    config: GemmConfig,
    N: int,
    sms: int | None = None,
) -> Tensor:
    """``down`` into rows that follow one another."""
    starts = [sum(counts[:g]) for g in range(len(counts))]
    out = torch.full((x_MK.shape[0], N), math.nan, dtype=torch.bfloat16, device=DEV)
    tiles = group_tiles(ints(starts), ints(counts), x_MK.shape[0], config.block_m)
    down(x_MK.to(DEV), matrix, out, tiles, config, sms=sms)
    return out.cpu()


def rows(M: int, K: int, seed: int = 1) -> Tensor:
    return torch.randn(M, K, generator=torch.Generator().manual_seed(seed)).bfloat16()


def worst(got: Tensor, want: Tensor) -> float:
    """Largest error over what BF16 rounding and the size of the row allow."""
    scale = want.abs() + want.norm(dim=1, keepdim=True) / want.shape[1] ** 0.5
    return float(((got.double() - want).abs() / scale).max())


@pytest.mark.parametrize(("H", "I"), [(160, 96), (64, 128), (200, 416)])
@pytest.mark.parametrize("fmt", FORMATS)
def test_down_is_the_product_of_decoded_weights(fmt: str, H: int, I: int) -> None:  # noqa: E741
    if fmt == "mxfp4" and H % 32:
        H = 192
    tensors, w2 = matrices(fmt, 4, H, I)
    counts = [3, 0, 17, 1]
    x = rows(21, I)
    got = multiply(x, Matrix.of(fmt, tensors, "w2"), counts, config_for(fmt, 1), H)
    assert worst(got, grouped_gemm_ref(x, w2, counts)) < 2**-8


@pytest.mark.parametrize("fmt", FORMATS)
def test_a_rows_bits_depend_on_neither_tile_nor_neighbours(fmt: str) -> None:
    H, I, counts = 128, 288, [150, 1]  # noqa: E741
    tensors, _ = matrices(fmt, 2, H, I)
    matrix, x = Matrix.of(fmt, tensors, "w2"), rows(151, I)
    together = [multiply(x, matrix, counts, config_for(fmt, likely), H) for likely in BLOCK_M]
    alone = multiply(x[149:], matrix, [1, 1], config_for(fmt, 1), H, sms=1)
    pairs = [(together[0], other) for other in together[1:]] + [(together[0][149:], alone)]
    for got, other in pairs:
        if DEV == "cuda":
            assert torch.equal(got, other)
        else:  # the interpreter's products are numpy's, which promises no order
            torch.testing.assert_close(got, other, rtol=2**-7, atol=2**-10)


def test_every_fp4_code_and_scale_is_exact() -> None:
    """One-hot rows read a weight each: all codes, scale bytes 0 (subnormal) to 252."""
    N, K = 128, 64
    packed = (torch.arange(N * K // 2) % 256).to(torch.uint8).view(1, N, K // 2)
    scale = torch.tensor([*range(0, 252, 2), 1, 252]).to(torch.uint8).view(1, N, 1).repeat(1, 1, 2)
    matrix = Matrix("mxfp4", packed.to(DEV), scale.contiguous().to(DEV), None)
    got = multiply(torch.eye(K).bfloat16(), matrix, [K], config_for("mxfp4", 64), N)
    want = decode_mxfp4(packed[0], scale[0], torch.float32).T
    assert torch.equal(got.float(), want.bfloat16().float())
    assert torch.equal(want.bfloat16().float(), want)


def test_every_fp8_code_is_exact_and_nan_stays_nan() -> None:
    N, K = 16, 128
    codes = (torch.arange(N * K) % 256).to(torch.uint8).view(1, N, K)
    scale = torch.full((1, 1, 1), 0.5)
    matrix = Matrix("fp8", codes.to(DEV), scale.to(DEV), None)
    want = codes[0].view(torch.float8_e4m3fn).float().mul(0.5).T
    finite = codes.clone()
    finite[(codes & 0x7F) == 0x7F] = 0
    got = multiply(
        torch.eye(K).bfloat16(), Matrix("fp8", finite.to(DEV), scale.to(DEV), None), [K],
        config_for("fp8", 128), N,
    )  # fmt: skip
    assert torch.equal(got.float(), torch.where(want.isnan(), 0, want))
    got = multiply(torch.eye(K).bfloat16(), matrix, [K], config_for("fp8", 128), N)
    assert torch.equal(got.isnan().any(0), want.isnan().any(0))


def test_a_scale_of_a_block_is_that_of_its_rows_and_columns() -> None:
    G, N, K = 2, 272, 384
    scale = torch.arange(1.0, 1 + G * 9).view(G, 3, 3)
    codes = torch.ones(G, N, K).to(torch.float8_e4m3fn).view(torch.uint8)
    x = torch.zeros(6, K)
    for m in range(6):
        x[m, 128 * (m % 3) + 5] = 1.0
    matrix = Matrix("fp8", codes.to(DEV), scale.to(DEV), None)
    got = multiply(x.bfloat16(), matrix, [3, 3], config_for("fp8", 1), N)
    want = scale.repeat_interleave(128, 1)[:, :N].transpose(1, 2).reshape(6, N)
    assert torch.equal(got.float(), want)


def test_an_infinite_neighbour_and_rows_beyond_the_end_do_not_leak() -> None:
    tensors, w2 = matrices("bf16", 2, 32, 96)
    x = rows(20, 96)
    x[5], x[12:] = math.inf, math.nan  # rows of the groups end at 12
    got = multiply(x, Matrix.of("bf16", tensors, "w2"), [6, 6], config_for("bf16", 1), 32)
    fine = [0, 1, 2, 3, 4, *range(6, 12)]
    assert worst(got[fine], grouped_gemm_ref(x[:12], w2, [6, 6])[fine]) < 2**-8
    assert got[12:].isnan().all()


def test_gate_up_without_a_gate_is_a_product_and_a_square() -> None:
    tensors, _ = matrices("bf16", 2, 64, 96)
    x = rows(7, 64)
    a = torch.full((7, 96), math.nan, dtype=torch.bfloat16, device=DEV)
    tiles = group_tiles(ints([0, 5]), ints([5, 2]), 7, 16)
    gate_up(
        x.to(DEV), Matrix.of("bf16", tensors, "w13"), a, tiles, config_for("bf16", 1),
        Activation("relu2"),
    )  # fmt: skip
    h = grouped_gemm_ref(x, tensors["w13"].cpu(), [5, 2]).bfloat16().float()
    assert worst(a.cpu(), h.relu().square().double()) < 2**-7


def test_configs_share_a_formats_k_and_fit_in_shared_memory() -> None:
    for fmt in FORMATS:
        for likely in (0, 1, 16, 17, 64, 65, 10**6):
            config = config_for(fmt, likely)
            assert config.block_k == BLOCK_K[fmt]
            assert config.block_m >= min(likely, BLOCK_M[-1])
            assert 2 <= stages_for(config, fmt, 99 << 10) <= stages_for(config, fmt, 227 << 10) <= 5


@pytest.mark.gpu
def test_offsets_are_64_bit() -> None:
    """Group 3 starts beyond 2^32 elements; its rows beyond 2^31 bytes."""
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of GPU memory")
    G, N, K = 4, 32768, 40960
    w = torch.empty(G, N, K, dtype=torch.bfloat16, device=DEV)
    w[:3] = math.nan
    w[3] = torch.randn(N, K, device=DEV) * K**-0.5
    x = rows(4, K).to(DEV)
    first = 33_000
    out = torch.full((first + 4, N), math.nan, dtype=torch.bfloat16, device=DEV)
    tiles = group_tiles(ints([0, 0, 0, first]), ints([0, 0, 0, 4]), 4, 16)
    down(x, Matrix("bf16", w, None, None), out, tiles, config_for("bf16", 4))
    want = x.float() @ w[3].float().T
    assert float((out[first:].float() - want).norm() / want.norm()) < 4e-3
    assert out[:first].isnan().all()
