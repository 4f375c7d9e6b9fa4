"""States, failures and new weights of a GPU's engine, on a CPU: its kernels are interpreted."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor

from evenep import Engine, EPConfig, EPGroup, ExpertWeights, Hardware
from evenep.device import measure
from evenep.errors import (
    AgreementError,
    InputError,
    LeaseError,
    PeerFailed,
    PlanError,
    PoisonedError,
    StateError,
    UnsupportedError,
)
from tests import oracle
from tests.cases import EAGER, Inputs
from tests.test_engine import IN_CLASS

from .interpreted import config, interpreted, only_interpreted, run_ranks

pytestmark = only_interpreted

TOKENS = [4, 2]


def right(cfg: EPConfig, inputs: Inputs, outcomes: list[Tensor], seed: int = 1) -> None:
    """All ranks' outputs of a step are the oracle's."""
    source = ExpertWeights.random(cfg, seed=seed)
    want = oracle.moe(cfg, source, 0, inputs.x, inputs.ids, inputs.weights)
    assert oracle.rel_l2(torch.cat(outcomes), want) < IN_CLASS


# ---- order of verbs


def _out_of_order(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> Tensor:
    x, ids, weights = inputs.of(0)
    source = ExpertWeights.random(cfg, seed=1)
    with interpreted(), Engine(cfg, group, source, hardware=EAGER) as engine:
        step = engine.begin(ids, weights)
        for verb in (step.fetch, step.compute, step.combine):
            with pytest.raises(StateError, match="wrong order"):
                verb()
        with pytest.raises(StateError, match="in flight"):
            engine.begin(ids, weights)
        with pytest.raises(StateError, match="in flight"):
            engine.update_weights(0, source)
        with pytest.raises(InputError):
            step.dispatch(x[:1])
        with pytest.raises(LeaseError):
            _ = step.rows
        step.dispatch(x)
        with pytest.raises(StateError):
            step.dispatch(x)
        step.fetch()
        step.compute()
        y = step.combine()
        with pytest.raises(StateError):
            step.combine()
        with pytest.raises(UnsupportedError, match="GPU"):
            engine.capture(lambda: None)
    with pytest.raises(StateError, match="closed"):
        engine(x, ids, weights)
    engine.close()
    return y


def test_verbs_in_the_wrong_order_raise_and_the_step_can_still_be_finished() -> None:
    cfg = config(ranks=1)
    inputs = Inputs.skewed(cfg, [6])
    right(cfg, inputs, run_ranks(_out_of_order, 1, cfg, inputs))


# ---- new weights


def _replace_weights(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> list[Tensor]:
    old, new = (ExpertWeights.random(cfg, seed=s) for s in (1, 2))
    with interpreted(), Engine(cfg, group, old, hardware=EAGER) as engine:
        out = [engine(*inputs.of(group.rank)) for _ in range(2)]
        engine.update_weights(0, new)
        out.append(engine(*inputs.of(group.rank)))
        engine.synchronize()
        first, resident, after = (r.fetches for r in engine.records)
        assert 0 < first == after
        assert resident == 0
        with pytest.raises(PlanError, match="may need more"):
            engine(*inputs.of(group.rank), policy="static")  # room for even loads only
        return out


def test_new_weights_void_replicas_of_the_old_ones() -> None:
    cfg = config(ranks=2, policy="exact")
    inputs = Inputs.skewed(cfg, TOKENS)
    outcomes = run_ranks(_replace_weights, 2, cfg, inputs)
    for step, seed in enumerate((1, 1, 2)):
        right(cfg, inputs, [o[step] for o in outcomes], seed)


# ---- failures


class Boom(Exception):
    """An ordinary exception of the user's."""


