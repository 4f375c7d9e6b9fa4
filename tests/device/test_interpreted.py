"""Whole steps of a GPU on a CPU: every choice against the oracle, and the host's own engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

import evenep
from evenep import Engine, EPConfig, EPGroup, ExpertWeights, Hardware, launch
from evenep.device.machine import DeviceMachine
from evenep.observe import StepRecord
from tests import oracle
from tests.cases import EAGER, Inputs, spans
from tests.test_engine import IN_CLASS, counts_of

from .interpreted import config, interpreted, only_interpreted, run_ranks

pytestmark = only_interpreted

TOKENS = {1: [6], 2: [2, 4], 3: [4, 0, 2]}
TIMED = {"stage_s", "fetch_busy_s"}


@dataclass(frozen=True)
class Turn:
    """One step to make: of which batch, layer and policy."""

    batch: int
    policy: str
    layer: int = 0


@dataclass
class Seen:
    """What a rank saw: outputs and records in the order of turns."""

    outputs: list[Tensor] = field(default_factory=list)
    records: list[StepRecord] = field(default_factory=list)

    @property
    def facts(self) -> list[dict[str, object]]:
        """The records without times."""
        return [
            {k: v for k, v in dataclasses.asdict(r).items() if k not in TIMED} for r in self.records
        ]


def walk(
    group: EPGroup,
    cfg: EPConfig,
    batches: list[Inputs],
    turns: list[Turn],
    hardware: Hardware,
    on_kernels: bool,
    settings: dict[str, str],
) -> Seen:
    """The turns, ``in_flight`` of them open at a time, each verb for all of them."""
    place = interpreted(**settings) if on_kernels else contextlib.nullcontext()
    seen, source = Seen(), ExpertWeights.random(cfg, layers=2, seed=1)
    with place, Engine(cfg, group, source, hardware=hardware) as engine:
        assert isinstance(engine._machine, DeviceMachine) == on_kernels
        for first in range(0, len(turns), cfg.in_flight):
            now = turns[first : first + cfg.in_flight]
            mine = [batches[turn.batch].of(group.rank) for turn in now]
            steps = [
                engine.begin(ids, weights, turn.layer, policy=turn.policy)
                for turn, (_, ids, weights) in zip(now, mine, strict=True)
            ]
            for step, (x, _, _) in zip(steps, mine, strict=True):
                step.dispatch(x)
            for step in reversed(steps):
                step.fetch()
            for step in reversed(steps):
                step.compute()
            seen.outputs += [step.combine() for step in steps]
        engine.synchronize()
        seen.records = engine.records
    return seen


def on_kernels(
    cfg: EPConfig,
    batches: list[Inputs],
    turns: list[Turn],
    hardware: Hardware = EAGER,
    **settings: str,
) -> list[Seen]:
    """The turns by a GPU's kernels, by rank; each within the class of the oracle's answer."""
    args = (cfg, batches, turns, hardware, True, settings)
    outcomes: list[Seen] = run_ranks(walk, cfg.ranks, *args)
    source = ExpertWeights.random(cfg, layers=2, seed=1)
    for number, turn in enumerate(turns):
        b = batches[turn.batch]
        want = oracle.moe(cfg, source, turn.layer, b.x, b.ids, b.weights)
        got = whole(outcomes, number)
        assert not got.isnan().any(), turn
        assert oracle.rel_l2(got, want) < IN_CLASS, turn
    return outcomes


def assert_records_of_the_host(
    cfg: EPConfig,
    batches: list[Inputs],
    turns: list[Turn],
    outcomes: list[Seen],
    hardware: Hardware = EAGER,
) -> None:
    """What the host's own engine says of the same turns."""
    on_host = cfg.replace(runner="reference")
    args = (on_host, batches, turns, hardware, False, dict[str, str]())
    wanted: list[Seen] = launch(walk, cfg.ranks, "threads", args)
    for rank, (got, want) in enumerate(zip(outcomes, wanted, strict=True)):
        for turn, here, there in zip(turns, got.facts, want.facts, strict=True):
            assert here == there, (rank, turn)


