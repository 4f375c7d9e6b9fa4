"""Cost constants of this GPU with this runner, and agreed by all ranks (the slowest rank's count).

Ranks take turns, so that ranks which share a GPU don't measure each other.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from ..experts.device import Groups
from ..kernels.fetch import FETCH_PROGRAMS, fetch_slots
from ..plan import Hardware
from ..plan.cost import PS
from ..plan.planner import declared_hardware
from ..transport import Tag
from ..transport.place import host_identity
from .streams import Streams

if TYPE_CHECKING:
    from .machine import DeviceMachine

_FEW, _MANY = 128, 512  # rows an expert: both beyond the bend of the curve
_EXPERTS = 16
_REPEATS = 5


def measure(machine: DeviceMachine, layer: int) -> Hardware:
    """Time experts at 1, 128 and 512 rows each, and a fetch. Collective; writes slot 0.

    The points fix ``max(read, rows * row)`` per expert, ``row`` from the slope between the last
    two. Launches aren't per expert on a GPU, so ``launch`` is 0.
    """
    cfg, transport = machine.cfg, machine.transport
    if cfg.ranks == 1 or cfg.slots == 0:
        return declared_hardware(cfg)
    tag = Tag("construct")
    mine: list[int] = []
    for turn in range(transport.size):
        if turn == transport.rank:
            mine = _measure_alone(machine, layer)
        transport.barrier(tag, cfg.load_timeout_s)  # kernels compile the first time
    words = torch.tensor(mine, dtype=torch.int64)
    one_ps, few_ps, many_ps, fetch_ps = transport.all_gather(words, tag, 0).amax(0).tolist()
    return Hardware(
        row_ps=max(many_ps - few_ps, 0) // (_MANY - _FEW),
        read_ps=one_ps,
        launch_ps=0,
        fetch_ps=fetch_ps,
        parallel=_gpus(machine, tag),
    )


def measure_planning(machine: DeviceMachine) -> Hardware:
    """The machine's constants with what a search costs beyond a static plan. Collective.

    The search is timed on counts where it has much to find, so ``auto`` rests where even that
    wins less than it costs.
    """
    cfg, transport, hardware = machine.cfg, machine.transport, machine.hardware
    assert hardware is not None
    if cfg.ranks == 1 or cfg.slots == 0:
        return hardware
    out, tag = machine.planner.buffers(), Tag("construct")
    routes = torch.arange(cfg.num_experts, 0, -1, dtype=torch.int32, device=machine.device)
    counts_RE = routes.clamp(max=cfg.max_tokens_per_rank).repeat(cfg.ranks, 1)
    mine_ps = 0
    for turn in range(transport.size):
        if turn == transport.rank:
            times = []
            for policy in ("static", "auto"):
                residency = machine.planner.residency()
                plan = functools.partial(machine.planner.plan, counts_RE, residency, policy, out)
                times.append(_best(machine.streams, plan))
            mine_ps = round(max(times[1] - times[0], 0.0) * PS)
        transport.barrier(tag, cfg.load_timeout_s)
    said = transport.all_gather(torch.tensor([mine_ps], dtype=torch.int64), tag, 0)
    return replace(hardware, plan_ps=int(said.max()))


def _measure_alone(machine: DeviceMachine, layer: int) -> list[int]:
    """``[1 row, few rows, many rows, fetch]`` in picoseconds per expert."""
    experts = min(len(machine.placement.experts_of(machine.rank)), _EXPERTS)
    if experts == 0:
        return [0, 0, 0, 0]
    times = []
    for rows in (1, _FEW, _MANY):
        rows_NH = torch.zeros(
            experts * rows, machine.cfg.hidden_size, dtype=torch.bfloat16, device=machine.device
        )
        weight_N = torch.ones(experts * rows, device=machine.device)
        counts = torch.full((experts,), rows, dtype=torch.int32, device=machine.device)
        stacked = machine.store.layer(layer).stacked
        groups = Groups(
            start_G=torch.arange(experts, dtype=torch.int32, device=machine.device) * rows,
            count_G=counts,
            tensors={name: t[:experts] for name, t in stacked.items()},
            rows=experts * rows,
            likely=rows,
        )
        machine.runner.reserve(max(machine.capacity, groups.rows))
        run = functools.partial(machine.runner.run, rows_NH, weight_N, groups)
        times.append(_best(machine.streams, run))
    per_expert = [round(t / experts * PS) for t in times]
    return [*per_expert, round(_time_fetch(machine, layer) * PS)]


def _time_fetch(machine: DeviceMachine, layer: int) -> float:
    source = (machine.rank + 1) % machine.cfg.ranks
    experts = machine.placement.experts_of(source)
    if not experts:
        return 0.0
    B = machine.cfg.slots
    slot_B = torch.full((B,), -1, dtype=torch.int32, device=machine.device)
    slot_B[0] = experts[0]
    moved_B = torch.zeros(B, dtype=torch.int32, device=machine.device)
    moved_B[0] = 1
    return _best(
        machine.streams,
        lambda: fetch_slots(
            slot_B,
            moved_B,
            machine.home_E,
            machine.local_E,
            machine.sources_XR[layer],
            machine.row_bytes_X,
            machine.slots_X[layer, 0],
            FETCH_PROGRAMS,
        ),
    )


def _best(streams: Streams, run: Callable[[], None]) -> float:
    run()
    times: list[float] = []
    for _ in range(_REPEATS):
        start, end = (streams.event(timing=True) for _ in range(2))
        start.record(streams.current())
        run()
        end.record(streams.current())
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times)


def _gpus(machine: DeviceMachine, tag: Tag) -> int:
    """How many GPUs the ranks have between them, 0 for one each. Collective."""
    name = f"{host_identity()} {machine.streams.identity}"
    number = int(hashlib.sha256(name.encode()).hexdigest()[:12], 16)
    seen = machine.transport.all_gather(torch.tensor([number]), tag, 0).flatten().tolist()
    return 0 if len(set(seen)) == len(seen) else len(set(seen))
