"""The device's planner gives the CPU planner's bits in all it writes, over steps with residency."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from evenep.bench.workloads import NAMES, Workload
from evenep.config import EPConfig
from evenep.device.planner import MAX_RANKS, DevicePlanner
from evenep.errors import InputError, UnsupportedError
from evenep.plan import Hardware, Placement
from evenep.plan.bounds import Case as Row
from evenep.plan.bounds import skewed_counts
from evenep.plan.placement import Ints
from evenep.plan.policies import POLICIES

from ..plan.plan_cases import BALANCED, MACHINES, Case, cases, config, residencies
from .plan_device import DEVICE, Twins

ON_GPU = torch.cuda.is_available()
interpreted = pytest.mark.skipif(ON_GPU, reason="every size would be compiled; see the gpu tests")
QUIET = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


def stepped(case: Case, policy: str, data: st.DataObject, hardware: Hardware) -> None:
    """The case's counts twice, then turned round: new, resident and half-resident."""
    cfg = case.config(policy)
    E = case.placement.num_experts
    held = data.draw(residencies(case.R, cfg.slots, E))
    start = held if data.draw(st.booleans()) else None
    rank = data.draw(st.integers(0, case.R - 1))
    other = case.counts_RE[:, ::-1] if policy != "exact" else case.counts_RE[::-1]
    twins = Twins(cfg, case.placement, rank, hardware, start)
    for counts_RE in (case.counts_RE, case.counts_RE, other):
        twins.step(np.ascontiguousarray(counts_RE), policy)


@interpreted
@pytest.mark.parametrize("policy", ["static", "exact", "bounded"])
@settings(QUIET, max_examples=5)
@given(case=cases(max_ranks=9, max_experts=24, heat=60), data=st.data())
def test_same_bits_over_steps(policy: str, case: Case, data: st.DataObject) -> None:
    stepped(case, policy, data, MACHINES[case.machine])


@interpreted
@settings(QUIET, max_examples=3)
@given(
    case=cases(max_ranks=5, max_experts=9, heat=40),
    parallel=st.sampled_from([0, 1, 2]),
    cold_ps=st.sampled_from([0, 700]),
    plan_ps=st.sampled_from([0, 3000, 10**7]),
    data=st.data(),
)
def test_auto_replays_the_search(
    case: Case, parallel: int, cold_ps: int, plan_ps: int, data: st.DataObject
) -> None:
    machine = MACHINES[case.machine]
    stepped(
        case,
        "auto",
        data,
        replace(machine, parallel=parallel, cold_ps=cold_ps, plan_ps=plan_ps),
    )


EMPTY_HOMES = [0, 0, 3, 3, 3, 0]


@interpreted
@pytest.mark.parametrize("policy", list(POLICIES))
def test_ranks_without_experts_and_an_empty_step(policy: str) -> None:
    counts_RE = np.zeros((5, 6), dtype=np.int64)
    counts_RE[1] = [9, 1, 0, 2, 0, 3]
    cfg = config(counts_RE, slots=3, policy=policy, align=4)
    twins = Twins(cfg, Placement.from_homes(EMPTY_HOMES, 5), 4, BALANCED)
    for counts in (counts_RE, np.zeros_like(counts_RE)):
        twins.step(counts, policy)


@interpreted
@pytest.mark.parametrize("shape", [(1, 5, 0), (3, 5, 0), (1, 4, 2), (6, 2, 1)], ids=str)
@pytest.mark.parametrize("policy", ["static", "bounded", "auto"])
def test_without_slots_or_peers_or_with_fewer_experts_than_ranks(
    shape: tuple[int, int, int], policy: str
) -> None:
    R, E, B = shape
    counts_RE = np.arange(R * E).reshape(R, E) % 5
    cfg = config(counts_RE, slots=B, policy=policy)
    Twins(cfg, Placement.contiguous(E, R), R - 1, BALANCED).step(counts_RE, policy)


@interpreted
def test_too_few_slots_are_used_as_far_as_they_go() -> None:
    counts_RE = np.zeros((4, 32), dtype=np.int64)
    counts_RE[:, :8] = 100
    cfg = config(counts_RE, slots=1, policy="bounded")
    plan = Twins(cfg, Placement.contiguous(32, 4), 2, BALANCED).step(counts_RE, "bounded")
    assert plan.loads.tolist() == [2000, 400, 400, 400]


@interpreted
def test_auto_rests_where_its_searches_do_not_pay() -> None:
    counts_RE = np.array([[9, 1], [9, 1]])
    twins = Twins(
        config(counts_RE, slots=1),
        Placement.contiguous(2, 2),
        0,
        Hardware(row_ps=1, read_ps=0, launch_ps=0, fetch_ps=0, plan_ps=10**6),
    )
    for _ in range(7):
        twins.step(counts_RE, "auto")
    assert twins.pace.rest == 4
    assert twins.device.numbers(twins.out)["searched"] == 0


