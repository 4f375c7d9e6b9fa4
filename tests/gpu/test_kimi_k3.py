"""A full-shape Kimi-K3 layer (896 experts, 15.7 GB) on 8 ranks that share one GPU."""

from __future__ import annotations

import pytest
from torch import Tensor

from evenep import Engine, EPConfig, EPGroup, ExpertWeights
from tests.cases import launch_at

pytestmark = pytest.mark.gpu
IN_CLASS = 0.006


def _layer(group: EPGroup, cfg: EPConfig) -> list[Tensor]:
    from evenep.bench.gpu_layer import draw

    with Engine(cfg, group, ExpertWeights.random(cfg, device="cuda")) as engine:
        r = group.rank
        outputs = []
        for policy in ("static", "bounded", "auto"):
            inputs = draw(cfg.max_tokens_per_rank, "6", seed=3)
            y_TH = engine(inputs.x[r], inputs.ids[r], inputs.weights[r], policy=policy)
            outputs.append(y_TH)
        engine.synchronize()
        replicas = [record.replicas for record in engine.records]
        assert replicas[0] == 0
        assert replicas[1] > 0
        return outputs


@pytest.mark.timeout(300)
def test_a_full_layer_on_eight_ranks_is_in_the_parity_class() -> None:
    from evenep.bench.gpu_layer import config, draw, parity

    cfg = config(32)
    outcomes = launch_at(_layer, cfg.ranks, "threads@cuda", (cfg,))
    inputs = draw(32, "6", seed=3)
    source = ExpertWeights.random(cfg, device="cuda")
    for policy in range(3):
        got = [outcome[policy] for outcome in outcomes]
        assert parity(cfg, source, inputs, got) < IN_CLASS
