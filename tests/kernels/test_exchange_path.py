"""All exchange kernels in a row under the CPU planner's plans, and what a compiler says of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep.kernels.combine import combine_compact, combine_exact, fold
from evenep.kernels.count import HEADER, RouteScratch, check_headers, count_routes, push_counts
from evenep.kernels.dispatch import dispatch
from evenep.kernels.positions import place_routes
from evenep.kernels.settle import settle
from evenep.plan.layout import Segments

from ..exchange.exchange_cases import Traffic, traffics
from .exchange_ranks import (
    DEV,
    LONGEST,
    NAN,
    STALE,
    Windows,
    addresses,
    bits,
    few,
    ints,
    shares,
    wild,
)
from .sm90 import run_alone

H = 8


def groups_of(segments: Segments) -> tuple[Tensor, Tensor, Tensor]:
    """A rank's segments as the device planner hands them over: by weight row, empty ones too."""
    G = int(segments.weight_row_G.max(initial=0)) + 2
    start, count = torch.full((G,), STALE), torch.zeros(G, dtype=torch.int64)
    at = torch.from_numpy(segments.weight_row_G)
    start[at] = torch.from_numpy(segments.start_G)
    count[at] = torch.from_numpy(segments.count_G)
    return ints(start), ints(count), ints([segments.rows])


def direct_sum(
    traffic: Traffic, rank: int, x_TH: Tensor, weights_TK: Tensor, scale_E: Tensor, compact: bool
) -> Tensor:
    """What a token's experts return, without any rows: added as the reduction says."""
    ids_TK, K = traffic.ids[rank], traffic.cfg.top_k
    where = traffic.expected(rank)
    y_TH = torch.zeros(x_TH.shape)
    for t in range(ids_TK.shape[0]):
        ks = [k for k in range(K) if int(ids_TK[t, k]) >= 0]
        dest = {k: where[t * K + k][0] for k in ks}
        for parts in [ks] if not compact else [[k for k in ks if dest[k] == r] for r in range(9)]:
            total = torch.zeros(H)
            for k in parts:
                out = (x_TH[t].float() * scale_E[int(ids_TK[t, k])]).bfloat16().float()
                total = total + out * weights_TK[t, k]
            y_TH[t] += total.bfloat16().float()
    return y_TH.bfloat16()


@settings(deadline=None, max_examples=few(15))
@given(traffics(), st.booleans(), st.integers(0, 2**31))
def test_from_ids_to_sums_as_if_there_were_no_exchange(
    traffic: Traffic, compact: bool, seed: int
) -> None:
    cfg, R, E, K = traffic.cfg, traffic.cfg.ranks, traffic.cfg.num_experts, traffic.cfg.top_k
    g = torch.Generator().manual_seed(seed)
    scale_E = torch.randn(E, generator=g).bfloat16().float()
    x = [wild((ids.shape[0], H), g).bfloat16() for ids in traffic.ids]
    weights = [wild(tuple(ids.shape), g) / 8 for ids in traffic.ids]
    for ids_TK, x_TH, weights_TK in zip(traffic.ids, x, weights, strict=True):
        weights_TK[ids_TK.to(DEV) < 0] = NAN
        x_TH[(ids_TK.to(DEV) < 0).all(1)] = NAN
    scratches = [RouteScratch.make(cfg.max_tokens_per_rank, K, E, DEV) for _ in range(R)]
    counts = [torch.full((R, HEADER + E), STALE, dtype=torch.int32, device=DEV) for _ in range(R)]
    for me, (ids_TK, scratch) in enumerate(zip(traffic.ids, scratches, strict=True)):
        count_routes(ids_TK.to(DEV), scratch, E)
        push_counts(scratch, (3, 4, 0, 1, ids_TK.shape[0]), addresses(counts), me, E)
    for window, scratch in zip(counts, scratches, strict=True):
        check_headers(window, scratch.status)
        assert scratch.status[0].item() == 0
        assert torch.equal(window, counts[0])

    layout = traffic.plan.layout
    windows = Windows.poisoned(R, max(s.rows for s in layout.segments) + 2, H)
    tables, places = windows.tables(), []
    for me, (ids_TK, scratch) in enumerate(zip(traffic.ids, scratches, strict=True)):
        take_ER, row_ER = shares(traffic.plan.runs(me), E, R)
        dest_TK, row_TK = (ints(torch.full(ids_TK.shape, STALE)) for _ in range(2))
        place_routes(ids_TK.to(DEV), scratch, take_ER, row_ER, me, dest_TK, row_TK, 2**31 - 1)
        dispatch(x[me], weights[me], dest_TK, row_TK, *tables)
        places.append((dest_TK, row_TK))

    for r, segments in enumerate(layout.segments):
        where = (windows.chain[r], *groups_of(segments))
        settle(windows.rows[r], windows.weight[r], *where, cfg.top_k)
        assert not windows.rows[r][: segments.rows].isnan().any(), "every row is settled"
        assert windows.rows[r][segments.rows :].isnan().all()
        for e, start, count in zip(
            segments.expert_G.tolist(), segments.start_G.tolist(), segments.count_G.tolist(),
            strict=True,
        ):  # fmt: skip
            mine = windows.rows[r][start : start + count]
            mine.copy_((mine.float() * scale_E[e]).bfloat16())
        if compact:
            fold(windows.rows[r], windows.weight[r], *where, cfg.top_k)

    for me, (dest_TK, row_TK) in enumerate(places):
        y_TH = torch.full(x[me].shape, NAN, dtype=torch.bfloat16, device=DEV)
        if compact:
            combine_compact(dest_TK, row_TK, tables[0], y_TH)
        else:
            combine_exact(dest_TK, row_TK, weights[me], tables[0], y_TH)
        want = direct_sum(traffic, me, x[me].cpu(), weights[me].cpu(), scale_E, compact)
        assert torch.equal(bits(y_TH.cpu()), bits(want))


