"""Steps carried out on a GPU: everything is queued, nothing waits for a result.

A step's kernels, in order, on the caller's stream (the fetch runs beside, on a stream of its own):

    count      histogram of my routes, pushed into every rank's counts window
    gate       wait 1: everyone's counts are here, everyone has left the previous step
    plan       counts -> allocation, slots, layout; the same on every rank
    place      destination and row of each of my routes
    dispatch   payload, chain and weights into my peers' windows
    fetch      bytes of missing replicas into my slots          (fetch stream)
    gate       wait 2: every row sent to me is in my window
    settle     copies for a token's other routes here; padding is zeroed
    home       groups of my own experts
    slots      groups of replicas, once the fetch is done
    fold       compact: a token's routes here become one row
    gate       wait 3: every peer's outputs are in its window
    combine    rows of my tokens, summed
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..errors import AgreementError, InputError, PlanError, explain
from ..experts.choice import RunnerChoice
from ..experts.device import DeviceRunner, Groups
from ..experts.registry import make_device_runner
from ..kernels.count import BAD_EXPERT, HEADERS_DIFFER
from ..kernels.fetch import FETCH_PROGRAMS
from ..kernels.sizing import num_sms
from ..machine import RECORDS, Machine, Opening, Setup, Work
from ..plan import Hardware
from ..plan.capacity import cap_routes
from ..transport import DeviceTransport, Tag, addresses
from ..weights.store import ExpertStore
from .agree_runner import agree_on_runner
from .buffers import Lane, rows_capacity
from .measure import measure, measure_planning
from .planner import DevicePlanner, DeviceResidency
from .runner_times import RunnerTimes, problem
from .streams import Turn, streams_of
from .timeline import Timelines
from .warm_up import warm_up

CAPTURED = 1024
"""Captured steps whose statistics are kept apart."""


class DeviceMachine(Machine):
    """One rank on a GPU."""

    def __init__(self, setup: Setup) -> None:
        assert isinstance(setup.transport, DeviceTransport)
        self.cfg, self.transport, self.placement = setup.cfg, setup.transport, setup.placement
        self.rank, self.device = setup.transport.rank, setup.transport.device
        self.streams = streams_of(self.device)
        self.poison, self._debug = setup.settings.poison, setup.settings.debug
        cfg, device = setup.cfg, self.device
        self.runner: DeviceRunner = make_device_runner(cfg, device)
        self._require_same_layout()
        self._roomy: set[str] = set()
        self._require_room(cfg.policy)
        self._load(setup)
        self._find_weights()
        self.fetch_stream = self.streams.make()
        self.sms_beside_fetch = max(num_sms(device) - FETCH_PROGRAMS, 1)
        self._hardware = setup.hardware or measure(self, setup.experts.layers[0])
        self.planner = DevicePlanner(cfg, setup.placement, self.rank, self._hardware, device)
        if setup.hardware is None:
            self._hardware = measure_planning(self)
            self.planner.use(self._hardware)
        self._make_lanes()
        warm_up(self, setup.experts.layers[0])

    def _load(self, setup: Setup) -> None:
        """This rank's experts into the store, and the runner that all ranks agree on."""
        cfg, layers, transport = self.cfg, setup.experts.layers, setup.transport
        self.store = ExpertStore(cfg, self.placement, transport, layers, self.runner)
        self.capacity = rows_capacity(cfg, self.store.home_rows)
        self.runner.reserve(self.capacity)
        for layer in layers:
            self.store.load(layer, setup.experts, setup.progress)
        self.streams.current().synchronize()
        transport.barrier(Tag("construct"), cfg.load_timeout_s)
        cache = RunnerTimes(setup.settings.cache_dir, problem(cfg, self.device))
        stacked = self.store.layer(layers[0]).stacked
        agree_on_runner(self.runner, cfg, transport, cache, stacked)
        self._runner_choice = RunnerChoice(self.runner.name, self.runner.why)

    def _find_weights(self) -> None:
        """Addresses of every rank's experts and of this rank's slots, for the fetch."""
        self.home_E = torch.from_numpy(self.placement.home_E).to(self.device, torch.int32)
        self.local_E = torch.from_numpy(self.placement.local_E).to(self.device, torch.int32)
        self.sources_XR = {
            layer: torch.stack([addresses(w) for w in self.store.windows(layer).values()])
            for layer in self.store.layers
        }
        self.slots_X = {
            (layer, lane): self._slot_addresses(layer, lane)
            for layer in self.store.layers
            for lane in range(self.cfg.in_flight)
        }
        self.row_bytes_X = tuple(spec.nbytes for spec in self.runner.specs())

    def _make_lanes(self) -> None:
        """Memory of the steps in flight, and what they leave behind. Collective."""
        cfg, streams = self.cfg, self.streams
        self.lanes = Lane.make(cfg, self.store.home_rows, self.transport, self.planner)
        for lane in self.lanes:
            if self.poison:
                lane.poison()
            self.transport.follow(lane.routes.status[1:])
        self.residency: dict[tuple[int, int], DeviceResidency] = {}
        self._empty_slots()
        # What steps did, and whether kernels found something wrong, written by the GPU.
        stats = self.lanes[0].plan.stats
        rows = RECORDS + CAPTURED
        self._landing = streams.landing(rows * stats.numel(), stats.dtype).view(rows, -1)
        self.status = streams.landing(cfg.in_flight, torch.int32)
        self._said = self.status.numpy()
        self._steps, self._captured, self.timelines = 0, 0, Timelines(streams)
        # Two streams may hold steps: a lane's memory and the runner's scratch go from one to the
        # other in order.
        self.lane_turns = [Turn(streams) for _ in range(cfg.in_flight)]
        self.runner_turn = Turn(streams)
        self._groups: dict[tuple[int, int, bool, int], Groups] = {}

    @property
    def runner_choice(self) -> RunnerChoice:
        return self._runner_choice

    @property
    def hardware(self) -> Hardware | None:
        return self._hardware

    def open(self, opening: Opening) -> Work:
        from .work import DeviceWork  # the two need each other

        self._require_room(opening.policy)
        work = DeviceWork(self, opening)
        work.count()
        work.gate("counts")
        work.make_plan()
        return work

    def landing_row(self) -> Tensor:
        """Where a step's statistics go: rows take turns; a captured step keeps one of its own."""
        if self.streams.capturing():
            self._captured += 1
            return self._landing[RECORDS + self._captured % CAPTURED]
        self._steps += 1
        return self._landing[self._steps % RECORDS]

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Around a replay on the current stream: it uses any lane, and the runner."""
        turns = (*self.lane_turns, self.runner_turn)
        for turn in turns:
            turn.take()
        yield
        event = self.streams.event(timing=False)
        event.record(self.streams.current())
        for turn in turns:
            turn.give(event)

    def groups(self, layer: int, lane: int, *, slots: bool, likely: int) -> Groups:
        """A lane's groups of home experts, or of replicas."""
        key = (layer, lane, slots, likely)
        if key not in self._groups:
            self._groups[key] = self._make_groups(layer, lane, slots=slots, likely=likely)
        return self._groups[key]

    def _make_groups(self, layer: int, lane: int, *, slots: bool, likely: int) -> Groups:
        plan, home, B = self.lanes[lane].plan, self.store.home_rows, self.cfg.slots
        first, last = (home, home + B) if slots else (0, home)
        row = home + lane * B if slots else 0
        stacked = self.store.layer(layer).stacked
        return Groups(
            start_G=plan.group_start_G[first:last],
            count_G=plan.group_count_G[first:last],
            tensors={name: t[row : row + last - first] for name, t in stacked.items()},
            rows=self.capacity,
            likely=likely,
            busy=plan.fetches_1,
        )

    def may_look(self) -> bool:
        return self._debug and not self.streams.capturing()

    def trouble(self) -> Exception | None:
        error = self.transport.trouble()
        if error is not None:
            return error
        if not self._said.any():
            return None
        said = int(np.bitwise_or.reduce(self._said))
        if said & BAD_EXPERT:
            return InputError(
                explain(
                    "an earlier step had expert ids out of range; those routes were dropped",
                    where=f"topk_ids_TK, rank {self.rank}",
                    expected=f"ids < {self.cfg.num_experts} (below zero: not routed)",
                    fix="EVENEP_DEBUG=1 checks ids before anything is queued",
                )
            )
        if said & HEADERS_DIFFER:
            return AgreementError(
                explain(
                    "ranks disagreed on the layer, epoch, weights or policy of an earlier step",
                    where=f"rank {self.rank}",
                    fix="make the same calls in the same order on every rank",
                )
            )
        return None

    def forget(self, layer: int) -> None:
        self._empty_slots(layer)

    def halt(self) -> None:
        """Streams run dry in the transport's own reset."""

    def restart(self) -> None:
        self.streams.synchronize()
        self.store.forget()
        self._empty_slots()
        self.status.zero_()
        for lane in self.lanes:
            lane.routes.status.zero_()
            if self.poison:
                lane.poison()
        self.streams.synchronize()

    def synchronize(self) -> None:
        self.streams.synchronize()  # steps may have been queued on any stream
        self.transport.settled()

    def close(self) -> None:
        self.streams.synchronize()
        for name in ("store", "lanes", "runner", "planner", "residency", "_groups"):
            delattr(self, name)

    # ---- inside

    def _require_same_layout(self) -> None:
        """Replicas are plain copies of bytes: every rank must keep them alike. Collective.

        ``runner='auto'`` looks at this rank's GPU and Triton, which no peer can see (C9).
        """
        specs = [(s.name, tuple(s.shape), str(s.dtype)) for s in self.runner.specs()]
        text = repr([self.runner.name, specs]).encode()
        mine = int(hashlib.sha256(text).hexdigest()[:12], 16)
        said = self.transport.all_gather(torch.tensor([mine]), Tag("construct"), 0).flatten()
        if (said != said[0]).any():
            raise AgreementError(
                explain(
                    "ranks picked different runners",
                    where=f"rank {self.rank}",
                    got=f"'{self.runner.name}' here",
                    fix="configure runner='triton', which runs everywhere",
                )
            )

    def _require_room(self, policy: str) -> None:
        """Refuse a policy that may put more on a rank than was allocated.

        A GPU can't look at a plan before it is carried out, so what some steps of the policy would
        need is refused for all of them.
        """
        if policy in self._roomy:
            return
        cfg, home_rows = self.cfg, self.placement.max_experts_per_rank
        needed = cap_routes(cfg, home_rows, policy)
        given = cap_routes(cfg, home_rows)
        slots = home_rows if policy == "exact" and cfg.ranks > 1 else 0
        if needed > given or cfg.slots < slots:
            raise PlanError(
                explain(
                    f"policy '{policy}' may need more than this engine has",
                    where="Engine.begin",
                    expected=f"{needed} routes and {slots} slots on a rank",
                    got=f"{given} routes and {cfg.slots} slots, for policy '{cfg.policy}'",
                    fix=f"configure policy='{policy}' or 'auto', with slots for a home group",
                )
            )
        self._roomy.add(policy)

    def _slot_addresses(self, layer: int, lane: int) -> Tensor:
        """Where slot 0 of a lane is in each tensor, int64 ``[X]``."""
        row = self.store.slot_row(lane, 0)
        starts = [
            w.local.data_ptr() + row * (w.local[0].numel() * w.local.element_size())
            for w in self.store.windows(layer).values()
        ]
        return torch.tensor(starts, dtype=torch.int64, device=self.device)

    def _empty_slots(self, layer: int | None = None) -> None:
        for number in self.store.layers if layer is None else (layer,):
            for lane in range(self.cfg.in_flight):
                held = self.residency.get((number, lane))
                if held is None:
                    self.residency[number, lane] = self.planner.residency()
                else:
                    held.forget()  # in place: captured graphs know its address
