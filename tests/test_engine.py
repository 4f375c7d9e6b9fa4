"""The engine against its oracle: every choice it offers, on ragged, dropped and odd input."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

import evenep
from evenep import Activation, Engine, EPConfig, EPGroup, ExpertWeights, Hardware, launch
from evenep.formats import format_of

from . import oracle
from .cases import EAGER, Inputs, config, launch_at, run_policies, spans, whole

POLICIES = ("static", "exact", "bounded", "auto")
IN_CLASS = 0.006  # relative L2: the 0.5 % class of BF16 engines, rounded up


def _say_choice(group: EPGroup, cfg: EPConfig) -> tuple[str, str]:
    with Engine(cfg, group, ExpertWeights.random(cfg)) as engine:
        return engine.runner_choice


@pytest.mark.parametrize(
    ("runner", "name", "why"),
    [
        ("auto", "torch", "the fast one on a CPU"),
        ("torch", "torch", "asked for"),
        ("reference", "reference", "asked for"),
    ],
)
def test_the_engine_says_which_runner_it_has_and_why(runner: str, name: str, why: str) -> None:
    assert launch(_say_choice, 1, "threads", (config(runner=runner, ranks=1),)) == [(name, why)]


def check(cfg: EPConfig, inputs: Inputs, transport: str = "threads", **kwargs: object) -> None:
    source = ExpertWeights.random(cfg, layers=1, seed=1)
    args = (cfg, source, inputs, POLICIES, *kwargs.values())
    outcomes = launch_at(run_policies, cfg.ranks, transport, args)
    want = oracle.moe(cfg, source, 0, inputs.x, inputs.ids, inputs.weights)
    for policy in POLICIES:
        got = whole(outcomes, policy)
        assert not got.isnan().any(), policy
        assert oracle.rel_l2(got, want) < IN_CLASS, policy


@pytest.mark.parametrize("weight_format", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("reduction", ["exact", "compact"])
@pytest.mark.parametrize("runner", ["torch", "reference"])
def test_formats_runners_and_reductions_match_the_oracle(
    weight_format: str, reduction: str, runner: str
) -> None:
    cfg = config(
        weight_format=weight_format, reduction=reduction, runner=runner, intermediate_size=128
    )
    check(cfg, Inputs.skewed(cfg, [9, 0, 17]))


ACTIVATIONS = [
    Activation("swiglu"),
    Activation("swiglu_clamp_before", limit=0.5),
    Activation("swiglu_clamp_after", limit=0.2),
    Activation("swigluoai", alpha=1.702, limit=0.7),
    Activation.situ(0.5, 1.5),
    Activation("relu2"),
]


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("place", ["output", "activation", "input"])
def test_activations_biases_and_route_weight_places_match_the_oracle(
    activation: Activation, place: str
) -> None:
    cfg = config(activation=activation, route_weight=place, expert_bias=True, reduction="compact")
    check(cfg, Inputs.skewed(cfg, [9, 0, 17]))


@pytest.mark.parametrize("order", ["gate_first", "up_first"])
@pytest.mark.parametrize("granule", [0, 1, 8])
def test_gate_up_layouts_match_the_oracle(order: str, granule: int) -> None:
    cfg = config(gate_up_order=order, gate_up_interleave=granule, reduction="exact")
    check(cfg, Inputs.skewed(cfg, [5, 6, 7]))


def test_the_activation_oracle_tells_the_kinds_and_layouts_apart() -> None:
    h = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)) * 3
    seen = [
        oracle.activation(config(activation=a, gate_up_interleave=g, gate_up_order=o), h)
        for a in ACTIVATIONS[:-1]
        for g in (0, 1, 8)
        for o in ("gate_first", "up_first")
    ]
    for i, a in enumerate(seen):
        assert all(not torch.allclose(a, b, rtol=0.02) for b in seen[i + 1 :])


@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
@pytest.mark.parametrize("ranks", [1, 2, 5, 16])
def test_any_number_of_ranks_also_more_than_experts(transport: str, ranks: int) -> None:
    if transport == "collective" and ranks == 16:
        ranks = 7  # 7 does not divide 13 either, with a third of the connections
    cfg = config(ranks=ranks, reduction="exact", row_alignment=4)
    check(cfg, Inputs.skewed(cfg, [(3 * r) % 5 for r in range(ranks)]), transport)


def forced(cfg: EPConfig, ids: Tensor, tokens: list[int]) -> Inputs:
    g = torch.Generator().manual_seed(5)
    x = torch.randn(ids.shape[0], cfg.hidden_size, generator=g).bfloat16()
    return Inputs(x, ids, torch.rand(ids.shape, generator=g), spans(tokens))


@pytest.mark.parametrize("reduction", ["exact", "compact"])
def test_ordinary_oddities_match_the_oracle(reduction: str) -> None:
    cfg = config(reduction=reduction, row_alignment=16)
    n = cfg.top_k
    cases = {
        "one hot expert": torch.zeros(20, n, dtype=torch.int64),
        "all dropped": torch.full((20, n), -1),
        "very negative ids": torch.full((20, n), -(2**40)),
        "all to one rank's experts": torch.arange(20)[:, None] * 0 + torch.arange(n),
        "one token": torch.tensor([[0, 3, 7, 12]]),
        "nothing at all": torch.zeros(0, n, dtype=torch.int64),
        "repeats in a token": torch.tensor([[2, 2, 5, 2], [12, 12, 12, 12]]),
    }
    for name, ids in cases.items():
        tokens = [ids.shape[0] - ids.shape[0] // 3, 0, ids.shape[0] // 3]
        try:
            check(cfg, forced(cfg, ids, tokens))
        except AssertionError as error:
            raise AssertionError(name) from error


@pytest.mark.parametrize("top_k", [1, 13])
def test_top_1_and_top_all_match_the_oracle(top_k: int) -> None:
    cfg = config(top_k=top_k)
    check(cfg, Inputs.skewed(cfg, [4, 9, 2]))


def test_any_placement_map_matches_the_oracle() -> None:
    cfg = config(slots_per_rank=13)
    homes = [2, 0, 2, 2, 0, 0, 0, 2, 2, 2, 2, 0, 2]  # rank 1 owns nothing
    check(cfg, Inputs.skewed(cfg, [8, 8, 8]), placement=homes)


def _integers(cfg: EPConfig) -> ExpertWeights:
    """Weights of -1, 0 and 1 only: every sum in the engine is exact in fp32."""
    g = torch.Generator().manual_seed(3)
    tensors = {
        s.name: torch.randint(-1, 2, (cfg.num_experts, *s.shape), generator=g).to(s.dtype)
        for s in format_of(cfg).specs(cfg)
    }
    return ExpertWeights.from_tensors(cfg, tensors)


def test_exact_reduction_of_integer_rows_is_bitwise_equal_over_ranks_policies_and_transports() -> (
    None
):
    results = []
    for transport, ranks in [
        (transport, ranks)
        for transport in ("threads", "shm", "collective")
        for ranks in (1, 2, 3, 4, 7, 8)
    ]:
        cfg = config(
            ranks=ranks, reduction="exact", activation="relu2", hidden_size=16,
            intermediate_size=16, max_tokens_per_rank=40,
        )  # fmt: skip
        base = Inputs.skewed(cfg, [40], seed=9)
        g = torch.Generator().manual_seed(4)
        x = torch.randint(-2, 3, base.x.shape, generator=g).bfloat16()
        tokens = [40 // ranks] * (ranks - 1)
        inputs = Inputs(x, base.ids, base.weights, spans([*tokens, 40 - sum(tokens)]))
        outcomes = launch(run_policies, ranks, transport, (cfg, _integers(cfg), inputs, POLICIES))
        results += [whole(outcomes, policy) for policy in POLICIES]
    assert results[0].abs().max() > 1
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_exact_reduction_with_the_reference_runner_is_bitwise_equal_for_any_values() -> None:
    results = []
    for ranks in (1, 2, 5):
        cfg = config(
            ranks=ranks, reduction="exact", runner="reference", activation=Activation.situ(),
            max_tokens_per_rank=30, weight_format="mxfp4",
        )  # fmt: skip
        base = Inputs.skewed(cfg, [30], seed=2)
        tokens = [30 // ranks] * ranks
        inputs = Inputs(base.x, base.ids, base.weights, spans(tokens))
        source = ExpertWeights.random(cfg, seed=1)
        outcomes = launch(run_policies, ranks, "threads", (cfg, source, inputs, POLICIES))
        results += [whole(outcomes, policy) for policy in POLICIES]
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_policies_really_balance_and_use_replicas() -> None:
    cfg = config()
    inputs = Inputs.skewed(cfg, [20, 20, 20])
    args = (cfg, ExpertWeights.random(cfg), inputs, POLICIES)
    first = launch(run_policies, 3, "threads", args)[0]
    static, exact, bounded, auto = (first[p][1:] for p in POLICIES)
    assert static[0] > 1.5
    assert static[1] == 0
    assert exact[0] < 1.01
    assert exact[1] >= 2
    assert bounded[0] <= 1 + cfg.epsilon + 0.01
    assert auto[0] < 1.1
    assert auto[1] >= 1


def _two_in_flight(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    x, ids, weights = inputs.of(group.rank)
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        plain = engine(x, ids, weights)
        first = engine.begin(ids, weights)
        second = engine.begin(ids.flip(0), weights.flip(0))
        for step, rows in ((first, x), (second, x.flip(0))):
            step.dispatch(rows)
        for step in (second, first):
            step.fetch()
        for step in (first, second):
            step.compute()
        return plain, first.combine(), second.combine().flip(0)


@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
def test_two_steps_in_flight_equal_one_after_the_other(transport: str) -> None:
    cfg = config(in_flight=2, reduction="exact", runner="reference")
    inputs = Inputs.skewed(cfg, [7, 3, 11])
    for plain, first, second in launch(_two_in_flight, 3, transport, (cfg, inputs)):
        assert torch.equal(plain, first)
        assert torch.equal(plain, second)


def _chosen(group: EPGroup, cfg: EPConfig, inputs: Inputs, hardware: Hardware) -> list[str]:
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=hardware) as engine:
        for _ in range(8):
            engine(*inputs.of(group.rank))
        assert {record.policy for record in engine.records} == {"auto"}
        return [record.chosen for record in engine.records]


def test_auto_rests_where_its_searches_do_not_pay_and_all_ranks_rest_together() -> None:
    cfg = config()
    inputs = Inputs.skewed(cfg, [20, 20, 20])
    eager = launch(_chosen, 3, "threads", (cfg, inputs, EAGER))
    assert "static" not in eager[0]
    plan = evenep.plan(counts_of(cfg, inputs), cfg, hardware=EAGER)
    won_ps = round((plan.stats.static_time_s - plan.stats.time_s) * 1e12)
    slow = dataclasses.replace(EAGER, plan_ps=won_ps + 1)  # searches, but barely in vain
    rested = launch(_chosen, 3, "threads", (cfg, inputs, slow))
    assert rested[0] == rested[1] == rested[2]
    assert rested[0].count("static") >= 4


def _searches_again(group: EPGroup, cfg: EPConfig, inputs: Inputs, hardware: Hardware) -> list[str]:
    source = ExpertWeights.random(cfg, layers=2)
    with Engine(cfg, group, source, hardware=hardware) as engine:
        for step in range(4):
            for layer in source.layers:
                engine(*inputs.of(group.rank), layer=layer)
            if step == 2:
                engine.update_weights(1, source)
        return [record.chosen for record in engine.records]


def test_new_weights_end_the_rest_of_their_layer_only() -> None:
    cfg = config()
    inputs = Inputs.skewed(cfg, [20, 20, 20])
    plan = evenep.plan(counts_of(cfg, inputs), cfg, hardware=EAGER)
    won_ps = round((plan.stats.static_time_s - plan.stats.time_s) * 1e12)
    slow = dataclasses.replace(EAGER, plan_ps=won_ps + 1)
    chosen = launch(_searches_again, 3, "threads", (cfg, inputs, slow))[0]
    rests = [name == "static" for name in chosen]
    assert rests[0::2] == [False, True, False, True]
    assert rests[1::2] == [False, True, False, False]


def counts_of(cfg: EPConfig, inputs: Inputs) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """``[R, E]`` counts of a step's inputs."""
    ids = [inputs.of(r)[1].reshape(-1).numpy() for r in range(cfg.ranks)]
    return np.stack([np.bincount(i[i >= 0], minlength=cfg.num_experts) for i in ids])
