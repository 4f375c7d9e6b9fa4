"""Runners against each other and against a loop over rows; everything around a segment stays."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from evenep import Activation, EPConfig, ExpertWeights
from evenep.experts import RUNNERS, LayerWeights, Segment, make_runner
from evenep.experts.reference import ReferenceRunner
from evenep.experts.runner import Runner
from evenep.experts.torch_runner import TorchRunner
from evenep.formats import format_of
from evenep.weights.layer import ExpertKey

from .. import oracle

E, H, FFN = 5, 32, 128
IN_CLASS = 0.01  # relative L2, as for the engine
# Rows 0 and 1, 5 and 6, 12 … are gaps; experts 1 and 3 are absent; rows 2 … 4 are expert 0's.
SEGMENTS = [(0, 2, 3), (2, 7, 1), (4, 8, 4)]
ROWS = 15


def config(**changes: object) -> EPConfig:
    sizes: dict[str, object] = {
        "num_experts": E,
        "top_k": 2,
        "hidden_size": H,
        "intermediate_size": FFN,
        "max_tokens_per_rank": 8,
    }
    return EPConfig(**(sizes | changes))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Problem:
    cfg: EPConfig
    weights: LayerWeights
    rows: Tensor
    weight_N: Tensor
    segments: list[Segment]

    @staticmethod
    def make(cfg: EPConfig) -> Problem:
        g = torch.Generator().manual_seed(0)
        source = ExpertWeights.random(cfg, seed=2)
        experts = [oracle.expert_tensors(cfg, source, 0, e) for e in range(E)]
        stacked = {name: torch.stack([x[name] for x in experts]) for name in experts[0]}
        rows = torch.full((ROWS, H), float("nan")).bfloat16()
        weight_N = torch.full((ROWS,), float("nan"))
        segments = []
        for e, start, count in SEGMENTS:
            rows[start : start + count] = torch.randn(count, H, generator=g).bfloat16()
            weight_N[start : start + count] = torch.rand(count, generator=g) + 0.25
            segments.append(Segment(ExpertKey(0, e, 0), e, start, count))
        return Problem(cfg, LayerWeights(stacked), rows, weight_N, segments)

    def run(self, runner: Runner, segments: list[Segment] | None = None) -> Tensor:
        rows = self.rows.clone()
        runner.begin_step(0)
        runner.run(
            rows, self.weight_N, self.segments if segments is None else segments, self.weights
        )
        return rows

    def want(self) -> Tensor:
        """Row after row through ``tests.oracle``'s definition, fp64 products."""
        cfg, out = self.cfg, self.rows.clone()
        for e, start, count in SEGMENTS:
            tensors = self.weights.row(e)
            w13, w2 = (w.double() for w in format_of(cfg).decode(tensors, torch.float32))
            for n in range(start, start + count):
                w, z = float(self.weight_N[n]), self.rows[n].float()
                z = oracle.rnd(z * w) if cfg.route_weight == "input" else z
                h = w13 @ z.double()
                h = h + tensors["w13_bias"].double() if cfg.expert_bias else h
                a = oracle.activation(cfg, oracle.rnd(h.float())[None])[0]
                a = oracle.rnd(a * w if cfg.route_weight == "activation" else a)
                o = w2 @ a.double()
                out[n] = (o + tensors["w2_bias"].double() if cfg.expert_bias else o).bfloat16()
        return out


def real(rows: Tensor) -> Tensor:
    return torch.cat([rows[start : start + count] for _, start, count in SEGMENTS])


def gaps(rows: Tensor) -> Tensor:
    taken = {n for _, start, count in SEGMENTS for n in range(start, start + count)}
    return rows[[n for n in range(ROWS) if n not in taken]]


def runners(cfg: EPConfig) -> dict[str, Runner]:
    made: dict[str, Runner] = {
        "decoded": TorchRunner(cfg, grouped=False),
        "decoded, no cache": TorchRunner(cfg.replace(decode_cache_bytes=0), grouped=False),
        "reference": ReferenceRunner(cfg),
    }
    if cfg.weight_format == "bf16":
        made["grouped"] = TorchRunner(cfg, grouped=True)
    return made


