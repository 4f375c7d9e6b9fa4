"""``exact`` is MoonEP's greedy: the contract's worked example, and a second implementation."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from evenep.plan import Placement, Plan, planner
from evenep.plan.placement import Ints
from evenep.plan.policies.exact import exact, pair_ranks

from . import moonep_reference as moonep
from .plan_cases import Case, cases, config

# R = 3, two experts a rank, two tokens a rank, K = 2, alignment 2.
TOPK = [[1, 2, 1, 3], [1, 0, 1, 2], [1, 2, 3, 4]]
ALLOCATION_RE = [[1, 2, 1, 0, 0, 0], [0, 0, 2, 2, 0, 0], [0, 3, 0, 0, 1, 0]]
NVS = 8  # rows of a rank in MoonEP's raw = rank * NvS + row
DST = [[2, 4, 3, 10], [18, 0, 19, 8], [20, 9, 11, 16]]  # |dst|: a duplicate's sign dropped


def histogram(topk: list[list[int]], experts: int) -> Ints:
    return np.array([np.bincount(row, minlength=experts) for row in topk], dtype=np.int64)


def dst_of(plan: Plan, topk: list[list[int]]) -> list[list[int]]:
    """Raw destination of every flat top-k entry, as a dispatch works it out from the runs."""
    result = []
    for source, ids in enumerate(topk):
        runs = plan.runs(source, "rank_order")
        places = [
            d * NVS + row + i
            for d, row, n in zip(
                runs.dest_N.tolist(), runs.row_N.tolist(), runs.count_N.tolist(), strict=True
            )
            for i in range(n)
        ]
        flat = [0] * len(ids)
        for entry, place in zip(np.argsort(ids, kind="stable").tolist(), places, strict=True):
            flat[entry] = place
        result.append(flat)
    return result


def test_worked_example_of_the_contract() -> None:
    counts_RE = histogram(TOPK, 6)
    assert counts_RE.sum(axis=0).tolist() == [1, 5, 3, 2, 1, 0]
    plan = planner.plan(counts_RE, config(counts_RE, slots=2, policy="exact", align=2))
    assert plan.allocation.T.tolist() == ALLOCATION_RE
    assert plan.slot_experts.tolist() == [[2, -1], [-1, -1], [1, -1]]
    ends = [(s.start_G + s.padded_G).tolist() for s in plan.layout.segments]
    assert ends == [[2, 4, 6], [2, 4], [2, 6]]
    pads = [(s.start_G + s.count_G)[s.padded_G > s.count_G].tolist() for s in plan.layout.segments]
    assert pads == [[1, 5], [], [1, 5]]  # rows to zero, one each
    assert dst_of(plan, TOPK) == DST
    assert (plan.stats.max_in, plan.stats.max_out, plan.stats.replicas) == (1, 1, 2)


def test_pairing_may_drain_a_donor_and_refill_it() -> None:
    assert pair_ranks([2, 1, -3]) == [(0, 2, 3), (1, 0, 1)]


def test_the_reference_itself_gives_the_worked_example() -> None:
    counts = histogram(TOPK, 6).tolist()
    home = [0, 0, 1, 1, 2, 2]
    alloc = moonep.allocate(counts, home)
    assert alloc == ALLOCATION_RE
    rows = moonep.rows_of_routes(counts, alloc, home, align=2)
    assert rows[0][1] == [(0, 2), (0, 3)]
    assert rows[1][1] + rows[2][1] == [(2, 2), (2, 3), (2, 4)]
    assert rows[0][2] + rows[1][2] + rows[2][2] == [(0, 4), (1, 0), (1, 1)]


@settings(max_examples=250, deadline=None)
@given(case=cases(max_ranks=9, max_experts=24, heat=60))
def test_allocation_and_rows_equal_the_second_implementation(case: Case) -> None:
    plan = planner.plan(case.counts_RE, case.config("exact"), case.placement)
    counts, home = case.counts_RE.tolist(), case.placement.home_E.tolist()
    alloc = moonep.allocate(counts, home)
    assert plan.allocation.T.tolist() == alloc
    for source, expected in enumerate(moonep.rows_of_routes(counts, alloc, home, case.align)):
        runs = plan.runs(source, "rank_order")
        rows: dict[int, list[tuple[int, int]]] = {}
        for expert, dest, row, count in zip(
            *(a.tolist() for a in (runs.expert_N, runs.dest_N, runs.row_N, runs.count_N)),
            strict=True,
        ):
            rows.setdefault(expert, []).extend((dest, row + i) for i in range(count))
        assert rows == expected


@settings(max_examples=150, deadline=None)
@given(case=cases(max_ranks=9, max_experts=24))
def test_every_rank_gets_its_share_from_at_most_one_donor(case: Case) -> None:
    problem = case.problem(slots=case.home_group)
    alloc_ER = exact(problem)
    shares = moonep.exact_caps(problem.total, case.R)
    assert alloc_ER.sum(axis=0).tolist() == shares
    foreign_ER = problem.replicas(alloc_ER)
    assert problem.fits(alloc_ER)
    for rank in range(case.R):
        assert len(set(case.placement.home_E[foreign_ER[:, rank]].tolist())) <= 1


def test_relabelling_experts_within_their_homes_relabels_the_allocation() -> None:
    rng = np.random.default_rng(3)
    placement = Placement.contiguous(24, 6)
    counts_RE = rng.integers(0, 100_000, (6, 24))  # large: no two quantities tie
    permuted_E = np.concatenate([home * 4 + rng.permutation(4) for home in range(6)])
    cfg = config(counts_RE, slots=4, policy="exact")
    for policy in ("exact", "bounded"):
        plain = planner.plan(counts_RE, cfg, placement, policy=policy)
        relabelled = planner.plan(counts_RE[:, permuted_E], cfg, placement, policy=policy)
        np.testing.assert_array_equal(relabelled.allocation, plain.allocation[permuted_E])


def test_relabelling_ranks_relabels_the_allocation() -> None:
    rng = np.random.default_rng(5)
    counts_RE = rng.integers(0, 100_000, (6, 24))
    counts_RE[0, 0] += -counts_RE.sum() % 6  # an even total: every rank has the same share
    homes = np.repeat(np.arange(6), 4)
    names_R = rng.permutation(6)
    cfg = config(counts_RE, slots=4, policy="exact")
    for policy in ("exact", "bounded"):
        plain = planner.plan(counts_RE, cfg, homes.tolist(), policy=policy)
        renamed = planner.plan(counts_RE, cfg, names_R[homes].tolist(), policy=policy)
        np.testing.assert_array_equal(renamed.allocation[:, names_R], plain.allocation)
