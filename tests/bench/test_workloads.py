"""W0-W7 are what they say: pure, K distinct experts per token, and the stress they promise."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep import Placement
from evenep.bench.workloads import BURST_EVERY, NAMES, Workload
from evenep.errors import ConfigError

E, K, TOKENS = 112, 16, 256


def step_ids(w: Workload, step: int, capacity: int = TOKENS) -> list[Tensor]:
    """What every rank brings."""
    return [w.ids(step, r, w.tokens(r, capacity)) for r in range(w.ranks)]


def routes_per_expert(w: Workload, step: int, capacity: int = TOKENS) -> list[int]:
    tally = Counter(torch.cat(step_ids(w, step, capacity)).reshape(-1).tolist())
    return [tally[e] for e in range(w.num_experts)]


def home_loads(w: Workload, step: int) -> list[int]:
    """Routes on each rank if every expert is computed at home."""
    counts, homes = routes_per_expert(w, step), Placement.contiguous(w.num_experts, w.ranks)
    return [sum(counts[e] for e in homes.experts_of(r)) for r in range(w.ranks)]


def imbalance(values: list[int]) -> float:
    return max(values) * len(values) / sum(values)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """Any name, E, K and R, also more ranks than experts, where enough experts stay active."""
    experts = draw(st.integers(1, 40))
    ranks = draw(st.integers(1, 50))
    name = draw(st.sampled_from(NAMES))
    idle = Placement.contiguous(experts, ranks).experts_of(ranks - 1)
    active = experts - len(idle) if name == "W5" and ranks > 1 else experts
    top_k = draw(st.integers(1, active)) if active else 1
    return Workload(name, experts, top_k, ranks, draw(st.integers(0, 2**40)))


@settings(deadline=None, max_examples=250)
@given(workloads(), st.integers(0, 2**20), st.data())
def test_every_token_gets_exactly_k_distinct_experts_in_range(
    w: Workload, step: int, data: st.DataObject
) -> None:
    rank, capacity = data.draw(st.integers(0, w.ranks - 1)), data.draw(st.integers(0, 12))
    T = w.tokens(rank, capacity)
    assert 0 <= T <= capacity
    ids = w.ids(step, rank, T)
    assert (tuple(ids.shape), ids.dtype) == ((T, w.top_k), torch.int64)
    for row in ids.tolist():
        assert len(set(row)) == w.top_k
        assert all(0 <= e < w.num_experts for e in row)


@settings(deadline=None, max_examples=80)
@given(workloads(), st.integers(0, 1000), st.data())
def test_ids_are_a_pure_function_of_workload_seed_step_and_rank(
    w: Workload, step: int, data: st.DataObject
) -> None:
    rank = data.draw(st.integers(0, w.ranks - 1))
    first = w.ids(step, rank, 5)
    again = Workload(w.name, w.num_experts, w.top_k, w.ranks, w.seed)
    again.ids(step + 1, (rank + 1) % w.ranks, 3)
    torch.manual_seed(0)
    assert torch.equal(again.ids(step, rank, 5), first)


@pytest.mark.parametrize("name", NAMES)
def test_ids_differ_between_seeds_steps_ranks_and_workloads(name: str) -> None:
    def drawn(seed: int, step: int, rank: int, name: str = name) -> tuple[int, ...]:
        return tuple(Workload(name, E, K, 4, seed).ids(step, rank, 8).reshape(-1).tolist())

    places = [(seed, step, rank) for seed in range(2) for step in range(5) for rank in range(4)]
    assert len({drawn(*p) for p in places}) == len(places)
    others = {drawn(0, 3, 0, other) for other in NAMES}
    assert len(others) == len(NAMES)


# ---- what each one stresses


@settings(deadline=None, max_examples=120)
@given(workloads(), st.integers(0, 99), st.integers(1, 12))
def test_w0_counts_differ_by_at_most_one_over_all_ranks(
    w: Workload, step: int, tokens: int
) -> None:
    counts = routes_per_expert(
        Workload("W0", w.num_experts, w.top_k, w.ranks, w.seed), step, tokens
    )
    assert max(counts) - min(counts) <= 1
    assert sum(counts) == w.ranks * tokens * w.top_k


@pytest.mark.parametrize("name", ["W1", "W2", "W3", "W4", "W6"])
def test_hot_workloads_have_hot_experts_at_every_step(name: str) -> None:
    for step in range(3):
        counts = routes_per_expert(Workload(name, E, K, 8), step)
        assert max(counts) * E / sum(counts) - 1 > 1.0, "MaxVio"


def test_w1s_hot_set_is_one_eighth_and_stays() -> None:
    w = Workload("W1", E, K, 4)
    hot = []
    for step in range(3):
        counts = routes_per_expert(w, step)
        mean = sum(counts) / E
        hot.append({e for e, n in enumerate(counts) if n > 2 * mean})
    assert hot[0] == hot[1] == hot[2]
    assert len(hot[0]) == E // 8
    assert hot[0] != set(range(E // 8)), "anywhere, not the first ones"


@pytest.mark.parametrize("ranks", [2, 4])
def test_w2_puts_the_heat_on_rank_0(ranks: int) -> None:
    for step in range(4):
        loads = home_loads(Workload("W2", E, K, ranks), step)
        assert loads[0] * ranks / sum(loads) >= 1.5
        assert loads[0] == max(loads)


@pytest.mark.parametrize("ranks", [4, 8])
def test_w3_has_w2s_heat_with_even_ranks(ranks: int) -> None:
    for step in range(3):
        w3, w2 = (Workload(name, E, K, ranks) for name in ("W3", "W2"))
        counts = routes_per_expert(w3, step)
        assert imbalance(home_loads(w3, step)) < 1.2 < imbalance(home_loads(w2, step))
        assert max(counts) * E / sum(counts) - 1 > 1.0, "MaxVio"
        heat = [sorted(w.log_popularity(step).tolist()) for w in (w3, w2)]
        assert heat[0] == heat[1]


@settings(deadline=None, max_examples=60)
@given(st.integers(2, 16), st.integers(0, 100))
def test_w4_ranks_bring_from_none_to_all_of_their_tokens(ranks: int, capacity: int) -> None:
    w = Workload("W4", 16, 2, ranks)
    brought = [w.tokens(r, capacity) for r in range(ranks)]
    assert brought == sorted(brought)
    assert (brought[0], brought[-1]) == (0, capacity)
    assert all(abs(n - capacity * r / (ranks - 1)) < 1 for r, n in enumerate(brought))


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_w5_leaves_the_last_rank_idle_and_no_other(ranks: int) -> None:
    w = Workload("W5", E, K, ranks)
    assert [w.tokens(r, 10) for r in range(ranks)] == [10] * (ranks - 1) + [0]
    for step in range(3):
        loads = home_loads(w, step)
        assert loads[-1] == 0
        assert min(loads[:-1]) > 0


def test_w6_moves_its_hot_rank_at_every_step() -> None:
    w = Workload("W6", E, K, 4)
    hottest = []
    for step in range(9):
        loads = home_loads(w, step)
        assert imbalance(loads) >= 1.5
        hottest.append(loads.index(max(loads)))
    assert hottest == [0, 1, 2, 3, 0, 1, 2, 3, 0]


def test_w7_is_balanced_but_for_a_burst_at_every_fourth_step() -> None:
    w = Workload("W7", E, K, 4)
    hottest = set()
    for step in range(8 * BURST_EVERY):
        loads = home_loads(w, step)
        if step % 4 == 3:
            assert imbalance(loads) >= 1.5
            hottest.add(loads.index(max(loads)))
        else:
            counts = routes_per_expert(w, step)
            assert max(counts) - min(counts) <= 1
    assert len(hottest) > 1, "each burst draws its rank"


# ---- one rank, refusals


@pytest.mark.parametrize("name", NAMES)
def test_one_rank_brings_everything_and_more_ranks_than_experts_are_fine(name: str) -> None:
    assert Workload(name, 8, 2, 1).tokens(0, 7) == 7
    w = Workload(name, 3, 2, 7)
    for step in range(8):
        assert sum(routes_per_expert(w, step, 4)) == 2 * sum(w.tokens(r, 4) for r in range(7))


@pytest.mark.parametrize(
    ("name", "experts", "top_k", "ranks", "active"),
    [("W0", 4, 5, 2, 4), ("W2", 4, 5, 1, 4), ("W5", 8, 5, 2, 4), ("W5", 2, 2, 2, 1)],
)
def test_too_few_active_experts_are_refused(
    name: str, experts: int, top_k: int, ranks: int, active: int
) -> None:
    with pytest.raises(ConfigError) as caught:
        Workload(name, experts, top_k, ranks)
    assert f"workload {name} leaves too few experts active" in str(caught.value)
    assert f"(expected >= top_k = {top_k}, got {active})" in str(caught.value)
    Workload(name, experts, active, ranks)


@pytest.mark.parametrize("name", ["W8", "w0", "", "router"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(ConfigError, match=r"unknown workload \(expected one of \('W0', .*'W7'\)"):
        Workload(name, 8, 2, 2)


@pytest.mark.parametrize("sizes", [{"seed": -1}, {"ranks": 0}, {"top_k": 0}], ids=str)
def test_sizes_that_mean_nothing_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=next(iter(sizes))):
        Workload(**({"name": "W2", "num_experts": 8, "top_k": 2, "ranks": 2} | sizes))  # type: ignore[arg-type]
