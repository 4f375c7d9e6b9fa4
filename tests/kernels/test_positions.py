"""Destination and row of every route, against lists of places handed out one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep.kernels.count import RouteScratch, count_ref, count_routes, push_counts
from evenep.kernels.positions import place_ref, place_routes

from .exchange_ranks import DEV, STALE, addresses, few, ints


def deal(counts: list[int], ranks: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    """``(take_ER, row_ER)``: each expert's routes thrown at random ranks; nobody's row is read."""
    take = torch.zeros(len(counts), ranks, dtype=torch.int64)
    for e, count in enumerate(counts):
        take[e] = torch.bincount(torch.randint(0, ranks, (count,), generator=g), minlength=ranks)
    row = torch.randint(0, 10**6, take.shape, generator=g)
    row[take == 0] = STALE
    return ints(take), ints(row)


def place(ids_TK: Tensor, take_ER: Tensor, row_ER: Tensor, me: int) -> tuple[Tensor, Tensor]:
    T, K = ids_TK.shape
    E, R = take_ER.shape
    scratch = RouteScratch.make(max(T, 1), K, E, DEV)
    window = torch.zeros(R, 6 + E, dtype=torch.int32, device=DEV)
    count_routes(ids_TK, scratch, E)
    push_counts(scratch, (0, 0, 0, 0, T), addresses([window] * R), me, E)
    dest_TK, row_TK = (ints(torch.full((T, K), STALE)) for _ in range(2))
    place_routes(ids_TK, scratch, take_ER, row_ER, me, dest_TK, row_TK, 2**31 - 1)
    return dest_TK, row_TK


@settings(deadline=None, max_examples=few(40))
@given(
    st.integers(0, 20), st.integers(1, 16), st.integers(1, 20), st.integers(1, 9),
    st.sampled_from([torch.int32, torch.int64]), st.data(),
)  # fmt: skip
def test_routes_fill_this_rank_then_the_others_in_order(
    T: int, K: int, E: int, ranks: int, dtype: torch.dtype, data: st.DataObject
) -> None:
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    me, active = data.draw(st.integers(0, ranks - 1)), data.draw(st.integers(1, E))
    ids_TK = torch.randint(-1, active + data.draw(st.integers(0, 1)), (T, K), generator=g)
    take_ER, row_ER = deal(count_ref(ids_TK, E), ranks, g)
    dest_TK, row_TK = place(ids_TK.to(dtype).to(DEV), take_ER, row_ER, me)
    want_dest, want_row = place_ref(ids_TK, take_ER, row_ER, me)
    assert dest_TK.tolist() == want_dest
    assert row_TK.tolist() == want_row


@pytest.mark.parametrize("ranks", [8, 300])
def test_many_blocks_and_many_ranks(ranks: int) -> None:
    g = torch.Generator().manual_seed(1)
    T = 1100 if ranks == 8 else 40  # 17600 routes: blocks of more than one part
    ids_TK = torch.randint(-1, 7, (T, 16), generator=g)
    take_ER, row_ER = deal(count_ref(ids_TK, 7), ranks, g)
    dest_TK, row_TK = place(ids_TK.to(DEV), take_ER, row_ER, ranks // 2)
    assert (dest_TK.tolist(), row_TK.tolist()) == place_ref(ids_TK, take_ER, row_ER, ranks // 2)


def test_a_route_that_no_share_covers_goes_nowhere() -> None:
    dest_TK, row_TK = place(ints([[0, 0, 0]]), ints([[1, 1]]), ints([[5, 9]]), 1)
    assert dest_TK.tolist() == [[1, 0, -1]]
    assert row_TK.tolist() == [[9, 5, -1]]


def test_worked_example_of_the_module() -> None:
    dest_TK, row_TK = place(ints([[0]] * 5), ints([[1, 2, 2]]), ints([[40, 7, 90]]), 1)
    got = list(zip(dest_TK[:, 0].tolist(), row_TK[:, 0].tolist(), strict=True))
    assert got == [(1, 7), (1, 8), (0, 40), (2, 90), (2, 91)]