def check(cfg: EPConfig) -> None:
    problem = Problem.make(cfg)
    want = problem.want()
    for name, runner in runners(cfg).items():
        for turn in ("first", "from the cache"):
            got = problem.run(runner)
            assert torch.isfinite(real(got)).all(), (name, turn)
            assert oracle.rel_l2(real(got), real(want)) < IN_CLASS, (name, turn)
            assert gaps(got).isnan().all(), f"{name}: a row between segments was written"


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("place", ["output", "activation", "input"])
@pytest.mark.parametrize("weight_format", ["bf16", "mxfp4", "fp8"])
def test_every_runner_matches_the_rows_one_by_one(
    weight_format: str, place: str, bias: bool
) -> None:
    check(config(weight_format=weight_format, route_weight=place, expert_bias=bias))


@pytest.mark.parametrize(
    "changes",
    [
        {"activation": "relu2"},
        {"activation": Activation.situ()},
        {"gate_up_order": "up_first"},
        {"gate_up_interleave": 8},
    ],
    ids=str,
)
def test_every_runner_matches_for_other_activations_and_layouts(changes: dict[str, object]) -> None:
    check(config(expert_bias=True, **changes))


def test_grouped_equals_decoded_within_class_whatever_experts_are_absent() -> None:
    problem = Problem.make(config(expert_bias=True, route_weight="activation"))
    grouped, decoded = (TorchRunner(problem.cfg, grouped=g) for g in (True, False))
    for mask in range(1, 8):
        chosen = [s for i, s in enumerate(problem.segments) if mask >> i & 1]
        got, want = problem.run(grouped, chosen), problem.run(decoded, chosen)
        for i, s in enumerate(problem.segments):
            span = slice(s.start, s.start + s.count)
            if mask >> i & 1:
                assert oracle.rel_l2(got[span], want[span]) < IN_CLASS
            else:
                assert torch.equal(got[span], problem.rows[span]), "not asked for, but written"


@pytest.mark.parametrize("name", ["grouped", "decoded", "reference"])
def test_no_segments_and_no_route_weights_are_fine(name: str) -> None:
    problem = Problem.make(config())
    runner = runners(problem.cfg)[name]
    rows = problem.rows.clone()
    runner.run(rows, None, [], problem.weights)
    assert torch.equal(real(rows), real(problem.rows))
    runner.run(rows, None, problem.segments, problem.weights)
    assert oracle.rel_l2(real(rows), real(problem.want())) < IN_CLASS


@pytest.mark.parametrize("weight_format", ["bf16", "mxfp4", "fp8"])
def test_reference_gives_a_row_the_same_bits_alone_and_in_a_batch(weight_format: str) -> None:
    problem = Problem.make(config(weight_format=weight_format, expert_bias=True))
    runner = ReferenceRunner(problem.cfg)
    together = problem.run(runner)
    for s in problem.segments:
        for n in range(s.start, s.start + s.count):
            alone = problem.run(runner, [Segment(s.key, s.weight_row, n, 1)])
            assert torch.equal(alone[n], together[n])


def test_the_cache_serves_no_stale_weights_once_the_version_changes() -> None:
    problem = Problem.make(config(weight_format="mxfp4"))
    runner = TorchRunner(problem.cfg)
    before = problem.run(runner)
    for tensor in problem.weights.stacked.values():
        tensor.copy_(tensor.flip(0).clone())  # expert 0's weights are expert 4's now
    newer = [Segment(ExpertKey(0, s.key.expert, 1), s.weight_row, s.start, s.count)
             for s in problem.segments]  # fmt: skip
    got = problem.run(runner, newer)
    assert not torch.equal(real(got), real(before))
    assert oracle.rel_l2(real(got), real(problem.want())) < IN_CLASS


def test_the_config_picks_the_runner() -> None:
    for asked, made in (("auto", "torch"), ("torch", "torch"), ("reference", "reference")):
        runner = make_runner(config(runner=asked))
        assert type(runner) is RUNNERS[made]
        assert runner.name == made
        assert runner.batch_invariant == (made == "reference")
