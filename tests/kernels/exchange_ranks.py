"""Receive buffers of several ranks in one process, and address tables that reach them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from evenep.plan.layout import Runs

DEV = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAN = float("nan")
STALE = -7777
LONGEST = 64
"""Longer than any chain of these tests."""


def ints(values: object) -> Tensor:
    """int32 on the device under test."""
    return torch.as_tensor(values, dtype=torch.int32).to(DEV).contiguous()


def addresses(tensors: Sequence[Tensor]) -> Tensor:
    """The table through which kernels reach peers."""
    return torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64, device=DEV)


def bits(x: Tensor) -> Tensor:
    """The very bits: equal NaNs are equal, and -0 is not 0."""
    return x.contiguous().view(torch.uint8)


def few(examples: int) -> int:
    """Examples of a property; fewer on a GPU, where each new size is compiled for it."""
    return examples if DEV.type == "cpu" else max(examples // 4, 5)


def wild(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    """Values whose fp32 sum depends on the order: a one beside 2^25 is lost."""
    values = torch.tensor([1.0, -1.0, 3.0, -3.0, 2.0**25, -(2.0**25)])
    return values[torch.randint(0, 6, shape, generator=g)].to(DEV)


@dataclass(frozen=True)
class Windows:
    """One receive buffer a rank: R tensors each of rows, chain and weight."""

    rows: list[Tensor]
    chain: list[Tensor]
    weight: list[Tensor]

    @classmethod
    def poisoned(cls, ranks: int, n: int, width: int) -> Windows:
        """NaN payload and weights; chain words that lead far outside the buffer."""
        return cls(
            [torch.full((n, width), NAN, dtype=torch.bfloat16, device=DEV) for _ in range(ranks)],
            [torch.full((n,), STALE, dtype=torch.int32, device=DEV) for _ in range(ranks)],
            [torch.full((n,), NAN, device=DEV) for _ in range(ranks)],
        )

    def clone(self) -> Windows:
        sides = (self.rows, self.chain, self.weight)
        return Windows(*([t.clone() for t in side] for side in sides))

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """Addresses of rows, chain and weight."""
        return addresses(self.rows), addresses(self.chain), addresses(self.weight)

    def assert_same_bits(self, other: Windows) -> None:
        for name in ("rows", "chain", "weight"):
            for mine, theirs in zip(getattr(self, name), getattr(other, name), strict=True):
                assert torch.equal(bits(mine), bits(theirs)), name


def shares(runs: Runs, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """``(take_ER, row_ER)`` of a source's runs: what the device planner hands to kernels."""
    take, row = (torch.full((experts, ranks), v, dtype=torch.int32) for v in (0, STALE))
    e, r = torch.from_numpy(runs.expert_N).long(), torch.from_numpy(runs.dest_N).long()
    take[e, r] = torch.from_numpy(runs.count_N).int()
    row[e, r] = torch.from_numpy(runs.row_N).int()
    return take.to(DEV), row.to(DEV)


@st.composite
def routings(draw: st.DrawFn, most_k: int = 16) -> tuple[Tensor, Tensor, int, int]:
    """``(dest_TK, row_TK, ranks, rows of a buffer)``: any ranks, no row taken twice."""
    T, K, R = draw(st.integers(1, 6)), draw(st.integers(1, most_k)), draw(st.integers(1, 7))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dest = torch.randint(-1, draw(st.integers(1, R)), (T, K), generator=g)
    if draw(st.booleans()):
        dest[torch.randint(0, T, (1,), generator=g)] = -1
    n = T * K + 3
    row = torch.full((T, K), -1)
    for r in range(R):
        here = dest == r
        row[here] = torch.randperm(n, generator=g)[: int(here.sum())]
    return ints(dest), ints(row), R, n


@dataclass(frozen=True)
class Receipt:
    """A receive buffer as peers leave it: chains over the rows of groups, garbage elsewhere."""

    start_G: Tensor
    count_G: Tensor
    rows_1: Tensor
    chain_N: Tensor
    align: int


@st.composite
def receipts(draw: st.DrawFn) -> Receipt:
    """Groups of any sizes, empty ones too, with chains of any lengths through all of them."""
    align = draw(st.sampled_from([1, 1, 3, 4, 8]))
    counts = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 9]), min_size=1, max_size=5))
    g = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    starts, rows = [], 0
    real: list[int] = []
    for count in counts:
        starts.append(rows if count else draw(st.sampled_from([-1, 0, rows, 10**6])))
        real += range(rows, rows + count)
        rows += -(-count // align) * align
    # Garbage that looks like leaders and links; the very last words lie behind the step's rows.
    chain = torch.randint(-rows - 9, rows + 9, (rows + 3,), generator=g)
    order = [real[i] for i in torch.randperm(len(real), generator=g).tolist()]
    while order:
        length = min(int(torch.randint(1, 5, (1,), generator=g)), len(order))
        links, order = order[:length], order[length:]
        for i, n in enumerate(links):
            following = links[i + 1] if i + 1 < length else -1
            chain[n] = following + 1 if i else -(following + 2)
    return Receipt(ints(starts), ints(counts), ints([rows]), ints(chain), align)
