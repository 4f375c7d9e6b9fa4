"""fp32 throughout, ties to the lowest id, the bias chooses and never weighs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from evenep.errors import InputError
from evenep.models.kimi_k3 import load_block_weights, route
from evenep.models.kimi_k3.reference import Oracle


def test_equals_the_oracle(f1: Path) -> None:
    block, oracle = load_block_weights(f1, 1), Oracle(f1, 1)
    x = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)).bfloat16()
    ids, weights = route(x, block.gate_EH, block.bias_E, 16)
    want_ids, want_weights = oracle.router(x.float())
    assert ids.dtype == torch.int32
    assert weights.dtype == torch.float32
    assert torch.equal(ids.long(), want_ids)
    torch.testing.assert_close(weights, want_weights, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(weights.sum(1), torch.ones(64))


def test_ties_go_to_the_lowest_id() -> None:
    ids, weights = route(torch.ones(3, 8), torch.zeros(896, 8), torch.zeros(896), 16)
    assert torch.equal(ids, torch.arange(16, dtype=torch.int32).repeat(3, 1))
    torch.testing.assert_close(weights, torch.full((3, 16), 1 / 16))
    bias = torch.zeros(896)
    bias[500] = 1.0
    ids, _ = route(torch.ones(1, 8), torch.zeros(896, 8), bias, 4)
    assert ids.tolist() == [[500, 0, 1, 2]]


def test_bias_does_not_weigh() -> None:
    gate = torch.tensor([[0.0], [1.0], [2.0]])
    x = torch.ones(1, 1)
    scores = torch.sigmoid(gate[:, 0])
    ids, weights = route(x, gate, torch.tensor([9.0, 5.0, 0.0]), 2, scaling=2.5)
    assert ids.tolist() == [[0, 1]]
    torch.testing.assert_close(weights[0], 2.5 * scores[:2] / scores[:2].sum())


def test_forced_ids_are_weighed_by_their_own_scores() -> None:
    gate = torch.tensor([[0.0], [1.0], [2.0]])
    scores = torch.sigmoid(gate[:, 0])
    forced = torch.tensor([[2, 0], [1, -1], [-1, -1]], dtype=torch.int32)
    ids, weights = route(torch.ones(3, 1), gate, torch.zeros(3), 2, ids_TK=forced)
    assert torch.equal(ids, forced)
    pair = scores[[2, 0]]
    torch.testing.assert_close(weights[0], pair / pair.sum())
    assert weights[1:].tolist() == [[1.0, 0.0], [0.0, 0.0]]


def test_logits_are_not_rounded_to_bf16() -> None:
    """Two logits one bf16 step would merge; the larger must win over the lower id."""
    gate = torch.tensor([[256.0, 0.0], [256.0, 0.25]]) / 256
    ids, _ = route(torch.ones(1, 2).bfloat16(), gate.bfloat16(), torch.zeros(2), 1)
    assert ids.tolist() == [[1]]


def test_no_tokens() -> None:
    ids, weights = route(torch.ones(0, 8), torch.zeros(4, 8), torch.zeros(4), 2)
    assert ids.shape == weights.shape == (0, 2)


@pytest.mark.parametrize(
    "forced", [torch.zeros(1, 2), torch.zeros(2, 1).int(), torch.full((1, 2), 3).int()]
)
def test_bad_forced_ids(forced: torch.Tensor) -> None:
    with pytest.raises(InputError, match="forced ids"):
        route(torch.ones(1, 1), torch.zeros(3, 1), torch.zeros(3), 2, ids_TK=forced)


def test_bias_must_stay_fp32() -> None:
    with pytest.raises(InputError, match="fp32"):
        route(torch.ones(1, 1), torch.zeros(3, 1), torch.zeros(3).bfloat16(), 2)
