"""Copies along chains and zeroed padding, to the bit, against a loop over rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from evenep.kernels.combine import fold
from evenep.kernels.settle import settle, settle_ref

from .exchange_ranks import DEV, LONGEST, NAN, Receipt, bits, few, ints, receipts


@settings(deadline=None, max_examples=few(30))
@given(receipts(), st.booleans(), st.sampled_from([None, 1]), st.sampled_from([8, 40]))
def test_followers_get_the_payload_padding_gets_zero_the_rest_stays(
    receipt: Receipt, weighted: bool, sms: int | None, H: int
) -> None:
    n = receipt.chain_N.numel()
    g = torch.Generator().manual_seed(n)
    rows_NH = torch.randn(n, H, generator=g).bfloat16().to(DEV)
    weight_N = torch.randn(n, generator=g).to(DEV)
    # Followers and padding come in with NaN; so does a leader that was sent one.
    rows_NH[receipt.chain_N >= 0] = NAN
    rows_NH[0, 0] = NAN
    want_rows, want_weight, chain = rows_NH.clone(), weight_N.clone(), receipt.chain_N.clone()
    where = (receipt.start_G, receipt.count_G, receipt.rows_1)
    settle(rows_NH, weight_N if weighted else None, receipt.chain_N, *where, LONGEST, sms=sms)
    settle_ref(want_rows, want_weight if weighted else None, chain, *where)
    assert torch.equal(bits(rows_NH), bits(want_rows))
    assert torch.equal(bits(weight_N), bits(want_weight))
    assert torch.equal(receipt.chain_N, chain)


def test_worked_example_of_the_module() -> None:
    rows_NH = torch.full((9, 8), NAN, dtype=torch.bfloat16, device=DEV)
    rows_NH[0] = 2
    chain_N = ints([-3, 5, -1, -4, 0, 7, -9, 3, 1])
    settle(rows_NH, None, chain_N, ints([0, 4]), ints([3, 1]), ints([8]), LONGEST)
    values = rows_NH.float()
    assert (values[[0, 1, 4]] == 2).all()
    assert (values[[3, 5, 6, 7]] == 0).all()
    assert values[[2, 8]].isnan().all()


@pytest.mark.gpu
@pytest.mark.parametrize("H", [3584, 7168, 16384])
def test_on_a_gpu_at_real_widths(H: int) -> None:
    g = torch.Generator().manual_seed(H)
    count = torch.randint(0, 60, (40,), generator=g)
    padded = (count + 15) // 16 * 16
    start = padded.cumsum(0) - padded
    real = torch.cat([torch.arange(s, s + c) for s, c in zip(start, count, strict=True)])
    order, chain = real[torch.randperm(len(real), generator=g)], torch.full((2000,), -9)
    for links in torch.split(order, 3):
        following = [*links[1:].tolist(), -1]
        chain[links] = torch.tensor([-(following[0] + 2), *(f + 1 for f in following[1:])])
    rows_NH = torch.randn(2000, H, generator=g).bfloat16().to(DEV)
    weight_N = torch.randn(2000, generator=g).to(DEV)
    want_rows, want_weight = rows_NH.clone(), weight_N.clone()
    where = (ints(chain), ints(start), ints(count), ints([int(padded.sum())]))
    settle(rows_NH, weight_N, *where, LONGEST)
    settle_ref(want_rows, want_weight, *where)
    assert torch.equal(bits(rows_NH), bits(want_rows))
    assert torch.equal(weight_N, want_weight)


@pytest.mark.parametrize(
    "words", [[-3, 1, 2, 3], [-2, 1, 1, 1], [-(2**30), 5, 0, 0], [-4, 0, 2**30, 0], [-3, 3, 2, 3]]
)
def test_chains_left_unfinished_by_a_failed_peer_stay_inside_the_buffer(words: list[int]) -> None:
    """Cycles end and impossible rows are not followed."""
    memory = torch.full((6, 8), NAN, dtype=torch.bfloat16, device=DEV)
    memory[1:5] = 1.0
    where = (ints(words), ints([0]), ints([4]), ints([4]))
    settle(memory[1:5], None, *where, 3)
    fold(memory[1:5], None, *where, 3)
    assert memory[0].isnan().all()
    assert memory[5].isnan().all()