def whole(outcomes: list[Seen], number: int) -> Tensor:
    """All ranks' outputs of a turn, in token order."""
    return torch.cat([seen.outputs[number] for seen in outcomes])


# ---- every policy, on 1 to 3 ranks

TURNS = [
    Turn(0, "static"),
    Turn(0, "exact"),
    Turn(0, "exact"),  # its replicas are resident
    Turn(1, "bounded", layer=1),
    Turn(0, "auto", layer=1),
]


def batches_for(cfg: EPConfig, ranks: int) -> list[Inputs]:
    """Two batches, the same tokens whatever the ranks; ids of -1 among them."""
    made = [Inputs.skewed(cfg, [6], seed=s, skew=3.0 * (-1) ** s) for s in (0, 3)]
    for batch in made:
        batch.ids[1, 1] = -1
    return [dataclasses.replace(b, spans=spans(TOKENS[ranks])) for b in made]


@functools.cache
def session(ranks: int) -> tuple[EPConfig, list[Inputs], list[Seen]]:
    """All turns on this many ranks."""
    cfg = config(ranks=ranks, reduction="exact", weight_format="mxfp4", row_alignment=4)
    batches = batches_for(cfg, ranks)
    return cfg, batches, on_kernels(cfg, batches, TURNS)


each_size = pytest.mark.parametrize("ranks", sorted(TOKENS))


@each_size
def test_every_policy_matches_the_oracle_and_the_hosts_records(ranks: int) -> None:
    cfg, batches, outcomes = session(ranks)
    assert_records_of_the_host(cfg, batches, TURNS, outcomes)
    for record in outcomes[0].records:
        busy = {stage for stage, seconds in record.stage_s.items() if seconds > 0}
        assert busy >= {"plan", "dispatch", "compute", "combine"}


def test_the_bits_do_not_depend_on_ranks_or_policy() -> None:
    for number, turn in enumerate(TURNS):
        same = [n for n, t in enumerate(TURNS) if (t.batch, t.layer) == (turn.batch, turn.layer)]
        want = whole(session(1)[2], same[0])
        for ranks in TOKENS:
            assert torch.equal(whole(session(ranks)[2], number), want), (ranks, turn)


@pytest.mark.parametrize("ranks", [2, 3])
def test_resident_replicas_move_no_bytes(ranks: int) -> None:
    _, fresh, again, other_layer, _ = session(ranks)[2][0].records
    assert 0 < fresh.replicas == fresh.fetches == again.replicas
    assert again.fetches == 0
    assert 0 < other_layer.replicas == other_layer.fetches


# ---- choices


@pytest.mark.parametrize(
    ("place", "reduction", "weight_format"),
    [("output", "compact", "bf16"), ("activation", "compact", "mxfp4"), ("input", "exact", "bf16")],
)
def test_places_of_the_route_weight_and_reductions_match_the_oracle(
    place: str, reduction: str, weight_format: str
) -> None:
    cfg = config(
        ranks=2,
        route_weight=place,
        reduction=reduction,
        weight_format=weight_format,
        expert_bias=True,
        activation=evenep.Activation.situ(0.5, 1.5),
    )
    on_kernels(cfg, batches_for(cfg, 2), [Turn(0, "exact")])


def test_two_steps_in_flight_share_nothing() -> None:
    cfg = config(ranks=2, in_flight=2, reduction="compact")
    batches = batches_for(cfg, 2)
    turns = [
        Turn(0, "exact"),
        Turn(1, "exact", layer=1),
        Turn(1, "bounded"),
        Turn(0, "exact"),  # the other lane: nothing is resident there
    ]
    outcomes = on_kernels(cfg, batches, turns)
    assert_records_of_the_host(cfg, batches, turns, outcomes)


