"""What a planned step leaves on the device, what it remembers, and the scratch between launches.

Letters: R ranks, E experts, B slots, L home rows of the fullest rank, G = L + B groups,
Z statistics; scratch has those of ``evenep.kernels.plan_candidates``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from ..plan import Residency
from ..plan.policies.auto import EPSILONS, refine_effort

WARP = 32


@dataclass(slots=True, eq=False)
class DevicePlan:
    """One lane's plan, written by the latest ``DevicePlanner.plan``. int32 unless said.

    Attributes:
        alloc_ER: ``[E, R]`` routes of expert e computed on rank r.
        slot_RB: ``[R, B]`` expert each slot serves this step, -1 unused.
        moved_RB: ``[R, B]`` 1 where that slot's bytes must be fetched this step.
        start_ER: ``[E, R]`` first row of e's segment on r, -1 without one.
        group_start_G: ``[G]`` this rank's groups in weight-row order: first row.
        group_count_G: ``[G]`` rows that hold a route.
        rows_1: ``[1]`` this rank's rows of all segments, padding included.
        take_ER: ``[E, R]`` this rank's routes of expert e that go to rank r (``local_first``).
        row_ER: ``[E, R]`` row on rank r of the first of them, -1 where none.
        loads_R: ``[R]`` routes each rank computes.
        fetches_1: ``[1]`` this rank's slots whose bytes must be fetched.
        stats: int64 ``[Z]``, see ``evenep.kernels.plan_runs.STATS``.
        policy: the policy asked for.
        scratch: what the launches hand each other; per lane, so that lanes may plan side by side.
    """

    alloc_ER: Tensor
    slot_RB: Tensor
    moved_RB: Tensor
    start_ER: Tensor
    group_start_G: Tensor
    group_count_G: Tensor
    rows_1: Tensor
    take_ER: Tensor
    row_ER: Tensor
    loads_R: Tensor
    fetches_1: Tensor
    stats: Tensor
    policy: str = ""
    scratch: dict[str, Tensor] = field(default_factory=dict, repr=False)


@dataclass(slots=True, eq=False)
class DeviceResidency:
    """What the slots of one layer and lane hold, and its pace; updated in place. int32.

    Attributes:
        experts_RB: ``[R, B]`` expert whose bytes the slot holds, -1 none.
        used_RB: ``[R, B]`` step that last used the slot, -1 never.
        step: ``[1]`` steps recorded so far.
        pace: ``[2]`` steps left before ``auto`` searches again, length of the latest rest.
    """

    experts_RB: Tensor
    used_RB: Tensor
    step: Tensor
    pace: Tensor

    def forget(self) -> None:
        """Hold nothing and search afresh. Queued, not waited for."""
        self.experts_RB.fill_(-1)
        self.used_RB.fill_(-1)
        self.step.zero_()
        self.pace.zero_()

    def record(self) -> Residency:
        """A copy on the host (waits for the device)."""
        experts_RB = self.experts_RB.cpu().numpy().astype(np.int64)
        used_RB = self.used_RB.cpu().numpy().astype(np.int64)
        return Residency(experts_RB, used_RB, int(self.step.item()))


@dataclass(frozen=True, slots=True)
class Sizes:
    """R, E, B, L; their powers of two; and what follows from them."""

    R: int
    E: int
    B: int
    L: int

    @property
    def RP(self) -> int:
        return pow2(self.R)

    @property
    def RC(self) -> int:
        """Ranks as one warp's vectors: a full warp, so that a reduction is one instruction."""
        return max(self.RP, WARP)

    @property
    def EP(self) -> int:
        return pow2(self.E)

    @property
    def LP(self) -> int:
        return pow2(self.L)

    @property
    def BP(self) -> int:
        return pow2(max(self.B, 1))

    @property
    def W(self) -> int:
        return -(-self.R // 32)

    @property
    def copies(self) -> int:
        return refine_effort(self.E, self.R)[0]

    @property
    def steps(self) -> int:
        return refine_effort(self.E, self.R)[1]

    def scratch(self, device: torch.device) -> dict[str, Tensor]:
        C, S = 2 * (1 + len(EPSILONS)) + 1, self.copies
        R, E, B, L = self.R, self.E, self.B, self.L

        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        long = torch.int64
        return {
            "routes_RL": zeros(R, L),
            "load_R": zeros(R),
            "home_ps_R": zeros(R, dtype=long),
            "left_CRL": zeros(C, R, L),
            "bits_CRLW": zeros(C, R, L, self.W),
            "reps_CVRB": zeros(C, 3, R, B),
            "vecs_CVR": zeros(C, 3, self.RC),
            "pairs_CVRB": zeros(C, 2, R, B),
            "times_CVR": zeros(C, 3, self.RC, dtype=long),
            "scores_CZ": zeros(C, 8, dtype=long),
            "resident_ER": zeros(E, R, dtype=torch.int8),
            "dense_SER": zeros(S, E, R),
            "slots_SRB": zeros(S, R, B),
            "feeds_SOR": zeros(S, self.RP, self.RP),
            "outs_SR": zeros(S, self.RP),
            "climbs_SZ": zeros(S, 4, dtype=long),
            "search_Z": zeros(4, dtype=long),
            "mark_RE": zeros(R, E),
            "new_RB": zeros(R, B),
            "age_RB": zeros(R, B, dtype=long),
            "part_RZ": zeros(R, 3),
            "outcome": zeros(4, dtype=long),
        }


def pow2(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
