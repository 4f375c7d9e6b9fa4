"""Activations against their formulas in scalar math, and how w13's output splits (A1-A6)."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep import Activation, EPConfig
from evenep.activation import KINDS
from evenep.experts.activations import GATED, activate, split_gate_up

EXTREMES = [0.0, -0.0, 1.0, -1.0, 0.7, -0.7, 7.0, -7.0, 25.0, 88.0, -88.0, 710.0, -710.0, 1e4, -1e4]


def sigmoid(x: float) -> float:
    """Without overflow on either side."""
    return 1 / (1 + math.exp(-x)) if x >= 0 else math.exp(x) / (1 + math.exp(x))


def clamp(x: float, limit: float) -> float:
    return max(-limit, min(limit, x))


def swigluoai(g: float, u: float) -> float:
    low = min(g, 7.0)
    return low * sigmoid(1.702 * low) * (clamp(u, 7.0) + 1)


Scalar = Callable[[float, float], float]
CASES: dict[str, tuple[Activation, Scalar]] = {
    "swiglu": (Activation("swiglu"), lambda g, u: g * sigmoid(g) * u),
    "swiglu_clamp_before": (
        Activation("swiglu_clamp_before", limit=7.0),
        lambda g, u: min(g, 7.0) * sigmoid(min(g, 7.0)) * clamp(u, 7.0),
    ),
    "swiglu_clamp_after": (
        Activation("swiglu_clamp_after", limit=7.0),
        lambda g, u: min(g * sigmoid(g), 7.0) * clamp(u, 7.0),
    ),
    "swigluoai": (Activation("swigluoai", alpha=1.702, limit=7.0), swigluoai),
    "situ": (
        Activation.situ(),
        lambda g, u: 4 * math.tanh(g / 4) * sigmoid(g) * 25 * math.tanh(u / 25),
    ),
    "relu2": (Activation("relu2"), lambda g, u: max(g, 0.0) ** 2),
}


def config(activation: Activation | str, width: int, **changes: object) -> EPConfig:
    sizes: dict[str, object] = {
        "num_experts": 2,
        "top_k": 1,
        "hidden_size": 8,
        "intermediate_size": width,
        "max_tokens_per_rank": 1,
        "activation": activation,
    }
    return EPConfig(**(sizes | changes))  # type: ignore[arg-type]


def test_every_kind_has_a_formula_here_and_in_the_code() -> None:
    assert set(CASES) == set(KINDS) == {*GATED, "relu2"}


@pytest.mark.parametrize("kind", CASES)
def test_values_match_the_scalar_formula_also_at_the_extremes(kind: str) -> None:
    activation, formula = CASES[kind]
    pairs = [(g, u) for g in EXTREMES for u in EXTREMES]
    h = torch.tensor([[g, u] if activation.gated else [g] for g, u in pairs])
    got = activate(config(activation, 1), h)
    want = torch.tensor([[formula(g, u)] for g, u in pairs], dtype=torch.float64)
    assert got.dtype == torch.float32
    assert torch.isfinite(got).all()
    torch.testing.assert_close(got.double(), want, rtol=3e-6, atol=1e-30)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.tuples(*[st.floats(-1e4, 1e4, width=16)] * 2), min_size=1, max_size=20),
)
def test_values_match_the_scalar_formula_anywhere(
    kind: str, pairs: list[tuple[float, float]]
) -> None:
    activation, formula = CASES[kind]
    h = torch.tensor([[g, u] if activation.gated else [g] for g, u in pairs])
    want = torch.tensor([[formula(g, u)] for g, u in pairs], dtype=torch.float64)
    # Near zero the factors' rounding is relative, below the smallest normal fp32 it is not.
    torch.testing.assert_close(
        activate(config(activation, 1), h).double(), want, rtol=3e-6, atol=1e-36
    )


@pytest.mark.parametrize("kind", ["swiglu_clamp_before", "swiglu_clamp_after", "swigluoai", "situ"])
def test_bounded_kinds_stay_finite_at_infinity(kind: str) -> None:
    h = torch.tensor([[math.inf, math.inf], [math.inf, -math.inf]])
    got = activate(config(CASES[kind][0], 1), h)
    assert torch.isfinite(got).all()
    limit = 100.0 if kind == "situ" else 56.0
    assert float(got.abs().max()) <= limit


def test_situ_saturates_at_its_constants() -> None:
    got = activate(config(Activation.situ(3.0, 5.0), 1), torch.tensor([[1e4, 1e4], [1e4, -1e4]]))
    assert got.flatten().tolist() == [15.0, -15.0]


def test_the_input_is_left_alone() -> None:
    for kind, (activation, _) in CASES.items():
        h = torch.randn(3, 4)
        before = h.clone()
        activate(config(activation, 2 if activation.gated else 4), h)
        assert torch.equal(h, before), kind


def test_bf16_input_is_computed_in_fp32() -> None:
    h = torch.randn(50, 2, generator=torch.Generator().manual_seed(0)).bfloat16()
    for kind, (activation, _) in CASES.items():
        cfg = config(activation, 1 if activation.gated else 2)
        assert torch.equal(activate(cfg, h), activate(cfg, h.float())), kind


# ---- halves


@settings(deadline=None, max_examples=100)
@given(
    st.integers(0, 4),
    st.integers(1, 6),
    st.sampled_from(["gate_first", "up_first"]),
    st.sampled_from([0, 1, 8]),
)
def test_halves_match_a_loop_over_columns(n: int, blocks: int, order: str, granule: int) -> None:
    width = blocks * max(granule, 1)
    h = torch.arange(n * 2 * width).float().view(n, 2 * width)
    halves: tuple[list[int], list[int]] = ([], [])
    for column in range(2 * width):
        half = (column // granule) % 2 if granule else column // width
        halves[half].append(column)
    first, second = h[:, halves[0]], h[:, halves[1]]
    gate, up = split_gate_up(h, order, granule)
    want = (first, second) if order == "gate_first" else (second, first)
    assert torch.equal(gate, want[0])
    assert torch.equal(up, want[1])
    cfg = config("swiglu", width, gate_up_order=order, gate_up_interleave=granule)
    torch.testing.assert_close(
        activate(cfg, h / 99), torch.sigmoid(gate / 99) * gate / 99 * up / 99
    )
