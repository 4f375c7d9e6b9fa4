"""Steps of all ranks with their plan, and the rows of each route written out as a plain loop."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

import evenep
from evenep import EPConfig
from evenep.exchange.routes import Routes, build_routes
from evenep.plan.planner import Plan


@dataclass(frozen=True)
class Traffic:
    """What every rank brings to one step, and the plan made of it."""

    cfg: EPConfig
    ids: tuple[Tensor, ...]
    plan: Plan

    def routes(self, rank: int) -> Routes:
        """The code under test."""
        return build_routes(self.ids[rank], self.plan.runs(rank), self.cfg.ranks)

    def expected(self, rank: int) -> dict[int, tuple[int, int]]:
        """``flat → (destination, row)``: by expert, then by flat index, routes fill the runs."""
        ids = self.ids[rank].reshape(-1).tolist()
        order = sorted((e, flat) for flat, e in enumerate(ids) if e >= 0)
        runs = self.plan.runs(rank)
        columns = (runs.expert_N, runs.dest_N, runs.row_N, runs.count_N)
        places = [
            (e, dest, row + i)
            for e, dest, row, count in zip(*(c.tolist() for c in columns), strict=True)
            for i in range(count)
        ]
        assert [e for e, _ in order] == [e for e, _, _ in places]
        return {flat: (dest, row) for (_, flat), (_, dest, row) in zip(order, places, strict=True)}


def traffic_of(cfg: EPConfig, ids: tuple[Tensor, ...]) -> Traffic:
    """Count with a ``Counter`` and plan."""
    tallies = [Counter(i.reshape(-1).tolist()) for i in ids]
    counts = [[tally[e] for e in range(cfg.num_experts)] for tally in tallies]
    return Traffic(cfg, ids, evenep.plan(counts, cfg))


@st.composite
def traffics(draw: st.DrawFn) -> Traffic:
    """Ragged ranks, empty ranks, ids below zero, repeats within a token, any R, E and K."""
    E = draw(st.integers(1, 24))
    K = draw(st.integers(1, min(16, E)))
    R = draw(st.integers(1, 5))
    tokens = draw(st.lists(st.sampled_from([0, 0, 1, 2, 5, 9]), min_size=R, max_size=R))
    policy = draw(st.sampled_from(["static", "exact", "bounded"]))
    cfg = EPConfig(
        num_experts=E, top_k=K, hidden_size=8, intermediate_size=8, max_tokens_per_rank=20,
        ranks=R, policy=policy, row_alignment=draw(st.sampled_from([1, 4])),
    )  # fmt: skip
    seed, dropped = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.0, 0.2, 1.0]))
    active = draw(st.integers(1, E))  # few of them: hot experts, repeats within a token
    g = torch.Generator().manual_seed(seed)
    ids = []
    for T in tokens:
        chosen = torch.randint(0, active, (T, K), generator=g)
        chosen[torch.rand(T, K, generator=g) < dropped] = -1
        ids.append(chosen.to(draw(st.sampled_from([torch.int32, torch.int64]))))
    return traffic_of(cfg, tuple(ids))
