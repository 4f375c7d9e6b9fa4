"""Experts' kernels compile when an engine is made, not in the middle of serving or of a capture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..config import EPConfig
from ..kernels.sizing import pow2

if TYPE_CHECKING:
    from .machine import DeviceMachine


def likely_rows(cfg: EPConfig, tokens: int) -> int:
    """A guess at the rows of a busy group when every rank brings so many tokens: twice the mean.

    As a power of two, like the runners' classes: few values, so that what is kept per value is few.
    """
    return pow2(round(2 * tokens * cfg.top_k * cfg.ranks / cfg.num_experts))


def warm_up(machine: DeviceMachine, layer: int) -> None:
    """Run every call that a step may make, once, on lane 0's memory and with no rows in it.

    Kernels are compiled per class of rows (``DeviceRunner.classes``), for homes and for replicas,
    and with SMs left to a fetch or not; a class beyond a full step's rows is left out.
    """
    cfg, memory = machine.cfg, machine.lanes[0]
    memory.plan.group_start_G.zero_()
    memory.plan.group_count_G.zero_()
    weight_N = memory.weight.local if cfg.route_weight != "output" else None
    largest = likely_rows(cfg, cfg.max_tokens_per_rank)
    calls: list[tuple[bool, int | None]] = [(False, None)]
    if cfg.slots:
        calls += [(False, machine.sms_beside_fetch), (True, None)]
    for slots, sms in calls:
        groups = machine.groups(layer, 0, slots=slots, likely=1)
        machine.runner.warm_up(memory.rows.local, weight_N, groups, largest, sms)
