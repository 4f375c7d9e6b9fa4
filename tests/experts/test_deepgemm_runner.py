"""The DeepGEMM runner around a stand-in that follows the "psum" layout's rules, on a CPU.

What DeepGEMM itself computes only a GPU can say (``test_device_runners.py``); here: groups are
handed over as the layout asks, padding is never read, and a wheel that fails or lies is refused.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from evenep.errors import UnsupportedError
from evenep.experts import deepgemm_runner
from evenep.experts.deepgemm_runner import DeepGemmRunner, probe
from evenep.kernels.quantize import quantize_rows_ref

from .test_device_runners import Problem, config

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="kernels are interpreted, which a GPU's Triton is not"
)


class StandIn(SimpleNamespace):
    """``deep_gemm``'s grouped GEMMs: aligned starts, noise in the padding."""

    align, sms, lie = 128, 0, 1.0

    def set_mk_alignment_for_contiguous_layout(self, align: int) -> None:
        assert align in (64, 128)
        self.align = align

    def set_num_sms(self, sms: int) -> None:
        assert sms > 0
        self.sms = sms

    def m_grouped_bf16_gemm_nt_contiguous(
        self, x: Tensor, w: Tensor, out: Tensor, ends: Tensor, *, use_psum_layout: bool
    ) -> None:
        assert use_psum_layout
        assert ends.dtype == torch.int32
        assert (x.shape[0], w.shape[0]) == (out.shape[0], ends.numel())
        start = 0
        for g, end in enumerate(ends.tolist()):
            assert start <= end
            product = x[start:end].float() @ w[g].float().T
            stop = -(-end // self.align) * self.align
            assert stop <= out.shape[0], "padding does not fit"
            out[start:stop] = torch.nan
            out[start:end] = (product * self.lie).to(out.dtype)
            start = stop

    def m_grouped_fp8_gemm_nt_contiguous(
        self,
        x: tuple[Tensor, Tensor],
        w: tuple[Tensor, Tensor],
        out: Tensor,
        ends: Tensor,
        *,
        use_psum_layout: bool,
    ) -> None:
        (q, scale), (codes, scale_w) = x, w
        assert q.dtype == codes.dtype == torch.float8_e4m3fn
        assert scale.stride() == (1, q.shape[0])
        assert q.shape[0] % 4 == 0, "TMA reads 16 bytes of scales"
        exact_x = q.float() * scale.repeat_interleave(128, 1)
        exact_w = codes.float() * scale_w.repeat_interleave(128, 1).repeat_interleave(128, 2)
        self.m_grouped_bf16_gemm_nt_contiguous(
            exact_x, exact_w, out, ends, use_psum_layout=use_psum_layout
        )


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    module = StandIn()
    monkeypatch.setattr(deepgemm_runner, "load", lambda: module)
    monkeypatch.setattr(deepgemm_runner, "refusal", lambda cfg, device: "")

    def quantize(x: Tensor, q: Tensor, scale: Tensor, tiles: object, sms: object = None) -> None:
        for out, exact in zip((q, scale), quantize_rows_ref(x), strict=True):
            out.copy_(exact)

    monkeypatch.setattr(deepgemm_runner, "quantize_rows", quantize)
    probe.cache_clear()
    return module


@pytest.mark.parametrize("likely", [4, 100])
@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_rows_are_the_definitions(stand_in: StandIn, fmt: str, likely: int) -> None:
    cfg = config("deepgemm", fmt, route_weight="activation", expert_bias=True)
    problem = Problem.make(cfg)
    problem.check(problem.run(DeepGemmRunner(cfg, CPU), likely=likely))
    assert stand_in.align == (64 if likely <= 64 else 128)


def test_groups_at_their_bound_fit(stand_in: StandIn) -> None:
    cfg = config("deepgemm", "bf16")
    groups = [(0, 65), (65, 1), (66, 1), (67, 1), (68, 1)]  # worst padding
    problem = Problem.make(cfg, groups, rows=70)
    problem.check(problem.run(DeepGemmRunner(cfg, CPU), bound=69, likely=100))


@pytest.mark.parametrize("fmt", ["bf16", "fp8"])
def test_the_probe_believes_what_it_checked(stand_in: StandIn, fmt: str) -> None:
    assert probe(fmt, CPU) == ""
    probe.cache_clear()
    stand_in.lie = 1.1
    assert "wrong" in probe(fmt, CPU)


def test_a_wheel_that_fails_is_refused_with_what_it_said(
    stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("dim == 2 or dim == 3")

    monkeypatch.setattr(stand_in, "m_grouped_bf16_gemm_nt_contiguous", fail)
    assert "dim == 2 or dim == 3" in probe("bf16", CPU)


def test_no_wheel_no_gpu_and_odd_sizes_are_refused() -> None:
    for changes, words in (({}, "SM90"), ({"hidden_size": 200}, "multiples of 64")):
        with pytest.raises(UnsupportedError, match=words):
            DeepGemmRunner(config("deepgemm", "bf16", **changes), CPU)
