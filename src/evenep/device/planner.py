"""The planner on the device: counts to plan in at most five launches, bits equal to the CPU's.

Nothing here waits for the device or reads from it, except ``DevicePlanner.snapshot``. Launches:
``plan_totals``, then for a policy that moves experts ``plan_candidates``, under ``auto``
``plan_refine``, and for all ``plan_slots`` and ``plan_runs``.

Letters: R ranks, E experts, B slots, L home rows of the fullest rank, G = L + B groups,
Z statistics.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..config import EPConfig
from ..errors import InputError, UnsupportedError, explain
from ..formats import format_of
from ..kernels.dispatch import MAX_TOP_K
from ..kernels.fast_launch import queue
from ..kernels.plan_candidates import plan_candidates_kernel
from ..kernels.plan_choose import EPSILONS_FIRST, REFINED
from ..kernels.plan_cost import CONSTANTS
from ..kernels.plan_refine import plan_refine_kernel
from ..kernels.plan_runs import STATS, plan_runs_kernel
from ..kernels.plan_slots import AUTO, BOUNDED, EXACT, STATIC, plan_slots_kernel
from ..kernels.plan_totals import TILE, plan_totals_kernel
from ..plan import Fetch, Hardware, Placement, Plan, PlanStats, Residency
from ..plan.capacity import cap_routes, receive_rows
from ..plan.cost import PS
from ..plan.layout import build_layout
from ..plan.policies.auto import EPSILONS
from .plan_buffers import WARP, DevicePlan, DeviceResidency, Sizes, pow2

__all__ = ["DevicePlan", "DevicePlanner", "DeviceResidency"]

MAX_RANKS, MAX_EXPERTS = 128, 4096
MODES = {"static": STATIC, "bounded": BOUNDED, "exact": EXACT, "auto": AUTO}
PREPARED = 512  # argument lists kept; a serving engine needs layers times lanes


class DevicePlanner:
    """Plans steps on a device.

    Args:
        cfg: sizes and choices; equal on every rank.
        placement: homes.
        rank: whose groups and runs are wanted; the rest of a plan is equal on every rank.
        hardware: cost constants; equal on every rank.
        device: where counts and plans live.

    Raises:
        UnsupportedError: more ranks or experts than the kernels are written for.
    """

    def __init__(
        self,
        cfg: EPConfig,
        placement: Placement,
        rank: int,
        hardware: Hardware,
        device: torch.device,
    ) -> None:
        R, E = placement.ranks, placement.num_experts
        if R > MAX_RANKS or E > MAX_EXPERTS or cfg.top_k > MAX_TOP_K:
            raise UnsupportedError(
                explain(
                    "too large to plan on a device",
                    where="DevicePlanner",
                    expected=f"at most {MAX_RANKS} ranks, {MAX_EXPERTS} experts, top {MAX_TOP_K}",
                    got=f"{R} ranks, {E} experts, top {cfg.top_k}",
                )
            )
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        self.cfg, self.placement, self.rank, self.device = cfg, placement, rank, device
        self._sizes = Sizes(R, E, cfg.slots, max(placement.max_experts_per_rank, 1))
        cap = cap_routes(cfg, self._sizes.L)
        self.capacity = receive_rows(cap, self._sizes.L + cfg.slots, cfg.row_alignment)
        epsilons = [cfg.epsilon, *sorted(EPSILONS, reverse=True)]
        self._millionths_N = torch.tensor(
            [10**6 + round(e * 10**6) for e in epsilons], dtype=torch.int64, device=device
        )
        owned_RL = np.full((R, self._sizes.L), -1, dtype=np.int32)
        for r, experts in enumerate(placement.owned):
            owned_RL[r, : len(experts)] = experts
        self._owned_RL = torch.from_numpy(owned_RL).to(device)
        self._home_E = torch.from_numpy(placement.home_E.astype(np.int32)).to(device)
        self._local_E = torch.from_numpy(placement.local_E.astype(np.int32)).to(device)
        self._constants = torch.zeros(len(CONSTANTS), dtype=torch.int64, device=device)
        self.use(hardware)
        self._prepared: dict[tuple[object, ...], _Prepared] = {}

    def use(self, hardware: Hardware) -> None:
        """Other cost constants from the next plan on; not while capturing."""
        self.hardware = hardware
        numbers = [getattr(hardware, name) for name in CONSTANTS[:-1]]
        self._constants.copy_(torch.tensor([*numbers, self.rank], dtype=torch.int64))

    def buffers(self) -> DevicePlan:
        """One lane's outputs and scratch."""
        s = self._sizes

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        scratch = s.scratch(self.device)
        return DevicePlan(
            alloc_ER=ints(s.E, s.R),
            slot_RB=ints(s.R, s.B).fill_(-1),  # a plan without slots doesn't write it
            moved_RB=ints(s.R, s.B),
            start_ER=ints(s.E, s.R),
            group_start_G=ints(s.L + s.B),
            group_count_G=ints(s.L + s.B),
            rows_1=ints(1),
            take_ER=ints(s.E, s.R),
            row_ER=ints(s.E, s.R),
            loads_R=ints(s.R),
            fetches_1=scratch["part_RZ"][self.rank, 1:2],
            stats=torch.zeros(len(STATS), dtype=torch.int64, device=self.device),
            scratch=scratch,
        )

    def residency(self) -> DeviceResidency:
        """Slots that hold nothing."""
        shape = (self._sizes.R, self._sizes.B)
        made = [torch.empty(n, dtype=torch.int32, device=self.device) for n in (shape, shape, 1, 2)]
        empty = DeviceResidency(*made)
        empty.forget()
        return empty

    def warm_up(self, counts_RE: Tensor, policies: Sequence[str]) -> None:
        """Compile for counts of this place, before the first step or capture; leaves no trace."""
        for policy in policies:
            self._prepare(counts_RE, self.residency(), policy, self.buffers())

    def plan(
        self, counts_RE: Tensor, residency: DeviceResidency, policy: str, out: DevicePlan
    ) -> None:
        """Queue one plan on the current stream.

        Args:
            counts_RE: int32 ``[R, E]`` on the device; rows may be strided, columns not. Keep it in
                one place: arguments of a known address are launched without being bound again.
                Before a capture, ``warm_up`` once.
            residency: of this layer and lane; moved on in place.
            policy: one that the config has room for.
            out: where the plan goes; belongs to this lane.
        """
        key = (
            counts_RE.data_ptr(),
            counts_RE.stride(0),
            policy,
            id(residency),
            id(out),
        )
        found = self._prepared.get(key)
        if found is None:
            if len(self._prepared) >= PREPARED:
                self._prepared.clear()
            found = self._prepare(counts_RE, residency, policy, out)
            if found.kernels:  # nothing is kept where kernels are interpreted
                self._prepared[key] = found
            out.policy = policy
            return
        out.policy = policy
        for kernel in found.kernels:
            queue(kernel.compiled, kernel.programs, *kernel.args)

    def _prepare(
        self, counts_RE: Tensor, residency: DeviceResidency, policy: str, out: DevicePlan
    ) -> _Prepared:
        """Launch through Triton's binding, and remember what it bound."""
        s = self._sizes
        self._check(counts_RE, policy)
        searches = s.B > 0 and s.R > 1
        mode = MODES[policy] if searches else STATIC
        epsilons = {STATIC: 0, EXACT: 0, BOUNDED: 1, AUTO: 1 + len(EPSILONS)}[mode]
        copies = s.copies if mode == AUTO else 0
        counts = (counts_RE, counts_RE.stride(0))
        w, align = out.scratch, self.cfg.row_alignment
        launches: list[_Launch] = []

        def launch(kernel: Any, programs: int, *args: object, warps: int) -> None:
            made = kernel[(programs,)](*args, num_warps=warps)
            if made is not None:
                raw = [a.data_ptr() if isinstance(a, Tensor) else a for a in args]
                launches.append(_Launch(made, programs, raw))

        launch(
            plan_totals_kernel,
            s.R,
            *counts,
            self._owned_RL,
            self._constants,
            w["routes_RL"],
            w["load_R"],
            w["home_ps_R"],
            w["resident_ER"],
            w["dense_SER"],
            s.R,
            s.E,
            s.L,
            s.RP,
            s.LP,
            align,
            max(1, min(s.RP, TILE // s.LP)),
            max(1, min(s.LP, TILE // s.RP)),
            copies,
            warps=4,
        )
        if mode != STATIC:
            launch(
                plan_candidates_kernel,
                2 * epsilons + 1 + (mode == AUTO),
                self._constants,
                self._millionths_N,
                w["load_R"],
                w["home_ps_R"],
                w["routes_RL"],
                self._owned_RL,
                self._home_E,
                self._local_E,
                residency.experts_RB,
                residency.pace,
                w["left_CRL"],
                w["bits_CRLW"],
                w["reps_CVRB"],
                w["vecs_CVR"],
                w["pairs_CVRB"],
                w["times_CVR"],
                w["scores_CZ"],
                w["resident_ER"],
                s.R,
                s.B,
                s.L,
                s.RC,
                max(s.LP, WARP),
                max(s.BP, WARP),
                s.W,
                epsilons,
                align,
                mode == AUTO,
                warps=1,
            )
        if mode == AUTO:
            launch(
                plan_refine_kernel,
                copies,
                self._constants,
                w["load_R"],
                w["home_ps_R"],
                w["routes_RL"],
                self._owned_RL,
                self._home_E,
                residency.pace,
                w["left_CRL"],
                w["reps_CVRB"],
                w["times_CVR"],
                w["scores_CZ"],
                w["resident_ER"],
                w["dense_SER"],
                w["slots_SRB"],
                w["feeds_SOR"],
                w["outs_SR"],
                w["climbs_SZ"],
                w["search_Z"],
                s.R,
                s.E,
                s.B,
                s.L,
                s.RP,
                s.RC,
                s.BP,
                min(pow2(s.L + s.B), max(8, 1024 // s.RP)),
                min(s.RP, 4096 // s.RP),
                epsilons,
                align,
                s.steps,
                warps=8,
            )
        launch(
            plan_slots_kernel,
            s.R,
            self._constants,
            w["scores_CZ"],
            w["climbs_SZ"],
            w["search_Z"],
            w["routes_RL"],
            w["left_CRL"],
            w["reps_CVRB"],
            w["times_CVR"],
            w["dense_SER"],
            self._owned_RL,
            self._home_E,
            self._local_E,
            residency.experts_RB,
            residency.used_RB,
            residency.step,
            w["mark_RE"],
            w["new_RB"],
            w["age_RB"],
            out.alloc_ER,
            out.start_ER,
            out.slot_RB,
            out.moved_RB,
            out.group_start_G,
            out.group_count_G,
            out.rows_1,
            out.loads_R,
            w["part_RZ"],
            w["outcome"],
            s.R,
            s.E,
            s.B,
            s.L,
            s.RC,
            s.EP,
            s.LP,
            s.BP,
            min(s.BP, WARP),
            epsilons,
            mode,
            copies,
            0 if policy == "auto" else MODES[policy],
            align,
            self.capacity,
            warps=4 if s.EP <= 1024 else 8,
        )
        block = max(1, 512 // s.RP)
        launch(
            plan_runs_kernel,
            -(-s.E // block),
            *counts,
            self._constants,
            out.alloc_ER,
            out.start_ER,
            out.take_ER,
            out.row_ER,
            w["load_R"],
            w["home_ps_R"],
            w["part_RZ"],
            w["outcome"],
            out.loads_R,
            out.stats,
            residency.step,
            residency.pace,
            s.R,
            s.E,
            s.RP,
            block,
            s.EP,
            policy == "auto",
            warps=4,
        )
        return _Prepared(launches, residency, out)

    def _check(self, counts_RE: Tensor, policy: str) -> None:
        shape = (self._sizes.R, self._sizes.E)
        good = counts_RE.shape == shape and counts_RE.dtype == torch.int32
        if not good or (shape[1] > 1 and counts_RE.stride(1) != 1):
            raise InputError(
                explain(
                    "bad counts",
                    where="DevicePlanner.plan",
                    expected=f"int32 of shape {shape}, columns contiguous",
                    got=f"{counts_RE.dtype} {tuple(counts_RE.shape)} {counts_RE.stride()}",
                )
            )
        if policy not in MODES:
            raise InputError(
                explain(
                    "unknown policy",
                    where="DevicePlanner.plan",
                    expected=f"one of {list(MODES)}",
                    got=policy,
                )
            )

    def chosen_name(self, policy: str, chosen: int) -> str:
        """The candidate behind ``stats``' first number, as the CPU's planner calls it."""
        if chosen >= REFINED:
            return f"{self.chosen_name(policy, chosen - REFINED)}+refined"
        if chosen >= EPSILONS_FIRST:
            return f"bounded({sorted(EPSILONS, reverse=True)[chosen - EPSILONS_FIRST]:g})"
        if chosen == 1 and policy == "auto":
            return f"bounded({self.cfg.epsilon:g})"
        return ("static", "bounded", "exact")[chosen]

    def numbers(self, out: DevicePlan) -> dict[str, int]:
        """The latest plan's statistics by name (waits for the device)."""
        return dict(zip(STATS, out.stats.tolist(), strict=True))

    def describe(self, stats: Tensor, policy: str) -> dict[str, Any]:
        """The plan's part of a ``StepRecord``, from statistics that the host has."""
        n = dict(zip(STATS, stats.tolist(), strict=True))
        mine = {"routes": n["my_routes"], "computed": n["my_load"], "policy": policy}
        return mine | self._figures(n, policy)

    def _figures(self, n: dict[str, int], policy: str) -> dict[str, Any]:
        """What a ``StepRecord`` and a ``PlanStats`` both say of a plan."""
        ranks, total = self._sizes.R, n["total"]
        expert_bytes = format_of(self.cfg).expert_bytes(self.cfg)
        return {
            "chosen": self.chosen_name(policy, n["chosen"]),
            "imbalance_before": n["max_home_load"] * ranks / total if total else 1.0,
            "imbalance_after": n["max_load"] * ranks / total if total else 1.0,
            "replicas": n["replicas"],
            "fetches": n["fetches"],
            "fetch_bytes": n["fetches"] * expert_bytes,
            "saved_bytes": (n["replicas"] - n["fetches"]) * expert_bytes,
        }

    def plan_stats(self, out: DevicePlan) -> PlanStats:
        """The latest plan's ``PlanStats`` (waits for the device)."""
        n = self.numbers(out)
        slot_RB = out.slot_RB.cpu().numpy()
        senders = self.placement.home_E[slot_RB[slot_RB >= 0]]
        total = n["total"]
        rests = out.policy == "auto" and not n["searched"]
        over = n["max_load"] * self._sizes.R - total
        return PlanStats(
            policy="static" if rests else out.policy,
            max_in=n["max_in"],
            max_out=int(np.bincount(senders, minlength=1).max()),
            moved_routes=n["moved_routes"],
            epsilon_reached=over / total if total else 0.0,
            time_s=n["time_ps"] / PS,
            static_time_s=n["static_time_ps"] / PS,
            **self._figures(n, out.policy),
        )

    def snapshot(
        self, out: DevicePlan, counts_RE: Tensor, residency: DeviceResidency | None = None
    ) -> Plan:
        """The latest plan as the CPU's planner would return it (waits for the device)."""

        def host(x: Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
            return x.cpu().numpy().astype(np.int64)

        slot_RB, moved_RB, alloc_ER = host(out.slot_RB), host(out.moved_RB), host(out.alloc_ER)
        fetches = tuple(
            Fetch(int(slot_RB[r, b]), int(self.placement.home_E[slot_RB[r, b]]), int(r), int(b))
            for r, b in zip(*np.nonzero(moved_RB), strict=True)
        )
        record = Residency.empty(*slot_RB.shape) if residency is None else residency.record()
        return Plan(
            counts=host(counts_RE),
            allocation=alloc_ER,
            loads=host(out.loads_R),
            slot_experts=slot_RB,
            fetches=fetches,
            layout=build_layout(alloc_ER, self.placement, slot_RB, self.cfg.row_alignment),
            residency=record,
            stats=self.plan_stats(out),
        )


@dataclass(slots=True)
class _Prepared:
    """The launches of one plan with every argument bound; keeps what they point to alive."""

    kernels: list[_Launch]
    residency: DeviceResidency
    out: DevicePlan


@dataclass(slots=True)
class _Launch:
    """One compiled kernel with its arguments, tensors as addresses."""

    compiled: Any
    programs: int
    args: list[object]
