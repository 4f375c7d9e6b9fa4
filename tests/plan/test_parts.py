"""Placement, problem, capacity, cost: the small parts a plan is made of."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep.config import EPConfig
from evenep.errors import ConfigError
from evenep.plan import Hardware, Placement, planner
from evenep.plan.capacity import cap_routes, ceil_to, receive_rows
from evenep.plan.cost import compute_ps, layer_time_ps, rank_times_ps
from evenep.plan.planner import declared_hardware, verify
from evenep.plan.policies.refine import refine

from .plan_cases import BALANCED, Case, cases, config


@given(E=st.integers(0, 40), R=st.integers(1, 12))
def test_contiguous_homes_are_blocks_that_differ_by_one_at_most(E: int, R: int) -> None:
    placement = Placement.contiguous(E, R)
    sizes = [len(placement.experts_of(r)) for r in range(R)]
    assert placement.home_E.tolist() == sorted(placement.home_E.tolist())
    assert sizes == sorted(sizes, reverse=True)
    assert sum(sizes) == E == placement.num_experts
    assert placement.max_experts_per_rank == -(-E // R)
    assert max(sizes) - min(sizes) <= 1


@given(homes=st.lists(st.integers(0, 4), min_size=1, max_size=20))
def test_local_rows_number_each_ranks_experts_from_zero(homes: list[int]) -> None:
    placement = Placement.from_homes(homes, 5)
    for rank in range(5):
        experts = placement.experts_of(rank)
        assert experts == [e for e, home in enumerate(homes) if home == rank]
        assert placement.local_E[experts].tolist() == list(range(len(experts)))


@pytest.mark.parametrize("homes", [[0, 3], [-1, 0], [[0, 1]]])
def test_homes_outside_the_group_are_refused(homes: list[int]) -> None:
    with pytest.raises(ConfigError, match="placement"):
        Placement.from_homes(homes, 3)


@settings(max_examples=150, deadline=None)
@given(case=cases(), epsilon=st.floats(0, 1))
def test_caps_sum_to_the_total_or_more_and_slack_only_widens_them(
    case: Case, epsilon: float
) -> None:
    problem = case.problem()
    share_R, cap_R = problem.caps(0.0), problem.caps(epsilon)
    assert share_R.sum() == problem.total
    assert np.ptp(share_R) <= 1
    assert (cap_R >= share_R).all()
    mean = problem.total / case.R
    assert (cap_R <= np.maximum(share_R, (1 + epsilon + 1e-6) * mean)).all()


def test_receive_rows_of_the_contract_and_its_tightness() -> None:
    assert receive_rows(4, 8, 2) == 8  # S K = 4, four groups can be non-empty, one pad each
    assert receive_rows(3, 8, 128) == 3 * 128  # three routes in three experts: three segments
    assert [ceil_to(v, 16) for v in (0, 1, 16, 17)] == [0, 16, 16, 32]


@given(cap=st.integers(0, 60), groups=st.integers(1, 9), align=st.sampled_from([1, 2, 16, 128]))
def test_receive_rows_is_never_exceeded_and_bounds_the_worst_split(
    cap: int, groups: int, align: int
) -> None:
    used = min(groups, cap)
    ones = [1] * used  # one route in each of as many segments as can be, the rest in the first
    if used:
        ones[0] += cap - used
    rows = sum(ceil_to(n, align) for n in ones)
    assert rows <= receive_rows(cap, groups, align)
    if (cap - used) % align == 0:
        assert rows == receive_rows(cap, groups, align)


def bounded_config(*, tokens: int, epsilon: float) -> EPConfig:
    counts_RE = np.array([[tokens, 0], [0, tokens]])
    cfg = config(counts_RE, slots=1, policy="bounded", epsilon=epsilon)
    return cfg.replace(top_k=1, max_tokens_per_rank=tokens)


@pytest.mark.parametrize("hundredths", range(0, 101))
def test_the_capacity_holds_what_bounded_may_put_on_a_rank(hundredths: int) -> None:
    epsilon = hundredths / 100
    cfg = bounded_config(tokens=100, epsilon=epsilon)
    counts_RE = np.array([[100, 0], [100, 0]])
    plan = planner.plan(counts_RE, cfg)
    assert plan.loads.max() == 100 + hundredths
    assert plan.loads.max() <= cap_routes(cfg, 1)
    verify(plan, cfg, Placement.contiguous(2, 2))


def test_capacity_is_the_share_for_exact_and_everything_where_nothing_is_promised() -> None:
    cfg = config(np.full((4, 8), 50), slots=2, policy="exact")
    assert cap_routes(cfg, 2) == cfg.max_tokens_per_rank * cfg.top_k
    assert cap_routes(cfg, 3) == 4 * cap_routes(cfg, 2)  # a home group larger than B
    for policy in ("auto", "static"):
        assert cap_routes(cfg.replace(policy=policy), 2) == 4 * cap_routes(cfg, 2)


def test_cost_of_the_worked_example_of_the_docs() -> None:
    # docs/planning.md: MXFP4 K3 expert on an H200. 200 rows pad to 256 and multiply for 28.16 us.
    k3 = Hardware(row_ps=110_000, read_ps=4_300_000, launch_ps=1_500_000, fetch_ps=46_000_000)
    assert compute_ps(np.array([0, 1, 200]), k3, 128).tolist() == [0, 15_580_000, 29_660_000]
    alloc_ER = np.array([[400, 200], [200, 0], [0, 200]])
    moved_ER = np.array([[0, 1], [0, 0], [0, 0]])
    times = rank_times_ps(alloc_ER, np.array([0, 0, 1]), moved_ER, k3, 128)
    home = [57_820_000 + 29_660_000, 29_660_000]
    assert times.tolist() == [home[0], max(home[1], 46_000_000) + 29_660_000]


def test_a_hot_home_serves_its_receivers_one_after_the_other() -> None:
    alloc_ER = np.array([[1, 1, 1, 1]])
    moved_ER = np.array([[0, 1, 1, 1]])
    hardware = Hardware(row_ps=1, read_ps=0, launch_ps=0, fetch_ps=100)
    assert rank_times_ps(alloc_ER, np.array([0]), moved_ER, hardware, 1).tolist() == [1] + 3 * [301]
    none = np.zeros_like(moved_ER)
    assert rank_times_ps(alloc_ER, np.array([0]), none, hardware, 1).tolist() == [1] * 4


def test_a_memory_bound_expert_costs_its_read_however_few_its_rows() -> None:
    routes = np.arange(1, 17)
    assert set(compute_ps(routes, Hardware(10, 4000, 100, 0), 16).tolist()) == {4100}


@given(
    n=st.integers(0, 500),
    m=st.integers(0, 500),
    align=st.sampled_from([1, 2, 16, 128]),
    row=st.integers(0, 9),
    read=st.integers(0, 900),
)
def test_cost_is_monotone_and_splitting_never_pays_by_itself(
    n: int, m: int, align: int, row: int, read: int
) -> None:
    hardware = Hardware(row_ps=row, read_ps=read, launch_ps=3, fetch_ps=0)
    a, b, both = compute_ps(np.array([n, m, n + m]), hardware, align).tolist()
    assert max(a, b) <= both <= a + b


@pytest.mark.parametrize("bad", [-1, 1.5, None])
def test_hardware_constants_are_non_negative_integers(bad: object) -> None:
    with pytest.raises(ConfigError, match="read_ps"):
        Hardware(row_ps=1, read_ps=bad, launch_ps=0, fetch_ps=0)  # type: ignore[arg-type]


def test_rates_become_picoseconds() -> None:
    k3 = Hardware.from_rates(
        expert_bytes=17_547_264,
        expert_params=33_030_144,
        flops=6e14,
        memory_bytes_per_s=4.1e12,
        link_bytes_per_s=380e9,
    )
    assert (k3.row_ps, k3.read_ps, k3.fetch_ps) == (110_100, 4_279_820, 46_177_011)
    assert declared_hardware(bounded_config(tokens=4, epsilon=0.0)).row_ps > 0


@settings(max_examples=80, deadline=None)
@given(case=cases())
def test_refine_never_lengthens_the_layer_nor_needs_more_slots(case: Case) -> None:
    problem = case.problem()
    start_ER = problem.static_allocation()
    better_ER = refine(problem, start_ER, max_steps=8)
    assert problem.time_ps(better_ER) <= problem.time_ps(start_ER)
    assert problem.fits(better_ER)
    np.testing.assert_array_equal(better_ER.sum(axis=1), problem.routes_E)
    assert (better_ER >= 0).all()


def test_refine_swaps_whole_experts_where_reading_weights_is_the_cost() -> None:
    counts_RE = np.array([[3, 3, 3, 3, 0, 0], [0] * 6])
    reads = Hardware(row_ps=1, read_ps=1000, launch_ps=0, fetch_ps=0)
    problem = Case(counts_RE, Placement.from_homes([0, 0, 0, 0, 1, 1], 2), 2, 1, 0.0, "balanced")
    plan = planner.plan(counts_RE, problem.config("auto"), problem.placement, hardware=reads)
    assert plan.stats.time_s == 2000e-12
    assert sorted(np.count_nonzero(plan.allocation, axis=1).tolist()) == [0, 0, 1, 1, 1, 1]
    assert BALANCED.fetch_ps > 0


@settings(max_examples=200, deadline=None)
@given(times=st.lists(st.integers(0, 1000), min_size=1, max_size=8), parallel=st.integers(0, 10))
def test_ranks_that_share_processors_finish_as_a_fair_scheduler_would_have_them(
    times: list[int], parallel: int
) -> None:
    got = layer_time_ps(np.array(times, dtype=np.int64), parallel)
    left, clock = [Fraction(t) for t in times if t], Fraction(0)
    while left:  # fluid processor sharing, one departure at a time
        speed = min(Fraction(1), Fraction(parallel or len(times), len(left)))
        span = min(left) / speed
        clock += span
        left = [rest for t in left if (rest := t - span * speed) > 0]
    assert got == math.floor(clock)


def test_the_worked_example_of_shared_processors() -> None:
    assert layer_time_ps(np.array([2, 2, 8]), 2) == 9
    assert layer_time_ps(np.array([2, 2, 8]), 0) == 8
