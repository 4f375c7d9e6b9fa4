"""The engine on a GPU against its oracle: several ranks share one, by threads and by processes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from evenep import Engine, EPConfig, EPGroup, ExpertWeights
from evenep.observe import StepRecord
from tests import oracle
from tests.cases import EAGER, Inputs, config, launch_at, run_policies, whole
from tests.harness import ON_GPU
from tests.test_engine import ACTIVATIONS, IN_CLASS, POLICIES, check, forced

pytestmark = pytest.mark.gpu
everywhere = pytest.mark.parametrize("transport", ON_GPU)


@everywhere
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_any_number_of_ranks_matches_the_oracle(transport: str, ranks: int) -> None:
    cfg = config(ranks=ranks, reduction="exact", row_alignment=4)
    check(cfg, Inputs.skewed(cfg, [(7 * r + 3) % 11 for r in range(ranks)]), transport)


@pytest.mark.parametrize("weight_format", ["bf16", "mxfp4", "fp8"])
@pytest.mark.parametrize("reduction", ["exact", "compact"])
@pytest.mark.parametrize("runner", ["auto", "triton"])
def test_formats_runners_and_reductions_match_the_oracle(
    weight_format: str, reduction: str, runner: str
) -> None:
    cfg = config(
        weight_format=weight_format, reduction=reduction, runner=runner, intermediate_size=128
    )
    check(cfg, Inputs.skewed(cfg, [9, 0, 17]), "threads@cuda")


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=lambda a: a.kind)
@pytest.mark.parametrize("place", ["output", "activation", "input"])
def test_activations_biases_and_route_weight_places_match_the_oracle(
    activation: object, place: str
) -> None:
    cfg = config(
        activation=activation,
        route_weight=place,
        expert_bias=True,
        reduction="compact",
        runner="triton",
    )
    check(cfg, Inputs.skewed(cfg, [9, 0, 17]), "threads@cuda")


@pytest.mark.parametrize("reduction", ["exact", "compact"])
def test_ordinary_oddities_match_the_oracle(reduction: str) -> None:
    cfg = config(reduction=reduction, row_alignment=16)
    n = cfg.top_k
    cases = {
        "one hot expert": torch.zeros(20, n, dtype=torch.int64),
        "all dropped": torch.full((20, n), -1),
        "very negative ids": torch.full((20, n), -(2**40)),
        "one token": torch.tensor([[0, 3, 7, 12]]),
        "nothing at all": torch.zeros(0, n, dtype=torch.int64),
        "repeats in a token": torch.tensor([[2, 2, 5, 2], [12, 12, 12, 12]]),
    }
    for name, ids in cases.items():
        tokens = [ids.shape[0] - ids.shape[0] // 3, 0, ids.shape[0] // 3]
        try:
            check(cfg, forced(cfg, ids, tokens), "threads@cuda")
        except AssertionError as error:
            raise AssertionError(name) from error


@everywhere
def test_the_bits_do_not_depend_on_ranks_policy_or_transport(transport: str) -> None:
    cfg = config(ranks=1, reduction="exact", runner="triton", weight_format="mxfp4")
    source = ExpertWeights.random(cfg, seed=1)
    inputs = Inputs.skewed(cfg, [24])
    args = (cfg, source, inputs, ("static",))
    want = launch_at(run_policies, 1, "threads@cuda", args)[0]["static"][0]
    for ranks in (2, 4, 8):
        many = cfg.replace(ranks=ranks, slots_per_rank=-(-13 // ranks))
        shares = Inputs(
            inputs.x, inputs.ids, inputs.weights, Inputs.skewed(many, _share(24, ranks)).spans
        )
        outcomes = launch_at(run_policies, ranks, transport, (many, source, shares, POLICIES))
        for policy in POLICIES:
            assert torch.equal(whole(outcomes, policy), want), (ranks, policy)


def _share(tokens: int, ranks: int) -> list[int]:
    return [tokens // ranks + (r < tokens % ranks) for r in range(ranks)]


def _overlap(group: EPGroup, cfg: EPConfig, batches: list[Inputs]) -> list[Tensor]:
    """Two steps of different layers under way at once."""
    source = ExpertWeights.random(cfg, layers=2, seed=1)
    with Engine(cfg, group, source, hardware=EAGER) as engine:
        mine = [b.of(group.rank, "cuda") for b in batches]
        steps = [engine.begin(ids, w, layer) for layer, (_, ids, w) in enumerate(mine)]
        for step, (x, _, _) in zip(steps, mine, strict=True):
            step.dispatch(x)
        for step in steps:
            step.fetch()
        for step in reversed(steps):
            step.compute()
        out = [step.combine() for step in steps]
        engine.synchronize()
        return [y.cpu() for y in out]


@everywhere
def test_two_steps_in_flight_share_nothing(transport: str) -> None:
    cfg = config(in_flight=2)
    source = ExpertWeights.random(cfg, layers=2, seed=1)
    batches = [Inputs.skewed(cfg, [9, 3, 17], seed=s) for s in (0, 1)]
    outcomes = launch_at(_overlap, 3, transport, (cfg, batches))
    for layer, b in enumerate(batches):
        got = torch.cat([o[layer] for o in outcomes])
        want = oracle.moe(cfg, source, layer, b.x, b.ids, b.weights)
        assert oracle.rel_l2(got, want) < IN_CLASS


def _replace_weights(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> list[Tensor]:
    old, new = (ExpertWeights.random(cfg, seed=s) for s in (1, 2))
    with Engine(cfg, group, old, hardware=EAGER) as engine:
        out = [engine(*inputs.of(group.rank, "cuda"))]
        out.append(engine(*inputs.of(group.rank, "cuda")))  # replicas are resident by now
        engine.update_weights(0, new)
        out.append(engine(*inputs.of(group.rank, "cuda")))
        engine.synchronize()
        fetched = [r.fetches for r in engine.records]
        assert fetched[0] > 0
        assert fetched[1] == 0
        assert fetched[2] == fetched[0]
        return [y.cpu() for y in out]


@everywhere
def test_new_weights_void_replicas_of_the_old_ones(transport: str) -> None:
    cfg = config(policy="bounded", epsilon=0.0)
    inputs = Inputs.skewed(cfg, [9, 3, 17])
    outcomes = launch_at(_replace_weights, 3, transport, (cfg, inputs))
    for step, seed in enumerate((1, 1, 2)):
        source = ExpertWeights.random(cfg, seed=seed)
        want = oracle.moe(cfg, source, 0, inputs.x, inputs.ids, inputs.weights)
        got = torch.cat([o[step] for o in outcomes])
        assert oracle.rel_l2(got, want) < IN_CLASS


def _say_records(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> list[tuple[object, ...]]:
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        for policy in POLICIES:
            mine = inputs.of(group.rank, group.device)
            engine(*mine, policy=policy)
        engine.synchronize()
        untimed = {"stage_s", "fetch_busy_s"}
        names = [f.name for f in dataclasses.fields(StepRecord) if f.name not in untimed]
        return [tuple(getattr(r, name) for name in names) for r in engine.records]


@everywhere
def test_records_say_what_the_cpu_engine_says(transport: str) -> None:
    cfg = config()
    inputs = Inputs.skewed(cfg, [9, 3, 17])
    want = launch_at(_say_records, 3, "threads", (cfg, inputs))
    assert launch_at(_say_records, 3, transport, (cfg, inputs)) == want


RUNNERS_OWN = ("gate_up", "down", "gemm", "group_tiles", "copy_rows", "activate", "quantize")


def _compile_nothing_later(group: EPGroup, cfg: EPConfig) -> tuple[str, list[str]]:
    """The runner that was chosen, and which of a runner's kernels steps still compiled."""
    from triton import knobs

    late: list[str] = []
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:

        def note(*, fn: Any, **_: object) -> None:
            if any(word in fn.name for word in RUNNERS_OWN):
                late.append(fn.name)

        if group.rank == 0:  # the hook is the process's, and so are the ranks' kernels
            knobs.runtime.jit_post_compile_hook = note
        try:
            for tokens in (1, 5, 60, cfg.max_tokens_per_rank):
                for policy in ("static", "exact"):
                    engine(*Inputs.skewed(cfg, [tokens] * cfg.ranks).of(group.rank, "cuda"),
                           policy=policy)  # fmt: skip
            engine.synchronize()
        finally:
            if group.rank == 0:
                knobs.runtime.jit_post_compile_hook = None
        return engine.runner_choice.name, late


@pytest.mark.parametrize("runner", ["auto", "triton"])
@pytest.mark.parametrize("weight_format", ["bf16", "mxfp4", "fp8"])
def test_no_step_compiles_a_runners_kernel_and_all_ranks_have_one_runner(
    runner: str, weight_format: str
) -> None:
    cfg = config(
        runner=runner, weight_format=weight_format, hidden_size=256, intermediate_size=128,
        max_tokens_per_rank=200,
    )  # fmt: skip
    outcomes = launch_at(_compile_nothing_later, 3, "threads@cuda", (cfg,))
    assert len({name for name, _ in outcomes}) == 1
    assert [late for _, late in outcomes] == [[]] * 3
