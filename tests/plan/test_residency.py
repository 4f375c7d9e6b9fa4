"""Slots: what is resident isn't fetched, what is needed isn't evicted, the oldest goes first."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep.plan import Placement, Residency, planner
from evenep.plan.planner import verify

from .plan_cases import BALANCED, MACHINES, Case, cases, config, residencies


@settings(max_examples=200, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 4), slots=st.integers(0, 5), experts=st.integers(1, 9))
def test_assign_keeps_residents_in_place_and_evicts_only_the_unneeded_oldest_first(
    data: st.DataObject, ranks: int, slots: int, experts: int
) -> None:
    held = data.draw(residencies(ranks, slots, experts))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    wanted = [
        sorted(rng.permutation(experts)[: rng.integers(0, min(slots, experts) + 1)].tolist())
        for _ in range(ranks)
    ]
    slot_RB = held.assign(wanted)
    for rank, want in enumerate(wanted):
        before, after = held.experts_RB[rank].tolist(), slot_RB[rank].tolist()
        assert sorted(e for e in after if e >= 0) == want
        for slot, expert in enumerate(before):
            if expert in want:
                assert after[slot] == expert
        age = [held.used_RB[rank, b] if before[b] >= 0 else -1 for b in range(slots)]
        taken = [b for b in range(slots) if after[b] >= 0 and after[b] != before[b]]
        spared = [b for b in range(slots) if after[b] < 0]
        for b in taken:  # a slot left alone was used later, or as late and stands higher
            assert all((age[s], s) > (age[b], b) for s in spared)


def test_least_recently_used_slot_is_evicted_and_empty_slots_go_first() -> None:
    none = Residency.empty(1, 3)
    first = none.after(none.assign([[10]]))
    second = first.after(first.assign([[20]]))
    third = second.after(second.assign([[30]]))
    assert third.experts_RB.tolist() == [[10, 20, 30]]
    touched = third.after(third.assign([[10]]))  # 10 is used again: 20 is now the oldest
    assert touched.assign([[40]]).tolist() == [[-1, 40, -1]]
    assert touched.assign([[40, 50]]).tolist() == [[-1, 40, 50]]
    assert touched.assign([[20, 40]]).tolist() == [[-1, 20, 40]]  # needed: not evicted
    assert touched.after(touched.assign([[40]])).experts_RB.tolist() == [[10, 40, 30]]


def test_a_record_is_never_changed_in_place() -> None:
    record = Residency.of([[1, -1], [2, 3]])
    copy = record.experts_RB.copy()
    record.after(record.assign([[5], [2]]))
    np.testing.assert_array_equal(record.experts_RB, copy)
    assert record.step == 0


@pytest.mark.parametrize("policy", ["static", "exact", "bounded"])
@settings(max_examples=120, deadline=None)
@given(case=cases())
def test_the_same_counts_again_fetch_nothing(policy: str, case: Case) -> None:
    cfg = case.config(policy)
    first = planner.plan(case.counts_RE, cfg, case.placement)
    again = planner.plan(case.counts_RE, cfg, case.placement, first.residency)
    assert again.fetches == ()
    assert again.stats.fetch_bytes == 0
    assert again.stats.saved_bytes == first.stats.fetch_bytes
    np.testing.assert_array_equal(again.allocation, first.allocation)
    np.testing.assert_array_equal(again.slot_experts, first.slot_experts)


@pytest.mark.parametrize("policy", ["bounded", "exact"])
@settings(max_examples=120, deadline=None)
@given(case=cases(), data=st.data())
def test_repeated_counts_stop_fetching_from_any_start(
    policy: str, case: Case, data: st.DataObject
) -> None:
    cfg = case.config(policy)
    held = data.draw(residencies(case.R, cfg.slots, cfg.num_experts))
    for _ in range(5):  # exact: 2; bounded's greedies may take one more to find their own replicas
        plan = planner.plan(case.counts_RE, cfg, case.placement, held)
        held = plan.residency
    assert plan.fetches == ()


@settings(max_examples=100, deadline=None)
@given(case=cases())
def test_auto_fetches_again_only_for_a_faster_plan_and_settles(case: Case) -> None:
    cfg, machine = case.config("auto"), MACHINES[case.machine]
    first = planner.plan(case.counts_RE, cfg, case.placement, hardware=machine)
    again = first
    for _ in range(6):
        again = planner.plan(case.counts_RE, cfg, case.placement, again.residency, hardware=machine)
    assert again.stats.time_s <= first.stats.static_time_s
    assert again.stats.fetches == 0


def test_auto_with_residents_is_never_slower_than_repeating_its_last_plan() -> None:
    counts_RE = np.array([[2, 15, 3, 1, 0, 43], [0] * 6, [0] * 6])
    cfg = config(counts_RE, slots=1, align=2)
    first = planner.plan(counts_RE, cfg, hardware=BALANCED)
    again = planner.plan(counts_RE, cfg, residency=first.residency, hardware=BALANCED)
    assert again.stats.time_s <= first.stats.time_s
    assert again.stats.fetches == 0 or again.stats.time_s < first.stats.time_s


def test_bounded_prefers_a_resident_replica_to_fetching_a_better_one() -> None:
    counts_RE = np.array([[90, 70, 5, 5], [90, 70, 5, 5]])
    cfg = config(counts_RE, slots=1, policy="bounded", epsilon=0.1)
    fresh = planner.plan(counts_RE, cfg)
    held = planner.plan(counts_RE, cfg, residency=[[-1], [0]])
    assert [f.expert for f in fresh.fetches] == [1]
    assert held.fetches == ()
    assert held.stats.replicas == 1
    assert held.stats.saved_bytes == fresh.stats.fetch_bytes
    assert held.stats.epsilon_reached <= 0.1


def test_an_idle_step_keeps_what_the_slots_hold() -> None:
    counts_RE = np.array([[90, 1], [90, 1]])
    cfg = config(counts_RE, slots=1, policy="exact")
    busy = planner.plan(counts_RE, cfg)
    idle = planner.plan(np.zeros_like(counts_RE), cfg, residency=busy.residency)
    assert idle.fetches == ()
    assert (idle.slot_experts == -1).all()
    np.testing.assert_array_equal(idle.residency.experts_RB, busy.residency.experts_RB)
    assert not planner.plan(counts_RE, cfg, residency=idle.residency).fetches


def test_a_hotspot_that_rotates_fetches_once_per_expert_while_slots_last() -> None:
    cfg = config(np.full((2, 8), 100), slots=4, policy="bounded", epsilon=0.1)
    held, fetched = Residency.empty(2, 4), []
    for step in range(12):
        counts_RE = np.ones((2, 8), dtype=np.int64)
        counts_RE[:, step % 3] = 300  # three hot experts of rank 0, one after the other
        plan = planner.plan(counts_RE, cfg, residency=held)
        verify(plan, cfg, Placement.contiguous(8, 2))
        assert plan.stats.epsilon_reached <= 0.11
        fetched.append([f.expert for f in plan.fetches])
        held = plan.residency
    assert fetched == [[0], [1], [2]] + [[]] * 9


def test_a_burst_after_an_idle_step_finds_its_replicas_still_there() -> None:
    cfg = config(np.full((4, 8), 100), slots=2, policy="bounded")
    burst = np.ones((4, 8), dtype=np.int64)
    burst[:, 5] = 300
    first = planner.plan(burst, cfg)
    quiet = planner.plan(np.ones_like(burst), cfg, residency=first.residency)
    again = planner.plan(burst, cfg, residency=quiet.residency)
    assert first.stats.fetches >= 3
    assert quiet.stats.replicas == 0
    assert again.stats.fetches == 0
