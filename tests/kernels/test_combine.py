"""Both reductions and the fold before one of them, to the bit, on values whose order matters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep.exchange.combine import sum_compact, sum_exact
from evenep.exchange.routes import Routes
from evenep.kernels.combine import (
    combine_compact,
    combine_compact_ref,
    combine_exact,
    combine_exact_ref,
    fold,
    fold_ref,
)

from .exchange_ranks import (
    DEV,
    LONGEST,
    NAN,
    Receipt,
    addresses,
    bits,
    few,
    ints,
    receipts,
    routings,
    wild,
)

Routing = tuple[Tensor, Tensor, int, int]


def peers(routing: Routing, width: int, g: torch.Generator) -> list[Tensor]:
    """Every rank's output rows; NaN in rows that hold no route of mine."""
    dest_TK, row_TK, ranks, n = routing
    made = []
    for r in range(ranks):
        rows = torch.full((n, width), NAN, dtype=torch.bfloat16, device=DEV)
        mine = row_TK[dest_TK == r].long()
        rows[mine] = wild((mine.numel(), width), g).bfloat16()
        made.append(rows)
    return made


def routes_of(dest_TK: Tensor, row_TK: Tensor, ranks: int) -> Routes:
    """The CPU path's view of the same routes."""
    K = dest_TK.shape[1]
    dest, row = dest_TK.cpu().reshape(-1).long(), row_TK.cpu().reshape(-1).long()
    flat = torch.cat([torch.nonzero(dest == r).squeeze(1) for r in range(ranks)])
    lead: dict[tuple[int, int], int] = {}
    for f in sorted(flat.tolist()):
        lead.setdefault((f // K, int(dest[f])), f)
    primary = torch.tensor([lead[f // K, int(dest[f])] for f in flat.tolist()], dtype=torch.int64)
    splits = tuple(int((dest == r).sum()) for r in range(ranks))
    return Routes(flat, flat // K, row[flat], row[primary], primary == flat, splits)


@settings(deadline=None, max_examples=few(25))
@given(routings(), st.booleans(), st.sampled_from([8, 24, 1032]), st.integers(0, 2**31))
def test_exact_is_the_cpu_paths_sum_over_ascending_k(
    routing: Routing, weighted: bool, H: int, seed: int
) -> None:
    dest_TK, row_TK, ranks, _ = routing
    g, (T, K) = torch.Generator().manual_seed(seed), dest_TK.shape
    rows = peers(routing, H, g)
    weights_TK = wild((T, K), g) / 8
    weights_TK[dest_TK < 0] = NAN  # a dropped route's weight may be anything
    w = weights_TK if weighted else None
    y_TH = torch.full((T, H), NAN, dtype=torch.bfloat16, device=DEV)
    combine_exact(dest_TK, row_TK, w, addresses(rows), y_TH)
    assert torch.equal(bits(y_TH), bits(combine_exact_ref(dest_TK, row_TK, w, rows)))
    routes = routes_of(dest_TK, row_TK, ranks)
    got = [r.cpu()[i] for r, i in zip(rows, routes.by_rank(routes.row_N), strict=True)]
    want = sum_exact(routes, got, None if w is None else w.cpu(), T, K, H)
    assert torch.equal(bits(y_TH.cpu()), bits(want))


@settings(deadline=None, max_examples=few(25))
@given(routings(), st.sampled_from([8, 24, 1032]), st.integers(0, 2**31))
def test_compact_is_the_cpu_paths_sum_over_ascending_ranks(
    routing: Routing, H: int, seed: int
) -> None:
    dest_TK, row_TK, ranks, _ = routing
    g, T = torch.Generator().manual_seed(seed), dest_TK.shape[0]
    rows = peers(routing, H, g)
    y_TH = torch.full((T, H), NAN, dtype=torch.bfloat16, device=DEV)
    combine_compact(dest_TK, row_TK, addresses(rows), y_TH)
    assert torch.equal(bits(y_TH), bits(combine_compact_ref(dest_TK, row_TK, rows)))
    routes = routes_of(dest_TK, row_TK, ranks)
    got = [r.cpu()[i] for r, i in zip(rows, routes.leading()[0], strict=True)]
    assert torch.equal(bits(y_TH.cpu()), bits(sum_compact(routes, got, T, H)))


@settings(deadline=None, max_examples=few(30))
@given(receipts(), st.booleans(), st.sampled_from([None, 1]), st.sampled_from([8, 40]))
def test_fold_sums_each_chain_into_its_leader_and_touches_nothing_else(
    receipt: Receipt, weighted: bool, sms: int | None, H: int
) -> None:
    n = receipt.chain_N.numel()
    g = torch.Generator().manual_seed(n)
    rows_NH, weight_N = wild((n, H), g).bfloat16(), wild((n,), g) / 8
    rows_NH[int(receipt.rows_1) :] = NAN
    want, w = rows_NH.clone(), weight_N if weighted else None
    groups = (receipt.start_G, receipt.count_G)
    fold(rows_NH, w, receipt.chain_N, *groups, receipt.rows_1, LONGEST, sms=sms)
    fold_ref(want, w, receipt.chain_N, *groups)
    assert torch.equal(bits(rows_NH), bits(want))


@pytest.mark.parametrize("weighted", [False, True])
def test_sums_of_the_modules_worked_example(weighted: bool) -> None:
    # k = 0 1 2 on ranks 1 0 1; as a chain on rank 1, rows 0 and 1.
    outputs = [2.0**25, 1.0, -(2.0**25)]
    rows = torch.tensor(outputs, device=DEV)[:, None].expand(3, 8).bfloat16()
    rank = [rows[[1]].contiguous(), rows[[0, 2]].contiguous()]
    dest_TK, row_TK = ints([[1, 0, 1]]), ints([[0, 0, 1]])
    y_TH = torch.full((1, 8), NAN, dtype=torch.bfloat16, device=DEV)
    ones_TK = torch.ones(1, 3, device=DEV) if weighted else None
    combine_exact(dest_TK, row_TK, ones_TK, addresses(rank), y_TH)
    assert (y_TH == 0).all()
    ones_N = torch.ones(2, device=DEV) if weighted else None
    fold(rank[1], ones_N, ints([-3, 0]), ints([0]), ints([2]), ints([2]), LONGEST)
    combine_compact(dest_TK, row_TK, addresses(rank), y_TH)
    assert (y_TH == 1).all()


def test_products_round_before_they_are_added() -> None:
    # (1 + 2^-7) (1 + 2^-20) = 1 + 2^-7 + 2^-20 + 2^-27; fp32 drops the last part, a fused add
    # would keep it and find it alone once the rest is subtracted.
    a, w = 1 + 2.0**-7, 1 + 2.0**-20
    rows = torch.tensor([-1.0, a], device=DEV)[:, None].expand(2, 8).bfloat16().contiguous()
    weights_TK = torch.tensor([[1 + 2.0**-7 + 2.0**-20, w]], device=DEV)
    y_TH = torch.full((1, 8), NAN, dtype=torch.bfloat16, device=DEV)
    combine_exact(ints([[0, 0]]), ints([[0, 1]]), weights_TK, addresses([rows]), y_TH)
    assert (y_TH == 0).all()
    fold(rows, weights_TK[0], ints([-3, 0]), ints([0]), ints([2]), ints([2]), LONGEST)
    assert (rows[0] == 0).all()


def test_no_tokens_and_no_routes() -> None:
    rows = torch.full((4, 8), NAN, dtype=torch.bfloat16, device=DEV)
    for T in (0, 3):
        nowhere = torch.full((T, 2), -1, dtype=torch.int32, device=DEV)
        exact, compact = torch.full((2, T, 8), NAN, dtype=torch.bfloat16, device=DEV)
        combine_exact(nowhere, nowhere, None, addresses([rows]), exact)
        combine_compact(nowhere, nowhere, addresses([rows]), compact)
        assert (exact == 0).all()
        assert (compact == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "H", "K"), [(1, 3584, 16), (128, 3584, 16), (300, 7168, 8)])
def test_on_a_gpu_at_real_widths(T: int, H: int, K: int) -> None:
    g = torch.Generator().manual_seed(T)
    dest = torch.randint(-1, 8, (T, K), generator=g)
    row = torch.full((T, K), -1)
    for r in range(8):
        here = dest == r
        row[here] = torch.randperm(T * K, generator=g)[: int(here.sum())]
    dest_TK, row_TK = ints(dest), ints(row)
    rows = peers((dest_TK, row_TK, 8, T * K), H, g)
    weights_TK = wild((T, K), g) / 8
    y_TH = torch.full((T, H), NAN, dtype=torch.bfloat16, device=DEV)
    for w in (None, weights_TK):
        combine_exact(dest_TK, row_TK, w, addresses(rows), y_TH)
        assert torch.equal(bits(y_TH), bits(combine_exact_ref(dest_TK, row_TK, w, rows)))
    combine_compact(dest_TK, row_TK, addresses(rows), y_TH)
    assert torch.equal(bits(y_TH), bits(combine_compact_ref(dest_TK, row_TK, rows)))