def _stumble(
    group: EPGroup, cfg: EPConfig, inputs: Inputs, victim: int, places: list[str], poison: str
) -> list[Tensor]:
    """In a step per place the victim raises ahead of that verb; then a reset and a whole step."""
    x, ids, weights = inputs.of(group.rank)
    source, out = ExpertWeights.random(cfg, seed=1), []
    with (
        interpreted(EVENEP_POISON=poison),
        Engine(cfg, group, source, hardware=EAGER) as engine,
    ):

        def step_until(place: str) -> None:
            step = engine.begin(ids, weights)
            verbs: dict[str, Callable[[], object]] = {
                "dispatch": lambda: step.dispatch(x),
                "fetch": step.fetch,
                "compute": step.compute,
                "combine": step.combine,
            }
            for name, verb in verbs.items():
                if name == place and group.rank == victim:
                    raise Boom(place)
                verb()

        for place in places:
            engine(x, ids, weights)  # leaves replicas behind, which a reset must not trust
            if group.rank == victim:
                with pytest.raises(Boom) as caught:
                    step_until(place)
                engine.poison(caught.value)
            else:
                with pytest.raises(PeerFailed, match=place) as failed:
                    step_until(place)
                assert failed.value.peer == victim
                assert failed.value.phase == {"fetch": "dispatch"}.get(place, place)
            with pytest.raises(PoisonedError):
                engine.begin(ids, weights)
            engine.reset()
            out.append(engine(x, ids, weights))
            engine.synchronize()
            assert engine.records[-1].fetches == engine.records[-1].replicas > 0
    return out


@pytest.mark.parametrize(("places", "poison"), [(["fetch"], "1"), (["combine"], "0")])
def test_after_a_rank_raised_and_a_reset_steps_are_right(places: list[str], poison: str) -> None:
    cfg = config(ranks=2, policy="exact", row_alignment=4)
    inputs = Inputs.skewed(cfg, TOKENS)
    outcomes = run_ranks(_stumble, 2, cfg, inputs, 1, places, poison)
    for step in range(len(places)):
        right(cfg, inputs, [o[step] for o in outcomes])


def _trip(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> Tensor:
    """What only kernels can see is found at the step after."""
    x, ids, weights = inputs.of(group.rank)
    source = ExpertWeights.random(cfg, seed=1)
    with (
        interpreted(EVENEP_DEBUG="0"),
        Engine(cfg, group, source, hardware=EAGER) as engine,
    ):
        bad = ids.clone()
        bad[0, 0] = cfg.num_experts if group.rank == 0 else bad[0, 0]
        engine(x, bad, weights)
        if group.rank == 0:
            with pytest.raises(InputError, match="out of range"):
                engine.synchronize()
        engine.reset()
        engine(x, ids, weights, policy="exact" if group.rank == 0 else "bounded")
        with pytest.raises(AgreementError, match="disagreed"):
            engine.synchronize()
        engine.reset()
        y = engine(x, ids, weights)
        engine.synchronize()
        return y


def test_bad_ids_and_disagreement_are_found_by_kernels_and_recovered_from() -> None:
    cfg = config(ranks=2, policy="exact")
    inputs = Inputs.skewed(cfg, TOKENS)
    right(cfg, inputs, run_ranks(_trip, 2, cfg, inputs))


# ---- cost constants


def _measure(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> tuple[Hardware | None, Tensor]:
    """With few rows: the interpreter is slow."""
    source = ExpertWeights.random(cfg, seed=1)
    small = mock.patch.multiple(measure, _FEW=4, _MANY=20, _REPEATS=2)
    with interpreted(), small, Engine(cfg, group, source) as engine:
        return engine.hardware, engine(*inputs.of(group.rank))


def test_measured_costs_are_agreed_and_leave_steps_right() -> None:
    cfg = config(ranks=2, num_experts=2, top_k=2)
    inputs = Inputs.skewed(cfg, TOKENS)
    outcomes = run_ranks(_measure, 2, cfg, inputs)
    (found, _), (other, _) = outcomes
    assert found == other
    assert found.read_ps > 0
    assert found.fetch_ps > 0
    assert found.plan_ps > 0
    assert found.parallel == 1  # both ranks share what they run on
    right(cfg, inputs, [y for _, y in outcomes])
