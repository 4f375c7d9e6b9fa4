"""Steps carried out by the host: plans in numpy, rows moved and experts run by torch on a CPU.

T tokens, K top-k, H row width.
"""

from __future__ import annotations

from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout

import torch
from torch import Tensor

from .agreement import StepHeader, exchange_counts
from .errors import TransportError, explain
from .exchange.buffers import Arrived, Buffers, settle
from .exchange.combine import fold, rows_to_pull, sum_compact, sum_exact
from .exchange.dispatch import dispatch_puts
from .exchange.routes import build_routes, count_routes
from .experts import Segment, make_runner
from .experts.choice import RunnerChoice
from .machine import Machine, Opening, Setup, Work
from .observe import StepRecord
from .plan import Hardware, Plan
from .plan.policies import POLICIES
from .planning import StepPlanner
from .transport import Tag
from .weights.lane import FetchLane
from .weights.store import ExpertStore


class HostMachine(Machine):
    """One rank on a CPU."""

    def __init__(self, setup: Setup) -> None:
        self.cfg, self.transport = setup.cfg, setup.transport
        self.rank, self.poison = setup.transport.rank, setup.settings.poison
        self.runner = make_runner(setup.cfg)
        self._runner_name = self.runner.name
        self.store = ExpertStore(setup.cfg, setup.placement, setup.transport, setup.experts.layers)
        self.buffers = Buffers.make(setup.cfg, self.store.home_rows, setup.transport)
        if self.poison:
            for buffers in self.buffers:
                buffers.poison()
        for layer in setup.experts.layers:
            self.store.load(layer, setup.experts, setup.progress)
        self._planner = StepPlanner(
            setup.cfg,
            setup.placement,
            setup.transport,
            self.store,
            self.runner,
            setup.hardware,
            debug=setup.settings.debug,
        )
        self.fetch_lane = FetchLane()

    @property
    def runner_choice(self) -> RunnerChoice:
        why = "the fast one on a CPU" if self.cfg.runner == "auto" else "asked for"
        return RunnerChoice(self._runner_name, why)

    @property
    def hardware(self) -> Hardware | None:
        return self._planner.hardware

    def open(self, opening: Opening) -> Work:
        header = StepHeader(
            layer=opening.layer,
            epoch=opening.epoch,
            lane=opening.lane,
            weight_version=self.store.version(opening.layer),
            policy=list(POLICIES).index(opening.policy),
            tokens=opening.ids_TK.shape[0],
        )
        counts_E = count_routes(opening.ids_TK, self.cfg.num_experts)
        counts_RE = exchange_counts(self.transport, header, counts_E)
        return HostWork(self, opening, self._planner.plan(counts_RE, header, opening.policy))

    def forget(self, layer: int) -> None:
        self.store.forget(layer)
        self._planner.forget(layer)

    def halt(self) -> None:
        self.fetch_lane.close()

    def restart(self) -> None:
        self.fetch_lane = FetchLane()
        self.store.forget()
        self._planner.forget()

    def synchronize(self) -> None:
        """Nothing outlives a verb here."""

    def close(self) -> None:
        self.fetch_lane.close()
        del self.store, self.buffers, self.runner, self._planner


