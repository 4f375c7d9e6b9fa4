"""What carries out an engine's steps: the host's own threads, or work queued on a GPU.

The engine keeps what both share (checks, leases, order, poison); a machine owns the transport's
windows: weights, slots, receive buffers. A ``Work`` is one step under way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from .config import EPConfig
from .experts.choice import RunnerChoice
from .observe import StepRecord
from .plan import Hardware, Placement, Plan
from .settings import Settings
from .transport import Transport
from .weights.source import ExpertWeights, Progress
from .weights.store import ExpertStore

RECORDS = 4096
"""Steps an engine remembers."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Setup:
    """What a machine is built from; equal on every rank but for the transport's own rank."""

    cfg: EPConfig
    placement: Placement
    transport: Transport
    experts: ExpertWeights
    hardware: Hardware | None
    settings: Settings
    progress: Progress | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Opening:
    """A step about to begin.

    Attributes:
        layer, lane, epoch: which step, on which lane's buffers.
        policy: asked for.
        ids_TK, weights_TK: the router's output, checked.
    """

    layer: int
    lane: int
    epoch: int
    policy: str
    ids_TK: Tensor
    weights_TK: Tensor


class Work(ABC):
    """One step under way; the verbs come in order, each once."""

    @abstractmethod
    def record(self) -> StepRecord:
        """What the step did so far. On a GPU this waits for it."""

    def planned(self, seconds: float) -> None:  # noqa: B027
        """How long ``Machine.open`` took on the host."""

    @property
    @abstractmethod
    def plan(self) -> Plan:
        """The step's plan. On a GPU this waits for the plan and copies it."""

    @abstractmethod
    def dispatch(self, x_TH: Tensor) -> None:
        """Send this rank's rows to their experts' ranks."""

    @abstractmethod
    def fetch(self) -> None:
        """Start moving the replicas' bytes."""

    @abstractmethod
    def compute(self) -> None:
        """Run this rank's experts on what arrived."""

    @abstractmethod
    def combine(self, out: Tensor | None) -> Tensor:
        """Bring the outputs home, summed; BF16 ``[T, H]``, in ``out`` if it is given."""

    @abstractmethod
    def rows(self) -> Tensor:
        """This rank's leased rows, BF16 ``[rows, H]``, between ``compute`` and ``combine``."""

    @abstractmethod
    def end(self) -> None:
        """The step is over, well or not: let its rows go."""


class Machine(ABC):
    """Carries out the steps of one engine. Construction is collective.

    Attributes:
        store: this rank's experts and slots.
    """

    store: ExpertStore

    @property
    @abstractmethod
    def runner_choice(self) -> RunnerChoice:
        """Which runner computes the experts, and why."""

    @property
    @abstractmethod
    def hardware(self) -> Hardware | None:
        """Cost constants in use; None until measured."""

    @abstractmethod
    def open(self, opening: Opening) -> Work:
        """Exchange counts and plan. Collective.

        Raises:
            PlanError: the same on every rank, before anything was queued.
        """

    @abstractmethod
    def forget(self, layer: int) -> None:
        """The layer's weights changed: replicas of the old ones are void."""

    def may_look(self) -> bool:
        """Whether values of a step's inputs may be looked at, which waits for them on a GPU."""
        return True

    def trouble(self) -> Exception | None:
        """What went wrong with work queued earlier, if that is known by now."""
        return None

    def replaying(self) -> AbstractContextManager[None]:
        """Around a replay of captured steps, which may use all of the machine's memory."""
        return nullcontext()

    @abstractmethod
    def halt(self) -> None:
        """Let go of what steps have under way, before the ranks meet again."""

    @abstractmethod
    def restart(self) -> None:
        """Ready for steps after a reset: slots count as empty, weights stay."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until nothing this rank queued is under way."""

    @abstractmethod
    def close(self) -> None:
        """Release threads and memory."""
