"""The block equals the oracle on the hot fixture, and every plausible bug would be seen there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from evenep.errors import InputError
from evenep.formats import format_of
from evenep.models.kimi_k3 import KimiK3MoE, MoEOutput, load_block_weights, write_fixture
from evenep.models.kimi_k3.block import Experts, linear, situ
from evenep.models.kimi_k3.reference import Oracle, relative_l2, rnd
from evenep.models.kimi_k3.weights import checkpoint_weights

TOLERANCE = 0.01  # relative L2: twice the noise of another order of bf16 roundings


def tokens(count: int = 128, width: int = 512) -> Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(3)).bfloat16()


def loaded_experts(path: Path, layer: int) -> Experts:
    """One rank that owns everything, through the engine's own reader and decoder."""
    source = checkpoint_weights(path, max_tokens_per_rank=1)
    fmt, E = format_of(source.cfg), source.cfg.num_experts
    specs = fmt.specs(source.cfg)
    rows = [{s.name: torch.empty(s.shape, dtype=s.dtype) for s in specs} for _ in range(E)]
    source.load(layer, range(E), rows)
    I = source.cfg.intermediate_size  # noqa: E741

    def experts(x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        total_TD = torch.zeros(x_TD.shape)
        for e in range(E):
            t, k = torch.where(ids_TK == e)
            w13, w2 = fmt.decode(rows[e], torch.bfloat16)
            both = linear(x_TD[t], w13)
            out = linear(situ(both[:, :I], both[:, I:], source.cfg.act), w2)
            total_TD.index_add_(0, t, out.float() * weights_TK[t, k, None])
        return total_TD.bfloat16()

    return experts


@pytest.fixture(scope="module")
def oracle(f0: Path) -> Oracle:
    return Oracle(f0, 1)


@pytest.fixture(scope="module")
def truth(oracle: Oracle) -> tuple[Tensor, Tensor, Tensor]:
    return oracle.block(tokens())


def test_block_equals_oracle(f0: Path, truth: tuple[Tensor, Tensor, Tensor]) -> None:
    out = KimiK3MoE.from_checkpoint(f0, 1, loaded_experts(f0, 1))(tokens())
    y, routed, ids = truth
    assert isinstance(out, MoEOutput)
    assert torch.equal(out.ids_TK.sort().values, ids.int().sort().values)
    assert relative_l2(out.routed_TD, routed) < TOLERANCE
    assert relative_l2(out.y_TH, y) < TOLERANCE
    assert (out.y_TH.dtype, out.routed_TD.dtype) == (torch.bfloat16, torch.bfloat16)


def test_whole_model_layer_equals_oracle(f2: Path) -> None:
    out = KimiK3MoE.from_checkpoint(f2, 3, loaded_experts(f2, 3))(tokens(32))
    y, routed, _ = Oracle(f2, 3).block(tokens(32))
    assert relative_l2(out.routed_TD, routed) < TOLERANCE
    assert relative_l2(out.y_TH, y) < TOLERANCE


def test_forced_ids(f0: Path, oracle: Oracle) -> None:
    forced = torch.arange(32, dtype=torch.int32).view(8, 4)
    forced[3, 2:] = -1
    forced[5] = -1
    out = KimiK3MoE.from_checkpoint(f0, 1, loaded_experts(f0, 1))(tokens(8), forced)
    y, routed, _ = oracle.block(tokens(8), forced)
    assert relative_l2(out.routed_TD, routed) < TOLERANCE
    assert relative_l2(out.y_TH, y) < TOLERANCE
    assert not out.routed_TD[5].any(), "nothing routed is zero, not NaN"
    assert out.y_TH.isfinite().all()


def test_no_tokens(f0: Path) -> None:
    out = KimiK3MoE(load_block_weights(f0, 1), lambda x, ids, w: x)(tokens(0))
    assert out.y_TH.shape == (0, 512)
    assert out.ids_TK.shape == (0, 4)


def test_bad_input(f0: Path) -> None:
    block = KimiK3MoE(load_block_weights(f0, 1), lambda x, ids, w: x)
    for bad in (tokens().float(), tokens()[0], tokens()[:, :256]):
        with pytest.raises(InputError, match="bad x"):
            block(bad)


class SwappedGateUp(Oracle):
    def gate_up(self, z_ND: Tensor, e: int) -> tuple[Tensor, Tensor]:
        g, u = super().gate_up(z_ND, e)
        return u, g


class SwappedNibbles(Oracle):
    def decode(self, packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Tensor:
        return super().decode(((packed >> 4) | (packed << 4)).astype(np.uint8), scale)


class ShiftedScale(Oracle):
    def decode(self, packed: NDArray[np.uint8], scale: NDArray[np.uint8]) -> Tensor:
        return super().decode(packed, np.roll(scale, 1, axis=1))


class SiLU(Oracle):
    def activation(self, g: Tensor, u: Tensor) -> Tensor:
        return torch.nn.functional.silu(g) * u


class SiLUGate(Oracle):
    def activation(self, g: Tensor, u: Tensor) -> Tensor:
        b = self.linear_beta
        return torch.nn.functional.silu(g) * b * torch.tanh(u / b)


class NoLinearBeta(Oracle):
    def activation(self, g: Tensor, u: Tensor) -> Tensor:
        return self.beta * torch.tanh(g / self.beta) * torch.sigmoid(g) * u


class SwigluOAI(Oracle):
    def activation(self, g: Tensor, u: Tensor) -> Tensor:
        alpha, limit = self.beta, self.linear_beta
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
        return g * torch.sigmoid(alpha * g) * (u + 1)


class BiasedWeights(Oracle):
    def weigh(self, x_TH: Tensor, ids_TK: Tensor) -> Tensor:
        _, choice_TE = self.scores(x_TH)
        weight_TK = choice_TE.gather(1, ids_TK)
        return weight_TK / weight_TK.sum(1, keepdim=True)


MUTANTS: list[type[Oracle]] = [
    SwappedGateUp,
    SwappedNibbles,
    ShiftedScale,
    SiLU,
    SiLUGate,
    NoLinearBeta,
    SwigluOAI,
    BiasedWeights,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.__name__)
def test_mutants_of_the_routed_sum_are_seen(
    f0: Path, truth: tuple[Tensor, Tensor, Tensor], mutant: type[Oracle]
) -> None:
    _, routed, _ = mutant(f0, 1).block(tokens())
    assert relative_l2(routed, truth[1]) > 10 * TOLERANCE


def test_norm_per_rank_then_sum_is_seen(
    oracle: Oracle, truth: tuple[Tensor, Tensor, Tensor]
) -> None:
    """The norm sees the finished sum: norming two ranks' partial sums is another function."""
    x = tokens().float()
    ids, weights = oracle.router(x)
    z = oracle.latent(x)
    halves = [oracle.routed(z, ids, weights * home) for home in (ids < 16, ids >= 16)]
    whole = rnd(halves[0] + halves[1])
    assert relative_l2(whole, truth[1]) < TOLERANCE
    wrong = oracle.norm(halves[0]) + oracle.norm(halves[1])
    assert relative_l2(wrong, oracle.norm(truth[1])) > 10 * TOLERANCE


def test_tame_contents_would_hide_a_wrong_activation(tmp_path: Path) -> None:
    """Why fixtures are hot: on tame ones, dropping linear_beta is below the tolerance."""
    path = write_fixture(tmp_path, "F0", hot=False)
    good, bad = Oracle(path, 1).block(tokens(32))[1], NoLinearBeta(path, 1).block(tokens(32))[1]
    assert relative_l2(bad, good) < TOLERANCE
