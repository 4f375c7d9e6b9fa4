"""Settling what arrived, and both reductions, against plain loops (C5, C11)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep.exchange.buffers import Arrived, Buffers, settle
from evenep.exchange.combine import fold, rows_to_pull, sum_compact, sum_exact
from evenep.exchange.routes import Routes
from evenep.transport import Window

from .exchange_cases import Traffic, traffics

H, SPARE = 8, 5
NAN = float("nan")


def arrive(traffic: Traffic, rank: int) -> tuple[Buffers, dict[int, int]]:
    """A poisoned buffer with what peers write into it; ``{row: its payload row}`` beside it.

    A row's payload is its own number, its weight is its number plus a half.
    """
    n = traffic.plan.layout.segments[rank].rows + SPARE
    rows, weight = torch.full((n, H), NAN).bfloat16(), torch.full((n,), NAN)
    primary, payload = torch.full((n,), -1, dtype=torch.int32), {}
    for source in range(traffic.cfg.ranks):
        routes = traffic.routes(source)
        mine = zip(
            routes.by_rank(routes.row_N)[rank].tolist(),
            routes.by_rank(routes.primary_N)[rank].tolist(),
            strict=True,
        )
        for row, lead in mine:
            primary[row], weight[row], payload[row] = lead, row + 0.5, lead
            if row == lead:
                rows[row] = row
    return Buffers(
        Window(0, rows, None), Window(1, primary, None), Window(2, weight, None)
    ), payload


def bits(x: Tensor) -> Tensor:
    """The very bits: equal NaNs are equal, and -0 is not 0."""
    return x.contiguous().view(torch.uint8)


@settings(deadline=None, max_examples=40)
@given(traffics())
def test_settle_zeroes_padding_copies_duplicates_and_touches_nothing_else(
    traffic: Traffic,
) -> None:
    for rank in range(traffic.cfg.ranks):
        buffers, payload = arrive(traffic, rank)
        before = [w.local.clone() for w in (buffers.rows, buffers.primary, buffers.weight)]
        seg = traffic.plan.layout.segments[rank]
        arrived = settle(buffers, seg)
        want_rows, want_primary, want_weight = before
        for row in range(seg.rows):
            want_rows[row] = payload.get(row, 0)
            if row not in payload:
                want_weight[row] = 0
        assert torch.equal(bits(buffers.rows.local), bits(want_rows))
        assert torch.equal(bits(buffers.weight.local), bits(want_weight))
        assert torch.equal(buffers.primary.local, want_primary)
        assert arrived.real_M.tolist() == sorted(payload)
        assert arrived.primary_M.tolist() == [payload[row] for row in sorted(payload)]
        assert arrived.rows_NH.shape == (seg.rows, H)
        if seg.rows:
            assert arrived.rows_NH.data_ptr() == buffers.rows.local.data_ptr(), "in place"


def wild(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Values whose fp32 sum depends on the order: a one beside 2^25 is lost."""
    values = torch.tensor([1.0, -1.0, 3.0, -3.0, 2.0**25, -(2.0**25)])
    return values[torch.randint(0, 6, shape, generator=g)]


def _outputs(arrived: Arrived, seed: int, *, tame: bool) -> Tensor:
    """Random expert outputs on the real rows; padding stays zero."""
    g, M = torch.Generator().manual_seed(seed), arrived.real_M.numel()
    values = torch.randn(M, H, generator=g) * 3 if tame else wild((M, H), g)
    arrived.rows_NH[arrived.real_M] = values.bfloat16()
    arrived.weight_N[arrived.real_M] = torch.randn(M, generator=g) if tame else wild((M,), g) / 8
    return arrived.rows_NH.clone()


@settings(deadline=None, max_examples=40)
@given(traffics(), st.booleans(), st.integers(0, 2**31))
def test_fold_is_the_fp32_sum_in_row_order_rounded_once(
    traffic: Traffic, weighted: bool, seed: int
) -> None:
    for rank in range(traffic.cfg.ranks):
        buffers, payload = arrive(traffic, rank)
        arrived = settle(buffers, traffic.plan.layout.segments[rank])
        out_NH = _outputs(arrived, seed, tame=False)
        sums: dict[int, Tensor] = {}
        for row in sorted(payload):
            term = out_NH[row].float() * (arrived.weight_N[row] if weighted else 1.0)
            sums[payload[row]] = sums.get(payload[row], torch.zeros(H)) + term
        want = out_NH.clone()
        for lead, total in sums.items():
            want[lead] = total.bfloat16()
        fold(arrived, weighted=weighted)
        assert torch.equal(arrived.rows_NH, want)


def _pulled(traffic: Traffic, rank: int, reduction: str, outputs: list[Tensor]) -> list[Tensor]:
    wanted = rows_to_pull(traffic.routes(rank), reduction)
    return [out[rows] for out, rows in zip(outputs, wanted, strict=True)]


def _peer_outputs(traffic: Traffic, seed: int) -> list[Tensor]:
    """What lies in every rank's buffer when outputs are brought home; padding is NaN."""
    g = torch.Generator().manual_seed(seed)
    outputs = []
    for seg in traffic.plan.layout.segments:
        out = torch.full((seg.rows, H), NAN).bfloat16()
        for start, count in zip(seg.start_G.tolist(), seg.count_G.tolist(), strict=True):
            out[start : start + count] = wild((count, H), g).bfloat16()
        outputs.append(out)
    return outputs


