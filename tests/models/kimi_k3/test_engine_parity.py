"""F0 and F1 through the engine: every policy, transport and number of ranks against the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from evenep import Engine, EPGroup, launch
from evenep.models.kimi_k3 import KimiK3MoE, checkpoint_weights, load_block_weights
from evenep.models.kimi_k3.reference import Oracle, relative_l2

from ...cases import EAGER, spans

POLICIES = ("static", "exact", "bounded", "auto")
IN_CLASS = 0.006  # the 0.5 % class of BF16 engines, rounded up, before the norm
TOKENS = 24
LAYER = 1


@dataclass(frozen=True)
class Wanted:
    """What the oracle says about a fixture's tokens."""

    path: Path
    x_TH: Tensor
    ids_TK: Tensor
    routed_TD: Tensor
    y_TH: Tensor


def wanted(path: Path) -> Wanted:
    oracle = Oracle(path, LAYER)
    hidden = load_block_weights(path, LAYER).config.hidden_size
    x_TH = torch.randn(TOKENS, hidden, generator=torch.Generator().manual_seed(11)).bfloat16()
    y_TH, routed_TD, ids_TK = oracle.block(x_TH.float())
    return Wanted(path, x_TH, ids_TK, routed_TD, y_TH)


@pytest.fixture(scope="session")
def wanted_f0(f0: Path) -> Wanted:
    return wanted(f0)


@pytest.fixture(scope="session")
def wanted_f1(f1: Path) -> Wanted:
    return wanted(f1)


Result = dict[str, tuple[Tensor, Tensor, Tensor, int]]


def _blocks(group: EPGroup, want: Wanted, tokens: list[int], reduction: str) -> Result:
    """This rank's block outputs per policy: y, routed, ids, replicas used."""
    x_TH = want.x_TH[spans(tokens)[group.rank]]
    slots = -(-32 // group.size) if want.x_TH.shape[1] == 512 else -(-112 // group.size)
    weights = checkpoint_weights(
        want.path,
        layers=(LAYER,),
        ranks=group.size,
        max_tokens_per_rank=TOKENS,
        slots_per_rank=slots if group.size > 1 else 0,
        reduction=reduction,
        timeout_s=30.0,
    )
    out: Result = {}
    with Engine(weights.cfg, group, weights, hardware=EAGER) as engine:
        for policy in POLICIES:

            def experts(z_TD: Tensor, ids: Tensor, w: Tensor, policy: str = policy) -> Tensor:
                return engine(z_TD, ids, w, LAYER, policy=policy)

            done = KimiK3MoE(load_block_weights(want.path, LAYER), experts)(x_TH)
            replicas = engine.records[-1].replicas
            out[policy] = (done.y_TH, done.routed_TD, done.ids_TK, replicas)
    return out


def check(want: Wanted, ranks: int, transport: str, reduction: str) -> None:
    tokens = [TOKENS // ranks] * ranks
    tokens[-1] += TOKENS - sum(tokens)
    if ranks > 2:
        tokens[0], tokens[1] = 0, tokens[0] + tokens[1]
    outcomes = launch(_blocks, ranks, transport, (want, tokens, reduction))
    for policy in POLICIES:
        y, routed, ids = (torch.cat([o[policy][i] for o in outcomes]) for i in range(3))
        assert ids.long().sort(1).values.equal(want.ids_TK.long().sort(1).values)
        assert relative_l2(routed.float(), want.routed_TD) < IN_CLASS, policy
        assert relative_l2(y.float(), want.y_TH) < IN_CLASS, policy
        if policy == "exact" and ranks > 1:
            assert outcomes[0][policy][3] >= 1, "the fixture is skewed on purpose"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
def test_f0_is_in_class_for_every_policy(wanted_f0: Wanted, transport: str, ranks: int) -> None:
    check(wanted_f0, ranks, transport, "compact" if ranks % 2 else "exact")


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
def test_f1_is_in_class_for_every_policy(wanted_f1: Wanted, transport: str, ranks: int) -> None:
    check(wanted_f1, ranks, transport, "exact" if ranks % 2 else "compact")


@pytest.mark.parametrize("reduction", ["exact", "compact"])
def test_f2_layers_load_and_are_in_class(f2: Path, reduction: str) -> None:
    check(wanted(f2), 3, "threads", reduction)
