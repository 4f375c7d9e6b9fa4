"""One step on a GPU, verb by verb (the order of kernels is in ``machine``).

T tokens, K top-k, H row width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import LeaseError, StateError, explain
from ..kernels.combine import combine_compact, combine_exact, fold
from ..kernels.count import check_headers, count_routes, push_counts
from ..kernels.dispatch import dispatch
from ..kernels.fetch import FETCH_PROGRAMS, fetch_slots
from ..kernels.positions import place_routes
from ..kernels.settle import settle
from ..machine import Opening, Work
from ..observe import StepRecord
from ..plan import Plan
from ..plan.policies import POLICIES
from ..transport import Tag
from .warm_up import likely_rows

if TYPE_CHECKING:
    from .machine import DeviceMachine


class DeviceWork(Work):
    """A step on a GPU; made by ``DeviceMachine.open``."""

    def __init__(self, machine: DeviceMachine, opening: Opening) -> None:
        self._machine, self._opening = machine, opening
        self._memory = machine.lanes[opening.lane]
        T = opening.ids_TK.shape[0]
        self._dest_TK, self._row_TK = self._memory.dest_SK[:T], self._memory.row_SK[:T]
        self.timeline = machine.timelines.start()
        self._fetching = machine.cfg.slots > 0 and opening.policy != "static"
        self._record: StepRecord | None = None
        self._stats = machine.landing_row()
        self._ended = False

    # ---- counts and plan

    def count(self) -> None:
        """Count this rank's routes and tell every rank."""
        self._machine.lane_turns[self._opening.lane].take()
        machine, opening, memory = self._machine, self._opening, self._memory
        E = machine.cfg.num_experts
        ids_TK = opening.ids_TK.contiguous()
        count_routes(ids_TK, memory.routes, E)
        header = (
            opening.layer,
            opening.epoch,
            machine.store.version(opening.layer),
            list(POLICIES).index(opening.policy),
            ids_TK.shape[0],
        )
        push_counts(memory.routes, header, memory.counts_R, machine.rank, E)

    def make_plan(self) -> None:
        """From everyone's counts to where each of this rank's routes goes."""
        machine, opening, memory = self._machine, self._opening, self._memory
        check_headers(memory.counts.local, memory.routes.status)
        residency = machine.residency[opening.layer, opening.lane]
        machine.planner.plan(memory.counts_RE, residency, opening.policy, memory.plan)
        place_routes(
            opening.ids_TK.contiguous(),
            memory.routes,
            memory.plan.take_ER,
            memory.plan.row_ER,
            machine.rank,
            self._dest_TK,
            self._row_TK,
            machine.capacity,
        )
        self._stats.copy_(memory.plan.stats, non_blocking=True)
        self.timeline.mark("plan")

    @property
    def plan(self) -> Plan:
        self._refuse_capture("Step.plan")
        if self._ended:
            raise LeaseError(
                explain("the lane's plan is another step's by now", where="Step.plan", got="ENDED")
            )
        held = self._machine.residency[self._opening.layer, self._opening.lane]
        return self._machine.planner.snapshot(self._memory.plan, self._memory.counts_RE, held)

    # ---- the verbs

    def dispatch(self, x_TH: Tensor) -> None:
        memory = self._memory
        dispatch(
            x_TH.contiguous(),
            self._opening.weights_TK.contiguous() if self._experts_weigh else None,
            self._dest_TK,
            self._row_TK,
            memory.rows_R,
            memory.chain_R,
            memory.weight_R,
        )

    def fetch(self) -> None:
        """Queue the fetch on its own stream, behind the plan."""
        if not self._fetching:
            return
        machine, plan = self._machine, self._memory.plan
        layer, lane, stream = self._opening.layer, self._opening.lane, machine.fetch_stream
        stream.wait_event(self.timeline.event("plan"))
        with machine.streams.use(stream):
            fetch_slots(
                plan.slot_RB[machine.rank],
                plan.moved_RB[machine.rank],
                machine.home_E,
                machine.local_E,
                machine.sources_XR[layer],
                machine.row_bytes_X,
                machine.slots_X[layer, lane],
                FETCH_PROGRAMS,
            )
            self.timeline.mark("fetched")

    def compute(self) -> None:
        self.gate("dispatch")
        self.timeline.mark("arrived")
        self.settle()
        self.run_groups()

    def settle(self) -> None:
        """Make the rows that arrived what the experts expect."""
        memory, plan = self._memory, self._memory.plan
        settle(
            memory.rows.local,
            memory.weight.local if self._experts_weigh else None,
            memory.chain.local,
            plan.group_start_G,
            plan.group_count_G,
            plan.rows_1,
            self._machine.cfg.top_k,
        )

    def run_groups(self) -> None:
        """Home groups beside the fetch, then slot groups once their bytes are here."""
        turn = self._machine.runner_turn
        turn.take()
        self._run(slots=False)
        self.timeline.mark("home")
        if self._fetching:
            self._machine.streams.current().wait_event(self.timeline.event("fetched"))
            self._run(slots=True)
        self.timeline.mark("computed")
        turn.give(self.timeline.event("computed"))

    def combine(self, out: Tensor | None) -> Tensor:
        self.fold()
        self.gate("combine")
        y_TH = self.collect(out)
        self.timeline.mark("combined")
        self._machine.lane_turns[self._opening.lane].give(self.timeline.event("combined"))
        machine, lane = self._machine, self._opening.lane
        said = self._memory.routes.status[:1]
        machine.status[lane : lane + 1].copy_(said, non_blocking=True)
        return y_TH

    def fold(self) -> None:
        """``compact``: sum a token's routes on this rank into one row."""
        memory, plan, cfg = self._memory, self._memory.plan, self._machine.cfg
        if cfg.reduction == "compact":
            fold(
                memory.rows.local,
                memory.weight.local if cfg.route_weight == "output" else None,
                memory.chain.local,
                plan.group_start_G,
                plan.group_count_G,
                plan.rows_1,
                cfg.top_k,
            )

    def collect(self, out: Tensor | None) -> Tensor:
        """Bring this rank's tokens home."""
        machine, memory, cfg = self._machine, self._memory, self._machine.cfg
        T, H = self._opening.ids_TK.shape[0], cfg.hidden_size
        y_TH = (
            torch.empty(T, H, dtype=torch.bfloat16, device=machine.device) if out is None else out
        )
        if cfg.reduction == "compact":
            combine_compact(self._dest_TK, self._row_TK, memory.rows_R, y_TH)
        else:
            weighted = cfg.route_weight == "output"
            weights_TK = self._opening.weights_TK.contiguous() if weighted else None
            combine_exact(self._dest_TK, self._row_TK, weights_TK, memory.rows_R, y_TH)
        return y_TH

    def rows(self) -> Tensor:
        """Waits for the plan: only it knows how many rows there are."""
        self._refuse_capture("Step.rows")
        return self._memory.rows.local[: int(self._memory.plan.rows_1)]

    def end(self) -> None:
        self._ended = True
        # Thousands of records are kept; they must not keep the router's outputs.
        nothing = self._opening.ids_TK[:0].clone(), self._opening.weights_TK[:0].clone()
        self._opening = replace(self._opening, ids_TK=nothing[0], weights_TK=nothing[1])
        if self._machine.poison:
            self.gate("leave")  # peers may still be reading
            self._memory.poison()

    # ---- what it did

    def record(self) -> StepRecord:
        if self._record is None or not self.timeline.timing:  # a replay has a new one each time
            self._refuse_capture("Step.record")
            machine, opening = self._machine, self._opening
            self.timeline.wait()
            stats = machine.planner.describe(self._stats, opening.policy)
            self._record = StepRecord(
                layer=opening.layer,
                epoch=opening.epoch,
                tokens=self._dest_TK.shape[0],
                **stats,
            )
            self.timeline.fill(self._record)
        return self._record

    # ---- inside

    @property
    def _experts_weigh(self) -> bool:
        """Route weights are needed where the experts run."""
        cfg = self._machine.cfg
        return cfg.route_weight != "output" or cfg.reduction == "compact"

    def gate(self, phase: str) -> None:
        """Queue a wait for every rank."""
        tag = Tag(phase, self._opening.layer, self._opening.epoch)
        self._machine.transport.gate(tag, self._opening.lane)

    def _run(self, *, slots: bool) -> None:
        machine, cfg = self._machine, self._machine.cfg
        likely = likely_rows(cfg, self._opening.ids_TK.shape[0])
        groups = machine.groups(self._opening.layer, self._opening.lane, slots=slots, likely=likely)
        weight_N = self._memory.weight.local if cfg.route_weight != "output" else None
        sms = machine.sms_beside_fetch if self._fetching and not slots else None
        machine.runner.run(self._memory.rows.local, weight_N, groups, sms)

    def _refuse_capture(self, what: str) -> None:
        if self._machine.streams.capturing():
            raise StateError(
                explain(
                    "it waits for the GPU, which a graph that is being captured can't",
                    where=what,
                    fix="ask before the capture or after a replay",
                )
            )
