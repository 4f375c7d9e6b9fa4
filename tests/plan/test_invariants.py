"""Every plan obeys C2, checked route by route, whatever the counts, homes, slots and policy."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep.plan import Plan, Residency, planner
from evenep.plan.planner import verify

from .plan_cases import MACHINES, ROUTE_ORDERS, Case, cases, residencies, routes_of

POLICIES = ("static", "exact", "bounded", "auto")


def planned(case: Case, policy: str, residency: Residency | None = None) -> Plan:
    plan = planner.plan(
        case.counts_RE,
        case.config(policy),
        case.placement,
        residency,
        hardware=MACHINES[case.machine],
    )
    verify(plan, case.config(policy), case.placement)
    return plan


def check_segments(case: Case, plan: Plan) -> None:
    """Home experts ascending, then slots; aligned, gapless, no empty segment, real weights."""
    home_rows = case.placement.max_experts_per_rank
    for rank, s in enumerate(plan.layout.segments):
        order = s.weight_row_G.tolist()
        assert order == sorted(set(order))
        assert (s.count_G > 0).all()
        np.testing.assert_array_equal(s.count_G, plan.allocation[s.expert_G, rank])
        np.testing.assert_array_equal(s.start_G, np.cumsum(s.padded_G) - s.padded_G)
        assert (s.padded_G % case.align == 0).all()
        assert ((s.padded_G - s.count_G >= 0) & (s.padded_G - s.count_G < case.align)).all()
        assert s.rows == s.padded_G.sum()
        assert s.expert_G.size == np.count_nonzero(plan.allocation[:, rank])
        for expert, row in zip(s.expert_G.tolist(), order, strict=True):
            if row < home_rows:
                assert case.placement.experts_of(rank)[row] == expert
            else:
                assert plan.slot_experts[rank, row - home_rows] == expert


def check_routes(case: Case, plan: Plan, order: str) -> None:
    """Every route gets one row, no two share one, each lies in its expert's segment."""
    routes = routes_of(plan, order)
    sent_RE = np.zeros_like(plan.counts)
    got_ER = np.zeros_like(plan.allocation)
    for expert, source, dest, row in routes:
        sent_RE[source, expert] += 1
        got_ER[expert, dest] += 1
        start = plan.layout.start_ER[expert, dest]
        assert 0 <= start <= row < start + plan.allocation[expert, dest]
    np.testing.assert_array_equal(sent_RE, plan.counts)
    np.testing.assert_array_equal(got_ER, plan.allocation)
    assert len({(dest, row) for _, _, dest, row in routes}) == len(routes)
    check_row_order(routes)
    if order == "local_first":
        kept_RE = np.zeros_like(plan.counts)
        for expert, source, dest, _ in routes:
            kept_RE[source, expert] += source == dest
        np.testing.assert_array_equal(kept_RE, np.minimum(plan.counts, plan.allocation.T))


def check_row_order(routes: list[tuple[int, int, int, int]]) -> None:
    """Inside a segment rows ascend by source rank, then by the route's order at its source."""
    rows: dict[tuple[int, int], list[int]] = {}
    for expert, _, dest, row in routes:  # sources ascend in ``routes``
        rows.setdefault((expert, dest), []).append(row)
    for segment in rows.values():
        assert segment == list(range(segment[0], segment[0] + len(segment)))


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=70, deadline=None)
@given(case=cases(heat=120))
def test_every_route_gets_one_row_of_its_own_in_its_experts_segment(
    policy: str, case: Case
) -> None:
    plan = planned(case, policy)
    check_segments(case, plan)
    for order in ROUTE_ORDERS:
        check_routes(case, plan, order)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=60, deadline=None)
@given(case=cases(), data=st.data())
def test_slots_serve_exactly_the_replicas_and_fetches_are_exactly_the_new_slots(
    policy: str, case: Case, data: st.DataObject
) -> None:
    cfg = case.config(policy)
    held = data.draw(residencies(case.R, cfg.slots, cfg.num_experts))
    plan = planned(case, policy, held)
    for rank in range(case.R):
        here = set(np.flatnonzero(plan.allocation[:, rank]).tolist())
        served = [e for e in plan.slot_experts[rank].tolist() if e >= 0]
        assert sorted(served) == sorted(here - set(case.placement.experts_of(rank)))
    new = {
        (int(e), rank, slot)
        for (rank, slot), e in np.ndenumerate(plan.slot_experts)
        if e >= 0 and held.experts_RB[rank, slot] != e
    }
    assert {(f.expert, f.rank, f.slot) for f in plan.fetches} == new
    assert len(plan.fetches) == len(new)
    assert all(f.owner == case.placement.home_E[f.expert] for f in plan.fetches)
    # what is resident is never fetched again, not even into another slot
    assert all(f.expert not in held.experts_RB[f.rank] for f in plan.fetches)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_statistics_say_what_the_allocation_does(policy: str, case: Case) -> None:
    plan = planned(case, policy)
    stats, home_E = plan.stats, case.placement.home_E
    away_ER = np.arange(case.R)[None, :] != home_E[:, None]
    replicas_ER = (plan.allocation > 0) & away_ER
    mean = plan.counts.sum() / case.R
    np.testing.assert_array_equal(plan.loads, plan.allocation.sum(axis=0))
    assert stats.policy == policy
    assert stats["replicas"] == stats.replicas == replicas_ER.sum()
    assert stats.max_in == replicas_ER.sum(axis=0).max()
    assert stats.max_out == max(replicas_ER[home_E == r].sum() for r in range(case.R))
    assert stats.moved_routes == plan.allocation[away_ER].sum()
    assert stats.fetches == len(plan.fetches) == stats.replicas
    assert stats.saved_bytes == 0
    if mean:
        assert stats.imbalance_after == pytest.approx(plan.loads.max() / mean)
        assert stats.epsilon_reached == pytest.approx(plan.loads.max() / mean - 1, abs=1e-12)
    else:
        assert (stats.imbalance_before, stats.imbalance_after, stats.replicas) == (1.0, 1.0, 0)


@settings(max_examples=40, deadline=None)
@given(case=cases())
def test_static_moves_nothing(case: Case) -> None:
    plan = planned(case, "static")
    assert plan.stats.replicas == plan.stats.moved_routes == len(plan.fetches) == 0
    assert plan.stats.imbalance_after == plan.stats.imbalance_before
