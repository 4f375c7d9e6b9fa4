"""The device's planner held to the CPU's, output by output, over a sequence of steps."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import torch
from torch import Tensor

from evenep.config import EPConfig
from evenep.device.planner import DevicePlan, DevicePlanner, DeviceResidency
from evenep.plan import Hardware, Placement, Plan, Residency, planner
from evenep.plan.cost import PS
from evenep.plan.pace import Pace
from evenep.plan.placement import Ints

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
POISON = -7777


class Window:
    """Counts as they lie in a window of peers: each row after a header, always in one place."""

    def __init__(self, ranks: int, experts: int, header: int) -> None:
        self._whole = torch.full((ranks, header + experts), POISON, dtype=torch.int32)
        self._whole = self._whole.to(DEVICE)
        self.counts_RE = self._whole[:, header:]

    def put(self, counts_RE: Ints) -> Tensor:
        self.counts_RE.copy_(torch.from_numpy(counts_RE.astype(np.int32)))
        return self.counts_RE


def poison(out: DevicePlan) -> None:
    """Whatever a plan must write, and all scratch."""
    for tensor in (
        out.alloc_ER,
        out.start_ER,
        out.group_start_G,
        out.group_count_G,
        out.rows_1,
        out.take_ER,
        out.row_ER,
        out.loads_R,
        out.stats,
        *out.scratch.values(),
    ):
        tensor.fill_(77 if tensor.dtype == torch.int8 else POISON)


def runs_of(plan: Plan, rank: int) -> tuple[Ints, Ints]:
    """``take_ER`` and ``row_ER`` from the CPU plan's runs."""
    take_ER = np.zeros(plan.allocation.shape, dtype=np.int64)
    row_ER = np.full(plan.allocation.shape, -1, dtype=np.int64)
    runs = plan.runs(rank)
    take_ER[runs.expert_N, runs.dest_N] = runs.count_N
    row_ER[runs.expert_N, runs.dest_N] = runs.row_N
    return take_ER, row_ER


def groups_of(plan: Plan, rank: int, groups: int) -> tuple[Ints, Ints]:
    """First row (where there is one) and rows of every group."""
    start_G, count_G = np.zeros(groups, dtype=np.int64), np.zeros(groups, dtype=np.int64)
    s = plan.layout.segments[rank]
    start_G[s.weight_row_G], count_G[s.weight_row_G] = s.start_G, s.count_G
    return start_G, count_G


def same(name: str, got: Tensor, expected: Ints) -> None:
    np.testing.assert_array_equal(got.cpu().numpy().astype(np.int64), expected, err_msg=name)


class Twins:
    """Both planners of one rank, stepped together."""

    def __init__(
        self,
        cfg: EPConfig,
        placement: Placement,
        rank: int,
        hardware: Hardware,
        start: Residency | None = None,
    ) -> None:
        self.cfg, self.placement, self.rank, self.hardware = cfg, placement, rank, hardware
        self.device = DevicePlanner(cfg, placement, rank, hardware, DEVICE)
        self.out, self.held = self.device.buffers(), self.device.residency()
        self.residency = start or Residency.empty(cfg.ranks, cfg.slots)
        self.pace = Pace()
        self.window = Window(cfg.ranks, cfg.num_experts, header=3)
        self.held.experts_RB.copy_(torch.from_numpy(self.residency.experts_RB.astype(np.int32)))
        self.held.used_RB.copy_(torch.from_numpy(self.residency.used_RB.astype(np.int32)))
        self.held.step.fill_(self.residency.step)

    def step(self, counts_RE: Ints, policy: str) -> Plan:
        """One step on both; every output compared."""
        expected = self.on_cpu(counts_RE, policy)
        poison(self.out)
        counts = self.window.put(counts_RE)
        self.device.plan(counts, self.held, policy, self.out)
        self.compare(expected)
        found = self.device.snapshot(self.out, counts, self.held)
        assert asdict(found.stats) == asdict(expected.stats)
        assert found.fetches == expected.fetches
        return expected

    def on_cpu(self, counts_RE: Ints, policy: str) -> Plan:
        """As ``evenep.planning.StepPlanner`` plans."""
        searching = policy == "auto" and self.pace.search_now()
        asked = policy if policy != "auto" or searching else "static"
        made = planner.plan(
            counts_RE, self.cfg, self.placement, self.residency, asked, self.hardware
        )
        if searching:
            won_s = round((made.stats.static_time_s - made.stats.time_s) * PS) / PS
            self.pace.learn(won_s, self.hardware.plan_ps / PS)
        self.residency = made.residency
        return made

    def compare(self, expected: Plan) -> None:
        out = self.out
        same("alloc_ER", out.alloc_ER, expected.allocation)
        same("loads_R", out.loads_R, expected.loads)
        same("slot_RB", out.slot_RB, expected.slot_experts)
        moved_RB = np.zeros(expected.slot_experts.shape, dtype=np.int64)
        for fetch in expected.fetches:
            moved_RB[fetch.rank, fetch.slot] = 1
        same("moved_RB", out.moved_RB, moved_RB)
        same("start_ER", out.start_ER, expected.layout.start_ER)
        start_G, count_G = groups_of(expected, self.rank, out.group_count_G.numel())
        same("group_count_G", out.group_count_G, count_G)
        same("group_start_G", out.group_start_G * (out.group_count_G > 0), start_G)
        same("rows_1", out.rows_1, np.array([expected.layout.segments[self.rank].rows]))
        take_ER, row_ER = runs_of(expected, self.rank)
        same("take_ER", out.take_ER, take_ER)
        same("row_ER", out.row_ER, row_ER)
        held: DeviceResidency = self.held
        same("experts_RB", held.experts_RB, self.residency.experts_RB)
        same("used_RB", held.used_RB, self.residency.used_RB)
        same("step", held.step, np.array([self.residency.step]))
        same("pace", held.pace, np.array([self.pace.resting, self.pace.rest]))