def test_lanes_of_one_layer_pace_their_searches_by_themselves() -> None:
    """One lane's routing isn't worth a search, so it rests; the other's is skewed."""
    cfg = config(ranks=2, num_experts=4, top_k=1, in_flight=2)
    even, skewed = (
        dataclasses.replace(Inputs.skewed(cfg, [6, 6]), ids=ids)
        for ids in (torch.arange(12)[:, None] % 4, torch.zeros(12, 1, dtype=torch.int64))
    )
    hardware = dataclasses.replace(EAGER, plan_ps=1)
    turns = [Turn(0, "auto"), Turn(1, "auto")]
    outcomes = on_kernels(cfg, [even, skewed], turns, hardware)
    assert_records_of_the_host(cfg, [even, skewed], turns, outcomes, hardware)
    assert [r.replicas for r in outcomes[0].records] == [0, 1]


def test_steps_are_right_without_poison_and_its_fourth_wait() -> None:
    cfg = config(ranks=2, row_alignment=4)
    turns = [Turn(n % 2, policy) for n, policy in enumerate(("exact", "bounded"))]
    on_kernels(cfg, batches_for(cfg, 2), turns, EVENEP_POISON="0", EVENEP_DEBUG="0")


# ---- oddities


def odd_batches(cfg: EPConfig) -> list[Inputs]:
    """What any batch may look like; the first two hold nothing to compute."""
    K, last = cfg.top_k, cfg.num_experts - 1
    ids = [
        torch.zeros(0, K, dtype=torch.int64),
        torch.full((3, K), -(2**40)),
        torch.zeros(4, K, dtype=torch.int64),
        torch.tensor([[last] * K, [0, last, 0][:K], [-1, 0, -1][:K]]),  # repeats in a token
    ]
    g = torch.Generator().manual_seed(5)
    made = []
    for i in ids:
        T = i.shape[0]
        x = torch.randn(T, cfg.hidden_size, generator=g).bfloat16()
        tokens = [0] * (cfg.ranks - 1) + [T]
        made.append(Inputs(x, i, torch.rand(i.shape, generator=g), spans(tokens)))
    return made


def test_ordinary_oddities_match_the_oracle() -> None:
    """Two experts for three ranks: one rank owns none."""
    cfg = config(ranks=3, num_experts=2, top_k=2, reduction="compact", row_alignment=4)
    batches = odd_batches(cfg)
    turns = [Turn(n, "exact") for n in range(len(batches))]
    outcomes = on_kernels(cfg, batches, turns)
    assert_records_of_the_host(cfg, batches, turns, outcomes)


def test_an_engine_without_slots_stays_at_home() -> None:
    cfg = config(ranks=2, slots_per_rank=0, policy="static")
    on_kernels(cfg, batches_for(cfg, 2), [Turn(0, "static")])


# ---- what a step shows


def _look_inside(group: EPGroup, cfg: EPConfig, inputs: Inputs) -> dict[str, Any]:
    x, ids, weights = inputs.of(group.rank)
    with interpreted(), Engine(cfg, group, ExpertWeights.random(cfg), hardware=EAGER) as engine:
        step = engine.begin(ids.int(), weights)
        plan = step.plan
        step.dispatch(x)
        step.fetch()
        step.compute()
        rows = step.rows
        kept = rows.clone()
        out = torch.full_like(x, float("nan"))
        assert step.combine(out) is out
        assert rows.isnan().all(), "the poisoned buffer shows any use after the lease"
        return {"plan": plan, "rows": kept}


def test_a_step_shows_the_plan_and_its_rows_with_zero_padding() -> None:
    cfg = config(ranks=2, row_alignment=4, policy="bounded", expert_bias=True)
    inputs = batches_for(cfg, 2)[0]
    want = evenep.plan(counts_of(cfg, inputs), cfg, hardware=EAGER)
    for rank, seen in enumerate(run_ranks(_look_inside, 2, cfg, inputs)):
        assert (seen["plan"].allocation == want.allocation).all()
        assert seen["plan"].fetches == want.fetches
        assert seen["plan"].stats == want.stats
        segments = want.layout.segments[rank]
        real = torch.zeros(segments.rows, dtype=torch.bool)
        for start, count in zip(segments.start_G, segments.count_G, strict=True):
            real[start : start + count] = True
        rows = seen["rows"]
        assert rows.shape == (segments.rows, cfg.hidden_size)
        assert not real.all()
        assert (rows[~real] == 0).all()
        assert not rows[real].isnan().any()
