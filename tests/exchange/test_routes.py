"""Which row every route gets, which rows carry payload: against one plain loop over routes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep import EPConfig
from evenep.exchange.buffers import Buffers
from evenep.exchange.dispatch import dispatch_puts
from evenep.exchange.routes import build_routes, count_routes
from evenep.plan.layout import Runs
from evenep.transport import Window

from .exchange_cases import Traffic, traffic_of, traffics

MOST_NEGATIVE = -(2**63)


@settings(deadline=None, max_examples=60)
@given(traffics())
def test_every_route_gets_exactly_the_row_the_plans_runs_give_it(traffic: Traffic) -> None:
    for rank in range(traffic.cfg.ranks):
        routes, want = traffic.routes(rank), traffic.expected(rank)
        dest = [r for r, n in enumerate(routes.splits) for _ in range(n)]
        rows = zip(dest, routes.row_N.tolist(), strict=True)
        got = dict(zip(routes.flat_N.tolist(), rows, strict=True))
        assert len(routes.flat_N) == len(got), "a route twice"
        assert got == want


@settings(deadline=None, max_examples=60)
@given(traffics())
def test_routes_of_all_ranks_fill_every_segment_once(traffic: Traffic) -> None:
    filled: Counter[tuple[int, int]] = Counter()
    expert_at: dict[tuple[int, int], int] = {}
    for rank in range(traffic.cfg.ranks):
        ids, routes = traffic.ids[rank].reshape(-1).tolist(), traffic.routes(rank)
        for peer, (flats, rows) in enumerate(
            zip(routes.by_rank(routes.flat_N), routes.by_rank(routes.row_N), strict=True)
        ):
            for flat, row in zip(flats.tolist(), rows.tolist(), strict=True):
                filled[peer, row] += 1
                expert_at[peer, row] = ids[flat]
    want = {
        (rank, row): expert
        for rank, seg in enumerate(traffic.plan.layout.segments)
        for expert, start, count in zip(
            seg.expert_G.tolist(), seg.start_G.tolist(), seg.count_G.tolist(), strict=True
        )
        for row in range(start, start + count)
    }
    assert expert_at == want
    assert set(filled.values()) <= {1}, "two routes share a row"


@settings(deadline=None, max_examples=60)
@given(traffics())
def test_primaries_are_the_smallest_k_of_each_token_and_rank(traffic: Traffic) -> None:
    K, R = traffic.cfg.top_k, traffic.cfg.ranks
    for rank in range(R):
        routes, where = traffic.routes(rank), traffic.expected(rank)
        first: dict[tuple[int, int], int] = {}
        for flat in sorted(where):
            first.setdefault((flat // K, where[flat][0]), flat)
        columns = (routes.flat_N, routes.token_N, routes.primary_N, routes.leads_N)
        for flat, token, primary, leads in zip(*(c.tolist() for c in columns), strict=True):
            lead = first[token, where[flat][0]]
            assert token == flat // K
            assert primary == where[lead][1]
            assert leads == (flat == lead)
        assert int(routes.leads_N.sum()) == len(first)
        assert sum(routes.splits) == int((traffic.ids[rank] >= 0).sum()) == len(where)
        assert len(routes.splits) == R
        rows, tokens = routes.leading()
        got = {
            (token, peer): row
            for peer in range(R)
            for token, row in zip(tokens[peer].tolist(), rows[peer].tolist(), strict=True)
        }
        assert got == {pair: where[flat][1] for pair, flat in first.items()}


def test_worked_example_of_the_module() -> None:
    # Experts 0 and 2 on rank 1 at rows 4 and 7, expert 1 on rank 0 at row 9.
    runs = Runs(
        expert_N=np.array([0, 1, 2]),
        dest_N=np.array([1, 0, 1]),
        row_N=np.array([4, 9, 7]),
        count_N=np.array([1, 1, 1]),
    )
    routes = build_routes(torch.tensor([[0, 1, 2]]), runs, 2)
    assert routes.splits == (1, 2)
    assert routes.row_N.tolist() == [9, 4, 7]
    assert routes.primary_N.tolist() == [9, 4, 4]
    assert routes.leads_N.tolist() == [True, True, False]


@pytest.mark.parametrize("ids", [torch.zeros(0, 3), torch.full((5, 3), -1)])
def test_a_rank_without_routes_sends_nothing(ids: torch.Tensor) -> None:
    cfg = _config(ranks=2)
    traffic = traffic_of(cfg, (ids.long(), torch.tensor([[0, 1, 2]])))
    routes = traffic.routes(0)
    assert routes.splits == (0, 0)
    assert routes.flat_N.numel() == 0
    assert [r.numel() for part in routes.leading() for r in part] == [0] * 4
    x, weights = torch.zeros(ids.shape[0], 8).bfloat16(), torch.zeros(ids.shape)
    assert dispatch_puts(_buffers(), routes, x, weights) == []


# ---- counting


@settings(deadline=None, max_examples=100)
@given(
    st.integers(1, 9).flatmap(
        lambda E: st.tuples(
            st.just(E),
            st.lists(st.one_of(st.integers(0, E - 1), st.integers(MOST_NEGATIVE, -1)), max_size=40),
        )
    )
)
def test_counts_equal_a_counter_whatever_the_negative_ids(case: tuple[int, list[int]]) -> None:
    E, ids = case
    want = Counter(e for e in ids if e >= 0)
    got = count_routes(torch.tensor(ids, dtype=torch.int64)[:, None], E)
    assert got.dtype == torch.int64
    assert got.tolist() == [want[e] for e in range(E)]


def test_int32_ids_count_the_same_down_to_their_most_negative() -> None:
    ids = torch.tensor([[0, 2, -(2**31)], [2, 2, -1]], dtype=torch.int32)
    assert count_routes(ids, 3).tolist() == [1, 0, 3]


# ---- what is put on the wire


@settings(deadline=None, max_examples=40)
@given(traffics())
def test_puts_carry_each_tokens_row_once_per_rank_and_name_every_route(traffic: Traffic) -> None:
    K = traffic.cfg.top_k
    for rank in range(traffic.cfg.ranks):
        ids, routes, where = traffic.ids[rank], traffic.routes(rank), traffic.expected(rank)
        T = ids.shape[0]
        x_TH = torch.arange(T).float()[:, None].expand(T, 8).bfloat16()  # a row says its token
        weights_TK = torch.arange(T * K).float().view(T, K)
        buffers = _buffers()
        sent: dict[tuple[int, int, int], object] = {}
        for put in dispatch_puts(buffers, routes, x_TH, weights_TK):
            window = [buffers.rows, buffers.primary, buffers.weight].index(put.window)
            values = put.data[:, 0] if window == 0 else put.data
            for row, value in zip(put.rows.tolist(), values.tolist(), strict=True):
                assert (window, put.peer, row) not in sent, "a row written twice"
                sent[window, put.peer, row] = value
        first: dict[tuple[int, int], int] = {}
        for flat in sorted(where):
            first.setdefault((flat // K, where[flat][0]), flat)
        want: dict[tuple[int, int, int], object] = {}
        for flat, (peer, row) in where.items():
            lead = first[flat // K, peer]
            want[1, peer, row] = where[lead][1]
            want[2, peer, row] = float(flat)
            if lead == flat:
                want[0, peer, row] = float(flat // K)
        assert sent == want


def _config(**changes: int) -> EPConfig:
    sizes = {"num_experts": 4, "top_k": 3, "hidden_size": 8, "intermediate_size": 8}
    return EPConfig(max_tokens_per_rank=8, **(sizes | changes))  # type: ignore[arg-type]


def _buffers() -> Buffers:
    return Buffers(*(Window(i, torch.zeros(0), None) for i in range(3)))
