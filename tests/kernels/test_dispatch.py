"""What reaches every peer's buffer, to the bit, against a loop over tokens."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep.kernels.dispatch import dispatch, dispatch_ref

from .exchange_ranks import DEV, NAN, STALE, Windows, few, ints, routings


def inputs(dest_TK: Tensor, width: int, seed: int) -> tuple[Tensor, Tensor]:
    """Payloads and weights, NaN where nothing is routed."""
    T, K = dest_TK.shape
    g = torch.Generator().manual_seed(seed)
    x_TH = torch.randn(T, width, generator=g).bfloat16().to(DEV)
    weights_TK = torch.rand(T, K, generator=g).to(DEV)
    x_TH[(dest_TK < 0).all(1)] = NAN
    weights_TK[dest_TK < 0] = NAN
    return x_TH, weights_TK


@settings(deadline=None, max_examples=few(25))
@given(
    routings(), st.booleans(), st.sampled_from([None, 1]), st.sampled_from([8, 24, 1032]),
    st.integers(0, 2**31),
)  # fmt: skip
def test_leaders_payloads_chains_and_weights_and_nothing_else(
    routing: tuple[Tensor, Tensor, int, int], weighted: bool, sms: int | None, H: int, seed: int
) -> None:
    dest_TK, row_TK, ranks, n = routing
    x_TH, weights_TK = inputs(dest_TK, H, seed)
    got, want = (Windows.poisoned(ranks, n, H) for _ in range(2))
    w = weights_TK if weighted else None
    dispatch(x_TH, w, dest_TK, row_TK, *got.tables(), sms=sms)
    dispatch_ref(x_TH, w, dest_TK, row_TK, want.rows, want.chain, want.weight)
    got.assert_same_bits(want)
    for chain, rows in zip(got.chain, got.rows, strict=True):
        payload = ~rows.isnan().all(1)
        assert torch.equal(payload, (chain < 0) & (chain != STALE)), "payload where a leader is"


def test_no_tokens_and_no_routes_write_nothing() -> None:
    got, want = (Windows.poisoned(2, 4, 8) for _ in range(2))
    for T in (0, 3):
        x_TH = torch.full((T, 8), NAN, dtype=torch.bfloat16, device=DEV)
        nowhere = torch.full((T, 2), -1, dtype=torch.int32, device=DEV)
        dispatch(x_TH, torch.zeros(T, 2, device=DEV), nowhere, nowhere, *got.tables())
    got.assert_same_bits(want)


def test_worked_example_of_the_module() -> None:
    windows = Windows.poisoned(2, 10, 8)
    x_TH = torch.ones(1, 8, dtype=torch.bfloat16, device=DEV)
    dispatch(x_TH, None, ints([[1, 0, 1]]), ints([[4, 9, 7]]), *windows.tables())
    assert [windows.chain[1][4].item(), windows.chain[1][7].item()] == [-9, 0]
    assert windows.chain[0][9].item() == -1
    assert (windows.rows[1][4] == 1).all()
    assert (windows.rows[0][9] == 1).all()
    assert windows.rows[1][7].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize(("T", "H", "K"), [(1, 3584, 16), (128, 3584, 16), (300, 7168, 8)])
@pytest.mark.parametrize("sms", [None, 20])
def test_on_a_gpu_at_real_widths(T: int, H: int, K: int, sms: int | None) -> None:
    g = torch.Generator().manual_seed(T)
    dest = torch.randint(-1, 8, (T, K), generator=g)
    row = torch.full((T, K), -1)
    for r in range(8):
        here = dest == r
        row[here] = torch.randperm(T * K, generator=g)[: int(here.sum())]
    dest_TK, row_TK = ints(dest), ints(row)
    x_TH, weights_TK = inputs(dest_TK, H, T)
    got, want = (Windows.poisoned(8, T * K, H) for _ in range(2))
    dispatch(x_TH, weights_TK, dest_TK, row_TK, *got.tables(), sms=sms)
    dispatch_ref(x_TH, weights_TK, dest_TK, row_TK, want.rows, want.chain, want.weight)
    got.assert_same_bits(want)
