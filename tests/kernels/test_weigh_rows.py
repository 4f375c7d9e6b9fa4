"""Rows of groups are multiplied by their weights, everything else stays."""

from __future__ import annotations

import pytest
import torch

from evenep.kernels.weigh_rows import weigh_rows, weigh_rows_ref

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("H", [32, 160])
@pytest.mark.parametrize("programs", [1, 4])
@pytest.mark.parametrize("counts", [[3, 0, 2], [0, 0], [6]], ids=str)
def test_weighs_the_rows_of_groups_only(counts: list[int], programs: int, H: int) -> None:
    g = torch.Generator().manual_seed(0)
    starts = [2 + sum(counts[:i]) + i for i in range(len(counts))]
    N = 2 + sum(counts) + len(counts)
    rows = torch.randn(N, H, generator=g).bfloat16().to(DEVICE)
    weight = torch.rand(N, generator=g).to(DEVICE)
    start, count = (torch.tensor(v, dtype=torch.int32, device=DEVICE) for v in (starts, counts))
    want = weigh_rows_ref(rows, weight, start, count)
    weigh_rows(rows, weight, start, count, programs)
    # The interpreter cuts fp32 to BF16 where the GPU rounds: a last bit there, none here.
    rtol = 0.0 if DEVICE == "cuda" else 2**-7
    torch.testing.assert_close(rows, want, rtol=rtol, atol=0.0)
