"""Everything a policy may look at. Two ranks with equal problems return equal allocations."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from .cost import Hardware, compute_ps, layer_time_ps, rank_times_ps
from .placement import Ints, Placement
from .residency import Residency


@dataclass(frozen=True, eq=False)  # no slots: cached_property needs a __dict__
class Problem:
    """One step's planning problem. E experts, R ranks, B slots per rank.

    Attributes:
        counts_RE: int64 ``[R, E]``, routes each source rank sends to each expert.
        placement: homes.
        slots: B.
        epsilon: slack of the bounded policies.
        residency: what the slots hold; a resident replica moves no bytes.
        hardware: constants of the cost model.
        align: row alignment of a segment.
    """

    counts_RE: Ints
    placement: Placement
    slots: int
    epsilon: float
    residency: Residency
    hardware: Hardware
    align: int

    @property
    def ranks(self) -> int:
        """R."""
        return self.placement.ranks

    @cached_property
    def routes_E(self) -> Ints:
        """Routes of each expert over all sources, int64 ``[E]``."""
        routes_E: Ints = self.counts_RE.sum(axis=0)
        return routes_E

    @cached_property
    def total(self) -> int:
        """Routes of the step."""
        return int(self.counts_RE.sum())

    @cached_property
    def home_loads_R(self) -> Ints:
        """Routes each rank computes when nothing moves, int64 ``[R]``."""
        load_R = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(load_R, self.placement.home_E, self.routes_E)
        return load_R

    def static_allocation(self) -> Ints:
        """Everything at home, int64 ``[E, R]``."""
        alloc_ER = np.zeros((self.placement.num_experts, self.ranks), dtype=np.int64)
        alloc_ER[np.arange(alloc_ER.shape[0]), self.placement.home_E] = self.routes_E
        return alloc_ER

    def caps(self, epsilon: float) -> Ints:
        """The most routes each rank should compute at slack ``epsilon``, int64 ``[R]``.

        ``floor((1 + epsilon) * mean)``, but never below the exact share (``total // R``, and one
        more for the first ``total mod R`` ranks), so the caps always sum to the total or more.
        """
        share_R = self.total // self.ranks + (
            np.arange(self.ranks) < self.total % self.ranks
        ).astype(np.int64)
        millionths = 10**6 + round(epsilon * 10**6)  # integers: every rank gets the same bits
        slack = self.total * millionths // (self.ranks * 10**6)
        return np.maximum(share_R, slack)

    def replicas(self, alloc_ER: Ints) -> NDArray[np.bool_]:
        """True where an expert computes away from home, bool ``[E, R]``."""
        foreign_ER = alloc_ER > 0
        foreign_ER[np.arange(alloc_ER.shape[0]), self.placement.home_E] = False
        return foreign_ER

    @cached_property
    def resident_ER(self) -> Ints:
        """1 where rank r holds expert e in a slot, int64 ``[E, R]``."""
        held_ER = np.zeros((self.placement.num_experts, self.ranks), dtype=np.int64)
        ranks, slots = np.nonzero(self.residency.experts_RB >= 0)
        held_ER[self.residency.experts_RB[ranks, slots], ranks] = 1
        return held_ER

    def fits(self, alloc_ER: Ints) -> bool:
        """True when no rank needs more replicas than it has slots."""
        return bool((self.replicas(alloc_ER).sum(axis=0) <= self.slots).all())

    def moved_ER(self, alloc_ER: Ints) -> Ints:
        """1 where an allocation makes expert e's bytes travel to rank r, int64 ``[E, R]``."""
        moved_ER: Ints = (self.replicas(alloc_ER) & (self.resident_ER == 0)).astype(np.int64)
        return moved_ER

    def rank_times_ps(self, alloc_ER: Ints) -> Ints:
        """Modelled time of every rank under an allocation, int64 ``[R]``."""
        return rank_times_ps(
            alloc_ER, self.placement.home_E, self.moved_ER(alloc_ER), self.hardware, self.align
        )

    @cached_property
    def static_time_ps(self) -> int:
        """Modelled time when nothing moves: only home segments."""
        busy_E = compute_ps(self.routes_E, self.hardware, self.align)
        time_R = np.zeros(self.ranks, dtype=np.int64)
        np.add.at(time_R, self.placement.home_E, busy_E)
        return layer_time_ps(time_R, self.hardware.parallel)

    def time_ps(self, alloc_ER: Ints) -> int:
        """Modelled time of the layer."""
        return layer_time_ps(self.rank_times_ps(alloc_ER), self.hardware.parallel)
