"""Replicas byte for byte, whatever moves, whatever the sizes and however they lie in memory."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from evenep.kernels import fetch
from evenep.kernels.fetch import fetch_ref, fetch_slots

from .exchange_ranks import DEV, addresses, few, ints


def tensors(rows: int, size: int, shift: int, g: torch.Generator | None) -> Tensor:
    """Room for ``[rows, size]`` bytes from ``shift`` on, and 16 more; 0xAA or random."""
    flat = torch.full((shift + rows * size + 16,), 0xAA, dtype=torch.uint8)
    if g is not None:
        flat = torch.randint(0, 256, flat.shape, generator=g, dtype=torch.uint8)
    return flat.to(DEV)


def view(flat: Tensor, rows: int, size: int, shift: int) -> Tensor:
    return flat[shift : shift + rows * size].view(rows, size)


@settings(deadline=None, max_examples=few(25))
@given(st.integers(1, 4), st.integers(1, 9), st.integers(0, 5), st.integers(1, 5), st.data())
def test_slots_that_move_get_the_experts_bytes_and_nothing_else_changes(
    ranks: int, experts: int, slots: int, programs: int, data: st.DataObject
) -> None:
    # 40000: more than a chunk.
    sizes = data.draw(st.lists(st.sampled_from([16, 48, 40000, 5, 130, 4100]), max_size=3))
    shifts = data.draw(
        st.lists(st.sampled_from([0, 0, 16, 3]), min_size=len(sizes), max_size=len(sizes))
    )
    g = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    home = torch.randint(0, ranks, (experts,), generator=g)
    local = torch.stack([(home[:e] == home[e]).sum() for e in range(experts)])
    slot = torch.randint(-1, experts, (slots,), generator=g)
    moved = torch.randint(0, 2, (slots,), generator=g)
    flats = [
        [tensors(experts, s, o, g) for _ in range(ranks)]
        for s, o in zip(sizes, shifts, strict=True)
    ]
    rows = [
        [view(flat, experts, size, shift) for flat in flat_R]
        for flat_R, size, shift in zip(flats, sizes, shifts, strict=True)
    ]
    got = [tensors(slots, size, 0, None) for size in sizes]
    want = [flat.clone() for flat in got]
    table = torch.tensor(
        [[t.data_ptr() for t in rows_R] for rows_R in rows], dtype=torch.int64, device=DEV
    ).reshape(len(sizes), ranks)
    args = (ints(slot), ints(moved), ints(home), ints(local))
    fetch_slots(*args, table, tuple(sizes), addresses(got), programs)
    fetch_ref(*args, rows, [view(f, slots, s, 0) for f, s in zip(want, sizes, strict=True)])
    for mine, theirs in zip(got, want, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("programs", [1, 3, 4])
@pytest.mark.parametrize("size", [fetch.CHUNK * 5, fetch.CHUNK * 3 + 16])
def test_longer_than_all_programs_chunks(programs: int, size: int) -> None:
    g = torch.Generator().manual_seed(programs)
    src, got = tensors(2, size, 0, g), tensors(3, size, 0, None)
    args = (ints([1, 0, 1]), ints([1, 0, 1]), ints([0, 0]), ints([0, 1]))
    fetch_slots(*args, addresses([src])[:, None], (size,), addresses([got]), programs)
    rows, slots = view(src, 2, size, 0), view(got, 3, size, 0)
    assert torch.equal(slots[0], rows[1])
    assert torch.equal(slots[2], rows[1])
    assert (slots[1] == 0xAA).all()
    assert (got[3 * size :] == 0xAA).all()


@pytest.mark.gpu
def test_beyond_2_to_the_31_bytes() -> None:
    size, experts = 48 * 1024 * 1024, 50  # 2.4 GB of home rows, and slots as far apart
    src = torch.empty(experts, size, dtype=torch.uint8, device=DEV)
    src.view(torch.int64)[:] = torch.arange(experts, device=DEV)[:, None] * 3 + 1
    got = torch.zeros(experts, size, dtype=torch.uint8, device=DEV)
    moved = torch.zeros(experts, dtype=torch.int32)
    moved[[0, 48, 49]] = 1
    order = torch.arange(experts - 1, -1, -1)
    args = (ints(order), ints(moved), ints([0] * experts), ints(range(experts)))
    fetch_slots(*args, addresses([src])[:, None], (size,), addresses([got]), 8)
    for b in range(experts):
        value = got[b].view(torch.int64)
        assert (value == ((experts - 1 - b) * 3 + 1 if moved[b] else 0)).all()
