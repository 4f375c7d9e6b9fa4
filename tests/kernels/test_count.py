"""Counting routes and telling every rank, against one plain loop; headers that differ."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep.kernels.count import (
    BAD_EXPERT,
    HEADER,
    HEADERS_DIFFER,
    RouteScratch,
    blocking,
    check_headers,
    count_ref,
    count_routes,
    push_counts,
)

from .exchange_ranks import DEV, STALE, addresses, few


def push(ids_TK: Tensor, E: int, ranks: int, me: int) -> tuple[RouteScratch, list[Tensor]]:
    """The two launches; scratch and every rank's window."""
    T, K = ids_TK.shape
    scratch = RouteScratch.make(max(T, 1), K, E, DEV)
    scratch.before_JE.fill_(STALE)
    scratch.within_N.fill_(STALE)
    windows = [
        torch.full((ranks, HEADER + E), STALE, dtype=torch.int32, device=DEV) for _ in range(ranks)
    ]
    count_routes(ids_TK, scratch, E)
    push_counts(scratch, (7, 1, -3, 2, T), addresses(windows), me, E)
    return scratch, windows


@settings(deadline=None, max_examples=few(40))
@given(
    st.integers(0, 40), st.integers(1, 16), st.integers(1, 70), st.integers(1, 5),
    st.sampled_from([torch.int32, torch.int64]), st.data(),
)  # fmt: skip
def test_every_rank_gets_my_header_and_counts_and_nothing_else(
    T: int, K: int, E: int, ranks: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    me, over = data.draw(st.integers(0, ranks - 1)), data.draw(st.sampled_from([0, 0, 2]))
    ids_TK = torch.randint(-2, E + over, (T, K), generator=g).to(dtype)
    scratch, windows = push(ids_TK.to(DEV), E, ranks, me)
    want = [7, 1, -3, 2, T, 0, *count_ref(ids_TK, E)]
    for window in windows:
        rows = window.tolist()
        assert rows[me] == want
        assert all(set(row) == {STALE} for r, row in enumerate(rows) if r != me)
    assert scratch.status[0].item() == (BAD_EXPERT if (ids_TK >= E).any() else 0)


@pytest.mark.parametrize(("T", "K"), [(3, 1), (40, 16), (1100, 16)], ids=["1", "5", "69 blocks"])
def test_prefix_and_place_in_the_block_number_an_experts_routes_in_order(T: int, K: int) -> None:
    E = 5
    ids_TK = torch.randint(-1, E, (T, K), generator=torch.Generator().manual_seed(T))
    scratch, _ = push(ids_TK.to(DEV), E, 1, 0)
    per_block = blocking(T * K)[1]
    before, within = scratch.before_JE.tolist(), scratch.within_N.tolist()
    seen = [0] * E
    for n, e in enumerate(ids_TK.reshape(-1).tolist()):
        if e >= 0:
            assert before[n // per_block][e] + within[n] == seen[e]
            seen[e] += 1


def test_an_int64_id_does_not_wrap_into_range() -> None:
    ids_TK = torch.tensor([[2**32 + 1, 1, -(2**32) + 1, -(2**63), 2**63 - 1]], device=DEV)
    scratch, windows = push(ids_TK, 3, 1, 0)
    assert windows[0][0, HEADER:].tolist() == [0, 1, 0]
    assert scratch.status[0].item() == BAD_EXPERT


def test_blocks_cover_all_routes_within_the_scratch() -> None:
    for routes in (*range(1, 600, 7), 128 * 128, 128 * 128 + 1, 131072, 1_000_000):
        blocks, per_block = blocking(routes)
        assert 1 <= blocks <= 128
        assert (blocks - 1) * per_block < routes <= blocks * per_block
    assert blocking(0)[0] == 0


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_headers_may_differ_in_tokens_and_in_nothing_before(ranks: int) -> None:
    window = torch.arange(HEADER + 4, dtype=torch.int32).repeat(ranks, 1).to(DEV)
    window[:, 4:] = torch.arange(ranks, device=DEV)[:, None]
    for r in range(ranks):
        for word in range(5):
            status = torch.full((1,), 4, dtype=torch.int32, device=DEV)
            window[r, word] += 1
            check_headers(window, status)
            window[r, word] -= 1
            differs = ranks > 1 and word < 4
            assert status.item() == 4 | (HEADERS_DIFFER if differs else 0)
