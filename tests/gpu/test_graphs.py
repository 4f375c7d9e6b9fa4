"""Captured steps: every replay gives the eager step's bits, whatever the routing is by then."""

from __future__ import annotations

import pytest
import torch

from evenep import Engine, EPConfig, EPGroup, ExpertWeights
from evenep.errors import AgreementError, PeerError, StateError, UnsupportedError
from tests.cases import EAGER, config, launch_at
from tests.harness import ON_GPU

pytestmark = pytest.mark.gpu


def routing(cfg: EPConfig, rank: int, turn: int) -> tuple[torch.Tensor, ...]:
    """Inputs of a rank at a turn: another expert is hot each time, some tokens are padding."""
    g = torch.Generator().manual_seed(1000 * turn + rank)
    T = cfg.max_tokens_per_rank
    scores = torch.randn(T, cfg.num_experts, generator=g)
    scores[:, turn % cfg.num_experts] += 2.0
    ids = scores.topk(cfg.top_k, dim=1).indices
    ids[torch.rand(T, generator=g) < 0.2] = -1
    x = torch.randn(T, cfg.hidden_size, generator=g).bfloat16()
    return x, ids, torch.rand(T, cfg.top_k, generator=g)


def _replay(group: EPGroup, cfg: EPConfig, turns: int) -> int:
    """Replicas that a sample of the replays computed."""
    replicas = 0
    source = ExpertWeights.random(cfg, layers=2, seed=1)
    with (
        Engine(cfg, group, source, hardware=EAGER) as eager,
        Engine(cfg, group, source, hardware=EAGER) as engine,
    ):
        static = [t.cuda() for t in routing(cfg, group.rank, 0)]
        y_TH = torch.empty_like(static[0])
        z_TH = torch.empty_like(static[0])

        def two_layers() -> None:
            x, ids, w = static
            engine(x, ids, w, 0, out=y_TH)
            engine(y_TH, ids, w, 1, out=z_TH)

        graph = engine.capture(two_layers)
        differ = torch.zeros((), dtype=torch.int64, device="cuda")
        for turn in range(turns):
            for old, new in zip(static, routing(cfg, group.rank, turn), strict=True):
                old.copy_(new)
            graph.replay()
            x, ids, w = static
            want = eager(eager(x, ids, w, 0), ids, w, 1)
            differ += (want != z_TH).any()
            if turn % 100 == 0:
                replicas += sum(r.replicas for r in graph.records)
        eager.synchronize()
        engine.synchronize()
        assert int(differ) == 0, f"{int(differ)} of {turns} replays differ from the eager step"
    return replicas


@pytest.mark.parametrize(("transport", "turns"), [("threads@cuda", 1000), ("symm@cuda", 100)])
@pytest.mark.parametrize("policy", ["bounded", "auto"])
def test_replays_with_changing_routing_equal_eager(transport: str, turns: int, policy: str) -> None:
    cfg = config(policy=policy, epsilon=0.0, runner="triton", weight_format="mxfp4")
    assert all(launch_at(_replay, 3, transport, (cfg, turns)))


def _refuse(group: EPGroup, cfg: EPConfig) -> None:
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        x, ids, w = (t.cuda() for t in routing(cfg, group.rank, 0))
        engine(x, ids, w)
        seen: list[str] = []

        def asks() -> None:
            step = engine.begin(ids, w)
            if torch.cuda.is_current_stream_capturing():
                for name in ("plan", "record"):
                    try:
                        getattr(step, name)
                    except StateError as error:
                        seen.append(str(error))
            step.dispatch(x)
            step.fetch()
            step.compute()
            step.combine()

        graph = engine.capture(asks)
        assert len(seen) == 2
        assert all("captured" in text for text in seen)
        graph.replay()
        engine.synchronize()
        with (
            torch.cuda.stream(torch.cuda.default_stream()),
            pytest.raises(StateError, match="default"),
        ):
            engine.capture(asks)


def test_what_waits_for_the_gpu_is_refused_inside_a_capture() -> None:
    launch_at(_refuse, 1, "threads@cuda", (config(ranks=1),))


def test_a_cpu_engine_captures_nothing() -> None:
    def body(group: EPGroup) -> None:
        cfg = config(ranks=1)
        with (
            Engine(cfg, group, ExpertWeights.random(cfg)) as engine,
            pytest.raises(UnsupportedError, match="GPU"),
        ):
            engine.capture(lambda: None)

    launch_at(body, 1, "threads")


def _bucketed(group: EPGroup, cfg: EPConfig) -> None:
    source = ExpertWeights.random(cfg, layers=2, seed=1)
    with Engine(cfg, group, source, hardware=EAGER) as engine:
        step = engine.capture_buckets([2, 8, 24], layer=1)
        for turn in range(30):
            x, ids, w = (t.cuda() for t in routing(cfg, group.rank, turn))
            T = (5 * turn + 7 * group.rank) % 24  # ragged
            most = max((5 * turn + 7 * r) % 24 for r in range(group.size))
            got = step(x[:T], ids[:T], w[:T], tokens=most).clone()
            want = engine(x[:T], ids[:T], w[:T], 1)
            engine.synchronize()
            assert torch.equal(got, want), turn


@pytest.mark.parametrize("transport", ON_GPU)
def test_a_step_in_a_larger_bucket_equals_eager(transport: str) -> None:
    cfg = config(policy="bounded", epsilon=0.0, runner="triton", reduction="exact")
    launch_at(_bucketed, 3, transport, (cfg,))


def _mixed_up(group: EPGroup, cfg: EPConfig) -> None:
    with Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        x, ids, w = (t.cuda() for t in routing(cfg, group.rank, 0))
        graphs = [engine.capture(lambda: engine(x, ids, w)) for _ in range(2)]
        with pytest.raises((AgreementError, PeerError)):
            graphs[group.rank % 2].replay()


def test_ranks_that_replay_different_captures_are_told() -> None:
    launch_at(_mixed_up, 2, "threads@cuda", (config(ranks=2),))