@settings(deadline=None, max_examples=40)
@given(traffics(), st.booleans(), st.integers(0, 2**31))
def test_exact_is_bitwise_a_scalar_loop_over_ascending_k(
    traffic: Traffic, weighted: bool, seed: int
) -> None:
    K, outputs = traffic.cfg.top_k, _peer_outputs(traffic, seed)
    g = torch.Generator().manual_seed(seed + 1)
    for rank in range(traffic.cfg.ranks):
        ids, where = traffic.ids[rank], traffic.expected(rank)
        T = ids.shape[0]
        weights_TK = wild((T, K), g) / 8
        weights_TK[ids < 0] = NAN  # a dropped route's weight may be anything
        want = torch.zeros(T, H, dtype=torch.bfloat16)
        for t in range(T):
            total = torch.zeros(H)
            for k in range(K):
                if int(ids[t, k]) >= 0:
                    dest, row = where[t * K + k]
                    term = outputs[dest][row].float()
                    total = total + (term * weights_TK[t, k] if weighted else term)
            want[t] = total.bfloat16()
        got = sum_exact(
            traffic.routes(rank),
            _pulled(traffic, rank, "exact", outputs),
            weights_TK if weighted else None,
            T, K, H,
        )  # fmt: skip
        assert got.dtype == torch.bfloat16
        assert torch.equal(bits(got), bits(want))


@pytest.mark.parametrize(
    ("outputs", "want"),
    [([2.0**25, 1.0, -(2.0**25)], 0.0), ([2.0**25, -(2.0**25), 1.0], 1.0)],
    ids=["the one is lost", "the one is kept"],
)
def test_exact_adds_in_the_order_of_k_whatever_the_order_of_ranks(
    outputs: list[float], want: float
) -> None:
    # k = 0, 1, 2 on ranks 1, 0, 1: grouped by rank, k = 1 comes first.
    routes = Routes(
        flat_N=torch.tensor([1, 0, 2]),
        token_N=torch.zeros(3, dtype=torch.int64),
        row_N=torch.tensor([0, 0, 1]),
        primary_N=torch.tensor([0, 0, 0]),
        leads_N=torch.tensor([True, True, False]),
        splits=(1, 2),
    )
    rows = torch.tensor(outputs)[:, None].expand(3, H).bfloat16()
    got = sum_exact(routes, [rows[[1]], rows[[0, 2]]], None, 1, 3, H)
    assert (got == want).all()


@settings(deadline=None, max_examples=40)
@given(traffics(), st.integers(0, 2**31))
def test_compact_is_the_fp32_sum_of_one_partial_per_rank_rank_ascending(
    traffic: Traffic, seed: int
) -> None:
    K, outputs = traffic.cfg.top_k, _peer_outputs(traffic, seed)
    for rank in range(traffic.cfg.ranks):
        where = traffic.expected(rank)
        T = traffic.ids[rank].shape[0]
        want = torch.zeros(T, H, dtype=torch.bfloat16)
        for t in range(T):
            total = torch.zeros(H)
            for peer in range(traffic.cfg.ranks):
                here = [k for k in range(K) if where.get(t * K + k, (-1, -1))[0] == peer]
                if here:
                    total = total + outputs[peer][where[t * K + here[0]][1]].float()
            want[t] = total.bfloat16()
        pulled = _pulled(traffic, rank, "compact", outputs)
        assert torch.equal(bits(sum_compact(traffic.routes(rank), pulled, T, H)), bits(want))


@settings(deadline=None, max_examples=25)
@given(traffics(), st.integers(0, 2**31))
def test_both_reductions_agree_with_an_fp64_sum_of_all_routes(traffic: Traffic, seed: int) -> None:
    R, K = traffic.cfg.ranks, traffic.cfg.top_k
    at_experts, outputs = [], []
    for rank in range(R):
        buffers, _ = arrive(traffic, rank)
        arrived = settle(buffers, traffic.plan.layout.segments[rank])
        outputs.append(_outputs(arrived, seed + rank, tame=True))
        at_experts.append(arrived)
    weight = [a.weight_N.clone() for a in at_experts]
    for arrived in at_experts:
        fold(arrived, weighted=True)
    for rank in range(R):
        where, T = traffic.expected(rank), traffic.ids[rank].shape[0]
        want, size = torch.zeros(T, H).double(), torch.zeros(T, H).double()
        weights_TK = torch.full((T, K), NAN)
        for flat, (dest, row) in where.items():
            weights_TK[flat // K, flat % K] = weight[dest][row]
            term = outputs[dest][row].double() * float(weight[dest][row])
            want[flat // K] += term
            size[flat // K] += term.abs()
        routes = traffic.routes(rank)
        exact = sum_exact(routes, _pulled(traffic, rank, "exact", outputs), weights_TK, T, K, H)
        folded = _pulled(traffic, rank, "compact", [a.rows_NH for a in at_experts])
        compact = sum_compact(routes, folded, T, H)
        half_ulp = 2.0**-8  # of a BF16 value, relative
        assert ((exact.double() - want).abs() <= want.abs() * half_ulp * 1.01 + size * 2e-6).all()
        assert ((compact.double() - want).abs() <= 2.1 * half_ulp * size + 1e-30).all()
