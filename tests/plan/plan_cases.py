"""Adversarial planning problems, and plans taken apart route by route.

Letters: R ranks, E experts, B slots per rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from evenep.config import EPConfig
from evenep.plan import Hardware, Placement, Plan, Problem, Residency
from evenep.plan.placement import Ints

ROUTE_ORDERS = ("local_first", "rank_order")
BALANCED = Hardware(row_ps=1000, read_ps=2000, launch_ps=500, fetch_ps=4000)
MACHINES = {
    "balanced": BALANCED,
    "compute_only": Hardware(row_ps=1, read_ps=0, launch_ps=0, fetch_ps=0),
    "reads_only": Hardware(row_ps=0, read_ps=1000, launch_ps=0, fetch_ps=500),
    "slow_link": Hardware(row_ps=10, read_ps=100, launch_ps=10, fetch_ps=10**6),
    "free": Hardware(row_ps=0, read_ps=0, launch_ps=0, fetch_ps=0),
}


def config(
    counts_RE: Ints,
    *,
    slots: int | None = None,
    policy: str = "auto",
    epsilon: float = 0.02,
    align: int = 1,
) -> EPConfig:
    """A config whose capacity is what the fullest source brings."""
    R, E = counts_RE.shape
    top_k = min(E, 2)
    fullest = int(counts_RE.sum(axis=1).max())
    return EPConfig(
        num_experts=E,
        top_k=top_k,
        hidden_size=64,
        intermediate_size=32,
        max_tokens_per_rank=max(1, -(-fullest // top_k)),
        ranks=R,
        slots_per_rank=slots,
        policy=policy,
        epsilon=epsilon,
        row_alignment=align,
    )


@dataclass(frozen=True)
class Case:
    """One problem; everything a plan needs."""

    counts_RE: Ints
    placement: Placement
    slots: int
    align: int
    epsilon: float
    machine: str

    @property
    def home_group(self) -> int:
        """Slots with which every policy fits."""
        return max(self.placement.max_experts_per_rank, -(-self.placement.num_experts // self.R))

    @property
    def R(self) -> int:
        return self.placement.ranks

    def config(self, policy: str, slots: int | None = None) -> EPConfig:
        """``exact`` gets the slots its guarantee needs, other policies the drawn budget."""
        if slots is None:
            slots = self.home_group if policy == "exact" else self.slots
        return config(
            self.counts_RE, slots=slots, policy=policy, epsilon=self.epsilon, align=self.align
        )

    def problem(self, residency: Residency | None = None, slots: int | None = None) -> Problem:
        slots = self.slots if slots is None else slots
        return Problem(
            counts_RE=self.counts_RE,
            placement=self.placement,
            slots=slots,
            epsilon=self.epsilon,
            residency=residency or Residency.empty(self.R, slots),
            hardware=MACHINES[self.machine],
            align=self.align,
        )


def _popularity(kind: str, home_E: Ints, ranks: int, rng: np.random.Generator) -> Ints:
    """Relative popularity of experts, as integers so that zero is zero."""
    E = home_E.size
    shapes: dict[str, Callable[[], Ints]] = {
        "uniform": lambda: np.ones(E, dtype=np.int64),
        "single_hot": lambda: (np.arange(E) == rng.integers(E)).astype(np.int64),
        "hot_home": lambda: (home_E == home_E[rng.integers(E)]).astype(np.int64),
        "half_homes_idle": lambda: (home_E < (ranks + 1) // 2).astype(np.int64),
        "power_law": lambda: 10_000 // (1 + rng.permutation(E)) ** 2,
        "zero_experts": lambda: rng.integers(0, 2, E) * rng.integers(0, 9, E),
    }
    return shapes[kind]()


KINDS = ("uniform", "single_hot", "hot_home", "half_homes_idle", "power_law", "zero_experts")


@st.composite
def cases(draw: st.DrawFn, max_ranks: int = 7, max_experts: int = 12, heat: int = 300) -> Case:
    """Odd R, R = 1, R > E, ragged E, empty ranks, empty sources, empty steps, any placement."""
    R, E = draw(st.integers(1, max_ranks)), draw(st.integers(1, max_experts))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    placement = Placement.contiguous(E, R)
    if draw(st.booleans()):
        placement = Placement.from_homes(rng.integers(0, R, E).tolist(), R)
    weight_E = _popularity(draw(st.sampled_from(KINDS)), placement.home_E, R, rng)
    routes_R = rng.integers(0, draw(st.sampled_from([0, 1, 8, heat])) + 1, R)
    if draw(st.booleans()):
        routes_R[rng.integers(R)] = 0
    if weight_E.sum() == 0:
        routes_R[:] = 0
    share_E = weight_E / max(weight_E.sum(), 1)
    counts_RE = np.zeros((R, E), dtype=np.int64)
    for r, routes in enumerate(routes_R.tolist()):
        if routes:
            counts_RE[r] = rng.multinomial(routes, share_E)
    return Case(
        counts_RE=counts_RE,
        placement=placement,
        slots=draw(st.integers(0, placement.max_experts_per_rank)),
        align=draw(st.sampled_from([1, 2, 16, 128])),
        epsilon=draw(st.sampled_from([0.0, 0.02, 0.1, 0.29, 0.5, 1.0])),
        machine=draw(st.sampled_from(sorted(MACHINES))),
    )


@st.composite
def residencies(draw: st.DrawFn, ranks: int, slots: int, experts: int) -> Residency:
    """Slots that hold distinct experts, or nothing, with any age."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    experts_RB = np.full((ranks, slots), -1, dtype=np.int64)
    for r in range(ranks):
        held = rng.permutation(experts)[:slots]
        experts_RB[r, : held.size] = np.where(rng.random(held.size) < 0.7, held, -1)
    used_RB = np.where(experts_RB >= 0, rng.integers(0, 5, experts_RB.shape), -1)
    return Residency(experts_RB, used_RB, 5)


Route = tuple[int, int, int, int]  # expert, source, destination, row


def routes_of(plan: Plan, order: str) -> list[Route]:
    """Every route of the step, each source's in its own (expert-sorted) order."""
    routes: list[Route] = []
    for source in range(plan.counts.shape[0]):
        runs = plan.runs(source, order)
        for expert, dest, row, count in zip(
            *(a.tolist() for a in (runs.expert_N, runs.dest_N, runs.row_N, runs.count_N)),
            strict=True,
        ):
            routes.extend((expert, source, dest, row + i) for i in range(count))
    return routes