def test_every_kernel_compiles_for_an_h200_with_wide_accesses_and_no_spill(tmp_path: Path) -> None:
    pytest.importorskip("triton.backends.nvidia")
    report = run_alone("tests.kernels.exchange_sm90", tmp_path)
    for name in ("count", "push", "check", "place", "dispatch", "settle", "fold", "fetch"):
        assert f"_{name} " in report


@pytest.mark.gpu
def test_rows_beyond_2_to_the_31_elements() -> None:
    width, n = 3584, 2**31 // 3584 + 4000  # 4.3 GB of rows
    rows = torch.full((n, width), NAN, dtype=torch.bfloat16, device=DEV)
    chain = torch.full((n,), STALE, dtype=torch.int32, device=DEV)
    weight = torch.full((n,), NAN, device=DEV)
    tables = (addresses([rows]), addresses([chain]), addresses([weight]))
    T, K = 64, 3
    g = torch.Generator().manual_seed(0)
    x_TH = torch.randn(T, width, generator=g).bfloat16().to(DEV)
    weights_TK = torch.rand(T, K, generator=g).to(DEV)
    # The last T K rows of the buffer, shuffled; one group there, padding all the way before it.
    row_TK = ints((n - 1 - torch.randperm(T * K, generator=g)).reshape(T, K))
    dest_TK = torch.zeros_like(row_TK)
    dispatch(x_TH, weights_TK, dest_TK, row_TK, *tables)
    where = (chain, ints([n - T * K]), ints([T * K]), ints([n]))
    settle(rows, weight, *where, LONGEST)
    at = row_TK.long()
    assert torch.equal(rows[at.reshape(-1)].view(T, K, width), x_TH[:, None].expand(T, K, width))
    assert torch.equal(weight[at], weights_TK)
    zeros = rows[: n - T * K]
    assert all(not zeros[i : i + 100_000].any() for i in range(0, len(zeros), 100_000))
    total = torch.zeros(T, width, device=DEV)
    for k in range(K):
        total = total + x_TH.float() * weights_TK[:, k, None]
    y_TH = torch.full_like(x_TH, NAN)
    combine_exact(dest_TK, row_TK, weights_TK, tables[0], y_TH)
    assert torch.equal(y_TH, total.bfloat16())
    fold(rows, weight, *where, LONGEST)
    combine_compact(dest_TK, row_TK, tables[0], y_TH)
    assert torch.equal(y_TH, total.bfloat16())
