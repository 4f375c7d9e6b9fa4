"""The engine's contracts (C4, C6, C7, C11, C12), each where it could break."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from evenep import Engine, EPConfig, EPGroup, ExpertWeights, launch
from evenep.errors import (
    ConfigError,
    InputError,
    LaunchError,
    LeaseError,
    StateError,
    UnfetchedSlotError,
    UnsupportedError,
)

from . import oracle
from .cases import EAGER, Inputs, config


def alone(check: Callable[[Engine], None], **changes: object) -> None:
    """Run a check on a one-rank engine in this process."""
    cfg = config(ranks=1, **changes)

    def body(group: EPGroup) -> None:
        with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
            check(engine)

    try:
        launch(body, 1, "threads")
    except LaunchError as error:
        raise error.failures[0] from None


def good(cfg: EPConfig, tokens: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    return Inputs.skewed(cfg, [tokens]).of(0)


# ---- C4 and arguments: refused before anything is queued


Spoil = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]

BAD_ROUTING: dict[str, tuple[Spoil, type[Exception], str]] = {
    "float ids": (lambda x, i, w: (x, i.float(), w), InputError, "topk_ids_TK"),
    "half weights": (lambda x, i, w: (x, i, w.half()), InputError, "topk_weights_TK"),
    "id equal to E": (lambda x, i, w: (x, i * 0 + 13, w), InputError, "out of range"),
    "wrong K": (lambda x, i, w: (x, i[:, :2], w[:, :2]), InputError, "wrong shape"),
    "a lone id": (lambda x, i, w: (x, torch.tensor(3), w), InputError, "wrong shape"),
    "flat ids": (lambda x, i, w: (x, i.reshape(-1), w), InputError, "wrong shape"),
    "ids and weights differ": (lambda x, i, w: (x, i, w[:2]), InputError, "wrong shape"),
    "infinite weight": (lambda x, i, w: (x, i.abs(), w / 0), InputError, "finite"),
    "wrong H": (lambda x, i, w: (x[:, :8], i, w), InputError, "x_TH"),
    "more rows than ids": (lambda x, i, w: (x.repeat(2, 1), i, w), InputError, "x_TH"),
    "fp32 rows": (lambda x, i, w: (x.float(), i, w), UnsupportedError, "float32"),
    "rows on another device": (lambda x, i, w: (x.to("meta"), i, w), UnsupportedError, "device"),
    "gradient": (lambda x, i, w: (x.requires_grad_(), i, w), InputError, "backward"),
    "weight gradient": (lambda x, i, w: (x, i, w.requires_grad_()), InputError, "topk_weights_TK"),
}


@pytest.mark.parametrize("name", BAD_ROUTING)
def test_a_bad_argument_is_refused_by_name_and_the_engine_goes_on(name: str) -> None:
    spoil, kind, words = BAD_ROUTING[name]

    def body(engine: Engine) -> None:
        x, ids, weights = good(engine.cfg)
        with pytest.raises(kind, match=words):
            engine(*spoil(x.clone(), ids.clone(), weights.clone()))
        assert engine(x, ids, weights).shape == x.shape
        assert len(engine.records) == 1

    alone(body)


def test_a_gradient_is_refused_verb_by_verb_too() -> None:
    def body(engine: Engine) -> None:
        x, ids, weights = good(engine.cfg)
        with pytest.raises(InputError, match="backward"):
            engine.begin(ids, weights.clone().requires_grad_())
        step = engine.begin(ids, weights)
        with pytest.raises(InputError, match="backward"):
            step.dispatch(x.clone().requires_grad_())
        with torch.no_grad():
            step.dispatch(x.clone().requires_grad_())
        step.fetch()
        step.compute()
        assert not step.combine().requires_grad

    alone(body)


def test_a_layer_that_is_not_there_and_too_many_tokens_are_refused() -> None:
    def body(engine: Engine) -> None:
        x, ids, weights = good(engine.cfg)
        with pytest.raises(InputError, match="no such layer"):
            engine(x, ids, weights, layer=7)
        with pytest.raises(InputError, match="max_tokens_per_rank"):
            engine(*good(engine.cfg, 25))
        with pytest.raises(UnsupportedError, match="unknown policy"):
            engine(x, ids, weights, policy="magic")

    alone(body)


def test_a_dropped_routes_weight_may_be_anything() -> None:
    def body(engine: Engine) -> None:
        x, ids, weights = good(engine.cfg)
        ids[0, :] = -1
        weights[0, :] = float("nan")
        y = engine(x, ids, weights)
        assert (y[0] == 0).all()
        assert not y.isnan().any()

    for reduction in ("exact", "compact"):
        alone(body, reduction=reduction)


# ---- C6: leases


def test_rows_are_leased_from_compute_to_combine_and_say_so_afterwards() -> None:
    def body(engine: Engine) -> None:
        x, ids, weights = good(engine.cfg)
        step = engine.begin(ids, weights)
        with pytest.raises(LeaseError):
            _ = step.rows
        step.dispatch(x)
        step.fetch()
        step.compute()
        rows = step.rows
        assert not rows.isnan().any()
        step.combine()
        with pytest.raises(LeaseError, match="ENDED"):
            _ = step.rows
        assert rows.isnan().all(), "the poisoned buffer shows any use after the lease"

    alone(body)


def test_verbs_in_the_wrong_order_raise_and_the_step_can_still_be_finished() -> None:
    def body(engine: Engine) -> None:
        x, ids, weights = good(engine.cfg)
        want = engine(x, ids, weights)
        step = engine.begin(ids, weights)
        for verb in (step.fetch, step.compute, step.combine):
            with pytest.raises(StateError, match="wrong order"):
                verb()
        with pytest.raises(StateError, match="in flight"):
            engine.begin(ids, weights)
        with pytest.raises(InputError):
            step.dispatch(x[:1])
        step.dispatch(x)
        with pytest.raises(StateError):
            step.dispatch(x)
        step.fetch()
        step.compute()
        assert torch.equal(step.combine(), want)
        with pytest.raises(StateError):
            step.combine()

    alone(body)


def test_a_closed_engine_refuses_work_and_closes_twice() -> None:
    def body(engine: Engine) -> None:
        engine.close()
        engine.close()
        with pytest.raises(StateError, match="closed"):
            engine(*good(engine.cfg))

    alone(body)


# ---- C7: slots


def _residency(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> list[tuple[int, int, Tensor]]:
    x, ids, weights = inputs.of(group.rank)
    seen = []
    sources = [ExpertWeights.random(cfg, layers=2, seed=s) for s in (0, 1)]
    with Engine(cfg, group, sources[0], hardware=EAGER) as engine:
        for layer, change in (
            (0, False),
            (0, False),
            (1, False),
            (1, False),
            (0, True),
            (0, False),
        ):
            if change:
                engine.update_weights(0, sources[1])
            y = engine(x, ids, weights, layer=layer)
            record = engine.records[-1]
            seen.append((record.replicas, record.fetches, y))
    return seen


@pytest.mark.parametrize("transport", ["threads", "shm", "collective"])
def test_resident_replicas_move_no_bytes_until_the_weights_change(transport: str) -> None:
    cfg = config(policy="exact", reduction="exact")
    inputs = Inputs.skewed(cfg, [20, 20, 20])
    outcomes = launch(_residency, 3, transport, (cfg, inputs))
    replicas = [step[0] for step in outcomes[0]]
    fetches = [step[1] for step in outcomes[0]]
    assert replicas[0] >= 2
    assert fetches == [replicas[0], 0, replicas[2], 0, replicas[4], 0]
    for i, (layer, seed) in enumerate([(0, 0), (0, 0), (1, 0), (1, 0), (0, 1), (0, 1)]):
        got = torch.cat([o[i][2] for o in outcomes])
        source = ExpertWeights.random(cfg, layers=2, seed=seed)
        want = oracle.moe(cfg, source, layer, inputs.x, inputs.ids, inputs.weights)
        assert oracle.rel_l2(got, want) < 0.01, f"step {i}"


def _forgetful(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> str:
    """Skip the fetch lane behind the engine's back; say what compute() does about it."""
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        x, ids, weights = inputs.of(group.rank)
        step = engine.begin(ids, weights)
        step.dispatch(x)
        object.__setattr__(step.plan, "fetches", ())
        step.fetch()
        try:
            step.compute()
        except UnfetchedSlotError as error:
            return str(error)
        engine.poison(RuntimeError("nothing to fetch here"))
        return "computed"


