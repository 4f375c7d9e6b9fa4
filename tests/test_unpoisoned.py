"""The protocol users run: three waits a step and no more.

The other tests poison returned buffers, for which the engine needs a fourth wait; that wait could
hide a race. Here poison is off, ranks are jittered between verbs, and every result is checked.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import Tensor

from evenep import Engine, EPConfig, EPGroup, ExpertWeights, launch
from evenep.errors import LaunchError, PeerError

from . import oracle
from .cases import EAGER, Inputs, config

STEPS = 40


@pytest.fixture(autouse=True)
def _no_poison(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVENEP_POISON", "0")


def _jittered(group: EPGroup, cfg: EPConfig, batches: list[Inputs]) -> list[Tensor]:
    os.environ["EVENEP_POISON"] = "0"  # rank processes were started with it on
    rng = torch.Generator().manual_seed(group.rank)

    def nap() -> None:
        if torch.rand(1, generator=rng) < 0.3:
            time.sleep(0.003 * float(torch.rand(1, generator=rng)))

    results = []
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        assert not engine.settings.poison
        for number in range(STEPS):
            x, ids, weights = batches[number % len(batches)].of(group.rank)
            nap()
            step = engine.begin(ids, weights, policy=("auto", "static", "exact")[number % 3])
            for verb in (lambda s=step, x=x: s.dispatch(x), step.fetch, step.compute):
                nap()
                verb()
            nap()
            results.append(step.combine())
    return results


@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
def test_jittered_steps_back_to_back_are_all_right(transport: str) -> None:
    cfg = config(reduction="exact", runner="reference", hidden_size=32, intermediate_size=32)
    batches = [Inputs.skewed(cfg, [3, 5, 2], seed=s, skew=3.0 * (-1) ** s) for s in range(3)]
    source = ExpertWeights.random(cfg)
    wants = [oracle.moe(cfg, source, 0, b.x, b.ids, b.weights) for b in batches]
    outcomes = launch(_jittered, 3, transport, (cfg, batches))
    for number in range(STEPS):
        got = torch.cat([o[number] for o in outcomes])
        assert oracle.rel_l2(got, wants[number % 3]) < 0.006, f"step {number}"


def _crossed(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Two open steps; odd ranks finish them in the other order."""
    os.environ["EVENEP_POISON"] = "0"
    x, ids, weights = inputs.of(group.rank)
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        steps = [engine.begin(ids, weights), engine.begin(ids.flip(0), weights.flip(0))]
        order = (0, 1) if group.rank % 2 == 0 else (1, 0)
        for i in order:
            steps[i].dispatch(x if i == 0 else x.flip(0))
            steps[i].fetch()
        for i in order:
            steps[i].compute()
        done = {i: steps[i].combine() for i in order}
        return done[0], done[1]


@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
def test_lanes_taken_in_different_orders_are_right_or_an_error_but_never_wrong(
    transport: str,
) -> None:
    cfg = config(in_flight=2, reduction="exact", runner="reference", timeout_s=2.0)
    inputs = Inputs.skewed(cfg, [4, 6, 5])
    want = oracle.moe(cfg, ExpertWeights.random(cfg), 0, inputs.x, inputs.ids, inputs.weights)
    try:
        outcomes = launch(_crossed, 3, transport, (cfg, inputs))
    except LaunchError as error:
        wrong = [e for e in error.failures.values() if not isinstance(e, PeerError)]
        if wrong:
            raise
        return
    assert oracle.rel_l2(torch.cat([o[0] for o in outcomes]), want) < 0.006
    assert oracle.rel_l2(torch.cat([o[1].flip(0) for o in outcomes]), want) < 0.006


def _measured_beside(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> Tensor:
    """The first ``auto`` step measures while a step with resident replicas is open."""
    x, ids, weights = inputs.of(group.rank)
    with Engine(cfg, group, ExpertWeights.random(cfg)) as engine:
        for _ in range(2):
            engine(x, ids, weights, policy="exact")
        open_step = engine.begin(ids, weights, policy="exact")
        other = engine.begin(ids, weights, policy="auto")
        assert engine.hardware is not None
        assert engine.hardware.row_ps > 0
        for step in (open_step, other):
            step.dispatch(x)
            step.fetch()
        for step in (open_step, other):
            step.compute()
        y = open_step.combine()
        assert torch.equal(y, other.combine())
        return y


@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
def test_measuring_leaves_other_steps_slots_alone(transport: str) -> None:
    cfg = config(in_flight=2, reduction="exact", runner="reference")
    inputs = Inputs.skewed(cfg, [4, 6, 5])
    want = oracle.moe(cfg, ExpertWeights.random(cfg), 0, inputs.x, inputs.ids, inputs.weights)
    got = torch.cat(launch(_measured_beside, 3, transport, (cfg, inputs)))
    assert oracle.rel_l2(got, want) < 0.006
