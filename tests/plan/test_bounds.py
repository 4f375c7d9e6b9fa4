"""Each bound is below the brute-force optimum, and each optimum below every policy."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep.plan import Hardware, Placement, Problem, Residency, planner
from evenep.plan.bounds import (
    brute_force_replicas,
    brute_force_time,
    donor_bound,
    forest_bound,
    lower_bound,
    most_zero_sum_groups,
    receiver_bound,
    room_bound,
    time_bound_ps,
)
from evenep.plan.placement import Ints
from evenep.plan.policies import POLICIES
from evenep.plan.policies.bounded import bounded
from evenep.plan.policies.exact import exact

from .plan_cases import MACHINES, Case, cases, config

BOUNDS = (forest_bound, donor_bound, receiver_bound, room_bound, lower_bound)


def problem_of(
    routes_E: list[int],
    homes: list[int],
    ranks: int,
    slots: int = 9,
    machine: str = "balanced",
    align: int = 1,
) -> Problem:
    counts_RE = np.zeros((ranks, len(routes_E)), dtype=np.int64)
    counts_RE[0] = routes_E
    return Problem(
        counts_RE=counts_RE,
        placement=Placement.from_homes(homes, ranks),
        slots=slots,
        epsilon=0.0,
        residency=Residency.empty(ranks, slots),
        hardware=MACHINES[machine],
        align=align,
    )


def allocations(problem: Problem) -> list[Ints]:
    """Every allocation within the slots, route by route: the slowest and surest way."""

    def splits(routes: int) -> list[tuple[int, ...]]:
        return [
            parts
            for parts in itertools.product(range(routes + 1), repeat=problem.ranks)
            if sum(parts) == routes
        ]

    every = itertools.product(*(splits(n) for n in problem.routes_E.tolist()))
    return [a for parts in every if problem.fits(a := np.array(parts, dtype=np.int64))]


TINY = st.tuples(
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2)), min_size=1, max_size=3),
    st.integers(0, 2),
    st.sampled_from([0.0, 0.1, 0.29, 0.5]),
    st.sampled_from(sorted(MACHINES)),
    st.sampled_from([1, 2, 3]),
)
Tiny = tuple[list[tuple[int, int]], int, float, str, int]


@settings(max_examples=100, deadline=None)
@given(case=TINY)
def test_optima_equal_a_plain_enumeration_of_every_allocation(case: Tiny) -> None:
    experts, slots, epsilon, machine, align = case
    problem = problem_of([n for n, _ in experts], [h for _, h in experts], 3, slots, machine, align)
    every = allocations(problem)
    assert brute_force_time(problem) == min(problem.time_ps(a) for a in every)
    caps_R = problem.caps(epsilon)
    replicas = [int(problem.replicas(a).sum()) for a in every if (a.sum(0) <= caps_R).all()]
    assert brute_force_replicas(problem, epsilon) == min(replicas, default=None)


@settings(max_examples=150, deadline=None)
@given(case=cases(max_ranks=4, max_experts=6, heat=40))
def test_no_bound_exceeds_the_fewest_replicas_nor_any_policys(case: Case) -> None:
    problem = case.problem(slots=case.home_group)
    for epsilon in (0.0, case.epsilon):
        fewest = brute_force_replicas(problem, epsilon)
        assert fewest is not None  # slots for a home group always suffice
        for bound in BOUNDS:
            assert bound(problem, epsilon) <= fewest
        assert fewest <= problem.replicas(bounded(problem, epsilon)).sum()
    assert fewest <= problem.replicas(exact(problem)).sum()


@settings(max_examples=60, deadline=None)
@given(case=cases(max_ranks=3, max_experts=4, heat=6))
def test_no_policy_beats_the_fastest_allocation(case: Case) -> None:
    problem = case.problem()
    best = brute_force_time(problem)
    assert time_bound_ps(problem) <= best
    for policy in POLICIES.values():
        alloc_ER, _ = policy(problem)
        if problem.fits(alloc_ER):
            assert best <= problem.time_ps(alloc_ER)


@settings(max_examples=60, deadline=None)
@given(gaps=st.lists(st.integers(-6, 6).filter(bool), max_size=6))
def test_zero_sum_groups_equal_the_best_of_all_orders(gaps: list[int]) -> None:
    gaps = [*gaps, -sum(gaps)] if sum(gaps) else gaps
    best = max(
        sum(total == 0 for total in itertools.accumulate(order))
        for order in itertools.permutations(gaps)
    )
    assert most_zero_sum_groups(gaps) == best


def test_forest_bound_counts_what_the_split_leaves() -> None:
    # Loads 7 1 | 6 2 | 4: two pairs that each even out with one replica, one rank at its share.
    problem = problem_of([7, 1, 6, 2, 4], [0, 1, 2, 3, 4], 5)
    assert forest_bound(problem, 0.0) == 2
    # 9 3 3 1 sum to 16 with no proper zero-sum group: a tree on four ranks.
    assert forest_bound(problem_of([9, 3, 3, 1], [0, 1, 2, 3], 4), 0.0) == 3


def test_forest_bound_of_many_ranks_stays_sound() -> None:
    # 12 donors (+2) and 24 receivers (-1): groups of three, so 24 replicas.
    routes = [5] * 12 + [2] * 24
    problem = problem_of(routes, list(range(36)), 36)
    assert forest_bound(problem, 0.0) == 24
    assert problem.replicas(exact(problem)).sum() >= 24


def test_donor_bound_counts_distinct_experts_and_rows_of_one_hot_expert() -> None:
    four_equal = problem_of([4, 4, 4, 4, 0], [0, 0, 0, 0, 1], 2)
    assert donor_bound(four_equal, 0.0) == 2
    assert donor_bound(four_equal, 0.5) == 1
    one_hot = problem_of([40, 0, 0, 0], [0, 1, 2, 3], 4)
    assert donor_bound(one_hot, 0.0) == 3  # 30 leave, at most 10 to a rank


def test_one_donor_may_send_pieces_wider_than_any_deficit_but_the_total_pays_for_it() -> None:
    # Caps 4 4 4, loads 6 3 3. Expert 0 hands 2 routes to rank 1, whose deficit is 1; rank 1
    # hands its expert 2 on. Rank 0 sends one replica, surplus / deficit says two: in total.
    problem = problem_of([6, 2, 1, 3], [0, 1, 1, 2], 3)
    chained_ER = np.array([[4, 2, 0], [0, 2, 0], [0, 0, 1], [0, 0, 3]])
    assert (chained_ER.sum(axis=0) == problem.caps(0.0)).all()
    assert donor_bound(problem, 0.0) == 1
    assert room_bound(problem, 0.0) == 2 == brute_force_replicas(problem, 0.0)


def test_receiver_bound_counts_experts_that_fill_an_idle_rank() -> None:
    problem = problem_of([2, 2, 2, 0], [0, 0, 0, 1], 2)
    assert receiver_bound(problem, 0.0) == 2
    assert receiver_bound(problem, 1.0) == 0  # slack: the idle rank may stay idle


def adversary(experts_per_rank: int, ranks: int) -> Problem:
    """All ranks but the last evenly loaded with uniform experts, the last idle."""
    m, R = experts_per_rank, ranks
    placement = Placement.contiguous(m * R, R)
    counts_RE = np.zeros((R, m * R), dtype=np.int64)
    counts_RE[:, : m * (R - 1)] = 1000  # routes of an expert divide by R: no remainders
    return Problem(
        counts_RE=counts_RE,
        placement=placement,
        slots=m,
        epsilon=0.0,
        residency=Residency.empty(R, m),
        hardware=Hardware(row_ps=1, read_ps=0, launch_ps=0, fetch_ps=0),
        align=1,
    )


def necessary_slots(experts_per_rank: int, ranks: int, epsilon: float) -> int:
    """docs/planning.md: ceil(m (R-1)/R (1 - (R-1) epsilon)), in integers."""
    millionths = 10**6 - (ranks - 1) * round(epsilon * 10**6)
    return max(0, -(-experts_per_rank * (ranks - 1) * millionths // (ranks * 10**6)))


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("experts_per_rank", [1, 2, 5, 16])
@pytest.mark.parametrize("epsilon", [0.0, 0.02, 0.1, 0.25, 1.0])
def test_adversary_needs_the_slots_the_docs_say_and_a_home_group_suffices(
    experts_per_rank: int, ranks: int, epsilon: float
) -> None:
    problem = adversary(experts_per_rank, ranks)
    m, needed = experts_per_rank, necessary_slots(experts_per_rank, ranks, epsilon)
    assert needed <= receiver_bound(problem, epsilon) <= m
    E = problem.placement.num_experts
    for slots in range(m + 1):
        cfg = config(problem.counts_RE, slots=slots, policy="bounded", epsilon=epsilon)
        plan = planner.plan(problem.counts_RE, cfg)
        within = bool((plan.loads <= problem.caps(epsilon)).all())
        assert within == (plan.stats.epsilon_reached <= epsilon + 1e-12)
        assert not (within and slots < needed)
        assert within or slots < m
        assert plan.allocation.sum() == problem.total == 1000 * ranks * (E - m)


def test_adversary_is_infeasible_by_exhaustion_below_the_necessary_slots() -> None:
    for ranks, m in ((2, 3), (3, 2)):
        problem = adversary(m, ranks)
        for slots in range(m + 1):
            tight = dataclasses.replace(problem, slots=slots)
            feasible = brute_force_replicas(tight, 0.0) is not None
            assert feasible == (slots >= necessary_slots(m, ranks, 0.0))


def test_command_prints_the_table_of_the_docs() -> None:
    command = [sys.executable, "-W", "error::RuntimeWarning", "-m", "evenep.plan.bounds"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) == 5
    assert all(line.count("|") == 8 for line in lines)
