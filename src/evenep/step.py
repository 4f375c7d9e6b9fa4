"""One step of one layer: a lease on a lane's buffers, walked through its states.

    PLANNED --dispatch--> DISPATCHED --fetch--> FETCHED --compute--> COMPUTED --combine--> (idle)

``dispatch`` writes rows to peers and ``fetch`` queues replicas on the fetch lane; neither waits.
``compute`` waits for the rows of this step, runs home segments, waits for the replicas, runs slot
segments. ``combine`` brings the outputs home and ends the lease. A call in the wrong state raises
and queues nothing; an error after something was queued poisons the engine.
"""

from __future__ import annotations

import contextlib
import enum
import time
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checks import check_rows
from .errors import LeaseError, StateError, TransportError, explain
from .exchange.buffers import Arrived, settle
from .exchange.combine import fold, rows_to_pull, sum_compact, sum_exact
from .exchange.dispatch import dispatch_puts
from .exchange.routes import build_routes
from .experts import Segment
from .observe import StepRecord
from .plan import Plan
from .transport import Tag

if TYPE_CHECKING:
    from .engine import Engine


class State(enum.Enum):
    """Where a step stands."""

    PLANNED = "PLANNED"
    DISPATCHED = "DISPATCHED"
    FETCHED = "FETCHED"
    COMPUTED = "COMPUTED"
    ENDED = "ENDED"