def test_a_slot_that_was_not_fetched_can_not_be_computed() -> None:
    cfg = config(policy="exact")
    said = launch(_forgetful, 3, "threads", (cfg, Inputs.skewed(cfg, [20, 20, 20])))
    refused = [s for s in said if "was not fetched" in s]
    assert refused
    assert all("call fetch()" in s for s in refused)


# ---- C11: padding


def _padding(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> tuple[Tensor, list[int]]:
    x, ids, weights = inputs.of(group.rank)
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        engine(x.flip(0), ids.flip(0), weights.flip(0))  # dirty the buffer
        step = engine.begin(ids, weights)
        step.dispatch(x)
        step.fetch()
        step.compute()
        seg = step.plan.layout.segments[group.rank]
        real = [
            n
            for start, count in zip(seg.start_G.tolist(), seg.count_G.tolist(), strict=True)
            for n in range(start, start + count)
        ]
        rows = step.rows.clone()
        step.combine()
        return rows, real


def test_padding_rows_are_exact_zero_and_views_end_with_the_step() -> None:
    cfg = config(row_alignment=8, expert_bias=True)
    inputs = Inputs.skewed(cfg, [9, 14, 3])
    for rows, real in launch(_padding, 3, "threads", (cfg, inputs)):
        padding = torch.ones(rows.shape[0], dtype=torch.bool)
        padding[real] = False
        assert padding.any()
        assert (rows[padding] == 0).all()
        assert rows.shape[0] <= len(real) + 7 * 13


# ---- weights and memory


def test_new_weights_of_another_shape_format_or_layer_are_refused_and_the_engine_goes_on() -> None:
    def body(engine: Engine) -> None:
        cfg = engine.cfg
        for other, words in (
            (cfg.replace(num_experts=26), "num_experts"),
            (cfg.replace(hidden_size=32), "hidden_size"),
            (cfg.replace(weight_format="mxfp4"), "weight_format"),
        ):
            with pytest.raises(ConfigError, match=words):
                engine.update_weights(0, ExpertWeights.random(other))
        with pytest.raises(InputError, match="no such layer"):
            engine.update_weights(5, ExpertWeights.random(cfg))
        engine.update_weights(0, ExpertWeights.random(cfg, seed=9))
        engine(*good(cfg))

    alone(body)


def test_a_source_without_the_layer_is_refused() -> None:
    cfg = config(ranks=1)

    def body(group: EPGroup) -> None:
        with Engine(cfg, group, ExpertWeights.random(cfg, layers=2), hardware=EAGER) as engine:
            with pytest.raises(InputError, match="don't hold the layer"):
                engine.update_weights(1, ExpertWeights.random(cfg, layers=1))
            engine(*good(cfg), layer=1)

    launch(body, 1, "threads")


def test_a_closed_engine_lets_go_of_its_experts() -> None:
    def body(engine: Engine) -> None:
        row = weakref.ref(engine.store.layer(0).stacked["w13"])
        cache = weakref.ref(engine._machine.runner)  # type: ignore[attr-defined]
        engine.close()
        gc.collect()
        assert row() is None
        assert cache() is None

    alone(body)


def test_an_empty_stack_of_layers_is_refused() -> None:
    with pytest.raises(InputError, match="no layers"):
        ExpertWeights.random(config(), layers=0)
    with pytest.raises(InputError, match="no layers"):
        ExpertWeights.from_tensors(config(), [])


# ---- construction


def test_configs_that_fit_neither_group_nor_experts_are_refused() -> None:
    cfg = config(ranks=1)

    def body(group: EPGroup, wrong: EPConfig, experts: EPConfig) -> None:
        Engine(wrong, group, ExpertWeights.random(experts), hardware=EAGER)

    for wrong, experts, words in (
        (config(ranks=2), cfg, "group size"),
        (cfg, cfg.replace(hidden_size=32), "hidden_size"),
        (cfg, cfg.replace(weight_format="mxfp4"), "weight_format"),
    ):
        with pytest.raises(LaunchError, match=words) as caught:
            launch(body, 1, "threads", (wrong, experts))
        assert isinstance(caught.value.failures[0], ConfigError)