def planner_of(ranks: int, experts: int) -> DevicePlanner:
    counts_RE = np.ones((ranks, experts), dtype=np.int64)
    cfg = config(counts_RE, slots=0)
    return DevicePlanner(cfg, Placement.contiguous(experts, ranks), 0, BALANCED, DEVICE)


def test_more_ranks_than_the_kernels_hold_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="too large"):
        planner_of(MAX_RANKS + 1, 4)


@pytest.mark.parametrize(
    "counts",
    [
        torch.ones(2, 3, dtype=torch.int64),
        torch.ones(3, 2, dtype=torch.int32),
        torch.ones(3, 2, dtype=torch.int32).T,
    ],
    ids=["dtype", "shape", "strides"],
)
def test_counts_of_another_kind_are_refused(counts: torch.Tensor) -> None:
    planner = planner_of(2, 3)
    with pytest.raises(InputError, match="bad counts"):
        planner.plan(counts.to(DEVICE), planner.residency(), "static", planner.buffers())


# On a GPU: few sizes, since each is compiled, and many draws.

H200 = Hardware(row_ps=110_000, read_ps=4_300_000, launch_ps=1_500_000, fetch_ps=46_000_000)
ODD = [(3, 7, 2), (7, 40, 3), (33, 70, 2), (5, 4, 1)]
LARGE = [(8, 896, 14), (64, 896, 14)]
TOKENS = (8, 64, 512, 4096)


def serving_config(shape: tuple[int, int, int], policy: str, tokens: int, align: int) -> EPConfig:
    R, E, B = shape
    if policy == "exact":
        B = -(-E // R)
    return EPConfig(
        num_experts=E,
        top_k=min(16, E),
        hidden_size=64,
        intermediate_size=32,
        max_tokens_per_rank=tokens,
        ranks=R,
        slots_per_rank=B,
        policy=policy,
        row_alignment=align,
    )


def drawn(cfg: EPConfig, rng: np.random.Generator) -> Ints:
    """Counts of a step: a forced routing, a lognormal popularity, or a few hot experts."""
    R, E, K = cfg.ranks, cfg.num_experts, cfg.top_k
    tokens = int(rng.choice([t for t in TOKENS if t <= cfg.max_tokens_per_rank]))
    kind = rng.integers(4)
    if kind == 0 and K * 8 <= E:
        name = str(rng.choice(NAMES))
        workload = Workload(name, E, K, R, seed=int(rng.integers(9)))
        few = min(tokens, 64)
        rows = [workload.ids(int(rng.integers(8)), r, workload.tokens(r, few)) for r in range(R)]
        return np.stack([np.bincount(i.numpy().ravel(), minlength=E) for i in rows])
    if kind == 1:
        weight_E = np.where(rng.random(E) < 0.05, 40, 1) * rng.integers(0, 4, E)
        weight_E[rng.integers(E)] += 1
        share_E = weight_E / weight_E.sum()
        routes_R = rng.integers(0, tokens * K + 1, R)
        return np.stack([rng.multinomial(n, share_E) for n in routes_R]).astype(np.int64)
    skew = float(rng.choice([0.1, 0.2, 1.0, 3.0, 6.0])) if E > 20 else 0.5
    return skewed_counts(Row("", E, R, tokens, K, skew), rng)


def run_draws(shape: tuple[int, int, int], policy: str, draws: int, seed: int) -> None:
    rng = np.random.default_rng([seed, *shape])
    R, E, _ = shape
    for align, machine in ((16, H200), (128, replace(H200, fetch_ps=400_000, parallel=R // 2))):
        cfg = serving_config(shape, policy, TOKENS[-1], align)
        twins = Twins(cfg, Placement.contiguous(E, R), int(rng.integers(R)), machine)
        counts_RE = drawn(cfg, rng)
        for _ in range(draws // 2):
            if rng.random() < 0.7:  # else the same again, with its replicas resident
                counts_RE = drawn(cfg, rng)
            twins.step(counts_RE, policy)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("shape", LARGE, ids=str)
def test_same_bits_at_serving_sizes(shape: tuple[int, int, int], policy: str) -> None:
    run_draws(shape, policy, draws=400, seed=1)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("shape", ODD, ids=str)
def test_same_bits_at_odd_sizes(shape: tuple[int, int, int], policy: str) -> None:
    run_draws(shape, policy, draws=400, seed=2)


@pytest.mark.gpu
@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_captured_plan_follows_its_counts_and_residency(policy: str) -> None:
    shape = (8, 896, 14)
    cfg = serving_config(shape, policy, TOKENS[-1], 16)
    twins, rng = Twins(cfg, Placement.contiguous(896, 8), 3, H200), np.random.default_rng(3)
    twins.device.warm_up(twins.window.put(drawn(cfg, rng)), [policy])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # captured, not run
        twins.device.plan(twins.window.counts_RE, twins.held, policy, twins.out)
    for _ in range(20):
        counts_RE = drawn(cfg, rng)
        expected = twins.on_cpu(counts_RE, policy)
        twins.window.put(counts_RE)
        graph.replay()
        twins.compare(expected)
