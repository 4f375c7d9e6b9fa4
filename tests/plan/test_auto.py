"""``auto`` is never slower than its candidates, and close to the optimum where that is known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep.plan import Hardware, Placement, Problem, Residency, planner
from evenep.plan.bounds import brute_force_time, time_bound_ps
from evenep.plan.policies.auto import auto
from evenep.plan.policies.bounded import bounded
from evenep.plan.policies.exact import exact

from .plan_cases import MACHINES, Case, cases, residencies


@settings(max_examples=250, deadline=None)
@given(case=cases(), data=st.data())
def test_never_slower_than_static_nor_exact_nor_bounded(case: Case, data: st.DataObject) -> None:
    E = case.placement.num_experts
    problem = case.problem(data.draw(residencies(case.R, case.slots, E)))
    alloc_ER, _ = auto(problem)
    assert problem.fits(alloc_ER)
    time = problem.time_ps(alloc_ER)
    assert time >= time_bound_ps(problem)
    assert time <= problem.time_ps(problem.static_allocation())
    assert time <= problem.time_ps(bounded(problem, case.epsilon))
    exact_ER = exact(problem)
    if problem.fits(exact_ER):
        assert time <= problem.time_ps(exact_ER)


@settings(max_examples=80, deadline=None)
@given(case=cases(), plan_ps=st.integers(0, 10**6))
def test_counting_the_search_itself_auto_is_still_never_slower(case: Case, plan_ps: int) -> None:
    problem = case.problem()
    problem = replace(problem, hardware=replace(problem.hardware, plan_ps=plan_ps))
    alloc_ER, chosen = auto(problem)
    static_ps, time = problem.time_ps(problem.static_allocation()), problem.time_ps(alloc_ER)
    assert time <= static_ps
    others = [bounded(problem, case.epsilon), exact(problem)]
    for other_ER in (o for o in others if problem.fits(o)):
        searched = problem.time_ps(other_ER) + plan_ps
        assert time <= searched if chosen == "static" else time <= searched - plan_ps


@settings(max_examples=60, deadline=None)
@given(case=cases())
def test_statistics_promise_what_the_cost_model_says(case: Case) -> None:
    machine = MACHINES[case.machine]
    cfg = case.config("auto")
    plan = planner.plan(case.counts_RE, cfg, case.placement, hardware=machine)
    problem = case.problem()
    assert plan.stats.time_s * 1e12 == pytest.approx(problem.time_ps(plan.allocation))
    assert plan.stats.time_s <= plan.stats.static_time_s
    assert (plan.stats.chosen == "static") >= (plan.stats.replicas == 0)


def test_a_link_too_slow_to_pay_keeps_everything_at_home() -> None:
    counts_RE = np.zeros((4, 8), dtype=np.int64)
    counts_RE[:, 0] = 100
    cfg = Case(
        counts_RE, Placement.contiguous(8, 4), slots=2, align=1, epsilon=0.02, machine="slow_link"
    ).config("auto")
    stay = planner.plan(counts_RE, cfg, hardware=MACHINES["slow_link"])
    move = planner.plan(counts_RE, cfg, hardware=MACHINES["compute_only"])
    assert stay.stats.chosen == "static"
    assert stay.stats.imbalance_before == 4.0
    assert move.stats.imbalance_after == 1.0


TINY_MACHINES = {
    "compute": Hardware(row_ps=1000, read_ps=2000, launch_ps=500, fetch_ps=4000),
    # MXFP4 experts of 17.5 MB on an H200: 6e14 FLOP/s, 4.1 TB/s, link 380 GB/s; rows in 128s.
    "prefill": Hardware(
        row_ps=110_000, read_ps=4_300_000, launch_ps=1_500_000, fetch_ps=46_000_000
    ),
    "decode": Hardware(row_ps=110_000, read_ps=4_300_000, launch_ps=1_500_000, fetch_ps=4_600_000),
}
ALIGN = {"compute": 1, "prefill": 128, "decode": 16}
SIZES = ((2, 6, 8), (3, 6, 6), (4, 5, 4))  # R, E, alignments of routes an expert has on average


def tiny_problem(machine: str, size: tuple[int, int, int], seed: int) -> Problem:
    R, E, heat = size
    rng = np.random.default_rng(seed)
    popularity_E = rng.lognormal(0, rng.choice([0.3, 1.0, 2.0]), E)
    routes = int(rng.integers(1, heat * ALIGN[machine] * E // R + 1))
    slots = int(rng.integers(1, -(-E // R) + 1))
    return Problem(
        counts_RE=rng.multinomial(routes, popularity_E / popularity_E.sum(), size=R),
        placement=Placement.contiguous(E, R),
        slots=slots,
        epsilon=0.02,
        residency=Residency.empty(R, slots),
        hardware=TINY_MACHINES[machine],
        align=ALIGN[machine],
    )


def gaps(machine: str, seeds: range) -> list[float]:
    """How much slower than the optimum ``auto`` is, for every tiny problem where work exists."""
    found = []
    for size in SIZES:
        for seed in seeds:
            problem = tiny_problem(machine, size, seed)
            best, took = brute_force_time(problem), problem.time_ps(auto(problem)[0])
            assert time_bound_ps(problem) <= best <= took
            if best:
                found.append(took / best - 1)
    return found


@pytest.mark.parametrize("machine", sorted(TINY_MACHINES))
def test_median_within_3_percent_of_the_optimum_of_tiny_cases(machine: str) -> None:
    found = gaps(machine, range(40))
    median, p90 = np.quantile(found, [0.5, 0.9])
    assert median <= 0.03
    assert p90 <= 0.10