class Step:
    """A step in flight; made by ``Engine.begin``.

    Attributes:
        plan: the step's plan, equal on every rank.
        state: where it stands.
        record: what it did so far.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        *,
        layer: int,
        lane: int,
        epoch: int,
        ids_TK: Tensor,
        weights_TK: Tensor,
        record: StepRecord,
    ) -> None:
        self._engine, self.plan, self.record = engine, plan, record
        self._layer, self._lane, self._epoch = layer, lane, epoch
        self._ids_TK, self._weights_TK = ids_TK, weights_TK
        self.state = State.PLANNED
        self._buffers = engine.buffers[lane]
        self._segments = plan.layout.segments[engine.group.rank]
        self._fetch: Future[float] | None = None
        self._arrived: Arrived | None = None

    # ---- the verbs

    def dispatch(self, x_TH: Tensor) -> None:
        """Write this rank's rows to their experts' ranks. ``x_TH``: BF16 ``[T, H]``."""
        self._require(State.PLANNED, "dispatch")
        check_rows(self._engine.cfg, x_TH, self._ids_TK.shape[0])
        with self._doing("dispatch"), torch.no_grad():
            runs = self.plan.runs(self._engine.group.rank)
            self._routes = build_routes(self._ids_TK, runs, self._engine.cfg.ranks)
            weights_TK = self._weights_TK if self._experts_weigh else None
            puts = dispatch_puts(self._buffers, self._routes, x_TH, weights_TK)
            self._engine.transport.push(puts, self._tag("dispatch"), self._lane)
        self.state = State.DISPATCHED

    @torch.no_grad()
    def fetch(self) -> None:
        """Queue the replicas whose bytes have to move; doesn't wait for them."""
        self._require(State.DISPATCHED, "fetch")
        store, transport = self._engine.store, self._engine.transport
        fetches, tag, lane = self.plan.fetches, self._tag("fetch"), self._lane
        with self._doing("fetch"):
            store.begin_fetch(self._layer, self._lane, fetches, self.plan.residency)
            if fetches:
                transfers = store.transfers(self._layer, self._lane, fetches)
                self._fetch = self._engine.fetch_lane.submit(
                    lambda: transport.fetch(transfers, tag, lane)
                )
        self.state = State.FETCHED

    @torch.no_grad()
    def compute(self) -> None:
        """Run this rank's experts on the rows that arrived, in place."""
        self._require(State.FETCHED, "compute")
        engine, home_rows = self._engine, self._engine.store.home_rows
        with self._doing("dispatch"):
            engine.transport.arrive(self._tag("dispatch"), self._lane)
            self._arrived = settle(self._buffers, self._segments)
        segments = self._local_segments()
        with self._doing("compute"):
            engine.runner.begin_step(self._layer)
            self._run([s for s in segments if s.weight_row < home_rows])
        with self._doing("fetch"):
            self._await_fetch()
            self._require_slots()
        with self._doing("compute"):
            self._run([s for s in segments if s.weight_row >= home_rows])
        self.state = State.COMPUTED

    @torch.no_grad()
    def combine(self) -> Tensor:
        """Bring the outputs home and sum them; BF16 ``[T, H]``. Ends the lease."""
        self._require(State.COMPUTED, "combine")
        engine, cfg, routes = self._engine, self._engine.cfg, self._routes
        assert self._arrived is not None
        T, K, H = self._ids_TK.shape[0], cfg.top_k, cfg.hidden_size
        on_output = cfg.route_weight == "output"
        with self._doing("combine"):
            if cfg.reduction == "compact":
                fold(self._arrived, weighted=on_output)
            wanted = rows_to_pull(routes, cfg.reduction)
            got = engine.transport.pull(
                self._buffers.rows, wanted, self._tag("combine"), self._lane
            )
            if cfg.reduction == "compact":
                y_TH = sum_compact(routes, got, T, H)
            else:
                y_TH = sum_exact(routes, got, self._weights_TK if on_output else None, T, K, H)
        self._end()
        return y_TH

    # ---- zero-copy access

    @property
    def rows(self) -> Tensor:
        """This rank's leased rows, BF16 ``[rows, H]``, valid between ``compute`` and ``combine``.

        Raises:
            LeaseError: the step's rows are not there yet, or the lease is over.
        """
        if self.state is not State.COMPUTED or self._arrived is None:
            raise LeaseError(
                explain(
                    "the step's rows are leased from compute() to combine()",
                    where="Step.rows",
                    expected=State.COMPUTED.name,
                    got=self.state.name,
                )
            )
        return self._arrived.rows_NH

    def abandon(self) -> None:
        """The step was lost in a reset; its lane is free for another."""
        self.state = State.ENDED
        self._arrived = None

    # ---- inside

    @property
    def _experts_weigh(self) -> bool:
        """Route weights are needed where the experts run."""
        cfg = self._engine.cfg
        return cfg.route_weight != "output" or cfg.reduction == "compact"

    def _tag(self, phase: str) -> Tag:
        return Tag(phase, self._layer, self._epoch)

    def _require(self, state: State, verb: str) -> None:
        self._engine.require_usable(verb)
        if self.state is not state:
            raise StateError(
                explain(
                    f"{verb}() in the wrong order",
                    where=f"layer {self._layer}, epoch {self._epoch}",
                    expected=state.name,
                    got=self.state.name,
                )
            )

    @contextlib.contextmanager
    def _doing(self, stage: str) -> Iterator[None]:
        """Time a stage; whatever goes wrong inside it poisons the engine."""
        start = time.perf_counter()
        try:
            yield
        except BaseException as error:
            self.state = State.ENDED
            self._engine.poison(error)
            raise
        self.record.stage_s[stage] += time.perf_counter() - start

    def _local_segments(self) -> list[Segment]:
        store, seg, slots = self._engine.store, self._segments, self._engine.cfg.slots
        columns = (seg.expert_G, seg.weight_row_G, seg.start_G, seg.count_G)
        made = []
        for expert, row, start, count in zip(*(c.tolist() for c in columns), strict=True):
            if row >= store.home_rows:
                row += self._lane * slots  # each lane has slots of its own
            made.append(Segment(store.key(self._layer, expert), row, start, count))
        return made

    def _run(self, segments: list[Segment]) -> None:
        assert self._arrived is not None
        weight_N = self._arrived.weight_N if self._engine.cfg.route_weight != "output" else None
        layer = self._engine.store.layer(self._layer)
        self._engine.runner.run(self._arrived.rows_NH, weight_N, segments, layer)

    def _await_fetch(self) -> None:
        if self._fetch is None:
            return
        engine = self._engine
        # The transport has the deadline and knows whom to name; this one is for its thread.
        patience_s = 2 * engine.cfg.timeout_s + 1
        try:
            self.record.fetch_busy_s = self._fetch.result(timeout=patience_s)
        except FutureTimeout as error:
            raise TransportError(
                explain(
                    "the fetch lane did not answer",
                    where=f"rank {engine.group.rank}, layer {self._layer}, epoch {self._epoch}",
                    expected=f"replicas or a peer error within {patience_s:g} s",
                )
            ) from error
        engine.store.end_fetch(self._layer, self._lane, self.plan.fetches)

    def _require_slots(self) -> None:
        experts_B = self.plan.slot_experts[self._engine.group.rank].tolist()
        for slot, expert in enumerate(experts_B):
            if expert >= 0:
                self._engine.store.require_slot(self._layer, self._lane, slot, expert)

    def _end(self) -> None:
        self.state = State.ENDED
        self._arrived = None
        self._engine.end_step(self, self._lane, self._segments.rows)
