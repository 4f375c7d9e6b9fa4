"""The activation kernel against ``experts.activations`` and fp64; tiles, gather and scatter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("triton")

import triton
import triton.language as tl

from evenep import Activation, EPConfig
from evenep.activation import KINDS
from evenep.experts.activations import activate as activate_ref
from evenep.kernels.activation import activate, sigmoid, tanh
from evenep.kernels.bf16 import mul_bf16, round_bf16, widen
from evenep.kernels.group_rows import gather_rows, scatter_rows
from evenep.kernels.group_tiles import Tiles, group_tiles, group_tiles_ref, tile_bound

DEV = "cuda" if torch.cuda.is_available() else "cpu"
CASES = {
    "swiglu": Activation("swiglu"),
    "swiglu_clamp_before": Activation("swiglu_clamp_before", limit=7.0),
    "swiglu_clamp_after": Activation("swiglu_clamp_after", limit=7.0),
    "swigluoai": Activation("swigluoai", alpha=1.702, limit=7.0),
    "situ": Activation.situ(),
    "relu2": Activation("relu2"),
}
EXTREMES = [0.0, -0.0, 1.0, -1.0, 0.7, -0.7, 7.0, -7.0, 25.0, 88.0, -88.0, 710.0, -710.0, 1e4, -1e4]


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEV)


def one_group(rows: int, *, start: int = 0, block: int = 16) -> Tiles:
    return group_tiles(ints([start]), ints([rows]), rows, block)


def ulps(got: Tensor, want: Tensor) -> int:
    """BF16 values between the two at most, over all elements."""

    def order(x: Tensor) -> Tensor:
        bits = x.cpu().bfloat16().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((order(got) - order(want)).abs().max())


# ---- BF16 arithmetic


@triton.jit  # type: ignore[untyped-decorator]
def _bf16_ops(x, y, rounded, widened, product, N: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, N)
    r = round_bf16(tl.load(x + n))
    tl.store(rounded + n, r)
    tl.store(widened + n, widen(r))
    tl.store(product + n, mul_bf16(r, round_bf16(tl.load(y + n))))


def test_rounding_widening_and_products_are_torchs_bit_for_bit() -> None:
    g = torch.Generator().manual_seed(0)
    N = 8192
    x, y = (
        torch.randn(N, generator=g) * torch.exp2(torch.randint(-60, 60, (N,), generator=g).float())
        for _ in range(2)
    )
    special = [1 + 2**-8, 1 + 3 * 2**-8, 0.0, -0.0, 1e-40, -3e-39, 3.4e38, math.inf, -math.inf]
    x[: len(special)] = torch.tensor(special)
    out = [torch.empty(N, dtype=d, device=DEV) for d in (torch.bfloat16, torch.float32)]
    product = torch.empty(N, dtype=torch.bfloat16, device=DEV)
    _bf16_ops[(1,)](x.to(DEV), y.to(DEV), *out, product, N)
    want = x.bfloat16()
    assert torch.equal(out[0].cpu().view(torch.int16), want.view(torch.int16))
    assert torch.equal(out[1].cpu().view(torch.int32), want.float().view(torch.int32))
    assert torch.equal(product.cpu().view(torch.int16), (want * y.bfloat16()).view(torch.int16))


def test_a_nan_survives_rounding() -> None:
    x = torch.full((16,), math.nan, device=DEV)
    out = [torch.empty(16, dtype=d, device=DEV) for d in (torch.bfloat16, torch.float32)]
    _bf16_ops[(1,)](x, x, *out, torch.empty(16, dtype=torch.bfloat16, device=DEV), 16)
    assert out[0].isnan().all()
    assert out[1].isnan().all()


# ---- tanh, sigmoid


@triton.jit  # type: ignore[untyped-decorator]
def _soft(x, t, s, N: tl.constexpr):  # type: ignore[no-untyped-def]
    n = tl.arange(0, N)
    tl.store(t + n, tanh(tl.load(x + n)))
    tl.store(s + n, sigmoid(tl.load(x + n)))


def test_tanh_and_sigmoid_keep_six_digits_everywhere() -> None:
    sizes = torch.cat(
        [torch.logspace(-30, 2, 4000), torch.linspace(0.2, 0.3, 95), torch.tensor([1e4])]
    )
    x = torch.cat([sizes, -sizes]).float()[:8192]
    N = 8192
    x = torch.nn.functional.pad(x, (0, N - x.numel()))
    t, s = torch.empty(N, device=DEV), torch.empty(N, device=DEV)
    _soft[(1,)](x.to(DEV), t, s, N)
    torch.testing.assert_close(t.cpu().double(), x.double().tanh(), rtol=1e-6, atol=0)
    normal = x > -80  # below, an fp32 exponential has only subnormals left
    torch.testing.assert_close(
        s.cpu().double()[normal], x.double().sigmoid()[normal], rtol=1e-5, atol=0
    )
    assert (s.cpu()[~normal] < 1e-34).all()


# ---- activations


def config(act: Activation, width: int, order: str = "gate_first", granule: int = 0) -> EPConfig:
    return EPConfig(
        num_experts=2, top_k=1, hidden_size=8, intermediate_size=width, max_tokens_per_rank=1,
        activation=act, gate_up_order=order, gate_up_interleave=granule,
    )  # fmt: skip


def run(cfg: EPConfig, h: Tensor, weight: Tensor | None = None) -> Tensor:
    a = torch.full((h.shape[0] + 3, cfg.intermediate_size), -7777.0, dtype=torch.bfloat16).to(DEV)
    activate(
        h.to(DEV), a, one_group(h.shape[0]), cfg.act, cfg.gate_up_order, cfg.gate_up_interleave,
        weight_N=None if weight is None else weight.to(DEV),
    )  # fmt: skip
    assert (a[h.shape[0] :] == -7777.0).all(), "a row beyond the groups was written"
    return a[: h.shape[0]].cpu()


def test_every_kind_is_tested() -> None:
    assert set(CASES) == set(KINDS)


@pytest.mark.parametrize("kind", CASES)
def test_values_are_the_cpus_also_at_the_extremes(kind: str) -> None:
    act = CASES[kind]
    pairs = torch.tensor([(g, u) for g in EXTREMES for u in EXTREMES])
    random = torch.randn(400, 2, generator=torch.Generator().manual_seed(1)) * 4
    h = torch.cat([pairs, random])
    h = (h if act.gated else h[:, :1]).bfloat16()
    cfg = config(act, 1)
    got, want = run(cfg, h), activate_ref(cfg, h)
    small = want.abs() < 1e-30  # subnormals may flush
    assert ulps(torch.where(small, 0, got.float()), torch.where(small, 0, want)) <= 1
    assert (got.float()[small].abs() < 1e-30).all()


@pytest.mark.parametrize("kind", CASES)
def test_a_nan_is_not_clamped_away(kind: str) -> None:
    act = CASES[kind]
    h = torch.full((1, 2 if act.gated else 1), math.nan).bfloat16()
    assert run(config(act, 1), h).isnan().all()


@pytest.mark.parametrize("granule", [0, 1, 8])
@pytest.mark.parametrize("order", ["gate_first", "up_first"])
def test_halves_orders_and_weights(order: str, granule: int) -> None:
    cfg = config(CASES["situ"], 136, order, granule)
    g = torch.Generator().manual_seed(2)
    h, weight = torch.randn(19, 272, generator=g).bfloat16(), torch.rand(19, generator=g)
    assert ulps(run(cfg, h), activate_ref(cfg, h)) <= 1
    assert ulps(run(cfg, h, weight), activate_ref(cfg, h) * weight[:, None]) <= 1


def test_a_bias_is_its_groups_and_rounded_before_the_activation() -> None:
    cfg = config(CASES["swiglu"], 24)
    g = torch.Generator().manual_seed(3)
    h, bias = (torch.randn(n, 48, generator=g).bfloat16() for n in (5, 3))
    tiles = group_tiles(ints([4, 0, 10]), ints([2, 0, 3]), 5, 2)
    a = torch.empty(5, 24, dtype=torch.bfloat16, device=DEV)
    activate(h.to(DEV), a, tiles, cfg.act, bias_GW=bias.to(DEV))
    want = activate_ref(cfg, h + bias[[0, 0, 2, 2, 2]])
    assert ulps(a, want) <= 1


# ---- tiles and rows


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=9),
    st.sampled_from([1, 2, 16, 32]),
    st.sampled_from([1, 8, 128]),
    st.integers(0, 50),
    st.randoms(use_true_random=False),
)
def test_tiles_are_those_of_a_walk(counts, block, align, slack, random) -> None:  # type: ignore[no-untyped-def]
    starts, at = [], 0
    for count in counts:
        at += random.randrange(4)
        starts.append(at if count else random.choice([-1, 10**6]))
        at += count
    rows = sum(counts) + slack
    if rows == 0:
        return
    tiles = group_tiles(ints(starts), ints(counts), rows, block, align)
    want, ends = group_tiles_ref(starts, counts, block, align)
    assert int(tiles.total_1) == len(want) <= tile_bound(rows, len(counts), block) == tiles.bound
    assert [tuple(t) for t in tiles.table_T4[: len(want)].tolist()] == want
    assert tiles.ends_G.tolist() == ends


def test_gather_and_scatter_move_the_groups_rows_and_no_others() -> None:
    g = torch.Generator().manual_seed(4)
    H, starts, counts = 520, [2, 0, 30], [5, 0, 19]
    where = [*range(2, 7), *range(30, 49)]
    rows, bias = (
        torch.randn(50, H, generator=g).bfloat16(),
        torch.randn(3, H, generator=g).bfloat16(),
    )
    weight = torch.rand(50, generator=g)
    tiles = group_tiles(ints(starts), ints(counts), 30, 16)
    for w in (None, weight):
        x = torch.full((30, H), -7777.0, dtype=torch.bfloat16, device=DEV)
        gather_rows(rows.to(DEV), x, tiles, None if w is None else w.to(DEV))
        want = rows[where].float() * (1 if w is None else w[where, None])
        assert torch.equal(x[:24].cpu(), want.bfloat16())
        assert (x[24:] == -7777.0).all()
    o = torch.randn(30, H, generator=g).bfloat16()
    for b in (None, bias):
        out = rows.clone().to(DEV)
        scatter_rows(o.to(DEV), out, tiles, None if b is None else b.to(DEV))
        want = rows.clone()
        want[where] = o[:24] if b is None else o[:24] + b[[0] * 5 + [2] * 19]
        assert torch.equal(out.cpu(), want)