class HostWork(Work):
    """A step on a CPU; made by ``HostMachine.open``."""

    def __init__(self, machine: HostMachine, opening: Opening, plan: Plan) -> None:
        self._machine, self._opening, self._plan = machine, opening, plan
        self._buffers = machine.buffers[opening.lane]
        self._segments = plan.layout.segments[machine.rank]
        self._fetch: Future[float] | None = None
        self._arrived: Arrived | None = None
        self._record = StepRecord.of(
            plan,
            machine.rank,
            layer=opening.layer,
            epoch=opening.epoch,
            tokens=opening.ids_TK.shape[0],
            policy=opening.policy,
        )

    def record(self) -> StepRecord:
        return self._record

    def planned(self, seconds: float) -> None:
        self._record.stage_s["plan"] = seconds

    @property
    def plan(self) -> Plan:
        return self._plan

    # ---- the verbs

    def dispatch(self, x_TH: Tensor) -> None:
        machine, opening = self._machine, self._opening
        with self._record.clock("dispatch"):
            runs = self._plan.runs(machine.rank)
            self._routes = build_routes(opening.ids_TK, runs, machine.cfg.ranks)
            weights_TK = opening.weights_TK if self._experts_weigh else None
            puts = dispatch_puts(self._buffers, self._routes, x_TH, weights_TK)
            machine.transport.push(puts, self._tag("dispatch"), opening.lane)

    def fetch(self) -> None:
        """Queue the replicas whose bytes have to move; doesn't wait for them."""
        machine, layer, lane = self._machine, self._opening.layer, self._opening.lane
        fetches, tag, transport = self._plan.fetches, self._tag("fetch"), machine.transport
        with self._record.clock("fetch"):
            machine.store.begin_fetch(layer, lane, fetches, self._plan.residency)
            if fetches:
                transfers = machine.store.transfers(layer, lane, fetches)
                self._fetch = machine.fetch_lane.submit(
                    lambda: transport.fetch(transfers, tag, lane)
                )

    def compute(self) -> None:
        """Wait for the rows, run home segments, wait for the replicas, run slot segments."""
        machine, home_rows = self._machine, self._machine.store.home_rows
        with self._record.clock("dispatch"):
            machine.transport.arrive(self._tag("dispatch"), self._opening.lane)
            self._arrived = settle(self._buffers, self._segments)
        segments = self._local_segments()
        with self._record.clock("compute"):
            machine.runner.begin_step(self._opening.layer)
            self._run([s for s in segments if s.weight_row < home_rows])
        with self._record.clock("fetch"):
            self._await_fetch()
            self._require_slots()
        with self._record.clock("compute"):
            self._run([s for s in segments if s.weight_row >= home_rows])

    def combine(self, out: Tensor | None) -> Tensor:
        y_TH = self._combine()
        return y_TH if out is None else out.copy_(y_TH)

    def _combine(self) -> Tensor:
        machine, cfg, routes = self._machine, self._machine.cfg, self._routes
        assert self._arrived is not None
        T, K, H = self._opening.ids_TK.shape[0], cfg.top_k, cfg.hidden_size
        on_output = cfg.route_weight == "output"
        with self._record.clock("combine"):
            if cfg.reduction == "compact":
                fold(self._arrived, weighted=on_output)
            wanted = rows_to_pull(routes, cfg.reduction)
            got = machine.transport.pull(
                self._buffers.rows, wanted, self._tag("combine"), self._opening.lane
            )
            if cfg.reduction == "compact":
                return sum_compact(routes, got, T, H)
            weights_TK = self._opening.weights_TK if on_output else None
            return sum_exact(routes, got, weights_TK, T, K, H)

    def rows(self) -> Tensor:
        assert self._arrived is not None
        return self._arrived.rows_NH

    def end(self) -> None:
        machine, arrived = self._machine, self._arrived
        self._arrived = None
        del self._routes  # the step's record keeps this object for a long time
        if machine.poison and arrived is not None:
            # Peers may still be pulling: only this debug mode needs to know when they are done.
            nothing = torch.zeros(0, dtype=torch.int64)
            machine.transport.all_gather(nothing, self._tag("combine"), self._opening.lane)
            self._buffers.poison(self._segments.rows)

    # ---- inside

    @property
    def _experts_weigh(self) -> bool:
        """Route weights are needed where the experts run."""
        cfg = self._machine.cfg
        return cfg.route_weight != "output" or cfg.reduction == "compact"

    def _tag(self, phase: str) -> Tag:
        return Tag(phase, self._opening.layer, self._opening.epoch)

    def _local_segments(self) -> list[Segment]:
        store, seg, slots = self._machine.store, self._segments, self._machine.cfg.slots
        columns = (seg.expert_G, seg.weight_row_G, seg.start_G, seg.count_G)
        made = []
        for expert, row, start, count in zip(*(c.tolist() for c in columns), strict=True):
            if row >= store.home_rows:
                row += self._opening.lane * slots  # each lane has slots of its own
            made.append(Segment(store.key(self._opening.layer, expert), row, start, count))
        return made

    def _run(self, segments: list[Segment]) -> None:
        assert self._arrived is not None
        machine = self._machine
        weight_N = self._arrived.weight_N if machine.cfg.route_weight != "output" else None
        layer = machine.store.layer(self._opening.layer)
        machine.runner.run(self._arrived.rows_NH, weight_N, segments, layer)

    def _await_fetch(self) -> None:
        if self._fetch is None:
            return
        machine, opening = self._machine, self._opening
        # The transport has the deadline and knows whom to name; this one is for its thread.
        patience_s = 2 * machine.cfg.timeout_s + 1
        try:
            self._record.fetch_busy_s = self._fetch.result(timeout=patience_s)
        except FutureTimeout as error:
            raise TransportError(
                explain(
                    "the fetch lane did not answer",
                    where=f"rank {machine.rank}, layer {opening.layer}, epoch {opening.epoch}",
                    expected=f"replicas or a peer error within {patience_s:g} s",
                )
            ) from error
        machine.store.end_fetch(opening.layer, opening.lane, self._plan.fetches)

    def _require_slots(self) -> None:
        experts_B = self._plan.slot_experts[self._machine.rank].tolist()
        for slot, expert in enumerate(experts_B):
            if expert >= 0:
                self._machine.store.require_slot(
                    self._opening.layer, self._opening.lane, slot, expert
                )
