"""One step of one layer: a lease on a lane's buffers, walked through its states.

    PLANNED --dispatch--> DISPATCHED --fetch--> FETCHED --compute--> COMPUTED --combine--> (idle)

``dispatch`` writes rows to peers and ``fetch`` queues replicas on the fetch lane; neither waits.
``compute`` waits for the rows of this step, runs home segments, waits for the replicas, runs slot
segments. ``combine`` brings the outputs home and ends the lease. On a GPU all of them only queue
work. A call in the wrong state raises and queues nothing; an error after something was queued
poisons the engine.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .checks import check_out, check_rows
from .errors import LeaseError, StateError, explain
from .machine import Opening, Work
from .observe import StepRecord
from .plan import Plan

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
        state: where it stands.
    """

    def __init__(self, engine: Engine, opening: Opening, work: Work) -> None:
        self._engine, self._opening, self._work = engine, opening, work
        self.state = State.PLANNED

    @property
    def plan(self) -> Plan:
        """The step's plan, equal on every rank. On a GPU, asking for it waits for it."""
        return self._work.plan

    @property
    def record(self) -> StepRecord:
        """What the step did so far. On a GPU, asking for it waits for it."""
        return self._work.record()

    # ---- the verbs

    def dispatch(self, x_TH: Tensor) -> None:
        """Write this rank's rows to their experts' ranks. ``x_TH``: BF16 ``[T, H]``."""
        self._require(State.PLANNED, "dispatch")
        check_rows(
            self._engine.cfg, self._engine.transport.device, x_TH, self._opening.ids_TK.shape[0]
        )
        with self._doing():
            self._work.dispatch(x_TH)
        self.state = State.DISPATCHED

    def fetch(self) -> None:
        """Queue the replicas whose bytes have to move; doesn't wait for them."""
        self._require(State.DISPATCHED, "fetch")
        with self._doing():
            self._work.fetch()
        self.state = State.FETCHED

    def compute(self) -> None:
        """Run this rank's experts on the rows that arrived, in place."""
        self._require(State.FETCHED, "compute")
        with self._doing():
            self._work.compute()
        self.state = State.COMPUTED

    def combine(self, out: Tensor | None = None) -> Tensor:
        """Bring the outputs home and sum them; BF16 ``[T, H]``. Ends the lease.

        Args:
            out: write there instead of into a new tensor.
        """
        self._require(State.COMPUTED, "combine")
        if out is not None:
            check_out(self._engine.cfg, out, self._engine.transport.device, self._opening.ids_TK)
        with self._doing():
            y_TH = self._work.combine(out)
            self.state = State.ENDED
            self._work.end()
        self._engine.end_step(self._opening.lane, self._work.record)
        return y_TH

    # ---- zero-copy access

    @property
    def rows(self) -> Tensor:
        """This rank's leased rows, BF16 ``[rows, H]``, valid between ``compute`` and ``combine``.

        Raises:
            LeaseError: the step's rows are not there yet, or the lease is over.
        """
        if self.state is not State.COMPUTED:
            raise LeaseError(
                explain(
                    "the step's rows are leased from compute() to combine()",
                    where="Step.rows",
                    expected=State.COMPUTED.name,
                    got=self.state.name,
                )
            )
        return self._work.rows()

    def abandon(self) -> None:
        """The step was lost in a reset; its lane is free for another."""
        self.state = State.ENDED

    # ---- inside

    def _require(self, state: State, verb: str) -> None:
        self._engine.require_usable(verb)
        if self.state is not state:
            raise StateError(
                explain(
                    f"{verb}() in the wrong order",
                    where=f"layer {self._opening.layer}, epoch {self._opening.epoch}",
                    expected=state.name,
                    got=self.state.name,
                )
            )

    @contextlib.contextmanager
    def _doing(self) -> Iterator[None]:
        """Whatever goes wrong inside it poisons the engine."""
        try:
            with torch.no_grad():
                yield
        except BaseException as error:
            self.state = State.ENDED
            self._engine.poison(error)
            raise
